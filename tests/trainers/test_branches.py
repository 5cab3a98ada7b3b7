"""Branches: what is of the parent in one and what is its own, that none is sampled twice, where they end, and
what they say of a prefix."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.config import RewardModelConfig, load
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import ConfigError, DataError, TrainError
from rondo.recipes import quickstart
from rondo.trainers.commands.restarts import Callbacks
from rondo.trainers.commands.train import train
from rondo.trainers.loop.branches import starts_of_steps
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.feeder import EpisodeFeeder
from rondo.trainers.program import plan_program
from rondo.trainers.sessions import Session, open_session
from tests.trainers.conftest import in_a_session, metrics, weights
from tests.trainers.test_asking_ahead import Ranks
from tests.trainers.test_own_prompts import QUIET, first, learn

TOKENS = ("prompt_ids", "response_ids", "rollout_log_probs", "policy_versions", "response_mask")


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(program, *overrides, name="run") -> the run folder."""

    def start(program: Callable[[Session], Awaitable[None]], *overrides: str, name: str = "run") -> Path:
        return in_a_session(recipe, tmp_path / name, program, *QUIET, *overrides)

    return start


async def fetched(batch: BatchRef) -> Batch:
    return await batch.fetch([*TOKENS, *batch.index.columns])


def own_parts(rows: Batch) -> list[tuple[int, ...]]:
    """What was sampled in each branch."""
    forks = rows.scalars("fork").tolist()
    return [tuple(ids[fork:].tolist()) for ids, fork in zip(rows.rows("response_ids"), forks, strict=True)]


