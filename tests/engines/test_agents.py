"""Agents on every engine: tools, environments, stop strings, and weights that come between two turns."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from rondo.agents.external import ExternalAgent
from rondo.agents.tools import Tool, load_tools
from rondo.agents.worlds import Worlds
from rondo.chat import decode, encode_prompt
from rondo.config import load
from rondo.config.schema import EnvironmentConfig, FunctionConfig, ToolConfig
from rondo.core.types import (
    Completion,
    GenerateRequest,
    Prompt,
    Row,
    SamplingParams,
    Trajectory,
    request_seed,
)
from rondo.environments import StepResult
from rondo.trainers.commands.train import train
from rondo_worlds.frozen_lake import FrozenLake
from tests.agents import calling
from tests.agents.own_worlds import Held
from tests.byte_tokenizers import ends_after, late_stop, tokenizer_of_200
from tests.engines.conftest import MAX_CONTEXT, TOLERANCE, Bench, gaps, prompt, request
from tests.trainers.conftest import RECIPE, metrics

pytestmark = pytest.mark.timeout(900)
ASK = ({"role": "user", "content": "3+4?"},)
TOOLS = (ToolConfig("tests.agents.calling.calculator"),)
N = 6


class Episodes:
    """Of one agent on an engine, and every call of the engine in them."""

    def __init__(
        self,
        bench: Bench,
        tokenizer: Any,
        tools: tuple[Tool, ...] = (),
        worlds: Worlds | None = None,
        **agent: Any,
    ) -> None:
        self.engine = bench.engine
        self.asked, self.made = 0, list[Completion]()
        self.tools = tools
        config = FunctionConfig(agent.pop("name"), agent)
        self._agent = ExternalAgent(config, tokenizer, max_context=MAX_CONTEXT, tools=tools, worlds=worlds)
        self.close = self._agent.close

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        self.asked += 1
        self.made.append(await self.engine.generate(request))
        return self.made[-1]

    def start(self, prompt: Prompt, sampling: SamplingParams, n: int = N) -> list[asyncio.Task[Trajectory]]:
        async def episode(number: int) -> Trajectory:
            calling.seq.set(number)
            return await self._agent(
                prompt, self.generate, sampling=sampling, sample_index=number, run_seed=11
            )

        return [asyncio.ensure_future(episode(number)) for number in range(n)]


def in_world(served: Bench, world: EnvironmentConfig, loop: str, **options: Any) -> Episodes:
    """A loop in a world."""
    worlds = Worlds([world])
    return Episodes(served, calling.tokenizer(), worlds=worlds, name=loop, **options)


@pytest.fixture
def with_tools(served: Bench) -> Iterator[Episodes]:
    """The loop of the tools; a model of random weights calls them."""
    episodes = Episodes(served, calling.tokenizer(), load_tools(TOOLS), name="tools", max_turns=4)
    yield episodes
    episodes.close()


def start(episodes: Episodes) -> list[asyncio.Task[Trajectory]]:
    schemas = [dict(tool.schema) for tool in episodes.tools]
    ids = encode_prompt(calling.tokenizer(), ASK, None, schemas)
    question = Prompt(5, "train/0/5", "train", ids, {"tools": schemas}, ASK)
    return episodes.start(question, SamplingParams(400, stop_token_ids=calling.STOP_IDS))


@pytest.fixture(params=["tools", "concatenated", "steps"])
def held(
    request: pytest.FixtureRequest, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Episodes]:
    """Agents that wait between two turns until `Held.opened`, for a tool or for an environment."""

    async def until_opened(seq: int) -> None:
        Held.waiting.add(seq)
        while not Held.opened.is_set():
            await asyncio.sleep(0.001)

    Held.opened.clear()
    Held.waiting.clear()
    monkeypatch.setattr(calling, "before_a_result", until_opened)
    if request.param == "tools":
        episodes = Episodes(served, calling.tokenizer(), load_tools(TOOLS), name="tools", max_turns=4)
    else:
        world = EnvironmentConfig("tests.agents.own_worlds.Held")
        action = "tests.agents.own_worlds.goes"
        episodes = in_world(served, world, request.param, max_steps=4, action=action)
    yield episodes
    Held.opened.set()
    episodes.close()


def calls_in(row: Row) -> list[tuple[Any, ...]]:
    """What stood before each turn of the policy, its tokens, log-probs and versions."""
    context = np.concatenate([row.prompt_ids, row.response_ids])
    begin = len(row.prompt_ids)
    columns = (row.response_ids, row.rollout_log_probs, row.policy_versions)
    return [
        (
            context[: begin + turn.start].tolist(),
            *(values[turn.start : turn.stop].tolist() for values in columns),
        )
        for turn in row.turns
        if turn.kind == "policy"
    ]


def assert_recorded(trajectories: list[Trajectory], made: list[Completion]) -> None:
    """Every call is in one row: what the engine got and what it sampled."""
    found = [call for one in trajectories for row in one.rows for call in calls_in(row)]
    columns = ("prompt_ids", "token_ids", "log_probs", "policy_versions")
    there = [tuple(getattr(one, name).tolist() for name in columns) for one in made]
    assert sorted(found) == sorted(there)


def test_tools(served: Bench, with_tools: Episodes) -> None:
    async def main() -> list[Trajectory]:
        return list(await asyncio.gather(*start(with_tools)))

    trajectories = asyncio.run(main())
    assert {one.outcome for one in trajectories} == {"scored"}
    assert_recorded(trajectories, with_tools.made)
    assert max(gaps(served.model, one).max() for one in with_tools.made) < TOLERANCE
    assert all((one.policy_versions == served.engine.version).all() for one in with_tools.made)
    called = [row for one in trajectories for row in one.rows if len(row.turns) > 1]
    assert called
    tok = calling.tokenizer()
    for row in called:
        for before, result in zip(row.turns, row.turns[1:], strict=False):
            if result.kind == "tool":
                said = decode(tok, row.response_ids[before.start : before.stop])
                told = decode(tok, row.response_ids[result.start : result.stop])
                sums = [int(a) + int(b) for a, b in re.findall(r'"expression": "(\d+)\+(\d+)"', said)]
                assert [int(text) for text in re.findall(r"<tool_response>(\d+)<", told)] == sums


@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_environments(served: Bench, loop: str) -> None:
    """What the policy saw is what the world showed, and the rewards are those of its moves, made again."""
    world = EnvironmentConfig("frozen_lake", options={"size": 2, "holes": 0.3})
    episodes = in_world(served, world, loop, max_steps=5, action="tests.agents.own_worlds.by_length")

    async def main() -> list[Trajectory]:
        return list(await asyncio.gather(*start(episodes)))

    try:
        trajectories = asyncio.run(main())
    finally:
        episodes.close()
    assert {one.outcome for one in trajectories} == {"scored"}
    assert_recorded(trajectories, episodes.made)
    assert max(gaps(served.model, one).max() for one in episodes.made) < TOLERANCE
    tok, steps = calling.tokenizer(), 0
    for one in trajectories:
        lake = FrozenLake(**world.options)
        seen = lake.reset(request_seed(11, "environment", "train/0/5"))
        for call in one.calls:
            asked = decode(tok, call.completion.prompt_ids).rpartition("\n\nActions:")[0]
            assert asked.endswith(seen.text)
            action = call.note.removeprefix("[action] ").partition(" · ")[0]
            result = StepResult(seen) if action == "invalid action" else lake.step(action)
            assert (call.reward, call.anchor) == (result.reward, seen.text)
            seen, steps = result.observation, steps + 1
    assert steps > N


def test_an_agent_with_a_stop_string(served: Bench) -> None:
    tok, ids = tokenizer_of_200(), prompt(9)
    (free,) = served.run([request(ids, 60, seed=request_seed(11, "train", 5, 0))])
    stop = late_stop(tok, free.token_ids, 3)
    count = ends_after(tok, free.token_ids, [stop])
    agent = {"name": "tests.agents.calling.completes", "ids": ids.tolist(), "stop": stop}
    episodes = Episodes(served, tok, **agent)

    async def main() -> list[Trajectory]:
        question = Prompt(5, "train/0/5", "train", ids)
        return list(await asyncio.gather(*episodes.start(question, SamplingParams(100), 1)))

    try:
        (trajectory,) = asyncio.run(main())
    finally:
        episodes.close()
    assert trajectory.failure == ""
    assert_recorded([trajectory], episodes.made)
    (row,) = trajectory.rows
    first, between, second = row.turns
    assert row.response_ids[: first.stop].tolist() == free.token_ids[:count].tolist()
    assert row.response_ids[between.start : between.stop].tolist() == [1, 2, 3]
    assert second.stop - second.start == 8
    assert trajectory.text == decode(tok, free.token_ids[:count]).partition(stop)[0]


@pytest.mark.parametrize("how", ["resume", "abort"])
def test_weights_that_come_between_two_turns(served: Bench, held: Episodes, how: str) -> None:
    """resume: an episode that waits for a tool or an environment asks the engine while that is held, and goes
    on under the new weights. abort: it asks nothing more.
    """
    engine, before = served.engine, served.engine.version

    async def main() -> list[Trajectory]:
        tasks = start(held)
        async with asyncio.timeout(240):
            while len(Held.waiting) + sum(task.done() for task in tasks) < N:
                await asyncio.sleep(0.001)
        waiting, first = [task for task in tasks if not task.done()], held.asked
        assert waiting
        await engine.pause()
        await asyncio.to_thread(served.load, served.other)
        if how == "abort":
            for task in waiting:
                task.cancel()
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(error) for error in ended} == {asyncio.CancelledError}
        Held.opened.set()
        if how == "resume":
            async with asyncio.timeout(240):
                while held.asked < first + len(waiting):
                    await asyncio.sleep(0.001)
        await engine.stats()  # its answer is behind all that was on its way
        assert len(held.made) == first
        await engine.resume()
        await engine.generate(request(prompt(4), 3))
        if how == "abort":
            assert held.asked == first
            return [task.result() for task in tasks if task not in waiting]
        return list(await asyncio.gather(*tasks))

    trajectories = asyncio.run(main())
    if how == "abort":
        return
    assert_recorded(trajectories, held.made)
    versions = [[set(call[-1]) for row in one.rows for call in calls_in(row)] for one in trajectories]
    several = [turns for turns in versions if len(turns) > 1]
    assert several
    assert all(turns == [{before}] + [{before + 1}] * (len(turns) - 1) for turns in several)
    for one in held.made:
        model = served.model if one.policy_versions[0] == before else served.other
        assert gaps(model, one).max() < TOLERANCE


def two_steps(kind: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Trains for two steps on an engine. Returns the rows, which are what that sampled."""
    pytest.importorskip(kind, reason=f"{kind} is not installed in this environment (make test-engines)")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    settings = [
        f"rollout.engine={kind}",
        f"rollout.stop={json.dumps([calling.STOP])}",
        "rollout.max_tokens=300",
        "data.max_prompt_tokens=400",
        "model.tokenizer=tests.agents.calling.tokenizer",
        "model.config.head_dim=32",
        "model.config.max_position_embeddings=1024",
        "actor.token_budget=4096",
        "trainer.total_steps=2",
        "trainer.evaluation={before: false, after: false, every: null}",
        f"trainer.run_dir={folder / 'run'}",
        *more,
    ]
    train(load([str(folder / "tiny.yaml")], settings))
    assert [line["rollout/log_prob_gap"] < 1e-4 for line in metrics(folder / "run")] == [True] * 2
    made = []
    for step in (1, 2):
        rows = pq.read_table(folder / f"run/rollouts/step-00000{step}.parquet").to_pylist()
        assert {row["outcome"] for row in rows} == {"scored"}
        assert {version for row in rows for version in row["policy_versions"]} - {-1} == {step - 1}
        made += rows
    return made


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_steps_of_training_with_tools(kind: str, tmp_path: Path) -> None:
    rows = two_steps(kind, tmp_path, "rollout.tools=[tests.agents.calling.calculator]")
    assert any(1 in row["turn_kinds"] for row in rows)
    assert all("<tool_response>" in row["transcript"] for row in rows if 1 in row["turn_kinds"])


