"""Weights over real gloo ranks: FSDP2 on 1, 2 and 4 ranks to 1 and 2 receivers, bit for bit; and what happens
when one side is wrong, or goes away.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rondo.core.errors import WeightSyncError
from rondo.models.loading import build_model
from rondo.training import Engine
from rondo.weights.checksum import checksum
from rondo.weights.exchange import SendReport, Transfer, piece_of, receive, send
from rondo.weights.layout import Layout, Parameter
from rondo.weights.plan import plan_transfer
from rondo.weights.sync import SyncReport
from tests.ranks import run_ranks
from tests.training.helpers import source, tiny_engine
from tests.weights.sinks import Keeping

BUCKETS = (3000, 1 << 20)
PATIENCE = 120.0  # seconds, with a peer that has ended


def _trainer(ranks: int, world: int, name: str = "qwen3") -> Engine | None:
    """An engine on the first `ranks` ranks, with one frozen parameter; None elsewhere."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() >= ranks:
        return None
    engine = tiny_engine(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)), source(name))
    next(iter(engine.backend.by_name.values())).requires_grad_(False)
    return engine


def _layout(engine: Engine | None, dtype: str | None) -> Layout:
    """As the controller hands it to the receivers."""
    box = [engine.parameters().layout(dtype) if dist.get_rank() == 0 and engine is not None else None]
    dist.broadcast_object_list(box, 0)
    assert box[0] is not None
    return box[0]


def _send(engine: Engine, transfer: Transfer, version: int) -> SendReport:
    with engine.parameters().local() as shards:
        return send(transfer, version, piece_of(transfer.source, shards), "cpu")


def _transfer(
    rank: int, world: int, trainers: int, name: str, dtype: str | None
) -> list[tuple[dict[str, torch.Tensor], SyncReport] | SendReport]:
    engine = _trainer(trainers, world, name)
    layout = _layout(engine, dtype)
    out: list[Any] = []
    for version, bucket_bytes in enumerate(BUCKETS):
        transfer = Transfer(layout, tuple(range(trainers, world)), bucket_bytes, timeout_seconds=120)
        if engine is not None:
            out.append(_send(engine, transfer, version))
        else:
            sink = Keeping()
            report = receive(transfer, version, sink, "cpu")
            assert sink.version == version
            out.append((sink.tensors, report))
    return out


@pytest.mark.parametrize(
    ("trainers", "receivers", "name", "dtype"),
    [
        (1, 1, "qwen3", None),
        (2, 1, "llama", "bfloat16"),
        (2, 2, "qwen3", None),
        (4, 1, "qwen3", "bfloat16"),
        (4, 2, "qwen3", None),
    ],
)
def test_receivers_hold_the_trainers_bits(
    trainers: int, receivers: int, name: str, dtype: str | None
) -> None:
    expected = dict(build_model(source(name), torch.float32).named_parameters())
    if dtype is not None:
        expected = {n: t.to(getattr(torch, dtype)) for n, t in expected.items()}
    size = sum(t.numel() * t.element_size() for t in expected.values())
    assert ("lm_head.weight" in expected) == (name == "llama")  # tied: once
    results = run_ranks(trainers + receivers, _transfer, trainers, name, dtype)
    for sent in results[:trainers]:
        assert [report.lost for report in sent] == [{}, {}]
    for received in results[trainers:]:
        for (tensors, report), bucket_bytes in zip(received, BUCKETS, strict=True):
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[n], expected[n]) for n in expected)
            assert report.bytes_moved == report.bytes_needed == size * receivers
            assert report.rounds > 1 if bucket_bytes == 3000 else report.rounds == 1
            largest = max(t.numel() * t.element_size() for t in expected.values())
            assert report.peak_bytes <= max(bucket_bytes, largest)


