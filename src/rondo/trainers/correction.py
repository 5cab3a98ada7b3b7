"""Rollout correction: what the configuration asks for, and the stage that does it, on the controller, before
the weights of the loss are planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from rondo.algorithms.rollout_correction import correct
from rondo.batch import BatchRef
from rondo.config.schema import Config, ImportanceConfig, RolloutCorrectionConfig
from rondo.controller import Cluster
from rondo.trainers.columns import attach, padded_columns
from rondo.types import StepStats


def effective_correction(config: Config, foreign: Sequence[str] = ()) -> RolloutCorrectionConfig | None:
    """What algorithm.rollout_correction becomes: decoupled, bypass or None (off).

    auto: off where the samples are the trainer's own policy's (trainer.max_staleness=0, native engine), or
    else token-level truncated importance weights; with importance or reject set, those. foreign: why recorded
    samples are not the policy's that is trained (`Recorded.changed`).
    """
    chosen = config.algorithm.rollout_correction
    if chosen is None or chosen.mode != "auto":
        return chosen
    if chosen.importance is None and not chosen.reject:
        if not foreign and not _of_another_policy(config):
            return None
        chosen = dataclasses.replace(chosen, importance=ImportanceConfig(level="token", upper=2.0))
    return dataclasses.replace(chosen, mode="decoupled")


def describe_correction(config: Config, foreign: Sequence[str] = ()) -> str:
    """A line for `config show`: what it became, and why. foreign: as in `effective_correction`."""
    written, found = config.algorithm.rollout_correction, effective_correction(config, foreign)
    auto = written is not None and written.mode == "auto"
    causes = [
        f"trainer.max_staleness={config.trainer.max_staleness}",
        f"rollout.engine={config.rollout.engine}",
        *(["recorded under other settings"] if foreign else []),
    ]
    why = f" (auto: {', '.join(causes)})" if auto else ""
    if found is None or found.mode == "bypass":
        return f"rollout correction: {'off' if found is None else 'bypass'}{why}"
    parts = []
    if found.importance is not None:
        weights = found.importance
        bounds = (
            f"{weights.lower} to {weights.upper}" if weights.lower is not None else f"up to {weights.upper}"
        )
        how = "0 outside" if weights.outside == "mask" else "truncated"
        parts.append(f"importance weights per {weights.level}, {bounds}, {how}")
    parts += [f"reject {rule.statistic} per {rule.level}" for rule in found.reject]
    return f"rollout correction: {'; '.join(parts) or 'measured only'}{why}"


def _of_another_policy(config: Config) -> bool:
    return config.trainer.max_staleness > 0 or config.rollout.engine != "native"


class CorrectionStage:
    """Importance weights and rejection for what the rollout policy sampled (mode decoupled; bypass takes the
    sampler's policy for π_old, and leaves nothing to correct).

    mask_truncated: as algorithm.mask_truncated; truncated rows weigh nothing in the loss, so they are in no
    mean here and stay as they are. columns: what it reads. writes: the columns that it adds.
    """

    columns: tuple[str, ...] = ("old_log_probs", "rollout_log_probs", "response_mask")

    def __init__(self, config: RolloutCorrectionConfig, *, mask_truncated: bool = False) -> None:
        assert config.mode != "bypass", "π_old is π_rollout in bypass mode; there is nothing to correct"
        self._config, self._mask_truncated = config, mask_truncated
        self.writes: tuple[str, ...] = ("rollout_weights",) if config.importance is not None else ()

    async def __call__(self, batch: BatchRef, cluster: Cluster) -> tuple[BatchRef, StepStats]:
        """batch with `rollout_weights` (where importance is set); where something is rejected, with a smaller
        `response_mask` and its `num_trained_tokens`, so that loss weights count what is left (D15, D16).
        """
        tokens = await padded_columns(batch, self.columns)
        old, rollout, mask = (tokens[name] for name in self.columns)
        counted = mask
        if self._mask_truncated:
            whole = torch.from_numpy(batch.index.scalars("finish_reason") != "length")[:, None]
            counted = torch.where(whole, mask, 0)
        rows, firsts = _as_often_as_drawn(batch)
        correction = correct(old[rows], rollout[rows], counted[rows], self._config)
        if self.writes:
            batch = attach(batch, {"rollout_weights": correction.weights[firsts]}, cluster)
        rejected = (correction.mask[firsts] == 0) & (counted > 0)
        if bool(rejected.any()):
            left = (mask > 0) & ~rejected
            new = {"response_mask": left.to(torch.uint8), "num_trained_tokens": left.sum(1).to(torch.int32)}
            batch = attach(batch, new, cluster, replace=True)
        return batch, correction.stats


def _as_often_as_drawn(batch: BatchRef) -> tuple[torch.Tensor, torch.Tensor]:
    """A row that was drawn k times (column sample_weight) stands k times in the first: positions in `batch`.
    The second: positions in the first, of each row's first copy.
    """
    counts = np.ones(len(batch), np.int64)
    if "sample_weight" in batch.index.columns:
        counts = batch.index.scalars("sample_weight").astype(np.int64)
    rows = np.repeat(np.arange(len(batch)), counts)
    return torch.from_numpy(rows), torch.from_numpy(np.cumsum(counts) - counts)
