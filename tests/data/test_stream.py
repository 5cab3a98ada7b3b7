"""Streams: a pure function of the sequence number; nothing lost, nothing twice; over-long rows as asked."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.chat import encode_prompt
from rondo.config.schema import FileSourceConfig, TaskSourceConfig
from rondo.core.errors import DataError
from rondo.data import ConversationStream, PairStream, PromptStream, eval_prompts
from rondo.data.mixture import Mixture
from rondo.recipes.quickstart import tokenizer
from tests.messages import full_text


@pytest.fixture(scope="module")
def tok():
    return tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    def write(rows, name="p", **keys):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return FileSourceConfig(type="jsonl", path=str(path), **keys)

    return write


def questions(n, words=1):
    return [{"prompt": "apples " * words + str(i), "answer": i} for i in range(n)]


HALF = "apples \ud83d"
MADE = []


def made():
    return MADE


@pytest.mark.parametrize(
    ("stream", "row"),
    [
        (PromptStream, {"prompt": HALF}),
        (PromptStream, {"prompt": [{"role": "user", "content": HALF}]}),
        (ConversationStream, {"prompt": "fine", "response": HALF}),
        (PairStream, {"prompt": "fine", "chosen": "a", "rejected": HALF}),
    ],
)
def test_half_a_surrogate_pair_names_the_row(monkeypatch, tok, stream, row):
    """A function can give one, and no tokenizer takes it. (A file's is found when the file is read.)"""
    fine = {"prompt": "fine", "response": "yes", "chosen": "a", "rejected": "b"}
    monkeypatch.setattr(f"{__name__}.MADE", [fine, row])
    source = TaskSourceConfig(type="function", task=f"{__name__}.made", name="p")
    with pytest.raises(DataError, match=full_text("'p' (tests.data.test_stream.made, row 1)")):
        stream((source,), tok, max_prompt_tokens=64, max_tokens=128)


# ------------------------------------------------------------------------------------------------------
# mixture


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 20)), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_every_pass_over_a_source_has_each_row_once(sources, seed, shuffle):
    sizes, weights = [s for s, _ in sources], [w for _, w in sources]
    names = [f"s{i}" for i in range(len(sizes))]
    mixture = Mixture(names, sizes, weights, shuffle=shuffle, seed=seed)
    places = [mixture.place(seq) for seq in range(400)]
    for i, size in enumerate(sizes):
        own = [(p.epoch, p.position) for p in places if p.source == i]
        assert len(set(own)) == len(own)
        assert [epoch for epoch, _ in own] == [n // size for n in range(len(own))]
        full = len(own) // size
        for epoch in range(full):
            assert sorted(position for e, position in own if e == epoch) == list(range(size))
        share = weights[i] / sum(weights)
        assert abs(len(own) - 400 * share) <= len(sizes) + 400 * 2e-4 * len(sizes)


def test_hand_computed_interleaving():
    mixture = Mixture(["a", "b"], [2, 1], [3.0, 1.0], shuffle=False, seed=0)
    # a is due at 1/6, 3/6, 5/6 and b at 1/2 of each cycle (ties: the first source first)
    places = [mixture.place(seq) for seq in range(8)]
    assert [p.source for p in places] == [0, 0, 1, 0, 0, 0, 1, 0]
    assert [p.position for p in places] == [0, 1, 0, 0, 1, 0, 0, 1]
    assert [p.epoch for p in places] == [0, 0, 0, 1, 1, 2, 1, 2]


def test_without_weights_each_row_comes_once_in_an_epoch():
    """Exactly, where weights of that proportion would be rounded."""
    sizes = [7, 12_013, 7_473]
    for seed in (0, 1):
        mixture = Mixture(["a", "b", "c"], sizes, [None] * 3, shuffle=True, seed=seed)
        for epoch in (0, 2):
            start = epoch * mixture.epoch_length
            places = [mixture.place(start + seq) for seq in range(mixture.epoch_length)]
            assert len(set(places)) == sum(sizes)
            assert {place.epoch for place in places} == {epoch}


def test_files_without_weights_are_one_data_set(tok, jsonl):
    sources = (jsonl(questions(4), "a", weight=None), jsonl(questions(40), "b", weight=None))
    stream = PromptStream(sources, tok, max_prompt_tokens=50)
    ids = [stream.prompt(seq).prompt_id for seq in range(44)]
    assert (len(set(ids)), stream.rows_per_epoch) == (44, 44)
    assert [sum(one.startswith(name) for one in ids) for name in ("a/", "b/")] == [4, 40]


def test_no_weight_is_the_size():
    beside = Mixture(["a", "b"], [300, 10], [None, 100.0], shuffle=False, seed=0)
    sources = [beside.place(seq).source for seq in range(400)]
    assert (sources.count(0), sources.count(1)) == (300, 100)


def test_far_away_is_as_cheap_as_near():
    mixture = Mixture(["a", "b"], [1000, 3], [1.0, 0.001], shuffle=True, seed=0)
    assert mixture.place(10**12).epoch > 10**8


# ------------------------------------------------------------------------------------------------------
# prompts


def test_prompt_carries_ids_fields_and_tokens(tok, jsonl):
    config = jsonl(questions(3), prompt_key="prompt", system_prompt="Be short.")
    prompt = PromptStream((config,), tok, max_prompt_tokens=50, shuffle=False).prompt(4)
    assert (prompt.seq, prompt.prompt_id, prompt.source) == (4, "p/1/1", "p")
    assert prompt.fields == {"answer": 1}
    assert np.array_equal(prompt.token_ids, encode_prompt(tok, "apples 1", "Be short."))
    assert prompt.messages == (
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "apples 1"},
    )


