"""Which rows are computed together: the mini-batches of a step and their order, shards over data-parallel
ranks, and micro-batches under a token budget. Pure numpy.

All of it follows from ids and token counts. The mini-batches do not depend on the number of ranks, and no
gradient on either (`algorithms/aggregation.py`).
"""

from __future__ import annotations

import bisect
import heapq
import operator
from typing import Any

import numpy as np

from rondo.core.errors import TrainError
from rondo.core.types import request_seed


def plan_mini_batches(
    group_ids: np.ndarray, mini_batch_size: int | None, *, seed: int, step: int, number: int | None = None
) -> np.ndarray:
    """Returns the mini-batch 0, 1, … of each row: int64 [B]. Rows of a prompt group stay together.

    group_ids: [B], any order. mini_batch_size: prompt groups per mini-batch at most; None: all are one. There
    are as few mini-batches as that allows (a short last step has fewer), or `number` of them; their sizes
    differ by at most one group, and which groups meet is drawn from (seed, step) over the sorted ids: it
    depends neither on the order of the rows nor on data parallelism. Raises TrainError for more mini-batches
    than groups.
    """
    if mini_batch_size is not None and mini_batch_size < 1:
        raise TrainError(
            f"a mini-batch needs at least one prompt group, got mini_batch_size={mini_batch_size}"
        )
    groups, row_group = np.unique(np.asarray(group_ids), return_inverse=True)
    if number is None:
        number = -(-len(groups) // (mini_batch_size or max(len(groups), 1)))
    elif not 1 <= number <= len(groups):
        raise TrainError(f"{len(groups)} prompt groups cannot make {number} mini-batches")
    order = np.random.default_rng(request_seed(seed, "mini_batches", step)).permutation(len(groups))
    mini_batch_of_group = np.empty(len(groups), np.int64)
    for index, members in enumerate(np.array_split(order, number) if number else ()):
        mini_batch_of_group[members] = index
    return mini_batch_of_group[row_group]


def mini_batch_orders(mini_batch: np.ndarray, epochs: int, *, seed: int, step: int) -> list[list[int]]:
    """Returns the order in which each epoch visits the mini-batches, drawn from (seed, step, epoch).

    mini_batch: [B], of `plan_mini_batches`. Membership is fixed for a step; only the order changes from epoch
    to epoch.
    """
    number = int(mini_batch.max(initial=-1)) + 1  # 0 without rows
    seeds = [request_seed(seed, "mini_batch_order", step, epoch) for epoch in range(epochs)]
    return [np.random.default_rng(of_epoch).permutation(number).tolist() for of_epoch in seeds]


def rows_of_units(units: np.ndarray) -> list[np.ndarray]:
    """Returns the rows of each unit (equal value), ascending; units in the order of their first rows."""
    _, first, unit = np.unique(units, return_index=True, return_inverse=True)
    order = np.argsort(first[unit], kind="stable")
    cuts = np.flatnonzero(np.diff(first[unit][order])) + 1
    return np.split(order, cuts) if len(order) else []


def rows_in(whole: list[np.ndarray], units: np.ndarray) -> np.ndarray:
    """Returns the rows of these units, unit by unit. whole: of `rows_of_units`."""
    return np.concatenate([whole[unit] for unit in units]) if len(units) else np.empty(0, np.int64)


def micro_batches(lengths: np.ndarray, budget: int, units: np.ndarray | None = None) -> list[np.ndarray]:
    """Cuts rows into bins of at most `budget` tokens, few of them (first-fit decreasing: ≤ 11/9 of the
    fewest, + 1).

    lengths: int [B], tokens per row. units: [B]; rows of equal value share a bin and lie next to each other
    there. Returns row positions per bin, ascending within it (with units: the units by their first rows);
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


def attention_work(lengths: np.ndarray, linear: float = 24576.0) -> np.ndarray:
    """Returns the work of rows of L tokens, linear · L + L²: float64 [B].

    With h the hidden size, a layer's products take about 24 h² FLOPs per token, its attention 4 h L: a ratio
    of 6 h to L. 24576 is that of h = 4096 (Llama 7B; the constant of verl's seqlen_balancing.py).
    """
    lengths = np.asarray(lengths, np.float64)
    return linear * lengths + lengths**2


def balance(
    costs: np.ndarray,
    parts: int,
    groups: np.ndarray | None = None,
    units: np.ndarray | None = None,
    *,
    equal_sizes: bool = False,
) -> list[np.ndarray]:
    """Cuts rows into `parts` shards of nearly equal cost, separately within every value of `groups`.

    costs: [B], not negative (the caller's measure of work: tokens, squares of lengths). groups: [B], e.g. the
    mini-batch of each row; every shard gets its share of each group, so that no rank idles in any of them.
    units: [B]; rows of equal value stay together. Returns row positions per part, ascending; parts may differ
    in row count and may be empty. Deterministic. Within a group the heaviest and the lightest part differ by
    at most the group's costliest row (unit). Largest differencing (Karmarkar & Karp 1982); a group's heaviest
    part goes to the part with least so far. Raises TrainError for a unit in two groups.

    equal_sizes: the rows (units) of a group are spread over the parts evenly, to one; the work then as evenly
    as that allows (balanced differencing, Yakir 1996: what is joined is `parts` rows at a time, of similar
    cost, one for each part).
    """
    costs = np.asarray(costs, np.float64)
    if parts < 1 or costs.ndim != 1 or np.any(~(costs >= 0)):
        raise TrainError(
            f"balance needs parts >= 1 (got {parts}) and costs [B] that are finite and not negative"
        )
    labels = np.zeros(len(costs), np.int64) if groups is None else np.asarray(groups)
    if len(labels) != len(costs):
        raise TrainError(f"balance got {len(costs)} costs and {len(labels)} group labels")
    if units is not None:
        whole = rows_of_units(units)
        for rows in whole:
            if len(set(labels[rows].tolist())) > 1:
                raise TrainError(
                    f"unit {units[rows[0]]} lies in the mini-batches {sorted(set(labels[rows].tolist()))}: "
                    "rows that stay together need the same one (plan mini-batches by unit)"
                )
        unit_costs = np.array([costs[rows].sum() for rows in whole])
        unit_labels = np.array([labels[rows[0]] for rows in whole])
        of_units = balance(unit_costs, parts, unit_labels, equal_sizes=equal_sizes)
        return [np.sort(rows_in(whole, part)) for part in of_units]
    shards: list[list[int]] = [[] for _ in range(parts)]
    totals = np.zeros(parts)
    for value in np.unique(labels):
        rows = np.flatnonzero(labels == value)
        sums, members = _largest_differencing(costs[rows], parts, equal_sizes)
        lightest_first = np.argsort(totals, kind="stable")
        for part, share in zip(lightest_first, np.argsort(-sums, kind="stable"), strict=True):
            shards[part].extend(rows[members[share]].tolist())
            totals[part] += sums[share]
    return [np.sort(np.asarray(shard, np.int64)) for shard in shards]


# Those parts of a partial partition that have rows, the fullest first: their costs, and their rows, each as a
# tree of pairs (joining two is one pair, however many rows they have).
_Partial = tuple[list[float], list[Any]]


def _largest_differencing(
    costs: np.ndarray, parts: int, equal_sizes: bool
) -> tuple[np.ndarray, list[list[int]]]:
    """Returns sums [parts] and rows of each part: joins the two least even partial partitions until one is
    left. They begin with a row each, or (equal_sizes) with one for each part.

    Nearly all joins are of a partition with a single row, which is a search in a sorted list: the time hardly
    depends on the number of parts.
    """
    if parts == 1 or len(costs) == 0:
        return np.full(parts, costs.sum()), [list(range(len(costs))), *([] for _ in range(parts - 1))]
    at_once, order = 1, np.arange(len(costs))
    if equal_sizes:
        at_once, order = parts, np.argsort(-costs, kind="stable")
    values = costs[order].tolist()
    heap: list[tuple[float, int, _Partial]] = []
    for start in range(0, len(costs), at_once):
        rows: list[Any] = order[start : start + at_once].tolist()
        sums = values[start : start + at_once]
        heap.append((_least_even_first(sums, parts), start, (sums, rows)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        if len(other[0]) == 1 and other[0][0] > 0:
            _put(one, other, parts)
        else:
            one = _joined(one, other, parts)
        heapq.heappush(heap, (_least_even_first(one[0], parts), first, one))
    sums, trees = heap[0][2]
    empty = parts - len(sums)
    return np.array(sums + [0.0] * empty), [*map(_leaves, trees), *([] for _ in range(empty))]


def _least_even_first(sums: list[float], parts: int) -> float:
    """Returns the difference of the least and the greatest of all parts, for the heap."""
    return (sums[-1] if len(sums) == parts else 0.0) - sums[0]


def _put(one: _Partial, single: _Partial, parts: int) -> None:
    """Adds a single row to the emptiest part; behind all that are as full."""
    sums, rows = one
    cost, row = single[0][0], single[1][0]
    if len(sums) == parts:
        cost, row = sums.pop() + cost, (rows.pop(), row)
    at = bisect.bisect_right(sums, -cost, key=operator.neg)
    sums.insert(at, cost)
    rows.insert(at, row)


def _joined(one: _Partial, other: _Partial, parts: int) -> _Partial:
    """Joins two: the fullest part of one meets the emptiest of the other."""
    sums = np.zeros(parts)
    sums[: len(one[0])] = one[0]
    met = parts - len(other[0])  # from here on the other has rows
    sums[met:] += np.array(other[0][::-1])
    rows = [*one[1], *[None] * (parts - len(one[1]))]
    for part, tree in enumerate(reversed(other[1]), start=met):
        rows[part] = tree if rows[part] is None else (rows[part], tree)
    order = [k for k in np.argsort(-sums, kind="stable").tolist() if rows[k] is not None]
    return sums[order].tolist(), [rows[k] for k in order]


def _leaves(tree: Any) -> list[int]:
    """Returns the rows of a tree of pairs, in any order."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple):
            waiting += node
        else:
            found.append(node)
    return found
