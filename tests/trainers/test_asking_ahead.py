"""Asking ahead, and state of a program's own: asynchronous as the stream is, in checkpoints as it is, and
with the same bits after a kill."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections import Counter, UserList, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.checkpoint import pack, unpack
from rondo.core.errors import CheckpointError, RolloutError, TrainError, WorkerError
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.feeder import EpisodeFeeder
from rondo.trainers.sessions import Session, open_session
from tests.trainers.conftest import in_a_session, killed_and_undisturbed, metrics, weights
from tests.trainers.test_own_prompts import QUIET, learn

STEPS = 5
PROCESSES = ("cluster.backend=process", "cluster.devices=2")


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(name, program, *overrides) -> the run folder."""

    def start(name: str, program: Callable[[Session], Awaitable[None]], *overrides: str) -> Path:
        return in_a_session(recipe, tmp_path / name, program, *QUIET, *overrides)

    return start


async def ahead(session: Session) -> None:
    """Asks as many steps ahead as the recipe allows. What is asked follows from what was answered, by a
    state of every kind that a checkpoint takes."""
    actor, state = await session.actor(), session.state
    state.update(seen=0, best=[], mean=np.zeros(3, np.float32), nested={"of": [None, True, "text", 0.1]})
    allowed = session.config.trainer.max_staleness
    async for number in session.steps():
        while actor.asked <= allowed and number + actor.asked < session.total_steps:
            texts = [f"How many? {state['seen']} {place} {state['best']}" for place in range(3)]
            actor.ask([session.prompt(text[:30], fields={"place": 1}) for text in texts], n=3, max_tokens=6)
        batch = await actor.answers()
        state["seen"] += len(batch)
        state["best"] = [*state["best"], int(batch.index.scalars("response_length").max())][-2:]
        state["mean"] = 0.5 * state["mean"] + batch.index.scalars("reward")[:3].astype(np.float32)
        await learn(session, actor, batch)


LENGTH = (f"trainer.total_steps={STEPS}", "checkpoint.every=2", "checkpoint.export=true")


def finish(staleness: int) -> tuple[str, ...]:
    return (f"trainer.max_staleness={staleness}", "trainer.on_update=finish", *LENGTH)


class BrokenError(Exception):
    """In the program, at a step of the test's choice."""


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_program_that_asks_ahead_goes_on_where_it_was(run: Any, staleness: int) -> None:
    async def breaks(session: Session) -> None:
        log = session.log

        async def broken(*arguments: Any) -> None:
            if session.step == 3:
                raise BrokenError
            await log(*arguments)

        session.log = broken  # type: ignore[method-assign]
        await ahead(session)

    whole = run("whole", ahead, *finish(staleness))
    with pytest.raises(BrokenError):
        run("broken", breaks, *finish(staleness))
    broken = run("broken", ahead, *finish(staleness))
    assert metrics(broken) == metrics(whole)
    assert weights(broken) == weights(whole)
    ages = [line["buffer/staleness_max"] for line in metrics(whole)]
    assert ages == [min(step, staleness) for step in range(STEPS)]


def test_what_was_asked_before_the_loop_is_asked_once(run: Any) -> None:
    """A program that goes on asks it again before its loop begins: its checkpoint says what is ahead."""

    async def program(session: Session, breaks: bool = False) -> None:
        actor = await session.actor()
        actor.ask([session.prompt("How many, first?")], n=3, max_tokens=6)
        async for number in session.steps():
            while actor.asked <= 2 and number + actor.asked < session.total_steps:
                actor.ask([session.prompt(f"How many? {number}")], n=3, max_tokens=6)
            if breaks and number == 1:
                raise BrokenError
            await learn(session, actor, await actor.answers())

    settings = (*finish(2)[:2], "trainer.total_steps=4", "checkpoint.every=1", "checkpoint.export=true")
    whole = run("whole", program, *settings)
    with pytest.raises(BrokenError):
        run("broken", lambda session: program(session, breaks=True), *settings)
    broken = run("broken", program, *settings)
    assert metrics(broken) == metrics(whole)
    assert weights(broken) == weights(whole)


