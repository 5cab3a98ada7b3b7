"""Loss objects for the training engine: the functions chosen in the config, composed and weighted.

The shape is `rondo.training.Loss`: `outputs` (what the engine computes: log_probs, entropy, values),
`columns` (what it ships), and a call on the flat response positions [N] of one micro-batch that returns
(loss_sum, metrics). Every term is Σ weight · mask · token loss with weights planned over the whole
mini-batch, so sums over micro-batches and ranks are the mini-batch's loss however it is cut. A metric is
(numerator, denominator), or a 0-dim tensor, which is a maximum; it may be part of the loss's graph.

Everything is set to 0 where the mask is 0 before any function sees it: what stands there (NaN included)
reaches neither loss nor gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rondo.algorithms.arguments import ranked
from rondo.algorithms.kl import of_each_token
from rondo.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT, usual_metrics
from rondo.algorithms.registry import bind, columns_read, is_zero_at_zero_advantage, lookup, names
from rondo.algorithms.rollout_correction import accepted
from rondo.algorithms.statistics import Metrics, row_index
from rondo.config.schema import (
    AlgorithmConfig,
    BypassConfig,
    FunctionConfig,
    KlConfig,
    RejectionConfig,
    TermConfig,
)
from rondo.core.columns import LOSS_WEIGHT
from rondo.core.errors import ConfigError, TrainError, about, did_you_mean
from rondo.core.roles import ROLES
from rondo.system.usage import counted_checks

Columns = Mapping[str, Tensor]


def clean(columns: Columns, counted: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Sets columns [N] or [N, K] to 0 where the mask is 0, and floating ones to `dtype`."""
    out = {}
    for name, column in columns.items():
        wanted = column.to(dtype) if column.is_floating_point() else column
        here = counted if column.ndim == 1 else counted[:, None]
        out[name] = torch.where(here, wanted, torch.zeros((), dtype=wanted.dtype, device=wanted.device))
    return out


SPLIT_DIFFERENCE = "split_difference/"
"""A metric, before the key of a loss of the user's: how far the loss of several rows is from that of two
halves of them, relative to its largest entry. It is 0 but for rounding where each row's loss depends on that
row alone; else it depends on how a mini-batch is cut, and so on `token_budget` and the number of ranks.
Measured on the first micro-batches of several rows that a process sees.
"""
NUM_COMPARED = 16  # in the first of them ratios are 1, and many a mistake makes no difference


# Of a metric's name: rooms in which rondo alone tells something, and what it tells itself of each role.
_ROOMS = frozenset(
    "agent buffer controller environment eval images mix not_finite perf plan reward rollout "
    "rollout_correction sampler sft split_difference step timing trainer weights".split()
)
_OF_A_ROLE = frozenset(
    "advantage advantage_abs advantage_max advantage_min balance_loss coefficient entropy entropy_sampled "
    "expert_load_max experts_idle grad_norm idle_mini_batches kl_coef kl_loss kl_reward lm_loss loss lr "
    "multiplier policy_loss replayed rerouted skipped_steps term zero_advantage_share".split()
)


def refuse_taken(who: str, told: Iterable[str]) -> None:
    """Raises TrainError where a function of the user's calls a metric as rondo calls one of its own: it would
    be merged with that, or be dropped. What `usual_metrics` makes is for a loss to say otherwise.
    """
    for name in told:
        room, _, rest = name.partition("/")
        if room in _ROOMS or (room in (*ROLES, "pair") and rest.partition("/")[0] in _OF_A_ROLE):
            raise TrainError(f"{who} tells {name!r}, which rondo tells itself; name it otherwise")


def _check_metrics(who: str, told: Mapping[str, Any]) -> None:
    """Raises TrainError for a metric that is not (numerator, denominator) or one number, or is rondo's."""
    refuse_taken(who, told)
    for name, value in told.items():
        parts = value if isinstance(value, tuple) and len(value) == 2 else (value,)
        if not all(isinstance(part, Tensor) and part.ndim == 0 for part in parts):
            raise TrainError(
                f"{who} tells {name!r}, which is neither (numerator, denominator), two tensors of one number "
                f"each, nor one such tensor, a maximum: {value!r:.200}"
            )


