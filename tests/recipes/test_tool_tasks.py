"""The tools' tasks: calls that answer, disjoint test prompts, demonstrations in the tokens of episodes."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import numpy as np
import pytest

from rondo.agents.calculator import calculator
from rondo.agents.tools import Toolbox, load_tools
from rondo.chat import MessageReader, encode_conversations, encode_prompt
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError
from rondo.recipes.tool_tasks import TASKS, demonstrations, eval_rows, tokenizer, train_rows
from tests.messages import full_text


def multiply(a: int, b: int) -> str:
    return str(a * b)


def python(code: str) -> str:
    """What the tool of this name returns, without its sandbox."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    return said.getvalue()


TOOLS = {"calculator": calculator, "python": python, "multiply": multiply}


def numbers(text: str) -> list[str]:
    return re.findall(r"[0-9]+", text)


@pytest.mark.parametrize("tool", TASKS)
def test_a_demonstration_asks_what_answers_the_question(tool: str) -> None:
    answers = {row["prompt"]: row["answer"] for row in train_rows(tool, 3000)}
    found = 0
    for row in demonstrations(tool, 300, asking_share=1.0):
        *before, question, asking, said, answer = row["messages"]
        assert [one["role"] for one in before] == ["system"] * (tool == "multiply")
        call = asking["tool_calls"][0]["function"]
        assert call["name"] == tool
        assert TOOLS[tool](**call["arguments"]) == said["content"]
        assert answer["content"] == f"#### {said['content'].strip()}"
        if question["content"] in answers:
            found += 1
            assert answers[question["content"]] == said["content"].strip()
    assert found > 30


@pytest.mark.parametrize("tool", TASKS)
def test_evaluation_numbers_occur_in_no_training_prompt(tool: str) -> None:
    held_out = {tuple(numbers(row["prompt"])) for row in eval_rows(tool, 1000, seed=1)}
    trained = {tuple(numbers(row["prompt"])) for row in train_rows(tool, 8000, seed=1)}
    shown = [row["messages"] for row in demonstrations(tool, 4000, seed=2)]
    trained |= {tuple(numbers(messages[-2]["content"])) for messages in shown if len(messages) == 2}
    assert not held_out & trained
    assert len(held_out) > 50


def test_demonstrations_mostly_give_up() -> None:
    rows = demonstrations("calculator", 2000)
    assert 0.37 < np.mean([len(row["messages"]) == 4 for row in rows]) < 0.43
    assert {row["messages"][-1]["content"] for row in rows if len(row["messages"]) == 2} == {"#### unknown"}


def test_episodes_begin_with_the_tokens_of_demonstrations() -> None:
    """The schemas of rollout.tools, of which the template writes the name, are those of demonstrations."""
    tok = tokenizer()
    (row,) = demonstrations("calculator", 1, asking_share=1.0)
    ((ids, mask),) = encode_conversations(tok, [MessageReader().read(row["messages"])], tools=[row["tools"]])
    schemas = Toolbox(load_tools([ToolConfig("calculator")]), tok).schemas
    assert schemas != row["tools"]
    prompt = encode_prompt(tok, row["messages"][:1], None, schemas)
    assert prompt.tolist() == ids[: int(np.argmax(mask))].tolist()


@pytest.mark.parametrize("function", [train_rows, eval_rows, demonstrations])
def test_wrong_options_are_named(function: Any) -> None:
    with pytest.raises(ConfigError, match=full_text("tool must be one of calculator, python")):
        function("abacus", 4)
    with pytest.raises(ConfigError, match="size"):
        function("calculator", 0)
