"""From a configuration to a program: which stages, learners and columns a step has, and how long the run is.
Pure decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rondo.agents.external import agent_of
from rondo.algorithms import (
    ActorLoss,
    CriticLoss,
    Kind,
    PrmLoss,
    bind,
    columns_read,
    lookup,
    seq_mean_token_mean,
)
from rondo.config import (
    BranchesConfig,
    BypassConfig,
    Config,
    FunctionConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
    stages_of,
)
from rondo.core.columns import AGENT, BRANCH_VALUES, GREEDY_REWARD, MIXING, made_by
from rondo.core.errors import ConfigError, did_you_mean
from rondo.core.roles import ROLLOUT, of_section
from rondo.data import Mixer, index_columns, parameters_of, reads_accuracy, source_name
from rondo.planning import effective_correction, in_flight, one_update, reference_in_actor
from rondo.rewards import accuracy_score, load_functions
from rondo.trainers.program.advantages import AdvantageStage
from rondo.trainers.program.inputs import Recorded
from rondo.trainers.program.producers import Producer, stages
from rondo.trainers.program.roles import check_profile, describe_planned
from rondo.trainers.program.stages import (
    CorrectionStage,
    PreparationStage,
    Production,
    Resampling,
    RewardModelScores,
    SeesImages,
    Selection,
    columns_of_loss,
)
from rondo.trainers.program.step import Stage
from rondo.trainers.program.update import ActorWeights, Learner, LearnerUpdate, MiniBatches
from rondo.workers import CriticWorker, PrmWorker, update_columns

HOOK_COLUMNS = index_columns(greedy_baseline=True)  # what a filter or a resampling may read: small, per row


@dataclass(frozen=True)
class Schedule:
    """How long a run is. Batches straddle epochs; the last step may be short."""

    total_steps: int
    """Trainer steps."""
    total_groups: int
    """Prompt groups over all steps."""
    optimizer_steps: Mapping[str, int]
    """Optimizer steps of each role."""


@dataclass(frozen=True)
class Program:
    """What a configuration asks for, as pure decisions."""

    scoring: tuple[Stage, ...]
    """The stages after which rewards are final and rows are written down."""
    stages: tuple[Stage, ...]
    """The stages that follow, up to the actor's update."""
    producers: tuple[Producer, ...]
    """Which columns roles compute in these stages, and which role each of them."""
    learners: tuple[Learner, ...]
    """The roles beside the actor that are trained in these stages."""
    advantage: AdvantageStage
    """The stage that computes advantages."""
    actor_loss: ActorLoss
    """What the actor is trained on."""
    greedy_baseline: bool
    """Whether a greedy answer to each prompt is generated and scored, too."""
    reads_accuracy: bool
    """Whether something reads the column `accuracy`."""
    preparation: PreparationStage | None
    """What comes before each optimizer step; None: nothing does."""
    bypass: bool
    """Whether old_log_probs are the sampler's."""
    branches: BranchesConfig | None = None
    """What values the steps of responses; None: nothing does."""
    recorded: Recorded | None = None
    """What is trained on where nothing is generated."""

    @property
    def reward_models(self) -> tuple[str, ...]:
        """Names those that score in this run."""
        return tuple(stage.model.name for stage in self.scoring if isinstance(stage, RewardModelScores))

    @property
    def roles(self) -> tuple[str, ...]:
        """Names the worker groups with a model beside the actor, in the order in which they are started."""
        learners = (learner.role for learner in self.learners)
        producers = (role for p in self.producers if p.role != "actor" for role in p.roles)
        return tuple(dict.fromkeys((*learners, *producers, *self.reward_models)))

    @property
    def all_roles(self) -> tuple[str, ...]:
        """Names every worker group of the run."""
        return ("actor", *self.roles, *([ROLLOUT] if self.recorded is None else []))

    def learner(self, role: str) -> Learner | None:
        """Returns the learner of a role, or None where it is frozen or absent."""
        return next((learner for learner in self.learners if learner.role == role), None)

    def describe(self, config: Config) -> list[str]:
        """Returns the dataflow of one step in the order in which it runs, for `rondo check`. config: what the
        program was planned from.
        """
        lines = [_taken(config, self.greedy_baseline)]
        if self.recorded is not None:
            lines = [f"{lines[0]}, filled by {self.recorded.describe()}", self.recorded.describe_policy()]
        if not any(isinstance(stage, CorrectionStage) for stage in self.stages):
            lines.append(describe_correction(config, _changed(self.recorded)))
        if self.branches is not None:
            n, most = self.branches.n, self.branches.most
            which = "each step" if most is None else f"each of the first {most} steps"
            said = f"{n} answers that go on from before {which} (algorithm.branches)"
            lines.append(f"{BRANCH_VALUES} <- rollout engines: {said}")
        lines += filter(None, [stage.describe() for stage in (*self.scoring, *self.stages)])
        lines += [self.preparation.describe()] if self.preparation is not None else []
        joined = ", with rows of data.pretrain in every mini-batch" if config.algorithm.pretrain_coef else ""
        lines.append("actor.update_actor reads " + ", ".join(update_columns(self.actor_loss)) + joined)
        lines += _adapted(config)
        if config.trainer.stages:
            stages = enumerate(stages_of(config), 1)
            lines += [f"stage {number} (trainer.stages), {stage.describe()}" for number, stage in stages]
        if self.recorded is not None:
            return lines
        published = f"publish weights to the rollout engines {describe_planned(config)}{in_flight(config)}"
        return [*lines, published]


