"""The roles of a hand-written program, with the paper's verbs. Each handle wraps a worker group; what a call
needs besides the batch (mini-batches, loss weights, seeds) is planned by the stages of the built-in loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rondo.algorithms import ActorLoss
from rondo.config import Config, FunctionConfig, RewardModelConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import ROW_ID, BatchRef
from rondo.core.columns import SCORE
from rondo.core.errors import ConfigError, DataError, TrainError
from rondo.core.types import Prompt, SamplingParams, StepStats
from rondo.rewards import score_names
from rondo.trainers.commands.check import check_token_budget
from rondo.trainers.commands.check_machine import check_names
from rondo.trainers.loop import At, Checkpoints, EngineSide, OtherPolicy, RLRun, ServedPolicy
from rondo.trainers.program import (
    ActorWeights,
    Learner,
    LearnerUpdate,
    MiniBatches,
    PreparationStage,
    Pretraining,
    RewardModelScores,
    Roles,
    Schedule,
    SeesImages,
    as_policy,
    columns_of_hooks,
    corrected,
    create_model,
    create_rollout,
    model_scores,
    update_actor,
)
from rondo.trainers.program.step import IDLE
from rondo.trainers.sessions.programmed import ProgrammedRun
from rondo.workers import ActorWorker, CriticWorker, ModelWorker, ReferenceWorker, TeacherWorker

Function = str | Callable[..., Any]
POLICY, ON_POLICY = "policy", "on_policy"


def actor_losses(config: Config) -> dict[str, ActorLoss]:
    """Returns the loss that reads `old_log_probs`, and the one that takes them from the update's forward."""
    needs_all = config.actor.router.balances
    return {
        name: ActorLoss(config.algorithm, on_policy=name == ON_POLICY, needs_all=needs_all)
        for name in (POLICY, ON_POLICY)
    }


