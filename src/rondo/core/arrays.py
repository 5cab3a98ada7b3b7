"""The columns of a batch: Arrow arrays of numbers, strings and lists, to and from numpy, by their buffers.

`pa.array` and `Array.to_numpy` would look for pandas objects first, and import pandas for that where it is
installed: half a CPU-second at the start of every process, for nothing.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from rondo.core.errors import DataError

ColumnLike: TypeAlias = "pa.Array | pa.ChunkedArray | np.ndarray | torch.Tensor | Sequence[Any]"

_MOST = np.iinfo(np.int32).max  # what the offsets of a column of lists or texts hold
_arrow_type = functools.cache(pa.from_numpy_dtype)


def parquet_parts(file: Any) -> list[Any]:
    """Returns the Parquet files whose rows follow each other: the file, or those of a folder in the order of
    their names (several ranks may have written it). Raises DataError for an empty folder.
    """
    if not isinstance(file, str | os.PathLike) or not os.path.isdir(file):
        return [file]
    parts: list[Any] = [os.path.join(file, name) for name in sorted(os.listdir(file))]
    if not parts:
        raise DataError(f"{file}: is an empty folder; remove it, or copy it again")
    return parts


def is_plain(array: pa.Array) -> bool:
    """Says whether numpy can use a column where it lies: numbers, one for each row."""
    return (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)) and not array.null_count


def numbers(values: np.ndarray) -> pa.Array:
    """Makes a column [N] that shares the values' memory, or a copy's where they are not in one piece."""
    flat = np.ascontiguousarray(values)
    return pa.Array.from_buffers(_arrow_type(flat.dtype), len(flat), [None, pa.py_buffer(flat)])


def to_numpy(array: pa.Array) -> np.ndarray:
    """Returns a column as numpy [B], without a copy where it is plain; nulls become NaN, strings objects."""
    if is_plain(array):
        return np.from_dlpack(array)
    if pa.types.is_string(array.type):
        values = np.empty(len(array), object)
        values[:] = array.to_pylist()
        return values
    return np.asarray(array.to_numpy(zero_copy_only=False))


def texts(values: list[str]) -> pa.Array:
    """Makes a column of strings. Raises DataError where they are too long together."""
    encoded = [value.encode() for value in values]
    bounds = bounds_of([len(text) for text in encoded])
    if bounds[-1] > _MOST:
        raise DataError(f"{bounds[-1]} bytes of text in one column: more than its offsets hold; split it")
    offsets, data = pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(values), offsets, data)


def ragged_array(values: np.ndarray | torch.Tensor, offsets: np.ndarray | torch.Tensor) -> pa.ListArray:
    """Makes a list column from flat `values` [N] and `offsets` [B+1] (from 0 to N, never falling), without a
    copy.

    values [N, K] give a wide column: K numbers per token. Raises DataError when the offsets do not describe
    the values.
    """
    flat = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    bounds = offsets.cpu().numpy() if isinstance(offsets, torch.Tensor) else np.asarray(offsets)
    if flat.dtype == np.bool_:
        flat = flat.astype(np.uint8)  # Arrow's booleans are bits; a mask is bytes
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(flat) or (bounds[1:] < bounds[:-1]).any():
        raise DataError(f"offsets must rise from 0 to {len(flat)}; got {bounds[:3]}…{bounds[-3:]}")
    items = numbers(flat.reshape(-1))
    if flat.ndim == 2:
        items = pa.FixedSizeListArray.from_arrays(items, flat.shape[1])
    return pa.ListArray.from_arrays(numbers(bounds.astype(np.int32, copy=False)), items)


def wide_array(values: np.ndarray | torch.Tensor, offsets: np.ndarray | torch.Tensor) -> pa.ListArray:
    """Makes the `ragged_array` of `values` [N, K], K >= 1. Raises DataError for another shape."""
    if values.ndim != 2 or values.shape[1] < 1:
        raise DataError(f"a wide column needs values [N, K] with K >= 1; got shape {tuple(values.shape)}")
    return ragged_array(values, offsets)


def aligned_arrays(values: Mapping[str, np.ndarray], offsets: np.ndarray) -> dict[str, pa.ListArray]:
    """Makes list columns of numbers [N] whose rows have the same lengths: int32 `offsets` [B+1], never
    falling, from 0 to N. Raises DataError for columns of another N.
    """
    if {*map(len, values.values())} != {int(offsets[-1])}:
        lengths = {name: len(flat) for name, flat in values.items()}
        raise DataError(
            f"offsets must rise from 0 to the columns' lengths {lengths}, and end with {offsets[-1]}"
        )
    bounds = numbers(offsets)
    return {name: pa.ListArray.from_arrays(bounds, numbers(flat)) for name, flat in values.items()}


def ragged_rows(rows: Sequence[np.ndarray], dtype: Any) -> pa.ListArray:
    """Makes a list column from one array per row."""
    return ragged_array(flattened(rows, dtype), bounds_of([len(row) for row in rows]).astype(np.int32))


def flattened(rows: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Returns the values of all rows, one after the other."""
    return np.concatenate(rows, dtype=dtype, casting="unsafe") if rows else np.empty(0, dtype)


