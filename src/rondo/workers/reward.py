"""The reward worker: scorers as a worker group of their own, for programs that generate first and score
afterwards. (The built-in loop scores each trajectory next to the engine, as it finishes.)"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from rondo.batch import ROW_ID, Batch
from rondo.config.schema import RewardConfig
from rondo.controller import Worker, WorkerContext, dispatch
from rondo.data.rows import SCORE_PREFIX, rows_from_trajectories
from rondo.rewards import Scorer
from rondo.types import Prompt, Trajectory, Turn

PER_TOKEN = ("response_ids", "response_mask", "rollout_log_probs", "policy_versions")
PER_ROW = ("prompt_id", "trajectory_id", "sample_index", "finish_reason", "outcome", "text")


class RewardWorker(Worker):
    """Calls the configured reward functions; no model. run_seed: for functions that ask for a seed."""

    def __init__(self, context: WorkerContext, *, reward: RewardConfig, run_seed: int) -> None:
        super().__init__(context)
        self.scorer = Scorer(reward, seed=run_seed)

    @dispatch("split", reads=(*PER_TOKEN, *PER_ROW))
    async def compute_reward(self, batch: Batch, prompts: Mapping[str, Prompt]) -> dict[str, np.ndarray]:
        """Per row: row_id, outcome, reward, accuracy, step_reward and the named scores (NaN where the scoring
        failed). prompts: by id. The rows of a prompt must be on one rank (column `unit`): functions may
        compare them.
        """
        scored = await asyncio.gather(*(self.scorer.score(t) for t in _trajectories(batch, prompts)))
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in scored:
            groups.setdefault(trajectory.prompt.prompt_id, []).append(trajectory)
        judged = await asyncio.gather(*(self.scorer.score_group(group) for group in groups.values()))
        rows = rows_from_trajectories(
            [t for group in judged for t in group], self.scorer.names, accuracy=self.scorer.accuracy
        )
        names = (ROW_ID, "outcome", "reward", "accuracy", "step_reward")
        scores = [name for name in rows.columns if name.startswith(SCORE_PREFIX)]
        return {name: rows.scalars(name) for name in (*names, *scores)}

    def close(self) -> None:
        """End the scorers' threads and processes."""
        self.scorer.close()


def _trajectories(batch: Batch, prompts: Mapping[str, Prompt]) -> list[Trajectory]:
    tokens: dict[str, Any] = {name: batch.rows(name) for name in PER_TOKEN}
    out = []
    for i, row in enumerate(batch.select(PER_ROW).table.to_pylist()):
        per_token = {name: rows[i] for name, rows in tokens.items()}
        prompt, turns = prompts[row.pop("prompt_id")], (Turn("policy", 0, len(per_token["response_ids"])),)
        out.append(Trajectory(prompt=prompt, turns=turns, **per_token, **row))
    return out
