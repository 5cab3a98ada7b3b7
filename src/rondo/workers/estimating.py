"""What is computed of a step's columns where they lie, without a model: the rollout correction, advantages of
tokens. Numbers that all rows have a part in travel to the controller and back, a line of them per row
(`RowNumbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rondo.algorithms import (
    TokenRewards,
    Whitening,
    advantage_stats,
    check_finite,
    columns_read,
    correct,
    made_columns,
    moments,
    weight_sums,
)
from rondo.config.schema import RolloutCorrectionConfig
from rondo.controller import Worker, dispatch
from rondo.core.batch import ROW_ID, Batch, ragged_array
from rondo.core.columns import declared
from rondo.core.types import StepStats

CORRECTED = declared("old_log_probs", "rollout_log_probs", "response_mask")
# How often a row counts in the means of the correction; read where the batch has it.
TIMES = "correction_times"
# What of an estimator's arguments is made for it alone: columns where somebody is to read it.
TOLD = declared("token_rewards", "token_costs")


@dataclass(frozen=True)
class RowNumbers:
    """Some numbers of each row of a shard. The controller sums them in the order of its own index, so that no
    sum depends on which rank had which rows.
    """

    row_ids: np.ndarray
    """The column row_id, [b]."""
    values: np.ndarray
    """K numbers of each row, [b, K]."""

    @staticmethod
    def in_order(parts: Sequence[RowNumbers], row_ids: np.ndarray) -> np.ndarray:
        """Returns the numbers of these rows, [B, K]. parts: of all shards, which have exactly these."""
        there = np.concatenate([part.row_ids for part in parts])
        values = np.concatenate([part.values for part in parts])
        order = np.argsort(there, kind="stable")
        return np.asarray(values[order[np.searchsorted(there, row_ids, sorter=order)]])


@dataclass(frozen=True)
class Corrected:
    """What a shard's correction returns to the controller."""

    num_trained_tokens: RowNumbers
    """How many tokens of each row are still trained on."""
    stats: StepStats
    """The diagnostics."""


@dataclass(frozen=True)
class Estimation:
    """How advantages are made of rows."""

    name: str
    """The estimator's, for messages."""
    function: Callable[..., Any]
    """With its options, as `bind_by_row` returns it."""
    whiten: bool
    """Whether its advantages are still to be whitened, over the whole batch."""
    rewards: TokenRewards
    """How the rewards of tokens follow from those of rows."""
    columns: tuple[str, ...]
    """Columns of the batch that it reads."""
    writes: tuple[str, ...]
    """Columns that it returns."""
    width: int
    """Tokens of the batch's longest response: all ranks pad to it, so that no sum over a row depends on what
    other rows a rank has."""
    kl_coef: float
    """The coefficient of algorithm.kl in this step."""
    numbers: Mapping[str, float]
    """Those that adapt and that the function reads, in this step."""
    keeps: tuple[str, ...] = ()
    """What advantages are made of that becomes columns, too (`TOLD`)."""


@dataclass(frozen=True)
class Estimated:
    """What a shard's advantages return to the controller."""

    moments: RowNumbers
    """The moments of each row, where advantages are still to be whitened."""
    stats: StepStats
    """Metrics of the advantages and rewards."""


