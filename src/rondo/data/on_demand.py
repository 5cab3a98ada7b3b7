"""A source that is too large to be encoded before anything starts: its rows are encoded when their numbers
come up, and a little before; and a pass looks at all others, for their errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import rondo
from rondo.config.schema import SourceConfig
from rondo.core.errors import DataError, StorageError
from rondo.core.types import request_seed
from rondo.data.content import look
from rondo.data.encoding import Encoder, StreamItem
from rondo.data.mixture import StreamRow
from rondo.data.sources import Source
from rondo.system.border import in_thread
from rondo.system.storage import kept_folder, make_folder, write_atomic

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CHUNK = 64  # rows of a pass that are encoded at once
_SECONDS = 10.0  # between two times that it is written how far a pass is
_TRIES = 1 << 14  # rows that are drawn in place of one that is too long
_BLOCK = 64  # values that are made at once
_AHEAD = 8  # blocks that are made ahead of the one asked for last
_KEPT = 64  # blocks that are kept, among which are those ahead


class RowsOnDemand(Generic[T]):
    """A source whose rows are encoded when they are asked for. A row that is too long is replaced by another
    one, drawn from all rows as a function of seed, epoch and row; without shuffling by the next one that
    fits.
    """

    def __init__(self, source: Source, encode: Encoder[T], *, shuffle: bool, seed: int) -> None:
        self.source = source
        self._encode = encode
        self._shuffle = shuffle
        self._seed = seed
        self.seen = Pass(source, encode)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def dropped(self) -> int:
        """The number of rows that were found to be too long, as far as they were looked at."""
        return self.seen.dropped

    def at(self, places: Sequence[StreamRow]) -> list[StreamItem[T]]:
        """Returns what is at these places of this source."""
        rows = [place.position for place in places]
        found = self._encode.checked(self.source, rows)
        return [
            StreamItem(self.source, place.epoch, row, item) if item is not None else self._instead(place)
            for place, row, item in zip(places, rows, found, strict=True)
        ]

    def row_at(self, position: int) -> int:
        """Returns the row at a position: all have one, long ones too."""
        return position

    def item(self, row: int) -> T | None:
        """Encodes a row of the source; None stands for one that is too long."""
        return self._encode.checked(self.source, [row])[0]

    def _instead(self, place: StreamRow) -> StreamItem[T]:
        for number in range(1, min(_TRIES, len(self) + 1)):
            drawn = number + place.position
            if self._shuffle:
                name, epoch = self.source.name, place.epoch
                drawn = request_seed(self._seed, "instead", name, epoch, place.position, number)
            (item,) = self._encode.checked(self.source, [drawn % len(self)])
            if item is not None:
                return StreamItem(self.source, place.epoch, drawn % len(self), item, place.position)
        raise DataError(
            f"source {self.source.name!r}: of {number} rows that were drawn in place of one that is longer "
            f"than data.max_prompt_tokens={self._encode.max_prompt_tokens} none is shorter; raise the limit"
        )


class Pass:
    """How far the rows of a source have been looked at, in this run and those before: FOLDER/data/<key>.json
    says it, by all that the outcome depends on. FOLDER: see `storage.kept_folder`.
    """

    def __init__(self, source: Source, encode: Encoder[Any]) -> None:
        self._source = source
        self._encode = encode
        self.rows = self.dropped = 0
        folder = kept_folder()
        self._file = None
        if folder is not None and source.stamp is not None:
            told = [
                rondo.__version__,
                source.stamp,
                _settings(source.config),
                source.shared_tools,
                encode.key(),
            ]
            digest = hashlib.sha256(json.dumps(told, default=repr, sort_keys=True).encode()).hexdigest()
            self._file = folder / "data" / f"{digest[:32]}.json"
            # One that cannot be read is as good as none.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found = json.loads(self._file.read_text())
                self.rows, self.dropped = int(found["rows"]), int(found["dropped"])

    @property
    def is_done(self) -> bool:
        """Says whether every row was looked at."""
        return self.rows >= len(self._source)

    def go_on(
        self, lock: threading.Lock, until: int | None = None, beside: threading.Event | None = None
    ) -> None:
        """Looks at the rows up to `until` (None: all). lock: is held while some are encoded. beside: there is
        other work; half of the time is left to it, and when it is set this ends. Raises DataError.
        """
        end, source = min(len(self._source), until or len(self._source)), self._source
        if self.rows >= end:
            return
        written = time.monotonic()
        while self.rows < end and not (beside and beside.is_set()):
            began = time.monotonic()
            chunk = range(self.rows, min(self.rows + _CHUNK, end))
            with lock:
                found = self._encode.checked(source, chunk)
            self.rows, self.dropped = chunk.stop, self.dropped + found.count(None)
            look(f"{source.name}: {self.rows} of {end} rows tokenised")
            if beside is not None:
                beside.wait(time.monotonic() - began)
            if time.monotonic() - written > _SECONDS:
                self._write()
                written = time.monotonic()
        self._write()
        if self.is_done:
            self._encode.tell(source, self.rows, self.dropped)

    def _write(self) -> None:
        logger.info("source %s: %d of %d rows looked at", self._source.name, self.rows, len(self._source))
        if self._file is not None:
            # That it cannot be kept is no reason to end a run.
            with contextlib.suppress(StorageError):
                make_folder(self._file.parent)
                write_atomic(self._file, json.dumps({"rows": self.rows, "dropped": self.dropped}))


def _settings(config: SourceConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name not in ("name", "weight")}


class ReadAhead(Generic[T]):
    """The values that `make` makes of the numbers 0, 1, …: one that is asked for is there, or made at once;
    those behind it are made in a thread. Any thread may ask. lock: is held around each call of `make`.
    """

    def __init__(self, make: Callable[[range], list[T]], lock: threading.Lock) -> None:
        self._make = make
        self._lock = lock
        self._blocks: dict[int, list[T]] = {}
        self._is_ahead = False

    def __getitem__(self, number: int) -> T:
        block, at = divmod(number, _BLOCK)
        found = self._block(block)
        behind = [one for one in range(block + 1, block + 1 + _AHEAD) if one not in self._blocks]
        if behind and not self._is_ahead:
            self._is_ahead = True
            in_thread(partial(self._go_ahead, behind), "read-ahead")
        return found[at]

    def _go_ahead(self, blocks: list[int]) -> None:
        try:
            for block in blocks:  # what is raised here is raised again when that block is asked for
                self._block(block)
        finally:
            self._is_ahead = False

    def _block(self, block: int) -> list[T]:
        found = self._blocks.get(block)
        if found is None:
            with self._lock:
                found = self._blocks.get(block)
                if found is None:
                    if len(self._blocks) >= _KEPT:
                        del self._blocks[next(iter(self._blocks))]
                    found = self._blocks[block] = self._make(range(block * _BLOCK, (block + 1) * _BLOCK))
        return found
