"""Search-R1 (2503.09516) for a small model that is made here: questions over the made corpus of
`rondo_worlds.search_qa`, whose words are one token each, and demonstrations of which most give up.
Those are of other worlds, in which the same names have other facts: to search is learnt, and no fact.

Use from a recipe: `{type: function, task: rondo_worlds.recipes.search_r1.rows}`,
`model.tokenizer: rondo_worlds.recipes.search_r1.tokenizer`.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rondo.core.errors import ConfigError
from rondo.recipes.quickstart import train_bpe
from rondo.recipes.tool_tasks import tool_tokenizer
from rondo_worlds.search_qa import Question, corpus, questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OF_A_WORLD = 100  # demonstrations
_TOOL = {"type": "function", "function": {"name": "search"}}


def rows(size: int | None = None, seed: int = 0, held_out: bool = False) -> list[dict[str, Any]]:
    """Makes prompts: rows with prompt, answer, and gold, the ids of the two passages that the answer takes.

    size: default all 504 of a half, in random order. held_out: the half of which no passage is in training.
    """
    chosen = list(questions(held_out))
    if size is not None and not 1 <= size <= len(chosen):
        raise ConfigError(f"search_r1: size must be from 1 to {len(chosen)}, got {size}")
    random.Random(f"rondo search_r1 rows: {seed}").shuffle(chosen)
    return [{"prompt": one.text, "answer": one.answer, "gold": list(one.gold)} for one in chosen[:size]]


def demonstrations(size: int = 12800, seed: int = 0, searching_share: float = 0.4) -> list[dict[str, Any]]:
    """Makes conversations for the warm start, 100 of each world: `searching_share` of them search for both
    passages and answer, the others give up.
    """
    if size < 1 or not 0 <= searching_share <= 1:
        raise ConfigError(
            f"search_r1: need size >= 1 and searching_share from 0 to 1, got {size} and {searching_share}"
        )
    rng = random.Random(f"rondo search_r1 demonstrations: {seed}")
    made = []
    for first in range(0, size, _OF_A_WORLD):
        number = 1 + first // _OF_A_WORLD
        said = _what_is_said(number)
        for one in rng.choices(questions(False, number), k=min(_OF_A_WORLD, size - first)):
            made.append(_demonstration(one, said, searches=rng.random() < searching_share))
    return made


def _demonstration(question: Question, said: Mapping[str, str], searches: bool) -> dict[str, Any]:
    """Writes a demonstration. said: what the tool says of each entity."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    for entity in question.hops if searches else ():
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": entity}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": said[entity]})
    answer = question.answer if searches else "unknown"
    messages.append({"role": "assistant", "content": f"#### {answer}"})
    return {"messages": messages, "tools": [_TOOL]}


def _what_is_said(number: int) -> dict[str, str]:
    """Returns what the tool says of each entity of a world, with k: 1."""
    return {row["title"]: f"[1] {row['title']}\n{row['text']}" for row in corpus(number)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE that is trained here on the corpus and on searches: always the same
    vocabulary, in which every word is a token. Otherwise it is that of `rondo.recipes.tool_tasks.tokenizer`.
    """
    return tool_tokenizer(_bpe())


@functools.cache
def _bpe() -> str:
    texts = [f"{role}\n" for role in ("tools", "system", "user", "assistant")] * 2
    texts += ["search", "#### unknown"] * 2
    for question in questions(False):
        texts += [question.text, f"#### {question.answer}"]
        texts += [json.dumps({"name": "search", "arguments": {"query": hop}}) for hop in question.hops]
    return train_bpe([*texts, *_what_is_said(0).values()])
