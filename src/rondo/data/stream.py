"""The rows of sources, encoded once, as streams over sequence numbers.

Everything is tokenised when a stream is made: over-long and broken rows show before the run starts, and how
many rows an epoch has is known. After that a row is a look-up. What is encoded: `prompts.py`,
`conversations.py`, `pairs.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from rondo.chat import template_keys
from rondo.config.schema import SourceConfig
from rondo.core.errors import DataError
from rondo.data.files import look
from rondo.data.mixture import Mixture
from rondo.data.sources import Source, open_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Overlong = Literal["drop", "error", "truncate_left", "truncate_right"]
T = TypeVar("T")

_CHUNK = 512


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


class Encoder(Generic[T]):
    """Makes the rows of a source into what a stream hands out; cuts or drops those that are too long."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        max_tokens: int | None = None,
        overlong: Overlong = "drop",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens
        """Of prompt and answers together; None: no such limit."""
        self.overlong = overlong

    def __call__(self, source: Source, rows: range) -> list[T | None]:
        """Encodes these rows; None stands for one to drop. Raises DataError naming a row that cannot be."""
        raise NotImplementedError

    def cut(self, ids: np.ndarray, size: int) -> np.ndarray:
        """Returns at most so many of these tokens: the last ones, or the first, as `overlong` says."""
        return ids[max(len(ids) - size, 0) :] if self.overlong == "truncate_left" else ids[:size]


def encode_source(source: Source, encode: Encoder[T]) -> KeptRows[T]:
    """Encodes all rows in chunks, between which who is `looking` may look."""
    rows: list[int] = []
    items: list[T] = []
    for start in range(0, len(source), _CHUNK):
        chunk = range(start, min(start + _CHUNK, len(source)))
        for row in chunk:
            source.check_media(row)
        for row, item in zip(chunk, encode(source, chunk), strict=True):
            if item is not None:
                rows.append(row)
                items.append(item)
        look(f"{source.name}: {chunk.stop} of {len(source)} rows tokenised")
    dropped = len(source) - len(rows)
    in_all = f" or {encode.max_tokens} tokens in all" if encode.max_tokens else ""
    limit = f"data.max_prompt_tokens={encode.max_prompt_tokens}{in_all}"
    if not rows:
        raise DataError(
            f"source {source.name!r}: every one of its {dropped} rows is longer than {limit}; raise the limit"
        )
    if dropped:
        text = "source %s: dropped %d of %d rows that are longer than %s"
        logger.warning(text, source.name, dropped, len(source), limit)
    return KeptRows(source, np.array(rows, np.int64), items, dropped)


def encode_together(
    source: Source, rows: range, encode: Callable[..., list[T]], texts: Sequence[Any]
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


class SourceStream(Generic[T]):
    """The rows of several sources, encoded once, in the endless order of a `Mixture`.

    Sources are interleaved by weight and each is shuffled anew in every pass over it; batches may straddle
    epochs. max_tokens: of prompt and answers. tools: schemas of rollout.tools. Raises ConfigError and
    DataError (file, line, remedy) for anything wrong in any row.
    """

    encoder: type[Encoder[T]]

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
        tools: Sequence[Any] = (),
    ) -> None:
        encode = self.encoder(tokenizer, max_prompt_tokens, max_tokens, overlong)
        self.tokenizer = tokenizer
        opened = open_sources(sources, tools, template_keys(tokenizer))
        self._kept: list[KeptRows[T]] = [encode_source(source, encode) for source in opened]
        names = [kept.source.name for kept in self._kept]
        weights = [kept.source.config.weight for kept in self._kept]
        lengths = [len(kept.items) for kept in self._kept]
        self._mixture = Mixture(names, lengths, weights, shuffle=shuffle, seed=seed)
        # Source → rows that `encode` took out.
        self.dropped: Mapping[str, int] = {kept.source.name: kept.dropped for kept in self._kept}
        self.source_names: tuple[str, ...] = self._mixture.names
        # Of all sources, less what was dropped.
        self.rows_per_epoch: int = self._mixture.epoch_length

    def rows(self) -> Iterator[tuple[Source, int]]:
        """Yields every row that may be handed out, with its source."""
        for kept in self._kept:
            for row in kept.rows.tolist():
                yield kept.source, row

    def row(self, seq: int) -> T:
        """Returns the encoded row at sequence number `seq` (from 0, without end)."""
        place = self._mixture.place(seq)
        return self._kept[place.source].items[place.position]
