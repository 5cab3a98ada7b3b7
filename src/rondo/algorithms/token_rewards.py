"""What an estimator is given beside the columns of a batch: rewards and costs on tokens, with a KL inside;
and what is said of the advantages that it makes. Each row by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rondo.algorithms.kl import kl_reward
from rondo.config.schema import KlConfig
from rondo.core.errors import DataError, TrainError
from rondo.core.types import StepStats


@dataclass(frozen=True)
class TokenRewards:
    """What the rewards of tokens are made of beside the scores."""

    kl: KlConfig | None
    """algorithm.kl where it is in the reward."""
    cost: str | None
    """The column of the score that algorithm.constraint names, where the estimator reads its costs."""

    def add(self, inputs: dict[str, Tensor], kl_coef: float) -> StepStats:
        """Adds token_rewards, and the reward with the KL inside. inputs: columns [B] and [B, T]."""
        inputs["token_rewards"], stats = self._on_tokens(inputs, inputs["reward"], self._share(kl_coef))
        if self.kl is not None:  # a row without trained tokens keeps the reward that it got
            has_tokens = (inputs["response_mask"] > 0).any(1)
            with_kl = inputs["token_rewards"].sum(1)
            inputs["reward"] = torch.where(has_tokens, with_kl, inputs["reward"])
        return stats

    def charge(self, inputs: dict[str, Tensor], kl_coef: float) -> None:
        """Adds token_costs: the cost on the last trained token, plus half of the KL (Safe-RLHF,
        2310.12773).
        """
        if self.cost is None:
            return
        if bool(inputs[self.cost].isnan().any()):
            raise DataError(
                f"{self.cost}, the cost of algorithm.constraint, is missing in some rows of the batch"
            )
        inputs["token_costs"], _ = self._on_tokens(inputs, inputs[self.cost], -self._share(kl_coef))

    def end_once(self, inputs: dict[str, Tensor], outcome: Tensor, kl_coef: float) -> None:
        """Makes token_rewards anew, of another outcome [B]."""
        inputs["token_rewards"], _ = self._on_tokens(inputs, outcome, self._share(kl_coef))

    def _share(self, kl_coef: float) -> float:
        return kl_coef / 2 if self.cost is not None else kl_coef

    def _on_tokens(
        self, inputs: Mapping[str, Tensor], outcome: Tensor, coef: float
    ) -> tuple[Tensor, StepStats]:
        return kl_reward(
            outcome,
            inputs["response_mask"],
            inputs.get("old_log_probs"),
            inputs.get("ref_log_probs"),
            estimator=self.kl.name if self.kl else None,
            coef=coef,
        )


def made_columns(
    name: str, made: Any, wanted: tuple[str, ...], rows: int, width: int | None = None
) -> dict[str, Tensor]:
    """Returns by name what the estimator `name` made of so many rows, of `width` tokens each (None: any).
    Raises TrainError where it is not what is `wanted`, or no tensor of numbers [B] or [B, T].
    """
    if isinstance(made, tuple):
        if len(made) != 2:
            raise TrainError(
                f"the estimator {name!r} returned {len(made)} things; it returns advantages, (advantages, "
                "returns), or a mapping of columns"
            )
        made = dict(zip(("advantages", "returns"), made, strict=True))
    elif not isinstance(made, Mapping):
        made = {"advantages": made}
    missing = sorted(set(wanted) - set(made))
    if missing:
        raise TrainError(f"the estimator {name!r} must return {missing[0]}; it returned {sorted(made)}")
    for column, values in made.items():
        told = f"a {type(values).__name__}"
        if isinstance(values, Tensor):
            shape, told = values.shape, f"{values.dtype} of shape {list(values.shape)}"
            of_tokens = len(shape) == 2 and shape[0] == rows and width in (None, shape[1])
            if values.dtype != torch.bool and (shape == (rows,) or of_tokens):
                continue
        raise TrainError(
            f"the estimator {name!r} must return {column} as a tensor of numbers [{rows}] or "
            f"[{rows}, {'T' if width is None else width}], one for each row or token; it returned {told}"
        )
    return dict(made)


def check_finite(name: str, made: Mapping[str, Tensor], counted: Tensor | None) -> None:
    """Raises TrainError where what the estimator `name` made of a row is not finite. counted: the tokens of
    columns [B, T] that matter.
    """
    for column, values in made.items():
        wrong = ~values.isfinite()
        if values.ndim == 2 and counted is not None:
            wrong &= counted
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            rows = int((wrong if wrong.ndim == 1 else wrong.any(dim=1)).sum())
            raise TrainError(
                f"the estimator {name!r} made {column} that are not finite in {rows} of {len(values)} rows, "
                f"the first {float(values[place])} in row {place[0]}; does it divide by 0?"
            )


def advantage_stats(advantages: Tensor, counted: Tensor | None) -> StepStats:
    """Describes advantages, [B] or [B, T], which are summed in their own type. counted: the tokens that are
    trained, [B, T].
    """
    stats, per_row = StepStats(), advantages.ndim == 1
    values = advantages if counted is None or per_row else advantages[counted]
    if values.numel():
        stats.add_mean("actor/advantage", float(values.sum()), values.numel())
        stats.add_mean("actor/advantage_abs", float(values.abs().sum()), values.numel())
        stats.add_max("actor/advantage_max", float(values.max()))
        stats.add_min("actor/advantage_min", float(values.min()))
    rows = advantages if per_row else advantages.abs().sum(dim=1)
    stats.add_mean("actor/zero_advantage_share", float((rows == 0).sum()), len(rows))
    return stats