def test_stream_is_a_function_of_seq(tok, jsonl):
    configs = (jsonl(questions(7), "a"), jsonl(questions(5), "b", weight=2.0))

    def ids(seed, seqs):
        stream = PromptStream(configs, tok, max_prompt_tokens=50, seed=seed)
        assert stream.rows_per_epoch == 12
        return [stream.prompt(seq).prompt_id for seq in seqs]

    straight = ids(3, range(60))
    assert len(set(straight)) == 60
    assert ids(3, range(37, 60)) == straight[37:]  # a resumed run goes on where it was
    assert ids(3, reversed(range(60))) == straight[::-1]
    assert ids(4, range(60)) != straight
    counts = Counter(name.split("/")[0] for name in straight)
    assert counts == {"a": 20, "b": 40}


def test_epochs_reshuffle_and_batches_straddle_them(tok, jsonl):
    stream = PromptStream((jsonl(questions(10)),), tok, max_prompt_tokens=50)
    rows = [int(stream.prompt(seq).prompt_id.split("/")[2]) for seq in range(30)]
    epochs = [rows[:10], rows[10:20], rows[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.fixture
def mixed_lengths(jsonl):
    return jsonl([*questions(3), *questions(2, words=20)])


def test_overlong_dropped_and_counted(tok, mixed_lengths, caplog):
    with caplog.at_level(logging.WARNING):
        stream = PromptStream((mixed_lengths,), tok, max_prompt_tokens=20)
    assert stream.rows_per_epoch == 3
    assert stream.dropped == {"p": 2}
    assert "dropped 2 of 5 rows" in caplog.text
    assert all(len(stream.prompt(seq).token_ids) <= 20 for seq in range(9))


def test_overlong_error_names_the_row(tok, mixed_lengths):
    with pytest.raises(DataError, match=full_text("max_prompt_tokens=20; raise it, or set")):
        PromptStream((mixed_lengths,), tok, max_prompt_tokens=20, overlong="error")


def test_everything_overlong_is_an_error(tok, jsonl):
    with pytest.raises(DataError, match=full_text("every one of its 3 rows is longer")):
        PromptStream((jsonl(questions(3)),), tok, max_prompt_tokens=5)


@pytest.mark.parametrize(
    ("side", "text"), [("truncate_left", " 4 5 6 7 8 9"), ("truncate_right", "0 1 2 3 4 5 ")]
)
def test_truncation_keeps_the_template_whole(tok, jsonl, side, text):
    config = jsonl([{"prompt": "0 1 2 3 4 5 6 7 8 9"}])
    prompt = PromptStream((config,), tok, max_prompt_tokens=20, overlong=side).prompt(0)
    assert len(prompt.token_ids) == 20
    assert tok.decode(prompt.token_ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.messages == ({"role": "user", "content": text},)


def test_truncation_of_raw_text_cuts_tokens(jsonl):
    tok = tokenizer()
    tok.chat_template = None
    config = jsonl([{"prompt": "0 1 2 3 4"}])
    left = PromptStream((config,), tok, max_prompt_tokens=3, overlong="truncate_left").prompt(0)
    assert tok.decode(left.token_ids) == "3 4"
    assert left.messages == ()


def test_truncation_that_cannot_help_is_an_error(tok, jsonl):
    with pytest.raises(DataError, match="even without its last message"):
        PromptStream((jsonl(questions(1)),), tok, max_prompt_tokens=5, overlong="truncate_left")


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"question": "a"}, full_text("Columns: question. Set prompt_key")),
        ({"prompt": "  "}, full_text("line 2): the prompt (column")),
        ({"prompt": None}, "is empty"),
        ({"prompt": []}, "is empty"),
        ({"prompt": 5}, full_text("messages must be a list of mappings, got")),
        ({"prompt": [{"role": "user"}]}, r"line 2\): message 0.content is missing"),
        ({"prompt": "a", "tools": "{"}, r"line 2\): column 'tools' is no JSON"),
    ],
)
def test_broken_rows_are_named_at_the_start(tok, jsonl, row, wrong):
    with pytest.raises(DataError, match=wrong):
        PromptStream((jsonl([{"prompt": "fine"}, row]),), tok, max_prompt_tokens=50)


