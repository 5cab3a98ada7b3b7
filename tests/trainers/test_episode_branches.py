"""Branches of episodes: the environment is where it was when the turn began, or it is said that it is not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import ConfigError, DataError, WorkerError
from rondo.environments import Observation
from rondo.trainers.sessions import Session, open_session
from rondo_worlds.frozen_lake import FrozenLake
from tests.agents.own_worlds import Rooms
from tests.trainers.conftest import in_a_session, killed_and_undisturbed, metrics, weights
from tests.trainers.test_own_prompts import QUIET, first

HERE = "tests.trainers.test_episode_branches"
READS = "action: 'tests/agents/own_worlds.py:by_length'"
LOOPS = {
    "concatenated": f"rollout.agent={{name: concatenated, max_steps: 4, {READS}}}",
    "steps": f"rollout.agent={{name: steps, max_steps: 4, history: 0, {READS}}}",
}
ONE_QUICK = [one if one == "concatenated" else pytest.param(one, marks=pytest.mark.slow) for one in LOOPS]
LAKES = (
    "data.train=[{type: function, task: rondo.environments.episodes, options: {environment: frozen_lake, "
    "size: 8}}]",
    "data.eval=[]",
    "data.max_prompt_tokens=400",
    "reward.functions=[environment, {name: success, weight: 0.0}]",
    "rollout.environments=[{name: frozen_lake, size: 3}]",
    "rollout.max_tokens=250",
    "rollout.n=2",
    "actor.token_budget=8192",
    "model.config.max_position_embeddings=1024",
)
TOKENS = ("prompt_ids", "response_ids", "rollout_log_probs", "policy_versions", "response_mask")


QUICKSTART = "data.train=[{type: function, task: rondo.recipes.quickstart.train_rows, options: {size: 8}}]"
EVEN_SHARE = "reward.functions=[tests/trainers/scorers.py:even_share]"
LEARNT = "reward.functions=[environment, tests/trainers/scorers.py:even_share]"  # no episode gets to the goal
SHORT = f"rollout.stop={json.dumps([*'aeiostnr 0123456789=+<>.', chr(10)])}"


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(program, *overrides, name="run") -> the run folder."""

    def start(program: Callable[[Session], Awaitable[None]], *overrides: str, name: str = "run") -> Path:
        return in_a_session(recipe, tmp_path / name, program, *LAKES, *QUIET, *overrides)

    return start


async def fetched(batch: BatchRef) -> Batch:
    return await batch.fetch([*TOKENS, "turn_rewards", *batch.index.columns])


def turns_of(rows: Batch) -> list[list[int]]:
    """Where the turns of the policy begin in each row."""
    return [np.flatnonzero(np.diff(mask, prepend=0) == 1).tolist() for mask in rows.rows("response_mask")]


def episodes(rows: Batch) -> list[list[int]]:
    """The places of the rows of each episode, in the order of their first ones."""
    names = rows.scalars("trajectory_id").tolist()
    return [[place for place, name in enumerate(names) if name == one] for one in dict.fromkeys(names)]


