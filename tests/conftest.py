"""Fixtures for every test: one torch thread, a tiny Qwen3, and ranks in real processes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: child processes inherit it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks as _run_ranks

torch.set_num_threads(1)


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
    """`run_ranks(world, function, *args, timeout=90.0)`: see tests/ranks.py."""
    return _run_ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs with an empty folder as its working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
