"""The trajectory buffer and its ledger: who may start, what is trained next, and an account of every prompt.

The two decisions are pure functions (`planning/admission.py`); here they meet waiting coroutines: episodes
(`feeder.py`) and the trainer. All methods run on the controller's event loop, and none is interrupted: only
`ticket`, `take` and `settled` wait, for a change that another one makes.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from rondo.algorithms import bind, columns_read
from rondo.config import FunctionConfig
from rondo.core.batch import BatchRef
from rondo.core.errors import ConfigError, TrainError
from rondo.core.types import SCORED
from rondo.data import SAMPLER, ChosenPrompts, Heard, firsts, is_scored, trajectory_of_rows
from rondo.planning import AdmittedGroups, Order, last_of_first, may_admit, select
from rondo.rewards import check_dropped_share
from rondo.trainers.loop.journal import RunJournal

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """A complete prompt group."""

    seq: int
    """Its sequence number."""
    admitted_version: int
    """The policy version when it was admitted."""
    oldest_version: int
    """The oldest policy version of any token in it."""
    ref: BatchRef
    """Its rows."""
    ended: Mapping[str, Any] = field(default_factory=dict)
    """How it ended, for the journal (`RunJournal`)."""

    def rewards(self) -> tuple[float, int]:
        """Returns the sum of the rewards of its scored trajectories, and how many those are."""
        index = self.ref.index.take(firsts(self.ref.index))
        rewards = index.scalars("reward")[is_scored(index)]
        return float(rewards.sum(dtype=np.float64)), len(rewards)

    @cached_property
    def lengths(self) -> list[int]:
        """The response lengths of its scored trajectories, in tokens: counted as it comes in, and in its
        step.
        """
        index = self.ref.index
        lengths = np.bincount(trajectory_of_rows(index), index.scalars("response_length"))
        return lengths[is_scored(index)[firsts(index)]].astype(int).tolist()  # type: ignore[no-any-return]


@dataclass
class Ledger:
    """Exactly once: a sequence number below `next_seq` was trained unless it is open, ready, dropped or to
    re-issue. Of what was dropped only the number is kept: the names are in the journal.
    """

    next_seq: int = 0
    """The first sequence number that was never started."""
    num_trained: int = 0
    """Groups that were trained."""
    num_dropped: int = 0
    """Groups that were dropped."""
    open: AdmittedGroups[int] = field(default_factory=lambda: AdmittedGroups(int))
    """Groups under way: sequence number → policy version at admission."""
    reissue: list[int] = field(default_factory=list)
    """Sequence numbers to start again, ascending; they go before new ones."""
    aborts: dict[int, int] = field(default_factory=dict)
    """How often a group that is not complete yet was aborted."""
    filtered: dict[int, tuple[float, int, str]] = field(default_factory=dict)
    """Groups that a filter dropped, with `Group.rewards` and the reason, until a step counts them."""
    failed: dict[int, list[str]] = field(default_factory=dict)
    """Outcomes of trajectories that failed, in groups of any fate, until a step counts them."""
    produced: list[int] = field(default_factory=list)
    """Response lengths of groups that came in, until a step counts them."""

    def __post_init__(self) -> None:
        self.num_failed = sum(map(len, self.failed.values()))  # trajectories

    def admit(self, version: int) -> int:
        """Returns the next sequence number to start; what was given back goes first."""
        if self.reissue:
            seq = self.reissue.pop(0)
            self.forget_failed(seq)  # of the earlier try, where that was complete and is too stale now
        else:
            seq = self.next_seq
            self.next_seq += 1
        self.open[seq] = version
        return seq

    def give_back(self, seq: int, *, aborted: bool = False) -> None:
        del self.open[seq]
        insort(self.reissue, seq)
        if aborted:
            self.aborts[seq] = self.aborts.get(seq, 0) + 1

    def complete(self, seq: int) -> None:
        del self.open[seq]
        self.aborts.pop(seq, None)

    def drop(self, seq: int) -> None:
        self.complete(seq)
        self.num_dropped += 1

    def fail(self, seq: int, outcomes: Sequence[str]) -> None:
        self.failed[seq] = list(outcomes)
        self.num_failed += len(outcomes)

    def forget_failed(self, seq: int) -> int:
        """Returns how many trajectories of the group had failed."""
        failed = len(self.failed.pop(seq, ()))
        self.num_failed -= failed
        return failed

    def records(self) -> list[dict[str, Any]]:
        """Returns the account as lines for `buffer/ledger.jsonl`. What is in flight will be issued again."""
        reissue = sorted([*self.reissue, *self.open])
        names = ("next_seq", "num_trained", "num_dropped")
        counts = {name: getattr(self, name) for name in names}
        head = {"kind": "watermark", **counts, "produced": list(self.produced)}
        again = [{"kind": "reissue", "seq": seq, "aborts": self.aborts.get(seq, 0)} for seq in reissue]
        filtered = [
            {"kind": "filtered", "seq": seq, "reward_sum": total, "rows": rows, "reason": reason}
            for seq, (total, rows, reason) in sorted(self.filtered.items())
        ]
        failed = [
            {"kind": "failed", "seq": seq, "outcomes": outcomes}
            for seq, outcomes in sorted(self.failed.items())
        ]
        return [head, *again, *filtered, *failed]

    @classmethod
    def from_records(cls, records: list[dict[str, Any]]) -> Ledger:
        head = records[0]
        # An older rondo wrote a line for every group that was ever dropped, and the reason there.
        reasons = {r["seq"]: r["reason"] for r in records if r["kind"] == "dropped"}
        return cls(
            next_seq=head["next_seq"],
            num_trained=head["num_trained"],
            produced=list(head.get("produced", ())),
            num_dropped=head.get("num_dropped", len(reasons)),
            reissue=sorted(r["seq"] for r in records if r["kind"] == "reissue"),
            aborts={r["seq"]: r["aborts"] for r in records if r["kind"] == "reissue" and r.get("aborts")},
            filtered={
                r["seq"]: (r["reward_sum"], r["rows"], r.get("reason") or reasons[r["seq"]])
                for r in records
                if r["kind"] == "filtered"
            },
            failed={r["seq"]: r["outcomes"] for r in records if r["kind"] == "failed"},
        )


def failures(rows: BatchRef) -> list[str]:
    """Returns the outcomes of the trajectories that failed."""
    outcomes = rows.index.scalars("outcome")[firsts(rows.index)]
    return [str(outcome) for outcome in outcomes if outcome != SCORED]


class Buffer:
    """Between episodes and trainer.

    batch_size: groups per step. total_groups: prompts that the run may consume. order: in which complete
    groups are trained, see `planning/admission.py`. keep: a filter that names the reason for which a complete
    group is dropped (its credit then admits another prompt), or None to keep it. max_refills: filtered groups
    of one step at most, in units of batch_size; one more, and `take` and `settled` raise TrainError. n:
    trajectories per group. max_dropped_share: of one step's trajectories that may fail; where more do, `take`
    and `settled` raise RewardError. A filtered group or a failure belongs to the step that trains on the
    prompts around it in the stream, whatever finished first: with the ledger, the counts survive a resume.
    journal: in it goes whatever is done here. A replay (`replay/replay.py`) decides by another run's journal
    instead of time, credits and selection. chosen: what each number stands for, where a sampler chooses; it
    is asked when a number is admitted, and hears with the end of a step.
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
        n: int = 1,
        max_dropped_share: float = math.inf,
        journal: RunJournal | None = None,
        chosen: ChosenPrompts | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.total_steps = total_steps
        self.total_groups = total_groups
        self.order = order
        self.keep = keep
        self.max_refills = max_refills
        self._n = n
        self._max_dropped_share = max_dropped_share
        self.journal = journal
        self.chosen = chosen
        self.version = 0
        self.ledger = Ledger()
        self.ready: AdmittedGroups[Group] = AdmittedGroups(lambda group: group.admitted_version)
        self.num_failed = 0  # trajectories, for the batch taken last
        self.num_aborted = self.num_given_back = 0  # groups, since the statistics were taken last
        self.in_flight = 0  # groups, when they were held last
        self.trained: list[int] = []  # response lengths of the groups taken last
        self.admitting = True  # or not, while weights change: what is given back starts again under new ones
        self.stopped = False
        self.step_size = batch_size  # groups of the next step, unless too few are left
        self._changed = asyncio.Event()  # set by the next change
        self._error: BaseException | None = None
        self._filter_statistics: Mapping[str, float] = {}  # of the batch taken last
        self._unused = 0  # places that short steps left empty: their credits are gone
        self._failed: dict[int, BatchRef] = {}  # the rows of groups with failures that no step has counted
        self._bounds_hold = False  # of filtered groups and failures: they were looked at, as they are now

    @property
    def rules(self) -> dict[str, Any]:
        """Returns, for a checkpoint, what decides which groups wait in the buffer."""
        return {"max_staleness": self.max_staleness, "order": self.order}

    def restore(
        self, ledger: Ledger, groups: Iterable[Group], version: int, rules: Mapping[str, Any]
    ) -> None:
        """Goes on at `version`, with the account and the complete groups of a checkpoint. rules: of the
        buffer that it was cut from. Under tighter ones, or in another order, more of its groups may be due
        than a step can take; then they all start again.
        """
        self.ledger = ledger
        self.version = version
        self._unused = version * self.batch_size - ledger.num_trained
        if rules.get("order") == self.order and rules["max_staleness"] <= self.max_staleness:
            self.ready.clear()
            self.ready.update({group.seq: group for group in groups})
        else:
            ledger.reissue = sorted([*ledger.reissue, *(group.seq for group in groups)])
        self._bounds_hold = False
        self._resumed()

    def _resumed(self) -> None:
        self.change("resume", version=self.version, reissue=self.ledger.reissue)

    # ---- what changes it ----

    def change(self, kind: str = "", **what: Any) -> None:
        """Writes a line of the journal, where `kind` has one, and wakes all who wait; they run when the
        caller is done.
        """
        if self.journal is not None and kind:
            self.journal.note(kind, **what)
        self._changed.set()
        self._changed = asyncio.Event()

    def put(self, group: Group) -> None:
        """Takes in a complete group; a filtered one is a drop with a reason."""
        reason = self.keep(group) if self.keep is not None else None
        self.change("put", seq=group.seq, reason=reason, **group.ended)
        if failed := failures(group.ref):
            self._count_failed(group.seq, failed, group.ref)
        if reason is None:
            self.ledger.complete(group.seq)
            self.ready[group.seq] = group
            self.ledger.produced += group.lengths
        else:
            self._hear(group.seq, group.ref)
            self._drop(group.seq)
            self.ledger.filtered[group.seq] = (*group.rewards(), reason)

    def drop(
        self,
        seq: int,
        reason: str,
        failed: Sequence[str] = (),
        rows: BatchRef | None = None,
        ended: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Drops a group of which nothing can be trained on. failed: the outcomes of its failed trajectories.
        rows: its own, where it has any. ended: how, for the journal.
        """
        self.change("drop", seq=seq, reason=reason, **ended)
        self._hear(seq, rows)
        if failed:
            self._count_failed(seq, failed, rows)
        self._drop(seq)

    def _drop(self, seq: int) -> None:
        self.ledger.drop(seq)
        self._bounds_hold = False

    def _count_failed(self, seq: int, outcomes: Sequence[str], rows: BatchRef | None) -> None:
        self.ledger.fail(seq, outcomes)
        self._bounds_hold = False
        if rows is not None:
            self._failed[seq] = rows

    def failed_rows(self) -> list[BatchRef]:
        """Returns the groups with failures that no step has counted, dropped ones too: what there is to read
        where they stop the run.
        """
        return [self._failed[seq] for seq in sorted(self.ledger.failed) if seq in self._failed]

    def give_back(self, seqs: Iterable[int], *, aborted: bool = False, ending: bool = False) -> None:
        """Gives back what was cancelled or lost: the prompts will be issued again, before others. What is
        complete by now is left alone. aborted: because weights changed; counted for each (`Ledger.aborts`).
        ending: because the run ends here, which is no line of the journal.
        """
        given_back = [seq for seq in seqs if seq in self.ledger.open]
        for seq in given_back:
            self.ledger.give_back(seq, aborted=aborted)
        self.num_given_back += len(given_back)
        self.num_aborted += len(given_back) if aborted else 0
        if given_back and not ending:
            self.change("give_back", seqs=given_back, aborted=aborted)

    def fail(self, error: BaseException) -> None:
        """Gives the error of an episode that failed for good to all who wait."""
        self._error = self._error or error
        self.change()

    def stop(self) -> None:
        """Lets no further step begin: `take` returns no groups."""
        self.stopped = True
        self.change()

    def advance(self, version: int) -> None:
        """Says that the engines run and serve `version`: only now may prompts start, and on its credits."""
        self.version = version
        self.admitting = True
        self.change()

    # ---- who waits for it ----

    async def until(self, ready: Callable[[], T | None]) -> T:
        """Waits until `ready()` gives something, neither None nor False; asks after every change. Raises the
        error of an episode that failed, and what `_check_bounds` raises.
        """
        while True:
            if self._error is not None:
                raise self._error
            if not self._bounds_hold:
                self._check_bounds()
                self._bounds_hold = True
            found = ready()
            if found is not None and found is not False:
                return found
            await self._changed.wait()

    async def ticket(self) -> int:
        """Waits for a credit; returns the sequence number of a prompt that may start. This is all the
        back-pressure.
        """
        await self.until(lambda: self.admitting and self.credits() > 0)
        return self._admit(self.version)

    def _admit(self, version: int) -> int:
        seq = self.ledger.admit(version)
        choice: dict[str, Any] = {}
        if self.chosen is not None:
            left = self.total_groups - self.ledger.next_seq + 1
            choice = self.chosen.admit(seq, self._steps_granted(version), left)._asdict()
            self._bounds_hold = False  # a step has other trajectories now
        self.change("admit", seq=seq, version=version, **choice)
        return seq

    def _steps_granted(self, version: int) -> int:
        """Says of how many steps, from the first on, the prompts may start at a version."""
        return min(version + self.max_staleness + 1, self.total_steps)

    async def settled(self) -> None:
        """Waits until nothing is in flight and no credit is left: a drop during the drain has been replaced,
        and that one is done.
        """
        await self.until(lambda: not self.ledger.open and self.credits() <= 0)

    async def take(self) -> list[Group]:
        """Returns whole groups for one step, by sequence number; short at the end, then empty."""
        chosen = await self.until(lambda: [] if self.stopped else self._select())
        if self.stopped:
            return []
        self.change("take", seqs=chosen)
        groups = [self.ready.pop(seq) for seq in chosen]
        for group in groups:
            self._hear(group.seq, group.ref, group.admitted_version)
        self.ledger.num_trained += len(groups)
        self._bounds_hold = False
        self.trained = [length for group in groups for length in group.lengths]
        last = groups[-1].seq if len(groups) == self.batch_size else math.inf
        failed = [seq for seq in self.ledger.failed if seq <= last]
        self.num_failed = sum(self.ledger.forget_failed(seq) for seq in failed)
        for seq in failed:
            self._failed.pop(seq, None)  # not there after a resume
        if self.keep is not None:
            self._filter_statistics = self._count_filtered(groups, last)
        return groups

    def credits(self) -> int:
        """Says how many more groups may start now."""
        return may_admit(
            num_admitted=self.ledger.next_seq - len(self.ledger.reissue),  # they hold or have used a credit
            num_dropped=self.ledger.num_dropped - self._unused,
            version=self.version,
            max_staleness=self.max_staleness,
            batch_size=self.batch_size,
            total_steps=self.total_steps,
            total_groups=self.total_groups,
        )

    def _select(self) -> Sequence[int] | None:
        """Returns the groups of the next step; None while they are not all there."""
        # A full batch, or what is left once nothing more can start; nothing after the last step.
        last_grant = self.version + self.max_staleness + 1 >= self.total_steps
        last_prompt = self.ledger.next_seq >= self.total_groups
        nothing_open = not self.ledger.open and not self.ledger.reissue and self.credits() == 0
        want = self.step_size
        if nothing_open and (last_grant or last_prompt):
            want = min(want, len(self.ready))
        if self.version >= self.total_steps:  # a run that was made shorter may have more
            want = 0
        return select(
            ready=self.ready,
            open_groups=self.ledger.open,
            version=self.version,
            max_staleness=self.max_staleness,
            want=want,
            order=self.order,
        )

    def staleness(self, groups: Sequence[Group]) -> list[int]:
        """Returns of each group that was taken now: this version minus the oldest of its tokens. Raises
        TrainError where that is over the bound.
        """
        found = [self.version - group.oldest_version for group in groups]
        if max(found) > self.max_staleness:
            stale = [group.seq for group, age in zip(groups, found, strict=True) if age > self.max_staleness]
            raise TrainError(
                f"prompt groups {stale} are staler than trainer.max_staleness={self.max_staleness}"
            )
        return found

    def _check_bounds(self) -> None:
        """Raises TrainError for too many filtered groups for the next step, RewardError for too many
        failures.
        """
        # As soon as it is certain, and only then: no more than a batch of groups that may yet be trained on
        # come before these, or are these. Or there are so many that, however the next max_staleness + 1 steps
        # share them (no more groups than those train are in flight or ready), one of these has too many.
        last = last_of_first(self.batch_size, self.ready.by_seq, self.ledger.open.by_seq, self.ledger.reissue)
        steps = self.max_staleness + 1
        filtered = list[int]()
        if len(self.ledger.filtered) > self.max_refills * self.batch_size:
            filtered = [seq for seq in self.ledger.filtered if seq < last]
        if len(self.ledger.filtered) > steps * self.max_refills * self.batch_size:
            filtered = sorted(self.ledger.filtered)[: -(-len(self.ledger.filtered) // steps)]
        if len(filtered) > self.max_refills * self.batch_size:
            raise TrainError(self._too_many(filtered))
        of_a_step = self._of_a_step() if self.ledger.num_failed else 0
        if self.ledger.num_failed > self._max_dropped_share * of_a_step:
            failed = sorted(self.ledger.failed.items())
            certain = [outcome for seq, outcomes in failed if seq <= last for outcome in outcomes]
            shared = [outcome for _, outcomes in failed for outcome in outcomes]
            for outcomes in (certain, shared[: -(-len(shared) // steps)]):
                check_dropped_share(outcomes, of_a_step, self._max_dropped_share)

    def samples(self, seq: int) -> int:
        """Says how many trajectories a group has."""
        return self._n if self.chosen is None else self.chosen[seq].n

    def _of_a_step(self) -> int:
        """Returns how many trajectories the next step's groups have."""
        if self.chosen is None:
            return self.batch_size * self._n
        seqs = heapq.merge(self.ready.by_seq, self.ledger.open.by_seq, self.ledger.reissue)
        counts = [self.chosen[seq].n for seq in islice(seqs, self.batch_size)]
        return sum(counts) + self._n * (self.batch_size - len(counts))

    def _hear(self, seq: int, rows: BatchRef | None, trained_at: int | None = None) -> None:
        """Keeps for the sampler what came of a group. rows: its own, where it has any. trained_at: the
        version at which one was admitted that is trained on; None: it is not, and still open.
        """
        if self.chosen is None:
            return
        reads_accuracy = self.chosen.sampler.reads("heard", "accuracy")
        names = ("reward", *(("accuracy",) if reads_accuracy else ()))
        found = scored_columns(rows, names, SAMPLER) if rows is not None else {}
        rewards, *accuracy = (found[name].tolist() if found else [] for name in names)
        version = self.ledger.open[seq] if trained_at is None else trained_at
        heard = Heard(rewards, accuracy[0] if accuracy else None, version, trained_at is not None)
        self.chosen.hear(seq, heard)

    def _too_many(self, filtered: Iterable[int]) -> str:
        reasons = Counter(self.ledger.filtered[seq][2] for seq in filtered)
        return (
            f"algorithm.filter dropped {reasons.total()} prompt groups for one step of {self.batch_size}, "
            f"more than algorithm.filter.max_refills={self.max_refills:g} times data.batch_size: "
            + "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
            + ". The prompts are too easy or too hard for this policy, or the score in reward.accuracy is "
            "the wrong one: change them, or rollout.n, raise algorithm.filter.max_refills, or remove the "
            "filter"
        )

    def _count_filtered(self, groups: Sequence[Group], last: float) -> Mapping[str, float]:
        """Counts what the filter did for this batch, up to `last`: groups dropped, and the mean reward before
        it.
        """
        filtered = [self.ledger.filtered.pop(seq) for seq in sorted(self.ledger.filtered) if seq < last]
        sums = [*((total, rows) for total, rows, _ in filtered), *(group.rewards() for group in groups)]
        statistics = {
            "buffer/filtered": float(len(filtered)),
            "buffer/filtered_share": len(filtered) / max(len(sums), 1),
        }
        rows = sum(count for _, count in sums)
        if rows:
            statistics["reward/generated_mean"] = math.fsum(total for total, _ in sums) / rows
        return statistics

    # ---- what is told of it ----

    def end_step(self) -> dict[str, float]:
        """The next version is loaded: a line of the journal, and what the step's metrics say of the buffer.
        What came in, was aborted or given back is counted anew from here on.

        reward/generated_mean, with a filter, is over all scored rows, those of filtered groups too: the mean
        over what is trained on says more about the filter than about the policy. Lengths of what came in
        beside those of what was trained: over a while they are the same, unless short answers are favoured.
        """
        self.change("publish", version=self.version + 1, in_flight=self.in_flight)
        counts = {
            **self._filter_statistics,
            "buffer/ready": float(len(self.ready)),
            "buffer/open": float(len(self.ledger.open)),
            "buffer/dropped": float(self.ledger.num_dropped),
            "buffer/aborted": float(self.num_aborted),
            "buffer/reissued": float(self.num_given_back),
        }
        if self.chosen is not None:
            counts |= self.chosen.end_step()
        for which, lengths in (("produced", self.ledger.produced), ("trained", self.trained)):
            if lengths:
                counts[f"buffer/{which}_length_mean"] = float(np.mean(lengths))
                counts[f"buffer/{which}_length_p95"] = float(np.percentile(lengths, 95))
                counts[f"buffer/{which}_length_max"] = float(max(lengths))
        self.num_aborted = self.num_given_back = 0
        self.ledger.produced = []
        return counts


# ---- dynamic sampling: which complete groups are dropped (algorithm.filter) ----


def group_filter(chosen: FunctionConfig) -> Callable[[Group], str | None]:
    """Dynamic sampling: `keep` of a Buffer by a filter's name (`algorithms/filters.py`): why a group is
    dropped, or None. The filter sees the group's scored trajectories, a row each.

    Raises ConfigError for an unknown name or option; when called, for a row without `accuracy`.
    """
    decide = bind("filter", chosen)
    read = columns_read(decide)

    def keep(group: Group) -> str | None:
        reason = decide(**scored_columns(group.ref, read, f"algorithm.filter={chosen.name}"))
        if reason is not None and not isinstance(reason, str):
            raise TrainError(
                f"algorithm.filter={chosen.name} returned {reason!r}; a filter returns None to keep a group, "
                "or the reason for which it is dropped"
            )
        return reason

    return keep


def scored_columns(rows: BatchRef, names: Iterable[str], reader: str) -> dict[str, np.ndarray]:
    """Returns columns of a group's scored trajectories, a number each. reader: who reads them, for messages.
    Raises ConfigError where `accuracy` is not there.
    """
    index = rows.index.take(firsts(rows.index))
    scored = is_scored(index)
    columns = {name: index.scalars(name)[scored] for name in names}
    if "accuracy" in columns and np.isnan(columns["accuracy"]).any():
        raise ConfigError(
            f"{reader} reads whether an answer is right, and an answer to a prompt of source "
            f"{index.scalars('source')[0]!r} does not have the score that says so; name one in "
            "reward.accuracy that every source has"
        )
    return columns
