"""Reward and length metrics of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rondo.batch import BatchRef
from rondo.data.rows import GREEDY_REWARD, SCORE_PREFIX
from rondo.types import StepStats


def describe_rows(batch: BatchRef, stats: StepStats) -> None:
    """Reward and length metrics of a step's scored rows."""
    index = batch.index
    reward = index.scalars("reward").astype(np.float64)
    lengths = index.scalars("response_length")
    stats.add_mean("reward/mean", float(reward.sum()), len(reward))
    stats.add_max("reward/max", float(reward.max(initial=-np.inf)))
    stats.add_min("reward/min", float(reward.min(initial=np.inf)))
    if GREEDY_REWARD in index.columns:
        greedy = index.scalars(GREEDY_REWARD)
        stats.add_mean("reward/greedy", float(greedy.sum(dtype=np.float64)), len(greedy))
    for name in index.columns:
        if name.startswith(SCORE_PREFIX):
            scores = index.scalars(name)
            known = np.isfinite(scores)
            stats.add_mean("reward/" + name, float(scores[known].sum()), int(known.sum()))
    sources = index.scalars("source").astype(str)
    for source in np.unique(sources) if len(np.unique(sources)) > 1 else ():
        stats.add_mean(
            f"reward/mean/{source}", float(reward[sources == source].sum()), int((sources == source).sum())
        )
    stats.add_mean("rollout/response_length", float(lengths.sum()), len(lengths))
    stats.add_max("rollout/response_length_max", float(lengths.max(initial=0)))
    truncated = index.scalars("finish_reason") == "length"
    stats.add_mean("rollout/truncated_share", float(truncated.sum()), len(truncated))
    groups, counts = np.unique(index.scalars("group_id"), return_counts=True)
    means = np.array([reward[index.scalars("group_id") == group].std() for group in groups])
    stats.add_mean("reward/constant_group_share", float((means == 0).sum()), len(counts))


def describe_staleness(staleness: Sequence[int], max_staleness: int, stats: StepStats) -> None:
    """Of the prompt groups of a step: mean, largest, and the share of the groups at each value."""
    stats.add_mean("buffer/staleness_mean", float(sum(staleness)), len(staleness))
    stats.add_max("buffer/staleness_max", float(max(staleness)))
    for value in range(max_staleness + 1):
        stats.add_mean(f"buffer/staleness_{value}", float(staleness.count(value)), len(staleness))