def test_a_branch_begins_as_its_parent_and_goes_on_by_itself(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            parents = await fetched(batch)
            lengths = parents.scalars("response_length")
            at = [[0, int(length) // 2, int(length) - 1] for length in lengths]
            branches = await actor.branch(batch, at, n=2)
            rows = await fetched(branches)
            assert len(rows) == 16 * 3 * 2
            assert rows.scalars("fork").tolist() == np.repeat(np.array(at).ravel(), 2).tolist()
            assert rows.scalars("parent_id").tolist() == np.repeat(parents.scalars("row_id"), 6).tolist()
            for name in ("seq", "group_id", "prompt_id", "source"):
                assert rows.scalars(name).tolist() == np.repeat(parents.scalars(name), 6).tolist()
            places = np.repeat(np.arange(16), 6)
            for name in TOKENS:
                theirs = parents.rows(name)
                for row, (place, fork) in enumerate(zip(places, rows.scalars("fork"), strict=True)):
                    end = None if name == "prompt_ids" else fork
                    np.testing.assert_array_equal(rows.rows(name)[row][:end], theirs[place][:end])
            assert (rows.scalars("response_length") > rows.scalars("fork")).all()
            assert rows.scalars("response_length").max() <= 8
            for ids, reward in zip(rows.rows("response_ids"), rows.scalars("reward"), strict=True):
                assert reward == np.float32((ids % 2 == 0).mean())  # of the whole answer
            again = await fetched(await actor.branch(batch, [0] * 16, n=4))
            answers = [*own_parts(again), *own_parts(rows)]
            long = [own for own in answers if len(own) == 8]
            assert len(set(long)) == len(long) > 16
            ids = [*parents.scalars("row_id"), *rows.scalars("row_id"), *again.scalars("row_id")]
            assert len(set(ids)) == len(ids) == 16 + 96 + 64
            # What was sampled behind a prefix has the trainer's own log-probs, as what was before.
            scored = await actor.compute_log_prob(branches)
            checked = await scored.fetch(["old_log_probs", "rollout_log_probs"])
            for ours, sampled in zip(
                checked.rows("old_log_probs"), checked.rows("rollout_log_probs"), strict=True
            ):
                np.testing.assert_allclose(ours, sampled, atol=2e-5)
            await session.log(batch)

    folder = run(program, "trainer.total_steps=1", "actor.mini_batch_size=null")
    (line,) = metrics(folder)
    assert line["rollout/branches"] == 16 * 3 * 2 + 64


def test_the_greedy_answer_is_what_follows_from_each_of_its_beginnings(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session), do_sample=False)
        parents = await fetched(batch)
        at = [range(length) for length in parents.scalars("response_length")]
        rows = await fetched(await actor.branch(batch, at, n=1, temperature=0))
        lengths = parents.scalars("response_length").tolist()
        assert rows.scalars("fork").tolist() == [fork for length in lengths for fork in range(length)]
        whole = np.repeat(np.arange(4), lengths)
        for row, place in enumerate(whole):
            np.testing.assert_array_equal(rows.rows("response_ids")[row], parents.rows("response_ids")[place])
            for name in ("reward", "finish_reason"):
                assert rows.scalars(name)[row] == parents.scalars(name)[place]

    run(program)


async def grows_trees(session: Session) -> None:
    """Two rounds of branches of a prompt's answers, all of which are trained on."""
    actor = await session.actor()
    async for prompts in session.prompts():
        batch = await actor.generate_sequences(prompts)
        half = (batch.index.scalars("response_length") // 2).tolist()
        once = await actor.branch(batch, half, n=2)
        twice = await actor.branch(once, once.index.scalars("fork").tolist(), n=1)
        tree = session.trees(batch, once, twice)
        index = tree.index
        assert len(tree) == 16 + 32 + 32
        assert len(set(index.scalars("row_id").tolist())) == 80
        assert index.scalars("parent_id")[:16].tolist() == [-1] * 16
        assert not index.scalars("fork")[:16].any()
        roots = index.scalars("row_id")[:16]
        owners = [*roots, *np.repeat(roots, 2), *np.repeat(roots, 2)]
        assert index.scalars("tree_id").tolist() == owners
        assert index.scalars("parent_id")[48:].tolist() == index.scalars("row_id")[16:48].tolist()
        with pytest.raises(DataError, match="go on from rows that are not there"):
            session.trees(batch, twice)
        await learn(session, actor, tree)


@pytest.mark.parametrize(
    "where",
    [pytest.param((), marks=pytest.mark.slow), ("trainer.max_staleness=2", "trainer.on_update=finish")],
    ids=["k=0", "k=2"],
)
def test_a_program_of_trees_ends_with_the_same_bits_after_a_break(run: Any, where: tuple[str, ...]) -> None:
    settings = (*where, "trainer.total_steps=3", "checkpoint.every=1", "checkpoint.export=true")

    async def breaks(session: Session) -> None:
        log = session.log

        async def broken(*arguments: Any) -> None:
            if session.step == 1:
                raise InterruptedError
            await log(*arguments)

        session.log = broken  # type: ignore[method-assign]
        await grows_trees(session)

    whole = run(grows_trees, *settings, name="whole")
    with pytest.raises(InterruptedError):
        run(breaks, *settings, name="broken")
    broken = run(grows_trees, *settings, name="broken")
    assert len(metrics(whole)) == 3
    assert metrics(broken) == metrics(whole)
    assert weights(broken) == weights(whole)


def test_a_place_is_worth_what_its_branches_got(run: Any) -> None:
    """With most=2 the third place is worth what the row got."""

    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session))
        long = np.flatnonzero(batch.index.scalars("response_length") > 4)
        batch = batch.take(long)
        assert len(batch) > 8
        seen = []
        branch = type(actor._program._branches(actor._policy)).__call__

        async def spied(*arguments: Any) -> BatchRef:
            seen.append(await branch(*arguments))
            return seen[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(actor._program._branches(actor._policy)), "__call__", spied)
            valued = await actor.branch_values(batch, [[4, 0, 2]] * len(batch), n=3, most=2)
        (branches,) = seen
        assert branches.index.scalars("fork").tolist() == [0, 0, 0, 2, 2, 2] * len(batch)
        means = branches.index.scalars("reward").reshape(-1, 2, 3).mean(2)
        columns = (await valued.fetch(["branch_values"])).rows("branch_values")
        for row, (own, column) in enumerate(zip(means, columns, strict=True)):
            assert np.flatnonzero(np.isfinite(column)).tolist() == [0, 2, 4]
            np.testing.assert_allclose(column[[0, 2]], own, rtol=1e-6)
            assert column[4] == batch.index.scalars("reward")[row]

    run(program)


def test_values_without_a_part_of_the_reward_are_refused(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session, 1))
        loop = actor._program.run
        judged = dataclasses.replace(
            loop.config.reward, models=(RewardModelConfig(name="judge", path="nowhere"),)
        )
        loop.config = dataclasses.replace(loop.config, reward=judged)
        with pytest.raises(ConfigError, match=r"reward\.models \(judge\) is part of"):
            await actor.branch_values(batch, [0] * len(batch), n=1)

    run(program)


