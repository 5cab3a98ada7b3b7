"""The asynchronous loop on a virtual clock: the real feeder, buffer and publisher; engines only sleep."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rondo.core.batch import BatchRef
from rondo.core.errors import RewardError, TrainError, WorkerError
from rondo.core.types import Ended
from rondo.planning.admission import OnUpdate, Order, effective_on_update
from rondo.trainers.loop.buffer import Buffer, Group, Ledger
from rondo.trainers.loop.feeder import EpisodeFeeder
from rondo.trainers.loop.publish import WeightPublisher
from simulation import Lengths, SimulatedEngines, Simulation, run_virtual, simulate
from tests.trainers.drops import Drops

BATCH, STEPS = 4, 8
SHORT = Lengths(mean=120, sigma=1.0, longest=900)

ALL_MODES = [
    (k, mode, order)
    for k in (0, 1, 2, 4)
    for mode in ("finish", "resume", "abort")
    for order in ("prompt", "completion")
    if k > 0 or (mode, order) == ("finish", "prompt")
]


def unlucky(seed: int, share: float, *key: int) -> bool:
    return bool(np.random.default_rng([seed, *key]).random() < share)


def make(
    k: int, mode: OnUpdate, order: Order, *, n: int = 4, max_aborts: int = 2, **options: Any
) -> tuple[Buffer, SimulatedEngines, EpisodeFeeder]:
    of_buffer = {
        name: options.pop(name) for name in ("keep", "total_groups", "max_dropped_share") if name in options
    }
    engines = SimulatedEngines(**({"slots": 48, "n": n, "length": SHORT} | options))
    wanted: dict[str, Any] = {"total_groups": 10**9, "total_steps": STEPS} | of_buffer
    buffer = Buffer(batch_size=BATCH, max_staleness=k, order=order, n=n, journal=Drops(), **wanted)
    return buffer, engines, EpisodeFeeder(buffer, engines, on_update=mode, max_aborts=max_aborts)


def run(k: int, mode: OnUpdate, order: Order, **options: Any) -> tuple[Simulation, Buffer, SimulatedEngines]:
    async def main() -> tuple[Simulation, Buffer, SimulatedEngines]:
        buffer, engines, feeder = make(k, mode, order, **options)
        done = await simulate(buffer, engines, feeder, update_seconds=0.2)
        return done, buffer, engines

    return run_virtual(main())


@pytest.mark.parametrize(("k", "mode", "order"), ALL_MODES)
def test_the_bound_holds_and_every_prompt_is_accounted_for_once(k: int, mode: OnUpdate, order: Order) -> None:
    """With a filter that drops a third, failing trajectories, and scoring that takes its time."""
    done, buffer, _ = run(
        k,
        mode,
        order,
        keep=lambda group: "unlucky" if unlucky(0, 1 / 3, group.seq) else None,
        fails=lambda seq, sample: unlucky(0, 0.4, seq, sample, 1),
        score_seconds=lambda seq, sample: 0.5 * unlucky(0, 0.3, seq, sample, 2),
    )
    trained = [seq for step in done.steps for seq in step]
    assert [len(step) for step in done.steps] == [BATCH] * STEPS
    assert max(done.staleness) <= k
    assert max(Counter(trained).values()) == 1
    dropped = buffer.journal
    assert isinstance(dropped, Drops)
    assert not set(trained) & set(dropped)
    assert len(dropped) == buffer.ledger.num_dropped
    left = {*buffer.ledger.open, *buffer.ledger.reissue, *buffer.ready}
    assert {*trained, *dropped, *left} == set(range(buffer.ledger.next_seq))
    assert not buffer.ready  # nothing was made to be thrown away
    assert {"unlucky", "only 1 of 4 trajectories were scored"} <= set(dropped.values())


@pytest.mark.parametrize(("k", "mode", "order"), ALL_MODES)
def test_short_answers_are_not_favoured_in_total(k: int, mode: OnUpdate, order: Order) -> None:
    """What is trained on in a run is what its prompts give, whoever is complete first."""
    done, _, _ = run(k, mode, order)
    trained = sorted(seq for step in done.steps for seq in step)
    assert trained == list(range(BATCH * STEPS))
    assert sorted(done.trained_lengths) == sorted(SHORT(seq, s) for seq in trained for s in range(4))
    produced = [s["buffer/produced_length_max"] for s in done.statistics if "buffer/produced_length_max" in s]
    assert max(produced) == max(s["buffer/trained_length_max"] for s in done.statistics)


def test_the_stream_ends_in_the_middle_of_a_batch() -> None:
    for k, mode, order in ALL_MODES[::3]:
        done, buffer, _ = run(k, mode, order, total_groups=2 * BATCH + 2)
        assert [len(step) for step in done.steps] == [BATCH] * 2 + [2], (k, mode, order)
        assert buffer.ledger.num_trained == 2 * BATCH + 2


@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_finish_trains_the_same_prompts_whatever_the_speed(k: int) -> None:
    """Steps, staleness and lengths do not depend on how long anything takes."""
    runs = []
    for slots, seconds in ((48, 0.0), (7, 0.1), (200, 3.0)):
        done, _, _ = run(
            k, "finish", "prompt", slots=slots, score_seconds=lambda seq, s, w=seconds: w * (seq % 3)
        )
        runs.append((done.steps, done.staleness, done.trained_lengths, done.statistics))
    assert runs[0] == runs[1] == runs[2]


def test_asynchrony_is_faster_and_by_how_much() -> None:
    """One trainer, one sampler, long-tailed lengths: the order of the modes."""
    seconds = {
        (k, mode, order): run(k, mode, order)[0].seconds
        for k, mode, order in (
            (0, "finish", "prompt"),
            (1, "finish", "prompt"),
            (2, "resume", "prompt"),
            (2, "resume", "completion"),
            (4, "resume", "prompt"),
        )
    }
    assert seconds[1, "finish", "prompt"] < seconds[0, "finish", "prompt"]
    assert seconds[2, "resume", "prompt"] < 0.6 * seconds[0, "finish", "prompt"]
    assert seconds[2, "resume", "completion"] <= seconds[2, "resume", "prompt"]
    assert seconds[4, "resume", "prompt"] < seconds[2, "resume", "prompt"]


async def versions_of(groups: list[Group]) -> list[list[int]]:
    batch = await BatchRef.concat([group.ref for group in groups]).fetch(["policy_versions"])
    return batch.table.to_pydict()["policy_versions"]


@pytest.mark.parametrize("mode", ["finish", "resume", "abort"])
def test_what_becomes_of_a_trajectory_that_is_in_flight(mode: OnUpdate) -> None:
    """One long answer, and weights that arrive when it is 200 of 1000 tokens long."""

    async def main() -> tuple[list[list[int]], SimulatedEngines, Buffer, float]:
        buffer, engines, feeder = make(
            4,
            mode,
            "prompt",
            n=2,
            slots=256,
            max_aborts=1,
            length=lambda seq, s: 1000 if (seq, s) == (BATCH, 0) else 100,
        )
        seen: list[list[int]] = []

        async def look(groups: list[Group]) -> None:
            if groups[0].seq == BATCH:
                seen.extend(await versions_of(groups[:1]))
            await asyncio.sleep(0)

        done = await simulate(buffer, engines, feeder, update_seconds=0.1, on_step=look)  # type: ignore[arg-type]
        return seen, engines, buffer, done.statistics[0]["buffer/aborted"]

    (long, short), engines, buffer, aborted = run_virtual(main())
    assert len(long) == 1000
    counts = [len(long) - np.count_nonzero(np.array(long)), np.count_nonzero(np.array(long))]
    if mode == "finish":  # the weights wait for it
        assert counts == [1000, 0]
        assert (set(short), aborted) == ({0}, 0)
    elif mode == "resume":  # old tokens, then new ones
        assert counts == [200, 800]
        assert long == sorted(long)
        assert (set(short), aborted) == ({0}, 0)
    else:  # all over again, under the new weights
        assert counts == [0, 1000]
        assert set(short) == {1}
        assert aborted == 1
        assert engines.wasted_tokens >= 200
    assert buffer.ledger.aborts == {}


@pytest.mark.parametrize("max_aborts", [0, 1, 3])
def test_a_group_is_aborted_no_more_often_than_allowed(max_aborts: int) -> None:
    """An answer longer than the time between two updates would be aborted for ever."""
    length = lambda seq, sample: 2500 if seq == BATCH else 60  # noqa: E731
    done, _, engines = run(4, "abort", "prompt", length=length, max_aborts=max_aborts, slots=256)
    aborted = sum(s["buffer/aborted"] for s in done.statistics)
    assert (aborted, sum(s["buffer/reissued"] for s in done.statistics)) == (max_aborts, max_aborts)
    assert [len(step) for step in done.steps] == [BATCH] * STEPS
    assert (engines.wasted_tokens > 0) == (max_aborts > 0)
    assert max(done.staleness) <= 4


def test_aborts_survive_a_checkpoint() -> None:
    ledger = Ledger(next_seq=9, open={7: 3, 8: 3}, reissue=[5], aborts={5: 2, 7: 1})
    again = Ledger.from_records(ledger.records())
    assert again.reissue == [5, 7, 8]
    assert again.aborts == {5: 2, 7: 1}
    assert [again.admit(4), again.admit(4), again.admit(4), again.admit(4)] == [5, 7, 8, 9]
    again.complete(5)
    again.drop(7)
    assert again.aborts == {}


def test_a_cut_run_goes_on_with_every_prompt_once() -> None:
    """Cut between load and release, in flight and buffered groups included, as a checkpoint does."""
    for mode, order in (("resume", "prompt"), ("resume", "completion"), ("abort", "completion")):

        async def main(mode: OnUpdate = mode, order: Order = order) -> None:  # type: ignore[assignment]
            first = make(2, mode, order)
            cut: dict[str, Any] = {}
            trained: list[int] = []

            async def look(groups: list[Group]) -> None:
                buffer = first[0]
                if buffer.version == 5:
                    cut.update(
                        records=buffer.ledger.records(), ready=dict(buffer.ready), trained=list(trained)
                    )
                    raise KeyboardInterrupt
                trained.extend(group.seq for group in groups)

            with pytest.raises(KeyboardInterrupt):
                await simulate(*first, update_seconds=0.2, on_step=look)  # type: ignore[arg-type]
            again = make(2, mode, order)
            buffer = again[0]
            buffer.ledger, buffer.version = Ledger.from_records(cut["records"]), 5
            buffer.ready.update(cut["ready"])
            taken = buffer.ledger.num_trained - len(cut["trained"])
            buffer.ledger.num_trained -= taken  # the step that was cut is not trained
            done = await simulate(*again, update_seconds=0.2)
            seqs = [*cut["trained"], *(seq for step in done.steps for seq in step)]
            assert max(Counter(seqs).values()) == 1
            assert max(done.staleness) <= 2

        run_virtual(main())


class Mortal(SimulatedEngines):
    """Rank 1 dies when its fifth group arrives."""

    def __init__(self, survives: bool, **options: Any) -> None:
        super().__init__(ranks=2, **options)
        self.calls, self.dead, self.survives = Counter[int](), set[int](), survives

    def alive(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.dead]

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        self.calls[rank] += 1
        if rank == 1 and self.calls[1] == 5:
            await asyncio.sleep(0.05)
            self.dead.add(1)
        if self.dead and not self.survives:
            self.dead = {0, 1}
        if rank in self.dead:
            raise WorkerError("rollout", rank, "run_group", f"rollout[{rank}] is gone")
        return await super().run_group(rank, seq)


@pytest.mark.parametrize(("k", "mode", "order"), ALL_MODES[::4])
def test_a_lost_rank_costs_its_groups_in_flight_and_no_prompt(k: int, mode: OnUpdate, order: Order) -> None:
    async def main() -> None:
        told: list[str] = []
        engines = Mortal(True, slots=48, n=4, length=SHORT)
        buffer = Buffer(
            batch_size=BATCH, max_staleness=k, total_steps=STEPS, total_groups=10**9, order=order, n=4
        )
        feeder = EpisodeFeeder(buffer, engines, on_update=mode, max_aborts=2, warn=told.append)
        done = await simulate(buffer, engines, feeder, update_seconds=0.2)
        assert sorted(seq for step in done.steps for seq in step) == list(range(BATCH * STEPS))
        assert max(done.staleness) <= k
        assert "its prompts go to the other 1 of 2" in told[0]

    run_virtual(main())


def test_the_last_rank_is_the_end() -> None:
    async def main() -> None:
        engines = Mortal(False, slots=48, n=4, length=SHORT)
        buffer = Buffer(batch_size=BATCH, max_staleness=1, total_steps=STEPS, total_groups=10**9, n=4)
        with pytest.raises(WorkerError, match=r"rollout\[\d\] is gone"):
            await simulate(buffer, engines, EpisodeFeeder(buffer, engines), update_seconds=0.2)

    run_virtual(main())


class Restarted(SimulatedEngines):
    """An engine that is started again while a publish waits for the drain; it waits for weights."""

    async def restarted(self) -> str:
        while not self.version:
            await asyncio.sleep(0.01)
            if asyncio.get_running_loop().time() > 0.5 and self.version == 0:
                return "an engine was started again"
        await asyncio.Event().wait()
        raise AssertionError

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        if seq >= BATCH and not self.version:
            await asyncio.Event().wait()  # waits for weights
        return await super().run_group(rank, seq)


def test_a_drain_does_not_wait_for_an_engine_that_waits_for_weights() -> None:
    async def main() -> None:
        told: list[str] = []
        engines = Restarted(slots=48, n=4, length=lambda seq, sample: 50)
        buffer = Buffer(batch_size=BATCH, max_staleness=1, total_steps=STEPS, total_groups=10**9, n=4)
        feeder = EpisodeFeeder(buffer, engines, warn=told.append)
        done = await simulate(buffer, engines, feeder, update_seconds=0.2)
        assert [seq for step in done.steps for seq in step] == list(range(BATCH * STEPS))
        assert told == ["an engine was started again; its prompts are generated again under the new weights"]

    run_virtual(main())


def test_an_error_in_an_episode_reaches_the_trainer_in_every_mode() -> None:
    for k, mode, order in ALL_MODES[::4]:
        with pytest.raises(RewardError, match=r"trajectories failed .* for one step of"):
            run(k, mode, order, fails=lambda seq, sample: seq > 10, max_dropped_share=10 / (4 * BATCH))


def test_waiting_for_each_other_is_found() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TrainError, match="everybody waits for somebody else"):
        run_virtual(main())


def test_republishing_keeps_what_is_in_flight() -> None:
    """An engine without weights gets the current version while the trainer waits."""

    async def main() -> list[list[int]]:
        buffer, engines, feeder = make(1, "finish", "prompt", n=2, length=lambda seq, sample: 100)
        publisher = WeightPublisher(engines, engines, feeder, buffer, shared=False)
        await publisher.start(3)
        feeding = asyncio.create_task(feeder.run())
        await asyncio.sleep(0.05)
        await publisher.mender.give_weights("an engine was started again")
        groups = await buffer.take()
        feeding.cancel()
        await feeder.close()
        assert asyncio.get_running_loop().time() == pytest.approx(0.1)
        return await versions_of(groups)

    assert run_virtual(main()) == [[3] * 100] * (2 * BATCH)


def test_the_default_of_on_update() -> None:
    chosen = [effective_on_update("auto", k) for k in (0, 1, 2, 5)]
    assert chosen == ["finish", "finish", "resume", "resume"]
    assert effective_on_update("abort", 1) == "abort"


def test_statistics_count_by_step() -> None:
    done, _, _ = run(2, "abort", "prompt", n=2)
    sizes = functools.reduce(lambda total, s: total + s["buffer/aborted"], done.statistics, 0.0)
    assert sizes == sum(s["buffer/reissued"] for s in done.statistics) > 0
    assert all(s["buffer/in_flight"] >= s["buffer/aborted"] for s in done.statistics)
