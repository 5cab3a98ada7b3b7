"""Rows shared out over data-parallel ranks, so that each has nearly the same work. Pure numpy."""

from __future__ import annotations

import heapq

import numpy as np

from rondo.errors import TrainError
from rondo.planning.batches import rows_in, rows_of_units


def balance(
    costs: np.ndarray, parts: int, groups: np.ndarray | None = None, units: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut rows into `parts` shards of nearly equal cost, separately within every value of `groups`.

    costs: [B], not negative (the caller's measure of work: tokens, squares of lengths). groups: [B], e.g. the
    mini-batch of each row; every shard gets its share of each group, so that no rank idles in any of them.
    units: [B]; rows of equal value stay together. Returns row positions per part, rising; parts may differ in
    row count and may be empty. Deterministic. Within a group the heaviest and the lightest part differ by at
    most the group's costliest row (unit). Largest differencing (Karmarkar & Karp 1982); a group's heaviest
    part goes to the part with least so far. Raises TrainError for a unit in two groups.
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
        of_units = balance(unit_costs, parts, np.array([labels[rows[0]] for rows in whole]))
        return [np.sort(rows_in(whole, part)) for part in of_units]
    shards: list[list[int]] = [[] for _ in range(parts)]
    totals = np.zeros(parts)
    for value in np.unique(labels):
        rows = np.flatnonzero(labels == value)
        sums, members = _largest_differencing(costs[rows], parts)
        lightest_first = np.argsort(totals, kind="stable")
        for part, share in zip(lightest_first, np.argsort(-sums, kind="stable"), strict=True):
            shards[part].extend(rows[members[share]].tolist())
            totals[part] += sums[share]
    return [np.sort(np.asarray(shard, np.int64)) for shard in shards]


def _largest_differencing(costs: np.ndarray, parts: int) -> tuple[np.ndarray, list[list[int]]]:
    """(sums [parts], rows of each part): keep joining the two partial partitions that are least even."""
    if parts == 1 or len(costs) == 0:
        return np.full(parts, costs.sum()), [list(range(len(costs))), *([] for _ in range(parts - 1))]
    heap: list[tuple[float, int, np.ndarray, list[list[int]]]] = []
    for i, cost in enumerate(costs):
        sums = np.zeros(parts)
        sums[0] = cost
        heap.append((-float(cost), i, sums, [[i], *([] for _ in range(parts - 1))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, sums_a, members_a = heapq.heappop(heap)
        _, _, sums_b, members_b = heapq.heappop(heap)
        sums = sums_a + sums_b[::-1]  # the fullest of one meets the emptiest of the other
        order = np.argsort(-sums, kind="stable")
        members = [members_a[k] + members_b[parts - 1 - k] for k in order]
        sums = sums[order]
        heapq.heappush(heap, (float(sums[-1] - sums[0]), first, sums, members))
    return heap[0][2], heap[0][3]
