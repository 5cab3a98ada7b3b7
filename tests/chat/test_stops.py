"""Where a response ends, and what of its text is shown: against the definitions, on random vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rondo.chat import (
    RunningText,
    StopMatcher,
    before_stop,
    decode,
    length_before_stop,
    split_stops,
    stop_token_ids,
)
from rondo.core.errors import DataError
from rondo.recipes.quickstart import tokenizer
from tests.byte_tokenizers import SPECIAL, byte_tokenizer, ends_after
from tests.messages import full_text

PIECES = "ab€é <>"
STOP = st.text(PIECES, min_size=1, max_size=6)
STOPS = st.lists(STOP, min_size=1, max_size=3)


def sentencepiece(pieces: Sequence[bytes]) -> PreTrainedTokenizerFast:
    """Returns one as Llama 2's: words begin with ▁, and bytes that are no token are tokens <0x..>."""
    names: dict[str, None] = dict.fromkeys([f"<0x{byte:02X}>" for byte in "é€".encode()])
    names |= dict.fromkeys(piece.decode("utf-8", "ignore").replace(" ", "▁") or "▁" for piece in pieces)
    vocabulary = {name: i for i, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


@st.composite
def responses(draw: st.DrawFn, *makers: Any) -> tuple[Any, list[int]]:
    """Draws a tokenizer and the tokens of a response: parts of characters or several in a token."""
    text = st.text(PIECES, max_size=4).map(str.encode)
    cut = st.tuples(text, st.integers(0, 2), st.integers(0, 2)).map(lambda x: x[0][x[1] : len(x[0]) - x[2]])
    pieces = sorted(draw(st.sets(cut.filter(bool), min_size=3, max_size=12)))
    made = draw(st.sampled_from(makers or (byte_tokenizer, sentencepiece)))(pieces)
    return made, draw(st.lists(st.integers(0, len(made) - 1), max_size=40))


@pytest.mark.slow
@given(responses(), STOPS)
@settings(max_examples=400, deadline=None)
def test_a_response_ends_with_the_first_token_that_brings_a_stop_string(
    response: tuple[Any, list[int]], stops: list[str]
) -> None:
    made, ids = response
    assert StopMatcher(made, stops).length_to_stop(ids) == ends_after(made, ids, stops)


@pytest.mark.slow
@given(responses(), STOPS, st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_prefix_changes_nothing(response: tuple[Any, list[int]], stops: list[str], cut: int) -> None:
    made, ids = response
    end = ends_after(made, ids, stops)
    if end is not None:
        cut = min(cut, end - 1)  # what goes on was not over
    matcher = StopMatcher(made, stops)
    assert not matcher.feed(ids[:cut])
    length = matcher.length_to_stop(ids[cut:])
    assert (None if length is None else len(ids[:cut]) + length) == end


@pytest.mark.slow
@given(responses(byte_tokenizer), st.lists(st.integers(0, 40), max_size=5))
@settings(max_examples=200, deadline=None)
def test_the_pieces_of_running_text_are_the_text(response: tuple[Any, list[int]], cuts: list[int]) -> None:
    made, ids = response
    running, settled = RunningText(partial(decode, made)), ""
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(ids)], strict=True):
        settled += running.feed(ids[start:end])
        assert settled + running.open == decode(made, ids[: max(start, end)])
    assert settled + running.open == decode(made, ids)


@given(st.text(PIECES, max_size=30), STOPS, st.text(PIECES, max_size=8))
def test_what_is_shown_stands_whatever_follows(text: str, stops: list[str], more: str) -> None:
    shown = text[: length_before_stop(text, stops)]
    assert before_stop(text + more, stops).startswith(shown)
    if before_stop(text, stops) == text:  # and no character waits without need
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_strings_of_any_length() -> None:
    made = byte_tokenizer([b"<", b"ans", b"wer", b"wer>\n\nSo", b"\xe2", b"\x82\xac", b"a</"])
    ids = [6, 1, 2, 6, 1, 3, 0]
    assert decode(made, ids) == "a</answera</answer>\n\nSo<"
    matcher = StopMatcher(made, ["</answer>"])
    assert matcher.length_to_stop(ids) == 6  # begins inside a token, and the last brings text behind it
    assert before_stop(decode(made, ids[:6]), ["</answer>"]) == "a</answera"
    assert StopMatcher(made, ["€"]).length_to_stop([4, 4, 5, 5]) == 3  # half of it is none
    halves = StopMatcher(made, ["€"])
    assert not halves.feed([*[0] * 16, 4, len(made) - 1])  # many at once, the last of them hidden
    assert halves.feed([5])
    assert StopMatcher(made, ["a"]).length_to_stop([len(made) - 1, 6]) == 2  # special tokens say nothing
    assert StopMatcher(made, ["<a"]).length_to_stop([0, len(made) - 1, 1]) == 3  # and part nothing


def test_special_tokens_are_stopped_at_by_id_and_other_strings_by_text() -> None:
    tok = tokenizer()
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert split_stops(tok, ("<|im_end|>", "####", "12", "</a>")) == ((end,), ("####", "12", "</a>"))
    assert split_stops(tok, ()) == ((), ())
    assert stop_token_ids(tok) == (end,)


@pytest.mark.parametrize(
    ("stops", "words"),
    [
        (("a", ""), "a stop string is empty"),
        ((f"a{SPECIAL}",), full_text("'a<|over|>' has the special token")),
        (("\ufffd",), r"U\+FFFD"),
        (("a\ud800",), "half of a surrogate pair"),
        (("a" * 1001,), full_text("a stop string has 1001 characters")),
        (("a",) * 65, "there are 65 stop strings; at most 64"),
    ],
)
def test_strings_that_can_end_nothing_are_refused(stops: tuple[str, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        split_stops(byte_tokenizer([b"a", b"b"]), stops)
