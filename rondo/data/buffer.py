"""The trajectory buffer and its ledger: who may start, what is trained next, and an account of every prompt.

The two decisions are pure functions (`planning/admission.py`); here they meet waiting coroutines. All
methods run on the controller's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rondo.batch import BatchRef
from rondo.errors import TrainError
from rondo.planning.admission import may_admit, select


@dataclass(frozen=True)
class Group:
    """A complete prompt group. ref: its rows. oldest_version: of any policy token in it."""

    seq: int
    admitted_version: int
    oldest_version: int
    ref: BatchRef


@dataclass
class Ledger:
    """Exactly once: a sequence number below `next_seq` was trained unless it is open, ready, dropped or to
    re-issue.
    """

    next_seq: int = 0
    num_trained: int = 0
    open: dict[int, int] = field(default_factory=dict)  # seq → version at admission
    dropped: dict[int, str] = field(default_factory=dict)  # seq → reason
    reissue: list[int] = field(default_factory=list)

    def admit(self, version: int) -> int:
        """The next sequence number to start; what was given back goes first."""
        if self.reissue:
            seq = self.reissue.pop(0)
        else:
            seq = self.next_seq
            self.next_seq += 1
        self.open[seq] = version
        return seq

    def give_back(self, seq: int) -> None:
        del self.open[seq]
        self.reissue = sorted([*self.reissue, seq])

    def drop(self, seq: int, reason: str) -> None:
        del self.open[seq]
        self.dropped[seq] = reason

    @property
    def num_admitted(self) -> int:
        """Groups that hold or have used a credit: everything started, less what waits to be started again."""
        return self.next_seq - len(self.reissue)

    def records(self) -> list[dict[str, Any]]:
        """The account as lines for `buffer/ledger.jsonl`. What is in flight will be issued again."""
        reissue = sorted([*self.reissue, *self.open])
        head = {"kind": "watermark", "next_seq": self.next_seq, "num_trained": self.num_trained}
        again = [{"kind": "reissue", "seq": seq} for seq in reissue]
        dropped = [
            {"kind": "dropped", "seq": seq, "reason": reason} for seq, reason in sorted(self.dropped.items())
        ]
        return [head, *again, *dropped]

    @classmethod
    def from_records(cls, records: list[dict[str, Any]]) -> Ledger:
        head = records[0]
        return cls(
            next_seq=head["next_seq"],
            num_trained=head["num_trained"],
            dropped={r["seq"]: r["reason"] for r in records if r["kind"] == "dropped"},
            reissue=sorted(r["seq"] for r in records if r["kind"] == "reissue"),
        )


class Buffer:
    """Between episodes and trainer.

    batch_size: groups per step. total_groups: prompts that the run may consume. keep: a filter that names
    the reason for which a complete group is dropped (its credit then admits another prompt), or None to keep
    it.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        total_steps: int,
        total_groups: int,
        keep: Callable[[Group], str | None] = lambda group: None,
    ) -> None:
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self.total_steps, self.total_groups = total_steps, total_groups
        self.keep = keep
        self.version = 0
        self.ledger = Ledger()
        self.ready: dict[int, Group] = {}
        self._changed = asyncio.Condition()
        self._error: BaseException | None = None

    def credits(self) -> int:
        """How many more groups may start now."""
        return may_admit(
            num_admitted=self.ledger.num_admitted,
            num_dropped=len(self.ledger.dropped),
            version=self.version,
            max_staleness=self.max_staleness,
            batch_size=self.batch_size,
            total_steps=self.total_steps,
            total_groups=self.total_groups,
        )

    async def ticket(self) -> int:
        """Waits for a credit; returns the sequence number of a prompt that may start. This is all the
        back-pressure.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.credits() > 0)
            return self.ledger.admit(self.version)

    async def put(self, group: Group) -> None:
        """A complete group arrives; a filtered one is a drop with a reason."""
        reason = self.keep(group)
        async with self._changed:
            if reason is None:
                del self.ledger.open[group.seq]
                self.ready[group.seq] = group
            else:
                self.ledger.drop(group.seq, reason)
            self._changed.notify_all()

    async def drop(self, seq: int, reason: str) -> None:
        async with self._changed:
            self.ledger.drop(seq, reason)
            self._changed.notify_all()

    async def give_back(self, seq: int) -> None:
        """An episode was cancelled: the prompt will be issued again."""
        async with self._changed:
            self.ledger.give_back(seq)
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """An episode failed for good: whoever waits in `take` or `settled` gets the error."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def take(self) -> list[Group]:
        """Whole groups for one step, in prompt order, none staler than the bound; short at the end, then
        empty.
        """
        chosen: list[int] = []

        def pick() -> bool:
            if self._error is not None:
                raise self._error
            selected = select(
                ready=self.ready,
                open_groups=self.ledger.open,
                version=self.version,
                max_staleness=self.max_staleness,
                want=self._want(),
            )
            if selected is None:
                return False
            chosen[:] = selected
            return True

        async with self._changed:
            await self._changed.wait_for(pick)
            groups = [self.ready.pop(seq) for seq in chosen]
            self.ledger.num_trained += len(groups)
        stale = [group.seq for group in groups if self.version - group.oldest_version > self.max_staleness]
        if stale:
            raise TrainError(
                f"prompt groups {stale} are staler than trainer.max_staleness={self.max_staleness}"
            )
        return groups

    def _want(self) -> int:
        """A full batch, or what is left once nothing more can start."""
        last_grant = self.version + self.max_staleness + 1 >= self.total_steps
        last_prompt = self.ledger.next_seq >= self.total_groups
        nothing_open = not self.ledger.open and not self.ledger.reissue and self.credits() == 0
        if nothing_open and (last_grant or last_prompt):
            return min(self.batch_size, len(self.ready))
        return self.batch_size

    async def settled(self) -> None:
        """Nothing is in flight and no credit is left: a drop during the drain has been replaced, and that
        one is done.
        """

        def done() -> bool:
            if self._error is not None:
                raise self._error
            return not self.ledger.open and self.credits() <= 0

        async with self._changed:
            await self._changed.wait_for(done)

    async def advance(self, version: int) -> None:
        """The engines serve `version`: only now may prompts start on its credits."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    def statistics(self) -> Mapping[str, float]:
        """For the metrics: buffer/…"""
        return {
            "buffer/ready": float(len(self.ready)),
            "buffer/open": float(len(self.ledger.open)),
            "buffer/dropped": float(len(self.ledger.dropped)),
        }