def bounds_of(lengths: Sequence[int]) -> np.ndarray:
    """Returns where each row begins, from 0, and where the last one ends: int64 [B+1]. For a group's few
    numbers several times faster than numpy's `cumsum`.
    """
    return np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1)


def values_and_offsets(array: pa.Array) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns values [N] or [N, K] and offsets [B+1] of a packed per-token column, without a copy; None for
    one of another kind.
    """
    if not pa.types.is_list(array.type) or array.null_count:
        return None
    items, width = array.values, tuple[int, ...]()
    if pa.types.is_fixed_size_list(items.type):
        items, width = items.flatten(), (items.type.list_size,)
    if not pa.types.is_primitive(items.type):
        return None
    if len(items):
        values = torch.from_dlpack(items).view(-1, *width)
    else:
        values = torch.from_numpy(np.empty((0, *width), items.type.to_pandas_dtype()))
    return values, torch.from_dlpack(array.offsets) if len(array) else torch.zeros(1, dtype=torch.int32)


def packed(name: str, column: ColumnLike) -> pa.Array:
    """Makes anything column-like as one array: masks as bytes, list offsets from 0, and no bytes of a parent
    (which a slice drags along when it travels). Copies only what is a part of something larger.
    """
    if not isinstance(column, list | np.ndarray) and isinstance(column, torch.Tensor):
        column = column.detach().cpu().numpy()  # the second look, which is slow, only where it is needed
    if isinstance(column, np.ndarray):
        if column.ndim != 1:
            raise DataError(
                f"column {name!r} has {column.ndim} dimensions; one value per row, or ragged_array(...)"
            )
        if column.dtype == np.bool_:
            column = column.astype(np.uint8)
        if column.dtype.kind in "iuf":
            return numbers(column)
        if column.dtype != object:
            return pa.array(column)
    if isinstance(column, list) and column and all(issubclass(kind, str) for kind in {*map(type, column)}):
        return texts(column)
    array = column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column)
    if isinstance(array, pa.ChunkedArray):
        array = joined(name, array.chunks or [pa.array([], array.type)])
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    elif pa.types.is_list(array.type) and pa.types.is_boolean(array.type.value_type):
        array = array.cast(pa.list_(pa.uint8()))
    if len(array) == 0:
        return pa.array([], array.type)
    is_part = array.offset != 0 or array.get_total_buffer_size() > 1.125 * array.nbytes + 256
    if not is_part and pa.types.is_list(array.type):
        offsets = np.from_dlpack(array.offsets)
        is_part = bool(offsets[0] != 0 or offsets[-1] != len(array.values))
    return pa.concat_arrays([array]) if is_part else array


def joined(name: str, parts: Sequence[pa.Array]) -> pa.Array:
    """Returns the rows of all parts, in order. Raises DataError where the parts do not fit together."""
    if len(parts) == 1:
        return parts[0]
    try:
        return pa.concat_arrays(parts)
    except pa.ArrowInvalid as error:
        kinds = sorted({str(part.type) for part in parts})
        if len(kinds) > 1:
            raise DataError(f"column {name!r} has several types: {', '.join(kinds)}") from error
        raise DataError(
            f"parts of column {name!r} do not fit into one: {error}; use smaller batches"
        ) from error


def taken(array: pa.Array, rows: np.ndarray) -> pa.Array:
    """Returns rows of a column. List rows are copied row by row: several times faster than Arrow's own
    gather.
    """
    flat = values_and_offsets(array)
    if flat is None and pa.types.is_string(array.type) and not array.null_count:
        strings = array.to_pylist()  # Arrow's `take` would import pyarrow.compute, for this alone
        return texts([strings[row] for row in rows])
    if flat is None and is_plain(array):
        return numbers(np.from_dlpack(array)[rows])
    if flat is None:
        return array.take(numbers(rows))
    values, offsets = flat[0].numpy(), flat[1].numpy()
    new_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum((offsets[1:] - offsets[:-1])[rows], out=new_offsets[1:])
    if new_offsets[-1] > _MOST:
        raise DataError(f"{new_offsets[-1]} tokens in one batch: more than int32 offsets hold; split it")
    out = np.empty((int(new_offsets[-1]), *values.shape[1:]), values.dtype)
    starts, stops, places = offsets[:-1][rows].tolist(), offsets[1:][rows].tolist(), new_offsets.tolist()
    for i, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        out[places[i] : places[i + 1]] = values[start:stop]
    return ragged_array(out, new_offsets)


def in_arrow_spelling(kind: pa.DataType) -> pa.DataType:
    """Returns a type with Arrow's name for a list's values, `item`: Parquet calls them `element`, which Arrow
    takes for another type.
    """
    if pa.types.is_list(kind):
        return pa.list_(in_arrow_spelling(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(in_arrow_spelling(kind.value_type), kind.list_size)
    return kind


GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64."""
_SLAB = 1 << 20  # words that a sum looks at together: what it makes of them is 8 bytes for each


