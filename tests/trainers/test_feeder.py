"""The feeder with the real engine on a tiny model: greedy baselines, and groups that are filtered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.config import load
from rondo.config.schema import Config, FunctionConfig
from rondo.controller import start_cluster
from rondo.core.columns import GREEDY_REWARD
from rondo.core.errors import ConfigError, RewardError
from rondo.core.types import SamplingParams, StepStats
from rondo.trainers.commands.check import check_rl
from rondo.trainers.loop.buffer import Buffer, group_filter
from rondo.trainers.loop.engine_side import EngineSide
from rondo.trainers.loop.publish import WeightPublisher
from rondo.trainers.program.inputs import Prompts, complete_model, load_prompts, settled
from rondo.trainers.program.roles import create_model, create_rollout
from rondo.trainers.program.step import Roles
from rondo.workers.rollout import RolloutWorker
from tests.messages import full_text
from tests.trainers.drops import Drops

SCORERS = """
from rondo.rewards import reward_function

def checksum(prompt, trajectory):
    return float(trajectory.response_ids.sum() % 97)

def not_the_greedy_one(prompt, trajectory):
    if trajectory.sample_index == 4 and prompt.seq % 2 == 0:
        raise KeyError("no answer")
    return 1.0

@reward_function(group=True)
def rank(trajectories):
    return [float(i) for i in range(len(trajectories))]
"""


@pytest.fixture
def with_rollout(recipe: Path) -> Callable[..., Any]:
    """with_rollout(use, *overrides): `use(roles, prompts, config)` on a running engine."""

    def start(use: Callable[[Roles, Prompts, Config], Awaitable[Any]], *overrides: str) -> Any:
        config = complete_model(settled(load([str(recipe)], [*overrides]).config))

        async def main() -> Any:
            cluster = await start_cluster(config.cluster)
            try:
                actor = await create_model(cluster, "actor", config)
                prompts = load_prompts(config)
                rollout = await create_rollout(cluster, config, actor.devices)
                return await use(Roles(actor, rollout), prompts, config)
            finally:
                await cluster.shutdown()

        return asyncio.run(main())

    return start


async def take(
    buffer: Buffer, roles: Roles, prompts: Prompts, config: Config, *, steps: int = 1, **options: Any
) -> list[dict[str, Any]]:
    """Rows of the next steps' groups, as a mapping of columns per step."""
    side = EngineSide(config, roles, prompts, (), Path(), **options)
    feeder = side.feeder(buffer)
    publisher = WeightPublisher(side.route, side, feeder, buffer, shared=True)
    await publisher.start(0)
    feeding = asyncio.create_task(feeder.run())
    try:
        taken = []
        for step in range(steps):
            groups = await asyncio.wait_for(buffer.take(), 240)
            batches = [await group.ref.fetch() for group in groups]
            taken += [{"seq": [g.seq for g in groups], "rows": [b.table.to_pydict() for b in batches]}]
            taken[-1]["index"] = [group.ref.index for group in groups]
            await publisher.hold(if_shared=True)
            await publisher.publish(step + 1, StepStats())  # the same weights, under a new version
            await publisher.release(step + 1, StepStats())
        return taken
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await feeder.close()


def make_buffer(**options: Any) -> Buffer:
    wanted = {"batch_size": 3, "max_staleness": 0, "total_steps": 1, "total_groups": 10**9, "n": 4} | options
    return Buffer(**wanted)


def test_the_greedy_baseline_is_the_greedy_answers_reward_and_changes_no_sample(
    with_rollout: Callable[..., Any], tmp_path: Path
) -> None:
    async def use(roles: Roles, prompts: Prompts, config: Config) -> Any:
        plain = await take(make_buffer(), roles, prompts, config)
        ours = await take(make_buffer(), roles, prompts, config, greedy_baseline=True)
        greedy = SamplingParams(
            prompts.sampling.max_tokens, temperature=0.0, stop_token_ids=prompts.sampling.stop_token_ids
        )
        asked = [prompts.train.prompt(seq) for seq in range(3)]
        records = await roles.engines.call_rank(0, RolloutWorker.evaluate, asked, greedy, 1, "apart")
        return plain[0], ours[0], records

    (tmp_path / "mine.py").write_text(SCORERS)
    plain, ours, records = with_rollout(use, f"reward.functions=[{tmp_path}/mine.py:checksum]")
    assert ours["seq"] == plain["seq"] == [0, 1, 2]
    for with_baseline, without, index, record in zip(
        ours["rows"], plain["rows"], ours["index"], records, strict=True
    ):
        assert with_baseline[GREEDY_REWARD] == [np.float32(record.reward)] * 4
        assert index.scalars(GREEDY_REWARD).tolist() == with_baseline[GREEDY_REWARD]
        assert {k: v for k, v in with_baseline.items() if k != GREEDY_REWARD} == without
    assert len({record.reward for record in records}) > 1


