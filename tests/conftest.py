"""Fixtures for every test: one torch thread, a tiny Qwen3, and ranks in real processes."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: child processes inherit it
# A run without cluster.threads has one on each processor. To spin while they wait for each other is ten times
# the work of what they compute, where another test has a processor.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["RONDO_CACHE"] = ""  # warm starts are made where a test makes one
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
# Ray reads it once per process: one Ray with tokens and then a cluster without them would refuse each other.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray's workers are nice (15): beside other tests, a cluster that starts in two seconds took a hundred.
os.environ.setdefault("RAY_worker_niceness", "0")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rondo.system import forkserver
from tests import begun, process_state
from tests.ranks import run_ranks as _run_ranks

gc.disable()  # until all is collected (below): a million objects and no garbage, a quarter of the time
torch.set_num_threads(1)

# A shell without job control starts what it puts in the background with Ctrl-C ignored, nohup with SIGHUP:
# every process that a test starts and signals would inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="session", autouse=True)
def _kept_fork_servers() -> Iterator[None]:
    """What one test's processes have imported, those of the next begin with."""
    with forkserver.kept(), begun.fork_servers():
        yield


CLUSTERS_STAY = ("tests/controller/", "tests/engines/")
"""Where a cluster in this process may serve the tests of several files."""


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which file stands before which is chance: one that leaves the process otherwise than it was fails.

    Ends the process group that a file's tests have left: the next one may begin its own, and each of gloo's
    has a thread that looks a hundred times a second whether there is something to do, until garbage is
    collected.

    What the tests keep (modules, caches; a million objects of one file) is left out of later collections, of
    which every end of a cluster is one.
    """
    shared = request.node.nodeid.startswith(CLUSTERS_STAY)
    before = process_state.state()
    yield
    if not shared:
        process_state.take_back(before)
    changed = process_state.differences(before, process_state.state())
    if dist.is_initialized() and not shared:
        dist.destroy_process_group()
    gc.collect()
    if not dist.is_initialized():  # a cluster that runs here on has to find its circles at its end
        gc.freeze()
    assert shared or not changed, "\n".join([f"{request.node.nodeid} leaves behind", *changed])


# The environment of a process must not name its test: no other test could fork processes from its server.
@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Before pytest's own, behind which it is as it was."""
    os.environ["PYTEST_CURRENT_TEST"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """As before a fixture."""
    os.environ["PYTEST_CURRENT_TEST"] = ""


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Has the garbage collector look again behind the imports of all tests, and never at what they made: that
    is a million objects, a second each time that a test, the end of a cluster or pytest collects.
    """
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# What each file took when it was measured last: benchmarks/checks.py writes it.
MEASURED = Path(__file__).resolve().parent.parent / "benchmarks" / "checks.json"
TOGETHER = re.compile(r"(tests/controller)/|(tests/engines)/.*\[(vllm|sglang)\b")
"""Tests that share what takes long to start, and so a worker: a Ray; an engine of one kind."""


def _scope(nodeid: str) -> str:
    """Returns what stays on one worker: the name of a file, or what TOGETHER finds."""
    shared = TOGETHER.match(nodeid)
    return nodeid.partition("::")[0] if shared is None else " ".join(filter(None, shared.groups()))


def _seconds(fast: bool) -> dict[str, float]:
    """Returns what the tests of each scope take; fast: without the slow ones."""
    files: dict[str, float] = defaultdict(float)  # by path: the engines' are run in two environments
    for one in json.loads(MEASURED.read_text(encoding="utf-8"))["files"]:
        took = one["fast"] if fast else one["set_up"] + one["call"]
        files[one["path"]] = max(files[one["path"]], took)
    scopes: dict[str, float] = defaultdict(float)
    for path, took in files.items():
        scopes[_scope(path)] += took
    return dict(scopes)


# Tests that `.ci/run` leaves to `make test-long`: patterns of ids, with their reasons.
LONG = Path(__file__).resolve().parent / "long.txt"


def long_tests() -> list[re.Pattern[str]]:
    """Returns the patterns of LONG; a test is long whose id begins with one."""
    lines = LONG.read_text(encoding="utf-8").splitlines()
    return [re.compile(line) for line in lines if line and not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which chooses by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what LONG lists. Tests marked `gpu` are skipped where there is no CUDA device. Workers of xdist
    begin with what takes longest, and with what was never measured, so that none is idle at the end.
    """
    patterns = long_tests()
    for item in items:
        if any(pattern.match(item.nodeid) for pattern in patterns):
            item.add_marker("long")
            item.add_marker("slow")
    if "PYTEST_XDIST_WORKER" in os.environ:
        seconds = _seconds(fast="not slow" in config.getoption("markexpr"))
        items.sort(key=lambda item: -seconds.get(_scope(item.nodeid), math.inf))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` by `_scope`, in the order in which they were collected."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs with an empty folder as its working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
