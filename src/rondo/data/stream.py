"""Prompts for RL and conversations for SFT as streams over sequence numbers.

Everything is tokenised when the stream is made: over-long and broken rows show before the run starts, and how
many prompts an epoch has is known. After that `prompt(seq)` and `row(seq)` are look-ups.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from rondo.batch import ROW_ID, Batch, ragged_rows
from rondo.chat import Messages, as_messages, encode_conversations, encode_prompt, encode_prompts
from rondo.config.schema import SourceConfig
from rondo.data.mixture import Mixture, Place
from rondo.data.sources import Source, open_sources
from rondo.errors import DataError
from rondo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Overlong = Literal["drop", "error", "truncate_left", "truncate_right"]
T = TypeVar("T")

_CHUNK = 512
_PROGRESS_SECONDS = 10.0


class Kept(Sequence[T]):
    """What is left of one source: `items[i]` belongs to row `rows[i]`; `dropped` rows were too long."""

    def __init__(self, source: Source, rows: np.ndarray, items: Sequence[T], dropped: int) -> None:
        self.source = source
        self.rows = rows
        self.items = items
        self.dropped = dropped

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: Any) -> Any:
        return self.items[position]


class Encoder(Protocol[T]):
    """Makes the rows of a source into what a stream hands out."""

    # What a row may have at most, for messages.
    limit: str

    def __call__(self, source: Source, rows: range) -> list[T | None]:
        """Encodes these rows; None stands for one to drop."""


def encode_source(source: Source, encode: Encoder[T]) -> Kept[T]:
    """Encodes all rows in chunks, with progress in the log."""
    rows: list[int] = []
    items: list[T] = []
    noted = time.monotonic()
    for start in range(0, len(source), _CHUNK):
        chunk = range(start, min(start + _CHUNK, len(source)))
        for row, item in zip(chunk, encode(source, chunk), strict=True):
            if item is not None:
                rows.append(row)
                items.append(item)
        if time.monotonic() - noted > _PROGRESS_SECONDS:
            noted = time.monotonic()
            logger.info("source %s: %d of %d rows tokenised", source.name, chunk.stop, len(source))
    dropped = len(source) - len(rows)
    if not rows:
        raise DataError(
            f"source {source.name!r}: every one of its {dropped} rows is longer than {encode.limit}; "
            "raise the limit"
        )
    if dropped:
        logger.warning(
            "source %s: dropped %d of %d rows that are longer than %s",
            source.name,
            dropped,
            len(source),
            encode.limit,
        )
    return Kept(source, np.array(rows, np.int64), items, dropped)


@contextlib.contextmanager
def about(source: Source, row: int) -> Iterator[None]:
    """A DataError raised inside is told with source, file and line."""
    try:
        yield
    except DataError as error:
        raise source.error(row, str(error)) from error


def tools_of(source: Source, row: int) -> Any:
    """Tool schemas of a row (column `tools`: a list, or its JSON text), for the chat template."""
    tools = source.rows[row].get("tools")
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) if tools else None
    except json.JSONDecodeError as error:
        raise source.error(row, f"column 'tools' is no JSON: {error}") from error


# ---------------------------------------------------------------------------------------------------- prompts


class _PromptEncoder:
    """Makes prompts of a source into token ids, and cuts or drops those that are too long."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int, overlong: Overlong) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.overlong = overlong
        self.limit = f"data.max_prompt_tokens={max_tokens}"

    def __call__(self, source: Source, rows: range) -> list[tuple[np.ndarray, Messages | None] | None]:
        """(token ids, messages if they were cut) of each row; None drops it."""
        prompts = [source.prompt(row) for row in rows]
        system = source.config.system_prompt
        tools = [tools_of(source, row) for row in rows]
        try:
            encoded = encode_prompts(self.tokenizer, prompts, system, tools)
        except DataError:  # say which row it was
            for row, prompt, tool in zip(rows, prompts, tools, strict=True):
                with about(source, row):
                    encode_prompt(self.tokenizer, prompt, system, tool)
            raise
        return [
            (ids, None) if len(ids) <= self.max_tokens else self._too_long(source, row, prompt, ids, tool)
            for row, prompt, ids, tool in zip(rows, prompts, encoded, tools, strict=True)
        ]

    def _too_long(
        self, source: Source, row: int, prompt: Any, ids: np.ndarray, tools: Any
    ) -> tuple[np.ndarray, Messages | None] | None:
        if self.overlong == "drop":
            return None
        if self.overlong == "error":
            raise source.error(
                row,
                f"the prompt has {len(ids)} tokens, more than "
                f"data.max_prompt_tokens={self.max_tokens}; raise it, or set data.overlong_prompts to drop "
                "or truncate_left",
            )
        if self.tokenizer.chat_template is None:
            return self._cut(ids, self.max_tokens), None
        return self._cut_last_message(
            source, row, as_messages(prompt, source.config.system_prompt), len(ids), tools
        )

    def _cut(self, ids: np.ndarray, size: int) -> np.ndarray:
        return ids[len(ids) - size :] if self.overlong == "truncate_left" else ids[:size]

    def _cut_last_message(
        self, source: Source, row: int, messages: Messages, length: int, tools: Any
    ) -> tuple[np.ndarray, Messages]:
        """Shorten the text of the last message until the prompt fits, so that the template's own tokens stay
        whole.
        """
        last = messages[-1]
        if not isinstance(last["content"], str):
            raise source.error(row, "only text can be truncated, and the last message has parts")
        content = np.asarray(self.tokenizer(last["content"], add_special_tokens=False)["input_ids"], np.int32)
        size = len(content) - (length - self.max_tokens)
        while size > 0:
            text = str(self.tokenizer.decode(self._cut(content, size)))
            cut = (*messages[:-1], {**last, "content": text})
            ids = encode_prompt(self.tokenizer, cut, None, tools)
            if len(ids) <= self.max_tokens:
                return ids, cut
            size -= len(ids) - self.max_tokens
        raise source.error(
            row,
            f"the prompt has {length} tokens and does not fit in "
            f"{self.max_tokens} even without its last message; raise data.max_prompt_tokens or set "
            "data.overlong_prompts=drop",
        )


