"""The stages of a step beside mini-batches, advantages and weights of the loss: what is done with its rows on
the way to the update, all with one signature.

    scored rows ──▶ mini-batches, reward models ──▶ resampling, columns from the roles, advantages,
      correction, preparation of the loss, learners beside the actor, weights of the loss ──▶ update_actor

Which stages a run has, and in which order, is planned once (`plan.py`). Those that make their columns on the
controller fetch what they read; estimators that read per-row numbers only never touch tokens here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rondo.algorithms import bind, bind_preparation, columns_read, draw, mean_weight, with_sample_size
from rondo.config import AlgorithmConfig, Config, FunctionConfig, RewardModelConfig, RolloutCorrectionConfig
from rondo.controller import WorkerGroup
from rondo.core.batch import ROW_ID, Batch, BatchRef
from rondo.core.columns import IMAGES, MIXING, SCORE, UPDATE, declared, made_by
from rondo.core.errors import TrainError
from rondo.core.images import ImageRef, grey, images_as_text
from rondo.core.types import StepStats, request_seed
from rondo.data import firsts, is_cut_off, lasts, trajectory_of_rows
from rondo.models.family import record_of
from rondo.trainers.program.producers import PRODUCERS, Producer, is_given
from rondo.trainers.program.step import Step, attach, check_one_row_each, numbers, padded_columns
from rondo.workers import ActorWorker, RewardModelWorker
from rondo.workers.estimating import CORRECTED, TIMES, RowNumbers


@dataclass(frozen=True)
class Production:
    """The columns of one producer, computed by its role."""

    producer: Producer
    """Which columns, and who computes them."""
    phase = "prepare"

    @property
    def writes(self) -> tuple[str, ...]:
        return self.producer.columns

    def describe(self) -> str:
        whose = "|".join(self.producer.roles)
        return f"{', '.join(self.writes)} <- {whose}.{self.producer.method.__name__}"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        producer = self.producer
        if not producer.by_source:
            return await self._made_by(producer.role, batch, step)
        sources = batch.index.array("source").to_pylist()
        of_row = np.array([producer.by_source.get(source, producer.role) for source in sources])
        if not producer.for_others and (of_row == producer.role).any():
            source = sources[int(np.argmax(of_row == producer.role))]
            raise TrainError(
                f"rows of the source {source!r} have no teacher: name one in teacher.by_source, or set "
                "teacher.path, which is that of all others"
            )
        # In this order, one after the other: they may be on the same devices.
        places = [np.flatnonzero(of_row == role) for role in producer.roles]
        parts = [
            await self._made_by(role, batch.take(rows), step)
            for role, rows in zip(producer.roles, places, strict=True)
            if len(rows)
        ]
        return BatchRef.concat(parts).take(np.argsort(np.concatenate(places)))

    async def _made_by(self, role: str, batch: BatchRef, step: Step) -> BatchRef:
        producer = self.producer
        made: BatchRef = await step.roles.group(role).call(producer.method, batch, **producer.options)
        return made


@dataclass(frozen=True)
class RewardModelScores:
    """The score of one of reward.models, and weight times that in the reward. Of a trajectory with several
    rows it reads the last one.
    """

    model: RewardModelConfig
    """Its entry in reward.models."""
    phase = "prepare"

    @property
    def writes(self) -> tuple[str, ...]:
        return SCORE(self.model.name), *declared("reward")

    def describe(self) -> str:
        return f"{', '.join(self.writes)} <- {self.model.name}.compute_reward"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        model = self.model
        # Only the last row of a trajectory ends with its answer.
        scores = await model_scores(step.roles.group(model.name), batch.take(lasts(batch.index)))
        scores = scores[trajectory_of_rows(batch.index)]
        reward = batch.index.scalars("reward") + np.float32(model.weight) * scores
        return batch.with_index({SCORE(model.name): scores, "reward": reward}, replace=True)


@dataclass(frozen=True)
class Selection:
    """Which answers of a step are trained on: by algorithm.select, which sees all of them, each once. The
    others are gone, before any statistic is taken.
    """

    chosen: FunctionConfig
    """algorithm.select."""
    phase = "prepare"
    writes = declared("selected")

    def describe(self) -> str:
        return f"some of the answers <- controller (algorithm.select={self.chosen.name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """Raises TrainError where the function says something else than yes or no of each answer, or no of
        all.
        """
        function, first = bind("select", self.chosen), firsts(batch.index)
        index = batch.index.take(first)
        read = {name: name if name in index.columns else SCORE(name) for name in columns_read(function)}
        kept = function(**{name: numbers(index, column) for name, column in read.items()})
        who = f"algorithm.select={self.chosen.name}"
        if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool or kept.shape != (len(first),):
            raise TrainError(f"{who} must return a bool for each of {len(first)} answers: bool [B]")
        if not bool(kept.any()):
            raise TrainError(f"{who} keeps none of {len(first)} answers, and there is nothing to train on")
        step.stats.add_mean("buffer/selected_share", float(kept.sum()), len(first))
        rows = kept.numpy()[trajectory_of_rows(batch.index)]
        return batch.with_index({"selected": np.ones(len(batch), np.uint8)}).take(np.flatnonzero(rows))


@dataclass(frozen=True)
class Resampling:
    """How often each sample of a prompt counts (column sample_weight), drawn by algorithm.resample from the
    step's seed; rows that were not drawn are gone, before any statistic is taken.
    """

    chosen: FunctionConfig
    """algorithm.resample."""
    phase = "prepare"
    writes = declared("sample_weight")

    def describe(self) -> str:
        return f"sample_weight <- controller (algorithm.resample={self.chosen.name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        check_one_row_each(batch, f"algorithm.resample={self.chosen.name}")
        function = bind("resample", self.chosen)
        probabilities = function(**{name: numbers(batch.index, name) for name in columns_read(function)})
        seed = request_seed(step.seed, "resample", step.number)
        # The step's number in the seed, and no generator that lives on: a resumed run draws the same.
        counts = draw(probabilities, numbers(batch.index, "group_id"), seed=seed).numpy()
        return batch.with_index({"sample_weight": counts.astype(np.float32)}).take(np.flatnonzero(counts))


class SeesImages:
    """Stops a run in its first step whose policy is blind: of a few rows each image is swapped with another
    row's of the same grid (a grey one where there is none), and no log-prob of an answer's tokens changes by
    more than ten times what sampler and trainer differ by, nor by 1e-3.
    """

    phase = "prepare"
    writes: tuple[str, ...] = ()
    rows, times, least = 8, 10.0, 1e-3
    _reads = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", IMAGES)

    def __init__(self, config: Config) -> None:
        self._model = config.model

    @property
    def applies(self) -> bool:
        """Says whether the model may read images: a family that does, or one that is not looked at here."""
        if not self._model.images.check_seen:
            return False
        return self._model.config is None or self._is_known_to_see

    @property
    def _is_known_to_see(self) -> bool:
        made = self._model.config or {}
        return record_of(str(made.get("model_type"))).images is not None

    def describe(self) -> str:
        """Says nothing of a model that is not known here: a folder's, or one that a warm start makes."""
        said = f"in the first step: log-probs of {self.rows} answers depend on their images <- actor"
        return said if self._is_known_to_see else ""

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        if step.number == 0 and {IMAGES, "rollout_log_probs"} <= set(batch.columns):
            shown = (await batch.fetch([IMAGES])).scalars(IMAGES)
            answered = batch.index.scalars("num_trained_tokens") > 0
            chosen = np.flatnonzero((shown != "") & answered)[: self.rows]
            if len(chosen):
                await self._check(await batch.take(chosen).fetch(self._reads), step)
        return batch

    async def _check(self, rows: Batch, step: Step) -> None:
        images = rows.images()
        swapped = rows.with_columns({IMAGES: list(map(images_as_text, _swapped(images)))}, replace=True)
        both = [
            one.with_columns({ROW_ID: np.arange(len(rows)) + len(rows) * i}, replace=True)
            for i, one in enumerate((rows, swapped))
        ]
        asked = step.cluster.put(Batch.concat(both))
        made = await step.roles.actor.call(ActorWorker.compute_log_prob, asked)
        found = (await made.fetch(["old_log_probs"])).rows("old_log_probs")
        mask = np.concatenate(rows.rows("response_mask")) > 0
        seen, unseen = (np.concatenate(part)[mask] for part in (found[: len(rows)], found[len(rows) :]))
        gap = float(np.abs(np.concatenate(rows.rows("rollout_log_probs"))[mask] - seen).max())
        change, least = float(np.abs(unseen - seen).max()), max(self.times * gap, self.least)
        step.stats.add_max("images/seen", change)
        if not change > least:
            raise TrainError(
                f"the policy is blind: with other images in {len(rows)} rows no log-prob of an answer's "
                f"tokens changes by more than {change:.3g} (seen: more than {least:.3g}). Its tower may have "
                "other weights than its language model, or was never trained to see; if it is to learn that "
                "from here, set model.images.check_seen=false"
            )


