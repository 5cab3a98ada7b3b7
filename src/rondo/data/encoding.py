"""The rows of a source as what a stream hands out: encoded, cut or dropped where they are too long."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from rondo.chat import Turns
from rondo.core.errors import DataError
from rondo.data.content import look
from rondo.data.mixture import StreamRow
from rondo.data.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Overlong = Literal["drop", "error", "truncate_left", "truncate_right"]
T = TypeVar("T")
P = TypeVar("P", bound=tuple[Any, ...])
_CHUNK = 128  # rows that are encoded at once


class StreamItem(NamedTuple, Generic[T]):
    """A row of a stream."""

    source: Source
    """The source it is from."""
    epoch: int
    """Passes over this source that are complete."""
    row: int
    """Its index in the source."""
    item: T
    """What it became."""
    instead_of: int | None = None
    """The index of the row that was too long, and whose place it takes."""

    @property
    def name(self) -> str:
        """`source/epoch/row`, or `source/epoch/row.too_long` of one in another's place."""
        behind = "" if self.instead_of is None else f".{self.instead_of}"
        return f"{self.source.name}/{self.epoch}/{self.row}{behind}"


class RowCheck(NamedTuple):
    """What else must be right about a row."""

    check: Callable[[Source, int], None]
    """Raises DataError, naming the row."""
    key: str
    """By which it is known that rows were checked so before."""


class Encoder(Generic[T]):
    """Makes the rows of a source into what a stream hands out; cuts or drops those that are too long."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_tokens: int | None = None,
        overlong: Overlong = "drop",
        also: RowCheck | None = None,
        turns: Turns = "sampled",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens
        """Of prompt and answers together; None: no such limit."""
        self.overlong = overlong
        self.also = also
        self.turns = turns
        """How a conversation becomes tokens."""
        self._shortest: dict[str, tuple[int, int]] = {}

    def checked(self, source: Source, rows: Sequence[int]) -> list[T | None]:
        """Checks and encodes these rows; None stands for one that is too long, and is to be dropped. Raises
        DataError naming a row that cannot be encoded.
        """
        for row in rows:
            source.check_meant(row)
        found = self(source, rows)
        if self.also is not None:
            for row, item in zip(rows, found, strict=True):
                if item is not None:
                    self.also.check(source, row)
        return found

    def __call__(self, source: Source, rows: Sequence[int]) -> list[T | None]:
        """Encodes these rows; see `checked`."""
        raise NotImplementedError

    def cut(self, ids: np.ndarray, size: int) -> np.ndarray:
        """Returns at most so many of these tokens: the last ones, or the first, as `overlong` says."""
        return ids[max(len(ids) - size, 0) :] if self.overlong == "truncate_left" else ids[:size]

    def shortened(self, source: Source, row: int, text: str, length: int, made_of: Callable[[str], P]) -> P:
        """Returns what is made of so much of a message's text that the prompt fits, so that the template's
        own tokens stay whole. length: tokens of the prompt with all of it. made_of: of a part of the text
        makes a tuple that begins with the prompt's tokens. Raises DataError naming the row.
        """
        content = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        size = len(content) - (length - self.max_prompt_tokens)
        while size > 0:
            made = made_of(str(self.tokenizer.decode(self.cut(content, size))))
            if len(made[0]) <= self.max_prompt_tokens:
                return made
            size -= len(made[0]) - self.max_prompt_tokens
        raise source.error(
            row,
            f"the prompt has {length} tokens and does not fit in "
            f"{self.max_prompt_tokens} even without its last message; raise data.max_prompt_tokens or set "
            "data.overlong_prompts=drop",
        )

    def drop(self, source: Source, row: int, length: int) -> None:
        """Notes a row that is too long, and how many tokens it has."""
        shortest = self._shortest.get(source.name)
        self._shortest[source.name] = (length, row) if shortest is None else min(shortest, (length, row))

    def parts(self, source: Source, row: int) -> str:
        """Says which parts of a row's tokens are not its own text; empty: none."""
        return ""

    def tell(self, source: Source, rows: int, dropped: int) -> None:
        """Says how many of so many rows were too long. Raises DataError where all were."""
        in_all = f" or {self.max_tokens} tokens in all" if self.max_tokens else ""
        limit = f"data.max_prompt_tokens={self.max_prompt_tokens}{in_all}"
        if dropped == rows:
            length, row = self._shortest[source.name]
            raise DataError(
                f"source {source.name!r}: every one of its {dropped} rows is longer than {limit}: the "
                f"shortest ({source.where(row)}) has {length} tokens{self.parts(source, row)}; raise the "
                "limit"
            )
        if dropped:
            text = "source %s: dropped %d of %d rows that are longer than %s"
            logger.warning(text, source.name, dropped, rows, limit)

    def key(self) -> list[Any]:
        """Returns what the outcome depends on, besides the rows."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = self.tokenizer.get_vocab() if backend is None else backend.to_str()
        limits = [self.max_prompt_tokens, self.max_tokens, self.overlong, self.also and self.also.key]
        limits.append(self.turns)
        told = (getattr(self.tokenizer, name, None) for name in ("chat_template_options", "image_text"))
        template = [self.tokenizer.chat_template, *told]
        return [type(self).__name__, limits, words, template, self.tokenizer.special_tokens_map]


@dataclass(frozen=True)
class KeptRows(Generic[T]):
    """What is left of one source: `items[i]` belongs to row `rows[i]`."""

    source: Source
    """The source the rows are from."""
    rows: np.ndarray
    """The indices of the rows that are left."""
    items: Sequence[T]
    """What each row became."""
    dropped: int
    """The number of rows that were too long."""

    def __len__(self) -> int:
        return len(self.items)

    def at(self, places: Sequence[StreamRow]) -> list[StreamItem[T]]:
        """Returns what is at these places of this source."""
        return [
            StreamItem(self.source, place.epoch, int(self.rows[place.position]), self.items[place.position])
            for place in places
        ]

    def digests(self) -> list[bytes]:
        """Returns what each row's tokens are told apart by; nothing of a source with images."""
        return [] if self.source.images is not None else [digest_of(item) for item in self.items]

    def repeats(self) -> int:
        """Counts the rows that have the tokens of a row before them; of a source with images none does."""
        digests = self.digests()
        return len(digests) - len(set(digests))

    def row_at(self, position: int) -> int:
        """Returns the row of the source at a position among those that are left."""
        return int(self.rows[position])

    def item(self, row: int) -> T | None:
        """Returns what a row of the source became; None for one that is too long."""
        position = int(np.searchsorted(self.rows, row))
        is_kept = position < len(self.rows) and self.rows[position] == row
        return self.items[position] if is_kept else None