class _TokenLoss:
    """A policy or value loss as chosen in the config, with the columns that it reads."""

    def __init__(
        self,
        kind: Literal["policy_loss", "value_loss", "term"],
        chosen: FunctionConfig,
        *,
        key: str | None = None,
    ) -> None:
        self.key, self.name = key or f"algorithm.{kind}", chosen.name
        self.function = bind(kind, chosen, key=key)
        self.reads = columns_read(self.function)
        # Micro-batches of several rows on which it is still to be compared with itself: none of ours.
        self._is_own = chosen.name not in names(kind)
        self._compared = NUM_COMPARED if self._is_own else 0

    def __call__(self, inputs: Columns) -> tuple[Tensor, Metrics]:
        """Raises TrainError where the function returns something else than a loss does."""
        loss, metrics = self._called(inputs)
        bounds = inputs["cu_seqlens"]
        if self._compared and len(bounds) > 2 and not bounds.is_meta:
            self._compared -= 1
            with counted_checks():
                difference = self._split_difference(inputs, loss.detach())
            if difference is not None:
                metrics[SPLIT_DIFFERENCE + self.key] = difference
        return loss, metrics

    @torch.no_grad()
    def _split_difference(self, inputs: Columns, whole: Tensor) -> Tensor | None:
        """Returns how far the loss [N] of these rows is from that of their two halves, by its largest entry;
        what is not trained on does not count. None: one of them has nothing that is.
        """
        bounds, counted = inputs["cu_seqlens"], inputs["response_mask"] > 0
        middle = len(bounds) // 2
        cut = int(bounds[middle])
        if not (counted[:cut].any() and counted[cut:].any()):  # many a loss takes no empty rows
            return None
        halves = []
        for tokens, rows in ((slice(cut), slice(middle + 1)), (slice(cut, None), slice(middle, None))):
            half = {name: column[tokens] for name, column in inputs.items()}
            half["cu_seqlens"] = bounds[rows] - bounds[rows][0]
            halves.append(self._called(half)[0])
        compared = (whole - torch.cat(halves), whole)
        difference, scale = (torch.where(counted, one, 0.0).abs().amax() for one in compared)
        return difference / scale.clamp(min=torch.finfo(scale.dtype).tiny)

    def _called(self, inputs: Columns) -> tuple[Tensor, dict[str, Any]]:
        result = self.function(*(inputs[name] for name in self.reads))
        expected = inputs["response_mask"].shape
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            loss, metrics = result
            if isinstance(loss, Tensor) and loss.shape == expected:
                if self._is_own:
                    _check_metrics(f"{self.key}: {self.name}", metrics)
                return loss, dict(metrics)
        raise TrainError(
            f"{self.key}: the loss {self.name!r} must return (token loss [N], metrics), "
            f"N = {expected[0]} tokens, metrics a mapping"
        )


def term_losses(algorithm: AlgorithmConfig) -> list[tuple[TermConfig, _TokenLoss]]:
    """Returns the terms of algorithm.terms with their functions. Raises ConfigError for what cannot work."""
    losses: list[tuple[TermConfig, _TokenLoss]] = []
    for number, term in enumerate(algorithm.terms):
        key = f"algorithm.terms.{number}"
        with about(key):
            if term.by is not None and term.by not in algorithm.coefficients:
                raise ConfigError(
                    f"{key}.by: there is no {term.by!r} in algorithm.coefficients"
                    f"{did_you_mean(term.by, algorithm.coefficients)}"
                )
            losses.append((term, _TokenLoss("term", term, key=key)))
    return losses


def _kl_in_loss(kl: KlConfig) -> Callable[..., Any]:
    if kl.name == "k1":
        raise ConfigError(
            "algorithm.kl: k1 in the loss has an expected gradient of 0 and only adds noise; "
            "write name: k2 (or k1+, which also reports k1's value), or where: reward"
        )
    return lookup("kl", kl.name)


