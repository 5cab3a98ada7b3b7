"""Which rows are computed together: the mini-batches of a step and their order, and micro-batches under a
token budget; shards over data-parallel ranks are in `shards`. Pure numpy.

All of it follows from ids and token counts. The mini-batches do not depend on the number of ranks, and no
gradient on either (`algorithms/aggregation.py`).
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


def mini_batch_orders(mini_batch: np.ndarray, epochs: int, *, seed: int, step: int) -> list[list[int]]:
    """The order in which each epoch visits the mini-batches: permutations drawn from (seed, step, epoch).

    mini_batch: [B], of `plan_mini_batches`. Membership is fixed for a step; only the order changes from epoch
    to epoch.
    """
    number = int(mini_batch.max(initial=-1)) + 1
    seeds = [request_seed(seed, "mini_batch_order", step, epoch) for epoch in range(epochs)]
    return [np.random.default_rng(of_epoch).permutation(number).tolist() for of_epoch in seeds]


def rows_of_units(units: np.ndarray) -> list[np.ndarray]:
    """Row positions of each unit (rows of equal value), rising; units in the order of their first rows."""
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    order = np.argsort(first[unit], kind="stable")
    cuts = np.flatnonzero(np.diff(first[unit][order])) + 1
    return np.split(order, cuts) if len(order) else []


def rows_in(whole: list[np.ndarray], units: np.ndarray) -> np.ndarray:
    """The rows of these units, unit by unit. whole: of `rows_of_units`."""
    return np.concatenate([whole[unit] for unit in units]) if len(units) else np.empty(0, np.int64)


def micro_batches(lengths: np.ndarray, budget: int, units: np.ndarray | None = None) -> list[np.ndarray]:
    """Cut rows into bins of at most `budget` tokens, few of them: first-fit decreasing (≤ 11/9 of the fewest
    + 1).

    lengths: int [B], tokens per row. units: [B]; rows of equal value share a bin and lie next to each other
    there. Returns row positions per bin, rising within a bin (with units: the units by their first rows);
    the fullest bins come first, so that what will not fit in memory fails in the first pass. Raises
    TrainError naming a row or a unit longer than the budget.
    """
    lengths = np.asarray(lengths, np.int64)
    if units is not None:
        whole = rows_of_units(units)
        sums = np.array([lengths[rows].sum() for rows in whole], np.int64)
        for rows, total in zip(whole, sums, strict=True):
            if total > budget:
                raise TrainError(
                    f"unit {units[rows[0]]} (rows {', '.join(map(str, rows))}) has {total} tokens, more than "
                    f"token_budget={budget}; its rows are computed together: raise token_budget or lower "
                    "data.max_prompt_tokens or the length of responses"
                )
        return [rows_in(whole, part) for part in micro_batches(sums, budget)]
    too_long = np.flatnonzero(lengths > budget)
    if len(too_long):
        row = int(too_long[0])
        raise TrainError(
            f"row {row} has {int(lengths[row])} tokens, more than token_budget={budget} ({len(too_long)} of "
            f"{len(lengths)} rows are; the longest has {int(lengths.max())}): raise token_budget or lower "
            "data.max_prompt_tokens or rollout.max_tokens"
        )
    room = np.empty(len(lengths), np.int64)
    bins: list[list[int]] = []
    for row in np.argsort(-lengths, kind="stable"):
        fits = room[: len(bins)] >= lengths[row]
        where = int(fits.argmax()) if fits.any() else len(bins)
        if where == len(bins):
            room[where] = budget
            bins.append([])
        room[where] -= lengths[row]
        bins[where].append(int(row))
    fullest_first = np.argsort(room[: len(bins)], kind="stable")
    return [np.sort(np.asarray(bins[where], np.int64)) for where in fullest_first]
