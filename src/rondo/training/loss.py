"""What the engine asks of a loss, what it makes of its metrics, and what a loss says of rows that nothing is
learned from. Losses themselves live elsewhere and are handed in.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import numpy as np
import torch

from rondo.core.batch import Batch
from rondo.core.types import StepStats
from rondo.training.packed import response_columns

Metrics = Mapping[str, tuple[torch.Tensor, torch.Tensor] | torch.Tensor]


class Loss(Protocol):
    """A pure function of one micro-batch. The sum of its first result over micro-batches and ranks is the
    loss.
    """

    outputs: tuple[str, ...]
    """Which it wants of "log_probs", "entropy", "topk_log_probs" ([N, K], at the ids in column
    teacher_topk_ids), "sum_p_squared" (without gradient); of a value head "values" (before each token) and
    "scores" (after it).
    """
    columns: tuple[str, ...]
    """The columns of the batch that it reads."""

    def __call__(
        self,
        outputs: Mapping[str, torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, Metrics]:
        """Returns (loss_sum, metrics); a metric is (numerator, denominator), or a 0-dim tensor, which is a
        maximum. Metrics may be part of the loss's graph: the engine takes their numbers only.

        outputs, columns: [N], the response positions of the micro-batch; entry t belongs to
        `response_ids[t]`. Per-row columns arrive expanded to [N]; floats and uint8 masks arrive in the
        outputs' dtype. cu_seqlens: int32 [B+1], of the responses. It sees whole rows; those of equal `unit`,
        if the batch has that column, together, next to each other and in the batch's order.
        """
        ...


Numbers = list[tuple[str, list[torch.Tensor]]]  # name -> a mean's two numbers, or a maximum


def numbers_of(metrics: Metrics, device: torch.device) -> Numbers:
    """Returns the metrics of one micro-batch in float64 on `device`, the model's, without the graph that they
    may be part of. A loss may make a number on the CPU (`torch.ones(())`): sending it waits for nothing.
    """
    parts = {name: value if isinstance(value, tuple) else (value,) for name, value in metrics.items()}
    return [
        (name, [part.detach().to(device, torch.float64) for part in pair]) for name, pair in parts.items()
    ]


def step_stats(seen: Numbers) -> StepStats:
    """Folds the metrics of all micro-batches; one transfer to the host."""
    stats = StepStats()
    if not seen:
        return stats
    numbers = iter(torch.stack([part for _, parts in seen for part in parts]).tolist())
    for name, parts in seen:
        if len(parts) == 2:
            stats.add_mean(name, next(numbers), next(numbers))
        else:
            stats.add_max(name, next(numbers))
    return stats


# ---- of outputs that stand in the batch already: no model, no gradient, no collective ----


def equal_rows(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns one row of those with the same prompt, response and images, ascending, and which of these each
    row equals: what a model computes of two such rows is the same.
    """
    number: dict[Hashable, int] = {}
    same = []
    for prompt, response, own in zip(
        batch.rows("prompt_ids"), batch.rows("response_ids"), batch.images(), strict=True
    ):
        images = tuple(image.sha256 for image in own)
        same.append(number.setdefault((prompt.tobytes(), response.tobytes(), images), len(number)))
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