@pytest.mark.parametrize("how", ["resume", "abort"])
def test_what_is_in_flight_when_weights_change(run: Any, begun_at_first_update: None, how: str) -> None:
    """An answer has begun by then: it goes on under the new ones, or is asked again."""
    found: dict[str, list[set[int]]] = {}

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for number in session.steps():
            while number == 0 and actor.asked < 3:  # 12 answers each: 16 are there before the first update
                actor.ask([session.prompt(f"How many? {actor.asked} {place}") for place in range(3)])
            batch = await actor.answers()
            versions = (await batch.fetch(["policy_versions"])).rows("policy_versions")
            found.setdefault(how, []).extend({*row.tolist()} for row in versions)
            await learn(session, actor, batch)

    run("run", program, "trainer.max_staleness=2", f"trainer.on_update={how}", "trainer.total_steps=3")
    rows = found[how]
    assert len(rows) == 36
    mixed = sum(len(versions) > 1 for versions in rows)
    assert (mixed > 0) == (how == "resume")
    assert any(versions != {0} for versions in rows)
    assert all(versions == {0} for versions in rows[:12])


def test_what_is_not_answered_yet_is_asked_again(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, inside = await session.actor(), session._program
        prompts = [session.prompt(f"How many? {place}", fields={"x": [1, "a"]}) for place in range(3)]
        actor.ask(prompts, n=2, max_tokens=5)
        state, arrays = inside.state()  # before anything can be answered
        assert inside.waiting() == {}
        await inside.close()
        inside.ahead.clear()
        inside.num_prompts = 0
        inside.load(json.loads(json.dumps(state)), arrays, {})
        (question,) = inside.ahead
        for made, prompt in zip(question.prompts, prompts, strict=True):
            np.testing.assert_equal(dataclasses.asdict(made), dataclasses.asdict(prompt))  # type: ignore[call-overload]
        assert session.prompt("How many?").seq == prompts[-1].seq + 1
        rows = await actor.answers()
        inside._asked = (0, frozenset())
        again = await actor.generate_sequences(prompts, n=2, max_tokens=5)
        assert await rows.fetch() == await again.fetch()

    run("run", program)


def test_a_prompt_that_no_checkpoint_gives_back_is_refused_when_it_is_asked(run: Any) -> None:
    """And not by the checkpoint that comes before its answer, which is a matter of time."""

    async def program(session: Session) -> None:
        actor = await session.actor()
        prompt = session.prompt("How many?", fields={"range": (0, 1)})
        with pytest.raises(CheckpointError, match=r"'\['fields'\]\['range'\] is \(0, 1\)"):
            actor.ask([prompt])
        assert actor.asked == 0
        assert len(await actor.generate_sequences([prompt], n=2)) == 2

    run("run", program)


def test_answers_that_are_too_old_are_refused(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        async for number in session.steps():
            actor.ask([session.prompt("How many?")])
            if number == 0:
                await learn(session, actor, await actor.generate_sequences([session.prompt("How many?")]))
            else:
                with pytest.raises(TrainError, match="a policy 1 versions older"):
                    await actor.answers()
                await actor.answers()
                with pytest.raises(TrainError, match="nothing was asked"):
                    await actor.answers()

    run("run", program, "trainer.total_steps=2")


class Ranks:
    """Two rollout ranks, which only say whether they live."""

    size = 2

    def __init__(self) -> None:
        self.dead: set[int] = set()

    def alive(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.dead]

    async def run_group(self, rank: int, seq: int) -> Any:
        raise AssertionError("nothing is fed")

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def restarted(self) -> str:
        raise AssertionError("not asked")


def test_what_a_rank_takes_with_it_is_asked_of_another() -> None:
    ranks, told = Ranks(), list[str]()
    buffer = Buffer(batch_size=1, max_staleness=0, total_steps=1, total_groups=1)
    feeder = EpisodeFeeder(buffer, ranks, warn=told.append)

    async def dies(rank: int) -> int:
        if rank == 0:
            ranks.dead.add(0)
            raise WorkerError("rollout", 0, "run_group", "the process is gone")
        return rank

    async def fails(rank: int) -> int:
        raise WorkerError("rollout", rank, "run_group", "a fault of the program's")

    async def main() -> None:
        assert await feeder.ask(dies, 0) == 1
        assert len(told) == 1
        with pytest.raises(WorkerError, match="a fault of the program's"):
            await feeder.ask(fails, 0)
        ranks.dead.add(1)
        with pytest.raises(RolloutError, match="no rollout rank is left"):
            await feeder.ask(dies, 0)

    asyncio.run(main())


def test_what_waits_for_lost_weights_is_asked_again_when_new_ones_are_there() -> None:
    """A drain does not wait for an engine that was started again: it has no weights before the publish."""
    buffer = Buffer(batch_size=1, max_staleness=0, total_steps=1, total_groups=1)
    feeder = EpisodeFeeder(buffer, Ranks())
    tries: list[int] = []

    async def hangs_once(rank: int) -> int:
        tries.append(buffer.version)
        if len(tries) == 1:
            await asyncio.Event().wait()
        return rank

    async def stranded(work: Any) -> str:
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        return "an engine was started again"

    async def main() -> None:
        asked = asyncio.ensure_future(feeder.ask(hangs_once, 0))
        while not tries:
            await asyncio.sleep(0)
        await feeder.hold(stranded)
        for _ in range(10):
            await asyncio.sleep(0)
        assert tries == [0]  # not under the old weights
        buffer.advance(1)
        assert await asked == 0
        assert tries == [0, 1]
        again = asyncio.ensure_future(feeder.ask(hangs_once, 0))  # a program's own cancellation ends it
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one", "two"])
def test_a_program_that_is_killed_ends_with_the_same_bits(recipe: Path, tmp_path: Path, where: str) -> None:
    """By SIGKILL, in whatever it does after its third step; in one process, and with two devices' own."""
    settings = [*finish(2), *QUIET[:1], *(PROCESSES if where == "two" else ())]
    killed, whole = killed_and_undisturbed("tests.trainers.test_asking_ahead", tmp_path, recipe, *settings)
    assert weights(killed) == weights(whole)
    assert metrics(killed) == metrics(whole)


def test_a_state_comes_back_as_it_was() -> None:
    arrays: dict[str, np.ndarray] = {}
    state = {
        "numbers": [0, -1, 2**70, 0.1, 1e-320, True, None, "text ü", [], {}],
        "float32": np.array([0.1, np.nan, -np.inf], np.float32),
        "shapes": [np.zeros((0, 3), np.uint8), np.array(7), np.array(["a", "bc"]), np.ones((2, 2), bool)],
        "float64": np.float64(0.1),
    }
    packed = json.loads(json.dumps(pack(state, "state", arrays), allow_nan=False))
    state["float32"][0] = 5  # type: ignore[index]
    found = unpack(packed, arrays)
    state["float32"][0] = np.float32(0.1)  # type: ignore[index]
    np.testing.assert_equal(found, state)
    for mine, its in zip(found["shapes"], state["shapes"], strict=True):  # type: ignore[arg-type]
        assert (mine.dtype, mine.shape) == (its.dtype, its.shape)


@pytest.mark.parametrize(
    "value",
    [
        *(
            (1, 2),
            {1: "a"},
            {"$array": "0"},
            {1, 2},
            float("nan"),
            np.float32(0.1),
            np.int64(3),
            b"",
            object(),
        ),
        *(Counter("ab"), defaultdict(int), UserList([1]), np.ma.masked_array([1.0], [True])),
    ],
)
def test_what_would_come_back_as_something_else_is_named(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"state\['kept'\]\[1\] is "):
        pack({"kept": [0, value]}, "state", {})


def test_a_state_is_looked_at_at_every_steps_end(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        async for _ in session.steps():
            await learn(session, actor, await actor.generate_sequences([session.prompt("How many?")]))
            session.state["range"] = (0, 1)

    with pytest.raises(CheckpointError, match=r"session.state\['range'\] is \(0, 1\)"):
        run("run", program, "trainer.total_steps=2")


if __name__ == "__main__":

    async def main() -> None:
        async with open_session([sys.argv[1]], sys.argv[2:]) as session:
            await ahead(session)

    asyncio.run(main())
