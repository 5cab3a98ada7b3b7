"""Conversations for SFT (and the sides of preference pairs): tokenised once, split where training begins."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from rondo.chat import Conversation, encode_conversations
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.errors import DataError
from rondo.data.encoding import Encoder, encode_together
from rondo.data.sources import Source
from rondo.data.stream import SourceStream

T = TypeVar("T")
# Prompt, response, and the mask of what is learnt of it.
Example = tuple[np.ndarray, np.ndarray, np.ndarray]


class ConversationEncoder(Encoder[T]):
    """Makes conversations into token ids, and splits them where training begins."""

    def encode(
        self, source: Source, rows: Sequence[int], conversations: Sequence[Conversation]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns token ids and mask of one conversation per row. Raises DataError naming the row."""
        encode = functools.partial(encode_conversations, self.tokenizer)
        return encode_together(source, rows, encode, conversations)

    def fit(self, source: Source, row: int, ids: np.ndarray, mask: np.ndarray) -> Example | None:
        """Splits at the first token under the mask; None where the row is too long and is to be dropped."""
        if not mask.any():
            raise source.error(
                row, "the assistant turns are empty, or none is to be learnt; take the row out"
            )
        start = int(np.argmax(mask))
        prompt, response, trained = ids[:start], ids[start:], mask[start:]
        most = len(ids) if self.max_tokens is None else self.max_tokens
        if len(prompt) <= self.max_prompt_tokens and len(ids) <= most:
            return prompt, response, trained
        if self.overlong == "drop":
            return None
        if self.overlong == "error":
            raise source.error(
                row,
                f"{len(prompt)} prompt tokens and {len(ids)} in all, more than data.max_prompt_tokens="
                f"{self.max_prompt_tokens} and the {most} that actor.token_budget and the model have room "
                "for; raise the limits, or set data.overlong_prompts=drop",
            )
        prompt = self.cut(prompt, self.max_prompt_tokens)
        room = max(0, most - len(prompt))
        return (prompt, response[:room], trained[:room]) if trained[:room].any() else None


def _conversation(source: Source, row: int) -> Conversation:
    """Returns a row's `messages`, or its prompt (string or messages) followed by its `response`."""
    columns, key = source.rows[row], source.config.prompt_key
    if columns.get("messages") is not None and columns.get("response") is None:
        return source.read(row, columns["messages"], takes_flags=True)
    with source.about(row):
        if columns.get(key) is None or columns.get("response") is None:
            raise DataError(f"a row needs 'messages', or {key!r} and 'response'; it has {', '.join(columns)}")
        if not isinstance(columns["response"], str):
            raise DataError(f"'response' must be a string, got {type(columns['response']).__name__}")
    messages, unlearnt = source.read(row, columns[key], takes_flags=True)
    return Conversation((*messages, {"role": "assistant", "content": columns["response"]}), unlearnt)


class _RowEncoder(ConversationEncoder[Example]):
    def __call__(self, source: Source, rows: Sequence[int]) -> list[Example | None]:
        encoded = self.encode(source, rows, [_conversation(source, row) for row in rows])
        return [self.fit(source, row, ids, mask) for row, (ids, mask) in zip(rows, encoded, strict=True)]


class ConversationStream(SourceStream[Example]):
    """The endless stream of conversations for SFT.

    A row is (prompt_ids int32 [P]: tokens up to the first assistant turn, response_ids int32 [T]: the rest,
    response_mask uint8 [T]: 1 on assistant turns with their end-of-turn token). overlong is applied when the
    prompt is longer than `max_prompt_tokens` or all of it longer than `max_tokens`: truncation cuts the
    prompt at the side named and the response at its end.
    """

    encoder = _RowEncoder

    def batch(self, seqs: Sequence[int]) -> Batch:
        """Returns the rows at `seqs` (row_id = seq), with the columns that training reads."""
        return token_rows(np.array(seqs, np.int64), [self.row(seq) for seq in seqs])


def token_rows(row_ids: np.ndarray, rows: Sequence[Example]) -> Batch:
    """Makes the columns that training reads of rows (prompt, response, mask)."""
    return Batch.of(
        {
            ROW_ID: row_ids,
            "prompt_ids": ragged_rows([prompt for prompt, _, _ in rows], np.int32),
            "response_ids": ragged_rows([response for _, response, _ in rows], np.int32),
            "response_mask": ragged_rows([mask for _, _, mask in rows], np.uint8),
            "prompt_length": np.array([len(prompt) for prompt, _, _ in rows], np.int32),
            "response_length": np.array([len(response) for _, response, _ in rows], np.int32),
            "num_trained_tokens": np.array([int(mask.sum()) for _, _, mask in rows], np.int32),
        }
    )