def _taken(config: Config, greedy_baseline: bool) -> str:
    """Says where the rows of a step come from."""
    line, chosen = "take complete prompt groups from the buffer", config.algorithm.filter
    line += ", each with the reward of a greedy answer" if greedy_baseline else ""
    if config.data.sampler is not None:
        line += f"; {config.data.sampler.name} (data.sampler) chooses their prompts"
        line += ", and an epoch is as many as the sources have rows" if config.trainer.epochs else ""
    mix = config.algorithm.mix
    line += f"; {mix.name} (algorithm.mix) adds rows of another sampler" if mix is not None else ""
    return line + (f"; {chosen.name} (algorithm.filter) replaces those it drops" if chosen else "")


def _adapted(config: Config) -> list[str]:
    """Says what changes after the actor has."""
    kl, every = config.algorithm.kl, config.reference.refresh_every
    lines = ["adapt the KL coefficient"] if kl is not None and kl.controller.name == "adaptive" else []
    lines += ["adapt the multiplier of algorithm.constraint"] if config.algorithm.constraint else []
    return lines + ([f"every {every} steps: reference <- actor"] if every is not None else [])


def plan_program(config: Config, recorded: Recorded | None = None) -> Program:
    """Derives the stages of a step from the functions chosen in the config. recorded: what is trained on
    where rollout.recorded is set. Raises ConfigError for a column that is read and not made.
    """
    correction_config = effective_correction(config, _changed(recorded))
    algorithm = replace(config.algorithm, rollout_correction=correction_config)
    bypass = isinstance(correction_config, BypassConfig)
    advantage = AdvantageStage(algorithm, keep_rewards=config.tracking.token_columns is not None)
    router = config.actor.router
    loss = ActorLoss(algorithm, on_policy=one_update(config) and not bypass, needs_all=router.balances)
    correction = None
    if isinstance(correction_config, RolloutCorrectionConfig):
        said = describe_correction(config, _changed(recorded))
        correction = CorrectionStage(correction_config, mask_truncated=algorithm.mask_truncated, said=said)
    preparation = PreparationStage.of(algorithm)
    read = {*advantage.columns, *loss.columns, *columns_of_hooks(config)}
    for stage in (correction, preparation):
        read |= set(stage.columns) if stage is not None else set()
    read -= set(preparation.writes) if preparation is not None else set()
    by_mix = set() if algorithm.mix is None else parameters_of(algorithm.mix, Mixer)
    unread = sorted(set(algorithm.coefficients) - read - set(advantage.reads) - by_mix)
    if unread:
        raise ConfigError(
            f"algorithm.coefficients.{unread[0]} is set, but no function of the algorithm reads {unread[0]}, "
            "and no term is multiplied with it (by); remove it, or name it as a parameter before `*`",
            key=f"algorithm.coefficients.{unread[0]}",
        )
    read -= set(algorithm.coefficients)
    read -= _of_a_mix(config, advantage, recorded)
    if router.replay == "trainer":  # the pass that keeps the routes
        read.add("old_log_probs")
    _check_branches(config, read, advantage, recorded)
    read.discard(BRANCH_VALUES)
    learners = _learners(config, read, advantage)
    for learner in learners:
        read |= set(learner.loss.columns) - {learner.loss_weight, learner.mini_batch}
    if "accuracy" in read and accuracy_score(config.reward) is None and recorded is None:
        raise ConfigError(
            "the configured algorithm reads whether an answer is right (the column accuracy): set "
            "reward.accuracy to the name of the score that says so"
        )
    if "multiplier" in advantage.reads and algorithm.constraint is None:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage.name} has a constraint: set algorithm.constraint.cost"
        )
    of_turns = read & set(made_by(AGENT, per="turn"))
    if of_turns and (recorded is not None or agent_of(config.rollout) is None):
        why = "there is no agent" if recorded is None else "recorded rollouts are read without their turns"
        kind = "advantage" if of_turns & set(advantage.reads) else "policy_loss"
        raise ConfigError(
            f"algorithm.{kind}={getattr(algorithm, kind).name} reads {min(of_turns)}, which is of an agent's "
            f"turns, and {why}: train with rollout.environments, rollout.tools or rollout.agent, or use one "
            "of whole answers (gae, grpo; ppo_clip)",
            key=f"algorithm.{kind}",
        )
    producers = stages(
        read - of_turns,
        "the configured algorithm",
        bypass=bypass,
        reference_in_actor=reference_in_actor(config),
    )
    if (teachers := config.teacher).by_source:
        whose = partial(replace, by_source=teachers.by_source, for_others=teachers.path is not None)
        producers = tuple(whose(one) if one.role == "teacher" else one for one in producers)
    scoring: list[Stage] = [MiniBatches(config, learners)]
    scoring += [RewardModelScores(model) for model in _scoring_models(config, recorded)]
    seeing = SeesImages(config)
    later: list[Stage] = [seeing] if seeing.applies and recorded is None else []
    if algorithm.select is not None:
        later.append(Selection(algorithm.select))
    if algorithm.resample is not None:
        later.append(Resampling(algorithm.resample))
    waiting = [learner for learner in learners if learner.first]
    for producer in producers:
        later += [LearnerUpdate(learner, config) for learner in waiting if learner.role == producer.role]
        waiting = [learner for learner in waiting if learner.role != producer.role]
        later.append(Production(producer))
    # The correction may reject rows or tokens: what counts what is left comes after it.
    later += [stage for stage in (advantage, correction) if stage is not None]
    later += [LearnerUpdate(learner, config) for learner in learners if not learner.first]
    later.append(ActorWeights(config))
    if preparation is not None and not preparation.at_every_step:  # of what has a weight
        later.append(preparation)
        preparation = None
    return Program(
        scoring=tuple(scoring),
        stages=tuple(later),
        producers=producers,
        learners=learners,
        advantage=advantage,
        actor_loss=loss,
        greedy_baseline=GREEDY_REWARD in read,
        reads_accuracy="accuracy" in read,
        preparation=preparation,
        bypass=bypass,
        branches=algorithm.branches,
        recorded=recorded,
    )


