"""Preference pairs as a stream over sequence numbers: the same prompt with a chosen and a rejected answer.

A pair becomes two rows with one `unit`, chosen first. Tokens are those of a rollout: the prompt as the chat
template opens the assistant's turn, then the answer with its end-of-turn token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.chat import Conversation, Messages
from rondo.core.batch import Batch
from rondo.core.columns import IMAGES
from rondo.core.images import images_as_text
from rondo.data.conversations import ConversationEncoder, Example, token_rows
from rondo.data.encoding import KeptRows
from rondo.data.mixture import StreamRow
from rondo.data.plain import plain
from rondo.data.sources import Source
from rondo.data.stream import SourceStream

CHOSEN, REJECTED = "chosen", "rejected"
Tokens = tuple[np.ndarray, np.ndarray]  # of a side, with the mask of its answer
SAFE = ("chosen_safe", "rejected_safe")  # of a cost model's data: is the answer harmless?


@dataclass(frozen=True)
class Pair:
    """One source row."""

    chosen: Example
    """The prompt with the better answer."""
    rejected: Example
    """The prompt with the worse answer."""
    margin: float
    """How much better the chosen answer is."""
    safe: tuple[float, float] | None
    """Whether the answer is harmless, ±1 of chosen and rejected; None where the row does not say."""


class _PairEncoder(ConversationEncoder[Pair]):
    """Makes rows into pairs, and drops those of which a side is too long."""

    def __call__(self, source: Source, rows: Sequence[int]) -> list[Pair | None]:
        prompts = [_prompt(source, row) for row in rows]
        sides = []
        for key in (CHOSEN, REJECTED):
            said = [
                asked._replace(messages=(*asked.messages, _answer(source, row, key, asked.messages)))
                for row, asked in zip(rows, prompts, strict=True)
            ]
            sides.append(zip(said, self.encode(source, rows, said), strict=True))
        return [
            self._pair(source, row, chosen, rejected)
            for row, chosen, rejected in zip(rows, *sides, strict=True)
        ]

    def _pair(self, source: Source, row: int, *sides: tuple[Conversation, Tokens]) -> Pair | None:
        (_, (chosen, _)), (_, (rejected, _)) = sides
        if np.array_equal(chosen, rejected):
            raise source.error(row, f"{CHOSEN!r} and {REJECTED!r} are the same answer; take the row out")
        margin, safe = _margin(source, row), _safe(source, row)
        better, worse = (self.fit(source, row, said, *tokens) for said, tokens in sides)
        if better is None or worse is None or np.array_equal(better[1], worse[1]):  # equal as far as they fit
            self.drop(source, row, max(len(chosen), len(rejected)))
            return None
        return Pair(better, worse, margin, safe)


def _prompt(source: Source, row: int) -> Conversation:
    asked = source.read(row, source.prompt(row))
    if asked.messages[-1]["role"] == "assistant":
        raise source.error(
            row,
            f"the prompt (column {source.config.prompt_key!r}) ends with an answer; answers go into "
            f"{CHOSEN!r} and {REJECTED!r}",
        )
    answers = (i for i, message in enumerate(asked.messages) if message["role"] == "assistant")
    return asked._replace(unlearnt=frozenset(answers))


def _answer(source: Source, row: int, key: str, prompt: Messages) -> Mapping[str, Any]:
    """Returns the column `key` as one assistant message: a string, a message, or a list that ends in one."""
    columns = source.rows[row]
    if key not in columns:
        raise source.error(
            row,
            f"no column {key!r}: a preference pair has {source.config.prompt_key!r}, {CHOSEN!r} and "
            f"{REJECTED!r}; columns: {', '.join(columns)}",
        )
    value = plain(columns[key])
    if isinstance(value, str):
        value = {"role": "assistant", "content": value}
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise source.error(
            row,
            f"{key!r} must be a string or an assistant message, got {type(value).__name__}: {value!r:.80}",
        )
    messages = source.read(row, value, whole=False).messages
    if not messages or messages[-1]["role"] != "assistant":
        raise source.error(row, f"{key!r} must be an answer (a string or a message of the assistant)")
    *before, answer = messages
    repeated = [list(prompt), [message for message in prompt if message["role"] != "system"]]
    if before and before not in repeated:
        raise source.error(row, f"the messages of {key!r} before its answer are not the prompt's")
    if not answer.get("tool_calls") and not answer["content"].strip():
        raise source.error(row, f"{key!r} is empty; take the row out")
    return answer


def _margin(source: Source, row: int) -> float:
    value = source.rows[row].get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise source.error(row, f"'margin' must be a finite number, got {value!r:.80}")
    return float(value)


def _safe(source: Source, row: int) -> tuple[float, float] | None:
    values = [source.rows[row].get(key) for key in SAFE]
    if values == [None, None]:
        return None
    for key, value in zip(SAFE, values, strict=True):
        if not isinstance(value, bool):
            raise source.error(row, f"{key!r} must be true or false, got {value!r:.80}")
    return (1.0 if values[0] else -1.0, 1.0 if values[1] else -1.0)


class PairStream(SourceStream[Pair]):
    """The endless stream of preference pairs.

    A source row has a prompt (a string or messages), `chosen` and `rejected` (a string, or a message of the
    assistant), and may have `margin` (how much better, default 0) and `chosen_safe`, `rejected_safe`
    (booleans, for a cost model). max_tokens: of prompt and answer; overlong is applied to either sequence as
    in `ConversationStream`, and a pair is dropped as a whole. Raises DataError naming source, row and column.
    """

    encoder = _PairEncoder

    @functools.cached_property
    def has_safe(self) -> bool:
        """Says whether every row tells which of its answers are harmless; of a source that is not read whole
        the first row says it for all.
        """
        for part in self._parts:
            if isinstance(part, KeptRows):
                pairs = part.items
            else:
                with self._lock:
                    pairs = [one.item for one in part.at([StreamRow(0, 0, 0)])]
            if any(pair.safe is None for pair in pairs):
                return False
        return True

    def batch(self, seqs: Sequence[int]) -> Batch:
        """Returns two rows per pair (row_id = 2 · seq, + 1 for rejected) with the columns that training
        reads.

        unit: seq. margin: of the pair, on both rows. safe: ±1, only where every row of the data says it.
        """
        found, numbers = [self.item(seq) for seq in seqs], np.array(seqs, np.int64)
        pairs = [one.item for one in found]
        rows = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        row_ids = (2 * numbers[:, None] + np.arange(2)).reshape(-1)
        columns: dict[str, Any] = {
            "unit": np.repeat(numbers, 2),
            "margin": np.repeat(np.array([pair.margin for pair in pairs], np.float32), 2),
        }
        if self.has_safe:
            for one in found:
                if one.item.safe is None:
                    raise one.source.error(one.row, f"has no {' and '.join(SAFE)}, which the first row has")
            columns["safe"] = np.array([s for pair in pairs for s in pair.safe or ()], np.float32)
        if self.images is not None:
            shown = [one.source.references(one.row, _prompt(one.source, one.row).images) for one in found]
            columns[IMAGES] = [text for images in shown for text in [images_as_text(images)] * 2]
        return token_rows(row_ids, rows).with_columns(columns)