def test_eval_prompts_once_each_and_limited_in_turn(tok, jsonl):
    configs = (jsonl(questions(4), "a"), jsonl(questions(2), "b"))
    prompts = eval_prompts(configs, tok, max_prompt_tokens=50)
    assert [p.prompt_id for p in prompts] == [
        *(f"eval:a/0/{i}" for i in range(4)),
        "eval:b/0/0",
        "eval:b/0/1",
    ]
    assert [p.seq for p in prompts] == list(range(6))
    some = eval_prompts(configs, tok, max_prompt_tokens=50, limit=3)
    assert [p.prompt_id for p in some] == ["eval:a/0/0", "eval:a/0/1", "eval:b/0/0"]


PROGRAM = """
import hashlib
from rondo.config.schema import TaskSourceConfig
from rondo.data import PromptStream
from rondo.recipes.quickstart import demonstrations, eval_rows, held_out_triples, tokenizer
tok = tokenizer()
rows = "rondo.recipes.quickstart.train_rows"
sources = (
    TaskSourceConfig(type="function", task=rows, name="a", size=40, seed=1),
    TaskSourceConfig(type="function", task=rows, name="b", size=40, seed=2, weight=0.3),
)
stream = PromptStream(sources, tok, max_prompt_tokens=64, seed=9)
prompts = [stream.prompt(seq) for seq in range(100)]
state = [(p.prompt_id, p.token_ids.tolist(), p.fields) for p in prompts]
state += [sorted(tok.get_vocab().items()), sorted(held_out_triples())]
state += [eval_rows(50, 1), demonstrations(50, 1)]
digest = hashlib.sha256(repr(state).encode()).hexdigest()
print(digest)
"""


@pytest.mark.slow
def test_same_stream_and_tokenizer_in_every_process():
    """Neither Python's hash seed nor the threads of the tokenizers library change a row or a token."""
    here: dict[str, str] = {}
    exec(PROGRAM, here)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([f"{os.getcwd()}/src", os.getcwd()]),
        "PYTHONHASHSEED": "12345",
        "RAYON_NUM_THREADS": "3",
    }
    there = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here["digest"]


# ------------------------------------------------------------------------------------------------
# conversations

MULTI_TURN = [
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "plus 2?"},
    {"role": "assistant", "content": "9"},
]