def _check_branches(
    config: Config, read: set[str], advantage: AdvantageStage, recorded: Recorded | None
) -> None:
    """Raises ConfigError where branch_values are read and not made, or made and not read."""
    chosen, agent = config.algorithm.branches, agent_of(config.rollout)
    problem = ""
    if (chosen is None) == (BRANCH_VALUES in read):
        who = f"algorithm.advantage={config.algorithm.advantage.name}"
        problem = f"{who} reads branch_values: set algorithm.branches, e.g. to {{n: 9}}"
        if chosen is not None:
            problem = f"algorithm.branches is set, and {who} reads no branch_values: remove it"
    elif chosen is None:
        return
    elif recorded is not None:
        problem = "algorithm.branches asks for answers of the policy, and rollout.recorded runs no engines"
    elif config.trainer.replay is not None:
        problem = "algorithm.branches asks for answers that are in no journal, which trainer.replay needs"
    elif agent is not None:
        problem = (
            f"algorithm.branches goes on from places in responses, and {agent.name} plays episodes, whose "
            "environments and tools would have to be where they were then"
        )
    elif config.algorithm.mix is not None:
        problem = "algorithm.mix brings answers that the policy did not give, which have no branch_values"
    elif config.reward.models:
        problem = (
            f"algorithm.branches values answers by reward.functions alone, and reward.models "
            f"({config.reward.models[0].name}) is part of the reward: remove one of them"
        )
    if problem:
        raise ConfigError(problem, key="algorithm.branches")


