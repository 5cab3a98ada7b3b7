"""The stages of a step: what is done with its rows on the way to the update, all with one signature.

    scored rows ──▶ mini-batches, reward models ──▶ resampling, columns from the roles, advantages,
      correction, preparation of the loss, learners beside the actor, weights of the loss ──▶ update_actor

Which stages a run has, and in which order, is planned once (`plan.py`). Those that make their columns on the
controller fetch what they read; estimators that read per-row numbers only never touch tokens here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms import bind, bind_preparation, columns_read, correct, kl_reward
from rondo.batch import BatchRef
from rondo.columns import SCORE, UPDATE, declared, made_by
from rondo.config import AlgorithmConfig, RewardModelConfig, RolloutCorrectionConfig
from rondo.controller import WorkerGroup
from rondo.errors import ConfigError, DataError, TrainError
from rondo.roles import of_section
from rondo.trainers.program.producers import PRODUCERS, Producer, is_given
from rondo.trainers.program.step import Step, attach, numbers, padded_columns
from rondo.types import StepStats, request_seed
from rondo.workers import RewardModelWorker


@dataclass(frozen=True)
class Production:
    """The columns of one producer, computed by its role."""

    producer: Producer
    phase = "prepare"

    @property
    def writes(self) -> tuple[str, ...]:
        return self.producer.columns

    def describe(self) -> str:
        return f"{', '.join(self.writes)} <- {self.producer.role}.{self.producer.method.__name__}"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        producer = self.producer
        group = step.roles.group(producer.role)
        made: BatchRef = await group.call(producer.method, batch, **producer.options)
        return made


@dataclass(frozen=True)
class RewardModelScores:
    """The score of one of reward.models, and weight times that in the reward."""

    model: RewardModelConfig
    phase = "prepare"

    @property
    def writes(self) -> tuple[str, ...]:
        return SCORE(self.model.name), *declared("reward")

    def describe(self) -> str:
        return f"{', '.join(self.writes)} <- {self.model.name}.compute_reward"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        model = self.model
        scores = await model_scores(step.roles.group(model.name), batch)
        reward = batch.index.scalars("reward") + np.float32(model.weight) * scores
        return batch.with_index({SCORE(model.name): scores, "reward": reward}, replace=True)


# What the advantage stage makes its columns of.
MADE_OF: Mapping[str, tuple[str, ...]] = {
    "token_rewards": declared("reward", "response_mask"),
    "token_costs": declared("response_mask"),  # and the score that algorithm.constraint names
    "scores": (),
    "multiplier": (),
}


class AdvantageStage:
    """reads: what the estimator names. columns: what it (and a KL in the reward) needs from producers.
    writes: what it adds to the batch at least.
    """

    phase = "advantages"

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._name = algorithm.advantage.name
        self._estimator = bind("advantage", algorithm.advantage)
        self.reads: tuple[str, ...] = columns_read(self._estimator)
        self._kl = algorithm.kl if algorithm.kl is not None and algorithm.kl.where == "reward" else None
        cost = algorithm.constraint.cost if algorithm.constraint is not None else None
        if "token_costs" in self.reads and cost is None:
            raise ConfigError(
                f"algorithm.advantage={self._name} reads token_costs: set algorithm.constraint.cost to the "
                "name of the score that is the cost"
            )
        self._cost = SCORE(cost) if cost is not None and "token_costs" in self.reads else None
        needed = [column for name in self.reads for column in MADE_OF.get(name, (name,))]
        needed += [self._cost] if self._cost else []
        needed += ["reward", "response_mask", "old_log_probs", "ref_log_probs"] if self._kl else []
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(needed))
        targets = (role.learns_from for role in of_section("critic") if role.makes in self.reads)
        self.writes: tuple[str, ...] = ("advantages", *filter(None, targets))

    def describe(self) -> str:
        return f"{', '.join(self.writes)} <- controller ({self._name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """The batch with advantages (and returns).

        A row that counts k times (index column sample_weight) counts so in the estimator's mask and number of
        trained tokens. Raises TrainError when the estimator returns something else than it should.
        """
        inputs = await self._inputs(batch, step.kl_coef, step.stats)
        if step.multiplier is not None:
            inputs["multiplier"] = torch.tensor(step.multiplier, dtype=torch.float32)
        counted = inputs["response_mask"] > 0 if "response_mask" in inputs else None
        if "sample_weight" in batch.index.columns:
            weight = numbers(batch.index, "sample_weight").to(torch.float32)
            for name in {"response_mask", "num_trained_tokens"} & set(inputs):
                inputs[name] = inputs[name] * (weight if inputs[name].ndim == 1 else weight[:, None])
        result = self._estimator(**{name: inputs[name] for name in self.reads})
        named = self._named(result, counted)
        _count_advantages(named["advantages"], counted, step.stats)
        return attach(batch, named, step.cluster)

    async def _inputs(self, batch: BatchRef, kl_coef: float, stats: StepStats) -> dict[str, Tensor]:
        """The estimator's arguments by name: per-row [B], per-token [B, T] float32, response_mask [B, T]
        float32.
        """
        in_index = set(self.columns) & set(batch.index.columns)
        inputs = {name: numbers(batch.index, name) for name in in_index}
        per_token = set(self.columns) - in_index
        if per_token:
            inputs |= await padded_columns(batch, {*per_token, "response_mask"})
        if "scores" in self.reads:
            names = SCORE.among(batch.index.columns)
            scores = [numbers(batch.index, name).to(torch.float32) for name in names]
            inputs["scores"] = torch.stack(scores, 1) if scores else torch.empty(len(batch), 0)
        if self._kl is not None or "token_rewards" in self.reads:
            self._reward(inputs, kl_coef, stats)
        if self._cost is not None:
            self._charge(inputs, self._cost, kl_coef)
        return inputs

    def _reward(self, inputs: dict[str, Tensor], kl_coef: float, stats: StepStats) -> None:
        """token_rewards, and the reward with the KL inside."""
        inputs["token_rewards"], kl_stats = self._on_tokens(inputs, inputs["reward"], self._share(kl_coef))
        stats.merge(kl_stats)
        if self._kl is not None:  # a row without trained tokens keeps the reward that it got
            has_tokens = (inputs["response_mask"] > 0).any(1)
            with_kl = inputs["token_rewards"].sum(1)
            inputs["reward"] = torch.where(has_tokens, with_kl, inputs["reward"])

    def _charge(self, inputs: dict[str, Tensor], cost: str, kl_coef: float) -> None:
        """token_costs: the cost on the last trained token, plus half of the KL (Safe-RLHF, 2310.12773)."""
        if bool(inputs[cost].isnan().any()):
            raise DataError(f"{cost}, the cost of algorithm.constraint, is missing in some rows of the batch")
        inputs["token_costs"], _ = self._on_tokens(inputs, inputs[cost], -self._share(kl_coef))

    def _share(self, kl_coef: float) -> float:
        return kl_coef / 2 if self._cost is not None else kl_coef

    def _on_tokens(
        self, inputs: Mapping[str, Tensor], outcome: Tensor, coef: float
    ) -> tuple[Tensor, StepStats]:
        return kl_reward(
            outcome,
            inputs["response_mask"],
            inputs.get("old_log_probs"),
            inputs.get("ref_log_probs"),
            estimator=self._kl.name if self._kl else None,
            coef=coef,
        )

    def _named(self, result: Any, counted: Tensor | None) -> dict[str, Tensor]:
        """The columns that the estimator returned, 0 where the mask is 0."""
        if isinstance(result, Mapping):
            named = dict(result)
        elif isinstance(result, tuple):
            named = dict(zip(("advantages", "returns"), result, strict=True))
        else:
            named = {"advantages": result}
        missing = sorted(set(self.writes) - set(named))
        if missing:
            raise TrainError(
                f"the estimator {self._name!r} must return {missing[0]}; it returned {sorted(named)}"
            )
        return {
            name: torch.where(counted, value, 0.0) if counted is not None and value.ndim == 2 else value
            for name, value in named.items()
        }


def _count_advantages(advantages: Tensor, counted: Tensor | None, stats: StepStats) -> None:
    values = advantages if counted is None or advantages.ndim == 1 else advantages[counted]
    if values.numel():
        stats.add_mean("actor/advantage", float(values.sum()), values.numel())
        stats.add_mean("actor/advantage_abs", float(values.abs().sum()), values.numel())
        stats.add_max("actor/advantage_max", float(values.max()))
        stats.add_min("actor/advantage_min", float(values.min()))
    rows = advantages if advantages.ndim == 1 else advantages.abs().sum(dim=1)
    stats.add_mean("actor/zero_advantage_share", float((rows == 0).sum()), max(len(rows), 1))


class CorrectionStage:
    """Importance weights and rejection for what the rollout policy sampled (mode decoupled; bypass takes the
    sampler's policy for π_old, and leaves nothing to correct).

    mask_truncated: as algorithm.mask_truncated; truncated rows weigh nothing in the loss, so they are in no
    mean here and stay as they are. columns: what it reads. writes: the columns that it adds. said: what it
    does, and why (`describe_correction`).
    """

    phase = "advantages"
    columns: tuple[str, ...] = ("old_log_probs", "rollout_log_probs", "response_mask")

    def __init__(
        self, config: RolloutCorrectionConfig, *, mask_truncated: bool = False, said: str = ""
    ) -> None:
        self._config, self._mask_truncated, self._said = config, mask_truncated, said
        self.writes: tuple[str, ...] = ("rollout_weights",) if config.importance is not None else ()

    def describe(self) -> str:
        return f"{', '.join((*self.writes, 'response_mask'))} <- {self._said}"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """The batch with `rollout_weights` (where importance is set); where something is rejected, with a
        smaller `response_mask` and its `num_trained_tokens`, so that loss weights count what is left (D15,
        D16).
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
            batch = attach(batch, {"rollout_weights": correction.weights[firsts]}, step.cluster)
        rejected = (correction.mask[firsts] == 0) & (counted > 0)
        if bool(rejected.any()):
            left = (mask > 0) & ~rejected
            new = {"response_mask": left.to(torch.uint8), "num_trained_tokens": left.sum(1).to(torch.int32)}
            batch = attach(batch, new, step.cluster, replace=True)
        step.stats.merge(correction.stats)
        return batch


def _as_often_as_drawn(batch: BatchRef) -> tuple[torch.Tensor, torch.Tensor]:
    """A row that was drawn k times (column sample_weight) stands k times in the first: positions in `batch`.
    The second: positions in the first, of each row's first copy.
    """
    counts = np.ones(len(batch), np.int64)
    if "sample_weight" in batch.index.columns:
        counts = batch.index.scalars("sample_weight").astype(np.int64)
    rows = np.repeat(np.arange(len(batch)), counts)
    return torch.from_numpy(rows), torch.from_numpy(np.cumsum(counts) - counts)


class PreparationStage:
    """The mini-batch statistics of a policy loss that has a `prepare` (Clip-Cov's selection, …).

    columns: what `prepare` reads. writes: what the loss reads and nothing else makes, so that `prepare` must.
    """

    phase = "advantages"

    def __init__(self, algorithm: AlgorithmConfig, prepare: Callable[..., Any]) -> None:
        self._name, self._prepare = algorithm.policy_loss.name, prepare
        self._mask_truncated = algorithm.mask_truncated
        self._takes_seed = "seed" in inspect.signature(prepare).parameters
        self.columns: tuple[str, ...] = tuple(name for name in columns_read(prepare) if name != "seed")
        elsewhere = {*made_by(UPDATE), *(name for producer in PRODUCERS for name in producer.columns)}
        read = columns_read(bind("policy_loss", algorithm.policy_loss))
        self.writes: tuple[str, ...] = tuple(n for n in read if n not in elsewhere and not is_given(n))

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> PreparationStage | None:
        """The stage of the configured policy loss, None where it needs none."""
        prepare = bind_preparation(algorithm.policy_loss)
        return None if prepare is None else cls(algorithm, prepare)

    def describe(self) -> str:
        return f"{', '.join(self.writes)} <- controller, per mini-batch ({self._name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """The batch with what `prepare` makes of each mini-batch (index column `mini_batch`).

        Raises TrainError when `prepare` returns another shape, or not what the loss reads.
        """
        seed = request_seed(step.seed, "prepare", step.number)
        inputs = await self._inputs(batch)
        mini_batch = batch.index.scalars("mini_batch")
        made: dict[str, Tensor] = {}
        for number in np.unique(mini_batch):
            rows = torch.from_numpy(np.flatnonzero(mini_batch == number))
            given = {name: inputs[name][rows] for name in self.columns}
            option = {"seed": request_seed(seed, "prepare", int(number))} if self._takes_seed else {}
            for name, column in self._prepare(**given, **option).items():
                whole = made.setdefault(name, column.new_zeros(inputs["response_mask"].shape))
                if column.shape != (len(rows), whole.shape[1]):
                    raise TrainError(
                        f"the preparation of the policy loss {self._name!r} made {name!r} of shape "
                        f"{list(column.shape)}; it must be {[len(rows), whole.shape[1]]}, as response_mask"
                    )
                whole[rows] = column
        missing = sorted(set(self.writes) - set(made))
        if missing:
            raise TrainError(
                f"the policy loss {self._name!r} reads {missing[0]!r}, which its preparation did not make; "
                f"it made {sorted(made)}"
            )
        return attach(batch, made, step.cluster)

    async def _inputs(self, batch: BatchRef) -> dict[str, Tensor]:
        """Every column [B, T], 0 where a token carries no loss; per-row columns are repeated over the row."""
        in_index = [name for name in self.columns if name in batch.index.columns]
        inputs = await padded_columns(batch, {*self.columns, "response_mask"} - set(in_index))
        counted = inputs["response_mask"] > 0
        if self._mask_truncated:
            counted &= torch.from_numpy(batch.index.scalars("finish_reason") != "length")[:, None]
        inputs |= {name: numbers(batch.index, name)[:, None].expand_as(counted) for name in in_index}
        return {name: torch.where(counted, column, 0) for name, column in inputs.items()}


async def model_scores(group: WorkerGroup, batch: BatchRef) -> np.ndarray:
    """float32 [B]. group: of a RewardModelWorker, its role the model's name. Raises TrainError for a score
    that is not finite: the model's fault, or a row without a response token, which is a failure of the
    rollout and not to be scored.
    """
    column = SCORE(group.role)
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


def with_scores_of(everything: BatchRef, scored: BatchRef) -> BatchRef:
    """everything with the reward and the models' scores of `scored`, some of its rows in the same order; the
    others, failures, have NaN.
    """
    names = [name for name in SCORE.among(scored.index.columns) if name not in everything.columns]
    if not names:
        return everything
    at = np.flatnonzero(np.isin(everything.row_ids, scored.row_ids))
    columns = {name: np.full(len(everything), np.nan, np.float32) for name in ("reward", *names)}
    for name, column in columns.items():
        column[at] = scored.index.scalars(name)
    return everything.with_index(columns, replace=True)
