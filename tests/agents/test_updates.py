"""New weights while episodes are between two turns, and groups that a filter drops: of agents that use tools,
act in environments, and begin several contexts.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rondo.core.types import Completion, GenerateRequest
from rondo.rollout import NativeEngine
from rondo.trainers.loop.feeder import EpisodeFeeder
from rondo.workers.rollout import RolloutWorker
from tests.agents import calling
from tests.trainers.conftest import metrics, weights

SETTINGS = (
    "model.tokenizer=tests.agents.calling.tokenizer",
    "rollout.tools=[tests.agents.calling.calculator]",
    f"rollout.stop={json.dumps([calling.STOP])}",
    "rollout.max_tokens=300",
    "actor.token_budget=8192",
    "trainer.evaluation={before: false, after: false, every: null}",
    "trainer.max_staleness=1",
)
ROWS = "environment: tests.agents.own_worlds.Waits, size: 64, prompt: Go"
IN_WORLD = (
    "rollout.tools=[]",
    "rollout.environments=[{name: tests.agents.own_worlds.Waits, timeout_seconds: 240}]",
    f"data.train=[{{type: function, task: rondo.environments.episodes, options: {{{ROWS}}}}}]",
    "data.shuffle=false",
)
LOOP = "max_steps: 3, action: tests.agents.own_worlds.goes"
AGENTS: dict[str, tuple[str, ...]] = {
    "tools": (),
    "several contexts": ("rollout.agent=tests.agents.calling.asks_twice",),
    "over HTTP": ("rollout.agent=tests.agents.calling.over_http", "rollout.tools=[]"),
    "in an environment": (*IN_WORLD, f"rollout.agent={{name: concatenated, {LOOP}}}"),
    "a prompt for each step": (*IN_WORLD, f"rollout.agent={{name: steps, {LOOP}}}"),
}
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name == "in an environment")) for name in AGENTS]
BATCH, N = 4, 4


class Watch:
    """What the engine made for episodes of training. With `close`, tools of prompts of the first batch wait
    until every trajectory of both batches has its first answer, and those of the second for the update.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[Completion] = []
        self.cancelled = 0
        self._begun: set[str] = set()
        self._opened = True
        self._patch = patch
        generate, run_group = NativeEngine.generate, RolloutWorker.run_group

        async def noting(engine: NativeEngine, request: GenerateRequest, on_tokens: Any = None) -> Completion:
            made = await generate(engine, request, on_tokens)
            if request.request_id.startswith("train/"):
                self.made.append(made)
                self._begun.add(request.request_id.rsplit("/", 2)[0])
            return made

        @functools.wraps(run_group)
        async def of_prompt(worker: RolloutWorker, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            calling.seq.set(prompt.seq)
            return await run_group(worker, prompt, *args, **kwargs)

        patch.setattr(NativeEngine, "generate", noting)
        patch.setattr(RolloutWorker, "run_group", of_prompt)

    def close(self, opens: type, method: str, *, after: bool) -> None:
        """Until this method is called for the second time (the first comes before the first prompt): when it
        begins, or after it.
        """
        original, calls = getattr(opens, method), 0

        @functools.wraps(original)
        async def opening(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if not after:
                self._opened = True
            done = await original(*args, **kwargs)
            self._opened = self._opened or calls == 2
            return done

        async def wait(seq: int) -> None:
            try:
                while not self._opened if seq >= BATCH else len(self._begun) < 2 * BATCH * N:
                    await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

        self._opened = False
        self._patch.setattr(opens, method, opening)
        self._patch.setattr(calling, "before_a_result", wait)


@pytest.fixture
def watch() -> Iterator[Watch]:
    with pytest.MonkeyPatch.context() as patch:
        yield Watch(patch)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All that were trained on."""
    tables = [pq.read_table(path) for path in sorted((folder / "rollouts").glob("*"))]
    return [row for table in tables for row in table.to_pylist()]


Made = tuple[list[int], list[int], list[float], list[int]]
"""A call: what the engine got, tokens, log-probs, versions."""


def call_of(made: Completion) -> Made:
    arrays = (made.prompt_ids, made.token_ids, made.log_probs, made.policy_versions)
    return tuple(array.tolist() for array in arrays)  # type: ignore[return-value]


def calls_in(row: dict[str, Any]) -> list[Made]:
    """The turns of the policy."""
    columns = ("response_ids", "rollout_log_probs", "policy_versions")
    starts = [0, *row["turn_stops"]]
    return [
        (row["prompt_ids"] + row["response_ids"][:start], *(row[name][start:stop] for name in columns))  # type: ignore[misc]
        for kind, start, stop in zip(row["turn_kinds"], starts, row["turn_stops"], strict=False)
        if kind == 0
    ]


def versions_by_turn(row: dict[str, Any]) -> list[set[int]]:
    """Of the policy's turns."""
    return [set(versions) for *_, versions in calls_in(row)]


def held_in(rows: list[dict[str, Any]], agent: str) -> list[list[set[int]]]:
    """The versions of each turn where there are several: in a row; where turns are rows, in a trajectory."""
    if agent != "a prompt for each step":
        turns = [versions_by_turn(row) for row in rows]
    else:
        names = dict.fromkeys(row["trajectory_id"] for row in rows)
        own = [[row for row in rows if row["trajectory_id"] == name] for name in names]
        turns = [[turn for row in part for turn in versions_by_turn(row)] for part in own]
    return [versions for versions in turns if len(versions) > 1]


@pytest.mark.slow
@pytest.mark.parametrize("agent", EACH)
@pytest.mark.parametrize("mode", ["finish", "resume", "abort"])
def test_a_trajectory_between_two_turns_when_weights_come(
    run: Any, watch: Watch, mode: str, agent: str
) -> None:
    """finish: goes on under the old weights, and is complete. resume: waits, and goes on under the new ones.
    abort: begins again under the new ones. Every prompt is trained on once, and every call is in one row, as
    the engine got and made it.
    """
    settings = (*SETTINGS, *AGENTS[agent], f"trainer.on_update={mode}")
    if mode == "finish":
        watch.close(EpisodeFeeder, "hold", after=False)
    else:
        watch.close(RolloutWorker, "pause", after=True)
    folder = run("run", *settings)
    rows = rows_of(folder)
    assert sorted({row["seq"] for row in rows}) == list(range(2 * BATCH))
    trajectories = [row["trajectory_id"] for row in rows if row["step_index"] == 0]
    assert len(trajectories) == len(set(trajectories)) == 2 * BATCH * N
    assert {row["outcome"] for row in rows} == {"scored"}
    assert all({0} == set().union(*versions_by_turn(row)) for row in rows if row["seq"] < BATCH)
    late = [row for row in rows if row["seq"] >= BATCH]
    held = held_in(late, agent)
    assert held
    made = sorted(map(call_of, watch.made))
    calls = sorted(call for row in rows for call in calls_in(row))
    if mode == "finish":
        assert {0} == set().union(*(turn for row in late for turn in versions_by_turn(row)))
        free = run("free", *settings)
        assert weights(free) == weights(folder)
        assert repr(rows_of(free)) == repr(rows)  # NaN is equal to itself
    elif mode == "resume":
        assert all(turns == [{0}] + [{1}] * (len(turns) - 1) for turns in held)
    else:
        assert {1} == set().union(*(turn for row in late for turn in versions_by_turn(row)))
        assert watch.cancelled > 0 or agent not in ("tools", "several contexts", "over HTTP")
        assert sum(line["buffer/aborted"] for line in metrics(folder)) == BATCH
        lost = [call for call in made if call not in calls]
        assert len(lost) >= BATCH * N  # the first answers of the second batch
        assert all(set(versions) == {0} for *_, versions in lost)
        made = [call for call in made if call not in lost]
    assert calls == made


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["tools", "several contexts", "a prompt for each step"])
@pytest.mark.parametrize("mode", ["finish", "resume"])
def test_groups_that_a_filter_drops(run: Any, mode: str, agent: str) -> None:
    """Dynamic sampling drops whole groups, all rows of all trajectories, and changes nothing of others."""
    settings = (*SETTINGS, *AGENTS[agent], f"trainer.on_update={mode}", "rollout.n=2")
    settings = (*settings, "reward.functions=[tests.agents.calling.even]")
    plain = {row["row_id"]: row for row in rows_of(run("plain", *settings))}
    filtered = "algorithm.filter={name: mixed_accuracy, max_refills: 20}"
    folder = run("filtered", *settings, filtered)
    rows = rows_of(folder)
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    put = [line for line in journal if line["kind"] == "put"]
    dropped = {line["seq"] for line in put if line["reason"] is not None}
    ready = {line["seq"] for line in put if line["reason"] is None}
    trained = [seq for step in journal if step["kind"] == "take" for seq in step["seqs"]]
    assert len(put) == len(dropped) + len(ready)
    assert dropped
    assert trained == sorted(ready)[: 2 * BATCH]
    counted = sum(line.get("buffer/filtered", 0) for line in metrics(folder))
    assert counted == len([seq for seq in dropped if seq < trained[-1]])
    for seq in trained:
        own = [row for row in rows if row["seq"] == seq]
        assert sorted({row["sample_index"] for row in own}) == [0, 1]
        assert {row["accuracy"] for row in own} == {0.0, 1.0}
        for sample in (0, 1):
            steps = [row["step_index"] for row in own if row["sample_index"] == sample]
            assert steps == list(range(len(steps)))
    assert {row["seq"] for row in rows} == set(trained)
    both = [row for row in rows if row["seq"] < BATCH]  # made before any update
    assert both
    assert [repr(row) for row in both] == [repr(plain[row["row_id"]]) for row in both]
    if mode == "finish":
        assert weights(run("again", *settings, filtered)) == weights(folder)
