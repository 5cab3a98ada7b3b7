"""The harness itself: results in order, a rank's own traceback, no hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.messages import full_text
from tests.ranks import RankError, run_ranks


def _sum(rank: int, world: int, factor: float) -> tuple[int, float]:
    total = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(total)
    return rank, total.item()


def _one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def _one_dies(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(1000)


def _hangs(rank: int, world: int) -> None:
    time.sleep(1000)


def test_results_in_rank_order() -> None:
    assert run_ranks(3, _sum, 2.0) == [(0, 12.0), (1, 12.0), (2, 12.0)]


def test_traceback_of_the_rank_that_raised() -> None:
    with pytest.raises(RankError, match=full_text("_one_raises")):
        run_ranks(2, _one_raises)


def test_dead_rank_is_named() -> None:
    """Its peer sleeps for longer than a test may take."""
    with pytest.raises(RankError, match=full_text("died without a word (exit code 7)")):
        run_ranks(2, _one_dies, timeout=1000.0)


def test_timeout_names_the_ranks() -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 not done after 1 s"):
        run_ranks(2, _hangs, timeout=1.0)