def starts_of(row_ids: np.ndarray) -> np.ndarray:
    """Returns for each row the place of its first word in `sum_of_rows`, uint64 [B]: far from that of any
    other row id (splitmix64).
    """
    return mixed(row_ids.astype(np.uint64) + np.uint64(GOLDEN))


def mixed(states: np.ndarray) -> np.ndarray:
    """Returns what splitmix64 makes of its states, uint64 [N]: numbers that look random, as many different
    ones.
    """
    z = (states ^ (states >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _weighted(words: np.ndarray, places: np.ndarray) -> np.uint64:
    one = np.uint64(1)
    weighted = (words.astype(np.uint64) + one) * (places + places + one)  # they wrap around, as the sum does
    return np.uint64(weighted.sum(dtype=np.uint64))


def sum_of_rows(array: pa.Array, starts: np.ndarray) -> int:
    """Returns Σ (word + 1) · (2 · place + 1) modulo 2^64 over the numbers of a column (raw bits, a word each)
    or the bytes of its texts. The place of a row's first word is in `starts`, uint64 [B], so that rows may
    come in any order, and the sums of parts add up. One word that is another always changes it.
    """
    if not len(array):
        return 0
    if is_plain(array):  # a word for each row
        values = to_numpy(array)
        return int(_weighted(values.view(f"u{values.itemsize}"), starts))
    flat = values_and_offsets(array)
    if flat is not None:
        values, bounds = flat[0].numpy(), flat[1].numpy().astype(np.int64)
        bounds = bounds * math.prod(values.shape[1:])
    elif pa.types.is_string(array.type):
        _, offsets, data = array.buffers()
        bounds = np.frombuffer(offsets, np.int32)[array.offset :][: len(array) + 1].astype(np.int64)
        values = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    else:
        values, bounds = to_numpy(array), np.arange(len(array) + 1)
    words = values.reshape(-1).view(f"u{values.itemsize}")
    total, row = 0, 0
    while row < len(array):
        end = max(row + 1, int(np.searchsorted(bounds, bounds[row] + _SLAB, "right")) - 1)
        first, last = int(bounds[row]), int(bounds[end])
        begins = starts[row:end] - bounds[row:end].astype(np.uint64)
        places = np.repeat(begins, np.diff(bounds[row : end + 1])) + np.arange(first, last, dtype=np.uint64)
        total += int(_weighted(words[first:last], places))
        row = end
    return total % (1 << 64)