def test_a_group_whose_greedy_answer_was_not_scored_is_dropped(
    with_rollout: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SCORERS)
    overrides = [f"reward.functions=[{tmp_path}/mine.py:not_the_greedy_one]", "reward.on_error=drop"]

    async def use(roles: Roles, prompts: Prompts, config: Config) -> Any:
        buffer = make_buffer(journal=Drops())
        (step,) = await take(buffer, roles, prompts, config, greedy_baseline=True)
        strict = make_buffer(n=4, max_dropped_share=0.5)
        with pytest.raises(RewardError, match=r"8 without a greedy baseline"):
            await take(strict, roles, prompts, config, greedy_baseline=True)
        return step["seq"], buffer.journal

    seqs, dropped = with_rollout(use, *overrides)
    assert seqs == [1, 3, 5]
    assert dropped == dict.fromkeys([0, 2, 4], "the greedy baseline was not scored")


def test_a_baseline_and_a_scorer_of_groups_exclude_each_other(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORERS)
    overrides = ["algorithm.advantage=remax", f"reward.functions=[{tmp_path}/mine.py:rank]"]
    with pytest.raises(ConfigError, match=full_text("scores a whole group of answers; remove")):
        check_rl(load([str(recipe)], overrides))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_groups_of_one_accuracy_are_replaced(with_rollout: Callable[..., Any], max_staleness: int) -> None:
    """Exactly the groups are trained on, in order, that are mixed when all are generated without a filter."""

    async def use(roles: Roles, prompts: Prompts, config: Config) -> Any:
        everything = await take(make_buffer(batch_size=12), roles, prompts, config)
        keep = group_filter(FunctionConfig("mixed_accuracy"))
        bounds = {"max_staleness": max_staleness, "total_steps": 2, "total_groups": 12}
        buffer = make_buffer(keep=keep, journal=Drops(), **bounds)
        return everything[0], await take(buffer, roles, prompts, config, steps=2), buffer

    scorer = "reward.functions=[tests/trainers/scorers.py:first_is_even]"
    everything, steps, buffer = with_rollout(use, scorer, "rollout.max_tokens=2")
    accuracies = [rows["accuracy"] for rows in everything["rows"]]
    assert accuracies == [rows["reward"] for rows in everything["rows"]]
    mixed = [seq for seq, accuracy in enumerate(accuracies) if len(set(accuracy)) == 2]
    assert 3 <= len(mixed) < 12
    assert [seq for step in steps for seq in step["seq"]] == mixed[:6]
    assert set(buffer.journal.values()) <= {"all samples have the same accuracy"}
    assert set(buffer.journal) | set(mixed) >= set(range(mixed[:6][-1]))


def test_a_filter_without_an_accuracy_and_one_that_returns_no_reason(
    with_rollout: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def truth(reward):\n    return True\n")
    functions = ["tests/trainers/scorers.py:first_is_even", "tests/trainers/scorers.py:even_share"]

    async def use(roles: Roles, prompts: Prompts, config: Config) -> None:
        keep = group_filter(FunctionConfig("mixed_accuracy"))
        with pytest.raises(ConfigError, match=full_text("name one in reward.accuracy")):
            await take(make_buffer(keep=keep), roles, prompts, config)
        keep = group_filter(FunctionConfig(f"{tmp_path}/mine.py:truth"))
        with pytest.raises(Exception, match=full_text("returned True; a filter returns None")):
            await take(make_buffer(keep=keep), roles, prompts, config)

    with_rollout(use, f"reward.functions=[{', '.join(functions)}]")
