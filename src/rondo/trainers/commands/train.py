"""Reinforcement learning from a configuration: what `rondo train` calls.

From Python: `summary = rondo.trainers.commands.train.train(load(["recipe.yaml"]))`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from rondo.config import Config, LoadedConfig
from rondo.controller import Cluster
from rondo.tracking import Console
from rondo.trainers.commands.ahead import found_in_data, read_prompts
from rondo.trainers.commands.check import check_rl
from rondo.trainers.commands.event_loop import read_beside
from rondo.trainers.commands.open_run import OpenRun, Summary, open_console, open_run
from rondo.trainers.commands.plan_run import plan_run, speed_of
from rondo.trainers.commands.recipe import located, run_dir, settled_recipe
from rondo.trainers.commands.restarts import NOBODY, Callbacks, Restarts
from rondo.trainers.commands.supervised import warm_started
from rondo.trainers.loop import (
    EngineSide,
    PlannedRun,
    RLTrainer,
    RolloutSide,
    RunJournal,
    already_finished,
    show_finished,
)
from rondo.trainers.program import (
    Program,
    Roles,
    Schedule,
    create_model,
    create_rollout,
    head_notes,
    schedule_of,
)
from rondo.trainers.replay import (
    FollowedJournal,
    RecordedSide,
    ReplayedSide,
    check_own_folder,
    followed_journal,
    open_journal,
)
from rondo.workers import RolloutWorker

# How long a run is, and what makes the side where its prompt groups come from.
Source = tuple[Schedule, Callable[[Cluster, Roles], RolloutSide]]


def train(loaded: LoadedConfig, callbacks: Callbacks = NOBODY) -> Summary:
    """Trains by RL from a configuration, and returns the summary; blocks until the end, which
    callbacks may bring about. Raises RondoError; KeyboardInterrupt when stopped by Ctrl-C.
    """
    loaded = settled_recipe(loaded)
    with ExitStack() as tools:
        program = check_rl(loaded, tools)
        with located(loaded), open_console(loaded.config) as console:
            restarts = Restarts(loaded.config, console)
            return restarts.run(lambda: _train(loaded, program, tools, console, callbacks, restarts))


async def _train(
    loaded: LoadedConfig,
    program: Program,
    tools: ExitStack,
    console: Console,
    callbacks: Callbacks,
    restarts: Restarts,
) -> Summary:
    """tools: of the check, closed when the rollout workers have theirs."""
    folder = run_dir(loaded)
    check_own_folder(program.recorded, folder)
    followed = followed_journal(loaded.config, folder)
    with open_run(loaded, folder, console, callbacks, restarts) as run:
        done = already_finished(run.folder, loaded.config, console)
        if done is not None:
            return show_finished(loaded.config, run.folder, console, done)
        journal = open_journal(loaded.config, run.folder, followed, console.note)
        if journal is not None:
            run.at_end.callback(journal.close)
        config = await warm_started(run, run.folder.path, partial(_read_ahead, program))
        planned = _planned(config, program)
        if planned is not None and planned.warning:
            console.warn(planned.warning)
        if program.recorded is not None:
            schedule, make_side = _recording(config, program)
        else:
            schedule, make_side = await _engines(config, program, run, journal)
        async with run.started(config) as (cluster, reporter):
            reporter.speed = speed_of(config, planned)
            with console.phase("starting worker groups"):
                roles = await create_roles(cluster, config, program, schedule)
            await asyncio.to_thread(tools.close)
            for line in head_notes(config, program.roles):
                reporter.note(line)
            side = make_side(cluster, roles)
            trainer = RLTrainer(
                program, config, cluster, roles, schedule, side, reporter, run.checkpoints, journal=journal
            )
            if roles.rollout is not None:
                for line in dict.fromkeys(await roles.rollout.call(RolloutWorker.decode_path)):
                    reporter.note(line)
            return await run.train(trainer)


def _planned(config: Config, program: Program) -> PlannedRun | None:
    learners = {"actor", *(learner.role for learner in program.learners)}
    return plan_run(config, program.all_roles, learners)


def _read_ahead(program: Program, config: Config) -> None:
    """Finds before a warm start what would be found behind it."""
    _planned(config, program)
    if program.recorded is None:
        read_prompts(program, config)


def _recording(config: Config, program: Program) -> Source:
    recorded = program.recorded
    assert recorded is not None
    steps, groups = len(recorded.sizes), recorded.recording.num_groups
    schedule = schedule_of(config, steps, groups, program.learners)
    return schedule, lambda cluster, roles: RecordedSide(recorded, program, config, cluster)


async def _engines(config: Config, program: Program, run: OpenRun, journal: RunJournal | None) -> Source:
    with run.console.phase("reading prompts") as tell:
        prompts, names, schedule = await read_beside(partial(read_prompts, program, config), tell)
    run.take_rows(prompts.train)
    run.warn_ahead(found_in_data(config, prompts.train, schedule.optimizer_steps, prompts.held_out()))
    for note in prompts.notes:
        run.console.note(note)

    def side(cluster: Cluster, roles: Roles) -> RolloutSide:
        arguments = (config, roles, prompts, names, run.folder.path)
        if isinstance(journal, FollowedJournal):
            return ReplayedSide(journal, *arguments, greedy_baseline=program.greedy_baseline)
        return EngineSide(*arguments, greedy_baseline=program.greedy_baseline)

    return schedule, side


async def create_roles(cluster: Cluster, config: Config, program: Program, schedule: Schedule) -> Roles:
    """Starts the worker groups on the devices of their pools: the actor, the other models, then the rollout
    engines (which share or gather the actor's weights, or get them from another pool), unless rollouts are
    recorded.
    """
    steps = schedule.optimizer_steps
    actor = await create_model(cluster, "actor", config, {"policy": program.actor_loss}, steps["actor"])
    models = {}
    for role in program.roles:
        learner = program.learner(role)
        losses = {learner.loss_name: learner.loss} if learner else {}
        models[role] = await create_model(cluster, role, config, losses, steps.get(role))
    if program.recorded is not None:
        return Roles(actor, None, models)
    return Roles(actor, await create_rollout(cluster, config, actor.devices), models)
