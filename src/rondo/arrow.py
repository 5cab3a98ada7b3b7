"""A Batch's columns as Arrow arrays: numbers or text per row, lists per token, lists of fixed-size lists
where each token has K numbers (wide)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from rondo.errors import DataError

ColumnLike: TypeAlias = "pa.Array | np.ndarray | torch.Tensor | Sequence[Any]"


def ragged_array(values: np.ndarray | torch.Tensor, offsets: np.ndarray | torch.Tensor) -> pa.ListArray:
    """A list column from flat `values` [N] and `offsets` [B+1] (from 0 to N, never falling), without a copy.

    values [N, K] give a wide column: K numbers per token. Raises DataError when the offsets do not describe
    the values.
    """
    flat = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    bounds = offsets.cpu().numpy() if isinstance(offsets, torch.Tensor) else np.asarray(offsets)
    if flat.dtype == np.bool_:
        flat = flat.astype(np.uint8)  # Arrow's booleans are bits; a mask is bytes
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(flat) or np.any(np.diff(bounds) < 0):
        raise DataError(f"offsets must rise from 0 to {len(flat)}; got {bounds[:3]}…{bounds[-3:]}")
    return _list_array(flat, bounds)


def wide_array(values: np.ndarray | torch.Tensor, offsets: np.ndarray | torch.Tensor) -> pa.ListArray:
    """`ragged_array` of `values` [N, K], K >= 1. Raises DataError for another shape."""
    if values.ndim != 2 or values.shape[1] < 1:
        raise DataError(f"a wide column needs values [N, K] with K >= 1; got shape {tuple(values.shape)}")
    return ragged_array(values, offsets)


def _list_array(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    """values [N] or [N, K]."""
    items = pa.array(np.ascontiguousarray(values).reshape(-1))
    if values.ndim == 2:
        items = pa.FixedSizeListArray.from_arrays(items, values.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32, copy=False)), items)


def ragged_rows(rows: Sequence[np.ndarray], dtype: Any) -> pa.ListArray:
    """A list column from one array per row."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate([np.asarray(row, dtype) for row in rows]) if rows else np.empty(0, dtype)
    return ragged_array(values, offsets)


def is_ragged(kind: pa.DataType) -> bool:
    """Whether this is the type of a per-token column, wide or not."""
    if not pa.types.is_list(kind):
        return False
    item = kind.value_type.value_type if pa.types.is_fixed_size_list(kind.value_type) else kind.value_type
    return bool(pa.types.is_primitive(item))


def flat_values(array: pa.ListArray) -> torch.Tensor:
    """The values of a compact per-token column, [N] or [N, K], without a copy."""
    items, width = array.values, tuple[int, ...]()
    if pa.types.is_fixed_size_list(items.type):
        items, width = items.flatten(), (items.type.list_size,)
    if len(items) == 0:
        return torch.from_numpy(np.empty((0, *width), items.type.to_pandas_dtype()))
    return torch.from_dlpack(items).view(-1, *width)


def compact(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One chunk, list offsets from 0, and no bytes of a parent (which a slice drags along when it travels).

    Copies only what is a part of something larger. Raises DataError when int32 offsets cannot hold it.
    """
    if isinstance(array, pa.ChunkedArray):
        if array.num_chunks > 1:
            try:
                return pa.concat_arrays(array.chunks)
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"parts of a column do not fit into one: {error}; use smaller batches"
                ) from error
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    if len(array) == 0:
        return pa.array([], array.type)
    is_part = array.offset != 0 or array.get_total_buffer_size() > 1.125 * array.nbytes + 256
    if not is_part and pa.types.is_list(array.type):
        offsets = array.offsets.to_numpy()
        is_part = bool(offsets[0] != 0 or offsets[-1] != len(array.values))
    return pa.concat_arrays([array]) if is_part else array


def as_array(name: str, column: ColumnLike) -> pa.Array:
    """Anything column-like as a compact array. Raises DataError naming one with more than one dimension."""
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu().numpy()
    if isinstance(column, np.ndarray):
        if column.ndim != 1:
            raise DataError(
                f"column {name!r} has {column.ndim} dimensions; one value per row, or ragged_array(...)"
            )
        if column.dtype == np.bool_:
            column = column.astype(np.uint8)
    array = compact(column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column))
    if pa.types.is_boolean(array.type):
        return array.cast(pa.uint8())
    if pa.types.is_list(array.type) and pa.types.is_boolean(array.type.value_type):
        return array.cast(pa.list_(pa.uint8()))
    return array


def take_rows(array: pa.Array, rows: np.ndarray) -> pa.Array:
    """Rows of a column. List rows are copied row by row: several times faster than Arrow's own gather."""
    if len(rows) == len(array) and np.array_equal(rows, np.arange(len(rows))):
        return array
    if not is_ragged(array.type) or array.null_count:
        return compact(array.take(pa.array(rows)))
    offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int32)
    values = flat_values(array).numpy()
    new_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum((offsets[1:] - offsets[:-1])[rows], out=new_offsets[1:])
    if new_offsets[-1] > np.iinfo(np.int32).max:
        raise DataError(f"{new_offsets[-1]} tokens in one batch: more than int32 offsets hold; split it")
    out = np.empty((int(new_offsets[-1]), *values.shape[1:]), values.dtype)
    starts, stops, places = offsets[:-1][rows].tolist(), offsets[1:][rows].tolist(), new_offsets.tolist()
    for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        out[places[i] : places[i + 1]] = values[start:stop]
    return _list_array(out, new_offsets)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Parquet names a list's values `element`, Arrow `item`, and takes that for another type."""
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    return kind