GAP = ("rollout/log_prob_gap", "rollout/log_prob_gap_max", "rollout/kl_k3")
"""What `rollout_gap` measures."""


@ranked("flat", mask="token")
def rollout_gap(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """Measures how far log-probs [N] (0 where masked) of sampler and trainer are apart; see `ActorLoss`.
    Tokens of which rollout_log_probs is NaN count for nothing.
    """
    unsaid = rollout_log_probs.isnan()
    mask = torch.where(unsaid, 0.0, mask)
    difference = torch.where(unsaid, 0.0, (old_log_probs - rollout_log_probs).detach())
    gap = difference.abs() * mask
    # In float64: k3 is about half the square of δ, for policies that agree far below the digits of e^δ and δ.
    bounded = difference.to(torch.float64).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "rollout/log_prob_gap": (gap.sum(), mask.sum()),
        "rollout/log_prob_gap_max": torch.cat([gap.new_zeros(1), gap]).amax(),
        "rollout/kl_k3": (((bounded.expm1() - bounded) * mask).sum(), mask.sum()),
    }


def _clip_bounds(function: Callable[..., Any]) -> tuple[float | None, float | None]:
    """Returns the bounds (ε_l, ε_h) that the options clip, clip_low and clip_high of a policy loss set."""
    set_to = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    both, low, high = (
        number if isinstance(number := set_to.get(name), int | float) else None
        for name in ("clip", "clip_low", "clip_high")
    )
    return both if low is None else low, both if high is None else high


