"""The rows of sources, encoded, as streams over sequence numbers.

A source of up to WHOLE rows is encoded when a stream is made: over-long and broken rows show before anything
starts, and how many rows an epoch has is known. After that a row is a look-up. Of a larger source the first
rows are looked at then; see `on_demand.py`. What is encoded: `prompts.py`, `conversations.py`, `pairs.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rondo.chat import Turns, template_keys
from rondo.config.schema import SourceConfig
from rondo.core.errors import RondoError
from rondo.data.encoding import Encoder, KeptRows, Overlong, RowCheck, StreamItem, encode_source
from rondo.data.images import Images
from rondo.data.mixture import Mixture
from rondo.data.on_demand import ReadAhead, RowsOnDemand
from rondo.data.sources import FIRST, WHOLE, Source, open_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")
Content = Mapping[str, Mapping[str, Any]]


class SourceStream(Generic[T]):
    """The rows of several sources in the endless order of a `Mixture`: a function of the sequence number and
    of the constructor's arguments.

    Sources are interleaved by weight and each is shuffled anew in every pass over it; batches may straddle
    epochs. max_tokens: of prompt and answers. tools: schemas of rollout.tools. also: what else is checked of
    each row. whole: all sources are encoded now, however large. images: how those of rows are found; None:
    the model reads none. turns: how conversations become tokens. Raises ConfigError and DataError (file,
    line, remedy) for anything wrong in a row that is read now.
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
        also: RowCheck | None = None,
        whole: bool = False,
        images: Images | None = None,
        turns: Turns = "sampled",
    ) -> None:
        encode = self.encoder(tokenizer, max_prompt_tokens, max_tokens, overlong, also, turns)
        self.tokenizer = tokenizer
        self.images = images
        opened = open_sources(sources, tools, template_keys(tokenizer), images)
        self._parts: list[KeptRows[T] | RowsOnDemand[T]] = [
            encode_source(source, encode)
            if whole or len(source) <= WHOLE
            else RowsOnDemand(source, encode, shuffle=shuffle, seed=seed)
            for source in opened
        ]
        self._late = [part for part in self._parts if isinstance(part, RowsOnDemand)]
        self._lock = threading.Lock()  # around the tokenizer
        for part in self._late:
            part.seen.go_on(self._lock, FIRST)
        self._ahead = ReadAhead(self._encoded, self._lock)
        self._failed: RondoError | None = None
        weights = [source.config.weight for source in opened]
        lengths = [len(part) for part in self._parts]
        names = [source.name for source in opened]
        self._mixture = Mixture(names, lengths, weights, shuffle=shuffle, seed=seed)
        self.source_names: tuple[str, ...] = self._mixture.names
        # Of all sources, less what was dropped of those that are encoded whole.
        self.rows_per_epoch: int = self._mixture.epoch_length

    @cached_property
    def content(self) -> Content:
        """What its rows are, for checkpoints: source → number, and a digest of their content, which is made
        when it is asked for first.
        """
        opened = [part.source for part in self._parts]
        return {source.name: {"rows": len(source), "digest": source.digest(len(source))} for source in opened}

    @property
    def large_sources(self) -> Sequence[str]:
        """The names of those that are not encoded whole."""
        return [part.source.name for part in self._late]

    @property
    def dropped(self) -> Mapping[str, int]:
        """Source → rows that are too long, of those that were looked at."""
        return {part.source.name: part.dropped for part in self._parts}

    def repeats(self) -> Mapping[str, tuple[int, int]]:
        """Returns, by source, how many rows have the tokens of a row before them, and how many there are; of
        sources that are encoded whole.
        """
        return {part.source.name: (part.repeats(), len(part)) for part in self._whole}

    def digests(self) -> Mapping[str, Sequence[bytes]]:
        """Returns, by source, what the tokens of its rows are told apart by; of the same sources."""
        return {part.source.name: part.digests() for part in self._whole}

    @property
    def _whole(self) -> list[KeptRows[T]]:
        return [part for part in self._parts if isinstance(part, KeptRows)]

    def describe(self) -> list[str]:
        """Writes a line for each source: its rows, and those that are too long."""
        return [
            f"{part.source.name}: {len(part.source)} rows, {part.dropped} of them too long"
            for part in self._parts
        ]

    def look_at_rest(self) -> None:
        """Encodes every row that was not looked at yet, only to find errors. The result is cached, so that
        another run does not repeat the work. Raises DataError naming the row.
        """
        for part in self._late:
            part.seen.go_on(self._lock)

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Does so beside what is inside, in a thread that takes half of a processor at most; an error is
        raised by the next `row`.
        """
        ended = threading.Event()

        def run() -> None:
            try:
                for part in self._late:
                    part.seen.go_on(self._lock, beside=ended)
            except RondoError as error:
                self._failed = error

        thread = threading.Thread(target=run, name="rondo-look-at-rows", daemon=True)
        if any(not part.seen.is_done for part in self._late):
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if self._failed is not None:  # it may have been found behind the last row that was asked for
                logger.warning("%s", self._failed)

    def row(self, seq: int) -> T:
        """Returns the encoded row at sequence number `seq` (from 0, without end). Raises DataError."""
        return self.item(seq).item

    def item(self, seq: int) -> StreamItem[T]:
        """Returns the row at `seq`, and where it is from. Raises DataError."""
        if self._failed is not None:
            raise self._failed
        return self._ahead[seq] if self._late else self._encoded(range(seq, seq + 1))[0]

    def changes_since(self, content: Content) -> list[str]:
        """Says of each source whose rows are others than they were in how far. content: as it was."""
        parts = [part.source for part in self._parts if part.source.name in content]
        return [
            f"{source.name}: {how}" for source in parts if (how := self._change(source, content[source.name]))
        ]

    def _change(self, source: Source, before: Mapping[str, Any]) -> str:
        if before == self.content[source.name]:
            return ""
        rows, had = len(source), before["rows"]
        if rows == had:
            return f"{rows} rows, as before, with other content"
        if rows > had and source.digest(had) == before["digest"]:
            return f"{rows - had} rows more, behind the {had} that there were"
        return f"{rows} rows, and there were {had}"

    # ---- for who chooses rows in another order ----

    @property
    def sizes(self) -> Mapping[str, int]:
        """Source → its rows, those that are too long included."""
        return {part.source.name: len(part.source) for part in self._parts}

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Source → the columns of its first row."""
        return {part.source.name: tuple(part.source.rows[0]) for part in self._parts if len(part.source)}

    def row_at(self, seq: int) -> tuple[str, int]:
        """Returns source and row of what is at `seq`, where it is not too long."""
        place = self._mixture.place(seq)
        return self.source_names[place.source], self._parts[place.source].row_at(place.position)

    def item_of(self, source: str, row: int, epoch: int = 0) -> StreamItem[T] | None:
        """Returns a row of a source; None where it is too long. Raises DataError."""
        if self._failed is not None:
            raise self._failed
        part = self._parts[self.source_names.index(source)]
        with self._lock:
            item = part.item(row)
        return None if item is None else StreamItem(part.source, epoch, row, item)

    def _encoded(self, seqs: range) -> list[StreamItem[T]]:
        places = [self._mixture.place(seq) for seq in seqs]
        found: dict[int, StreamItem[T]] = {}
        for number, part in enumerate(self._parts):
            own = [i for i, place in enumerate(places) if place.source == number]
            found.update(zip(own, part.at([places[i] for i in own]), strict=True))
        return [found[i] for i in range(len(places))]
