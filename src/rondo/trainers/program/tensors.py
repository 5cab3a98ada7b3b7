"""Columns of a BatchRef as tensors for pure functions on the controller, and their results back into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from rondo.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.controller import Cluster
from rondo.errors import TrainError


async def padded_columns(batch: BatchRef, names: Iterable[str]) -> dict[str, Tensor]:
    """Per-token columns as float32 [B, T], 0 beyond a row's end. Raises DataError for a missing column."""
    wanted = sorted(set(names))
    if not wanted:
        return {}
    tokens = await batch.fetch(wanted)
    return {name: tokens.padded(name).to(torch.float32) for name in wanted}


def numbers(index: Batch, name: str) -> Tensor:
    """A per-row column as numbers [B]: float32 or int64; names (trajectory_id) become integer ids."""
    column = index.scalars(name)
    if column.dtype == object:
        return torch.from_numpy(np.unique(column.astype(str), return_inverse=True)[1].astype(np.int64))
    return torch.from_numpy(column.astype(np.float32 if column.dtype.kind == "f" else np.int64))


def attach(
    batch: BatchRef, named: Mapping[str, Tensor], cluster: Cluster, *, replace: bool = False
) -> BatchRef:
    """batch with further columns: [B] go to the index, [B, T] become one block of ragged columns.

    Floating columns are stored as float32, others in their own type. Raises TrainError for any other shape,
    and DataError for a name that is there already unless `replace`.
    """
    lengths = batch.index.scalars("response_length")
    width = int(lengths.max(initial=0))
    per_row, per_token = {}, {}
    for name, tensor in named.items():
        values = (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).detach().cpu().numpy()
        if values.shape == (len(batch),):
            per_row[name] = values
        elif values.ndim == 2 and len(values) == len(batch) and values.shape[1] >= width:
            rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
            per_token[name] = ragged_rows(rows, values.dtype)
        else:
            raise TrainError(
                f"column {name!r} has the shape {list(values.shape)}; a batch of {len(batch)} rows, the "
                f"longest with {width} tokens, takes [{len(batch)}] or [{len(batch)}, {width}]"
            )
    if per_row:
        batch = batch.with_index(per_row, replace)
    if per_token:
        block = Batch.of({ROW_ID: batch.row_ids, **per_token})
        batch = batch.with_blocks(cluster.put(block, ()).blocks, replace)
    return batch