class ActorLoss:
    """Policy loss - entropy_coef · entropy + kl.coef · KL (where kl.where is loss) + a language-model loss
    + the terms of algorithm.terms.

    on_policy: one optimizer step follows per batch, so the old log-probs are the current ones, detached, and
    no `old_log_probs` column is read. needs_all: something beside this loss is minimised in the same passes,
    for which no row may be skipped (a mixture's balance). An adaptive KL coefficient is read from the
    per-row column `kl_coef`, since it changes from step to step. With rollout correction the policy loss is
    multiplied by `rollout_weights` (after its own clipping); in bypass mode it is 0 where `reject` refuses a
    token.
    The language-model loss, Σ lm_weight · (-ℓ), is that of right answers (VAPO) and of pretraining rows
    (PPO-ptx): rows of loss_weight 0 have no part in anything else. zero_where_advantage_is_zero: rows with
    advantage 0 have no part in loss or gradient, so that their backward pass may be skipped. Raises
    ConfigError for functions or options that cannot work. Picklable.

    Metrics, over all trained tokens, of rows whose gradient is skipped too: actor/policy_loss and actor/loss
    (averaged with the loss weights: for the `mean` aggregations the loss itself), actor/kl_loss,
    actor/entropy, actor/term/<name>, what policy loss and terms report (of a loss that reads old_log_probs,
    and does not report actor/ppo_kl itself, the `usual_metrics`), actor/entropy_sampled (mean of -ℓ: an
    unbiased estimate of the entropy while π = π_old), and the distance between sampler and trainer:
    rollout/log_prob_gap (mean of |ℓ_old - ℓ_rollout|), rollout/log_prob_gap_max, rollout/kl_k3 (k3 of
    KL(rollout || old)), with the current ℓ where no function reads old_log_probs: then they are of the rows
    before the first optimizer step.
    """

    def __init__(
        self, algorithm: AlgorithmConfig, *, on_policy: bool = False, needs_all: bool = False
    ) -> None:
        self.algorithm = algorithm
        """What it was made of."""
        self._on_policy = on_policy
        self._needs_all = needs_all
        self._policy_loss = _TokenLoss("policy_loss", algorithm.policy_loss)
        self._bounds = _clip_bounds(self._policy_loss.function)
        self._entropy_coef = algorithm.entropy_coef
        self._kl = algorithm.kl if algorithm.kl is not None and algorithm.kl.where == "loss" else None
        self._estimator = _kl_in_loss(self._kl) if self._kl else None
        self._estimator_reads = columns_read(self._estimator) if self._estimator else ()
        self._terms = term_losses(algorithm)
        titles = [term.name for _, term in self._terms]
        same = [titles[:number].count(title) for number, title in enumerate(titles)]
        # One name twice are two metrics.
        self._told = [
            f"actor/term/{n}" + (f"/{again + 1}" if again else "")
            for n, again in zip(titles, same, strict=True)
        ]
        of_terms = (name for _, term in self._terms for name in term.reads)
        self.reads: tuple[str, ...] = (*self._policy_loss.reads, *of_terms)
        """What policy loss and terms read."""
        read = (*self.reads, *self._estimator_reads)
        asked = {
            "entropy": self._entropy_coef != 0 or "entropy" in read,
            "topk_log_probs": "topk_log_probs" in read,
        }
        self.outputs: tuple[str, ...] = ("log_probs", *(name for name, wanted in asked.items() if wanted))
        made_here = {*self.outputs, "cu_seqlens"} | ({"old_log_probs"} if on_policy else set())
        self._has_lm = algorithm.positive_lm_coef > 0 or algorithm.pretrain_coef > 0
        correction = algorithm.rollout_correction
        # In bypass mode old_log_probs are the sampler's, and the current policy is what they are judged by.
        self._reject = correction.reject if isinstance(correction, BypassConfig) else ()
        extra = {
            "kl_coef": self._kl is not None and self._kl.controller.name == "adaptive",
            "rollout_weights": correction is not None and correction.importance is not None,
            "lm_weight": self._has_lm,
            "teacher_topk_ids": asked["topk_log_probs"],
        }
        also = (name for name, wanted in extra.items() if wanted)
        factors = (term.by for term, _ in self._terms if term.by is not None)
        wanted = dict.fromkeys(("response_mask", "loss_weight", "rollout_log_probs", *read, *also, *factors))
        self.columns: tuple[str, ...] = tuple(name for name in wanted if name not in made_here)
        others = (self._kl is not None, self._entropy_coef != 0, self._has_lm, self._terms)
        alone = not (needs_all or any(others))
        self.zero_where_advantage_is_zero = alone and is_zero_at_zero_advantage(self._policy_loss.function)

    def __reduce__(self) -> tuple[Any, ...]:
        made = functools.partial(ActorLoss, on_policy=self._on_policy, needs_all=self._needs_all)
        return made, (self.algorithm,)

    def __call__(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> tuple[Tensor, Metrics]:
        """outputs and columns: [N]; per-row columns arrive expanded; cu_seqlens: int32 [B+1] of the
        responses.
        """
        dtype = outputs["log_probs"].dtype
        counted = (columns["response_mask"] > 0) & (columns["loss_weight"] > 0)
        given = {name: columns[name] for name in self.columns}
        # Where a name is both a column and an output, the current policy's output wins.
        inputs = clean({**given, **{name: outputs[name] for name in self.outputs}}, counted, dtype)
        inputs |= {"response_mask": counted.to(dtype), "cu_seqlens": cu_seqlens}
        mask, current = inputs["response_mask"], inputs["log_probs"]
        inputs.setdefault("old_log_probs", current.detach())
        weight = inputs["loss_weight"] * mask
        token_loss, metrics = self._policy_loss(inputs)
        if "old_log_probs" in self._policy_loss.reads and "actor/ppo_kl" not in metrics:
            metrics = usual_metrics(current, inputs["old_log_probs"], mask, self._bounds) | metrics
        if "rollout_weights" in inputs:
            token_loss = token_loss * inputs["rollout_weights"]
        if self._reject:
            keep, rejected = _judged(inputs, self._reject)
            token_loss = torch.where(keep, token_loss, 0.0)
            metrics |= rejected
        policy_loss = loss = (weight * token_loss).sum()
        if "entropy" in inputs:
            loss = loss - self._entropy_coef * (weight * inputs["entropy"]).sum()
            metrics["actor/entropy"] = ((inputs["entropy"] * mask).sum(), mask.sum())
        for told, (chosen, term) in zip(self._told, self._terms, strict=True):
            values, said = term(inputs)
            factor = chosen.coef if chosen.by is None else chosen.coef * inputs[chosen.by]
            loss = loss + (weight * factor * values).sum()
            metrics |= said
            metrics[told] = ((values * mask).sum(), mask.sum())
        if self._kl is not None and self._estimator is not None:
            made = self._estimator(*(inputs[name] for name in self._estimator_reads))
            divergence = of_each_token(made, self._kl.name, mask)
            coef = inputs["kl_coef"] if self._kl.controller.name == "adaptive" else self._kl.coef
            loss = loss + (weight * coef * divergence).sum()
            metrics["actor/kl_loss"] = ((divergence * mask).sum(), mask.sum())
        if self._has_lm:
            counted = (columns["response_mask"] > 0) & (columns["lm_weight"] > 0)
            lm_loss, metrics["actor/lm_loss"] = _likelihood(outputs, columns, "lm_weight", counted)
            loss = loss + lm_loss
        metrics["actor/policy_loss"] = (policy_loss, weight.sum())
        metrics["actor/loss"] = (loss, weight.sum())
        metrics["actor/entropy_sampled"] = ((-current * mask).sum(), mask.sum())
        metrics |= rollout_gap(inputs["old_log_probs"], inputs["rollout_log_probs"], mask)
        if current.requires_grad and not loss.requires_grad:
            raise TrainError(
                f"algorithm.policy_loss: the loss {self._policy_loss.name!r} has no gradient: make it of "
                "log_probs, without detach() and torch.no_grad()"
            )
        return loss, metrics


def _judged(inputs: Columns, rules: Sequence[RejectionConfig]) -> tuple[Tensor, Metrics]:
    """Returns which tokens all rules accept by the ratio of current policy and sampler: bool [N]; and the
    metrics rollout_correction/rejected_token_share and rejected_row_share.
    """
    counted, cu_seqlens = inputs["response_mask"] > 0, inputs["cu_seqlens"]
    gap = (inputs["log_probs"] - inputs["rollout_log_probs"]).detach().to(torch.float64)
    gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    keep = torch.ones_like(counted)
    for rule in rules:
        keep &= accepted(gap, counted, cu_seqlens, rule)
    rows, num_rows = row_index(cu_seqlens, len(gap)), len(cu_seqlens) - 1
    trained, left = (
        gap.new_zeros(num_rows).index_add(0, rows, tokens.to(gap.dtype)) > 0
        for tokens in (counted, counted & keep)
    )
    return keep, {
        "rollout_correction/rejected_token_share": ((counted & ~keep).sum(), counted.sum()),
        "rollout_correction/rejected_row_share": ((trained & ~left).sum(), trained.sum()),
    }


class CriticLoss:
    """The value loss of `role` (critic or cost_critic), weighted by `<role>_loss_weight`.

    The engine's output `values` is the critic's current estimate; the column `values` (a value loss reads it
    as `old_values`) is the one that the advantages were computed from; a cost critic's columns are
    `cost_values` and `cost_returns`. Picklable. Metrics: <role>/loss and those of the value loss.
    """

    outputs: tuple[str, ...] = ("values",)

    def __init__(self, value_loss: FunctionConfig, role: str = "critic") -> None:
        self._config = value_loss
        self._role = role
        self._value_loss = _TokenLoss("value_loss", value_loss)
        self._weights = LOSS_WEIGHT(role)
        column_of = {"old_values": ROLES[role].makes, "returns": ROLES[role].learns_from or ""}
        made_here = ("values", "cu_seqlens")
        read = [name for name in self._value_loss.reads if name not in made_here]
        self._column_of = {name: column_of.get(name, name) for name in read}
        self.columns: tuple[str, ...] = tuple(
            dict.fromkeys(("response_mask", self._weights, *self._column_of.values()))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CriticLoss, (self._config, self._role)

    def __call__(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> tuple[Tensor, Metrics]:
        """outputs and columns: [N]; cu_seqlens: int32 [B+1] of the responses."""
        dtype = outputs["values"].dtype
        counted = (columns["response_mask"] > 0) & (columns[self._weights] > 0)
        named = {name: columns[column] for name, column in self._column_of.items()}
        inputs = clean(
            {**named, "weight": columns[self._weights], "values": outputs["values"]}, counted, dtype
        )
        inputs |= {"response_mask": counted.to(dtype), "cu_seqlens": cu_seqlens}
        weight = inputs["weight"]
        token_loss, metrics = self._value_loss(inputs)
        loss = (weight * token_loss).sum()
        metrics = {name.replace("critic/", f"{self._role}/", 1): value for name, value in metrics.items()}
        return loss, metrics | {f"{self._role}/loss": (loss, weight.sum())}


class PrmLoss:
    """Cross-entropy of p = σ(β Σ_t m (ℓ - ℓ_ref)) with the outcome: -[o log p + (1-o) log(1-p)], 2502.01456.

    o is 1 where accuracy > 0. The row's value stands on every token of the row, so that with
    `prm_loss_weight` planned as seq-mean-token-mean the loss is the mean over rows. β ℓ-ratios become the
    process rewards r_t = β (ℓ - ℓ_ref). Picklable. Metrics: prm/loss (weighted as the loss), prm/accuracy
    (share of rows with p > ½ exactly where o = 1), prm/reward (mean r_t over trained tokens).
    """

    outputs: tuple[str, ...] = ("log_probs",)
    columns: tuple[str, ...] = ("response_mask", "ref_log_probs", "accuracy", LOSS_WEIGHT("prm"))

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def __call__(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> tuple[Tensor, Metrics]:
        """outputs and columns: [N]; accuracy arrives expanded; cu_seqlens: int32 [B+1] of the responses."""
        log_probs = outputs["log_probs"]
        counted = columns["response_mask"] > 0
        read = {name: columns[name] for name in self.columns if name != "response_mask"}
        inputs = clean({**read, "log_probs": log_probs}, counted, log_probs.dtype)
        weight, mask = inputs[LOSS_WEIGHT("prm")], counted.to(log_probs.dtype)
        reward = self._beta * (inputs["log_probs"] - inputs["ref_log_probs"])
        rows, num_rows = row_index(cu_seqlens, len(reward)), len(cu_seqlens) - 1
        logit = reward.new_zeros(num_rows).index_add(0, rows, reward)[rows]
        right = inputs["accuracy"] > 0
        token_loss = -functional.logsigmoid(torch.where(right, logit, -logit))
        loss = (weight * token_loss).sum()
        lengths = mask.new_zeros(num_rows).index_add(0, rows, mask)
        share_of_row = mask / lengths[rows].clamp(min=1)
        agrees = ((logit > 0) == right).to(mask.dtype)
        metrics: Metrics = {
            "prm/loss": (loss, weight.sum()),
            "prm/accuracy": ((agrees * share_of_row).sum(), share_of_row.sum()),
            "prm/reward": (reward.sum(), mask.sum()),
        }
        return loss, metrics


class SftLoss:
    """Negative log-likelihood of the tokens under the mask, -Σ weight · ℓ. Metric sft/loss: its mean over
    tokens.
    """

    outputs: tuple[str, ...] = ("log_probs",)
    columns: tuple[str, ...] = ("response_mask", "loss_weight")

    def __call__(self, outputs: Columns, columns: Columns, cu_seqlens: Tensor) -> tuple[Tensor, Metrics]:
        """outputs and columns: [N]; cu_seqlens is not needed."""
        loss, mean = _likelihood(outputs, columns, "loss_weight", columns["response_mask"] > 0)
        return loss, {"sft/loss": mean}


def _likelihood(
    outputs: Columns, columns: Columns, weight: str, counted: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns -Σ weight · ℓ and the mean of -ℓ, over the tokens that are counted [N]."""
    log_probs = outputs["log_probs"]
    inputs = clean({"log_probs": log_probs, "weight": columns[weight]}, counted, log_probs.dtype)
    loss = -(inputs["weight"] * inputs["log_probs"]).sum()
    return loss, (-inputs["log_probs"].sum(), counted.to(log_probs.dtype).sum())
