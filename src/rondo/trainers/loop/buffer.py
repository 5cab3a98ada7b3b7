"""The trajectory buffer and its ledger: who may start, what is trained next, and an account of every prompt.

The two decisions are pure functions (`planning/admission.py`); here they meet waiting coroutines. All
methods run on the controller's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from rondo.algorithms.registry import bind, columns_read
from rondo.batch import BatchRef
from rondo.config.schema import FunctionConfig
from rondo.data.rows import is_scored
from rondo.errors import ConfigError, RewardError, TrainError
from rondo.planning.admission import Order, may_admit, select
from rondo.trainers.loop.ledger import Ledger


@dataclass(frozen=True)
class Group:
    """A complete prompt group. ref: its rows. oldest_version: of any policy token in it. ended: how, for the
    journal (`Journal`).
    """

    seq: int
    admitted_version: int
    oldest_version: int
    ref: BatchRef
    ended: Mapping[str, Any] = field(default_factory=dict)

    def rewards(self) -> tuple[float, int]:
        """Sum of the rewards of its scored rows, and how many those are."""
        rewards = self.ref.index.scalars("reward")[is_scored(self.ref.index)]
        return float(rewards.sum(dtype=np.float64)), len(rewards)

    def lengths(self) -> np.ndarray:
        """Response lengths of its scored rows, in tokens."""
        return self.ref.index.scalars("response_length")[is_scored(self.ref.index)]


def failures(rows: BatchRef) -> list[str]:
    """The outcomes of the trajectories that failed."""
    return [str(outcome) for outcome in rows.index.scalars("outcome")[~is_scored(rows.index)]]


def group_filter(chosen: FunctionConfig) -> Callable[[Group], str | None]:
    """Dynamic sampling: `keep` of a Buffer by a filter's name (`algorithms/filters.py`): why a group is
    dropped, or None. The filter sees the group's scored rows only.

    Raises ConfigError for an unknown name or option; when called, for a row without `accuracy`.
    """
    decide = bind("filter", chosen)
    read = columns_read(decide)

    def keep(group: Group) -> str | None:
        index = group.ref.index
        scored = is_scored(index)
        columns = {name: index.scalars(name)[scored] for name in read}
        if "accuracy" in columns and np.isnan(columns["accuracy"]).any():
            raise ConfigError(
                f"algorithm.filter={chosen.name} reads whether an answer is right, and an answer to a prompt "
                f"of source {index.scalars('source')[0]!r} does not have the score that says so; name one in "
                "reward.accuracy that every source has"
            )
        reason = decide(**columns)
        if reason is not None and not isinstance(reason, str):
            raise TrainError(
                f"algorithm.filter={chosen.name} returned {reason!r}; a filter returns None to keep a group, "
                "or the reason for which it is dropped"
            )
        return reason

    return keep


class Journal(Protocol):
    """Is told of everything that the buffer does, in order (`replay/journal.py`)."""

    def note(self, kind: str, **what: Any) -> None:
        """It has been done. Raises TrainError where a journal that is followed has something else here."""
        ...

    @property
    def mark(self) -> int | None:
        """For a checkpoint: what to `restore`."""
        ...

    def restore(self, position: int | None) -> None:
        """Go on from a checkpoint that was cut at this mark. Raises CheckpointError."""
        ...


class Buffer:
    """Between episodes and trainer.

    batch_size: groups per step. total_groups: prompts that the run may consume. order: in which complete
    groups are trained, see `planning/admission.py`. keep: a filter that names
    the reason for which a complete group is dropped (its credit then admits another prompt), or None to keep
    it. max_refills: filtered groups of one step at most, in units of batch_size; one more, and `take` and
    `settled` raise TrainError. check_failures: given the outcomes of one step's failed trajectories (or the
    first of them), raises a RewardError when they are too many, and so do `take` and `settled`. A filtered
    group or a failure belongs to the step that trains on the prompts around it in the stream, whatever
    finished first: with the ledger, the counts survive a resume. journal: in it goes whatever is done here.
    A replay (`replay/replay.py`) decides by another run's journal instead of time, credits and selection.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        total_steps: int,
        total_groups: int,
        order: Order = "prompt",
        keep: Callable[[Group], str | None] | None = None,
        max_refills: float = math.inf,
        check_failures: Callable[[Sequence[str]], None] = lambda outcomes: None,
        journal: Journal | None = None,
    ) -> None:
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self.total_steps, self.total_groups, self.order = total_steps, total_groups, order
        self.keep, self.max_refills, self._check_failures = keep, max_refills, check_failures
        self.journal = journal
        self.version = 0
        self.ledger = Ledger()
        self.ready: dict[int, Group] = {}
        self.num_failed = 0  # trajectories, for the batch taken last
        self.num_aborted = self.num_given_back = 0  # groups, since the statistics were taken last
        self.in_flight = 0  # groups, when they were held last
        self.trained: list[int] = []  # response lengths of the groups taken last
        self._changed = asyncio.Condition()
        self._admitting = True
        self._error: BaseException | None = None
        self._filter_statistics: Mapping[str, float] = {}  # of the batch taken last
        self._unused = 0  # places that short steps left empty: their credits are gone

    @property
    def rules(self) -> dict[str, Any]:
        """For a checkpoint: what decides which groups wait in the buffer."""
        return {"max_staleness": self.max_staleness, "order": self.order}

    def restore(
        self, ledger: Ledger, groups: Iterable[Group], version: int, rules: Mapping[str, Any]
    ) -> None:
        """Go on at `version`, with the account and the complete groups of a checkpoint. rules: of the buffer
        that it was cut from. Under tighter ones, or in another order, more of its groups may be due than a
        step can take; then they all start again.
        """
        self.ledger, self.version = ledger, version
        self._unused = version * self.batch_size - ledger.num_trained
        if rules.get("order") == self.order and rules["max_staleness"] <= self.max_staleness:
            self.ready = {group.seq: group for group in groups}
        else:
            ledger.reissue = sorted([*ledger.reissue, *(group.seq for group in groups)])
        self._resumed()

    def _resumed(self) -> None:
        self._note("resume", version=self.version, reissue=self.ledger.reissue)

    def credits(self) -> int:
        """How many more groups may start now."""
        return may_admit(
            num_admitted=self.ledger.num_admitted,
            num_dropped=len(self.ledger.dropped) - self._unused,
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
            await self._changed.wait_for(self._may_start)
            version = self._admission_version()
            seq = self.ledger.admit(version)
            self._note("admit", seq=seq, version=version)
            return seq

    def _may_start(self) -> bool:
        return self._admitting and self.credits() > 0

    def _admission_version(self) -> int:
        return self.version

    async def admit(self, yes: bool) -> None:
        """Whether prompts may start at all: not while weights change, so that what is given back then starts
        again under the new ones.
        """
        async with self._changed:
            self._admitting = yes
            self._changed.notify_all()

    async def put(self, group: Group) -> None:
        """A complete group arrives; a filtered one is a drop with a reason."""
        reason = self.keep(group) if self.keep is not None else None
        async with self._changed:
            await self._turn("put", seq=group.seq)
            self._note("put", seq=group.seq, reason=reason, **group.ended)
            self._note_failures(group.seq, failures(group.ref))
            if reason is None:
                self.ledger.complete(group.seq)
                self.ready[group.seq] = group
                self.ledger.produced += group.lengths().tolist()
            else:
                self.ledger.drop(group.seq, reason)
                self.ledger.filtered[group.seq] = group.rewards()
            self._check_bounds()
            self._changed.notify_all()

    async def drop(
        self,
        seq: int,
        reason: str,
        failed: Sequence[str] = (),
        ended: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """A group of which nothing can be trained on. failed: the outcomes of its failed trajectories. ended:
        how, for the journal.
        """
        async with self._changed:
            await self._turn("drop", seq=seq)
            self._note("drop", seq=seq, reason=reason, **ended)
            self._note_failures(seq, failed)
            self.ledger.drop(seq, reason)
            self._check_bounds()
            self._changed.notify_all()

    async def give_back(self, seqs: Iterable[int], *, aborted: bool = False, ending: bool = False) -> None:
        """Episodes were cancelled or lost: their prompts will be issued again, before others. What is
        complete by now is left alone. aborted: because weights changed; counted for each (`Ledger.aborts`).
        ending: because the run ends here, which is no line of the journal.
        """
        async with self._changed:
            given_back = [seq for seq in seqs if seq in self.ledger.open]
            if given_back:
                self._give_back(given_back, aborted=aborted)
            if given_back and not ending:
                self._note("give_back", seqs=given_back, aborted=aborted)
            self._changed.notify_all()

    def _give_back(self, seqs: Sequence[int], *, aborted: bool) -> None:
        for seq in seqs:
            self.ledger.give_back(seq)
            self.num_given_back += 1
            if aborted:
                self.num_aborted += 1
                self.ledger.aborts[seq] = self.ledger.aborts.get(seq, 0) + 1

    async def until(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()`; asks after every change. Raises the error of an episode that failed."""

        def done() -> bool:
            if self._error is not None:
                raise self._error
            return ready()

        async with self._changed:
            await self._changed.wait_for(done)

    async def changed(self) -> None:
        """Have those who wait look again."""
        async with self._changed:
            self._changed.notify_all()

    async def _turn(self, kind: str, **what: Any) -> None:
        """A replay waits here until this is next. Called under the lock."""

    def _note(self, kind: str, **what: Any) -> None:
        if self.journal is not None:
            self.journal.note(kind, **what)

    async def fail(self, error: BaseException) -> None:
        """An episode failed for good: whoever waits in `take` or `settled` gets the error."""
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def take(self) -> list[Group]:
        """Whole groups for one step, by sequence number, none staler than the bound; short at the end, then
        empty.
        """
        chosen: list[int] = []

        def pick() -> bool:
            if self._error is not None:
                raise self._error
            selected = self._select()
            if selected is None:
                return False
            chosen[:] = selected
            return True

        async with self._changed:
            await self._changed.wait_for(pick)
            self._note("take", seqs=chosen)
            groups = [self.ready.pop(seq) for seq in chosen]
            self.ledger.num_trained += len(groups)
            self.trained = [length for group in groups for length in group.lengths().tolist()]
            last = groups[-1].seq if len(groups) == self.batch_size else math.inf
            self.num_failed = sum(len(self.ledger.failed.pop(seq)) for seq in self._failed(last))
            if self.keep is not None:
                self._filter_statistics = self._count_filtered(groups, last)
            self._check_bounds()
        self._refuse_stale(groups)
        return groups

    def _select(self) -> Sequence[int] | None:
        """The groups of the next step; None while they are not all there."""
        return select(
            ready={seq: group.admitted_version for seq, group in self.ready.items()},
            open_groups=self.ledger.open,
            version=self.version,
            max_staleness=self.max_staleness,
            want=self._want(),
            order=self.order,
        )

    def _refuse_stale(self, groups: Sequence[Group]) -> None:
        stale = [group.seq for group in groups if self.version - group.oldest_version > self.max_staleness]
        if stale:
            raise TrainError(
                f"prompt groups {stale} are staler than trainer.max_staleness={self.max_staleness}"
            )

    def _note_failures(self, seq: int, failed: Sequence[str]) -> None:
        if failed:
            self.ledger.failed[seq] = list(failed)

    def _failed(self, last: float) -> list[int]:
        """The groups with failures up to `last`."""
        return [seq for seq in sorted(self.ledger.failed) if seq <= last]

    def _check_bounds(self) -> None:
        """Too many filtered groups, or failures, for the next step are an error of whoever waits."""
        if not self.ledger.filtered and not self.ledger.failed:
            return
        # As soon as it is certain, and only then: no more than a batch of groups that may yet be trained on
        # come before these, or are these. Or there are so many that, however the next max_staleness + 1 steps
        # share them (no more groups than those train are in flight or ready), one of these has too many.
        alive = sorted([*self.ready, *self.ledger.open, *self.ledger.reissue])
        last = alive[self.batch_size - 1] if len(alive) >= self.batch_size else math.inf
        filtered = [seq for seq in self.ledger.filtered if seq < last]
        steps = self.max_staleness + 1
        if len(self.ledger.filtered) > steps * self.max_refills * self.batch_size:
            filtered = sorted(self.ledger.filtered)[: -(-len(self.ledger.filtered) // steps)]
        if len(filtered) > self.max_refills * self.batch_size:
            self._error = self._error or TrainError(self._too_many(filtered))
        failed = [outcome for seq in self._failed(math.inf) for outcome in self.ledger.failed[seq]]
        try:
            self._check_failures(
                [outcome for seq in self._failed(last) for outcome in self.ledger.failed[seq]]
            )
            self._check_failures(failed[: -(-len(failed) // steps)])
        except RewardError as error:
            self._error = self._error or error

    def _too_many(self, filtered: Iterable[int]) -> str:
        reasons = Counter(self.ledger.dropped[seq] for seq in filtered)
        return (
            f"algorithm.filter dropped {reasons.total()} prompt groups for one step of {self.batch_size}, "
            f"more than algorithm.max_refills={self.max_refills:g} times data.batch_size: "
            + "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
            + ". The prompts are too easy or too hard for this policy, or the score in reward.accuracy is "
            "the wrong one: change them, or rollout.n, raise algorithm.max_refills, or remove the filter"
        )

    def _count_filtered(self, groups: Sequence[Group], last: float) -> Mapping[str, float]:
        """What the filter did for this batch, up to `last`: groups dropped, and the mean reward before it."""
        filtered = [self.ledger.filtered.pop(seq) for seq in sorted(self.ledger.filtered) if seq < last]
        sums = [*filtered, *(group.rewards() for group in groups)]
        statistics = {
            "buffer/filtered": float(len(filtered)),
            "buffer/filtered_share": len(filtered) / max(len(sums), 1),
        }
        rows = sum(count for _, count in sums)
        if rows:
            statistics["reward/generated_mean"] = math.fsum(total for total, _ in sums) / rows
        return statistics

    def _want(self) -> int:
        """A full batch, or what is left once nothing more can start; 0 after the last step."""
        if self.version >= self.total_steps:  # a run that was made shorter may have more
            return 0
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
        await self.until(lambda: not self.ledger.open and self.credits() <= 0)

    async def advance(self, version: int) -> None:
        """The engines serve `version`: only now may prompts start on its credits."""
        async with self._changed:
            self.version = version
            self._changed.notify_all()

    def statistics(self) -> Mapping[str, float]:
        """For the metrics: what is here now; what came in, was aborted or given back since `end_step`;
        and, with a filter, what it did for the batch taken last. reward/generated_mean is over all scored
        rows, those of filtered groups too: the mean over what is trained on says more about the filter than
        about the policy. Lengths of what came in beside those of what was trained: over a while they are the
        same, unless short answers are favoured.
        """
        return {
            **self._filter_statistics,
            "buffer/ready": float(len(self.ready)),
            "buffer/open": float(len(self.ledger.open)),
            "buffer/dropped": float(len(self.ledger.dropped)),
            "buffer/aborted": float(self.num_aborted),
            "buffer/reissued": float(self.num_given_back),
            **_length_statistics("buffer/produced_length", self.ledger.produced),
            **_length_statistics("buffer/trained_length", self.trained),
        }

    def end_step(self) -> None:
        """The next version was published: a line of the journal, and the step's counts begin anew."""
        self._note("publish", version=self.version + 1, in_flight=self.in_flight)
        self.num_aborted = self.num_given_back = 0
        self.ledger.produced = []


def _length_statistics(name: str, lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    mean, p95 = float(np.mean(lengths)), float(np.percentile(lengths, 95))
    return {f"{name}_mean": mean, f"{name}_p95": p95, f"{name}_max": float(max(lengths))}
