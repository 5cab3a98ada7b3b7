"""What ends a response: tokens, and strings of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.chat.encode import decode, render, tokenise
from rondo.chat.tools.formats import call_end_ids
from rondo.core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_STOPS = 64
LONGEST_STOP = 1000  # characters: a text is tokenised whole to find special tokens in it


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that end every response, sorted: end of sequence, those that the model folder names
    (an attribute of the tokenizer, like the template's options), the template's end of turn, the tool
    format's end of an answer that calls.
    """
    ids = {*call_end_ids(tokenizer), *getattr(tokenizer, "end_token_ids", ())}
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if tokenizer.chat_template is not None:
        ids |= end_of_turn_ids(tokenizer)
    return tuple(sorted(ids))


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the special token that the template writes right behind an assistant's content, if it writes
    one.
    """
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "rondo"}
    text = render(tokenizer, [question, answer], generation=False)
    tail = text[text.rfind("rondo") + len("rondo") :].strip() if "rondo" in text else ""
    (ids,) = tokenise(tokenizer, [tail], special=False)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return {int(ids[0])} & special if len(ids) else set()


def split_stops(
    tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Splits stop strings into the ids of special tokens and the strings that a response's text can contain.
    Raises DataError for a string that can end no response.
    """
    ids: list[int] = []
    texts: list[str] = []
    if not stops:
        return (), ()
    if len(stops) > MOST_STOPS:
        raise DataError(f"there are {len(stops)} stop strings; at most {MOST_STOPS} can be looked for")
    hidden = set(tokenizer.all_special_ids)
    hidden |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for text in stops:
        if not text:
            raise DataError("a stop string is empty; it would end every response at its first token")
        if len(text) > LONGEST_STOP:
            raise DataError(f"a stop string has {len(text)} characters; it may have {LONGEST_STOP}")
        if "\ufffd" in text:
            raise DataError(
                f"the stop string {text!r:.100} has the character U+FFFD, which stands for bytes that are "
                "none; take it out"
            )
        (tokens,) = tokenise(tokenizer, [text], special=False)
        special = [int(token) for token in tokens if int(token) in hidden]
        if special and len(tokens) > 1:
            name = tokenizer.convert_ids_to_tokens(special[0])
            raise DataError(
                f"the stop string {text!r:.100} has the special token {name!r} and more; the text of a "
                "response has no special tokens, so it would never stop: give the token alone, or text alone"
            )
        if special:
            ids += special
        else:
            texts.append(text)
    return tuple(ids), tuple(texts)


class StopMatcher:
    """Says at which token a response is over: the first after which its decoded text has one of `stops`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._stops = stops
        self._text = RunningText(partial(decode, tokenizer))
        self._kept = max(map(len, stops)) - 1  # characters that may be the beginning of a stop string
        self._tail = ""

    def feed(self, token_ids: Sequence[int] | np.ndarray) -> bool:
        """Takes further tokens. Returns whether the text has a stop string now; it had none before."""
        settled = self._tail + self._text.feed(token_ids)
        self._tail = settled[max(len(settled) - self._kept, 0) :]
        return any(stop in settled + self._text.open for stop in self._stops)

    def length_to_stop(self, token_ids: Sequence[int]) -> int | None:
        """Counts these further tokens up to the one that ends the response; None: it goes on."""
        for count, token in enumerate(token_ids, 1):
            if self.feed([token]):
                return count
        return None


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text up to the first stop string; all of it where there is none."""
    return text[: min([at for at in map(text.find, stops) if at >= 0], default=len(text))]


def length_before_stop(text: str, stops: Sequence[str]) -> int:
    """Counts the characters that are settled to stand before any stop string: those before the first one,
    else before an end of the text that may become one.
    """
    length = len(before_stop(text, stops))
    if length < len(text):
        return length
    return min((_length_before(text, stop) for stop in stops), default=length)


def _length_before(text: str, stop: str) -> int:
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)


# ---- token ids to text as they come ----


_UNFINISHED = 16  # tokens that end in no whole character, before what of them cannot change is settled


class RunningText:
    """The text of tokens, as `decode` (token ids to text) has it of all. What it returns piece by piece
    is settled: no further token changes it. (SentencePiece's byte fallback unsays a character that bytes made
    when a byte follows that makes none; here it stays.) Only a few tokens are decoded at one time, however
    many there are.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = self._read = 0  # tokens before `_read` are settled; decoding starts at `_window`
        self.open = ""
        """What the tokens behind the settled ones say so far: perhaps bytes of an unfinished character."""

    def feed(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns what is settled with these further tokens."""
        self._ids += map(int, token_ids)
        self.open = self._new_text()
        settled = ""
        if self.open and not self.open.endswith("\ufffd"):
            settled = self.open
            self._settle(len(self._ids))
        elif len(self._ids) - self._read > _UNFINISHED:
            settled = self._settle_unfinished()
        self.open = self.open[len(settled) :]
        return settled

    def _settle_unfinished(self) -> str:
        """Takes what no further token can change of tokens that are no characters, so that they do not become
        ever more: a character has at most four bytes, and a token one or more.
        """
        for end in range(len(self._ids) - 1, len(self._ids) - 5, -1):
            rest, text = self._decode(self._ids[end:]), self._new_text(end)
            # A rest that says nothing (special tokens) does not show that the character before it is over.
            if self.open == text + rest and (rest or not text):
                self._settle(end)
                return text
        return ""

    def _settle(self, end: int) -> None:
        self._window = self._read
        self._read = end

    def _new_text(self, end: int | None = None) -> str:
        said = self._decode(self._ids[self._window : self._read])
        return self._decode(self._ids[self._window : end])[len(said) :]