def context(rows: Batch, place: int, stop: int | None = None) -> list[list[float]]:
    """What a row has up to a place in its response, in every column of tokens."""
    return [rows.rows(name)[place][: None if name == "prompt_ids" else stop].tolist() for name in TOKENS]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_branch_is_its_parent_up_to_the_turn(run: Any, loop: str) -> None:
    """And in the midst of one. The rows of an episode before it are the parent's, those behind it its own."""

    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session))
        parents = await fetched(batch)
        at = turns_of(parents)
        for places, mask in zip(at, parents.rows("response_mask"), strict=True):
            places.extend((np.flatnonzero(mask[1:] & mask[:-1]) + 1).tolist()[:1])
        asked = [(row, fork) for row, places in enumerate(at) for fork in places for _ in range(2)]
        assert len(asked) > 2 * len(parents) >= 16
        assert any(places[-1] not in own for places, own in zip(at, turns_of(parents), strict=True))
        branches = await actor.branch(batch, at, n=2)
        made, whole = await fetched(branches), episodes(parents)
        assert len(episodes(made)) == len(asked)
        ids = [*made.scalars("row_id"), *parents.scalars("row_id")]
        assert len(set(ids)) == len(ids)
        later = 0
        for (row, fork), mine in zip(asked, episodes(made), strict=True):
            theirs = next(places for places in whole if row in places)
            step = theirs.index(row)
            assert made.scalars("step_index")[mine].tolist() == list(range(len(mine)))
            for place, parent in zip(mine[:step], theirs, strict=False):
                assert context(made, place) == context(parents, parent)
                assert made.scalars("parent_id")[place] == parents.scalars("row_id")[parent]
                assert made.scalars("fork")[place] == parents.scalars("response_length")[parent]
            own = mine[step]
            assert context(made, own, fork) == context(parents, row, fork)
            assert made.scalars("parent_id")[own] == parents.scalars("row_id")[row]
            assert made.scalars("fork")[own] == fork
            assert made.rows("response_mask")[own][fork] == 1
            for before, place in zip(mine[step:], mine[step + 1 :], strict=False):
                assert made.scalars("parent_id")[place] == made.scalars("row_id")[before]
                assert made.scalars("fork")[place] == 0
                later += 1
            for name in ("seq", "group_id", "prompt_id"):
                assert set(made.scalars(name)[mine]) == {parents.scalars(name)[row]}
            total = sum(np.nansum(made.rows("turn_rewards")[place]) for place in mine)
            assert made.scalars("reward")[own] == total
        assert (later > 0) == (loop == "steps")
        # What was sampled behind it is sampled after what stands there, by the trainer's reckoning.
        scored = await actor.compute_log_prob(branches)
        checked = await scored.fetch(["old_log_probs", "rollout_log_probs", "response_mask"])
        columns = (checked.rows(name) for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
        for ours, sampled, mask in zip(*columns, strict=True):
            np.testing.assert_allclose(ours[mask > 0], sampled[mask > 0], atol=2e-5)

    run(program, LOOPS[loop], SHORT)


def test_what_environments_write_is_not_generated(run: Any) -> None:
    """Of the stream's episodes, of those that a program asks for, and of branches."""
    decoded: list[int] = []

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for prompts in session.prompts():
            streamed = await fetched(await actor.generate_sequences(prompts))
            batch = await actor.generate_sequences(first(session, start=4))
            asked = await fetched(batch)
            branches = await actor.branch(batch, [places[-1:] for places in turns_of(asked)], n=1)
            made = await fetched(branches)
            decoded.extend(rows.ragged("response_mask")[0].sum().item() for rows in (streamed, asked))
            behind = zip(made.rows("response_mask"), made.scalars("fork"), strict=True)
            decoded.append(sum(mask[fork:].sum() for mask, fork in behind))
            assert min(decoded) > 0
            await session.log(batch)

    folder = run(program, LOOPS["concatenated"], SHORT, "trainer.total_steps=1")
    assert metrics(folder)[0]["rollout/generated_tokens"] == sum(decoded)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_greedy_episode_is_what_follows_from_each_of_its_turns(run: Any, loop: str) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session), do_sample=False)
        parents = await fetched(batch)
        at = turns_of(parents)
        assert sum(map(len, at)) > 8
        made = await fetched(await actor.branch(batch, at, temperature=0))
        owners = [places for places in episodes(parents) for row in places for _ in at[row]]
        for mine, theirs in zip(episodes(made), owners, strict=True):
            for place, parent in zip(mine, theirs, strict=True):
                assert context(made, place) == context(parents, parent)
                assert made.scalars("reward")[place] == parents.scalars("reward")[parent]
                assert made.scalars("finish_reason")[place] == parents.scalars("finish_reason")[parent]

    run(program, LOOPS[loop], SHORT)


