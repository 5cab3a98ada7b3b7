"""Batch (the data) and BatchRef (what the controller holds).

A Batch is one Arrow array per column: numbers or text per row, lists per token, lists of fixed-size lists
where each token has K numbers (wide). Lists have int32 offsets from 0, so that a column's buffers *are* the
packed layout that variable-length attention wants. A BatchRef is an index of per-row numbers plus references
to blocks of token data; taking and joining it moves no tokens.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rondo.core.arrays import (
    ColumnLike,
    in_arrow_spelling,
    is_plain,
    joined,
    numbers,
    packed,
    parquet_parts,
    ragged_array,
    ragged_rows,
    starts_of,
    sum_of_rows,
    taken,
    to_numpy,
    values_and_offsets,
    wide_array,
)
from rondo.core.columns import IMAGES, ROW_ID
from rondo.core.errors import DataError
from rondo.core.images import ImageRef, images_of_text

__all__ = ["ROW_ID", "Batch", "BatchRef", "Block", "ColumnLike", "Part", "Resolver", "Shard"]
__all__ += ["ragged_array", "ragged_rows", "wide_array"]

_NO_ROW = np.iinfo(np.int64).min  # stands for a row of a block that belongs to nobody


class Batch:
    """Rows of training data. Immutable: every method returns a new Batch that shares what it can."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: dict[str, pa.Array]) -> None:
        """Takes packed arrays of one length as they are; use `of` for all others."""
        self._arrays = arrays

    @classmethod
    def of(cls, columns: Mapping[str, ColumnLike]) -> Batch:
        """Makes a batch of arrays, one entry per row. Use `ragged_array`/`ragged_rows` for per-token
        columns.
        """
        arrays = {name: packed(name, column) for name, column in columns.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns differ in length: {lengths}")
        return cls(arrays)

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values()), ()))

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self._arrays)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and self.table.equals(other.table)

    __hash__ = None  # type: ignore[assignment]

    @property
    def table(self) -> pa.Table:
        """Returns the columns as a table that shares them."""
        return pa.table(self._arrays)

    @property
    def columns(self) -> list[str]:
        """Returns the names of the columns."""
        return list(self._arrays)

    @property
    def num_bytes(self) -> int:
        """Counts the bytes that the columns' buffers have."""
        return sum(array.get_total_buffer_size() for array in self._arrays.values())

    def array(self, name: str) -> pa.Array:
        """Returns the column as one Arrow array. Raises DataError naming the columns there are."""
        found = self._arrays.get(name)
        if found is None:
            raise DataError(f"no column {name!r}; the batch has {', '.join(self._arrays) or 'no columns'}")
        return found

    def scalars(self, name: str) -> np.ndarray:
        """Returns a per-row column as numpy [B] (nulls become NaN; strings become objects)."""
        array = self.array(name)
        if pa.types.is_list(array.type):
            raise DataError(f"column {name!r} is per token; use ragged({name!r}) or padded({name!r})")
        return to_numpy(array)

    def ragged(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values [N] and cu_seqlens int32 [B+1], without a copy. The tensors alias the batch: do not
        write.

        The values of a wide column are [N, K].
        """
        array = self.array(name)
        flat = values_and_offsets(array)
        if flat is None:
            raise DataError(f"column {name!r} has type {array.type}; per-token columns are lists of numbers")
        return flat

    def rows(self, name: str, where: np.ndarray | None = None) -> list[np.ndarray]:
        """Returns a per-token column as one numpy view per row. where: of these rows only."""
        values, offsets = self.ragged(name)
        flat, bounds = values.numpy(), offsets.numpy()
        every = range(len(self)) if where is None else where
        return [flat[bounds[i] : bounds[i + 1]] for i in every]

    def images(self) -> list[tuple[ImageRef, ...]]:
        """Returns the images of each row: none, where there is no such column."""
        if IMAGES not in self._arrays:
            return [()] * len(self)
        return [images_of_text(text) for text in self.scalars(IMAGES)]

    def lengths(self, name: str, where: np.ndarray | None = None) -> np.ndarray:
        """Returns the number of entries in each row of a per-token column: int32 [B]. where: of these rows
        only.
        """
        bounds = self.ragged(name)[1].numpy()
        return np.diff(bounds) if where is None else bounds[where + 1] - bounds[where]

    def padded(self, name: str, fill: float = 0, width: int | None = None) -> torch.Tensor:
        """Returns [B, T] (wide: [B, T, K]), T the longest row, or `width`, which no row is longer than. For
        pure functions only; no padding travels.
        """
        rows = self.rows(name)
        width = max((len(row) for row in rows), default=0) if width is None else width
        values = self.ragged(name)[0].numpy()
        out = np.full((len(rows), width, *values.shape[1:]), fill, values.dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return torch.from_numpy(out)

    def with_columns(self, new: Mapping[str, ColumnLike] | Batch, replace: bool = False) -> Batch:
        """Adds columns. A name that is there already is an error unless `replace`."""
        added = (new if isinstance(new, Batch) else Batch.of(new))._arrays
        for name, array in added.items():
            if name in self._arrays and not replace:
                raise DataError(f"column {name!r} is there already; pass replace=True to overwrite it")
            if self._arrays and len(array) != len(self):
                raise DataError(f"column {name!r} has {len(array)} rows, the batch has {len(self)}")
        return Batch(self._arrays | added)

    def aligned(self, name: str, like: str, where: np.ndarray | None = None) -> Batch:
        """Returns this batch, after checking that two per-token columns have the same row lengths. where: in
        these rows only.
        """
        if not np.array_equal(self.lengths(name, where), self.lengths(like, where)):
            raise DataError(f"column {name!r} is not aligned with {like!r}: their rows differ in length")
        return self

    def select(self, names: Iterable[str]) -> Batch:
        """Returns these columns alone, in this order. Raises DataError for one that is not there."""
        arrays = self._arrays  # without a call for each of them
        return Batch({name: arrays[name] if name in arrays else self.array(name) for name in names})

    def without(self, *names: str) -> Batch:
        """Returns all other columns; a name that is not there is left out already."""
        return Batch({name: array for name, array in self._arrays.items() if name not in names})

    def parted(self, index_columns: Sequence[str]) -> tuple[Batch, Batch]:
        """Returns row_id and `index_columns`, which the controller keeps, and all other columns."""
        index = self.select(dict.fromkeys([ROW_ID, *index_columns]))
        data = {name: array for name, array in self._arrays.items() if name not in index._arrays}
        return index, Batch(data)

    def take(self, rows: np.ndarray | Sequence[int]) -> Batch:
        """Returns rows by position, in the order given (repeats allowed)."""
        where = np.asarray(rows, np.int64)
        if np.array_equal(where, np.arange(len(self))):
            return self
        outside = where[(where < 0) | (where >= len(self))]
        if len(outside):
            raise DataError(f"row {int(outside[0])} asked for, the batch has {len(self)} rows")
        return Batch({name: taken(array, where) for name, array in self._arrays.items()})

    def cut(self, ends: Sequence[int]) -> list[Batch]:
        """Returns consecutive rows: up to the first of `ends`, from there to the second, and so on."""
        starts = [0, *ends[:-1]] if ends else []
        made: list[dict[str, pa.Array]] = [{} for _ in ends]
        for name, array in self._arrays.items():
            if is_plain(array):  # views: a slice of Arrow's would drag the whole column along when it travels
                values = to_numpy(array)
                parts = [numbers(values[start:end]) for start, end in zip(starts, ends, strict=True)]
            else:
                rows = zip(starts, ends, strict=True)
                parts = [taken(array, np.arange(start, end)) for start, end in rows]
            for one, part in zip(made, parts, strict=True):
                one[name] = part
        return [Batch(one) for one in made]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Returns the rows of all, in order. Columns (names and types) must agree; their order may differ."""
        if not batches:
            raise DataError("concat needs at least one batch (an empty one carries the columns)")
        first = batches[0]._arrays
        for batch in batches[1:]:
            if differ := sorted(batch._arrays.keys() ^ first.keys()):
                raise DataError(f"columns differ: {', '.join(differ)} are not in all of the batches")
        return Batch({name: joined(name, [batch._arrays[name] for batch in batches]) for name in first})

    def sums(self, names: Iterable[str]) -> dict[str, int]:
        """Returns a 64-bit sum of each of these columns, which is the same however the rows are ordered, and
        adds up (modulo 2^64) over parts of them; `row_id` says which row is which.
        """
        starts = starts_of(self.scalars(ROW_ID))
        return {name: sum_of_rows(self.array(name), starts) for name in names}

    def write_parquet(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        """Writes a file that `read_parquet` reads. Raises OSError where that is not possible."""
        pq.write_table(self.table, file)

    @classmethod
    def read_parquet(cls, file: str | os.PathLike[str] | IO[bytes]) -> Batch:
        """Reads a file, or a folder of them in the order of their names. Raises DataError naming it when it
        is missing or no Parquet.
        """
        try:
            table = pa.concat_tables([pq.ParquetFile(part).read() for part in parquet_parts(file)])
            columns = {
                field.name: column.cast(in_arrow_spelling(field.type))
                for field, column in zip(table.schema, table.columns, strict=True)
            }
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{file}: cannot be read as Parquet: {error}") from error
        if len(columns) < table.num_columns:
            raise DataError(f"{file}: column names repeat: {', '.join(table.column_names)}")
        return cls.of(columns)


@dataclass(frozen=True)
class Block:
    """Columns that one writer returned in one call."""

    handle: Any
    """A Batch, or an object reference of Ray to one."""
    columns: tuple[str, ...]
    """Those of the handle's that count: a column that was written again is no longer named here."""
    row_ids: np.ndarray
    """int64, the rows that have these columns, in their order."""


@dataclass(frozen=True)
class Part:
    """Some columns of a shard's rows, and where they lie."""

    columns: tuple[str, ...]
    """Their names; the same blocks hold all of them for the same rows."""
    blocks: np.ndarray
    """The numbers that `block` has, ascending: int32. Of a shard without rows one, which knows the types."""
    block: np.ndarray
    """For each row, its block."""
    row: np.ndarray
    """For each row, its place in that block."""

    def arrays(self, blocks: Sequence[Batch]) -> dict[str, pa.Array]:
        """Returns the columns, in the order of the shard's rows. blocks: all of the shard's."""
        order = np.argsort(self.block, kind="stable")
        ends = np.searchsorted(self.block[order], self.blocks, side="right")
        sources = np.split(self.row[order], ends[:-1])
        taken_rows = [
            blocks[number].select(self.columns).take(rows)
            for number, rows in zip(self.blocks, sources, strict=True)
        ]
        found = {name: joined(name, [rows._arrays[name] for rows in taken_rows]) for name in self.columns}
        if np.array_equal(order, np.arange(len(order))):
            return found
        back = np.argsort(order, kind="stable")
        return {name: taken(array, back) for name, array in found.items()}


@dataclass(frozen=True)
class Shard:
    """All that a worker needs to put its rows together."""

    index: Batch
    """The index columns that were asked for."""
    parts: tuple[Part, ...]
    """Where the other columns lie."""
    handles: tuple[Any, ...]
    """The blocks of `parts`, each once."""

    def assemble(self, blocks: Sequence[Batch]) -> Batch:
        """Returns the rows as one Batch. blocks: what the handles stand for."""
        found: dict[str, pa.Array] = {}
        for part in self.parts:
            found |= part.arrays(blocks)
        return self.index.with_columns(Batch(found))


@dataclass(frozen=True)
class _Places:
    """Where some columns of a batch lie."""

    block: np.ndarray
    """For each row, its block; -1: none has it."""
    row: np.ndarray
    """For each row, its place in that block."""
    first: int
    """A block that has the columns, whatever its rows."""

    @classmethod
    def of(cls, ids: np.ndarray, chosen: Sequence[int], blocks: Sequence[Block]) -> _Places:
        """Finds the rows `ids` in the `chosen` ones of the blocks: one search in all of their row ids."""
        held = [blocks[number].row_ids for number in chosen]
        lengths = [len(one) for one in held]
        there = np.concatenate(held)
        if not len(there):
            return cls(np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.int32), chosen[0])
        block = np.repeat(np.asarray(chosen, np.int32), lengths)
        row = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        order = np.argsort(there, kind="stable")
        at = np.searchsorted(there, ids, sorter=order)
        at = order[np.minimum(at, len(order) - 1)]
        return cls(np.where(there[at] == ids, block[at], np.int32(-1)), row[at], chosen[0])


async def _resolve_local(handles: Sequence[Any]) -> list[Batch]:
    for handle in handles:
        if not isinstance(handle, Batch):
            raise DataError(f"a block is held as {type(handle).__name__}: the backend's resolver is needed")
    return list(handles)


Resolver = Callable[[Sequence[Any]], Awaitable[list[Batch]]]


@dataclass(frozen=True)
class BatchRef:
    """What controller, buffer and loop hold of a batch whose columns lie elsewhere.

    Blocks with the same column name must not overlap in rows.
    """

    index: Batch
    """Numbers of each row; a unique `row_id` is one of them."""
    blocks: tuple[Block, ...] = ()
    """All other columns; one column may lie in several, each with other rows."""
    resolve: Resolver = field(default=_resolve_local, compare=False)
    """Turns handles into Batches; only `fetch` calls it."""

    def __post_init__(self) -> None:
        ids = self.index.scalars(ROW_ID)
        if len(np.unique(ids)) != len(ids):
            raise DataError("row_id repeats in a BatchRef's index; each row needs its own")

    @classmethod
    def of(cls, batch: Batch, index_columns: Sequence[str], resolve: Resolver = _resolve_local) -> BatchRef:
        """Makes a reference to a whole Batch with a `row_id` column: `index_columns` stay here, the rest
        becomes one block.
        """
        index, data = batch.parted(index_columns)
        block = Block(data, tuple(data.columns), index.scalars(ROW_ID))
        return cls(index, (block,) if data.columns else (), resolve)

    def __len__(self) -> int:
        return len(self.index)

    @functools.cached_property
    def _places(self) -> dict[str, _Places]:
        """Says where the rows of each column of the blocks lie."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for number, block in enumerate(self.blocks):
            alike.setdefault(block.columns, []).append(number)
        holders: dict[str, tuple[int, ...]] = {}
        for columns, of_blocks in alike.items():
            for name in columns:
                holders[name] = (*holders.get(name, ()), *of_blocks)
        ids = self.index.scalars(ROW_ID)
        found = {of_blocks: _Places.of(ids, of_blocks, self.blocks) for of_blocks in {*holders.values()}}
        return {name: found[of_blocks] for name, of_blocks in holders.items()}

    @property
    def columns(self) -> list[str]:
        """Returns the columns that all rows have, those of the index and those of blocks."""
        whole = [name for name, places in self._places.items() if not np.any(places.block < 0)]
        return [*self.index.columns, *whole]

    def take(self, rows: np.ndarray | Sequence[int]) -> BatchRef:
        """Returns rows by position, in the order given, each at most once; no token moves. Raises DataError
        for a row that is not there, or is asked for twice.
        """
        where = np.asarray(rows, np.int64)
        index, kept = self.index.take(where), self.blocks
        if len(where):
            used = [np.unique(places.block[where]) for places in _distinct(self._places.values())]
            of_rows = set(np.concatenate(used).tolist()) if used else set()
            kept = tuple(block for number, block in enumerate(self.blocks) if number in of_rows)
        return BatchRef(index, kept, self.resolve)

    @staticmethod
    def concat(refs: Sequence[BatchRef]) -> BatchRef:
        """Returns the rows of all, in order; no token moves. A column of tokens that some of them lack is
        missing for their rows. Raises DataError where index columns differ, for a row that is in two of them,
        and for none.
        """
        if not refs:
            raise DataError("concat needs at least one BatchRef")
        blocks: dict[tuple[int, tuple[str, ...]], Block] = {}  # a block that several parts share appears once
        for ref in refs:
            rows = ref.index.scalars(ROW_ID)
            for block in ref.blocks:
                key = (id(block.handle), block.columns)
                ids = block.row_ids
                if not np.array_equal(ids, rows):
                    # Its other rows may be in another block of the whole: there they lose their id.
                    ids = np.where(np.isin(ids, rows), ids, _NO_ROW)
                if key in blocks:
                    ids = np.where(ids == _NO_ROW, blocks[key].row_ids, ids)
                blocks[key] = replace(block, row_ids=ids)
        kept = tuple(blocks.values())
        return BatchRef(Batch.concat([ref.index for ref in refs]), kept, refs[0].resolve)

    def with_index(self, new: Mapping[str, ColumnLike], replace: bool = False) -> BatchRef:
        """Adds per-row columns to the index. A name that is there already is an error unless `replace`."""
        held = {name for block in self.blocks for name in block.columns} & set(new)
        blocks = self._blocks_without(held, replace) if held else self.blocks
        return BatchRef(self.index.with_columns(new, replace), blocks, self.resolve)

    def without(self, *names: str) -> BatchRef:
        """Returns the batch without these columns, be they in the index or in blocks."""
        blocks = self._blocks_without(set(names), replace=True)
        return BatchRef(self.index.without(*names), blocks, self.resolve)

    def with_blocks(self, new: Sequence[Block], replace: bool = False) -> BatchRef:
        """Adds columns that a worker wrote. A name that is there already is an error unless `replace`."""
        held = {name for block in new for name in block.columns} & set(self.columns)
        if not held:
            return BatchRef(self.index, (*self.blocks, *new), self.resolve)
        blocks = (*self._blocks_without(held, replace), *new)
        return BatchRef(self.index.without(*held), blocks, self.resolve)

    def _blocks_without(self, names: set[str], replace: bool) -> tuple[Block, ...]:
        """Returns the blocks less the columns that are about to be written again."""
        if not replace:
            there = ", ".join(sorted(names))
            raise DataError(f"columns {there} are there already; pass replace=True to overwrite them")
        stripped = (
            Block(b.handle, tuple(c for c in b.columns if c not in names), b.row_ids) for b in self.blocks
        )
        return tuple(block for block in stripped if block.columns)

    def shard(self, columns: Sequence[str]) -> Shard:
        """Returns the plan for reading `columns` of all rows; see `shards`."""
        return self.shards(columns, [np.arange(len(self))])[0]

    def shards(self, columns: Sequence[str], parts: Sequence[np.ndarray]) -> list[Shard]:
        """Returns for each part of the rows (positions) the plan for reading `columns`. Pure: nothing moves.

        Raises DataError naming a column that no block holds for all of the rows.
        """
        in_index = [ROW_ID, *(n for n in columns if n in self.index.columns and n != ROW_ID)]
        wanted = [n for n in dict.fromkeys(columns) if n not in in_index]
        rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
        alike: dict[int, list[str]] = {}
        for name in wanted:
            places = self._places.get(name)
            missing = len(rows) if places is None else int(np.count_nonzero(places.block[rows] < 0))
            if places is None or missing:
                have = ", ".join(self.columns)
                raise DataError(
                    f"column {name!r} is missing for {missing} of {len(rows)} rows; there are: {have}"
                )
            alike.setdefault(id(places), []).append(name)
        handles = {id(block.handle): block.handle for block in self.blocks}  # several blocks may share one
        numbers = {key: number for number, key in enumerate(handles)}
        of_block = np.array([numbers[id(block.handle)] for block in self.blocks], np.int32)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        every, lying = list(handles.values()), []
        for names in alike.values():
            places = self._places[names[0]]
            # Of a shard without rows one source is enough, which knows the types.
            used = _numbered(of_block[places.block[rows]], ends, of_block[places.first])
            lying.append((tuple(names), used, np.split(places.row[rows], ends[:-1])))
        shards = []
        for number, index in enumerate(self.index.select(in_index).take(rows).cut(ends)):
            own: dict[int, int] = {}  # of the handles, those that the shard has
            read = []
            for columns_alike, used, row in lying:
                distinct, of_rows = used[number]
                here = np.array([own.setdefault(one, len(own)) for one in distinct.tolist()], np.int32)
                read.append(Part(columns_alike, np.sort(here), here[of_rows], row[number]))
            shards.append(Shard(index, tuple(read), tuple(every[one] for one in own)))
        return shards

    async def fetch(self, columns: Sequence[str] | None = None) -> Batch:
        """Reads token data, which nothing else does: returns the rows, in the index's order, with `row_id`
        and `columns` (default all).
        """
        shard = self.shard(self.columns if columns is None else columns)
        return shard.assemble(await self.resolve(shard.handles))


def _numbered(values: np.ndarray, ends: Sequence[int], default: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns of each part of the values (which ends there) the distinct ones, ascending, and for each value
    its place among them: `np.unique` of every part, at once. An empty part has the default.
    """
    part = np.repeat(np.arange(len(ends)), np.diff([0, *ends]))
    order = np.lexsort((values, part))
    ascending, of = values[order], part[order]
    is_first = np.ones(len(values), bool)
    is_first[1:] = (ascending[1:] != ascending[:-1]) | (of[1:] != of[:-1])
    first = np.searchsorted(of[is_first], np.arange(len(ends) + 1))
    places = np.empty(len(values), np.int64)
    places[order] = np.cumsum(is_first) - 1 - first[of]
    distinct, empty = np.split(ascending[is_first], first[1:-1]), np.array([default])
    pairs = zip(distinct, np.split(places, ends[:-1]), strict=True)
    return [(own if len(own) else empty, places_of) for own, places_of in pairs]


def _distinct(places: Iterable[_Places]) -> list[_Places]:
    return list({id(one): one for one in places}.values())
