"""Fixtures for every test: one torch thread, a tiny Qwen3, and ranks in real processes."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: child processes inherit it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["RONDO_CACHE"] = ""  # warm starts are made where a test makes one
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
# Ray reads it once per process: one Ray with tokens and then a cluster without them would refuse each other.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks as _run_ranks

torch.set_num_threads(1)

# A shell without job control starts what it puts in the background with Ctrl-C ignored, and every process
# that a test starts and interrupts would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_qwen_config() -> Any:
    """A Qwen3Config of 2 layers, hidden 64, 4 heads over 2 key/value heads, vocabulary 128, tied, float32."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype="float32",
    )


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """`run_ranks(world, function, *args, timeout=…)`: see tests/ranks.py."""
    return _run_ranks


# The files that take longest, longest first: they begin first, so that no worker is idle at the end.
LONGEST = (
    "tests/controller",
    "tests/trainers/test_nodes.py",
    "tests/trainers/test_placement.py",
    "tests/trainers/test_split.py",
    "tests/training/test_ranks.py",
    "tests/weights/test_exchange.py",
    "tests/trainers/test_two_ranks.py",
    "tests/trainers/test_resume.py",
    "tests/trainers/test_engine_process.py",
    "tests/workers/test_replicas.py",
    "tests/trainers/test_async_engines.py",
    "tests/trainers/test_partial.py",
    "tests/rollout/test_server.py",
    "tests/cli/test_serve.py",
    "tests/trainers/test_rl.py",
    "tests/serving/test_external.py",
)


def _place(nodeid: str) -> int:
    """Of a test's file among the longest; those that are none of them come after all of them."""
    return next((i for i, path in enumerate(LONGEST) if nodeid.startswith(path)), len(LONGEST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device. Workers of xdist begin with LONGEST."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _place(item.nodeid))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, in the order of `LONGEST`; the controller's files share a Ray and so a worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = "tests/controller"
            return shared if nodeid.startswith(f"{shared}/") else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs with an empty folder as its working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
