"""Arrow columns of numbers and strings, to and from numpy, by their buffers.

`pa.array` and `Array.to_numpy` would look for pandas objects first, and import pandas for that where it is
installed: half a CPU-second at the start of every process, for nothing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rondo.errors import DataError


def is_plain(array: pa.Array) -> bool:
    """Whether a column is numbers, one for each row, that numpy can use where they lie."""
    return (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)) and not array.null_count


def numbers(values: np.ndarray) -> pa.Array:
    """A column [N] on the memory of the values, or of a copy where those are not in one piece."""
    flat = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])


def to_numpy(array: pa.Array) -> np.ndarray:
    """A column as numpy [B], without a copy where it is plain; nulls become NaN, strings objects."""
    if is_plain(array):
        return np.from_dlpack(array)
    if pa.types.is_string(array.type):
        values = np.empty(len(array), object)
        values[:] = array.to_pylist()
        return values
    return np.asarray(array.to_numpy(zero_copy_only=False))


def texts(values: list[str]) -> pa.Array:
    """A column of strings. Raises DataError where they are too long together."""
    encoded = [value.encode() for value in values]
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=bounds[1:])
    if bounds[-1] > np.iinfo(np.int32).max:
        raise DataError(f"{bounds[-1]} bytes of text in one column: more than its offsets hold; split it")
    offsets, data = pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(b"".join(encoded))
    return pa.StringArray.from_buffers(len(values), offsets, data)