def _of_a_mix(config: Config, advantage: AdvantageStage, recorded: Recorded | None) -> set[str]:
    """Returns the columns that algorithm.mix brings. Raises ConfigError where a loss reads some that nothing
    brings, or what rows of a mix are without.
    """
    is_set = config.algorithm.mix is not None
    there = set(made_by(MIXING)) if is_set else set()
    there |= {"given"} if is_set or recorded is not None else set()  # what was recorded may have such rows
    read, loss = (
        columns_of_loss(config.algorithm),
        f"algorithm.policy_loss={config.algorithm.policy_loss.name}",
    )
    wanted = {*made_by(MIXING), "given"} & read
    if missing := sorted(wanted - there):
        raise ConfigError(
            f"{loss} reads {missing[0]}, which is of rows of another sampler: set algorithm.mix to what "
            "gives them (demonstrations, replay, yours)",
            key="algorithm.policy_loss",
        )
    if is_set and "rollout_log_probs" in advantage.columns:
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage.name} reads rollout_log_probs, which rows of "
            "algorithm.mix are without; take another estimator",
            key="algorithm.advantage",
        )
    if is_set and "rollout_log_probs" in read:
        raise ConfigError(
            f"{loss} reads rollout_log_probs, which rows of algorithm.mix are without; take one that reads "
            "given_log_probs",
            key="algorithm.policy_loss",
        )
    return there


def corrected(config: Config) -> Config:
    """Returns the configuration with what its rollout correction becomes."""
    algorithm = replace(config.algorithm, rollout_correction=effective_correction(config))
    return replace(config, algorithm=algorithm)


def describe_correction(config: Config, foreign: Sequence[str] = ()) -> str:
    """Writes a line for `rondo check`: what it became, and why. foreign: as in `effective_correction`."""
    written, found = config.algorithm.rollout_correction, effective_correction(config, foreign)
    auto = written is not None and written.mode == "auto"
    causes = [
        f"trainer.max_staleness={config.trainer.max_staleness}",
        f"rollout.engine={config.rollout.engine.name}",
        *(["recorded under other settings"] if foreign else []),
    ]
    why = f" (auto: {', '.join(causes)})" if auto else ""
    if found is None:
        return f"rollout correction: off{why}"
    parts = ["bypass"] if found.mode == "bypass" else []
    if found.importance is not None:
        weights = found.importance
        bounds = (
            f"{weights.lower} to {weights.upper}" if weights.lower is not None else f"up to {weights.upper}"
        )
        how = "0 outside" if weights.outside == "mask" else "truncated"
        parts.append(f"importance weights per {weights.level}, {bounds}, {how}")
    parts += [f"reject {rule.statistic} per {rule.level}" for rule in found.reject]
    return f"rollout correction: {'; '.join(parts) or 'measured only'}{why}"


def _changed(recorded: Recorded | None) -> tuple[str, ...]:
    return () if recorded is None else recorded.changed


def _scoring_models(config: Config, recorded: Recorded | None) -> list[RewardModelConfig]:
    """Returns the reward models that score in this run: not those whose scores were recorded."""
    names = None if recorded is None else recorded.scored_by(config)
    return [model for model in config.reward.models if names is None or model.name in names]


def columns_of_hooks(config: Config) -> set[str]:
    """Returns what the filter, the sampler, the resampling and the positive-example loss read: all of it
    per-row columns.
    """
    algorithm, columns = config.algorithm, set()
    hooks: tuple[tuple[Kind, FunctionConfig | None], ...] = (
        ("filter", algorithm.filter),
        ("select", algorithm.select),
        ("resample", algorithm.resample),
    )
    for kind, chosen in hooks:
        if chosen is None:
            continue
        read = columns_read(lookup(kind, chosen.name))
        scores = [name for f in load_functions(config.reward.functions) for name in f.names]
        if kind == "select":  # which may read scores, by their names
            read = tuple(name for name in read if name in HOOK_COLUMNS or name not in scores)
        unknown = [name for name in read if name not in HOOK_COLUMNS]
        if unknown:
            raise ConfigError(
                f"algorithm.{kind}={chosen.name} reads {unknown[0]!r}, which is not there yet or is per "
                f"token; it may read {', '.join(HOOK_COLUMNS)}"
            )
        columns |= set(read)
    if config.data.sampler is not None and reads_accuracy(config.data.sampler):
        columns.add("accuracy")
    if algorithm.mix is not None and reads_accuracy(algorithm.mix, Mixer):
        columns.add("accuracy")
    if algorithm.positive_lm_coef:
        columns.add("accuracy")
    return columns


