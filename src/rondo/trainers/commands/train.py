"""A whole run: folder, warm start, worker groups, trainer, export, summary. What `rondo train`, `sft`,
`preference` and `reward-model` call.

From Python: `summary = rondo.trainers.commands.train.train(load(["recipe.yaml"]))`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from rondo.config import Config, LoadedConfig, changes, leaves_of, load, to_yaml
from rondo.controller import Cluster, WorkerGroup, start_cluster
from rondo.errors import ConfigError
from rondo.rewards import score_names
from rondo.tracking import Console, RunFolder
from rondo.trainers.commands.check import beside_recipe, check_rl, located
from rondo.trainers.commands.check_supervised import check_supervised
from rondo.trainers.loop import (
    Checkpoints,
    EngineSide,
    Reporter,
    RLTrainer,
    RolloutSide,
    RunJournal,
    already_finished,
    finish,
    remove_files,
    show_finished,
)
from rondo.trainers.program import (
    Program,
    Roles,
    Schedule,
    complete_model,
    create_model,
    create_rollout,
    load_prompts,
    open_tokenizer,
    placement_of,
    plan_schedule,
    schedule_of,
    settled,
    shares_weights,
)
from rondo.trainers.replay import (
    FollowedJournal,
    RecordedSide,
    ReplayedSide,
    check_own_folder,
    followed_journal,
    open_journal,
)
from rondo.trainers.supervised import PREFERENCE, REWARD_MODEL, SFT, SupervisedTrainer, Task
from rondo.workers import ActorWorker, RolloutWorker

# What a warm start's export depends on: one that is there is used only where these are the same. Where it
# ran, and what it told, makes no difference.
OF_WARM_STARTS = ("model", "data", "actor", "trainer")
Summary = dict[str, Any]


class Stoppable(Protocol):
    def request_stop(self) -> None: ...


def run_dir(loaded: LoadedConfig) -> str:
    """trainer.run_dir, or runs/<name of the first recipe>."""
    if loaded.config.trainer.run_dir is not None:
        return loaded.config.trainer.run_dir
    if not loaded.files:
        raise ConfigError(
            "trainer.run_dir is not set and there is no recipe file to name the run after; set it"
        )
    return str(Path("runs") / Path(loaded.files[0]).stem)


def train(loaded: LoadedConfig) -> Summary:
    """RL from a configuration; blocks until the end. Raises RondoError; KeyboardInterrupt when stopped by
    Ctrl-C.
    """
    loaded = dataclasses.replace(loaded, config=settled(loaded.config))
    program = check_rl(loaded)
    with located(loaded):
        return asyncio.run(_train(loaded, program, _console(loaded.config)))


def sft(loaded: LoadedConfig) -> Summary:
    """Supervised fine-tuning from a configuration; as `train`."""
    return _supervised(loaded, SFT)


def preference(loaded: LoadedConfig) -> Summary:
    """DPO and its relatives on preference pairs, from a configuration; as `train`."""
    return _supervised(loaded, PREFERENCE)


def reward_model(loaded: LoadedConfig) -> Summary:
    """A reward model from preference pairs, from a configuration; as `train`. Its export is what
    reward.models.path takes.
    """
    return _supervised(loaded, REWARD_MODEL)


def _supervised(loaded: LoadedConfig, task: Task) -> Summary:
    loaded = dataclasses.replace(loaded, config=settled(loaded.config))
    with located(loaded):
        check_supervised(loaded, task)
        return asyncio.run(_supervise(loaded, task, _console(loaded.config)))


def _console(config: Config) -> Console:
    return Console(config.tracking.console, samples=config.tracking.samples)


async def _train(loaded: LoadedConfig, program: Program, console: Console) -> Summary:
    folder_path = run_dir(loaded)
    check_own_folder(program.recorded, folder_path)
    followed = followed_journal(loaded.config, folder_path)
    with RunFolder(folder_path, resume=loaded.config.checkpoint.resume) as folder, ExitStack() as at_end:
        at_end.callback(remove_files, folder.path)
        checkpoints = Checkpoints(loaded.config, folder)
        checkpoints.check()
        done = already_finished(folder, loaded.config, console)
        if done is not None:
            return show_finished(loaded.config, folder, console, done)
        journal = open_journal(loaded.config, folder, followed, console.note)
        if journal is not None:
            at_end.callback(journal.close)
        config = complete_model(await warm_start(loaded, folder.path, console))
        schedule, make_side = _source_of_groups(config, program, folder, console, journal)
        reporter = Reporter(config, folder, console, title=Path(folder_path).name)
        async with await _cluster(config, console) as cluster:
            with console.phase("starting worker groups"):
                longest = config.data.max_prompt_tokens + config.rollout.max_tokens
                roles = await create_roles(cluster, config, program, schedule, longest)
            side = make_side(cluster, roles)
            trainer = RLTrainer(
                program, config, cluster, roles, schedule, side, reporter, checkpoints, journal=journal
            )
            if roles.rollout is not None:
                for line in dict.fromkeys(await roles.rollout.call(RolloutWorker.decode_path)):
                    reporter.note(line)
            return await _run_to_the_end(trainer, roles.actor, loaded.config, config, reporter, checkpoints)


def _source_of_groups(
    config: Config, program: Program, folder: RunFolder, console: Console, journal: RunJournal | None
) -> tuple[Schedule, Callable[[Cluster, Roles], RolloutSide]]:
    """How long the run is, and what its prompt groups will come from: prompts and engines, or a recording."""
    recorded = program.recorded
    if recorded is not None:
        side = functools.partial(
            RecordedSide,
            recorded,
            config,
            program.roles,
            reads_accuracy=program.reads_accuracy,
            greedy_baseline=program.greedy_baseline,
        )
        steps, groups = len(recorded.sizes), recorded.recording.num_groups
        return schedule_of(config, steps, groups, program.learners), lambda cluster, roles: side(cluster)
    with console.phase("reading prompts"):
        prompts = load_prompts(config)
    names = score_names(config.reward, prompts.train.source_names, reads_accuracy=program.reads_accuracy)

    def engines(cluster: Cluster, roles: Roles) -> RolloutSide:
        arguments = (config, roles, prompts, names, folder.path)
        if isinstance(journal, FollowedJournal):
            return ReplayedSide(journal, *arguments, greedy_baseline=program.greedy_baseline)
        return EngineSide(*arguments, greedy_baseline=program.greedy_baseline)

    return plan_schedule(config, prompts.train.rows_per_epoch, program.learners), engines


async def _supervise(loaded: LoadedConfig, task: Task, console: Console) -> Summary:
    folder_path = run_dir(loaded)
    with RunFolder(folder_path, resume=loaded.config.checkpoint.resume) as folder:
        Checkpoints(loaded.config, folder).check()
        done = already_finished(folder, loaded.config, console)
        if done is not None:
            console.note(f"{folder.path}: this run is finished; to train again, set another trainer.run_dir")
            return done
        started = await warm_start(loaded, folder.path, console)
        async with await _cluster(started, console) as cluster:
            title = Path(folder_path).name
            return await _run_supervised(task, loaded.config, started, cluster, folder, console, title)


async def _run_supervised(
    task: Task,
    written: Config,
    config: Config,
    cluster: Cluster,
    folder: RunFolder,
    console: Console,
    title: str,
) -> Summary:
    """written: as the user wrote it; config: with the model of the warm start, where there is one."""
    config = complete_model(config)
    reporter = Reporter(config, folder, console, title=title, kind=task.kind)
    checkpoints = Checkpoints(written, folder)
    with console.phase("reading data, starting worker groups"):
        trainer = await SupervisedTrainer.create(task, config, cluster, reporter, checkpoints)
    return await _run_to_the_end(trainer, trainer.actor, written, config, reporter, checkpoints)


async def create_roles(
    cluster: Cluster, config: Config, program: Program, schedule: Schedule, max_context: int
) -> Roles:
    """Start the worker groups on the devices of their pools: the actor, the other models, then the rollout
    engines (which share or gather the actor's weights, or get them from another pool), unless rollouts are
    recorded.
    """
    placement_of(config, program.all_roles)
    steps = schedule.optimizer_steps
    actor = await create_model(cluster, "actor", config, {"policy": program.actor_loss}, steps["actor"])
    models = {}
    for role in program.roles:
        learner = program.learner(role)
        losses = {learner.loss_name: learner.loss} if learner else {}
        models[role] = await create_model(cluster, role, config, losses, steps.get(role))
    if program.recorded is not None:
        return Roles(actor, None, models)
    share = shares_weights(config)
    rollout = await create_rollout(cluster, config, max_context, share=share, threads=cluster.threads)
    return Roles(actor, rollout, models)


async def warm_start(loaded: LoadedConfig, folder: Path, console: Console) -> Config:
    """Run the SFT recipe once into <folder>/warm_start; the model to start from is its export."""
    config = loaded.config
    if config.trainer.warm_start is None:
        return config
    path = folder / "warm_start"
    export = path / "export"
    recipe = beside_recipe(loaded, "trainer.warm_start", config.trainer.warm_start)
    written = load([str(recipe)])
    sft_config = settled(_warm_start_config(written.config, config))
    if (export / "config.json").exists() and (path / "summary.json").exists():
        _check_same_warm_start(path, sft_config)
    else:
        with located(written), RunFolder(path, resume="auto") as sft_folder:
            async with await _cluster(sft_config, console) as cluster:
                await _run_supervised(
                    SFT, sft_config, sft_config, cluster, sft_folder, console, title="warm start"
                )
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, path=str(export), tokenizer=str(export))
    )


def _warm_start_config(sft_config: Config, config: Config) -> Config:
    """The SFT recipe with this run's seed, trackers and cluster; it always exports.

    It trains the actor on as many devices as the run will, so that the placement of other roles changes
    nothing.
    """
    devices = len(placement_of(config).devices("actor"))
    return dataclasses.replace(
        sft_config,
        cluster=dataclasses.replace(config.cluster, devices=devices, pools={}, placement={}),
        trainer=dataclasses.replace(sft_config.trainer, seed=config.trainer.seed),
        tracking=dataclasses.replace(config.tracking, plot=False),
        checkpoint=dataclasses.replace(sft_config.checkpoint, export=True),
    )


def _check_same_warm_start(path: Path, wanted: Config) -> None:
    """Raises ConfigError where a warm start that is there already was made with other settings."""
    made = leaves_of(load([str(path / "config.yaml")]).config, only=OF_WARM_STARTS)
    changed = changes(made, leaves_of(wanted, only=OF_WARM_STARTS), "before")
    lines = "\n".join(f"  {line}" for line in changed)
    if lines:
        raise ConfigError(
            f"{path}: this warm start was made with other settings than those of trainer.warm_start's recipe "
            f"with this run's seed:\n{lines}\nRemove that folder, or choose another trainer.run_dir"
        )


async def _cluster(config: Config, console: Console) -> Cluster:
    with console.phase(f"starting {config.cluster.backend.name} backend, {config.cluster.devices} device(s)"):
        return await start_cluster(config.cluster)


@contextmanager
def stop_on_interrupt(trainer: Stoppable, console: Console) -> Iterator[None]:
    """First Ctrl-C: stop at the next safe point, save, and say how to go on. Second: stop at once. (Signals
    reach the main thread only.)
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        trainer.request_stop()
        console.note(
            "stopping at the next safe point, then saving; Ctrl-C again stops at once, without saving"
        )
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _run_to_the_end(
    trainer: RLTrainer | SupervisedTrainer,
    actor: WorkerGroup,
    written: Config,
    config: Config,
    reporter: Reporter,
    checkpoints: Checkpoints,
) -> Summary:
    """written: the configuration as the user wrote it. Raises KeyboardInterrupt where the run was stopped."""
    folder, console, cluster = reporter.folder, reporter.console, trainer.cluster
    reporter.device = f"{cluster.num_devices} x {cluster.device} ({config.cluster.backend.name})"
    await trainer.start()
    folder.write_config(to_yaml(written))
    with stop_on_interrupt(trainer, console), checkpoints.way_on_noted():
        # A task of its own, like what runs beside it (feeder, mender).
        finished = await asyncio.create_task(trainer.run(), name="trainer")
    if finished and config.checkpoint.export:
        with console.phase("exporting the model"):
            await actor.call(ActorWorker.export, str(folder.export_dir))
            open_tokenizer(config).save_pretrained(folder.export_dir)
    summary = finish(reporter, trainer.step, finished)
    if not finished:
        raise KeyboardInterrupt(
            f"stopped after step {trainer.step}; run the same command again to go on from there "
            f"({folder.path / 'checkpoints'})"
        )
    return summary