def _swapped(images: Sequence[Sequence[ImageRef]]) -> list[list[ImageRef]]:
    """Returns the images of rows with others in their place, of the same grids: the next row's that are not
    the same, or grey ones.
    """
    everything = [image for own in images for image in own]

    def other(image: ImageRef) -> ImageRef:
        alike = (one for one in everything if one.grid == image.grid and one.sha256 != image.sha256)
        return replace(next(alike, grey(image)), turn=image.turn)

    return [[other(image) for image in own] for own in images]


class CorrectionStage:
    """Importance weights and rejection for what the rollout policy sampled (mode decoupled; bypass takes the
    sampler's policy for π_old, and leaves nothing to correct). The actor's workers make them, each of its
    rows; a mean weight that all rows have a part in is theirs in a first call, a line of numbers per row.

    mask_truncated: as algorithm.mask_truncated; truncated rows weigh nothing in the loss, so they are in no
    mean here and stay as they are. columns: what it reads. writes: the columns that it adds. said: what it
    does, and why (`describe_correction`).
    """

    phase = "advantages"
    columns: tuple[str, ...] = CORRECTED

    def __init__(
        self, config: RolloutCorrectionConfig, *, mask_truncated: bool = False, said: str = ""
    ) -> None:
        self._config = config
        self._mask_truncated = mask_truncated
        self._said = said
        self.writes: tuple[str, ...] = ("rollout_weights",) if config.importance is not None else ()

    def describe(self) -> str:
        return f"{', '.join((*self.writes, 'response_mask'))} <- {self._said}"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """Returns the batch with `rollout_weights` (where importance is set); where something is rejected,
        with a smaller `response_mask` and its `num_trained_tokens`, so that loss weights count what is left
        (D15, D16).
        """
        actor, config, given, columns = step.roles.actor, self._config, batch, self.columns
        times = self._times(batch)
        if times is not None:
            given, columns = batch.with_index({TIMES: times}), (*columns, TIMES)
        mean = 1.0
        if config.importance is not None and config.importance.normalize:
            sums = await actor.call(ActorWorker.weigh_rollouts, given, config, reads=columns)
            # Summed here, in the order of the index: floats added in another order differ in the last bits,
            # and ranks may change.
            mean = mean_weight(torch.from_numpy(RowNumbers.in_order(sums, batch.index.scalars(ROW_ID))))
        said = await actor.call(ActorWorker.correct_rollouts, given, config, mean, reads=columns)
        if isinstance(said, tuple):
            grown, said = said
            batch = grown.without(TIMES)
        if config.reject:
            left = RowNumbers.in_order([one.num_trained_tokens for one in said], batch.index.scalars(ROW_ID))
            batch = batch.with_index({"num_trained_tokens": left[:, 0]}, replace=True)
        step.stats.merge(with_sample_size(StepStats().merge(*(one.stats for one in said))))
        return batch

    def _times(self, batch: BatchRef) -> np.ndarray | None:
        """Returns how often each row counts: as often as it was drawn (column sample_weight), and not at all
        where it was cut off and weighs nothing. None where each counts once.
        """
        drawn = "sample_weight" in batch.index.columns
        if not drawn and not self._mask_truncated:
            return None
        times = batch.index.scalars("sample_weight") if drawn else np.ones(len(batch))
        times = times.astype(np.float64)
        return np.where(is_cut_off(batch.index), 0.0, times) if self._mask_truncated else times


