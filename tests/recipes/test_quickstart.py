"""The quickstart's task: right answers, disjoint test prompts, one vocabulary everywhere."""

from __future__ import annotations

import re
import time

import pytest

from rondo.chat import encode_prompts
from rondo.core.errors import ConfigError
from rondo.recipes.quickstart import (
    HELD_OUT_TRIPLES,
    NAMES,
    OBJECTS,
    chain_sum_demonstrations,
    chain_sum_tokenizer,
    demonstrations,
    eval_rows,
    held_out_triples,
    tokenizer,
    train_rows,
)


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


def chain_sums(size, seed):
    """The library's own entries: what a source of type reasoning_gym gives."""
    options = {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    return list(
        pytest.importorskip("reasoning_gym").create_dataset("chain_sum", **options, size=size, seed=seed)
    )


def test_chain_sum_demonstrations_are_right_by_the_librarys_answer():
    entries = {entry["question"]: entry for entry in chain_sums(1000, seed=7)}
    rows = chain_sum_demonstrations(1000, seed=7)
    assert len(rows) == 1000
    worked = [row["response"] for row in rows if "=" in row["response"]]
    assert 350 < len(worked) < 450
    assert any("#### -" in response for response in worked)
    for row in rows:
        entry, (*steps, last) = entries[row["prompt"]], row["response"].split("\n")
        if steps:
            assert last == f"#### {entry['answer']}"
            assert len(steps) == 3
            assert all(eval(step.replace("=", "==")) for step in steps)
        else:
            assert last.removeprefix("#### ") in entry["metadata"]["expression"].split()


def test_chain_sum_demonstrations_leave_out_what_is_held_out():
    held_out = {entry["question"] for entry in chain_sums(256, seed=50)}
    everything = [row["prompt"] for row in chain_sum_demonstrations(300, seed=40)]
    kept = [row["prompt"] for row in chain_sum_demonstrations(300, seed=40, held_out_seed=50)]
    assert kept == [prompt for prompt in everything if prompt not in held_out]
    assert len(kept) <= 300 - 256  # entry i is a function of seed + i alone: these seeds share 256 entries


def test_chain_sum_recipe_evaluates_on_unseen_problems():
    """The recipe's sources: no evaluation problem is in the demonstrations or the training prompts."""
    from rondo.config import load
    from rondo.data.sources import open_source

    recipe, warm_start = (load([name]).config.data for name in ("reasoning_gym", "reasoning_gym_sft"))
    held_out = {row["prompt"] for row in open_source(recipe.eval[0]).rows}
    assert len(held_out) == recipe.eval[0].size
    for source in (recipe.train[0], warm_start.train[0]):
        assert not held_out & {row["prompt"] for row in open_source(source).rows}


def test_chain_sum_tokenizer_has_the_tasks_words():
    tok = chain_sum_tokenizer()
    assert max(len(tok(entry["question"])["input_ids"]) for entry in chain_sums(200, seed=9)) == 22
    assert tok.tokenize("12-9=3") == ["1", "2", "-", "9", "=", "3"]
    assert (
        max(len(tok(row["response"])["input_ids"]) for row in chain_sum_demonstrations(500, seed=9)) + 1 <= 28
    )
    assert tok.eos_token == "<|im_end|>"
