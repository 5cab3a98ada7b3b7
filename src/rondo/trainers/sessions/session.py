"""The session behind a program of the user's: its roles, its loop, and the pure functions of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from rondo.config import RolloutCorrectionConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import BatchRef, ragged_rows
from rondo.core.errors import ConfigError, DataError, TrainError, did_you_mean
from rondo.core.roles import of_section
from rondo.core.types import Prompt, StepStats
from rondo.planning import effective_correction, placement_of
from rondo.rewards import load_functions
from rondo.trainers.commands.check import check_token_budget
from rondo.trainers.loop import Checkpoints, RLRun, trees_of
from rondo.trainers.program import (
    KL,
    MULTIPLIER,
    AdvantageStage,
    CorrectionStage,
    Pretraining,
    Resampling,
    Selection,
    completion_of,
    create_model,
    critic_learner,
    describe_correction,
    plan_schedule,
    prompt_of,
    with_tokens,
)
from rondo.trainers.sessions.handles import (
    Actor,
    Cost,
    Critic,
    FrozenModel,
    Function,
    Reference,
    Reward,
    chosen_function,
    make_policy,
)
from rondo.trainers.sessions.programmed import ProgrammedRun


class Session:
    """Hands out roles, prompts and pure functions; made by `open_session`."""

    def __init__(
        self,
        program: ProgrammedRun,
        cluster: Cluster,
        checkpoints: Checkpoints,
        *,
        begin: Callable[[], None],
    ) -> None:
        """begin: is called when there is a policy that could be trained; only then is anything written."""
        self.config = program.config
        """The run's."""
        self.cluster = cluster
        """For worker groups of your own."""
        self.data = program.data
        """The prompts, and how responses are sampled."""
        self._program = program
        self._stop_asked = False
        self._begin = begin
        self._checkpoints = checkpoints
        self._models: dict[str, WorkerGroup] = {}
        self._trained: list[str] = []  # roles beside the actor that learn
        critics = [critic_learner(self.config, role.name) for role in of_section("critic")]
        self._learners = {learner.role: learner for learner in critics}
        self._schedule = plan_schedule(self.config, self.data.train.rows_per_epoch, critics)
        self._steps: AsyncGenerator[Any, None] | None = None

    @property
    def step(self) -> int:
        """Counts the trainer steps that are done: the version of the policy that is served."""
        return self._program.number

    @property
    def total_steps(self) -> int:
        """Counts the steps of the whole run."""
        return self._schedule.total_steps

    @property
    def state(self) -> dict[str, Any]:
        """Returns what the program keeps in checkpoints, a dict of its own: JSON values (None, booleans,
        numbers, text, lists, dicts with text as keys) and numpy arrays. When the loop begins it is what the
        checkpoint has, if there is one; a step's end is when it is looked at, and copied where a checkpoint
        is due.
        """
        return self._program.kept

    @property
    def tokenizer(self) -> Any:
        """Returns the policy's tokenizer, with the run's chat template."""
        return self.data.train.tokenizer

    async def actor(
        self,
        name: str = "actor",
        *,
        policy_loss: Function | None = None,
        devices: Sequence[int] | None = None,
        **options: Any,
    ) -> Actor:
        """Makes the policy with its generation engines, which serve its weights from here on.

        name: of `models`, for a policy beside the run's, which comes first: it answers by engines of its own,
        and learns where the program updates it. Its weights are served with the run's, step by step, and are
        in the same checkpoints; evaluations, and the prompts of `prompts()`, are the run's policy's.

        policy_loss: a name or a function (see docs/algorithms.md) with its options; default
        algorithm.policy_loss. devices: of both (default: those of their pools in cluster.placement). Raises
        ConfigError for a second one, and for functions and options that cannot work.
        """
        program, is_first = self._program, name == "actor"
        if not is_first and name not in (known := self._named("actor")):
            raise ConfigError(
                f"session.actor({name!r}): no policy of `models` is called so{did_you_mean(name, known)} "
                f"Name one, models={{{name}: {{like: actor}}}}; a loss is policy_loss=…",
                key="models",
            )
        if name in program.policies:
            raise ConfigError(
                f"the session has made {name} already; a second learner has a name of its own: "
                "models={judge: {like: actor}}, and session.actor('judge')"
            )
        if not is_first and not program.policies:
            raise ConfigError(f"session.actor() comes before session.actor({name!r}): the run is that one's")
        if self._steps is not None:
            raise ConfigError(f"session.actor({name!r}) comes before the loop")
        policy = await make_policy(
            name,
            program,
            self.cluster,
            self._schedule,
            self._checkpoints,
            self._models,
            self._trained,
            loss=(policy_loss, options),
            devices=devices,
        )
        if self._stop_asked:
            policy.request_stop()
        await policy.weights.start(0)
        if is_first:
            self._begin()
        return Actor(program, policy, self._schedule)

    async def critic(self, role: str = "critic", *, devices: Sequence[int] | None = None) -> Critic:
        """Makes a value function of the reward; with role="cost_critic" of the cost. `critic.…` configures
        both. devices: default those of its pool.
        """
        learner = self._learners[role]
        model = await self.model(role, {"critic": learner.loss}, devices=devices)
        return Critic(self._program, learner, model)

    async def reference(self, *, devices: Sequence[int] | None = None) -> Reference:
        """Makes the initial policy, frozen. devices: default those of its pool."""
        return Reference(self._program, await self.model("reference", devices=devices))

    async def scorer(self, name: str, *, devices: Sequence[int] | None = None) -> FrozenModel:
        """Makes a frozen model of `models`, one with like=teacher."""
        if name not in (known := self._named("teacher")):
            raise ConfigError(
                f"session.scorer({name!r}): no teacher of `models` is called so{did_you_mean(name, known)} "
                f"Name one, models={{{name}: {{like: teacher, path: …}}}}",
                key="models",
            )
        return FrozenModel(self._program, await self.model(name, devices=devices))

    def _named(self, like: str) -> list[str]:
        """Returns the names of those of `models` that are like this."""
        return [name for name, model in self.config.models.items() if model.like == like]

    async def reward(self) -> Reward:
        """Makes the reward: reward.functions and reward.models, but for the model that is the cost."""
        constraint = self.config.algorithm.constraint
        cost = None if constraint is None else constraint.cost
        models = [model for model in self.config.reward.models if model.name != cost]
        for model in models:
            await self.model(model.name)
        return Reward(self._program, models)

    async def cost(self) -> Cost:
        """Makes what is bounded: the reward function (of weight 0, so that it is no part of the reward) or
        reward model that algorithm.constraint.cost names. Raises ConfigError where none is.
        """
        constraint = self.config.algorithm.constraint
        if constraint is None:
            raise ConfigError("algorithm.constraint is not set: it names the score that is the cost")
        name = constraint.cost
        functions = load_functions(self.config.reward.functions)
        is_function = any(name in function.names for function in functions)
        return Cost(self._program, name, None if is_function else await self.model(name))

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
        program, run = self._program, await self._started()
        self._steps = steps = run.steps()
        async for step, groups, rows in steps:
            prompts = [self.data.train.prompt(group.seq) for group in groups]
            ids = {prompt.prompt_id: group.seq for prompt, group in zip(prompts, groups, strict=True)}
            program.current, program.generated = step, (rows, ids)
            yield prompts
            program.generated = None
            program.check_state()
        program.current = None

    async def steps(self) -> AsyncIterator[int]:
        """Yields the number of each step, `session.step`, to a program that asks prompts of its own: nothing
        of data.train is read. When it asks for the next one, the step ends; all else is as with `prompts()`.
        """
        if self.config.data.sampler is not None:
            raise ConfigError(
                "data.sampler chooses among the rows of data.train, and steps() reads none of them: remove "
                "it, or loop over prompts()",
                key="data.sampler",
            )
        program, run = self._program, await self._started()
        self._steps = steps = run.unfed_steps()
        async for step in steps:
            program.current = step
            yield step.number
            program.check_state()
        program.current = None

    async def _started(self) -> RLRun:
        """Begins the loop: what a checkpoint has is restored, and the weights are served."""
        run = self._program.run
        if self._steps is not None:
            raise ConfigError("a session has one loop, over `prompts()` or `steps()`, and it has begun")
        devices = [device for group in run.roles.all() for device in group.devices]
        for pool in placement_of(self.config).idle(devices):
            self._program.reporter.warn(
                f"cluster.pools.{pool}: no role of this program is in that pool, and its devices stand idle; "
                "name it for a role that the program makes in cluster.placement, or remove it"
            )
        await run.start()
        return run

    # ---- prompts and rows of the program's own ----

    def prompt(
        self,
        asked: str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray | Prompt,
        *,
        fields: Mapping[str, Any] | None = None,
        source: str = "own",
        tools: Sequence[Mapping[str, Any]] = (),
        images: Sequence[Any] | None = None,
    ) -> Prompt:
        """Makes a prompt: of messages, or of a text, which is one user message (without a chat template: the
        raw prompt); of token ids, which are taken as they are; or of a prompt, which is asked again, with its
        fields, source and tools. It has a name and a number that no other prompt has, so that the same
        question again has other samples.

        fields: what reward functions, tools and agents find in `prompt.fields`. source: whose reward
        functions score the answers, and its name in metrics. tools: schemas for the chat template, where
        rollout.tools has none. images: of a model that reads them, in the places of `<image>`, or before the
        user's first text: paths, bytes, URLs, Pillow's; parts of messages may have their own. Raises
        DataError for what is no prompt.
        """
        if tools and self.data.tools:
            raise DataError("session.prompt(…, tools=…) and rollout.tools both say which tools there are")
        number = self._program.new_number()
        if isinstance(asked, Prompt):
            if fields is not None or source != "own" or tools or images is not None:
                raise DataError("session.prompt(prompt) asks it again as it is: leave out the others")
            return asked.replaced(seq=number, prompt_id=f"own:{asked.source}/{number}")
        return prompt_of(
            asked,
            self.tokenizer,
            number,
            fields or {},
            source=source,
            tools=tools or self.data.tools,
            reads=self.data.train.images,
            images=images,
        )

    async def rows(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[np.ndarray | str],
        *,
        reward: Sequence[float] | np.ndarray | None = None,
        log_probs: Sequence[np.ndarray] | None = None,
        versions: Sequence[np.ndarray | int] | None = None,
    ) -> BatchRef:
        """Makes rows of responses that the policy did not sample here and now: an expert's, another model's,
        those of an earlier step. One for each prompt, in this order; with `BatchRef.concat` they join others,
        and are in the prompt group of those with the same prompt.

        responses: token ids, with the token that ends them; or text, which becomes what the chat template
        writes for it, up to the end of the turn. reward: of each; None: reward.functions score them. One that
        does not end with a stop token was cut off (finish_reason length).

        log_probs: of the sampler, a number for each token. None: nobody knows them; then rollout_log_probs
        are NaN, the rollout correction gives such rows the weight 1, rollout/log_prob_gap leaves them out.
        versions: the policy's that sampled them, of each row or token; None: it was no version of the policy
        (-1). Raises DataError for numbers that do not fit each other.
        """
        columns = {"prompts": prompts, "reward": reward, "log_probs": log_probs, "versions": versions}
        for name, column in columns.items():
            number = len(column) if isinstance(column, Sized) else "no list of"
            if column is not None and number != len(responses):
                raise DataError(f"session.rows: {number} {name} for {len(responses)} responses")
        if reward is not None and not np.isfinite(np.asarray(reward, np.float64)).all():
            raise DataError("session.rows: a reward is no finite number")
        if versions is not None and max((int(np.max(one)) for one in versions), default=0) > self.step:
            raise DataError(
                f"session.rows: versions of a policy that is not there yet; this one is version {self.step}"
            )
        answers = [
            completion_of(
                prompt,
                response,
                self.data.train,
                self.data.sampling.stop_token_ids,
                log_probs=np.nan if log_probs is None else log_probs[place],
                versions=-1 if versions is None else versions[place],
            )
            for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        rewards = None if reward is None else [float(one) for one in reward]
        return await self._program.given(prompts, answers, rewards, are_said=log_probs is not None)

    def with_tokens(
        self, batch: BatchRef, columns: Mapping[str, Sequence[np.ndarray]], *, replace: bool = False
    ) -> BatchRef:
        """Adds columns with a number for each response token: of each row of the batch an array as long as
        its response, floats (kept as float32) or integers. Advantages that come so are corrected for another
        sampler by compute_correction. Raises DataError for another length, TrainError for advantages that are
        not finite.
        """
        lengths, made = batch.index.scalars("response_length").tolist(), {}
        for name, rows in columns.items():
            arrays = [np.asarray(row) for row in rows]
            if [array.shape for array in arrays] != [(length,) for length in lengths]:
                raise DataError(
                    f"session.with_tokens: {name!r} takes {len(batch)} arrays, as long as the responses "
                    f"({str(lengths)[1:30]}…), and has {len(arrays)} ({str([len(a) for a in arrays])[1:30]}…)"
                )
            floats = any(array.dtype.kind == "f" for array in arrays)
            if name == "advantages" and not all(np.isfinite(array).all() for array in arrays):
                raise TrainError("session.with_tokens: advantages are not finite")
            made[name] = ragged_rows(arrays, np.float32 if floats else np.int64)
        return with_tokens(batch, made, self.cluster, replace=replace)

    def trees(self, batch: BatchRef, *branches: BatchRef) -> BatchRef:
        """Joins responses with branches of them (`Actor.branch`), and branches of these, round by round: one
        batch, in which parent_id is -1 and fork 0 for the rows of `batch`, and tree_id is the row_id of a
        tree's first row. Columns that were added to one of them have to be there in all. Raises DataError for
        branches of rows that are not there.
        """
        return trees_of(batch, branches)

    # ---- the pure functions of a step ----

    async def compute_advantages(
        self,
        batch: BatchRef,
        estimator: Function | None = None,
        *,
        kl_coef: float | None = None,
        multiplier: float | None = None,
        **options: Any,
    ) -> BatchRef:
        """Adds advantages, and the returns that critics learn from, by a pure function: float32, one for each
        response token.

        estimator: a name or a function (see docs/algorithms.md) with its options; default
        algorithm.advantage. A KL in the reward is that of algorithm.kl, with another coefficient where
        kl_coef is given. multiplier: of the constraint, for estimators that read it; default: the one that
        algorithm.constraint adapts. Where the samples are another policy's (algorithm.rollout_correction),
        compute_correction follows. Raises ConfigError for what the estimator reads and nobody passed,
        DataError for a column that is not there, TrainError for what an estimator must not return.
        """
        chosen = chosen_function(self.config.algorithm.advantage, estimator, options)
        algorithm = dataclasses.replace(self.config.algorithm, advantage=chosen)
        stage = AdvantageStage(algorithm, keep_rewards=self.config.tracking.token_columns is not None)
        reward = self.config.reward
        weights = [*(one.weight for one in reward.functions), *(one.weight for one in reward.models)]
        if {*weights} - {1.0} and "scores" in stage.reads and "weights" not in chosen.options:
            raise ConfigError(
                f"the estimator {chosen.name} adds scores up by weights of its own, and some of reward.… "
                "have others than 1: pass weights=[…], one for each score"
            )
        step, others = self._program.step, {KL: kl_coef, MULTIPLIER: multiplier}
        given = {name: number for name, number in others.items() if number is not None}
        step = dataclasses.replace(step, coefficients={**step.coefficients, **given})
        if MULTIPLIER in stage.reads and MULTIPLIER not in step.coefficients:
            raise ConfigError(f"the estimator {chosen.name} reads the multiplier: pass multiplier=…")
        self._program.check_said(batch, stage.reads, f"the estimator {chosen.name}")
        select, resample = self.config.algorithm.select, self.config.algorithm.resample
        if select is not None and "selected" not in batch.index.columns:
            raise ConfigError(
                f"algorithm.select={select.name} is set: call session.select(batch) after the rewards"
            )
        if resample is not None and "sample_weight" not in batch.index.columns:
            raise ConfigError(
                f"algorithm.resample={resample.name} is set: call session.resample(batch) after the rewards"
            )
        with self._program.run.clock.phase(stage.phase), self._program.stats_of(batch) as stats:
            batch = await stage(batch, dataclasses.replace(step, stats=stats))
        return batch if "rollout_weights" in batch.columns else await self.compute_correction(batch)

    async def select(self, batch: BatchRef) -> BatchRef:
        """Returns the rows of the answers that algorithm.select keeps, of all that are given. Raises
        ConfigError where it is not set.
        """
        chosen = self.config.algorithm.select
        if chosen is None:
            raise ConfigError("algorithm.select is not set: it names the function that chooses the answers")
        return await Selection(chosen)(batch, self._program.step)

    async def resample(self, batch: BatchRef) -> BatchRef:
        """Adds sample_weight: how often each row counts, drawn by algorithm.resample; rows that were not
        drawn are gone. Raises ConfigError where it is not set.
        """
        chosen = self.config.algorithm.resample
        if chosen is None:
            raise ConfigError("algorithm.resample is not set: it names the function that draws the rows")
        return await Resampling(chosen)(batch, self._program.step)

    async def compute_correction(self, batch: BatchRef) -> BatchRef:
        """Adds rollout_weights (float32 per response token), and shrinks response_mask where something is
        rejected: what algorithm.rollout_correction asks for, which may be nothing. compute_advantages does it
        by itself; a program that makes its advantages in another way calls it, before the first update.
        Raises TrainError without old_log_probs.
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
        step = self._program.step
        with self._program.run.clock.phase(stage.phase), self._program.stats_of(batch) as stats:
            batch = await stage(batch, dataclasses.replace(step, stats=stats))
        self._program.corrected = True
        return batch

    async def evaluate(self) -> dict[str, float]:
        """Scores answers to the held-out prompts, as trainer.evaluation says; they are shown and logged.
        Returns the metrics by their names; none without data.eval. Raises TrainError behind update_actor.
        """
        if not self.data.eval:
            return {}
        self._program.check_published(self._program.run, "evaluate")
        result = await self._program.run.evaluate()
        self._program.reporter.evaluation(self.step, result)
        return result.metrics

    async def log(self, batch: BatchRef, *metrics: StepStats) -> None:
        """Writes this step's rows to rollouts/; its metrics to console, metrics.jsonl and trackers when it
        ends. An adaptive KL coefficient and a constraint's multiplier follow these metrics and rows.
        """
        step = self._program.step
        for part in metrics:
            step.stats.merge(part)
        await self._program.reporter.rollouts(step.number + 1, batch)
        step.rows = batch

    # ---- the end ----

    def request_stop(self) -> None:
        """Ends the loop at the next step boundary; the state is saved."""
        self._stop_asked = True
        if self._program.started is not None:
            self._program.started.request_stop()

    async def close(self, error: BaseException | None = None) -> None:
        """Ends what runs; `open_session` calls it. error: what ended the program."""
        await self._program.close()
        if self._steps is not None:
            await self._program.run.end(self._steps, error)