def _learners(config: Config, read: set[str], advantage: AdvantageStage) -> tuple[Learner, ...]:
    """Returns the roles that must learn because somebody reads what they predict."""
    algorithm, learners = config.algorithm, []
    for role in of_section("critic"):
        if role.makes in read:
            if role.makes not in advantage.columns:
                raise ConfigError(
                    f"algorithm.advantage.name={algorithm.advantage.name} reads no {role.makes}, yet a loss "
                    f"does: nothing makes the {role.learns_from} that the {role.name} learns from"
                )
            learners.append(critic_learner(config, role.name))
    if "process_rewards" in read:
        first = config.prm.update == "before"
        learners.append(
            Learner(
                "prm",
                PrmWorker.update_prm,
                PrmLoss(config.prm.beta),
                "prm",
                config.actor,
                seq_mean_token_mean,
                first,
            )
        )
    return tuple(learners)


def critic_learner(config: Config, role: str) -> Learner:
    """Returns the learner of a role, critic or cost_critic."""
    algorithm = config.algorithm
    method, loss = CriticWorker.update_critic, CriticLoss(algorithm.value_loss, role)
    aggregate = bind("aggregation", algorithm.aggregation)
    return Learner(role, method, loss, "critic", config.critic, aggregate)


def plan_schedule(config: Config, prompts_per_epoch: int, learners: Sequence[Learner]) -> Schedule:
    """Plans steps, prompts and optimizer steps of the whole run. learners: the roles trained beside the
    actor.
    """
    batch = config.data.batch_size
    steps, groups = config.trainer.total_steps, 1 << 62  # more prompts than any run consumes
    if config.trainer.epochs is not None:
        groups = math.ceil(config.trainer.epochs * prompts_per_epoch)
        in_epochs = math.ceil(groups / batch)
        steps = in_epochs if steps is None else min(steps, in_epochs)
    if steps is None or steps < 1:
        raise ConfigError(
            "trainer.total_steps (or trainer.epochs) gives a run of 0 steps; ask for at least one"
        )
    return schedule_of(config, steps, groups, learners)


def schedule_of(config: Config, steps: int, groups: int, learners: Sequence[Learner]) -> Schedule:
    """Returns the schedule of a run of so many steps; groups: prompts that it may consume."""
    check_profile(config, steps)
    batch = config.data.batch_size
    warmup = warmup_steps(config, learners, steps)
    per_step = _mini_batches(batch, config.actor.mini_batch_size) * config.actor.epochs
    optimizer_steps = {"actor": (steps - warmup) * per_step}
    for learner in learners:
        section = learner.section
        per_step = _mini_batches(batch, section.mini_batch_size) * section.epochs
        optimizer_steps[learner.role] = steps * per_step
    return Schedule(steps, groups, optimizer_steps)


def warmup_steps(config: Config, learners: Sequence[Learner], steps: int) -> int:
    """Returns the number of steps in which only the critic learns. Raises ConfigError when none of the run's
    steps are left.
    """
    warmup = config.critic.warmup_steps if any(learner.role == "critic" for learner in learners) else 0
    if warmup >= steps:
        raise ConfigError(
            f"critic.warmup_steps={warmup} leaves no step in which the actor learns: the run has {steps}; "
            "lower it, or raise trainer.total_steps (or trainer.epochs)"
        )
    return warmup


def _mini_batches(batch_size: int, mini_batch_size: int | None) -> int:
    return math.ceil(batch_size / (mini_batch_size or batch_size))


def check_named_models(config: Config, program: Program, recorded: Recorded | None) -> None:
    """Raises ConfigError for models that nothing in the built-in loop asks for, and sources without a
    teacher.
    """
    by_source = config.teacher.by_source
    for name in config.models:
        if name not in program.roles:
            raise ConfigError(
                f"models.{name} is set, and nothing in this run asks for it: a program does, "
                f"`session.actor({name!r})` or `session.scorer({name!r})`, and teacher.by_source, with an "
                "algorithm that reads teacher_log_probs; remove it",
                key=f"models.{name}",
            )
    sources = [source_name(source) for source in config.data.train]
    if not by_source or recorded is not None:
        return
    for source in by_source:
        if source not in sources:
            raise ConfigError(
                f"teacher.by_source.{source}: no source of data.train is called so"
                f"{did_you_mean(source, sources)} There are: {', '.join(sources)}",
                key=f"teacher.by_source.{source}",
            )
    others = [source for source in sources if source not in by_source]
    if others and config.teacher.path is None:
        raise ConfigError(
            f"teacher.by_source names no teacher for {', '.join(others)}, and there is no teacher.path for "
            "all others: set one of them",
            key="teacher.by_source",
        )
    if not others and config.teacher.path is not None:
        raise ConfigError(
            "teacher.path is for the sources that teacher.by_source does not name, and it names all of them: "
            "remove it",
            key="teacher.path",
        )