class EstimatingWorker(Worker):
    """Computes columns of rows from other columns of theirs."""

    @dispatch("split", writes=("advantages", "returns", "cost_returns"), replaces=TOLD)
    def estimate_advantages(self, batch: Batch, how: Estimation) -> tuple[Batch, Estimated]:
        """Adds advantages, and what critics learn; advantages that are still to be whitened in float64."""
        reads = columns_read(how.function)
        inputs = _padded(batch, (*how.columns, "response_mask"), how.width)
        stats = StepStats()
        if how.rewards.kl is not None or "token_rewards" in reads:
            stats = how.rewards.add(inputs, how.kl_coef)
        how.rewards.charge(inputs, how.kl_coef)
        inputs |= {name: torch.tensor(one, dtype=torch.float32) for name, one in how.numbers.items()}
        counted = inputs["response_mask"] > 0
        # A row that was drawn twice counts twice in means and in whitening, as if it stood there twice.
        if "sample_weight" in batch.columns:
            often = torch.tensor(batch.scalars("sample_weight"), dtype=torch.float32)
            inputs["response_mask"] = inputs["response_mask"] * often[:, None]
        made = how.function(**{name: inputs[name] for name in reads})
        made = made_columns(how.name, made, how.writes, *counted.shape)
        check_finite(how.name, made, counted)
        # Beyond the mask estimators may have anything, which no loss reads and metrics must not count.
        made = {name: torch.where(counted, column, 0.0) for name, column in made.items()}
        known = torch.zeros(len(batch), 4)
        if how.whiten:
            known = moments(made["advantages"], inputs["response_mask"])
        else:
            made["advantages"] = made["advantages"].to(torch.float32)
            stats.merge(advantage_stats(made["advantages"].to(torch.float64), counted))
        there, offsets = _there(batch, how.width)
        made |= {name: inputs[name] for name in how.keeps if name in inputs}
        written = {name: ragged_array(column[there], offsets) for name, column in made.items()}
        said = Estimated(RowNumbers(batch.scalars(ROW_ID), known.numpy()), stats)
        return batch.select([ROW_ID]).with_columns(written), said

    @dispatch("split", reads=("advantages", "response_mask"), replaces=("advantages",))
    def whiten_advantages(self, batch: Batch, how: Whitening) -> tuple[Batch, StepStats]:
        """Makes advantages of what `estimate_advantages` left to be whitened."""
        raw, offsets = batch.ragged("advantages")
        advantages = how(raw, batch.ragged("response_mask")[0]).to(torch.float32)
        made = batch.select([ROW_ID]).with_columns({"advantages": ragged_array(advantages, offsets)})
        wide = made.padded("advantages").to(torch.float64)
        stats = advantage_stats(wide, batch.padded("response_mask") > 0)
        return made, stats

    @dispatch(
        "split",
        reads=("reward", "response_mask", "old_log_probs", "ref_log_probs"),
        replaces=("token_rewards",),
    )
    def charge_rewards(
        self, batch: Batch, rewards: TokenRewards, kl_coef: float, width: int, keep: bool
    ) -> tuple[Batch, tuple[RowNumbers, StepStats]] | tuple[RowNumbers, StepStats]:
        """Returns the reward of each row less the KL of its tokens, and what that was. keep: adds
        token_rewards, too.
        """
        inputs = _padded(batch, ("reward", "response_mask", "old_log_probs", "ref_log_probs"), width)
        stats = rewards.add(inputs, kl_coef)
        said = RowNumbers(batch.scalars(ROW_ID), inputs["reward"].double().numpy()[:, None]), stats
        if not keep:
            return said
        there, offsets = _there(batch, width)
        made = {"token_rewards": ragged_array(inputs["token_rewards"][there], offsets)}
        return batch.select([ROW_ID]).with_columns(made), said

    @dispatch("split", reads=CORRECTED)
    def weigh_rollouts(self, batch: Batch, config: RolloutCorrectionConfig) -> RowNumbers:
        """Returns what the mean weight of the batch is made of (`algorithms.weight_sums`)."""
        columns, times = _responses(batch)
        return RowNumbers(batch.scalars(ROW_ID), weight_sums(*columns, config, times=times).numpy())

    @dispatch("split", reads=CORRECTED, writes=("rollout_weights",), replaces=("response_mask",))
    def correct_rollouts(
        self, batch: Batch, config: RolloutCorrectionConfig, mean: float
    ) -> tuple[Batch, Corrected] | Corrected:
        """Adds rollout_weights where importance is set, divided by `mean`; makes response_mask anew where
        something may be rejected.
        """
        columns, times = _responses(batch)
        made = correct(*columns, config, times=times, mean=mean)
        offsets = columns[-1].numpy()
        # One more at the end, as `reduceat` takes no index behind it: that of a last row without tokens. For
        # a row without any it gives the next row's first, which the line below takes back.
        left = np.add.reduceat(np.append(made.mask.numpy() > 0, False), offsets[:-1], dtype=np.int32)
        left = np.where(np.diff(offsets) > 0, left, 0)
        said = Corrected(RowNumbers(batch.scalars(ROW_ID), left[:, None]), made.stats)
        written = {}
        if config.importance is not None:
            written["rollout_weights"] = ragged_array(made.weights, offsets)
        if config.reject:
            written["response_mask"] = ragged_array(made.mask.to(torch.uint8), offsets)
        if not written:
            return said
        return batch.select([ROW_ID]).with_columns(written), said


def _padded(batch: Batch, names: Sequence[str], width: int) -> dict[str, torch.Tensor]:
    """Returns columns as functions of rows see them: numbers per row [b], others float32 [b, width]."""
    made = {}
    for name in dict.fromkeys(names):
        if pa.types.is_list(batch.array(name).type):
            made[name] = batch.padded(name, width=width).to(torch.float32)
        else:
            made[name] = torch.tensor(batch.scalars(name))
    return made


def _there(batch: Batch, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which of [b, width] are tokens of the responses, and where each response ends."""
    offsets = batch.ragged("response_mask")[1]
    return torch.arange(width) < (offsets[1:] - offsets[:-1])[:, None], offsets


def _responses(
    batch: Batch,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Returns the columns that are corrected, behind each other, with their offsets; and how often each row
    counts.
    """
    old, rollout, mask = (batch.ragged(name)[0] for name in CORRECTED)
    times = torch.tensor(batch.scalars(TIMES)) if TIMES in batch.columns else None
    return (old, rollout, mask, batch.ragged("response_mask")[1]), times
