"""Loss objects for the training engine over preference pairs; the shape is that of `objective.py`.

A pair is two rows of equal `unit` next to each other, chosen first, in one micro-batch. The rows' tokens
become one number per pair and side, which the chosen `pair_loss` reads by name, and the loss is
Σ weight · pair loss, the weight that of either row: 1 / pairs of the mini-batch, however it is cut. What
stands where the mask is 0 (NaN included) reaches neither loss nor gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rondo.algorithms.objective import Columns, clean, refuse_taken
from rondo.algorithms.registry import bind, columns_read, names
from rondo.algorithms.statistics import Metrics, row_index
from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError, TrainError, about

# What a pair loss may read (of each side, except margin) -> the batch columns that it is made of.
_OF_ALL = {"length": (), "margin": ("margin",), "safe": ("safe",)}
POLICY_QUANTITIES: Mapping[str, tuple[str, ...]] = {
    **{"log_ratio": ("ref_log_probs",), "log_prob": ()},
    **_OF_ALL,
}
SCORE_QUANTITIES: Mapping[str, tuple[str, ...]] = {"score": (), **_OF_ALL}


class _PairLoss:
    """What both losses share: which columns the function needs, pairing, weights and metrics."""

    outputs: tuple[str, ...]
    _key: str
    _quantities: Mapping[str, tuple[str, ...]]

    def __init__(self, function: FunctionConfig) -> None:
        self._config = function
        with about(self._key):
            self._function = bind("pair_loss", function, key=self._key)
        self._reads = columns_read(self._function)
        sources = [source for name in self._reads for source in self._sources(name)]
        self.columns: tuple[str, ...] = tuple(
            dict.fromkeys(("response_mask", "loss_weight", "unit", *sources))
        )
        if function.name in names("pair_loss"):  # an option out of range fails here, not in the first step
            with about(self._key):
                self._function(**{name: torch.zeros(1) for name in self._reads})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._config,)

    def _sources(self, name: str) -> tuple[str, ...]:
        side, quantity = _split(name)
        if quantity not in self._quantities or (side is None) != (quantity == "margin"):
            there_are = ("margin" if q == "margin" else f"chosen_{q}, rejected_{q}" for q in self._quantities)
            raise ConfigError(
                f"{self._key}: {self._config.name} reads {name!r}, which a pair does not have here; there "
                f"are: {', '.join(there_are)}"
            )
        return self._quantities[quantity]

    def _per_row(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> dict[str, Tensor]:
        """Returns the quantities that the rows' tokens add up to, each [B]; differentiable."""
        raise NotImplementedError

    def __call__(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> tuple[Tensor, Metrics]:
        """outputs and columns: [N], per-row columns expanded; cu_seqlens: int32 [2P+1] of the responses.

        Raises TrainError where the rows are not pairs.
        """
        first = _first_tokens(columns["unit"], cu_seqlens)
        dtype = outputs[self.outputs[0]].dtype
        rows = self._per_row(outputs, columns, cu_seqlens)
        rows |= {name: columns[name][first].to(dtype) for name in ("margin", "safe") if name in self.columns}
        weight = columns["loss_weight"][first][0::2].to(dtype)
        given = []
        for name in self._reads:
            side, quantity = _split(name)
            given.append(rows[quantity][1 if side == "rejected" else 0 :: 2])
        loss, metrics = self._function(*given)
        if loss.shape != weight.shape:
            raise TrainError(
                f"the loss {self._config.name!r} must return (loss [P], metrics) of P = {len(weight)} pairs, "
                f"got shape {list(loss.shape)}"
            )
        if self._config.name not in names("pair_loss"):
            refuse_taken(f"{self._key}: {self._config.name}", metrics)
        total = (weight * loss).sum()
        return total, dict(metrics) | {"pair/loss": (total, weight.sum())}


def _split(name: str) -> tuple[str | None, str]:
    """Splits a parameter's name into its side ("chosen", "rejected" or None) and the quantity."""
    side, _, quantity = name.partition("_")
    return (side, quantity) if side in ("chosen", "rejected") else (None, name)


def _first_tokens(unit: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the position of each row's first token, [2P]. Raises TrainError where rows are not pairs."""
    first = cu_seqlens[:-1].to(torch.int64)
    units = unit[first.clamp_max(len(unit) - 1)]
    are_odd = len(units) % 2 == 1
    differ = units[0::2] != (units[0::2] if are_odd else units[1::2])
    is_empty, are_mixed = torch.stack([(cu_seqlens.diff() == 0).any(), differ.any()]).tolist()  # one read
    if is_empty:
        raise TrainError("a row of a preference pair has no response tokens; each needs some")
    if are_odd or are_mixed:
        raise TrainError(
            "the rows of a micro-batch are not preference pairs: chosen and rejected of one `unit` must "
            f"stand next to each other; units of the rows: {units.tolist()[:16]}"
        )
    return first


def _row_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    rows = row_index(cu_seqlens, len(values))
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, rows, values)


class PreferenceLoss(_PairLoss):
    """A pair loss of the policy (DPO and its relatives): log-probs are summed over each row's trained tokens.

    function: reads chosen_/rejected_ log_ratio (then the column ref_log_probs is needed), log_prob, length,
    safe, and margin. Picklable. Metrics: pair/loss and those of the function. Raises ConfigError for a
    function or options that cannot work.
    """

    outputs: tuple[str, ...] = ("log_probs",)
    _key = "algorithm.preference_loss"
    _quantities = POLICY_QUANTITIES

    def _per_row(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> dict[str, Tensor]:
        log_probs, counted = outputs["log_probs"], columns["response_mask"] > 0
        read = {name: columns[name] for name in ("ref_log_probs",) if name in self.columns}
        inputs = clean({"log_probs": log_probs, **read}, counted, log_probs.dtype)
        rows = {
            "log_prob": _row_sums(inputs["log_probs"], cu_seqlens),
            "length": _row_sums(counted.to(log_probs.dtype), cu_seqlens),
        }
        if "ref_log_probs" in inputs:
            # token by token: the difference of two long sums would lose digits
            rows["log_ratio"] = _row_sums(inputs["log_probs"] - inputs["ref_log_probs"], cu_seqlens)
        return rows


class RewardModelLoss(_PairLoss):
    """A pair loss of a reward or cost model: a row's score is the value head's after its last token.

    The last of response_ids, whatever the mask; no other position has a part. function: reads chosen_/
    rejected_ score, length (trained tokens), safe, and margin. Picklable. Metrics: pair/loss and those of the
    function. Raises ConfigError for a function or options that cannot work.
    """

    outputs: tuple[str, ...] = ("scores",)
    _key = "algorithm.reward_model_loss"
    _quantities = SCORE_QUANTITIES

    def _per_row(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> dict[str, Tensor]:
        scores = outputs["scores"]
        counted = (columns["response_mask"] > 0).to(scores.dtype)
        return {
            "score": scores[cu_seqlens[1:].to(torch.int64) - 1],
            "length": _row_sums(counted, cu_seqlens),
        }
