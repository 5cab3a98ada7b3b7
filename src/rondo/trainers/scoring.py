"""The scores of reward and cost models, as per-row numbers."""

from __future__ import annotations

import numpy as np

from rondo.batch import BatchRef
from rondo.config.schema import RewardModelConfig
from rondo.controller import WorkerGroup
from rondo.data.rows import SCORE_PREFIX
from rondo.errors import TrainError
from rondo.workers.scoring import RewardModelWorker


async def model_scores(group: WorkerGroup, batch: BatchRef) -> np.ndarray:
    """float32 [B]. group: of a RewardModelWorker, its role the model's name. Raises TrainError for a score
    that is not finite: the model's fault, or a row without a response token, which is a failure of the
    rollout and not to be scored.
    """
    column = SCORE_PREFIX + group.role
    judged = await group.call(RewardModelWorker.compute_reward, batch)
    scores: np.ndarray = (await judged.fetch([column])).scalars(column)
    if not np.isfinite(scores).all():
        row = int(np.flatnonzero(~np.isfinite(scores))[0])
        names = ("sample_index", "prompt_id", "response_length")
        sample, prompt, length = (batch.index.scalars(name)[row] for name in names)
        raise TrainError(
            f"reward.models: {group.role} gave the score {scores[row]} to row {row} of {len(batch)}, sample "
            f"{sample} of prompt {prompt}, a response of {length} tokens. The model's weights are broken, or "
            "its compute_dtype overflows: try reward.models.compute_dtype=float32, or train the model again"
        )
    return scores


async def with_model_reward(group: WorkerGroup, model: RewardModelConfig, batch: BatchRef) -> BatchRef:
    """batch with score/<name>, and with weight times that in the reward."""
    scores = await model_scores(group, batch)
    reward = batch.index.scalars("reward") + np.float32(model.weight) * scores
    return batch.with_index({SCORE_PREFIX + model.name: scores, "reward": reward}, replace=True)


def with_scores_of(everything: BatchRef, scored: BatchRef) -> BatchRef:
    """everything with the reward and the models' scores of `scored`, some of its rows in the same order; the
    others, failures, have NaN.
    """
    names = [n for n in scored.index.columns if n.startswith(SCORE_PREFIX) and n not in everything.columns]
    if not names:
        return everything
    at = np.flatnonzero(np.isin(everything.row_ids, scored.row_ids))
    columns = {name: np.full(len(everything), np.nan, np.float32) for name in ("reward", *names)}
    for name, column in columns.items():
        column[at] = scored.index.scalars(name)
    return everything.with_index(columns, replace=True)