def _layouts(rank: int, world: int) -> tuple[Layout, dict[str, int], dict[str, int]]:
    engine = tiny_engine(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    layout = engine.parameters().layout()
    with engine.parameters().local() as shards:
        for name, shard in shards.items():
            box = layout.held(rank, name)
            assert box is None or box.shape == tuple(shard.shape)
            assert box is not None or shard.numel() == 0
    return layout, engine.parameters().checksums(), engine.parameters().checksums("bfloat16")


@pytest.mark.slow
def test_layout_and_checksums_say_the_same_on_any_number_of_ranks() -> None:
    model = dict(build_model(source(), torch.float32).named_parameters())
    whole = {name: checksum(tensor) for name, tensor in model.items()}
    halves = {name: checksum(tensor.bfloat16()) for name, tensor in model.items()}
    for world in (1, 2, 3, 4):
        for layout, full, half in run_ranks(world, _layouts):
            assert layout.parameters == tuple(
                Parameter(name, tuple(tensor.shape), "float32") for name, tensor in model.items()
            )
            assert layout.ranks == tuple(range(world))
            assert full == whole
            assert half == halves
            everyone = Layout.replicated(layout.parameters, layout.ranks)
            assert plan_transfer(layout, everyone, 10_000).bytes_moved == (world - 1) * layout.num_bytes


def _wrong(rank: int, world: int, fault: str) -> str:
    """Rank 0 trains; 1 is the receiver with a fault; 2 is well."""
    engine = _trainer(1, world)
    transfer = Transfer(_layout(engine, None), (1, 2), 5000, timeout_seconds=120)
    name = "model.layers.0.mlp.up_proj.weight"
    if engine is not None:
        report = _send(engine, transfer, 4)
        return "; ".join(f"{peer}: {reason}" for peer, reason in report.lost.items())
    sink = Keeping(
        refuse=name if (rank, fault) == (1, "refuses") else None,
        change=name if (rank, fault) == (1, "flipped") else None,
    )
    version = 3 if (rank, fault) == (1, "version") else 4
    if (rank, fault) == (1, "plan"):
        transfer = Transfer(transfer.source, (1, 2), 6000, timeout_seconds=120)
    if rank == 1:
        with pytest.raises(WeightSyncError) as caught:
            receive(transfer, version, sink, "cpu")
        assert sink.version == -1
        return str(caught.value)
    receive(transfer, version, sink, "cpu")
    return str(sink.version)


@pytest.mark.parametrize(
    ("fault", "message", "sender"),
    [
        ("refuses", "'model.layers.0.mlp.up_proj.weight' has shape (48, 32), the model wants (7,)", ""),
        ("flipped", "commit(4): 'model.layers.0.mlp.up_proj.weight' is not what was sent", ""),
        ("version", "rank 0 starts to send version 4 by its plan, version 3 was expected", "1: it refused"),
        ("plan", "rank 0 starts to send version 4 by another plan, version 4 was expected", "1: it refused"),
    ],
)
def test_what_is_wrong_is_named_and_the_others_are_served(fault: str, message: str, sender: str) -> None:
    sent, faulty, well = run_ranks(3, _wrong, fault)
    assert message in faulty
    assert sent.startswith(sender)
    assert bool(sent) == bool(sender)
    assert well == "4"


class _Dying(Keeping):
    """Goes away in the middle: killed, or stopped so that it answers nothing."""

    def __init__(self, how: signal.Signals) -> None:
        super().__init__()
        self._how = how

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        super().receive(name, tensor)
        if len(self.tensors) == 5:
            os.kill(os.getpid(), self._how)


def _mortal(rank: int, world: int, how: signal.Signals) -> Any:
    engine = _trainer(2, world)
    transfer = Transfer(_layout(engine, None), (2, 3), 3000, timeout_seconds=PATIENCE)
    if engine is not None:
        started = time.monotonic()
        report = _send(engine, transfer, 1)
        again = Transfer(transfer.source, (2,), 3000, timeout_seconds=PATIENCE)
        second = _send(engine, again, 2)
        return report.lost, second.lost, time.monotonic() - started
    sink = _Dying(how) if rank == 3 else Keeping()
    receive(transfer, 1, sink, "cpu")
    first = sink.version
    receive(Transfer(transfer.source, (2,), 3000, timeout_seconds=PATIENCE), 2, sink, "cpu")
    return first, sink.version, len(sink.tensors)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What ranks 0, 1 and 2 returned; rank 3 answers nothing, on purpose."""
    from tests import ranks

    seen: dict[int, Any] = {}
    collect = ranks._collect

    def tolerant(processes: Any, pipes: Any, timeout: float) -> Any:
        results = collect(processes[:3], pipes[:3], timeout)
        seen.update(enumerate(results))
        return results

    monkeypatch.setattr(ranks, "_collect", tolerant)
    return seen


def test_a_receiver_that_is_killed_is_reported_and_the_other_one_served(seen: dict[int, Any]) -> None:
    run_ranks(4, _mortal, signal.SIGKILL)
    for rank in (0, 1):
        lost, second, seconds = seen[rank]
        assert list(lost) == [3]
        assert "it went away or hung while it was sent" in lost[3]
        assert second == {}
        assert seconds < PATIENCE  # its end is seen, not waited for
    assert seen[2] == (1, 2, 24)


def _hung(rank: int, world: int) -> Any:
    engine = _trainer(2, world)
    transfer = Transfer(_layout(engine, None), (2, 3), 3000, timeout_seconds=8)
    if engine is not None:
        return list(_send(engine, transfer, 1).lost.items())
    with pytest.raises(WeightSyncError) as caught:
        receive(transfer, 1, _Dying(signal.SIGSTOP) if rank == 3 else Keeping(), "cpu")
    return str(caught.value)


@pytest.mark.slow
def test_a_receiver_that_hangs_is_named_by_the_senders_first(seen: dict[int, Any]) -> None:
    """The sync ends for all: gloo closes all connections of a process in which a wait timed out."""
    run_ranks(4, _hung)
    first = [sent[0] for sent in seen.values() if isinstance(sent, list)]
    assert any(peer == 3 and "Timed out" in reason for peer, reason in first)
    assert "did not arrive from rank" in seen[2]
    assert "Timed out" not in seen[2]  # it waits longer than they do
