"""A transfer in a group of its own: what is asked of NCCL, of a stand-in over real gloo ranks (no test has a
GPU), and that those who are left of a broken one go on in another.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rondo.core.errors import WeightSyncError
from rondo.platform.cpu import Cpu
from rondo.platform.cuda import Cuda
from rondo.weights.exchange import SendReport, Transfer, piece_of, receive, send
from rondo.weights.layout import Layout, Parameter
from rondo.weights.own_group import OwnGroup
from tests.ranks import run_ranks
from tests.weights.nccl_stand_in import StandIn
from tests.weights.sinks import Keeping
from tests.weights.test_exchange import _Dying, seen  # noqa: F401

TENSORS = {f"w{i}": torch.arange(48.0).reshape(8, 6) + 100 * i for i in range(8)}
PARAMETERS = [Parameter(name, (8, 6), "float32") for name in TENSORS]
# Ranks 0 and 1 have half of each tensor, in rounds of two tensors; ranks 2 and 3 want all of them whole.
TRANSFER = Transfer(Layout.sharded(PARAMETERS, [0, 1]), (2, 3), 400, timeout_seconds=100, name="first")


def _own(transfer: Transfer) -> OwnGroup:
    dist.ProcessGroupNCCL = StandIn  # of a build for CUDA
    Cpu.communicator = Cuda.communicator  # type: ignore[method-assign]
    return OwnGroup(
        transfer.name, (*transfer.source.ranks, *transfer.target_ranks), "cpu", transfer.timeout_seconds
    )


def _carry_out(transfer: Transfer, version: int, own: OwnGroup | None, sink: Keeping) -> SendReport | None:
    """This rank's part, whichever side it is on."""
    rank, layout = dist.get_rank(), transfer.source
    if rank in transfer.target_ranks:
        receive(transfer, version, sink, "cpu", own)
        return None
    shards = {name: whole[layout.held(rank, name).slices(_whole())] for name, whole in TENSORS.items()}  # type: ignore[union-attr]
    return send(transfer, version, piece_of(layout, shards), "cpu", own)


def _whole() -> Any:
    return TRANSFER.target.held(2, "w0")


def _twice(rank: int, world: int) -> Any:
    own, sink = _own(TRANSFER), Keeping()
    reports = [_carry_out(TRANSFER, version, own, sink) for version in (4, 5)]
    (made,) = StandIn.made
    own.abort("enough")
    own.abort("twice")
    lost = [report.lost for report in reports if report is not None]
    return lost, sink.version, sink.tensors, made.ranks, made.watchdog, made.calls


def test_one_group_carries_all_messages_of_two_syncs_in_batches() -> None:
    results = run_ranks(4, _twice)
    for rank, (lost, version, tensors, ranks, watchdog, calls) in enumerate(results):
        assert ranks == [0, 1, 2, 3]
        assert not watchdog  # it would end the process when a peer is gone
        assert calls[0] == "connect cpu"
        assert calls[-1] == "abort"
        batches = calls[1:-1]
        # start, answers, four rounds of two tensors for (or of halves from) each of two peers, checksums
        rounds = ["batch of 4"] * 4
        once = ["batch of 2", "batch of 2", *rounds, "batch of 2"]
        if rank >= 2:
            assert version == 5
            assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
        else:
            assert lost == [{}, {}]
        assert batches == 2 * once


def _mortal(rank: int, world: int) -> Any:
    own, sink = _own(TRANSFER), _Dying(signal.SIGKILL) if rank == 3 else Keeping()
    started = time.monotonic()
    try:
        report = _carry_out(TRANSFER, 1, own, sink)
        found = "arrived" if report is None else str(report.lost)
    except WeightSyncError as error:
        found = f"{error} (outage: {error.is_outage})"
    seconds = time.monotonic() - started
    calls = [call for call in StandIn.made[0].calls if call == "abort"]
    again = replace(TRANSFER, target_ranks=(2,), name="second")
    second = _carry_out(again, 1, _own(again), sink)
    word = torch.full((1,), float(rank))  # by the world's group, which nobody has aborted
    if rank == 2:
        dist.send(word, 0)
    elif rank == 0:
        dist.recv(word, 2)
    lost = second.lost if second is not None else None
    return found, seconds, calls, lost, StandIn.made[1].ranks, sink.version, sink.tensors, float(word)


def test_those_who_are_left_go_on_in_a_group_of_their_own(seen: dict[int, Any]) -> None:  # noqa: F811
    run_ranks(4, _mortal)
    for rank in (0, 1, 2):
        found, seconds, calls, lost, ranks, version, tensors, _ = seen[rank]
        assert "or another rank of the transfer, went away or hung while it was" in found
        assert seconds < 60  # PATIENCE: its end was seen
        assert calls == ["abort"]
        assert ranks == [0, 1, 2]
        if rank == 2:
            assert "version 1 did not arrive from rank" in found
            assert "(outage: True)" in found
            assert version == 1
            assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
        else:
            assert found.startswith("{2: ")
            assert ", 3: " in found
            assert lost == {}
    assert seen[0][-1] == 2.0