BY_LENGTH = "action: tests.agents.own_worlds.by_length"
RECIPES = {
    "lakes, a prompt for each step, GiGPO": (
        "frozen_lake",
        f"{{name: steps, max_steps: 4, {BY_LENGTH}}}",
        "{name: gigpo, gamma: 0.9}",
    ),
    "bandits in one context, GRPO": ("bandit", f"{{name: concatenated, max_steps: 3, {BY_LENGTH}}}", "grpo"),
    "Sokoban with notes, HGPO": (
        "sokoban",
        f"{{name: steps, max_steps: 4, history: 1, memory: {{name: summary, every: 1}}, {BY_LENGTH}}}",
        "{name: hgpo, gamma: 0.9}",
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_steps_of_training_in_environments(kind: str, recipe: str, tmp_path: Path) -> None:
    world, loop, advantage = RECIPES[recipe]
    options = f"{{environment: {world}, size: 8, prompt: Go}}"
    rows = two_steps(
        kind,
        tmp_path,
        f"data.train=[{{type: function, task: rondo.environments.episodes, options: {options}}}]",
        f"rollout.environments=[{world}]",
        f"rollout.agent={loop}",
        "reward.functions=[environment]",
        f"algorithm.advantage={advantage}",
    )
    trajectories = {row["trajectory_id"] for row in rows}
    steps = sum(line[f"environment/steps/{world}"] * 16 for line in metrics(tmp_path / "run"))
    assert len(trajectories) == 32
    actions = [row["transcript"].count("[action] ") for row in rows]
    assert sum(actions) == steps
    if "one context" in recipe:
        assert len(rows) == 32
        assert any(row["turn_kinds"] == [0, 2, 0, 2, 0] for row in rows)
    else:
        notes = [row["anchor"].startswith("memory: ") for row in rows]
        assert any(notes) == ("notes" in recipe)
        assert [not action for action in actions] == notes
