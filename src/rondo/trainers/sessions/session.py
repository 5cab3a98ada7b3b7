"""An RL algorithm as a program: the roles of a run, handed out one by one to a loop that you write.

    async with open_session(["ppo"]) as session:
        actor, critic, reward = await session.actor(), await session.critic(), await session.reward()
        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            ...

The recipe has the numbers, the program the algorithm. docs/programming_guide.md explains it line by line.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rondo.algorithms import explained_variance
from rondo.batch import BatchRef
from rondo.config import LoadedConfig, load, to_yaml
from rondo.config.schema import (
    FunctionConfig,
    RewardConfig,
    RewardFunctionConfig,
)
from rondo.controller import WorkerGroup, start_cluster
from rondo.errors import ConfigError, TrainError
from rondo.rewards import BUILTINS, load_functions
from rondo.tracking import Console, RunFolder
from rondo.trainers.commands.check import check_backend, check_files, check_names, located
from rondo.trainers.commands.train import warm_start
from rondo.trainers.loop.evaluation import evaluate
from rondo.trainers.loop.publish import Canary
from rondo.trainers.loop.report import HostClock, Reporter, describe_rows
from rondo.trainers.loop.routes import make_route, remove_files
from rondo.trainers.program.inputs import complete_model, load_prompts, open_tokenizer
from rondo.trainers.program.plan import critic_learner, plan_schedule
from rondo.trainers.program.roles import Roles, create_model, create_rollout, placement_of, shares_weights
from rondo.trainers.program.stages import (
    AdvantageStage,
    CorrectionStage,
    describe_correction,
    effective_correction,
)
from rondo.trainers.program.update import Pretraining
from rondo.trainers.sessions.handles import Actor, Cost, Critic, Reference, Reward, Run, actor_losses
from rondo.types import Prompt, StepStats
from rondo.workers.models import ActorWorker
from rondo.workers.reward import RewardWorker
from rondo.workers.rollout import RolloutWorker

Function = str | Callable[..., Any]

# What the built-in loop does by configuration, and a program by a line of its own.
YOURS: Mapping[str, str] = {
    "algorithm.filter": "take the rows that you want: batch.take(rows)",
    "algorithm.resample": "take the rows that you want: batch.take(rows)",
    "trainer.replay": "nothing depends on time but what you make so",
    "reference.refresh_every": "await reference.follow(actor)",
    "rollout.recorded": "read the rows: cluster.put(Batch.read_parquet(file), INDEX_COLUMNS)",
}


@contextlib.asynccontextmanager
async def open_session(
    recipes: Sequence[str | Path], overrides: Sequence[str] = (), *, reward: Function | None = None
) -> AsyncIterator[Session]:
    """Start a cluster and a run folder for the program inside.

    recipes (files, merged in order) and overrides (`key.sub=value`) as for `rondo train`. reward: replaces
    reward.functions by one, which may be a Python function of (prompt, trajectory). The folder is
    trainer.run_dir (default runs/session; what an earlier program wrote there moves to discarded/); a warm
    start is kept beside it, for all programs that run next to each other. When the program ends without an
    error, the last evaluation, curves, summary and (checkpoint.export) the model are written. Raises
    ConfigError for what cannot work.
    """
    loaded = load([str(recipe) for recipe in recipes], overrides)
    with located(loaded):
        _check(loaded)
    config = loaded.config
    console = Console(config.tracking.console, samples=config.tracking.samples)
    for note in loaded.notes:
        console.note(note)
    if config.checkpoint.every is not None:
        console.note("checkpoint.every has no meaning here: a program of your own writes no checkpoints")
    if effective_correction(config) is not None:
        console.note(describe_correction(config))
    run_dir = Path(config.trainer.run_dir or "runs/session")
    if (run_dir / "checkpoints").is_dir() and any((run_dir / "checkpoints").iterdir()):
        raise ConfigError(
            f"trainer.run_dir={run_dir} holds the checkpoints of a training run; choose another"
        )
    with RunFolder(run_dir, resume=config.checkpoint.resume) as folder, contextlib.ExitStack() as stack:
        started = complete_model(await warm_start(loaded, run_dir.parent, console))
        if reward is not None:
            own = RewardConfig(functions=(RewardFunctionConfig(reward),))  # type: ignore[arg-type]
            started = dataclasses.replace(started, reward=own)
        with console.phase("reading prompts"):
            data = load_prompts(started)
        reporter = Reporter(started, folder, console, title=run_dir.name)
        folder.write_config(to_yaml(config))
        stack.callback(remove_files, folder.path)
        async with await start_cluster(started.cluster) as cluster:
            reporter.device = f"{cluster.num_devices} x {cluster.device} ({started.cluster.backend})"
            session = Session(Run(started, cluster, data), reporter, stack)
            yield session
            await session.finish()
        stack.close()
        if session.step:
            reporter.finish(session.run.timers, session.step, finished=True)


def _check(loaded: LoadedConfig) -> None:
    config = loaded.config
    if not config.data.train:
        raise ConfigError("data.train is empty: there are no prompts; add a source (see docs/data.md)")
    for key, instead in YOURS.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) is not None:
            raise ConfigError(f"{key} is for the built-in loop; in a program of your own, {instead}")
    correction = config.algorithm.rollout_correction
    if correction is not None and correction.mode == "bypass":
        raise ConfigError(
            "algorithm.rollout_correction.mode=bypass is for the built-in loop: here compute_log_prob gives "
            "old_log_probs; use mode=decoupled, or `rondo train`"
        )
    if config.algorithm.kl is not None and config.algorithm.kl.controller == "adaptive":
        raise ConfigError(
            "algorithm.kl.controller=adaptive is for the built-in loop; in a program of your own, hand "
            "compute_advantages(…, kl_coef=…) the coefficient that you want"
        )
    check_backend(loaded)
    check_files(loaded)


class Session:
    """Hands out roles, prompts and pure functions; made by `open_session`. config: of the run. cluster: for
    worker groups of your own.
    """

    def __init__(self, run: Run, reporter: Reporter, stack: contextlib.ExitStack) -> None:
        self.run, self.config, self.cluster = run, run.config, run.cluster
        self._reporter, self._stack = reporter, stack
        self._actor: Actor | None = None
        reporter.watch(run.cluster, run.timers)
        self._hosts = HostClock(self.config.cluster)
        self._groups: list[WorkerGroup] = []
        critics = [critic_learner(self.config, role) for role in ("critic", "cost_critic")]
        self._learners = {learner.role: learner for learner in critics}
        self._schedule = plan_schedule(self.config, run.data.train.rows_per_epoch, critics)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.run.step

    async def actor(
        self, policy_loss: Function | None = None, *, devices: Sequence[int] | None = None, **options: Any
    ) -> Actor:
        """The policy with its generation engines, which serve its weights from here on.

        policy_loss: a name or a function (see docs/algorithms.md) with its options; default
        algorithm.policy_loss. devices: of both (default: those of their pools in cluster.placement).
        """
        chosen = _chosen(self.config.algorithm.policy_loss, policy_loss, options)
        algorithm = dataclasses.replace(
            self.config.algorithm, policy_loss=chosen, rollout_correction=effective_correction(self.config)
        )
        config = dataclasses.replace(self.config, algorithm=algorithm)
        check_names(config)
        model = await self.model("actor", losses=actor_losses(config), devices=devices)
        shared = shares_weights(config) and model.size == 1
        context, threads = self.run.data.max_context, self.cluster.threads
        rollout = await create_rollout(
            self.cluster, config, context, share=shared, threads=threads, devices=devices
        )
        self._groups.append(rollout)
        await rollout.call(RolloutWorker.pause)
        roles = Roles(model, rollout)
        route = make_route(config, roles, self._reporter.folder.path)
        canary = Canary(roles, self.run.data, config)
        await route.load(self.run.version)
        await rollout.call(RolloutWorker.resume)
        await canary.check(self.run.version)
        self._actor = Actor(self.run, config, model, rollout, route, canary, warn=self._reporter.warn)
        return self._actor

    async def critic(self, role: str = "critic", *, devices: Sequence[int] | None = None) -> Critic:
        """A value function of the reward; with role="cost_critic" of the cost. `critic.…` configures both."""
        learner = self._learners[role]
        return Critic(self.run, learner, await self.model(role, {"critic": learner.loss}, devices=devices))

    async def reference(self, *, devices: Sequence[int] | None = None) -> Reference:
        """The initial policy, frozen."""
        return Reference(self.run, await self.model("reference", devices=devices))

    async def reward(self) -> Reward:
        """reward.functions and reward.models, but for the one that is the cost."""
        config = self.config.reward
        cost, spared = self._cost_name(), self._cost_function()
        functions = tuple(f for f in config.functions if f is not spared)
        scorers = await self._scorers("reward", dataclasses.replace(config, functions=functions))
        models = [(model, await self.model(model.name)) for model in config.models if model.name != cost]
        return Reward(self.run, scorers, models)

    async def cost(self) -> Cost:
        """The reward function or reward model that algorithm.constraint.cost names."""
        name, function = self._cost_name(), self._cost_function()
        if name is None:
            raise ConfigError("algorithm.constraint is not set: it names the score that is the cost")
        if function is None:
            return Cost(self.run, name, await self.model(name))
        own = dataclasses.replace(self.config.reward, functions=(function,), models=(), accuracy=None)
        group = await self._scorers("cost", own)
        assert group is not None
        return Cost(self.run, name, group)

    def pretraining(self) -> Pretraining:
        """The conversations of data.pretrain, for update_actor(…, pretrain=…)."""
        return Pretraining(self.config)

    async def model(
        self, role: str, losses: Mapping[str, Any] = {}, *, devices: Sequence[int] | None = None
    ) -> WorkerGroup:
        """The worker group of any role with a model (teacher, prm, …), to `call` its methods yourself."""
        section = getattr(self.config, "critic" if role == "cost_critic" else role, None)
        budget = getattr(section, "token_budget", self.config.actor.token_budget)
        if budget < self.run.data.max_context:
            raise ConfigError(
                f"{role}.token_budget={budget} is less than data.max_prompt_tokens + "
                f"rollout.max_tokens={self.run.data.max_context}; raise it"
            )
        steps = self._schedule.optimizer_steps.get(role)
        group = await create_model(self.cluster, role, self.config, losses, steps, devices=devices)
        self._groups.append(group)
        return group

    async def prompts(self) -> AsyncIterator[list[Prompt]]:
        """data.batch_size prompts for each of trainer.total_steps steps (or trainer.epochs), evaluating in
        between as trainer.evaluation says.
        """
        run, size = self.run, self.config.data.batch_size
        evaluation, total = self.config.trainer.evaluation, self._schedule.total_steps
        if self._actor is None:
            raise ConfigError(
                "the session has no actor yet: `actor = await session.actor()` comes before the loop"
            )
        for pool in self._idle_pools():
            self._reporter.warn(
                f"cluster.pools.{pool}: no role of this program is in that pool, and its devices stand idle; "
                "name it for a role that the program makes in cluster.placement, or remove it"
            )
        parameters = await self._actor.model.call(ActorWorker.num_parameters)
        self._stack.enter_context(self._reporter.running(total, 0, parameters))
        await self._hosts.start(self._groups, run.timers)
        run.timers.start_step()
        for step in range(total):
            if evaluation.before if step == 0 else evaluation.every and step % evaluation.every == 0:
                await self.evaluate()
            last = min((step + 1) * size, self._schedule.total_groups)
            run.stats = StepStats()
            yield [run.data.train.prompt(seq) for seq in range(step * size, last)]
            run.step = step + 1

    async def compute_advantages(
        self,
        batch: BatchRef,
        estimator: Function | None = None,
        *,
        kl_coef: float | None = None,
        multiplier: float | None = None,
        **options: Any,
    ) -> BatchRef:
        """advantages, and the returns that critics learn from, by a pure function.

        estimator: a name or a function (see docs/algorithms.md) with its options; default
        algorithm.advantage. A KL in the reward is that of algorithm.kl, with another coefficient where
        kl_coef is given. multiplier: of the constraint, for estimators that read it. Where the samples are
        another policy's (algorithm.rollout_correction), compute_correction follows.
        """
        chosen = _chosen(self.config.algorithm.advantage, estimator, options)
        stage = AdvantageStage(dataclasses.replace(self.config.algorithm, advantage=chosen))
        if "multiplier" in stage.reads and multiplier is None:
            raise ConfigError(f"the estimator {chosen.name} reads the multiplier: pass multiplier=…")
        if kl_coef is None:
            kl_coef = self.config.algorithm.kl.coef if self.config.algorithm.kl else 0.0
        with self.run.timers.phase("advantages"):
            batch, stats = await stage(batch, self.cluster, kl_coef, multiplier=multiplier)
        self.run.stats.merge(stats)
        return batch if "rollout_weights" in batch.columns else await self.compute_correction(batch)

    async def compute_correction(self, batch: BatchRef) -> BatchRef:
        """rollout_weights, and a smaller response_mask where something is rejected: what
        algorithm.rollout_correction asks for, which may be nothing. compute_advantages does it by itself; a
        program that makes its advantages in another way calls it, before the first update.
        """
        config = effective_correction(self.config)
        if config is None:
            return batch
        if "old_log_probs" not in batch.columns:
            raise TrainError(
                f"{describe_correction(self.config)}: it compares with old_log_probs, which the batch does "
                "not have; call actor.compute_log_prob(batch) first, or set algorithm.rollout_correction=null"
            )
        stage = CorrectionStage(config, mask_truncated=self.config.algorithm.mask_truncated)
        with self.run.timers.phase("advantages"):
            batch, stats = await stage(batch, self.cluster)
        self.run.stats.merge(stats)
        self.run.corrected = True
        return batch

    async def evaluate(self) -> dict[str, float]:
        """Scored answers to the held-out prompts, as trainer.evaluation says, shown and logged."""
        if self._actor is None or not self.run.data.eval:
            return {}
        with self.run.timers.phase("evaluate"):
            evaluating = evaluate(
                self._actor.rollout,
                self.run.data.eval,
                self.config.trainer.evaluation,
                self.run.data.sampling,
            )
            result = await self._actor.served(evaluating)
        self._reporter.evaluation(self.step, result)
        return result.metrics

    async def log(self, batch: BatchRef, *metrics: StepStats) -> None:
        """A step's metrics to console, metrics.jsonl and trackers, its rows to rollouts/."""
        step, stats = self.step + 1, StepStats.merged([self.run.stats, *metrics])
        describe_rows(batch, stats)
        explained = explained_variance(stats.values())
        extra = {} if explained is None else {"critic/explained_variance": explained}
        await self._reporter.rollouts(step, batch)
        await self._hosts.count(self._groups, self.run.timers)
        self._reporter.step(step, stats, extra, self.run.timers)

    async def finish(self) -> None:
        """The last evaluation and the export; `open_session` calls it."""
        if self._actor is None or not self.step:
            return
        if self.config.trainer.evaluation.after:
            await self.evaluate()
        await self._hosts.count(self._groups, self.run.timers)
        if self.config.checkpoint.export:
            folder = self._reporter.folder.export_dir
            await self._actor.model.call(ActorWorker.export, str(folder))
            open_tokenizer(self.config).save_pretrained(folder)

    def _idle_pools(self) -> list[str]:
        """Those without a model or an engine. Reward functions are on all devices."""
        groups = [group for group in self._groups if group.worker_class is not RewardWorker]
        return placement_of(self.config).idle([device for group in groups for device in group.devices])

    async def _scorers(self, role: str, reward: RewardConfig) -> WorkerGroup | None:
        if not reward.functions:
            return None
        kwargs = {"reward": dataclasses.replace(reward, models=()), "run_seed": self.config.trainer.seed}
        group = await self.cluster.create_group(role, RewardWorker, kwargs=kwargs)
        self._groups.append(group)
        return group

    def _cost_name(self) -> str | None:
        constraint = self.config.algorithm.constraint
        return None if constraint is None else constraint.cost

    def _cost_function(self) -> RewardFunctionConfig | None:
        """The one that algorithm.constraint.cost names, if it is a function."""
        functions = self.config.reward.functions
        names = [function.name for function in load_functions(functions, BUILTINS)]
        return functions[names.index(self._cost_name())] if self._cost_name() in names else None  # type: ignore[arg-type]


def _chosen(default: FunctionConfig, function: Function | None, options: Mapping[str, Any]) -> FunctionConfig:
    if function is None:
        return FunctionConfig(default.name, {**default.options, **options})
    return FunctionConfig(function, options)  # type: ignore[arg-type]
