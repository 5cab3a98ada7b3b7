"""Admission and selection: simulated runs with random completion orders, drops and re-issues."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.planning import AdmittedGroups, Order, last_of_first, may_admit, select

UNBOUNDED = 1 << 62


def test_credits_table() -> None:
    def credits(admitted: int, dropped: int, version: int, staleness: int, groups: int = UNBOUNDED) -> int:
        return may_admit(
            num_admitted=admitted,
            num_dropped=dropped,
            version=version,
            max_staleness=staleness,
            batch_size=4,
            total_steps=10,
            total_groups=groups,
        )

    assert credits(0, 0, 0, 0) == 4  # synchronous: one batch
    assert credits(4, 0, 0, 0) == 0
    assert credits(4, 1, 0, 0) == 1  # a drop returns its credit
    assert credits(4, 0, 1, 0) == 4
    assert credits(0, 0, 0, 1) == 8  # one step off: two batches
    assert credits(38, 0, 9, 3) == 2  # nothing is started beyond the last step
    assert credits(36, 0, 9, 0, groups=38) == 2  # nor beyond the end of the stream
    assert credits(50, 0, 0, 0) == 0  # never negative


def test_selection_table() -> None:
    def choose(ready: list[int], open_groups: dict[int, int], **changes: object) -> list[int] | None:
        arguments = {"version": 5, "max_staleness": 1, "want": 2} | changes
        groups = {
            "ready": AdmittedGroups(int, dict.fromkeys(ready, 5)),
            "open_groups": AdmittedGroups(int, open_groups),
        }
        return select(**groups, **arguments)  # type: ignore[arg-type]

    assert choose([7, 3, 5], {}) == [3, 5]
    assert choose([3], {}) is None  # not enough
    assert choose([3, 5], {9: 5}) == [3, 5]  # fresh enough to stay open, and later in prompt order
    assert choose([3, 5], {9: 4}) is None  # one more update would break its bound
    assert choose([3, 5], {4: 5}) is None  # prompt order
    assert choose([3], {}, want=1) == [3]  # short last step
    assert choose([], {}, want=0) == []  # the end


@dataclass
class Run:
    """AdmittedGroups finish, are dropped or are given back in random order; the trainer takes when it may.
    abort_share: of the groups in flight at an update, which start again under the new version.
    """

    batch_size: int
    max_staleness: int
    total_steps: int
    total_groups: int
    chance: random.Random
    drop_share: float = 0.1
    give_back_share: float = 0.1
    abort_share: float = 0.0
    order: Order = "prompt"
    version: int = 0
    next_seq: int = 0
    dropped: set[int] = field(default_factory=set)
    reissue: list[int] = field(default_factory=list)
    open_groups: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)

    def admit(self) -> bool:
        credits = may_admit(
            num_admitted=self.next_seq - len(self.reissue),
            num_dropped=len(self.dropped),
            version=self.version,
            max_staleness=self.max_staleness,
            batch_size=self.batch_size,
            total_steps=self.total_steps,
            total_groups=self.total_groups,
        )
        for _ in range(credits):
            seq = self.reissue.pop(0) if self.reissue else self.next_seq
            self.next_seq = max(self.next_seq, seq + 1)
            self.open_groups[seq] = self.version
        return credits > 0

    def finish_one(self) -> None:
        seq = self.chance.choice(sorted(self.open_groups))
        admitted = self.open_groups.pop(seq)
        draw = self.chance.random()
        if draw < self.drop_share:
            self.dropped.add(seq)
        elif draw < self.drop_share + self.give_back_share:
            self.reissue = sorted([*self.reissue, seq])
        else:
            self.ready[seq] = admitted

    def train(self) -> bool:
        over = self.next_seq >= self.total_groups and not self.open_groups and not self.reissue
        chosen = select(
            ready=AdmittedGroups(int, self.ready),
            open_groups=AdmittedGroups(int, self.open_groups),
            version=self.version,
            max_staleness=self.max_staleness,
            want=min(self.batch_size, len(self.ready)) if over else self.batch_size,
            order=self.order,
        )
        if not chosen:
            return False
        self.staleness += [self.version - self.ready.pop(seq) for seq in chosen]
        self.steps.append(chosen)
        for seq in [seq for seq in self.open_groups if self.chance.random() < self.abort_share]:
            del self.open_groups[seq]
            self.reissue = sorted([*self.reissue, seq])
        self.version += 1
        return True

    def go(self) -> None:
        for _ in range(100_000):
            admitted = self.admit()
            if self.version >= self.total_steps:
                return
            # A slow trainer looks at the buffer only now and then, unless nothing else can happen.
            trained = (not self.open_groups or self.chance.random() < 0.5) and self.train()
            if self.open_groups:
                self.finish_one()
            elif not admitted and not trained and not self.reissue:
                return
        raise AssertionError("the run neither ends nor goes on")


@settings(max_examples=400, deadline=None)
@given(
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    total_steps=st.integers(1, 12),
    short_by=st.integers(-20, 20),
    shares=st.tuples(*[st.sampled_from([0.0, 0.1, 0.5])] * 3),
    order=st.sampled_from(["prompt", "completion"]),
    seed=st.integers(0, 1 << 30),
)
def test_nothing_is_older_than_the_bound_and_every_prompt_is_used_once(
    batch_size: int,
    max_staleness: int,
    total_steps: int,
    short_by: int,
    shares: tuple[float, float, float],
    order: Order,
    seed: int,
) -> None:
    """In both orders, with drops, lost groups and aborts at updates; and the run always goes on."""
    total_groups = max(batch_size * total_steps - short_by, 1)
    drop, give_back, abort = shares
    run = Run(
        batch_size,
        max_staleness,
        total_steps,
        total_groups,
        random.Random(seed),
        drop_share=drop,
        give_back_share=give_back / 2,
        abort_share=abort,
        order=order,
    )
    run.go()
    trained = [seq for step in run.steps for seq in step]
    assert max(run.staleness, default=0) <= max_staleness
    assert len(trained) == len(set(trained))
    assert not set(trained) & run.dropped
    assert all(len(step) == batch_size for step in run.steps[:-1])
    if run.version < total_steps:  # the stream ended first: everything in it was trained or dropped
        assert sorted({*trained, *run.dropped}) == list(range(total_groups))
    else:
        accounted = {*trained, *run.dropped, *run.open_groups, *run.ready, *run.reissue}
        assert accounted == set(range(run.next_seq))
        assert not run.ready


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_prompt_order_does_not_depend_on_who_finished_first(max_staleness: int) -> None:
    """Without drops and re-issues, every step trains the next batch_size prompts, whatever the order of
    completion.
    """
    for seed in range(20):
        run = Run(4, max_staleness, 8, UNBOUNDED, random.Random(seed), drop_share=0.0, give_back_share=0.0)
        run.go()
        assert run.steps == [list(range(4 * i, 4 * i + 4)) for i in range(8)]


def test_synchronous_means_on_policy() -> None:
    """max_staleness = 0: a batch starts when its policy exists, the next one when it was trained."""
    run = Run(3, 0, 6, UNBOUNDED, random.Random(0))
    run.go()
    assert set(run.staleness) == {0}
    assert len(run.steps) == 6


def test_staleness_lets_generation_run_ahead() -> None:
    """max_staleness = k keeps k + 1 batches in flight before the first update; the bound is reached, not just
    kept.
    """
    run = Run(2, 3, 10, UNBOUNDED, random.Random(1), drop_share=0.0, give_back_share=0.0)
    run.admit()
    assert len(run.open_groups) == 8
    run.go()
    assert max(run.staleness) == 3


def test_completion_order_takes_what_is_complete_and_looks_ahead() -> None:
    def choose(ready: dict[int, int], open_groups: dict[int, int], version: int = 5) -> list[int] | None:
        return select(
            ready=AdmittedGroups(int, ready),
            open_groups=AdmittedGroups(int, open_groups),
            version=version,
            max_staleness=2,
            want=2,
            order="completion",
        )

    assert choose({7: 5, 3: 4, 5: 4}, {}) == [3, 5]
    assert choose({7: 5, 8: 5}, {3: 4, 4: 4}) == [7, 8]  # 3 and 4 are due at 6, and a step has room for both
    assert choose({7: 5, 8: 5}, {3: 4, 4: 4, 5: 4}) is None  # three would be due at 6
    assert choose({5: 4, 8: 5}, {3: 4, 4: 4}) == [5, 8]  # one of the three is complete: it goes first
    assert choose({7: 5, 8: 5}, {3: 3}) is None  # due now
    assert choose({9: 3, 8: 5, 7: 5}, {}) == [7, 9]  # what is due first, then prompt order


def test_what_is_left_behind_can_be_trained_in_time() -> None:
    """Two are complete; the versions at which what is in flight was admitted, at 5, with max_staleness 2."""

    def chosen(*admitted: int) -> bool:
        groups = {
            "ready": AdmittedGroups(int, {1: 4, 2: 4}),
            "open_groups": AdmittedGroups(int, enumerate(admitted, 10)),
        }
        return bool(select(**groups, version=5, max_staleness=2, want=2, order="completion"))

    assert not chosen(4, 4, 4)  # due at 6, and the step there has two places
    assert chosen(4, 4)
    assert chosen(4, 4, 5, 5)
    assert not chosen(4, 4, 5, 5, 5)
    assert chosen()


@settings(max_examples=200, deadline=None)
@given(
    groups=st.dictionaries(st.integers(0, 40), st.integers(0, 6)),
    gone=st.lists(st.integers(0, 40)),
    version=st.integers(0, 7),
)
def test_groups_are_a_mapping_in_two_orders(groups: dict[int, int], gone: list[int], version: int) -> None:
    kept = AdmittedGroups(int, groups)
    for seq in gone:
        assert kept.pop(seq, None) == groups.pop(seq, None)
    assert kept == groups
    assert kept.by_seq == sorted(groups)
    assert kept.by_version == sorted((admitted, seq) for seq, admitted in groups.items())
    assert kept.up_to(version) == sum(admitted <= version for admitted in groups.values())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), unique=True), max_size=3), st.integers(1, 12))
def test_the_last_of_the_first(lists: list[list[int]], count: int) -> None:
    """Of numbers that no two lists share, as of groups that are open, ready or to be started again."""
    lists = [sorted(3 * number + at for number in numbers) for at, numbers in enumerate(lists)]
    every = sorted(number for numbers in lists for number in numbers)
    assert last_of_first(count, *lists) == (every[count - 1] if len(every) >= count else float("inf"))


@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_look_does_not_walk_over_all_groups(order: Order) -> None:
    """As many comparisons for a thousand times the groups, but for the logarithm."""
    looked = Counter[int]()

    class Counted(int):
        def __lt__(self, other: object) -> bool:
            looked[size] += 1
            return int.__lt__(self, other)  # type: ignore[operator]

        __hash__ = int.__hash__

    for size in (16, 16_384):
        ready = AdmittedGroups[int](int, ((Counted(seq), Counted(0)) for seq in range(size)))
        open_groups = AdmittedGroups[int](int, ((Counted(seq), Counted(1)) for seq in range(size, 2 * size)))
        looked.clear()
        found = select(
            ready=ready, open_groups=open_groups, version=1, max_staleness=9000, want=4, order=order
        )
        assert found == [0, 1, 2, 3]
        open_groups[Counted(2 * size)] = Counted(1)
        del ready[0]
        assert looked[size] < 40 * math.log2(size)


def test_without_the_second_wait_the_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is needed: with the first wait alone some run trains a group that is too old."""

    def first_wait_only(*, ready, open_groups, version, max_staleness, want, order):  # type: ignore[no-untyped-def]
        if open_groups.up_to(version - max_staleness):
            return None
        newest_first = sorted(ready, key=lambda seq: (-ready[seq], seq))[:want]
        return newest_first if len(newest_first) == want else None

    monkeypatch.setitem(globals(), "select", first_wait_only)
    worst = 0
    for seed in range(40):
        run = Run(3, 2, 10, UNBOUNDED, random.Random(seed), drop_share=0.0)
        run.go()
        worst = max(worst, *run.staleness)
    assert worst > 2