def test_conversations_split_at_the_first_assistant_turn(tok, jsonl):
    stream = ConversationStream((jsonl([{"messages": MULTI_TURN}]),), tok, max_prompt_tokens=50)
    prompt, response, mask = stream.row(0)
    assert tok.decode(prompt) == "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    middle = "\n<|im_start|>user\nplus 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tok.decode(response) == f"7<|im_end|>{middle}9<|im_end|>"
    inside = len(tok(middle)["input_ids"])
    assert mask.tolist() == [1, 1] + [0] * inside + [1, 1]


def test_a_column_system_may_say_what_a_message_says(tok, jsonl):
    said = [{"role": "system", "content": "Be short."}, *MULTI_TURN[:2]]
    rows = [{"messages": said, "system": "Be short."}, {"messages": said}, {"messages": said, "system": ""}]
    stream = ConversationStream((jsonl(rows),), tok, max_prompt_tokens=50, shuffle=False)
    first, *others = ([part.tolist() for part in stream.row(seq)] for seq in range(3))
    assert others == [first, first]
    own = jsonl([{"prompt": "3+4?", "response": "7", "system": "No."}], "own", drop_columns=("system",))
    assert ConversationStream((own,), tok, max_prompt_tokens=50).rows_per_epoch == 1


def test_prompt_and_response_columns_equal_messages(tok, jsonl):
    pair = jsonl([{"prompt": "3+4?", "response": "7"}], "pair")
    chat = jsonl([{"messages": MULTI_TURN[:2]}], "chat")
    one, other = (ConversationStream((c,), tok, max_prompt_tokens=50).row(0) for c in (pair, chat))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_columns_of_other_names_and_nested_ones(tok, jsonl):
    rows = [{"extra": {"q": "How many?", "a": {"short": "7"}}, "said": [{"role": "user", "content": "x"}]}]
    own = ConversationStream(
        (jsonl(rows, prompt_key="extra.q", response_key="extra.a.short"),), tok, max_prompt_tokens=64
    )
    usual = ConversationStream(
        (jsonl([{"prompt": "How many?", "response": "7"}], name="u"),), tok, max_prompt_tokens=64
    )
    assert [x.tolist() for x in own.row(0)] == [x.tolist() for x in usual.row(0)]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    named = ConversationStream(
        (jsonl([{"said": talk}], name="n", messages_key="said"),), tok, max_prompt_tokens=64
    )
    assert named.rows_per_epoch == 1
    with pytest.raises(DataError, match="needs 'said', or 'prompt'"):
        ConversationStream((jsonl([{"x": 1}], name="m", messages_key="said"),), tok, max_prompt_tokens=64)


def test_batch_has_the_columns_of_training(tok, jsonl):
    rows = [{"prompt": f"{i}?", "response": "1" * (i + 1)} for i in range(5)]
    stream = ConversationStream((jsonl(rows),), tok, max_prompt_tokens=50, shuffle=False)
    batch = stream.batch([7, 3, 4])
    tokens = ["prompt_ids", "response_ids", "response_mask"]
    numbers = ["prompt_length", "response_length", "num_trained_tokens"]
    assert batch.columns == ["row_id", *tokens, *numbers]
    assert batch.scalars("row_id").tolist() == [7, 3, 4]
    assert batch.scalars("response_length").tolist() == [4, 5, 6]
    assert batch.scalars("num_trained_tokens").tolist() == [4, 5, 6]
    assert np.array_equal(batch.lengths("prompt_ids"), batch.scalars("prompt_length"))
    assert stream.rows_per_epoch == 5


