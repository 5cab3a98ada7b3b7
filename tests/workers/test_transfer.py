"""The workers' ends of a transfer: which group carries it, and when that is given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rondo.weights.exchange import Transfer
from rondo.weights.layout import Layout, Parameter
from rondo.workers.rollout import RolloutWorker
from rondo.workers.transfer import ReceivesWeights, SendsWeights

LAYOUT = Layout.sharded([Parameter("w", (4, 2), "float32")], [0, 3])


def _end(kind: Any, device: str) -> Any:
    end = kind.__new__(kind)
    end.context = SimpleNamespace(device=device)
    return end


@pytest.mark.parametrize("kind", [SendsWeights, ReceivesWeights])
def test_on_a_gpu_each_transfer_has_a_group_which_ends_with_it(kind: Any) -> None:
    end, first, second = _end(kind, "cuda:1"), Transfer(LAYOUT, (5, 2), 64), Transfer(LAYOUT, (5,), 64)
    end.prepare_transfer(first)
    own = end._own
    assert own._ranks == [0, 2, 3, 5]
    assert str(own._device) == "cuda:1"
    assert own._seconds == first.timeout_seconds == 600
    assert own._name == f"rondo_weights/{first.name}"
    assert first.name != second.name
    end.prepare_transfer(second)
    assert own.broken == "another transfer was prepared"
    assert end._own._ranks == [0, 3, 5]
    assert end._own.broken == ""
    asyncio.run(end.break_transfer("rank 5 died"))
    end.close()
    assert end._own.broken == "rank 5 died"  # the first reason is the cause


def test_on_the_cpu_the_worlds_group_carries_it() -> None:
    """And nothing that is said about a rank ends it: the others are served."""
    end = _end(SendsWeights, "cpu")
    end.prepare_transfer(Transfer(LAYOUT, (5,), 64))
    assert end._own is None
    asyncio.run(end.break_transfer("rank 5 died"))
    end.close()


def test_a_rollout_worker_gives_its_group_up_when_it_closes() -> None:
    worker, closed = _end(RolloutWorker, "cuda:0"), []
    worker._agent, worker.scorer = None, None
    worker.replicas = SimpleNamespace(close=lambda: closed.append("engines"))
    worker.prepare_transfer(Transfer(LAYOUT, (5,), 64))
    worker.close()
    assert worker._own.broken == "the worker was closed"
    assert closed == ["engines"]