def test_places_that_cannot_be_are_named(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        async for number in session.steps():
            asked = session.prompt("How many?")
            if number == 0:
                batch = await actor.generate_sequences([asked], n=2)
                lengths = batch.index.scalars("response_length").tolist()
                with pytest.raises(DataError, match="1 places for 2 rows"):
                    await actor.branch(batch, [0])
                for wrong in (lengths[0] + 1, -1, 0.5):
                    with pytest.raises(DataError, match="is no place"):
                        await actor.branch(batch, [wrong, 0])
                with pytest.raises(DataError, match="no place in any"):
                    await actor.branch(batch, [[], []])
                with pytest.raises(DataError, match=f"at token {lengths[1]} of row 1 has nothing to sample"):
                    await actor.branch(batch, [0, lengths[1]])
                with pytest.raises(DataError, match="of row 1 has no token behind it"):
                    await actor.branch_values(batch, [0, lengths[1]], n=1)
                with pytest.raises(DataError, match="has nothing to sample"):
                    await actor.branch(batch, [2, 0], max_tokens=2)
                with pytest.raises(DataError, match="more than the engines' 72"):
                    await actor.branch(batch, [0, 0], max_tokens=70)
                for options in ({"n": 0}, {"n": 2, "temperature": 0}):
                    with pytest.raises(ConfigError, match="branches at temperature"):
                        await actor.branch(batch, [0, 0], **options)
                # What was cut off goes on where more tokens are allowed.
                cut = await actor.generate_sequences([session.prompt("And?")], n=2, max_tokens=2)
                assert cut.index.scalars("finish_reason").tolist() == ["length"] * 2
                longer = await actor.branch(cut, [2, 2])
                assert (longer.index.scalars("response_length") > 2).all()
                await learn(session, actor, batch)
                with pytest.raises(TrainError, match="branch after update_actor"):
                    await actor.branch(batch, [0, 0])
                kept = batch
            else:
                with pytest.raises(DataError, match="were not handed over in this step"):
                    await actor.branch(kept, [0, 0])
                break

    run(program, "trainer.total_steps=2", "actor.mini_batch_size=null")


def test_a_branch_of_what_nobody_knows_is_as_little_known(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        asked = [session.prompt("How many?")] * 2
        rows = await session.rows(asked, [np.array([3, 4, 5])] * 2)
        branches = await actor.branch(rows, [2, 2], n=2)
        said = (await branches.fetch(["rollout_log_probs"])).rows("rollout_log_probs")
        assert [np.isnan(row).tolist()[:3] for row in said] == [[True, True, False]] * 4
        branches = branches.with_index({"advantages": np.ones(4, np.float32)})
        with pytest.raises(TrainError, match="4 of 4 rows came without"):
            await actor.update_actor(branches)

    loss = "algorithm.policy_loss=tests/trainers/test_branches.py:reads_the_sampler"
    run(program, loss, "algorithm.rollout_correction=null", "actor.mini_batch_size=null")


def reads_the_sampler(log_probs: Any, rollout_log_probs: Any, advantages: Any) -> Any:
    return -(log_probs - rollout_log_probs).exp() * advantages, {}


def test_episodes_are_refused_by_name(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        batch = await actor.generate_sequences(first(session, 1))
        with pytest.raises(ConfigError, match="says_something plays episodes"):
            await actor.branch(batch, [0] * len(batch))

    run(program, "rollout.agent=tests/trainers/test_branches.py:says_something")


async def says_something(messages: Any, policy: Any) -> None:
    await policy.chat(messages)


def test_a_prompt_asked_ahead_is_known_after_a_resume(run: Any) -> None:
    """The answers that a checkpoint has, too: their branches are scored with the prompt's fields."""

    stop_at = [2]

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for number in session.steps():
            while actor.asked <= 1 and number + actor.asked < session.total_steps:
                actor.ask([session.prompt("How many?", fields={"place": number})], n=2)
            for question in actor._program.ahead:  # all answered: a checkpoint has their rows
                await asyncio.gather(*question.groups)
            batch = await actor.answers()
            (prompt,) = actor._program._prompts[1].values()
            assert prompt.fields == {"place": max(0, number - 1)}
            await learn(session, actor, await actor.branch(batch, [1, 1], n=2))
            if number in stop_at:
                raise InterruptedError

    settings = ("trainer.max_staleness=1", "trainer.on_update=finish", "trainer.total_steps=4")
    settings = (*settings, "checkpoint.every=1", "checkpoint.export=true", "actor.mini_batch_size=null")
    with pytest.raises(InterruptedError):
        run(program, *settings, name="broken")
    stop_at.clear()
    whole, broken = run(program, *settings, name="whole"), run(program, *settings, name="broken")
    assert len(metrics(whole)) == 4
    assert metrics(broken) == metrics(whole)
    assert weights(broken) == weights(whole)


def test_a_prompt_is_asked_again_where_its_keys_and_values_are() -> None:
    buffer = Buffer(batch_size=1, max_staleness=0, total_steps=1, total_groups=1)
    feeder = EpisodeFeeder(buffer, Ranks())

    async def rank_of(rank: int) -> int:
        await asyncio.sleep(0)
        return rank

    async def settled(work: Any) -> str:
        await work
        return ""

    async def main() -> None:
        ranks = await asyncio.gather(*(feeder.ask(rank_of, seq) for seq in range(4)))
        assert sorted(ranks) == [0, 0, 1, 1]
        again = await asyncio.gather(*(feeder.ask(rank_of, seq) for seq in (3, 3, 3, 0)))
        assert again == [ranks[3]] * 3 + [ranks[0]]
        await feeder.hold(settled)  # new weights: what was there is nowhere
        buffer.advance(1)
        assert await asyncio.gather(*(feeder.ask(rank_of, 1) for _ in range(3))) == [0, 0, 0]

    asyncio.run(main())


VINES = (
    "algorithm.advantage={name: vineppo}",
    "algorithm.branches={n: 3, ends: [e, a, '1', ' '], most: 2}",
    "algorithm.rollout_correction=null",
)


def trained(recipe: Path, folder: Path, *overrides: str, on_step: Any = None) -> Path:
    train(load([str(recipe)], [f"trainer.run_dir={folder}", *QUIET, *VINES, *overrides]), Callbacks(on_step))
    return folder


def test_a_recipe_of_vines_is_the_program_of_them(recipe: Path, run: Any, tmp_path: Path) -> None:
    """Both value the first two steps of each answer, and end with the same weights."""
    settings = ("checkpoint.export=true", "trainer.total_steps=2")

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            rows = (await batch.fetch(["response_ids"])).rows("response_ids")
            at = [starts_of_steps(session.tokenizer, ids, ["e", "a", "1", " "]) for ids in rows]
            assert sum(map(len, at)) > len(at)
            assert max(map(len, at)) > 2
            batch = await actor.branch_values(await actor.compute_log_prob(batch), at, n=3, most=2)
            batch = await session.compute_advantages(batch)
            await session.log(batch, await actor.update_actor(batch))

    ours = run(program, *settings, VINES[0], VINES[2], name="program")
    theirs = trained(recipe, tmp_path / "recipe", *settings)
    assert weights(ours) == weights(theirs)
    for mine, its in zip(metrics(ours), metrics(theirs), strict=True):
        assert mine["rollout/branches"] == its["rollout/branches"] > 16 * 3
        assert mine["actor/loss"] == its["actor/loss"]


@pytest.mark.parametrize(
    "where",
    [
        (),
        pytest.param(
            (
                "trainer.max_staleness=2",
                "trainer.on_update=finish",
                "cluster.backend=process",
                "cluster.devices=2",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["k=0", "k=2, two processes"],
)
def test_a_recipe_of_vines_goes_on_with_the_same_bits(
    recipe: Path, tmp_path: Path, where: tuple[str, ...]
) -> None:
    settings = (*where, "trainer.total_steps=3", "checkpoint.every=1", "checkpoint.export=true")

    def stops(*_: Any) -> None:
        raise InterruptedError

    whole = trained(recipe, tmp_path / "whole", *settings)
    with pytest.raises(InterruptedError):
        trained(recipe, tmp_path / "broken", *settings, on_step=stops)
    broken = trained(recipe, tmp_path / "broken", *settings)
    assert len(metrics(whole)) == 3
    assert metrics(broken) == metrics(whole)
    assert weights(broken) == weights(whole)


def test_steps_begin_behind_the_tokens_that_end_them() -> None:
    tokenizer = quickstart.tokenizer()
    ids = np.array(tokenizer.encode("3+9=12\n12+9=21\n#### 21", add_special_tokens=False))
    pieces = [tokenizer.decode(part) for part in np.split(ids, starts_of_steps(tokenizer, ids, ["\n"])[1:])]
    assert pieces == ["3+9=12\n", "12+9=21\n", "#### 21"]
    assert starts_of_steps(tokenizer, ids, ["none of it"]) == [0]
    both = np.split(ids, starts_of_steps(tokenizer, ids, ["=", "\n"])[1:])
    assert [tokenizer.decode(part) for part in both] == ["3+9=", "12\n", "12+9=", "21\n", "#### 21"]
    ended = np.array(tokenizer.encode("2\n", add_special_tokens=False))
    assert starts_of_steps(tokenizer, ended, ["\n"]) == [0]  # nothing stands behind its last token


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("algorithm.branches=null",), "branch_values: set algorithm.branches"),
        (("algorithm.advantage=grpo",), "reads no branch_values: remove it"),
        (("rollout.agent=tests/trainers/test_branches.py:says_something",), "plays episodes"),
        (("trainer.replay=runs/other",), "which trainer.replay needs"),
        (("reward.models=[{name: judge, path: somewhere}]",), "by reward.functions alone"),
    ],
)
def test_vines_that_nothing_can_make_are_refused(recipe: Path, overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_program(load([str(recipe)], [*VINES, *overrides]).config)


def test_a_program_is_told_what_makes_its_values(recipe: Path, tmp_path: Path) -> None:
    async def main() -> None:
        settings = [f"trainer.run_dir={tmp_path / 'run'}", *VINES]
        async with open_session([recipe], settings):
            raise AssertionError("it is refused")

    with pytest.raises(ConfigError, match=r"await actor\.branch_values"):
        asyncio.run(main())