def test_conversation_overlong(tok, jsonl):
    rows = jsonl([{"prompt": "1?", "response": "1"}, {"prompt": "2?", "response": "2" * 20}])
    dropped = ConversationStream((rows,), tok, max_prompt_tokens=50, max_tokens=20)
    assert dropped.dropped == {"p": 1}
    with pytest.raises(DataError, match=r"line 2\): 10 prompt tokens and 31 in all"):
        ConversationStream((rows,), tok, max_prompt_tokens=50, max_tokens=20, overlong="error")
    cut = ConversationStream(
        (rows,), tok, max_prompt_tokens=50, max_tokens=20, overlong="truncate_right", shuffle=False
    )
    prompt, response, mask = cut.row(1)
    assert (len(prompt), tok.decode(response), mask.tolist()) == (10, "2" * 10, [1] * 10)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"prompt": "a"}, "a row needs 'messages', or 'prompt' and 'response'; it has prompt"),
        ({"prompt": "a", "response": 5}, "'response' must be a string, got int"),
        ({"messages": MULTI_TURN[:1]}, "no assistant turn"),
        ({"prompt": "a", "response": "b", "system": "Be short."}, "column 'system' is no part of"),
        ({"messages": MULTI_TURN, "response": "b"}, "the row has both 'messages' and"),
        ({"messages": MULTI_TURN, "prompt": "a", "response": "b"}, "the row has both 'messages' and"),
    ],
)
def test_broken_conversations_are_named(tok, jsonl, row, wrong):
    with pytest.raises(DataError, match=r"line 2\): " + wrong):
        ConversationStream((jsonl([{"prompt": "a", "response": "b"}, row]),), tok, max_prompt_tokens=50)


USER, OPENED, ENDED = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
LONG = "0 1 2 3 4 5 6 7 8 9"


@pytest.mark.parametrize(
    ("side", "text"), [("truncate_left", " 4 5 6 7 8 9"), ("truncate_right", "0 1 2 3 4 5 ")]
)
@pytest.mark.parametrize("turns", ["sampled", "template", "messages", "eos"])
def test_what_is_learnt_from_keeps_the_template_whole_too(tok, jsonl, side, text, turns):
    how = {"max_prompt_tokens": 20, "max_tokens": 24, "overlong": side, "turns": turns}
    asked = PromptStream((jsonl([{"prompt": LONG}]),), tok, max_prompt_tokens=20, overlong=side)
    rows = jsonl([{"prompt": LONG, "response": "7"}])
    prompt, response, mask = ConversationStream((rows,), tok, **how).row(0)
    assert tok.decode(prompt) == USER + text + OPENED
    assert np.array_equal(prompt, asked.prompt(0).token_ids)
    behind = "\n" if turns in ("template", "messages") else ""
    assert (tok.decode(response), mask.tolist()) == (f"7{ENDED}{behind}", [1, 1, *[1 for _ in behind]])
    both = PairStream((jsonl([{"prompt": LONG, "chosen": "7", "rejected": "33333"}]),), tok, **how).row(0)
    assert [tok.decode(ids) for ids in both.chosen[:2]] == [USER + text + OPENED, f"7{ENDED}{behind}"]
    assert [tok.decode(ids) for ids in both.rejected[:2]] == [USER + text + OPENED, "3333"]


def test_cutting_shortens_the_message_before_what_is_learnt(tok, jsonl):
    messages = [*MULTI_TURN[:1], {**MULTI_TURN[1], "weight": 0}, {"role": "user", "content": LONG}]
    rows = jsonl([{"messages": [*messages, MULTI_TURN[3], *MULTI_TURN[2:]]}])
    before = f"{USER}3+4?{OPENED}7{ENDED}\n{USER}"
    most = len(tok(before + "7 8 9" + OPENED)["input_ids"])
    stream = ConversationStream((rows,), tok, max_prompt_tokens=most, overlong="truncate_left")
    prompt, response, mask = stream.row(0)
    assert tok.decode(prompt) == f"{before}7 8 9{OPENED}"
    assert tok.decode(response) == f"9{ENDED}\n{USER}plus 2?{OPENED}9{ENDED}"
    assert (mask[:2].tolist(), mask[-2:].tolist(), int(mask.sum())) == ([1, 1], [1, 1], 4)
    with pytest.raises(DataError, match="even without its last message"):
        ConversationStream((rows,), tok, max_prompt_tokens=15, overlong="truncate_left")


def test_a_prompt_that_leaves_no_room_for_an_answer_is_dropped(tok, jsonl):
    rows = jsonl([{"prompt": LONG, "response": "7"}, {"prompt": "1?", "response": "2"}])
    stream = ConversationStream((rows,), tok, max_prompt_tokens=20, max_tokens=20, overlong="truncate_right")
    assert stream.dropped == {"p": 1}
