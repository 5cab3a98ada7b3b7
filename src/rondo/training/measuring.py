"""What a loss says of rows that nothing is learned from: its metrics, of outputs that stand in the batch
already. No model, no gradient, no collective.
"""

from __future__ import annotations

import numpy as np
import torch

from rondo.core.batch import Batch
from rondo.core.types import StepStats
from rondo.training.loss import Loss, numbers_of, step_stats
from rondo.training.packed import response_columns


def equal_rows(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns one row of each pair of prompt and response that there is, ascending, and which of these each
    row equals: what a model computes of two such rows is the same.
    """
    number: dict[tuple[bytes, bytes], int] = {}
    pairs = zip(batch.rows("prompt_ids"), batch.rows("response_ids"), strict=True)
    same = [
        number.setdefault((prompt.tobytes(), response.tobytes()), len(number)) for prompt, response in pairs
    ]
    _, first = np.unique(np.array(same, np.int64), return_index=True)
    return first, np.array(same, np.int64)


def metrics_of(batch: Batch, loss: Loss) -> StepStats:
    """Returns the loss's metrics. `batch` has the loss's columns, and its outputs under their own names."""
    values, cu_seqlens = batch.ragged(loss.outputs[0])
    if not len(values):
        return StepStats()
    rows = np.arange(len(batch))
    outputs, columns = (
        response_columns(batch, names, rows, values.dtype, values.device)
        for names in (loss.outputs, loss.columns)
    )
    with torch.no_grad():
        metrics = loss(outputs, columns, cu_seqlens)[1]
        return step_stats(numbers_of(metrics, values.device))
