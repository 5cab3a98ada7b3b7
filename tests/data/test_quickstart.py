"""The quickstart's task: right answers, disjoint test prompts, one vocabulary everywhere."""

from __future__ import annotations

import re
import time

import pytest

from rondo.chat import encode_prompts
from rondo.data.quickstart import (
    HELD_OUT_TRIPLES,
    NAMES,
    OBJECTS,
    demonstrations,
    eval_rows,
    held_out_triples,
    tokenizer,
    train_rows,
)
from rondo.errors import ConfigError


def numbers(text):
    return tuple(int(n) for n in re.findall(r"[0-9]+", text))


def check_worked(solution, answer, triple):
    """Both steps are right, use the text's numbers in order, and never go below zero."""
    first, second, last = solution.split("\n")
    left, middle = first.split("=")
    assert eval(left) == int(middle) >= 0
    assert second.startswith(middle)
    assert eval(second.split("=")[0]) == int(second.split("=")[1]) == int(answer) >= 0
    assert last == f"#### {answer}"
    assert (*numbers(left), numbers(second)[1]) == triple


def test_rows_are_right():
    rows = train_rows(500, seed=3)
    assert len({row["prompt"] for row in rows}) == 500
    for row in rows:
        assert all(2 <= n <= 9 for n in numbers(row["prompt"]))
        check_worked(row["solution"], row["answer"], numbers(row["prompt"]))
    assert max(int(row["answer"]) for row in rows) <= 27


def test_evaluation_numbers_occur_in_no_training_prompt():
    held_out = {numbers(row["prompt"]) for row in eval_rows(1000, seed=1)}
    trained = {numbers(row["prompt"]) for row in train_rows(8000, seed=1)}
    trained |= {numbers(row["prompt"]) for row in demonstrations(8000, seed=2)}
    assert held_out == set(held_out_triples())
    assert len(held_out) == HELD_OUT_TRIPLES
    assert not held_out & trained
    assert len(trained) == 512 - HELD_OUT_TRIPLES


def test_demonstrations_are_mostly_lazy():
    rows = demonstrations(4000, seed=0)
    worked = [row for row in rows if "=" in row["response"]]
    assert 0.37 < len(worked) / len(rows) < 0.43
    for row in rows:
        if "=" in row["response"]:
            check_worked(row["response"], row["response"].split("#### ")[1], numbers(row["prompt"]))
        else:
            assert int(row["response"].removeprefix("#### ")) in numbers(row["prompt"])
    assert not any("=" in row["response"] for row in demonstrations(50, worked_share=0.0))


def test_rows_are_a_function_of_size_and_seed():
    assert train_rows(20, 5) == train_rows(20, 5)
    assert train_rows(20, 5) != train_rows(20, 6)
    assert train_rows(40, 5)[:20] == train_rows(20, 5)


@pytest.mark.parametrize("make", [train_rows, eval_rows, demonstrations])
def test_impossible_size_is_an_error(make):
    with pytest.raises(ConfigError, match="size"):
        make(0)


def test_tokenizer_has_digits_and_words():
    start = time.process_time()
    tok = tokenizer()
    assert time.process_time() - start < 5
    assert 430 <= len(tok) <= 470
    words = {w for row in train_rows(500) for w in re.findall(r" [a-z]+", row["prompt"])} | set(NAMES)
    words |= {f" {thing}" for thing in OBJECTS}
    for word in (*words, *"0123456789+-=\n", "####", "<tool_call>"):
        assert len(tok(word)["input_ids"]) == 1, word
    assert tok.tokenize("12+9=21") == ["1", "2", "+", "9", "=", "2", "1"]
    assert tok.eos_token == "<|im_end|>"
    assert tok.decode(tok("Ünïcödé 🎵\n")["input_ids"]) == "Ünïcödé 🎵\n"


def test_lengths_fit_the_recipe():
    tok = tokenizer()
    rows = train_rows(500)
    assert {len(ids) for ids in encode_prompts(tok, [row["prompt"] for row in rows])} <= set(range(16, 26))
    assert max(len(tok(row["solution"])["input_ids"]) + 1 for row in rows) <= 28


def test_tokenizer_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    tok = tokenizer()
    tok.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\nTom has 3 apples<|im_end|>"
    assert loaded(text)["input_ids"] == tok(text)["input_ids"]
    assert loaded.chat_template == tok.chat_template
    assert loaded.eos_token_id == tok.eos_token_id