def _told(rank: int, world: int) -> Any:
    """Rank 3 stops. The others are told by somebody else, on a thread of its own, that it is gone."""
    StandIn.notices = False  # nor do they hear of each other's end
    own, sink = _own(TRANSFER), _Dying(signal.SIGSTOP) if rank == 3 else Keeping()
    if rank != 3:
        threading.Timer(3.0, own.abort, ["its host died"]).start()
    started = time.monotonic()
    try:
        report = _carry_out(TRANSFER, 1, own, sink)
    except WeightSyncError as error:
        return str(error), sink.version, time.monotonic() - started
    assert report is not None, "what was aborted has not arrived"
    return str(report.lost), -1, time.monotonic() - started


@pytest.mark.slow
def test_a_rank_that_nobody_hears_of_is_not_waited_for_once_somebody_says_so(
    seen: dict[int, Any],  # noqa: F811
) -> None:
    run_ranks(4, _told)
    for rank in (0, 1, 2):
        text, version, seconds = seen[rank]
        assert "its host died" in text
        assert version == -1
        assert seconds < 60


def _absent(rank: int, world: int) -> str:
    transfer = replace(TRANSFER, target_ranks=(2,), timeout_seconds=3 if rank else 1.5)
    own = _own(transfer)
    dist.barrier()
    found = ""
    if rank != 1:
        try:
            report = _carry_out(transfer, 1, own, Keeping())
            found = "" if report is None else report.lost[2]
        except WeightSyncError as error:
            found = str(error)
    dist.barrier()
    assert not StandIn.made
    return found


@pytest.mark.slow
def test_a_member_that_does_not_come_is_named() -> None:
    sender, _, receiver = run_ranks(3, _absent)
    assert "the start of a sync: ranks [1] did not come within 1.5 s" in sender
    assert "version 1 did not arrive from rank 0" in receiver
    assert "ranks [1] did not come within 3 s" in receiver


def _idle(rank: int, world: int) -> int:
    """Ranks 0 and 1 hold the same one tensor, which rank 0 sends: rank 1 has no message, and comes."""
    layout = Layout.replicated(PARAMETERS[:1], (0, 1))
    transfer = Transfer(layout, (2,), 400, timeout_seconds=100, name="idle")
    own, sink = _own(transfer), Keeping()
    if rank == 2:
        receive(transfer, 1, sink, "cpu", own)
        assert sink.version == 1
    else:
        assert send(transfer, 1, piece_of(layout, TENSORS), "cpu", own).lost == {}
    return len(StandIn.made[0].calls)


def test_a_member_without_messages_takes_part_in_connecting() -> None:
    assert run_ranks(3, _idle) == [5, 1, 5]


class _Recorder:
    """Stands in for one ProcessGroupNCCL: it is none, and moves nothing."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if name == self._fails:
                raise RuntimeError("NCCL communicator was aborted\non rank 0")
            return SimpleNamespace(wait=self.__getattr__("wait"))

        return called


@pytest.mark.parametrize(
    ("fails", "broken", "after"),
    [
        ("", "", []),
        ("send", "NCCL communicator was aborted", [("abort",)]),
        ("wait", "NCCL communicator was aborted", [("abort",)]),
    ],
)
def test_a_batch_is_ended_whatever_happens_and_a_failure_is_the_last_call(
    fails: str, broken: str, after: list[Any]
) -> None:
    own, recorder = OwnGroup("name", (3, 5, 9), "cpu", 60), _Recorder(fails)
    own._backend = recorder
    one, other = torch.ones(1), torch.zeros(2)
    patience = timedelta(seconds=7)
    assert own.exchange("send", [(9, one), (5, other)], patience) == broken
    sent = [("send", [one], 2, 0), ("send", [other], 1, 0)]  # by the ranks in the group
    if fails == "send":
        expected = [("_start_coalescing",), sent[0], ("_end_coalescing",)]
    else:
        expected = [("_start_coalescing",), *sent, ("_end_coalescing",), ("wait", patience)]
    assert recorder.calls == expected + after
    if broken:
        assert own.exchange("recv", [(9, one)], patience) == broken
        assert recorder.calls == expected + after


def test_only_its_own_group_is_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are made later, of the world, keep theirs."""
    from rondo.weights.own_group import _NO_WATCHDOG, _set

    for before in (None, "0"):
        monkeypatch.delenv(_NO_WATCHDOG, raising=False)
        if before is not None:
            monkeypatch.setenv(_NO_WATCHDOG, before)
        with _set(_NO_WATCHDOG, "1"):
            assert os.environ[_NO_WATCHDOG] == "1"
        assert os.environ.get(_NO_WATCHDOG) == before