class PreparationStage:
    """The mini-batch statistics of a policy loss that has a `prepare` (Clip-Cov's selection, …).

    columns: what `prepare` reads of the batch. writes: what the loss reads and nothing else makes, so that
    `prepare` must. at_every_step: it reads log_probs, the current policy's, and so belongs before each
    optimizer step; the batch then has them in `log_probs`, or, before the first, in `old_log_probs`.
    """

    phase = "advantages"

    def __init__(self, algorithm: AlgorithmConfig, prepare: Callable[..., Any]) -> None:
        self._name = algorithm.policy_loss.name
        self._prepare = prepare
        read = columns_read(prepare)
        self._takes_seed = "seed" in read
        self._reads = tuple(name for name in read if name != "seed")
        self.at_every_step = "log_probs" in read
        self.columns: tuple[str, ...] = tuple(name for name in self._reads if name != "log_probs")
        elsewhere = {*made_by(UPDATE, MIXING), *algorithm.coefficients}
        elsewhere |= {name for producer in PRODUCERS for name in producer.columns}
        # What the loss reads, and nothing else makes, is left for `prepare`.
        wanted = columns_read(bind("policy_loss", algorithm.policy_loss))
        self.writes: tuple[str, ...] = tuple(n for n in wanted if n not in elsewhere and not is_given(n))

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> PreparationStage | None:
        """Returns the stage of the configured policy loss, None where it needs none."""
        prepare = bind_preparation(algorithm.policy_loss)
        return None if prepare is None else cls(algorithm, prepare)

    def describe(self) -> str:
        when = "per mini-batch, before each optimizer step" if self.at_every_step else "per mini-batch"
        return f"{', '.join(self.writes)} <- controller, {when} ({self._name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """Returns the batch with what `prepare` makes of each mini-batch (index column `mini_batch`).

        Raises TrainError when `prepare` returns another shape, or not what the loss reads.
        """
        if "group_id" in self._reads:
            check_one_row_each(batch, f"the preparation of the policy loss {self._name}")
        seed = request_seed(step.seed, "prepare", step.number)
        inputs = await self._inputs(batch)
        mini_batch = batch.index.scalars("mini_batch")
        made: dict[str, torch.Tensor] = {}
        for number in np.unique(mini_batch):
            rows = torch.from_numpy(np.flatnonzero(mini_batch == number))
            given = {name: inputs[name][rows] for name in self._reads}
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

    async def _inputs(self, batch: BatchRef) -> dict[str, torch.Tensor]:
        """Returns every column [B, T], 0 where a token carries no loss; per-row columns are repeated over the
        row.
        """
        in_index = [name for name in self.columns if name in batch.index.columns]
        per_token = {*self.columns, "response_mask"} - set(in_index)
        current = "log_probs" if "log_probs" in batch.columns else "old_log_probs"
        inputs = await padded_columns(batch, per_token | ({current} if self.at_every_step else set()))
        if self.at_every_step:
            inputs["log_probs"] = inputs[current]
        counted = inputs["response_mask"] > 0
        counted &= torch.from_numpy(batch.index.scalars("loss_weight") > 0)[:, None]
        inputs |= {name: numbers(batch.index, name)[:, None].expand_as(counted) for name in in_index}
        return {name: torch.where(counted, column, 0) for name, column in inputs.items()}


def columns_of_loss(algorithm: AlgorithmConfig) -> set[str]:
    """Returns what the actor's loss is made of: what policy loss, its preparation, and terms read."""
    functions = [bind("policy_loss", algorithm.policy_loss), bind_preparation(algorithm.policy_loss)]
    functions += [bind("term", term, key="algorithm.terms") for term in algorithm.terms]
    return {name for function in functions if function is not None for name in columns_read(function)}


async def model_scores(group: WorkerGroup, batch: BatchRef) -> np.ndarray:
    """Returns scores, float32 [B]. group: of a RewardModelWorker, its role the model's name. Raises
    TrainError for a score that is not finite: the model's fault, or a row without a response token, which is
    a failure of the rollout and not to be scored.
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
