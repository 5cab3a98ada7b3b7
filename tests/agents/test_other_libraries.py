"""Agents that were written for other libraries, unchanged (examples/): what they do is trained on."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.chat import decode
from rondo.config import load
from rondo.config.schema import FunctionConfig
from rondo.recipes.tool_tasks import demonstrations
from tests.agents.scripted import call, episode, saying
from tests.serving.conftest import TOKENIZER
from tests.trainers.conftest import metrics, weights


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), [("agents", "agents_sdk"), ("langchain", "langgraph_agent")])
def test_a_tool_of_another_library(module: str, name: str) -> None:
    """A call of its tool, the result, and the answer are one row; the prompt has the tool's schema."""
    pytest.importorskip(module)
    policy = saying(f"Twice. {call('multiply', a=6, b=7)}", "#### 42")
    trajectory, _ = episode(policy, FunctionConfig(f"examples/{name}.py:solve"))
    assert (trajectory.outcome, trajectory.failure, trajectory.text) == ("scored", "", "#### 42")
    (row,) = trajectory.rows
    assert [turn.kind for turn in row.turns] == ["policy", "tool", "policy"]
    said = [decode(TOKENIZER, row.response_ids[turn.start : turn.stop]) for turn in row.turns]
    assert "<tool_response>42</tool_response>" in said[1]
    assert "Multiplies two numbers" in policy.asked[0]


@pytest.mark.parametrize(("module", "name"), [("agents", "agents_sdk"), ("langchain", "langgraph_agent")])
def test_an_agent_of_another_library_that_gives_up(module: str, name: str) -> None:
    """Its own bound on turns is an error of its own: a failed trajectory, with what was said."""
    pytest.importorskip(module)
    policy = saying(*[call("multiply", a=6, b=7)] * 5)
    trajectory, _ = episode(policy, FunctionConfig(f"examples/{name}.py:solve", {"max_turns": 2}))
    assert trajectory.outcome == "rollout_error"
    assert "the agent raised" in trajectory.failure
    assert [turn.kind for turn in trajectory.turns][:3] == ["policy", "tool", "policy"]


def test_the_recipe_of_the_agents_sdk_demonstrates_what_the_agent_asks() -> None:
    pytest.importorskip("agents")
    loaded = load(["examples/agents_sdk.yaml"]).config
    assert loaded.rollout.agent is not None
    assert load([str(loaded.trainer.warm_start)]).config.data.train[0].options["tool"] == "multiply"
    (shown,) = demonstrations("multiply", 1, asking_share=1.0)
    system, _, asking, _, answer = shown["messages"]
    asked = asking["tool_calls"][0]["function"]["arguments"]
    policy = saying(call("multiply", **asked), answer["content"])
    trajectory, _ = episode(policy, loaded.rollout.agent)
    assert trajectory.text == answer["content"]
    assert f"system\n{system['content']}\nuser\n" in policy.asked[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agents_sdk", "langgraph_agent"])
def test_training_an_agent_of_another_library(run: Any, name: str) -> None:
    """The log-probs of what it was answered are the trainer's, and the run can be repeated."""
    pytest.importorskip({"agents_sdk": "agents", "langgraph_agent": "langchain"}[name])
    first, again = (run(each, f"rollout.agent=examples/{name}.py:solve") for each in ("first", "again"))
    lines = metrics(first)[1:]
    assert all(line["rollout/log_prob_gap"] < 1e-5 for line in lines)
    assert all(line["agent/calls"] >= 1 for line in lines)
    assert weights(first) == weights(again)
