"""Episodes with tools and with an agent in the worker's process: real tools, a policy that says what a script
says, or a tiny model; and training on both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rondo.agents.external import agent_of
from rondo.agents.tools import load_tools
from rondo.chat import decode
from rondo.config.schema import FunctionConfig, RolloutConfig, ToolConfig
from rondo.core.errors import ConfigError, RewardError
from rondo.core.types import Completion, GenerateRequest
from rondo.recipes.quickstart import tokenizer
from rondo.rollout import NativeEngine
from tests.agents.scripted import call, episode, prompt_with, saying
from tests.agents.test_updates import SETTINGS, rows_of
from tests.messages import full_text
from tests.serving.conftest import TOKENIZER
from tests.trainers.conftest import metrics, weights

OWN = "tests/agents/own_tools.py"


def test_the_policy_calls_tools_until_it_answers() -> None:
    policy = saying(
        f"Let me see. {call('calculator', expression='3 + 4')}",
        call("weather", city="Oslo") + call("weather", city="Atlantis"),
        "#### 7",
    )
    tools = [ToolConfig("calculator"), ToolConfig(f"{OWN}:weather")]
    trajectory, values = episode(policy, FunctionConfig("tools"), tools)
    assert (trajectory.outcome, trajectory.failure, trajectory.text) == ("scored", "", "#### 7")
    (row,) = trajectory.rows
    assert [turn.kind for turn in row.turns] == ["policy", "tool", "policy", "tool", "policy"]
    said = [decode(TOKENIZER, row.response_ids[turn.start : turn.stop]) for turn in row.turns]
    assert "<tool_response>7</tool_response>" in said[1]
    assert "<tool_response>Oslo: 20 C (all)</tool_response>" in said[3]
    assert "<tool_response>Error: no such city</tool_response>" in said[3]
    assert '"calculator"' in policy.asked[0]  # its schema, in the prompt
    assert np.array_equal(row.prompt_ids, prompt_with(load_tools(tools)).token_ids)
    expected = {
        "agent/calls": 3,
        "agent/tool_calls": 3,
        "agent/tool_calls/calculator": 1,
        "agent/tool_calls/weather": 2,
        "agent/tool_errors/calculator": 0,
        "agent/tool_errors/weather": 1,
        "agent/tool_failures/weather": 0,
        "agent/invalid_calls": 0,
    }
    assert {name: values[name] for name in expected} == expected
    assert 0 < values["agent/tool_seconds_share"] < 1


def test_turns_are_bounded() -> None:
    policy = saying(*[call("calculator", expression="1 + 1")] * 2, "never asked")
    agent = FunctionConfig("tools", {"max_turns": 2})
    trajectory, values = episode(policy, agent, [ToolConfig("calculator")])
    assert [turn.kind for turn in trajectory.turns] == ["policy", "tool", "policy"]
    assert (trajectory.outcome, trajectory.text) == ("scored", "")  # the runner decodes the response
    assert values["agent/tool_calls"] == 1


def test_a_wrong_call_is_an_observation_and_counted() -> None:
    policy = saying(
        call("calculater", expression="1"),
        call("calculator", expresion="1"),
        '<tool_call>{"name": "calculator", "arguments": }</tool_call>',
        f'{call("calculator", expression="1 + 1")}<tool_call>{{"arguments": {{}}}}</tool_call>',
        "#### 1",
    )
    trajectory, values = episode(policy, FunctionConfig("tools"), [ToolConfig("calculator")])
    assert trajectory.outcome == "scored"
    said = [asked.rpartition("user")[2] for asked in policy.asked]
    assert "Error: a tool call names a tool that there is not. There are these tools: calculator" in said[1]
    assert "Error: wrong arguments: expression: Field required; expresion: Extra inputs" in said[2]
    assert "Error: a tool call is no JSON." in said[3]
    assert "<tool_response>2</tool_response>" in policy.asked[4]
    assert "Error: a tool call has no name." in said[4]
    assert (values["agent/invalid_calls"], values["agent/tool_calls"]) == (4, 1)
    assert len(trajectory.rows) == 1


@pytest.mark.parametrize(("what", "why"), [("raises", "raised LookupError"), ("hangs", "took longer than")])
def test_a_tool_that_is_down_ends_the_episode_as_such(what: str, why: str) -> None:
    """With what the policy said, for reading; it is no reward of 0."""
    tools = [ToolConfig(f"{OWN}:breaks", timeout_seconds=0.2 if what == "hangs" else 30.0)]
    trajectory, values = episode(saying(call("breaks", what=what)), FunctionConfig("tools"), tools)
    assert trajectory.outcome == "tool_error"
    assert trajectory.failure.startswith(f"the tool breaks {why}")
    assert [turn.kind for turn in trajectory.turns] == ["policy"]
    assert '"breaks"' in trajectory.transcript
    assert values["agent/tool_failures/breaks"] == 1


def test_an_agent_cannot_make_a_reward_of_a_tool_that_is_down() -> None:
    tools = [ToolConfig(f"{OWN}:breaks")]
    trajectory, _ = episode(saying("I guess 7"), FunctionConfig(f"{OWN}:swallows"), tools)
    assert trajectory.outcome == "tool_error"


def test_what_a_tool_has_said_is_changed_by_nobody() -> None:
    """Neither by the tool, in a later call, nor by the agent."""
    trajectory, _ = episode(
        saying("Let me see."), FunctionConfig(f"{OWN}:rewrites"), [ToolConfig(f"{OWN}:Keeps")]
    )
    assert re.search("ValueError: this list is lent and read-only", trajectory.failure)
    assert [result.data for result in trajectory.tool_results] == [{"ids": ["0"]}, {"ids": ["0", "1"]}]


@pytest.mark.parametrize(("on_full", "outcome"), [("score", "scored"), ("drop", "context_full")])
def test_a_context_that_is_full_is_cut_off_and_counted(on_full: str, outcome: str) -> None:
    """With its transcript, for reading."""
    policy = saying(call("breaks", what="much"), "never asked")
    tools = [ToolConfig(f"{OWN}:breaks", max_tokens=150)]
    settings = {"max_tokens": 100, "on_full": on_full}
    trajectory, values = episode(policy, FunctionConfig("tools"), tools, **settings)
    assert (trajectory.outcome, trajectory.finish_reason) == (outcome, "length")
    assert bool(trajectory.failure) == (on_full == "drop")
    assert '"breaks"' in trajectory.transcript
    assert len(policy.asked) == 1
    assert values["agent/full_share"] == 1


@pytest.mark.parametrize("ends", ["<|im_end|>", "<|endoftext|>"])
def test_what_share_of_answers_was_tokenised_again(ends: str) -> None:
    """Of a call's tokens and a text's: where the template ends the last text otherwise than earlier ones, it
    cannot go on behind that.
    """
    tok = tokenizer()
    tok.tool_format = "hermes"
    tok.chat_template = f"""\
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' + m.content }}}}
{{%- for c in m.tool_calls or [] %}}{{{{ '<tool_call>' + (c.function | tojson) }}}}</tool_call>{{% endfor %}}
{{{{- '{ends}' if loop.last and m.role == 'assistant' and not m.tool_calls else '<|im_end|>\\n' }}}}
{{%- endfor %}}{{{{- '<|im_start|>assistant\\n' if add_generation_prompt }}}}"""
    called, unread = call("calculator", expression="3 + 4"), "<tool_call>7</tool_call>"
    policy = saying(called, unread, "#### 7")
    trajectory, values = episode(policy, FunctionConfig("tools"), [ToolConfig("calculator")], tokenizer=tok)
    of_call, of_text = (len(TOKENIZER(text)["input_ids"]) + 1 for text in (called, unread))  # and their ends
    whole = ends == "<|endoftext|>"
    assert values["rollout/reencoded_share"] == (of_text / (of_call + of_text) if whole else 0)
    assert [len(row.turns) for row in trajectory.rows] == [5]  # to the same tokens, this time


def test_an_agent_of_ones_own_with_policy_and_tools(engine: NativeEngine) -> None:
    calls: list[Completion] = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        calls.append(await engine.generate(request, on_tokens))
        return calls[-1]

    agent = FunctionConfig(f"{OWN}:planner", {"asks": 2})
    trajectory, values = episode(generate, agent, [ToolConfig(f"{OWN}:Counter")], max_tokens=100)
    assert trajectory.outcome == "scored"
    assert trajectory.text.startswith("2 ")
    assert len(trajectory.rows) == len(calls) == 4
    assert values["agent/calls"] == 4
    found = sorted((row.prompt_ids.tolist(), row.response_ids.tolist()) for row in trajectory.rows)
    assert found == sorted((made.prompt_ids.tolist(), made.token_ids.tolist()) for made in calls)
    assert [1, 2, 3] in [prompt for prompt, _ in found]


def test_which_agent_a_run_has() -> None:
    assert agent_of(RolloutConfig()) is None
    assert agent_of(RolloutConfig(tools=(ToolConfig("calculator"),))) == FunctionConfig("tools")
    own = FunctionConfig("a.py:b")
    assert agent_of(RolloutConfig(tools=(ToolConfig("calculator"),), agent=own)) == own


# ---- training


def test_training_with_tools(run: Any) -> None:
    """A tiny model calls none of its own accord: what it says is trained on with the schema in the prompt,
    the log-probs are the trainer's, and a run that stopped goes on to the same weights.
    """
    folder = run("tools", "rollout.tools=[calculator]", "checkpoint.every=1")
    for step in (1, 2):
        rows = pq.read_table(folder / f"rollouts/step-00000{step}.parquet").to_pydict()
        assert all('"calculator"' in decode(TOKENIZER, np.array(ids)) for ids in rows["prompt_ids"])
    lines = metrics(folder)[1:]
    assert all(line["rollout/log_prob_gap"] < 1e-5 for line in lines)
    assert all(line["agent/tool_failures/calculator"] == 0 for line in lines)
    parts = run("parts", "rollout.tools=[calculator]", "checkpoint.every=1", "trainer.total_steps=1")
    run("parts", "rollout.tools=[calculator]", "checkpoint.every=1")
    assert weights(parts) == weights(folder)


@pytest.mark.slow
def test_training_without_episodes_whose_context_was_full(run: Any, tmp_path: Path) -> None:
    settings = (*SETTINGS, "rollout.max_tokens=160", "rollout.on_full=drop")
    folder = run("dropped", *settings, "reward.max_dropped_share=1")
    rows = rows_of(folder)
    assert {row["outcome"] for row in rows} == {"scored", "context_full"}
    full = [row for row in rows if row["outcome"] == "context_full"]
    assert {row["finish_reason"] for row in full} == {"length"}
    assert all(row["turn_kinds"] and row["failure"] for row in full)
    shares = [line["agent/full_share"] for line in metrics(folder) if "agent/full_share" in line]
    assert all(0 < share < 1 for share in shares)
    assert shares
    with pytest.raises(RewardError, match=full_text("Raise rollout.max_tokens, or take fewer")):
        run("stopped", *settings, "reward.max_dropped_share=0.01")
    # The step that never was: groups with failures, one with too few that are scored among them.
    rows = rows_of(tmp_path / "stopped")
    full = [row for row in rows if row["outcome"] == "context_full"]
    assert 0 < len(full)
    assert all("[policy] " in row["transcript"] and row["failure"] for row in full)
    assert {row["group_id"] for row in rows} == {row["group_id"] for row in full}


@pytest.mark.slow
def test_one_turn_in_process_is_training_without(run: Any) -> None:
    mine = run("mine", "rollout.agent={name: tools, max_turns: 1}")
    assert weights(mine) == weights(run("built_in"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.tools=[calculater]", "did you mean 'calculator'"),
        ("rollout.tools=[{name: calculator, timeout: 3}]", "timeout"),
        (f"rollout.agent={OWN}:not_async", "make it `async def`"),
        ("rollout.agent={name: tools, max_turn: 3}", "did you mean 'max_turns'"),
        ("rollout.on_full=drop", "neither rollout.agent nor rollout.tools"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(run: Any, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run("none", override)
