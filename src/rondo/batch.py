"""Batch (the data) and BatchRef (what the controller holds).

A Batch is one Arrow array per column: numbers or text per row, lists per token, lists of fixed-size lists
where each token has K numbers (wide). Lists have int32 offsets from 0, so that a column's buffers *are* the
packed layout that variable-length attention wants. A BatchRef is an index of per-row numbers plus references
to blocks of token data; taking and joining it moves no tokens.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rondo.arrays import (
    ColumnLike,
    joined,
    packed,
    ragged_array,
    ragged_rows,
    taken,
    to_numpy,
    values_and_offsets,
    wide_array,
)
from rondo.columns import ROW_ID
from rondo.errors import DataError

__all__ = ["ROW_ID", "Batch", "BatchRef", "Block", "ColumnLike", "Piece", "Resolver", "Shard"]
__all__ += ["ragged_array", "ragged_rows", "wide_array"]

_NO_ROW = np.iinfo(np.int64).min  # stands for a row of a block that belongs to nobody


class Batch:
    """Rows of training data. Immutable: every method returns a new Batch that shares what it can."""

    __slots__ = ("_arrays",)

    def __init__(self, arrays: dict[str, pa.Array]) -> None:
        """Takes packed arrays of one length as they are; all others go through `of`."""
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
        return list(self._arrays)

    @property
    def num_bytes(self) -> int:
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

    def rows(self, name: str) -> list[np.ndarray]:
        """Returns a per-token column as one numpy view per row."""
        values, offsets = self.ragged(name)
        flat, bounds = values.numpy(), offsets.numpy()
        return [flat[bounds[i] : bounds[i + 1]] for i in range(len(self))]

    def lengths(self, name: str) -> np.ndarray:
        """Returns the number of entries in each row of a per-token column: int32 [B]."""
        return np.diff(self.ragged(name)[1].numpy())

    def padded(self, name: str, fill: float = 0) -> torch.Tensor:
        """Returns [B, T] (wide: [B, T, K]), T the longest row. For pure functions on the controller only; no
        padding travels.
        """
        rows = self.rows(name)
        width = max((len(row) for row in rows), default=0)
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

    def aligned(self, name: str, like: str) -> Batch:
        """Returns this batch, after checking that two per-token columns have the same row lengths."""
        if not np.array_equal(self.lengths(name), self.lengths(like)):
            raise DataError(f"column {name!r} is not aligned with {like!r}: their rows differ in length")
        return self

    def select(self, names: Iterable[str]) -> Batch:
        return Batch({name: self.array(name) for name in names})

    def without(self, *names: str) -> Batch:
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

    def write_parquet(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        pq.write_table(self.table, file)

    @classmethod
    def read_parquet(cls, file: str | os.PathLike[str] | IO[bytes]) -> Batch:
        """Raises DataError naming the file when it is missing or no Parquet."""
        try:
            table = pq.ParquetFile(file).read()
            columns = {
                field.name: column.cast(_in_arrow_spelling(field.type))
                for field, column in zip(table.schema, table.columns, strict=True)
            }
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{file}: cannot be read as Parquet: {error}") from error
        if len(columns) < table.num_columns:
            raise DataError(f"{file}: column names repeat: {', '.join(table.column_names)}")
        return cls.of(columns)


@dataclass(frozen=True)
class Block:
    """Columns that one writer returned in one call. handle: a Batch (local) or an object reference (ray)."""

    handle: Any
    columns: tuple[str, ...]
    row_ids: np.ndarray


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
        """Returns the rows as one Batch. blocks: what `pieces[i].handle` stands for."""
        found: dict[str, list[tuple[np.ndarray, pa.Array]]] = {}
        for piece, block in zip(self.pieces, blocks, strict=True):
            rows = block.select(piece.columns).take(piece.source)
            for name in piece.columns:
                found.setdefault(name, []).append((piece.target, rows.array(name)))
        out = {}
        for name, parts in found.items():
            target = np.concatenate([where for where, _ in parts])
            whole = joined(name, [array for _, array in parts])
            in_order = np.array_equal(target, np.arange(len(self.index)))
            out[name] = whole if in_order else taken(whole, np.argsort(target, kind="stable"))
        return self.index.with_columns(Batch(out))


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
    def of(cls, batch: Batch, index_columns: Sequence[str], resolve: Resolver = _resolve_local) -> BatchRef:
        """From a whole Batch with a `row_id` column: `index_columns` stay here, the rest is one block."""
        index, data = batch.parted(index_columns)
        block = Block(data, tuple(data.columns), index.scalars(ROW_ID))
        return cls(index, (block,) if data.columns else (), resolve)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def columns(self) -> list[str]:
        """Returns every column that each row has, wherever it lies."""
        names = list(self.index.columns)
        ids = set(self.index.scalars(ROW_ID).tolist())
        missing: dict[str, set[int]] = {}  # rows of which no block so far has the column
        for block in self.blocks:
            held = set(block.row_ids.tolist())
            for name in block.columns:
                missing[name] = missing.get(name, ids) - held
        return names + [name for name, rows in missing.items() if not rows]

    def take(self, rows: np.ndarray | Sequence[int]) -> BatchRef:
        index = self.index.take(rows)
        ids = set(index.scalars(ROW_ID).tolist())
        kept = tuple(b for b in self.blocks if not ids or not ids.isdisjoint(b.row_ids.tolist()))
        return BatchRef(index, kept, self.resolve)

    @staticmethod
    def concat(refs: Sequence[BatchRef]) -> BatchRef:
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

    def shard(self, columns: Sequence[str], rows: np.ndarray | None = None) -> Shard:
        """Returns the plan for reading `columns` of `rows` (positions; default all). Pure: nothing moves.

        Raises DataError naming a column that no block holds for all of the rows.
        """
        in_index = [ROW_ID, *(n for n in columns if n in self.index.columns and n != ROW_ID)]
        index = self.index.select(in_index)
        if rows is not None:
            index = index.take(rows)
        ids = index.scalars(ROW_ID)
        wanted = [n for n in dict.fromkeys(columns) if n not in in_index]
        pieces: list[Piece] = []
        found: dict[str, int] = {}
        for block in self.blocks:
            # For an empty shard, one source per column is enough to know its type.
            names = tuple(n for n in wanted if n in block.columns and (len(ids) or n not in found))
            if not names:
                continue
            order = np.argsort(block.row_ids, kind="stable")
            at = np.searchsorted(block.row_ids, ids, sorter=order)
            at = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(ids), np.int64)
            hit = np.flatnonzero(block.row_ids[at] == ids) if len(order) else np.empty(0, np.int64)
            if len(hit) == 0 and len(ids):
                continue
            pieces.append(Piece(block.handle, names, at[hit], hit))
            found |= {name: found.get(name, 0) + len(hit) for name in names}
        for name in wanted:
            if found.get(name) != len(ids):
                missing, have = len(ids) - found.get(name, 0), ", ".join(self.columns)
                raise DataError(
                    f"column {name!r} is missing for {missing} of {len(ids)} rows; there are: {have}"
                )
        return Shard(index, tuple(pieces))

    async def fetch(self, columns: Sequence[str] | None = None) -> Batch:
        """Is the only way to the token data: returns the rows, in the index's order, with `row_id` and
        `columns` (default all).
        """
        shard = self.shard(self.columns if columns is None else columns)
        return shard.assemble(await self.resolve([piece.handle for piece in shard.pieces]))


def _in_arrow_spelling(kind: pa.DataType) -> pa.DataType:
    """Returns the type as Arrow names it: Parquet names a list's values `element`, Arrow `item`, and takes
    that for another type.
    """
    if pa.types.is_list(kind):
        return pa.list_(_in_arrow_spelling(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_in_arrow_spelling(kind.value_type), kind.list_size)
    return kind