def digest_of(item: Any) -> bytes:
    """Returns what the token ids of a prompt, conversation or pair are told apart by."""
    if isinstance(item, np.ndarray):
        return hashlib.blake2b(item.tobytes(), digest_size=12).digest()
    if is_dataclass(item):  # a pair
        item = tuple(vars(item).values())
    return b"|".join(filter(None, map(digest_of, item))) if isinstance(item, tuple) else b""


def encode_source(source: Source, encode: Encoder[T], enough: int | None = None) -> KeptRows[T]:
    """Encodes all rows in chunks, and reports progress after each (`looking`). enough: ends when so many rows
    were kept.
    """
    rows: list[int] = []
    items: list[T] = []
    seen = 0
    while seen < len(source) and (enough is None or len(rows) < enough):
        wanted = _CHUNK if enough is None else min(_CHUNK, enough - len(rows))
        chunk = range(seen, min(seen + wanted, len(source)))
        for row, item in zip(chunk, encode.checked(source, chunk), strict=True):
            if item is not None:
                rows.append(row)
                items.append(item)
        seen = chunk.stop
        look(f"{source.name}: {seen} of {len(source)} rows tokenised")
    encode.tell(source, seen, seen - len(rows))
    return KeptRows(source, np.array(rows, np.int64), items, seen - len(rows))


def encode_together(
    source: Source, rows: Sequence[int], encode: Callable[..., list[T]], texts: Sequence[Any]
) -> list[T]:
    """Calls encode(texts, tools=…) for all rows at once. Raises DataError naming a row that cannot be."""
    tools = [source.tools(row) for row in rows]
    try:
        return encode(texts, tools=tools)
    except DataError:  # say which row it was
        for row, text, tool in zip(rows, texts, tools, strict=True):
            with source.about(row):
                encode([text], tools=[tool])
        raise
