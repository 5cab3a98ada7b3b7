"""The advantage stage: fetch the columns that the chosen estimator reads, call it, put the result back.

Estimators that read per-row numbers only never touch tokens on the controller; their result is a per-row
column.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rondo.algorithms import kl_reward, lookup_advantage
from rondo.algorithms.registry import check_options, columns_read
from rondo.batch import ROW_ID, Batch, BatchRef, ragged_array
from rondo.config.schema import AlgorithmConfig
from rondo.controller import Cluster
from rondo.types import StepStats


class AdvantageStage:
    """columns: what the estimator (and a KL in the reward) needs from producers."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._estimator = lookup_advantage(algorithm.advantage.name)
        self._options = dict(algorithm.advantage.options)
        check_options(self._estimator, self._options, "algorithm.advantage")
        self._reads = columns_read(self._estimator)
        self._kl = algorithm.kl if algorithm.kl is not None and algorithm.kl.where == "reward" else None
        extra = ("old_log_probs", "ref_log_probs") if self._kl else ()
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*self._reads, *extra)))
        self.writes_returns = "values" in self._reads

    async def __call__(self, batch: BatchRef, cluster: Cluster, kl_coef: float) -> tuple[BatchRef, StepStats]:
        """batch with advantages (and returns); kl_coef is the controller's current coefficient."""
        stats = StepStats()
        inputs = await self._inputs(batch, kl_coef, stats)
        result = self._estimator(**{name: inputs[name] for name in self._reads}, **self._options)
        advantages, returns = result if isinstance(result, tuple) else (result, None)
        named = {"advantages": advantages} | ({"returns": returns} if returns is not None else {})
        self._describe(advantages, inputs, batch, stats)
        return self._attach(batch, named, cluster), stats

    async def _inputs(self, batch: BatchRef, kl_coef: float, stats: StepStats) -> dict[str, torch.Tensor]:
        """The estimator's arguments by name: per-row [B], per-token [B, T] float32, response_mask [B, T]
        float32.
        """
        wanted = set(self.columns)
        per_token = [c for c in wanted if c not in batch.index.columns and c != "token_rewards"]
        if self._kl or "token_rewards" in wanted:
            per_token.append("response_mask")
        inputs = {
            name: torch.from_numpy(_numbers(batch.index, name))
            for name in wanted
            if name in batch.index.columns
        }
        if not per_token:
            return inputs
        tokens = await batch.fetch(sorted(set(per_token)))
        inputs |= {name: tokens.padded(name).to(torch.float32) for name in sorted(set(per_token))}
        if "token_rewards" in wanted or self._kl:
            reward = torch.from_numpy(batch.index.scalars("reward").astype(np.float32))
            rewards, kl_stats = kl_reward(
                reward,
                inputs["response_mask"],
                inputs.get("old_log_probs"),
                inputs.get("ref_log_probs"),
                estimator=self._kl.name if self._kl else None,
                coef=kl_coef,
            )
            stats.merge(kl_stats)
            inputs["token_rewards"] = rewards
            inputs["reward"] = rewards.sum(dim=1)
        return inputs

    def _describe(
        self, advantages: torch.Tensor, inputs: Mapping[str, torch.Tensor], batch: BatchRef, stats: StepStats
    ) -> None:
        counted = advantages if advantages.ndim == 1 else advantages[inputs["response_mask"].bool()]
        if counted.numel():
            stats.add_mean("actor/advantage_abs", float(counted.abs().sum()), counted.numel())
            stats.add_max("actor/advantage_max", float(counted.max()))
            stats.add_min("actor/advantage_min", float(counted.min()))
        rows = advantages if advantages.ndim == 1 else advantages.abs().sum(dim=1)
        stats.add_mean("actor/zero_advantage_share", float((rows == 0).sum()), max(len(batch), 1))

    def _attach(self, batch: BatchRef, named: Mapping[str, torch.Tensor], cluster: Cluster) -> BatchRef:
        per_row = {name: value.numpy().astype(np.float32) for name, value in named.items() if value.ndim == 1}
        per_token = {name: value for name, value in named.items() if value.ndim == 2}
        if per_row:
            batch = batch.with_index(per_row)
        if per_token:
            lengths = batch.index.scalars("response_length")
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            columns = {
                name: ragged_array(
                    np.concatenate([v[i, :n] for i, n in enumerate(lengths)] or [v[0, :0]]), offsets
                )
                for name, v in ((name, value.numpy().astype(np.float32)) for name, value in per_token.items())
            }
            block = Batch.of({ROW_ID: batch.row_ids, **columns})
            batch = batch.with_blocks(cluster.put(block, ()).blocks)
        return batch


def _numbers(index: Batch, name: str) -> np.ndarray:
    """A per-row column as numbers; names (trajectory_id) become integer ids."""
    column = index.scalars(name)
    if column.dtype == object:
        return np.unique(column.astype(str), return_inverse=True)[1].astype(np.int64)
    return column.astype(np.float32) if column.dtype.kind == "f" else column.astype(np.int64)
