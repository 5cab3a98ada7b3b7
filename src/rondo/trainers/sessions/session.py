"""The session behind a program of the user's: its roles, its loop, and the pure functions of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rondo.config import Config, RolloutCorrectionConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import BatchRef
from rondo.core.errors import ConfigError, TrainError
from rondo.core.roles import of_section
from rondo.core.types import Prompt, StepStats
from rondo.rewards import load_functions, score_names
from rondo.trainers.commands.check import check_token_budget
from rondo.trainers.commands.check_machine import check_names
from rondo.trainers.loop import Checkpoints, EngineSide, Reporter, RLRun, StepStream
from rondo.trainers.program import (
    KL,
    MULTIPLIER,
    AdvantageStage,
    CorrectionStage,
    Pretraining,
    Prompts,
    Resampling,
    Roles,
    Step,
    columns_of_hooks,
    create_model,
    create_rollout,
    critic_learner,
    describe_correction,
    effective_correction,
    placement_of,
    plan_schedule,
)
from rondo.trainers.sessions.handles import (
    Actor,
    Cost,
    Critic,
    Function,
    Reference,
    Reward,
    actor_losses,
    chosen_function,
)


class Session:
    """Hands out roles, prompts and pure functions; made by `open_session`."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        data: Prompts,
        reporter: Reporter,
        checkpoints: Checkpoints,
        *,
        begin: Callable[[], None],
    ) -> None:
        """begin: is called when there is a policy that could be trained; only then is anything written."""
        self.config = config
        """The run's."""
        self.cluster = cluster
        """For worker groups of your own."""
        self.data = data
        """The prompts, and how responses are sampled."""
        self.corrected = False
        """Whether the program has made a rollout correction."""
        self._stop_asked = False
        self._begin = begin
        self._reporter = reporter
        self._checkpoints = checkpoints
        self._run: RLRun | None = None
        self._models: dict[str, WorkerGroup] = {}
        self._trained: list[str] = []  # roles beside the actor that learn
        critics = [critic_learner(config, role.name) for role in of_section("critic")]
        self._learners = {learner.role: learner for learner in critics}
        self._schedule = plan_schedule(config, data.train.rows_per_epoch, critics)
        self._steps: StepStream | None = None
        self._step: Step | None = None  # of the program's loop; None outside of it
        self._outside: Step | None = None
        self._generated: tuple[BatchRef, dict[str, int]] | None = None  # rows, and group ids by prompt
        self._asked: tuple[int, frozenset[object]] = (0, frozenset())
        """The version of the weights, and the prompts that were sampled under them: ids; seqs with tokens."""

    @property
    def run(self) -> RLRun:
        """Returns the run behind the program. Raises ConfigError before there is an actor."""
        if self._run is None:
            raise ConfigError(
                "the session has no actor yet: `actor = await session.actor()` comes before the loop"
            )
        return self._run

    @property
    def stopped(self) -> bool:
        """Whether it was stopped on request, before the last step; then its state is saved."""
        return self._reporter.stopped

    @property
    def step(self) -> int:
        """Counts the trainer steps that are done: the version of the policy that is served."""
        return 0 if self._run is None else self._run.step

    @property
    def step_state(self) -> Step:
        """Returns what the stages of this step share; outside of the loop, of the step that the next update
        makes.
        """
        if self._step is not None:
            return self._step
        if self._outside is None or self._outside.number != self.step:
            self._outside = self.run.new_step()
        return self._outside

    async def actor(
        self, policy_loss: Function | None = None, *, devices: Sequence[int] | None = None, **options: Any
    ) -> Actor:
        """Makes the policy with its generation engines, which serve its weights from here on.

        policy_loss: a name or a function (see docs/algorithms.md) with its options; default
        algorithm.policy_loss. devices: of both (default: those of their pools in cluster.placement).
        """
        if self._run is not None:
            raise ConfigError(
                "the session has an actor already, whose weights are served, saved and exported; a second "
                "learner needs a session of its own"
            )
        chosen = chosen_function(self.config.algorithm.policy_loss, policy_loss, options)
        algorithm = dataclasses.replace(
            self.config.algorithm, policy_loss=chosen, rollout_correction=effective_correction(self.config)
        )
        config = dataclasses.replace(self.config, algorithm=algorithm)
        check_names(config)
        model = await self._create("actor", actor_losses(config), devices)
        rollout = await create_rollout(self.cluster, config, model.devices, devices=devices)
        roles = Roles(model, rollout, self._models)
        reads_accuracy = "accuracy" in columns_of_hooks(config)
        names = score_names(config.reward, self.data.train.source_names, reads_accuracy=reads_accuracy)
        side = EngineSide(config, roles, self.data, names, self._reporter.folder.path)
        self._run = RLRun(
            config,
            self.cluster,
            roles,
            self._schedule,
            side,
            self._reporter,
            self._checkpoints,
            learners=self._trained,
        )
        if self._stop_asked:
            self._run.request_stop()
        await self._run.weights.start(0)
        self._begin()
        return Actor(self, config, model, rollout)

    async def critic(self, role: str = "critic", *, devices: Sequence[int] | None = None) -> Critic:
        """Makes a value function of the reward; with role="cost_critic" of the cost. `critic.…` configures
        both.
        """
        learner = self._learners[role]
        model = await self.model(role, {"critic": learner.loss}, devices=devices)
        return Critic(self, learner, model)

    async def reference(self, *, devices: Sequence[int] | None = None) -> Reference:
        """Makes the initial policy, frozen."""
        return Reference(self, await self.model("reference", devices=devices))

    async def reward(self) -> Reward:
        """Makes the reward: reward.functions and reward.models, but for the model that is the cost."""
        constraint = self.config.algorithm.constraint
        cost = None if constraint is None else constraint.cost
        models = [model for model in self.config.reward.models if model.name != cost]
        for model in models:
            await self.model(model.name)
        return Reward(self, models)

    async def cost(self) -> Cost:
        """Makes what is bounded: the reward function (of weight 0, so that it is no part of the reward) or
        reward model that algorithm.constraint.cost names.
        """
        constraint = self.config.algorithm.constraint
        if constraint is None:
            raise ConfigError("algorithm.constraint is not set: it names the score that is the cost")
        name = constraint.cost
        functions = load_functions(self.config.reward.functions)
        is_function = any(name in function.names for function in functions)
        return Cost(self, name, None if is_function else await self.model(name))

    def pretraining(self) -> Pretraining:
        """Reads the conversations of data.pretrain, for update_actor(…, pretrain=…)."""
        return Pretraining(self.config)

    async def model(
        self, role: str, losses: Mapping[str, Any] = {}, *, devices: Sequence[int] | None = None
    ) -> WorkerGroup:
        """Makes the worker group of any role with a model (teacher, prm, …), to `call` its methods yourself.
        losses: of a role that learns; its state is part of a checkpoint.
        """
        self._models[role] = await self._create(role, losses, devices)
        if losses:
            self._trained.append(role)
        return self._models[role]

    async def _create(
        self, role: str, losses: Mapping[str, Any], devices: Sequence[int] | None
    ) -> WorkerGroup:
        check_token_budget(role, self.config)
        steps = self._schedule.optimizer_steps.get(role)
        return await create_model(self.cluster, role, self.config, losses, steps, devices=devices)

    # ---- the loop ----

    async def prompts(self) -> AsyncIterator[list[Prompt]]:
        """Yields the prompts of each step: data.batch_size of them, for trainer.total_steps steps (or
        trainer.epochs), evaluating in between as trainer.evaluation says. A step begins when their responses
        are there; algorithm.filter has replaced what it drops. When the program asks for the next ones, the
        step ends: new weights are served, a due checkpoint is written. A program that goes on from a
        checkpoint gets what is left; its state is restored here, not before.
        """
        devices = [device for group in self.run.roles.all() for device in group.devices]
        for pool in placement_of(self.config).idle(devices):
            self._reporter.warn(
                f"cluster.pools.{pool}: no role of this program is in that pool, and its devices stand idle; "
                "name it for a role that the program makes in cluster.placement, or remove it"
            )
        await self.run.start()
        self._steps = self.run.steps()
        async for step, groups, rows in self._steps:
            self._step = step
            prompts = [self.data.train.prompt(group.seq) for group in groups]
            ids = {prompt.prompt_id: group.seq for prompt, group in zip(prompts, groups, strict=True)}
            self._generated = (rows, ids)
            yield prompts
            self._generated = None
        self._step = None

    def generated(self, prompts: Sequence[Prompt]) -> BatchRef | None:
        """Returns the rows that the run generated for `prompts` in this step, failures included, in their
        order; None where it did not.
        """
        if self._generated is None:
            return None
        rows, seqs = self._generated
        if not all(prompt.prompt_id in seqs for prompt in prompts):
            return None
        groups = rows.index.scalars("group_id")
        wanted = [np.flatnonzero(groups == seqs[prompt.prompt_id]) for prompt in prompts]
        return rows.take(np.concatenate(wanted))

    def check_asked_once(self, prompts: Sequence[Prompt]) -> None:
        """Raises TrainError for a prompt that was sampled under these weights before: noise is a function of
        seed, `seq` and sample, so its samples would be the same ones, and count twice.
        """
        asked = set(self._asked[1]) if self._asked[0] == self.step else set()
        for prompt in prompts:
            tokens = (prompt.seq, np.asarray(prompt.token_ids).tobytes())  # the same one by another name
            if not asked.isdisjoint((prompt.prompt_id, tokens)):
                raise TrainError(
                    f"generate_sequences: prompt {prompt.prompt_id!r} was sampled under these weights "
                    "already, and would get the same samples again. Ask for all of them at once (n=…), or "
                    "give it a name and number of its own: dataclasses.replace(prompt, prompt_id=…, seq=…)"
                )
            asked.update((prompt.prompt_id, tokens))
        self._asked = (self.step, frozenset(asked))

    def check_published(self, verb: str) -> None:
        """Raises TrainError where the engines stand still for weights that this step still changes."""
        if self._step is not None and self._step.updated:
            raise TrainError(
                f"{verb} after update_actor in one step: the new weights are served when the step ends; "
                "generate before the update, or in the next step"
            )

    async def updated(self) -> None:
        """Notes the actor's update; outside of the loop the new weights are served at once, as a step of
        their own.
        """
        if self._step is not None:
            self._step.updated = True
            return
        await self.run.publish(StepStats())

    async def compute_advantages(
        self,
        batch: BatchRef,
        estimator: Function | None = None,
        *,
        kl_coef: float | None = None,
        multiplier: float | None = None,
        **options: Any,
    ) -> BatchRef:
        """Adds advantages, and the returns that critics learn from, by a pure function.

        estimator: a name or a function (see docs/algorithms.md) with its options; default
        algorithm.advantage. A KL in the reward is that of algorithm.kl, with another coefficient where
        kl_coef is given. multiplier: of the constraint, for estimators that read it; default: the one that
        algorithm.constraint adapts. Where the samples are another policy's (algorithm.rollout_correction),
        compute_correction follows.
        """
        chosen = chosen_function(self.config.algorithm.advantage, estimator, options)
        stage = AdvantageStage(dataclasses.replace(self.config.algorithm, advantage=chosen))
        step, others = self.step_state, {KL: kl_coef, MULTIPLIER: multiplier}
        given = {name: number for name, number in others.items() if number is not None}
        step = dataclasses.replace(step, coefficients={**step.coefficients, **given})
        if MULTIPLIER in stage.reads and MULTIPLIER not in step.coefficients:
            raise ConfigError(f"the estimator {chosen.name} reads the multiplier: pass multiplier=…")
        resample = self.config.algorithm.resample
        if resample is not None and "sample_weight" not in batch.index.columns:
            raise ConfigError(
                f"algorithm.resample={resample.name} is set: call session.resample(batch) after the rewards"
            )
        with self.run.clock.phase(stage.phase):
            batch = await stage(batch, step)
        return batch if "rollout_weights" in batch.columns else await self.compute_correction(batch)

    async def resample(self, batch: BatchRef) -> BatchRef:
        """Adds sample_weight: how often each row counts, drawn by algorithm.resample; rows that were not
        drawn are gone.
        """
        chosen = self.config.algorithm.resample
        if chosen is None:
            raise ConfigError("algorithm.resample is not set: it names the function that draws the rows")
        return await Resampling(chosen)(batch, self.step_state)

    async def compute_correction(self, batch: BatchRef) -> BatchRef:
        """Adds rollout_weights, and shrinks response_mask where something is rejected: what
        algorithm.rollout_correction asks for, which may be nothing. compute_advantages does it by itself; a
        program that makes its advantages in another way calls it, before the first update.
        """
        config = effective_correction(self.config)
        if not isinstance(config, RolloutCorrectionConfig):  # `check_session` refuses the other one
            return batch
        if "old_log_probs" not in batch.columns:
            raise TrainError(
                f"{describe_correction(self.config)}: it compares with old_log_probs, which the batch does "
                "not have; call actor.compute_log_prob(batch) first, or set algorithm.rollout_correction=null"
            )
        stage = CorrectionStage(config, mask_truncated=self.config.algorithm.mask_truncated)
        with self.run.clock.phase(stage.phase):
            batch = await stage(batch, self.step_state)
        self.corrected = True
        return batch

    async def evaluate(self) -> dict[str, float]:
        """Scores answers to the held-out prompts, as trainer.evaluation says; they are shown and logged."""
        if not self.data.eval:
            return {}
        self.check_published("evaluate")
        result = await self.run.evaluate()
        self._reporter.evaluation(self.step, result)
        return result.metrics

    async def log(self, batch: BatchRef, *metrics: StepStats) -> None:
        """Writes this step's rows to rollouts/; its metrics to console, metrics.jsonl and trackers when it
        ends. An adaptive KL coefficient and a constraint's multiplier follow these metrics and rows.
        """
        step = self.step_state
        for part in metrics:
            step.stats.merge(part)
        await self._reporter.rollouts(step.number + 1, batch)
        step.rows = batch

    # ---- the end ----

    def request_stop(self) -> None:
        """Ends the loop over `prompts()` at the next step boundary; the state is saved."""
        self._stop_asked = True
        if self._run is not None:
            self._run.request_stop()

    async def close(self, error: BaseException | None = None) -> None:
        """Ends what runs; `open_session` calls it. error: what ended the program."""
        if self._steps is not None:
            await self.run.end(self._steps, error)
