"""Conversations for SFT (and the sides of preference pairs): tokenised once, split where training begins."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from rondo.chat import Conversation, encode_conversations, loses_thoughts
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.columns import IMAGES
from rondo.core.errors import DataError
from rondo.core.images import images_as_text
from rondo.data.encoding import Encoder, encode_together
from rondo.data.images import uncut
from rondo.data.sources import Source, below
from rondo.data.stream import SourceStream

T = TypeVar("T")
LOOKED_AT = 128  # rows of a source, for thoughts
# Prompt, response, and the mask of what is learnt of it.
Example = tuple[np.ndarray, np.ndarray, np.ndarray]


class ConversationEncoder(Encoder[T]):
    """Makes conversations into token ids, and splits them where training begins."""

    def encode(
        self, source: Source, rows: Sequence[int], conversations: Sequence[Conversation]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns token ids and mask of one conversation per row. Raises DataError naming the row."""
        for row, one in zip(rows, conversations, strict=True):
            system = source.rows[row].get("system")
            is_said = any(message["content"] == system for message in one.messages)
            if isinstance(system, str) and system and not is_said:
                raise source.error(
                    row,
                    "column 'system' is no part of the conversation, and the model would not see it; write "
                    "it as a first message of the role system, or leave it out: drop_columns: [system]",
                )
        encode = functools.partial(encode_conversations, self.tokenizer, turns=self.turns)
        shown = [one._replace(messages=one.for_template()) for one in conversations]
        found = encode_together(source, rows, encode, shown)
        for i, (row, one) in enumerate(zip(rows, conversations, strict=True)):
            if one.images:
                ids, mask = source.expanded(row, found[i], one.images)
                found[i] = (ids, mask)
        return found

    def fit(
        self, source: Source, row: int, said: Conversation, ids: np.ndarray, mask: np.ndarray
    ) -> Example | None:
        """Splits the tokens of what is said at the first one under the mask; None where the row is too long
        and is to be dropped, or has no room for an answer.
        """
        if not mask.any():
            raise source.error(
                row, "the assistant turns are empty, or none is to be learnt; take the row out"
            )
        prompt, response, trained = _split(ids, mask)
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
        if said.images:
            raise source.error(row, uncut(len(ids), most))
        if len(prompt) > self.max_prompt_tokens:
            if self.max_prompt_tokens >= most:
                return None
            if self.tokenizer.chat_template is None:
                prompt = self.cut(prompt, self.max_prompt_tokens)
            else:
                prompt, response, trained = self._cut_question(source, row, said, len(prompt))
        room = max(0, most - len(prompt))
        return (prompt, response[:room], trained[:room]) if trained[:room].any() else None

    def _cut_question(self, source: Source, row: int, said: Conversation, length: int) -> Example:
        """Shortens the message before the first answer that is learnt until the prompt fits."""
        messages = said.messages
        turns = (i for i, message in enumerate(messages) if message["role"] == "assistant")
        last = next(i for i in turns if i not in said.unlearnt) - 1

        def with_text(text: str) -> Example:
            cut = (*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :])
            ((ids, mask),) = self.encode(source, [row], [said._replace(messages=cut)])
            return _split(ids, mask)

        text = messages[last]["content"] if last >= 0 else ""
        return self.shortened(source, row, text, length, with_text)


def _split(ids: np.ndarray, mask: np.ndarray) -> Example:
    """Splits the tokens of a conversation where learning begins."""
    start = int(np.argmax(mask))
    return ids[:start], ids[start:], mask[start:]


def _conversation(source: Source, row: int) -> Conversation:
    """Returns a row's `messages`, or its prompt (string or messages) followed by its `response`."""
    columns, config = source.rows[row], source.config
    whole, key, answer_key = config.messages_key, config.prompt_key, config.response_key
    prompt, response = below(columns, key), below(columns, answer_key)
    if columns.get(whole) is not None and response is None:
        return source.read(row, columns[whole], takes_flags=True)
    with source.about(row):
        if columns.get(whole) is not None:
            raise DataError(
                f"the row has both {whole!r} and {answer_key!r}, and one of them is learnt; leave the other "
                "out: drop_columns of the source (messages_key and response_key name other columns)"
            )
        if prompt is None or response is None:
            there = ", ".join(columns)
            raise DataError(f"a row needs {whole!r}, or {key!r} and {answer_key!r}; it has {there}")
        if not isinstance(response, str):
            raise DataError(f"{answer_key!r} must be a string, got {type(response).__name__}")
    asked = source.read(row, prompt, takes_flags=True)
    answer = {"role": "assistant", "content": response}
    return asked._replace(messages=(*asked.messages, answer))


class _RowEncoder(ConversationEncoder[Example]):
    def __call__(self, source: Source, rows: Sequence[int]) -> list[Example | None]:
        said = [_conversation(source, row) for row in rows]
        encoded = self.encode(source, rows, said)
        found = []
        for row, one, (ids, mask) in zip(rows, said, encoded, strict=True):
            found.append(self.fit(source, row, one, ids, mask))
            if found[-1] is None:
                self.drop(source, row, len(ids))
        return found


class ConversationStream(SourceStream[Example]):
    """The endless stream of conversations for SFT.

    A row is (prompt_ids int32 [P]: tokens up to the first assistant turn, response_ids int32 [T]: the rest,
    response_mask uint8 [T]: 1 on assistant turns with their end-of-turn token). overlong is applied when the
    prompt is longer than `max_prompt_tokens` or all of it longer than `max_tokens`: truncation cuts the
    prompt at the side named and the response at its end.
    """

    encoder = _RowEncoder

    def lost_thoughts(self) -> Mapping[str, tuple[int, int]]:
        """Returns, by source, in how many of its first rows the template leaves out a thought of an answer
        that is learnt, and how many were looked at.
        """
        found = {}
        for part in self._parts:
            rows = range(min(len(part.source), LOOKED_AT))
            lost = [loses_thoughts(self.tokenizer, _conversation(part.source, row)) for row in rows]
            found[part.source.name] = (sum(lost), len(rows))
        return found

    def batch(self, seqs: Sequence[int]) -> Batch:
        """Returns the rows at `seqs` (row_id = seq), with the columns that training reads."""
        found = [self.item(seq) for seq in seqs]
        rows = token_rows(np.array(seqs, np.int64), [one.item for one in found])
        if self.images is None:
            return rows
        images = [one.source.references(one.row, _conversation(one.source, one.row).images) for one in found]
        return rows.with_columns({IMAGES: list(map(images_as_text, images))})


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