def test_a_turn_is_worth_what_its_branches_got(run: Any) -> None:
    """And trees of turns are compared as those of tokens are."""

    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session))
        rows = await fetched(batch)
        at = turns_of(rows)
        seen = []
        branching = type(actor._program._branches(actor._policy))
        branch = branching.__call__

        async def spied(*arguments: Any) -> BatchRef:
            seen.append(await branch(*arguments))
            return seen[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(branching, "__call__", spied)
            valued = await actor.branch_values(batch, at, n=3)
        means = seen[0].index.scalars("reward").reshape(-1, 3).mean(1).tolist()
        columns = (await valued.fetch(["branch_values"])).rows("branch_values")
        found = [column[places].tolist() for column, places in zip(columns, at, strict=True)]
        assert [value for own in found for value in own] == pytest.approx(means)
        assert [np.flatnonzero(np.isfinite(column)).tolist() for column in columns] == at

    run(program, LOOPS["concatenated"], SHORT)


async def grows_trees(session: Session) -> None:
    """Two more episodes of each, from a turn in its middle, and one of each of these, from where it ended."""
    actor = await session.actor()
    async for prompts in session.prompts():
        batch = await actor.generate_sequences(prompts)
        at = [places[len(places) // 2 :][:1] for places in turns_of(await fetched(batch))]
        once = await actor.branch(batch, at, n=2)
        last = [places[-1:] for places in turns_of(await fetched(once))]
        tree = session.trees(batch, once, await actor.branch(once, last))
        index = tree.index
        of_episode = dict[str, set[int]]()
        for name, number in zip(index.scalars("trajectory_id"), index.scalars("tree_id"), strict=True):
            of_episode.setdefault(str(name), set()).add(int(number))
        assert all(len(numbers) == 1 for numbers in of_episode.values())
        assert set.union(*of_episode.values()) == set(
            batch.index.scalars("row_id")[batch.index.scalars("step_index") == 0].tolist()
        )
        tree = await actor.compute_log_prob(tree)
        tree = await session.compute_advantages(tree, "tree_grpo")
        await session.log(tree, await actor.update_actor(tree))


@pytest.mark.parametrize("loop", ONE_QUICK)
def test_trees_of_turns_are_learnt_from(run: Any, loop: str) -> None:
    """A step has 8 episodes, and of each row's turn in the middle 2 more, and so on."""
    folder = run(grows_trees, LOOPS[loop], SHORT, "trainer.total_steps=1", "actor.mini_batch_size=null")
    (line,) = metrics(folder)
    assert line["rollout/branches"] >= 8 * 2 * 2
    assert line["rollout/log_prob_gap"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("place", ["threads", "workers"])
def test_trees_of_turns_end_with_the_same_bits_after_a_kill(recipe: Path, tmp_path: Path, place: str) -> None:
    three = LOOPS["steps"].replace("max_steps: 4", "max_steps: 3")
    settings = (*LAKES, *QUIET, three, SHORT, LEARNT, "checkpoint.every=1", "checkpoint.export=true")
    settings = (*settings, "trainer.total_steps=5", "actor.mini_batch_size=null", "data.batch_size=1")
    if place == "workers":
        settings = (
            *settings,
            "rollout.episode_workers=2",
            "trainer.max_staleness=2",
            "trainer.on_update=finish",
        )
    module = "tests.trainers.test_episode_branches"
    killed, whole = killed_and_undisturbed(module, tmp_path, recipe, *settings)
    assert len(metrics(whole)) == 5
    assert all(line["actor/grad_norm"] > 0 for line in metrics(whole))
    assert metrics(killed) == metrics(whole)
    assert weights(killed) == weights(whole)


class Forgetful(Rooms):
    """Shows something else from the second step on, in every episode but the first ones."""

    episodes = 0

    def reset(self, seed: int, task: Any) -> Observation:
        Forgetful.episodes += 1
        self.number = Forgetful.episodes
        return super().reset(seed, task)

    def step(self, action: str) -> Any:
        result = super().step(action)
        if self.steps != 2 or self.number <= 2:
            return result
        return type(result)(Observation("a garden that was not there", result.observation.actions), 1.0)


class Ends(Forgetful):
    """Ends with the first step, in every episode but the first ones."""

    def step(self, action: str) -> Any:
        result = Rooms.step(self, action)
        return type(result)(result.observation, 1.0, done=self.number > 2)


@pytest.mark.parametrize(
    ("name", "turn", "says"),
    [
        ("Forgetful", 1, ""),
        ("Forgetful", 2, "Forgetful to turn 2 .* turn 2 was asked"),
        ("Forgetful", 3, "Forgetful to turn 3 .* turn 2 was asked"),
        ("Ends", 2, "Ends to turn 2 .* it ended before"),
    ],
)
def test_an_environment_that_does_otherwise_is_named(run: Any, name: str, turn: int, says: str) -> None:
    """And where: up to the turn that is branched it has to show the same."""
    Forgetful.episodes = 0

    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences([session.prompt("Walk.")])
        at = [places[turn] for places in turns_of(await fetched(batch))]
        if not says:
            assert len(await actor.branch(batch, at)) == 2
            return
        with pytest.raises(WorkerError, match=says):
            await actor.branch(batch, at)

    world = f"rollout.environments=[{{name: '{HERE}.{name}'}}]"
    loop = f"rollout.agent={{name: concatenated, max_steps: 4, action: '{HERE}.goes'}}"
    run(program, QUICKSTART, world, loop, SHORT)


class Slippery(FrozenLake):
    """Counts what is done in it."""

    resets = steps = 0

    def reset(self, seed: int, task: Any = None) -> Observation:
        Slippery.resets += 1
        return super().reset(seed, task)

    def step(self, action: str) -> Any:
        Slippery.steps += 1
        return super().step(action)

    def state(self) -> dict[str, Any]:
        return {"at": self._at, "drawn": self._rng.getstate()}


class Restored(Slippery):
    """Is put into a state."""

    def restore(self, state: Any) -> None:
        version, numbers, rest = state["drawn"]
        self._rng.setstate((version, tuple(numbers), rest))
        self._at = tuple(state["at"])


class Misplaced(Slippery):
    """Is put elsewhere."""

    def restore(self, state: Any) -> None:
        self._at = (1, 1)


def world(name: str) -> str:
    return f"rollout.environments=[{{name: '{HERE}.{name}', size: 3, slippery: true, keep_state: true}}]"


@pytest.mark.parametrize("loop", ONE_QUICK)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_environment_that_is_restored_goes_on_as_one_that_acts_again(
    run: Any, loop: str, workers: int
) -> None:
    """And does nothing of what was done before: of the branches its steps are those behind the turn."""
    made, steps, told = {}, {}, []

    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session))
        at = turns_of(await fetched(batch))
        Slippery.resets = Slippery.steps = 0
        once = await actor.branch(batch, at)
        last = [places[-1:] for places in turns_of(await fetched(once))]
        twice = await actor.branch(once, last)
        steps[name] = Slippery.steps, Slippery.resets
        made[name] = await fetched(session.trees(batch, once, twice))
        if name == "Restored":
            for part in (once, twice):
                records = (await part.fetch(["environment_record"])).scalars("environment_record")
                firsts = part.index.scalars("step_index") == 0
                told.extend(len(json.loads(record)) - 1 for record in records[firsts])  # without the reset

    for name in ("Slippery", "Restored"):
        where = (world(name), f"rollout.episode_workers={workers}")
        run(program, QUICKSTART, *where, LOOPS[loop], SHORT, name=name)
    replayed, restored = made["Slippery"], made["Restored"]
    assert [context(restored, row) for row in range(len(restored))] == [
        context(replayed, row) for row in range(len(replayed))
    ]
    for column in ("row_id", "parent_id", "fork", "reward", "step_reward", "anchor_id", "finish_reason"):
        assert restored.scalars(column).tolist() == replayed.scalars(column).tolist()
    if not workers:
        assert 0 < steps["Restored"][0] < steps["Slippery"][0] == sum(told)
        assert steps["Restored"][1] <= steps["Slippery"][1]


def test_an_environment_that_is_restored_to_another_state_is_named(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session))
        at = [places[-1:] for places in turns_of(await fetched(batch))]
        with pytest.raises(WorkerError, match=r"Misplaced: restore\(state\) of the"):
            await actor.branch(batch, at)

    run(program, QUICKSTART, world("Misplaced"), LOOPS["concatenated"], SHORT)


def goes(answer: str, seen: Observation) -> str:
    return "go"


def test_places_that_are_no_turn_are_named(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session, 1))
        rows = await fetched(batch)
        mask, at = rows.rows("response_mask"), turns_of(rows)
        between = [int(np.flatnonzero(own == 0)[0]) for own in mask]
        begin = ", ".join(map(str, at[0]))
        with pytest.raises(
            DataError, match=f"token {between[0]} of row 0 .* its turns there begin at {begin}$"
        ):
            await actor.branch(batch, between)
        with pytest.raises(DataError, match="the policy sampled nothing"):
            await actor.branch(batch, [len(own) for own in mask])

    run(program, LOOPS["concatenated"], SHORT)


def test_a_part_of_an_episode_is_no_parent(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session, 1))
        steps = batch.index.scalars("step_index")
        assert steps.max() > 1
        kept = batch.take(np.flatnonzero(steps != 1))
        with pytest.raises(DataError, match="of which not all rows are there"):
            await actor.branch(kept, [0] * len(kept))

    run(program, LOOPS["steps"], SHORT)


def weather(city: str) -> str:
    """Says how the weather is."""
    return f"fine in {city}"


def test_tools_are_refused_by_name(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences([session.prompt("How is it?")])
        with pytest.raises(ConfigError, match=r"plays episodes that have rollout\.tools"):
            await actor.branch(batch, [0] * len(batch))

    tools = f"rollout.tools=[{{name: '{HERE}.weather'}}]"
    run(program, QUICKSTART, "rollout.environments=[]", tools, EVEN_SHARE)


if __name__ == "__main__":

    async def main() -> None:
        async with open_session([sys.argv[1]], sys.argv[2:]) as session:
            await grows_trees(session)

    asyncio.run(main())