class Actor:
    """The policy: a training engine and the generation engines that serve its weights."""

    def __init__(self, program: ProgrammedRun, policy: ServedPolicy, schedule: Schedule) -> None:
        """policy: its configuration has the program's policy loss, and what rollout_correction became."""
        self.model = policy.roles.actor
        self.rollout = policy.roles.engines
        self._program = program
        self._policy = policy
        self._config = config = policy.config
        self._losses = actor_losses(config)
        self._preparation = PreparationStage.of(config.algorithm)
        self._sees_images = SeesImages(config)
        self._schedule = schedule
        self._num_steps: int | None = None  # optimizer steps; those before a resume as they were planned

    async def generate_sequences(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int | None = None,
        do_sample: bool = True,
        temperature: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> BatchRef:
        """Returns n responses (default rollout.n) to each prompt, scored by reward.functions; or its one
        greedy response with do_sample=False. Rows whose episode or score failed are gone (see
        reward.on_error); RewardError when they are more than reward.max_dropped_share.

        Rows are in the order of `prompts`, the samples of a prompt next to each other. The noise of a sample
        depends on seed, prompt and sample index alone, so a prompt that was sampled under these weights
        before is a TrainError: `session.prompt` makes another of it. What `session.prompts()` yields was
        generated while the program was busy (trainer.max_staleness); other prompts, or another n, are
        generated here and now.

        temperature, max_tokens, stop: in place of rollout.…, for this call; a prompt and its response fit
        into data.max_prompt_tokens + rollout.max_tokens. Rows of another temperature are another policy's
        samples: update_actor takes them where algorithm.rollout_correction corrects for that.
        """
        program, rollout = self._program, self._config.rollout
        if not do_sample and (n not in (None, 1) or temperature is not None):
            raise ConfigError(
                "generate_sequences(…, do_sample=False) is one greedy response: leave out n and temperature"
            )
        if do_sample:
            sampling = self._sampling(prompts, n, temperature, max_tokens, stop)
            if self._policy is program.run and n in (None, rollout.n) and sampling == program.data.sampling:
                ready = program.of_stream(prompts)
                if ready is not None:
                    return ready
            program.check_published(self._policy, "generate_sequences")
            number = rollout.n if n is None else n
            return await program.answers(program.ask(self._policy, prompts, sampling, number))
        program.check_published(self._policy, "generate_sequences")
        sampling = program.sampling(temperature=0.0, max_tokens=max_tokens, stop=stop)
        program.check_fits(prompts, sampling)
        return await program.answers(program.ask(self._policy, prompts, sampling, 1, greedy=True))

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> None:
        """Asks as `generate_sequences` does, and does not wait: the engines answer while the program goes on,
        and, with trainer.max_staleness=k, up to k steps beyond this one, while the policy learns.
        trainer.on_update says what becomes of answers in flight when the weights change. What was asked is
        part of a checkpoint; `answers` hands it over. Raises CheckpointError for prompts that a checkpoint
        cannot give back as they are: their fields take what `session.state` takes.
        """
        self._program.check_kept(prompts)
        sampling = self._sampling(prompts, n, temperature, max_tokens, stop)
        self._program.check_published(self._policy, "ask")
        number = self._config.rollout.n if n is None else n
        self._program.ahead.append(self._program.ask(self._policy, prompts, sampling, number))

    async def answers(self) -> BatchRef:
        """Waits for the answers to what `ask` was given first, and was not handed over yet; returns their
        rows as `generate_sequences` does. Raises TrainError where they are more than trainer.max_staleness
        versions old, or nothing was asked.
        """
        return await self._program.next_answers(self._policy)

    async def branch(
        self,
        batch: BatchRef,
        at: At,
        *,
        n: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> BatchRef:
        """Returns n responses from each place in others, scored by reward.functions. at: for each row of
        `batch` a place in its response, or several: so many tokens of it are kept (0: none). The rows are in
        this order, the samples of a place next to each other; those whose score failed are gone.

        A branch is a row of its parent's prompt, in its group. Its response begins with the parent's tokens,
        with the log-probs and versions recorded there; max_tokens (as all else: of rollout.…) counts the
        whole. Columns: parent_id, the parent's row_id, and fork, the place. Functions that score whole groups
        see the branches of a prompt of this call. Asking twice gives other samples.

        An episode in rollout.environments branches where the policy sampled, such as where a turn of its
        begins (`batch`: all rows of it): what it did before is done again in a new environment, or that is
        put into the state (restore). Rows before the place are the parent's, with fork the whole response;
        one behind it goes on from the episode's row before (parent_id) with fork 0.

        Branches are of the policy that is served, here and now. Raises ConfigError for other episodes,
        DataError for a place at which nothing is to be sampled, as the response has ended there, and
        WorkerError, which names environment and turn, where an episode is not played again token for token.
        """
        sampling = self._of_branches(n, temperature, max_tokens, stop)
        return await self._program.branches(self._policy, batch, at, sampling, n)

    async def branch_values(
        self,
        batch: BatchRef,
        at: At,
        *,
        n: int,
        most: int | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> BatchRef:
        """Adds branch_values: at each place the mean reward of n branches from there (see `branch`), NaN at
        other tokens. most: so many places of a row are valued, the first ones. A later one, and one of which
        no branch was scored, is worth what the next one is; the last one, the row's own reward.
        """
        sampling = self._of_branches(n, temperature, max_tokens, stop)
        return await self._program.branch_values(self._policy, batch, at, sampling, n, most)

    def _of_branches(
        self, n: int, temperature: float | None, max_tokens: int | None, stop: Sequence[str] | None
    ) -> SamplingParams:
        if n < 1 or (temperature == 0 and n > 1):
            raise ConfigError(
                f"asked for {n} branches at temperature={temperature}: 1 at least, and 1 greedy"
            )
        self._program.check_published(self._policy, "branch")
        return self._program.sampling(temperature=temperature, max_tokens=max_tokens, stop=stop)

    @property
    def asked(self) -> int:
        """Counts the calls of `ask` whose answers were not handed over yet, those before a resume too."""
        return sum(question.policy is self._policy for question in self._program.ahead)

    def _sampling(
        self,
        prompts: Sequence[Prompt],
        n: int | None,
        temperature: float | None,
        max_tokens: int | None,
        stop: Sequence[str] | None,
    ) -> SamplingParams:
        """Returns how to sample these prompts, which are noted as asked."""
        if not prompts or (n is not None and n < 1):
            asked = "rollout.n" if n is None else n
            raise DataError(
                f"asked for {asked} answers to each of {len(prompts)} prompts: one at least of both"
            )
        if temperature == 0:
            raise ConfigError("temperature=0 is generate_sequences(…, do_sample=False)")
        sampling = self._program.sampling(temperature=temperature, max_tokens=max_tokens, stop=stop)
        self._program.check_fits(prompts, sampling)
        self._program.check_asked_once(prompts)
        return sampling

    async def compute_log_prob(self, batch: BatchRef, *, also: tuple[str, ...] = ()) -> BatchRef:
        """Adds old_log_probs, of the response tokens under the policy as it is now: float32 per token. also:
        entropy (nats), sum_p_squared, under their own names.
        """
        with self._program.run.clock.phase("log_prob"):
            return await self.model.call(ActorWorker.compute_log_prob, batch, also=also)  # type: ignore[no-any-return]

    async def update_actor(
        self, batch: BatchRef, *, mini_batches: int | None = None, pretrain: Pretraining | None = None
    ) -> StepStats:
        """Takes all optimizer steps of one trainer step (actor.epochs × mini-batches). The new weights are
        served as the next version when the step ends; outside of the session's loop, at once. pretrain:
        conversations whose language-model loss joins every mini-batch.

        mini_batches: into how many the batch is cut, by prompt groups. Default: groups of
        actor.mini_batch_size; where that is null, the whole batch is one, however large it is. The schedule
        of the learning rate counts the optimizer steps that the recipe plans.

        Reads advantages and what the policy loss names. Without old_log_probs they are the current ones,
        detached; that is exact, and allowed, where one optimizer step follows on rows of the current version.
        Returns the metrics of the update. Raises TrainError where that would be wrong, and for rows of
        another sampler that nothing corrects for; DataError for a column that is not there.
        """
        program, run, config = self._program, self._program.run, self._config
        if (pretrain is None) != (config.algorithm.pretrain_coef == 0):
            raise ConfigError(
                "algorithm.pretrain_coef and update_actor(…, pretrain=…) belong together: set both, or none"
            )
        self._check_corrected(batch)
        prepared = self._preparation.columns if self._preparation is not None else ()
        program.check_said(batch, (*self._losses[POLICY].reads, *prepared), "update_actor: the loss")
        step = replace(program.step, stats=StepStats())
        batch = await MiniBatches(config, (), mini_batches)(batch, step)
        which = self._which_loss(batch)
        batch = await ActorWeights(config)(batch, step)
        preparation = self._preparation
        if preparation is not None and not preparation.at_every_step:
            batch, preparation = await preparation(batch, step), None
        await self._policy.let_engines_rest()
        await self._policy.weights.hold(if_shared=True)
        if self._sees_images.applies:
            await self._sees_images(batch, replace(step, roles=self._policy.roles))
        with run.clock.phase("write_rollouts"):
            await program.reporter.records.columns(step.number + 1, batch, self.model)
        with run.clock.phase("update_actor"):
            stats = await update_actor(
                self.model,
                batch,
                self._losses[which],
                config.actor.epochs,
                step,
                pretraining=pretrain,
                preparation=preparation,
                name=which,
            )
        taken = config.actor.epochs * len(np.unique(batch.index.scalars("mini_batch")))
        self._count_steps(taken - int(stats.sums[IDLE]), step.number)
        await program.updated(self._policy)
        return self._policy.told(step.stats.merge(stats))

    def _count_steps(self, taken: int, step: int) -> None:
        """Counts the optimizer steps that an update has taken, and warns once when a falling learning rate is
        at its end before the run is.
        """
        schedule, planned = self._config.actor.optimizer.schedule, self._schedule.optimizer_steps["actor"]
        before = self._num_steps
        if before is None:
            before = planned * step // self._schedule.total_steps
        self._num_steps = before + taken
        if schedule.name != "constant" and before <= planned < self._num_steps:
            self._program.reporter.warn(
                f"{self._policy.name}: the program has taken {self._num_steps} optimizer steps, and the "
                f"recipe plans {planned} for the whole run (actor.mini_batch_size, actor.epochs): the "
                f"learning rate stays at {schedule.min_ratio:g} of actor.optimizer.lr from here on; set "
                "actor.mini_batch_size or actor.epochs to what the program does, or the schedule to constant"
            )

    def _check_corrected(self, batch: BatchRef) -> None:
        correction = self._config.algorithm.rollout_correction
        if correction is None or not (correction.importance or correction.reject):
            self._check_sampler(batch)
            return
        if correction.importance:
            corrected = "rollout_weights" in batch.columns
        else:
            corrected = self._program.corrected
        if not corrected:
            raise TrainError(
                "update_actor: the samples are another policy's (algorithm.rollout_correction), and nothing "
                "has corrected for that; call session.compute_correction(batch) before the first update "
                "(session.compute_advantages does it by itself), or set algorithm.rollout_correction=null"
            )

    def _check_sampler(self, batch: BatchRef) -> None:
        """Raises TrainError for rows of another sampler, where nothing looks at what that was."""
        rows = batch.index.scalars(ROW_ID).tolist()
        why = [text for row in rows if (text := self._program.other_sampler(row, self._policy))]
        if why and "rollout_log_probs" not in self._losses[POLICY].reads:
            raise TrainError(
                f"update_actor: {len(why)} of {len(batch)} rows are another policy's ({why[0]}), and nothing "
                "corrects for that: set algorithm.rollout_correction={mode: decoupled, importance: {level: "
                "token, upper: 2.0}}, or take a policy loss that reads rollout_log_probs"
            )

    def _which_loss(self, batch: BatchRef) -> str:
        if "old_log_probs" in batch.columns:
            return POLICY
        versions = batch.index.scalars("oldest_version")
        number = int(batch.index.scalars("mini_batch").max(initial=0)) + 1
        if (versions[versions >= 0] != self._program.number).any():
            why = "an older policy sampled it"
        elif self._config.actor.epochs > 1:
            why = f"each row is trained on {self._config.actor.epochs} times (actor.epochs)"
        elif number > 1:
            groups = len(np.unique(batch.index.scalars("group_id")))
            size = self._config.actor.mini_batch_size
            why = (
                f"its {groups} prompt groups make {number} optimizer steps (actor.mini_batch_size={size}; "
                "mini_batches=1 is one)"
            )
        else:
            return ON_POLICY
        raise TrainError(
            f"update_actor: the batch has no old_log_probs, and {why}; call actor.compute_log_prob(batch) "
            "before the first update"
        )


@dataclass(frozen=True)
class Critic:
    """A value function, of the reward (role critic) or of the cost (cost_critic)."""

    program: ProgrammedRun
    """The run that all handles share."""
    learner: Learner
    """How it is trained."""
    model: WorkerGroup
    """Its worker group."""

    async def compute_values(self, batch: BatchRef) -> BatchRef:
        """Adds values (cost_values): of the state before each response token, float32."""
        with self.program.run.clock.phase("values"):
            return await self.model.call(CriticWorker.compute_values, batch)  # type: ignore[no-any-return]

    async def update_critic(self, batch: BatchRef, *, mini_batches: int | None = None) -> StepStats:
        """Takes all optimizer steps of one trainer step (critic.epochs × mini-batches) on values and returns
        (cost_values, cost_returns); returns its metrics. mini_batches: as update_actor has it.
        """
        program, config = self.program, self.program.config
        step = replace(program.step, stats=StepStats())
        update = LearnerUpdate(self.learner, config)
        with program.run.clock.phase(update.phase):
            await update(await MiniBatches(config, (self.learner,), mini_batches)(batch, step), step)
        return step.stats


@dataclass(frozen=True)
class Reference:
    """The frozen policy that a KL term measures against."""

    program: ProgrammedRun
    """The run that all handles share."""
    model: WorkerGroup
    """Its worker group."""

    async def compute_log_prob(self, batch: BatchRef) -> BatchRef:
        """Adds ref_log_probs, of the response tokens: float32 per token."""
        with self.program.run.clock.phase("ref_log_prob"):
            return await self.model.call(ReferenceWorker.compute_ref_log_prob, batch)  # type: ignore[no-any-return]

    async def follow(self, actor: Actor) -> None:
        """Becomes the policy as it is now (SPPO, SPIN). Raises TrainError where the two are on different
        devices.
        """
        await self.model.call(ModelWorker.copy_parameters_from, actor.model.role)


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model of `models`: how likely responses are to it."""

    program: ProgrammedRun
    """The run that all handles share."""
    model: WorkerGroup
    """Its worker group."""

    async def compute_log_prob(self, batch: BatchRef) -> BatchRef:
        """Adds <name>_log_probs: of the response tokens under it, at rollout.temperature; float32 for each
        token.
        """
        with self.program.run.clock.phase(f"{self.model.role}_log_prob"):
            return await self.model.call(TeacherWorker.compute_named_log_prob, batch)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Reward:
    """What is trained for: reward functions, which score where rows are generated, and reward models."""

    program: ProgrammedRun
    """The run that all handles share."""
    models: Sequence[RewardModelConfig]
    """reward.models."""

    async def compute_reward(self, batch: BatchRef) -> BatchRef:
        """Adds the scores of reward.models to `reward`, and as score/<name>: float32 per row. What
        reward.functions say of a row is in it from the start.
        """
        with self.program.run.clock.phase("reward"):
            for model in self.models:
                batch = await RewardModelScores(model)(batch, self.program.step)
        return batch


@dataclass(frozen=True)
class Cost:
    """What a constraint bounds: the score of a reward function, or of a reward model."""

    program: ProgrammedRun
    """The run that all handles share."""
    name: str
    """The name of the reward function or model."""
    judge: WorkerGroup | None
    """That reward model; None: the score is a reward function's, there from the start."""

    async def compute_cost(self, batch: BatchRef) -> BatchRef:
        """Adds score/<name>, the cost of each response: float32 per row. The reward stays as it is."""
        if self.judge is None:
            return batch
        with self.program.run.clock.phase("cost"):
            scores = await model_scores(self.judge, batch)
        return batch.with_index({SCORE(self.name): scores}, replace=True)


def per_group(batch: BatchRef, other: BatchRef, column: str) -> np.ndarray:
    """Returns for each row of `batch` the value of `column` in the row of `other` with the same group_id (one
    row per group, such as greedy answers): float32 [B]. Raises DataError for a group without that row.
    """
    values = dict(zip(other.index.scalars("group_id"), other.index.scalars(column), strict=True))
    groups = batch.index.scalars("group_id")
    missing = sorted(set(groups.tolist()) - set(values))
    if missing:
        raise DataError(f"prompt group {missing[0]} has no row to take {column!r} from")
    return np.array([values[group] for group in groups], np.float32)


def chosen_function(
    default: FunctionConfig, function: Function | None, options: Mapping[str, Any]
) -> FunctionConfig:
    """Returns a function that a program names, with its options; without one, the recipe's with further
    options.
    """
    if function is None:
        return FunctionConfig(default.name, {**default.options, **options})
    return FunctionConfig(function, options)  # type: ignore[arg-type]


async def make_policy(
    name: str,
    program: ProgrammedRun,
    cluster: Cluster,
    schedule: Schedule,
    checkpoints: Checkpoints,
    models: dict[str, WorkerGroup],
    learners: list[str],
    *,
    loss: tuple[Function | None, Mapping[str, Any]],
    devices: Sequence[int] | None,
) -> ServedPolicy:
    """Makes a policy and its engines. actor: with the run around them, which comes first; else one of
    `models`, which the run then serves as its own. models, learners: the worker groups beside the actor, and
    which of them learn; those of the run, which grow until its first step. loss: with its options.
    """
    config = corrected(program.config if name == "actor" else as_policy(name, program.config))
    algorithm = replace(
        config.algorithm,
        policy_loss=chosen_function(config.algorithm.policy_loss, *loss),
    )
    config = replace(config, algorithm=algorithm)
    check_names(config)
    check_token_budget("actor", config)
    steps, losses = schedule.optimizer_steps["actor"], actor_losses(config)
    model = await create_model(cluster, "actor", config, losses, steps, devices=devices, name=name)
    rollout = await create_rollout(cluster, config, model.devices, devices=devices, trainer=name)
    reads_accuracy, sources = "accuracy" in columns_of_hooks(config), program.data.train.source_names
    names = score_names(config.reward, sources, reads_accuracy=reads_accuracy)
    reporter = program.reporter
    others = models if name == "actor" else {"policy": program.run.roles.actor}
    roles = Roles(model, rollout, others)
    side = EngineSide(config, roles, program.data, names, reporter.folder.path)
    if name == "actor":
        program.started = RLRun(
            config, cluster, roles, schedule, side, reporter, checkpoints, learners=learners, carried=program
        )
        return program.started
    # No sampler of prompts is asked: it has no stream.
    policy = OtherPolicy(name, config, roles, schedule, side, reporter, chosen=None)
    models[name] = model
    learners.append(name)
    program.run.others.append(policy)
    return policy
