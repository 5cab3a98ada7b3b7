"""Batch (the data) and BatchRef (what the controller holds).

A Batch is a `pyarrow.Table` with manners: one chunk per column, per-token columns as list columns with int32
offsets from 0, so that a column's buffers *are* the packed layout that variable-length attention wants. A
BatchRef is an index of per-row numbers plus references to blocks of token data; taking, splitting and joining
it moves no tokens.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rondo.arrow import (
    ColumnLike,
    as_array,
    compact,
    flat_values,
    is_ragged,
    plain_type,
    ragged_array,
    ragged_rows,
    take_rows,
    wide_array,
)
from rondo.columns import ROW_ID
from rondo.errors import DataError

_NO_ROW = np.iinfo(np.int64).min  # stands for a row of a block that belongs to nobody

__all__ = ["ROW_ID", "Batch", "BatchRef", "Block", "ColumnLike", "Piece", "Resolver", "Shard"]
__all__ += ["ragged_array", "ragged_rows", "wide_array"]


class Batch:
    """Rows of training data. Immutable: every method returns a new Batch that shares what it can."""

    __slots__ = ("table",)

    def __init__(self, table: pa.Table) -> None:
        names = table.column_names
        if len(set(names)) != len(names):
            raise DataError(f"column names repeat: {sorted(n for n in names if names.count(n) > 1)}")
        self.table = pa.table({name: compact(table.column(name)) for name in names})

    @classmethod
    def of(cls, columns: Mapping[str, ColumnLike]) -> Batch:
        """From arrays, one entry per row. Use `ragged_array`/`ragged_rows` for per-token columns."""
        arrays = {name: as_array(name, column) for name, column in columns.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns differ in length: {lengths}")
        return cls._of_packed(arrays)

    @classmethod
    def _of_packed(cls, arrays: Mapping[str, pa.Array]) -> Batch:
        """From arrays that are compact already: checking every column again costs more than most methods."""
        batch = cls.__new__(cls)
        batch.table = pa.table(dict(arrays))
        return batch

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self.columns)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and self.table.equals(other.table)

    __hash__ = None  # type: ignore[assignment]

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    @property
    def num_bytes(self) -> int:
        return int(self.table.nbytes)

    def array(self, name: str) -> pa.Array:
        """The column as one Arrow array. Raises DataError naming the columns there are."""
        if name not in self.table.column_names:
            raise DataError(f"no column {name!r}; the batch has {', '.join(self.columns) or 'no columns'}")
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else compact(column)

    def scalars(self, name: str) -> np.ndarray:
        """A per-row column as numpy [B] (nulls become NaN; strings become objects)."""
        array = self.array(name)
        if pa.types.is_list(array.type):
            raise DataError(f"column {name!r} is per token; use ragged({name!r}) or padded({name!r})")
        return np.asarray(array.to_numpy(zero_copy_only=False))

    def _ragged(self, name: str) -> pa.ListArray:
        array = self.array(name)
        if not is_ragged(array.type) or array.null_count:
            raise DataError(f"column {name!r} has type {array.type}; per-token columns are lists of numbers")
        return array

    def ragged(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(values [N], cu_seqlens int32 [B+1]) without a copy. The tensors alias the table: do not write.

        The values of a wide column are [N, K].
        """
        array = self._ragged(name)
        if len(array) == 0:
            return flat_values(array), torch.zeros(1, dtype=torch.int32)
        return flat_values(array), torch.from_dlpack(array.offsets)

    def rows(self, name: str) -> list[np.ndarray]:
        """A per-token column as one numpy view per row."""
        values, offsets = self.ragged(name)
        flat, bounds = values.numpy(), offsets.numpy()
        return [flat[bounds[i] : bounds[i + 1]] for i in range(len(self))]

    def lengths(self, name: str) -> np.ndarray:
        """Number of entries in each row of a per-token column: int32 [B]."""
        if len(self) == 0:
            return np.empty(0, np.int32)
        return np.diff(self._ragged(name).offsets.to_numpy())

    def padded(self, name: str, fill: float = 0) -> torch.Tensor:
        """[B, T] (wide: [B, T, K]), T the longest row. For pure functions on the controller only; no padding
        travels."""
        rows = self.rows(name)
        width = max((len(row) for row in rows), default=0)
        values = self.ragged(name)[0].numpy()
        out = np.full((len(rows), width, *values.shape[1:]), fill, values.dtype)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return torch.from_numpy(out)

    def with_columns(self, new: Mapping[str, ColumnLike] | Batch, replace: bool = False) -> Batch:
        """Add columns. A name that is there already is an error unless `replace`."""
        items = {n: new.array(n) for n in new.columns} if isinstance(new, Batch) else new
        columns = {name: self.array(name) for name in self.columns}
        for name, column in items.items():
            if name in columns and not replace:
                raise DataError(f"column {name!r} is there already; pass replace=True to overwrite it")
            array = as_array(name, column)
            if self.columns and len(array) != len(self):
                raise DataError(f"column {name!r} has {len(array)} rows, the batch has {len(self)}")
            columns[name] = array
        return Batch._of_packed(columns)

    def aligned(self, name: str, like: str) -> Batch:
        """This batch, after checking that two per-token columns have the same row lengths."""
        if not np.array_equal(self.lengths(name), self.lengths(like)):
            raise DataError(f"column {name!r} is not aligned with {like!r}: their rows differ in length")
        return self

    def select(self, names: Iterable[str]) -> Batch:
        return Batch._of_packed({name: self.array(name) for name in names})

    def without(self, *names: str) -> Batch:
        return self.select([n for n in self.columns if n not in names])

    def take(self, rows: np.ndarray | Sequence[int]) -> Batch:
        """Rows by position, in the order given (repeats allowed)."""
        where = np.asarray(rows, np.int64)
        outside = where[(where < 0) | (where >= len(self))]
        if len(outside):
            raise DataError(f"row {int(outside[0])} asked for, the batch has {len(self)} rows")
        return Batch._of_packed({name: take_rows(self.array(name), where) for name in self.columns})

    def split(self, parts: Sequence[np.ndarray]) -> list[Batch]:
        return [self.take(part) for part in parts]

    def repeat(self, n: int) -> Batch:
        """Each row n times, copies next to each other."""
        return self.take(np.repeat(np.arange(len(self)), n))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all, in order. Columns (names and types) must agree; their order may differ."""
        if not batches:
            raise DataError("concat needs at least one batch (an empty one carries the columns)")
        first = batches[0]
        for batch in batches[1:]:
            differ = sorted(set(batch.columns) ^ set(first.columns))
            if differ:
                raise DataError(f"columns differ: {', '.join(differ)} are not in all of the batches")
            for name in first.columns:
                here, there = first.array(name).type, batch.array(name).type
                if here != there:
                    raise DataError(f"column {name!r} is {here} in one batch, {there} in another")
        tables = [batch.table.select(first.columns) for batch in batches]
        return Batch(pa.concat_tables(tables))

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        pq.write_table(self.table, path)

    @classmethod
    def read_parquet(cls, path: str | os.PathLike[str]) -> Batch:
        """Raises DataError naming the file when it is missing or no Parquet."""
        try:
            table = pq.ParquetFile(path).read()
            kinds = [plain_type(kind) for kind in table.schema.types]
            return cls(table.cast(pa.schema(list(zip(table.schema.names, kinds, strict=True)))))
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{os.fspath(path)}: cannot be read as Parquet: {error}") from error


@dataclass(frozen=True)
class Block:
    """Columns that one writer returned in one call. handle: a Batch (local) or an object reference (ray)."""

    handle: Any
    columns: tuple[str, ...]
    row_ids: np.ndarray

    def only(self, ids: np.ndarray) -> Block:
        """This block for these rows; the others lose their id, another block may have them."""
        mine = np.isin(self.row_ids, ids)
        return self if mine.all() else replace(self, row_ids=np.where(mine, self.row_ids, _NO_ROW))

    def union(self, other: Block) -> Block:
        """Two views of one block, for the rows of either."""
        return replace(self, row_ids=np.where(self.row_ids == _NO_ROW, other.row_ids, self.row_ids))


@dataclass(frozen=True)
class Piece:
    """Some columns of some rows of one block: `source` are positions in the block, `target` in the shard."""

    handle: Any
    columns: tuple[str, ...]
    source: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class Shard:
    """All that a worker needs to put its rows together: the index columns asked for, and pieces of blocks."""

    index: Batch
    pieces: tuple[Piece, ...]

    def assemble(self, blocks: Sequence[Batch]) -> Batch:
        """The rows as one Batch. blocks: what `pieces[i].handle` stands for."""
        gathered: dict[str, list[tuple[np.ndarray, pa.Array]]] = {}
        for piece, block in zip(self.pieces, blocks, strict=True):
            for name in piece.columns:
                gathered.setdefault(name, []).append(
                    (piece.target, take_rows(block.array(name), piece.source))
                )
        out: dict[str, pa.Array] = {}
        for name, parts in gathered.items():
            target = np.concatenate([where for where, _ in parts])
            kinds = {array.type for _, array in parts}
            if len(kinds) > 1:
                raise DataError(f"column {name!r} has several types in its blocks: {sorted(map(str, kinds))}")
            whole = compact(pa.chunked_array([array for _, array in parts]))
            in_order = np.array_equal(target, np.arange(len(self.index)))
            out[name] = whole if in_order else take_rows(whole, np.argsort(target, kind="stable"))
        return self.index.with_columns(out) if out else self.index


async def _resolve_local(handles: Sequence[Any]) -> list[Batch]:
    for handle in handles:
        if not isinstance(handle, Batch):
            raise DataError(f"a block is held as {type(handle).__name__}: the backend's resolver is needed")
    return list(handles)


Resolver = Callable[[Sequence[Any]], Awaitable[list[Batch]]]


@dataclass(frozen=True)
class BatchRef:
    """What controller, buffer and loop hold: `index` (per-row numbers, with a unique `row_id`) and `blocks`
    elsewhere.

    Blocks with the same column name must not overlap in rows. `resolve` turns handles into Batches (`fetch`
    only).
    """

    index: Batch
    blocks: tuple[Block, ...] = ()
    resolve: Resolver = field(default=_resolve_local, compare=False)

    def __post_init__(self) -> None:
        ids = self.index.scalars(ROW_ID)
        if len(np.unique(ids)) != len(ids):
            raise DataError("row_id repeats in a BatchRef's index; each row needs its own")

    @classmethod
    def of(
        cls,
        batch: Batch,
        index_columns: Sequence[str],
        resolve: Resolver = _resolve_local,
        handle: Any = None,
    ) -> BatchRef:
        """From a whole Batch with a `row_id` column: `index_columns` stay here, the rest is one block."""
        index = batch.select([ROW_ID, *(n for n in index_columns if n != ROW_ID)])
        data = batch.without(*index.columns)
        block = Block(data if handle is None else handle, tuple(data.columns), batch.scalars(ROW_ID))
        return cls(index, (block,) if data.columns else (), resolve)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def row_ids(self) -> np.ndarray:
        return self.index.scalars(ROW_ID)

    @property
    def columns(self) -> list[str]:
        """Every column that each row has, wherever it lies."""
        names = list(self.index.columns)
        ids = self.row_ids
        for name in dict.fromkeys(n for block in self.blocks for n in block.columns):
            held = [block.row_ids for block in self.blocks if name in block.columns]
            if len(ids) == 0 or np.isin(ids, np.concatenate(held)).all():
                names.append(name)
        return names

    def take(self, rows: np.ndarray | Sequence[int]) -> BatchRef:
        index = self.index.take(rows)
        ids = index.scalars(ROW_ID)
        kept = tuple(block for block in self.blocks if len(ids) == 0 or np.isin(block.row_ids, ids).any())
        return BatchRef(index, kept, self.resolve)

    def split(self, parts: Sequence[np.ndarray]) -> list[BatchRef]:
        return [self.take(part) for part in parts]

    @staticmethod
    def concat(refs: Sequence[BatchRef]) -> BatchRef:
        if not refs:
            raise DataError("concat needs at least one BatchRef")
        blocks: dict[tuple[int, tuple[str, ...]], Block] = {}  # a block that several parts share appears once
        for ref in refs:
            for block in ref.blocks:
                key = (id(block.handle), block.columns)
                mine = block.only(ref.row_ids)
                blocks[key] = mine.union(blocks[key]) if key in blocks else mine
        kept = tuple(blocks.values())
        return BatchRef(Batch.concat([ref.index for ref in refs]), kept, refs[0].resolve)

    def with_index(self, new: Mapping[str, ColumnLike], replace: bool = False) -> BatchRef:
        """Add per-row columns to the index. A name that is there already is an error unless `replace`."""
        held = {name for block in self.blocks for name in block.columns} & set(new)
        self._refuse(held, replace)
        return BatchRef(self.index.with_columns(new, replace), self._blocks_without(held), self.resolve)

    def _refuse(self, conflicts: set[str], replace: bool) -> None:
        if conflicts and not replace:
            names = ", ".join(sorted(conflicts))
            raise DataError(f"columns {names} are there already; pass replace=True to overwrite them")

    def _blocks_without(self, names: set[str]) -> tuple[Block, ...]:
        if not names:
            return self.blocks
        stripped = (
            Block(b.handle, tuple(c for c in b.columns if c not in names), b.row_ids) for b in self.blocks
        )
        return tuple(block for block in stripped if block.columns)

    def with_blocks(self, new: Sequence[Block], replace: bool = False) -> BatchRef:
        """Add columns that a worker wrote. A name that is there already is an error unless `replace`."""
        names = {name for block in new for name in block.columns}
        conflicts = names & set(self.columns)
        self._refuse(conflicts, replace)
        index = self.index.without(*names) if conflicts else self.index
        return BatchRef(index, (*self._blocks_without(conflicts), *new), self.resolve)

    def shard(self, columns: Sequence[str], rows: np.ndarray | None = None) -> Shard:
        """The plan for reading `columns` of `rows` (positions; default all). Pure: nothing moves.

        Raises DataError naming a column that no block holds for all of the rows.
        """
        where = np.arange(len(self)) if rows is None else np.asarray(rows, np.int64)
        in_index = [ROW_ID, *(n for n in columns if n in self.index.columns and n != ROW_ID)]
        index = self.index.select(in_index).take(where)
        ids = index.scalars(ROW_ID)
        wanted = [n for n in dict.fromkeys(columns) if n not in in_index]
        pieces: list[Piece] = []
        found = {name: 0 for name in wanted}
        for block in self.blocks:
            names = tuple(n for n in wanted if n in block.columns)
            if not names:
                continue
            order = np.argsort(block.row_ids, kind="stable")
            at = np.searchsorted(block.row_ids, ids, sorter=order)
            at = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(ids), np.int64)
            hit = np.flatnonzero(block.row_ids[at] == ids) if len(order) else np.empty(0, np.int64)
            if len(hit) == 0 and len(ids):
                continue
            pieces.append(Piece(block.handle, names, at[hit], hit))
            for name in names:
                found[name] += len(hit)
        for name, count in found.items():
            held = any(name in block.columns for block in self.blocks)
            if count != len(ids) or not held:
                have = ", ".join(self.columns)
                raise DataError(
                    f"column {name!r} is missing for {len(ids) - count} of {len(ids)} rows; there are: {have}"
                )
        if not len(ids):
            pieces = _one_per_column(pieces)
        return Shard(index, tuple(pieces))

    async def fetch(self, columns: Sequence[str] | None = None) -> Batch:
        """The only way to the token data: the rows, in the index's order, with `row_id` and `columns`
        (default all)."""
        shard = self.shard(self.columns if columns is None else columns)
        return shard.assemble(await self.resolve([piece.handle for piece in shard.pieces]))


def _one_per_column(pieces: Sequence[Piece]) -> list[Piece]:
    """For an empty shard: one source per column is enough to know its type."""
    out: list[Piece] = []
    seen: set[str] = set()
    for piece in pieces:
        names = tuple(n for n in piece.columns if n not in seen)
        seen.update(names)
        if names:
            out.append(Piece(piece.handle, names, piece.source, piece.target))
    return out
