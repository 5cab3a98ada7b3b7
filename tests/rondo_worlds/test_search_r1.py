"""The recipe search_r1: demonstrations say what the tool says, in the tokens of episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rondo.agents.tools import Toolbox, load_tools
from rondo.chat import MessageReader, encode_conversations, encode_prompt
from rondo.config import load
from rondo.config.schema import ToolConfig
from rondo.core.errors import ConfigError
from rondo_search.tool import Search
from rondo_worlds.recipes.search_r1 import demonstrations, rows, tokenizer
from rondo_worlds.search_qa import CORPUS, FIRST, LAST, PLACES, RIVERS, THINGS, corpus, questions


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def first_world() -> list[dict[str, str]]:
    """Of which the first 100 demonstrations are."""
    return corpus(1)


def test_a_demonstration_reads_what_the_recipes_tool_says() -> None:
    """In another world, whose facts are not those that training is about."""
    (tool,) = load(["search_r1"]).config.rollout.tools
    search = Search(**{**tool.options, "corpus": f"{__name__}:first_world"})
    wanted = {one.text: one for one in questions(False, 1)}
    trained = {row["prompt"]: row["answer"] for row in rows()}
    same = 0
    for shown in demonstrations(100, searching_share=1.0):
        question, *searches, answer = shown["messages"]
        asked = wanted[question["content"]]
        found = []
        for asking, said in zip(searches[::2], searches[1::2], strict=True):
            result = search(**asking["tool_calls"][0]["function"]["arguments"])
            assert said["content"] == result.text
            found += result.data["ids"]
        assert found == list(asked.gold)
        assert answer["content"] == f"#### {asked.answer}"
        same += trained.get(asked.text) == asked.answer
    assert same < 15  # one river in twelve


def test_held_out_questions_take_no_passage_of_training() -> None:
    trained = {one for row in rows() for one in row["gold"]}
    held_out = {one for row in rows(128, held_out=True) for one in row["gold"]}
    assert not trained & held_out
    assert {row["prompt"] for row in rows(20, seed=1)} != {row["prompt"] for row in rows(20)}


def test_demonstrations_mostly_give_up() -> None:
    made = demonstrations(2000)
    assert 0.37 < np.mean([len(row["messages"]) == 6 for row in made]) < 0.43
    assert {row["messages"][-1]["content"] for row in made if len(row["messages"]) == 2} == {"#### unknown"}


def test_every_word_is_a_token_and_episodes_begin_as_demonstrations() -> None:
    tok = tokenizer()
    for word in (*FIRST, *LAST, *PLACES, *THINGS, *RIVERS):
        assert len(tok(f" {word}", add_special_tokens=False)["input_ids"]) == 1
    (shown,) = demonstrations(1, searching_share=1.0)
    ((ids, mask),) = encode_conversations(
        tok, [MessageReader().read(shown["messages"])], tools=[shown["tools"]]
    )
    schemas = Toolbox(load_tools([ToolConfig("search", options={"corpus": CORPUS})]), tok).schemas
    prompt = encode_prompt(tok, shown["messages"][:1], None, schemas)
    assert ids[: len(prompt)].tolist() == prompt.tolist()
    assert mask[: len(prompt)].sum() == 0
    assert mask[len(prompt)] == 1


def test_sizes_and_shares_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="size must be from 1 to 504, got 505"):
        rows(505)
    with pytest.raises(ConfigError, match="searching_share from 0 to 1, got 1 and 2"):
        demonstrations(1, searching_share=2)
