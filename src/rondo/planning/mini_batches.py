"""The plan of an update: which rows make up a mini-batch, and in which order. Pure numpy.

All of it follows from ids, so it is the same for any number of data-parallel ranks and any
micro-batching.
"""

from __future__ import annotations

import numpy as np

from rondo.errors import TrainError
from rondo.types import request_seed


def plan_mini_batches(group_ids: np.ndarray, mini_batch_size: int, *, seed: int, step: int) -> np.ndarray:
    """The mini-batch 0, 1, … of each row: int64 [B]. Rows of a prompt group stay together.

    group_ids: [B], any order. mini_batch_size: prompt groups per mini-batch at most. There are as few
    mini-batches as that allows (a short last step has fewer), their sizes differ by at most one group, and
    which groups meet is drawn from (seed, step) over the sorted ids: it depends neither on the order of the
    rows nor on data parallelism.
    """
    if mini_batch_size < 1:
        raise TrainError(
            f"a mini-batch needs at least one prompt group, got mini_batch_size={mini_batch_size}"
        )
    groups, row_group = np.unique(np.asarray(group_ids), return_inverse=True)
    number = -(-len(groups) // mini_batch_size)
    order = np.random.default_rng(request_seed(seed, "mini_batches", step)).permutation(len(groups))
    mini_batch_of_group = np.empty(len(groups), np.int64)
    for index, members in enumerate(np.array_split(order, number) if number else ()):
        mini_batch_of_group[members] = index
    return mini_batch_of_group[row_group]


def mini_batch_order(number: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """The order in which an epoch visits `number` mini-batches: a permutation drawn from (seed, step, epoch).

    Membership is fixed for a step; only the order changes from epoch to epoch.
    """
    generator = np.random.default_rng(request_seed(seed, "mini_batch_order", step, epoch))
    return [int(i) for i in generator.permutation(number)]
