"""Preference pairs: two rows with one unit, the tokens of a rollout, and every broken row named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rondo.chat import encode_prompt
from rondo.config.schema import FileSourceConfig
from rondo.core.errors import ConfigError, DataError
from rondo.data import PairStream
from rondo.recipes.quickstart import eval_rows, pairs, tokenizer, train_rows

GOOD = {"prompt": "3+4?", "chosen": "7", "rejected": "3"}
CHAT = [
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "plus 2?"},
]


@pytest.fixture(scope="module")
def tok():
    return tokenizer()


@pytest.fixture
def stream(tok, tmp_path):
    def open_stream(rows, keys=None, **options):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = FileSourceConfig(type="jsonl", path=str(path), **(keys or {}))
        return PairStream((source,), tok, **{"max_prompt_tokens": 50, "shuffle": False, **options})

    return open_stream


def test_a_pair_is_two_rows_of_one_unit_chosen_first(stream, tok):
    batch = stream([GOOD, {**GOOD, "chosen": "77", "rejected": "33", "margin": 2}]).batch([0, 1, 2])
    assert batch.scalars("unit").tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.scalars("row_id").tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.scalars("margin").tolist() == [0, 0, 2, 2, 0, 0]
    assert [tok.decode(ids) for ids in batch.rows("response_ids")] == [
        f"{answer}<|im_end|>" for answer in ("7", "3", "77", "33", "7", "3")
    ]
    assert [mask.tolist() for mask in batch.rows("response_mask")][2] == [1, 1, 1]
    assert batch.scalars("num_trained_tokens").tolist() == [2, 2, 3, 3, 2, 2]
    assert np.array_equal(batch.lengths("prompt_ids"), batch.scalars("prompt_length"))
    assert "safe" not in batch.columns


@pytest.mark.parametrize("system", [None, "Add."])
@pytest.mark.parametrize("prompt", ["3+4?", CHAT])
def test_the_prompt_is_what_a_rollout_would_be_prompted_with(stream, tok, prompt, system):
    pair = stream([{**GOOD, "prompt": prompt}], {"system_prompt": system}).row(0)
    for tokens, _, mask in (pair.chosen, pair.rejected):
        assert np.array_equal(tokens, encode_prompt(tok, prompt, system))
        assert mask.tolist() == [1, 1]


def test_answers_may_be_messages_or_the_whole_conversation(stream):
    answers = {key: {"role": "assistant", "content": GOOD[key]} for key in ("chosen", "rejected")}
    as_lists = {key: [answer] for key, answer in answers.items()}
    whole = {key: [{"role": "user", "content": "3+4?"}, answer] for key, answer in answers.items()}
    rows = stream([GOOD, {**GOOD, **answers}, {**GOOD, **as_lists}, {**GOOD, **whole}])
    first = rows.row(0)
    for seq in (1, 2, 3):
        other = rows.row(seq)
        assert all(np.array_equal(a, b) for a, b in zip(first.chosen, other.chosen, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(first.rejected, other.rejected, strict=True))


def test_safe_is_a_column_where_every_row_says_it(stream):
    safe = {**GOOD, "chosen_safe": True, "rejected_safe": False}
    assert stream([safe, safe]).batch([0, 1]).scalars("safe").tolist() == [1, -1, 1, -1]
    assert not stream([safe, GOOD]).has_safe


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected': a preference pair has"),
        ({**GOOD, "chosen": 7}, "'chosen' must be a string or an assistant message, got int"),
        ({**GOOD, "rejected": " "}, "'rejected' is empty"),
        ({**GOOD, "rejected": None}, "'rejected' must be a string or an assistant message, got NoneType"),
        ({**GOOD, "rejected": "7"}, "'chosen' and 'rejected' are the same answer"),
        ({**GOOD, "prompt": ""}, r"the prompt \(column 'prompt'\) is empty"),
        ({**GOOD, "prompt": CHAT[:2]}, r"the prompt \(column 'prompt'\) ends with an answer"),
        ({**GOOD, "chosen": CHAT[:1]}, "'chosen' must be an answer"),
        (
            {**GOOD, "chosen": [CHAT[2], CHAT[1]]},
            "the messages of 'chosen' before its answer are not the prompt's",
        ),
        ({**GOOD, "system": "Be short."}, "column 'system' is no part of the"),
        ({**GOOD, "margin": "much"}, "'margin' must be a finite number, got 'much'"),
        ({**GOOD, "margin": float("nan")}, "'margin' must be a finite number, got nan"),
        ({**GOOD, "chosen_safe": True}, "'rejected_safe' must be true or false, got None"),
    ],
)
def test_broken_pairs_are_named(stream, row, wrong):
    with pytest.raises(DataError, match=r"source 'pairs' \(.*pairs.jsonl, line 2\): " + wrong):
        stream([GOOD, row])


def test_a_pair_that_is_too_long_is_dropped_as_a_whole(stream, tok):
    long = {**GOOD, "rejected": "3" * 30}
    assert stream([GOOD, long], max_tokens=20).dropped == {"pairs": 1}
    with pytest.raises(DataError, match=r"line 2\): 12 prompt tokens and 43 in all"):
        stream([GOOD, long], max_tokens=20, overlong="error")
    cut = stream([long], max_tokens=20, overlong="truncate_right").row(0)
    assert (tok.decode(cut.chosen[1]), tok.decode(cut.rejected[1])) == ("7<|im_end|>", "3" * 8)
    same_beginning = {**GOOD, "chosen": "3" * 29, "rejected": "3" * 30}
    kept = stream([GOOD, same_beginning], max_tokens=20, overlong="truncate_right")
    assert kept.dropped == {"pairs": 1}  # what is left of both is the same


def test_quickstart_pairs_prefer_what_is_right():
    rows = pairs(200, seed=1)
    answers = {row["prompt"]: row["answer"] for row in train_rows(200, seed=1)}
    for row in rows:
        assert row["chosen"].endswith(f"#### {answers[row['prompt']]}")
        assert not row["rejected"].endswith(f"#### {answers[row['prompt']]}")
    worked = sum("=" in row["rejected"] for row in rows)
    assert 70 < worked < 130
    assert [row["prompt"] for row in pairs(50, held_out=True)] == [row["prompt"] for row in eval_rows(50)]
    with pytest.raises(ConfigError, match="mistake_share"):
        pairs(5, mistake_share=1.5)


def test_pairs_are_repeated_where_both_answers_are(stream):
    other = {**GOOD, "rejected": "4"}
    assert dict(stream([GOOD, other, GOOD, {**GOOD, "margin": 2}]).repeats()) == {"pairs": (2, 4)}