class SourceStream(Generic[T]):
    """The rows of several sources, encoded once, in the endless order of a `Mixture`."""

    def __init__(
        self, sources: tuple[SourceConfig, ...], encode: Encoder[T], *, shuffle: bool, seed: int
    ) -> None:
        self._kept: list[Kept[T]] = [encode_source(source, encode) for source in open_sources(sources)]
        names = [kept.source.name for kept in self._kept]
        weights = [kept.source.config.weight for kept in self._kept]
        lengths = [len(kept) for kept in self._kept]
        self._mixture = Mixture(names, lengths, weights, shuffle=shuffle, seed=seed)
        # Source → rows that `encode` took out.
        self.dropped: Mapping[str, int] = {kept.source.name: kept.dropped for kept in self._kept}
        self.source_names: tuple[str, ...] = self._mixture.names
        # Of all sources, less what was dropped.
        self.rows_per_epoch: int = self._mixture.epoch_length

    def _item(self, seq: int) -> T:
        """The encoded row at sequence number `seq` (from 0, without end)."""
        place = self._mixture.place(seq)
        return self._kept[place.source][place.position]


class PromptStream(SourceStream[tuple[np.ndarray, "Messages | None"]]):
    """The endless stream of training prompts: `prompt(seq)` is a function of `seq` and of the constructor's
    arguments.

    Sources are interleaved by weight and each is shuffled anew in every pass over it (see `Mixture`); batches
    may straddle epochs. Raises ConfigError and DataError (file, line, remedy) for anything wrong in any row.
    """

    def __init__(
        self,
        sources: tuple[SourceConfig, ...],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        overlong: Overlong = "drop",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        encoder = _PromptEncoder(tokenizer, max_prompt_tokens, overlong)
        super().__init__(sources, encoder, shuffle=shuffle, seed=seed)
        self._chat = tokenizer.chat_template is not None

    def prompt(self, seq: int) -> Prompt:
        """The prompt at sequence number `seq` (from 0, without end)."""
        place = self._mixture.place(seq)
        return _prompt(self._kept[place.source], place, seq, self._chat)


def eval_prompts(
    sources: tuple[SourceConfig, ...],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    overlong: Overlong = "drop",
    limit: int | None = None,
) -> list[Prompt]:
    """Every prompt of the evaluation sources once, in file order; `limit` takes the first ones of each source
    in turn.

    Prompt ids are `eval:source/0/row`, so that none is also a training prompt's. Without sources: none.
    """
    if not sources:
        return []
    encoder = _PromptEncoder(tokenizer, max_prompt_tokens, overlong)
    kept = [encode_source(source, encoder) for source in open_sources(sources)]
    in_turn = sorted((position, i) for i, part in enumerate(kept) for position in range(len(part)))[:limit]
    chosen = sorted((i, position) for position, i in in_turn)
    chat = tokenizer.chat_template is not None
    return [
        _prompt(kept[i], Place(i, 0, position), seq, chat, "eval:")
        for seq, (i, position) in enumerate(chosen)
    ]


def _prompt(
    kept: Kept[tuple[np.ndarray, Messages | None]], place: Place, seq: int, chat: bool, prefix: str = ""
) -> Prompt:
    source, row = kept.source, int(kept.rows[place.position])
    token_ids, messages = kept[place.position]
    columns, key = source.rows[row], source.config.prompt_key
    if messages is None:
        messages = as_messages(columns[key], source.config.system_prompt) if chat else ()
    fields = {name: value for name, value in columns.items() if name != key}
    prompt_id = f"{prefix}{source.name}/{place.epoch}/{row}"
    return Prompt(seq, prompt_id, source.name, token_ids, fields, messages)


# ---------------------------------------------------------------------------------------------- conversations

Conversation = tuple[np.ndarray, np.ndarray, np.ndarray]


class ConversationEncoder:
    """Conversations of a source as (prompt, response, mask), cut or dropped where they are too long."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_tokens: int | None,
        overlong: Overlong,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens
        self.overlong = overlong
        in_all = f" or {max_tokens} tokens in all" if max_tokens else ""
        self.limit = f"{max_prompt_tokens} prompt tokens{in_all}"

    def __call__(self, source: Source, rows: range) -> list[Conversation | None]:
        """Each row's messages; None drops it."""
        encoded = self.encode(source, rows, [_conversation(source, row) for row in rows])
        return [self.fit(source, row, ids, mask) for row, (ids, mask) in zip(rows, encoded, strict=True)]

    def encode(
        self, source: Source, rows: range, conversations: Sequence[Messages]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids, mask) of one conversation per row. Raises DataError naming the row."""
        tools = [tools_of(source, row) for row in rows]
        try:
            return encode_conversations(self.tokenizer, conversations, tools)
        except DataError:  # say which row it was
            for row, messages, tool in zip(rows, conversations, tools, strict=True):
                with about(source, row):
                    encode_conversations(self.tokenizer, [messages], [tool])
            raise

    def fit(self, source: Source, row: int, ids: np.ndarray, mask: np.ndarray) -> Conversation | None:
        """Split at the first token under the mask; None where the row is too long and `overlong` drops it."""
        if not mask.any():
            raise source.error(row, "the assistant turns are empty; nothing to learn from")
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
                f"{len(prompt)} prompt tokens and {len(ids)} in all, more than "
                f"{self.max_prompt_tokens} and {most}; raise the limits, or set data.overlong_prompts=drop",
            )
        size = min(len(prompt), self.max_prompt_tokens)
        prompt = prompt[len(prompt) - size :] if self.overlong == "truncate_left" else prompt[:size]
        room = max(0, most - len(prompt))
        return (prompt, response[:room], trained[:room]) if trained[:room].any() else None


def _conversation(source: Source, row: int) -> Messages:
    """A row's `messages`, or its prompt (string or messages) followed by its `response`."""
    columns = source.rows[row]
    key, system = source.config.prompt_key, source.config.system_prompt
    with about(source, row):
        if columns.get("messages") is not None and columns.get("response") is None:
            return as_messages(columns["messages"], system)
        if columns.get(key) is None or columns.get("response") is None:
            raise DataError(f"a row needs 'messages', or {key!r} and 'response'; it has {', '.join(columns)}")
        if not isinstance(columns["response"], str):
            raise DataError(f"'response' must be a string, got {type(columns['response']).__name__}")
        return (*as_messages(columns[key], system), {"role": "assistant", "content": columns["response"]})


class TrainingStream(SourceStream[T]):
    """A stream of what is trained on as it stands in the data."""

    def __init__(
        self,
        sources: tuple[SourceConfig, ...],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        max_tokens: int | None = None,
        overlong: Overlong = "drop",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        conversations = ConversationEncoder(tokenizer, max_prompt_tokens, max_tokens, overlong)
        super().__init__(sources, self._encoder(conversations), shuffle=shuffle, seed=seed)

    def _encoder(self, conversations: ConversationEncoder) -> Encoder[T]:
        """Returns the encoder of this stream's rows, which consist of conversations."""
        raise NotImplementedError


class ConversationStream(TrainingStream[Conversation]):
    """The endless stream of conversations for SFT; order, weights and epochs as in `PromptStream`.

    A row is (prompt_ids: tokens up to the first assistant turn, response_ids: the rest, response_mask: 1 on
    assistant turns with their end-of-turn token). overlong is applied when the prompt is longer than
    `max_prompt_tokens` or all of it longer than `max_tokens`: truncation cuts the prompt at the side named
    and the response at its end.
    """

    def _encoder(self, conversations: ConversationEncoder) -> ConversationEncoder:
        return conversations

    def row(self, seq: int) -> Conversation:
        """(prompt_ids int32 [P], response_ids int32 [T], response_mask uint8 [T]) at sequence number
        `seq`.
        """
        return self._item(seq)

    def batch(self, seqs: Sequence[int]) -> Batch:
        """The rows at `seqs` (row_id = seq), with the columns that training reads."""
        return token_rows(np.array(seqs, np.int64), [self.row(seq) for seq in seqs])


def token_rows(row_ids: np.ndarray, rows: Sequence[Conversation]) -> Batch:
    """The columns that training reads of rows (prompt, response, mask)."""
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
