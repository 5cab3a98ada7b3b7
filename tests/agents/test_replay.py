"""Runs of agents that were broken off, or follow another run's journal, end with its bits, where agent and
tools do the same when they are told the same.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from rondo.core.errors import TrainError, WorkerError
from rondo.workers.rollout import RolloutWorker
from tests.agents import calling
from tests.agents.test_updates import AGENTS, BATCH, EACH, SETTINGS, Watch, calls_in, held_in, rows_of
from tests.agents.test_updates import watch as watch
from tests.messages import full_text
from tests.trainers.conftest import metrics, weights
from tests.trainers.test_journal import assert_equal, broken_off


@pytest.mark.slow
@pytest.mark.parametrize("agent", EACH)
def test_a_replay_of_episodes_held_between_two_turns(run: Any, watch: Watch, agent: str) -> None:
    """Interrupted, too, with such episodes in flight."""
    settings = (*SETTINGS, *AGENTS[agent], "trainer.on_update=resume", "trainer.total_steps=3")
    watch.close(RolloutWorker, "pause", after=True)
    first = run("run", *settings)
    held = [turns for turns in held_in(rows_of(first), agent) if len(set().union(*turns)) > 1]
    assert len(held) > 1
    replay = (*settings, f"trainer.replay={first}", "rollout.max_concurrent=5", "checkpoint.every=1")
    with broken_off(2), pytest.raises(WorkerError, match="broken off"):
        run("again", *replay)
    assert_equal(first, run("again", *replay))


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["tools", "a prompt for each step"])
def test_a_replay_of_episodes_that_were_aborted(run: Any, watch: Watch, agent: str) -> None:
    """What was cancelled between two turns is begun anew there, and not made here."""
    settings = (*SETTINGS, *AGENTS[agent], "trainer.on_update=abort")
    watch.close(RolloutWorker, "pause", after=True)
    first = run("run", *settings)
    assert sum(line["buffer/aborted"] for line in metrics(first)) == BATCH
    made = len(watch.made)
    assert_equal(first, run("again", *settings, f"trainer.replay={first}"))
    assert len(watch.made) - made == sum(len(calls_in(row)) for row in rows_of(first)) < made


@pytest.mark.slow
@pytest.mark.parametrize("agent", EACH)
def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(run: Any, agent: str) -> None:
    settings = (*SETTINGS, *AGENTS[agent], "trainer.total_steps=3", "checkpoint.every=1")
    whole = run("whole", *settings)
    with broken_off(3), pytest.raises(WorkerError, match="broken off"):
        run("parts", *settings)
    parts = run("parts", *settings)
    assert weights(parts) == weights(whole)
    assert repr(rows_of(parts)) == repr(rows_of(whole))


@pytest.mark.slow
def test_episodes_that_clocks_ended(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that took too long, and an episode that did, end as they did there, by the journal."""
    calls = itertools.count()

    async def hangs_at_times(seq: int) -> None:
        if next(calls) in (3, 11):
            await asyncio.sleep(3600)

    monkeypatch.setattr(calling, "before_a_result", hangs_at_times)
    tools = "rollout.tools=[{name: tests.agents.calling.calculator, timeout_seconds: 0.5}]"
    settings = (*SETTINGS, tools, "trainer.on_update=resume")
    first = run("run", *settings)
    outcomes = [row["outcome"] for row in rows_of(first) if row["step_index"] == 0]
    assert outcomes.count("tool_error") == 2
    assert_equal(first, run("again", *settings, f"trainer.replay={first}"))


@pytest.mark.slow
def test_a_tool_that_says_something_else_is_noticed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (*SETTINGS, "trainer.on_update=resume")
    first = run("run", *settings)
    monkeypatch.setattr(calling, "sum", lambda numbers: 7, raising=False)
    with pytest.raises(TrainError, match=full_text("ends after 0 tokens, and there it has")):
        run("again", *settings, f"trainer.replay={first}")
