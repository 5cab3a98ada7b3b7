"""Supervised runs: what `rondo sft`, `preference` and `reward-model` call, and warm starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rondo.config import Config, LoadedConfig, beside_recipe, changes, leaves_of, load
from rondo.core.errors import ConfigError
from rondo.planning import placement_of
from rondo.system.storage import make_folder
from rondo.tracking import Console, Kind
from rondo.trainers.commands.ahead import before_warm_start, found_in_data, known_ahead
from rondo.trainers.commands.check_supervised import check_supervised
from rondo.trainers.commands.event_loop import read_beside
from rondo.trainers.commands.export import with_model
from rondo.trainers.commands.open_run import OpenRun, Summary, open_console, open_run
from rondo.trainers.commands.plan_run import plan_run, speed_of
from rondo.trainers.commands.recipe import in_folder, located, run_dir, settled_recipe
from rondo.trainers.commands.restarts import NOBODY, Callbacks, Restarts
from rondo.trainers.commands.warm_cache import DEPENDS_ON, entry_of, keep
from rondo.trainers.loop import already_finished, config_of
from rondo.trainers.program import complete_model
from rondo.trainers.supervised import PREFERENCE, REWARD_MODEL, SFT, SupervisedTrainer, Task


def sft(loaded: LoadedConfig, callbacks: Callbacks = NOBODY) -> Summary:
    """Fine-tunes on conversations, from a configuration; as `train`."""
    return _supervised(loaded, SFT, callbacks)


def preference(loaded: LoadedConfig, callbacks: Callbacks = NOBODY) -> Summary:
    """Trains on preference pairs (DPO and its relatives), from a configuration; as `train`."""
    return _supervised(loaded, PREFERENCE, callbacks)


def reward_model(loaded: LoadedConfig, callbacks: Callbacks = NOBODY) -> Summary:
    """Trains a reward model on preference pairs, from a configuration; as `train`. Its export is what
    reward.models.path takes.
    """
    return _supervised(loaded, REWARD_MODEL, callbacks)


def _supervised(loaded: LoadedConfig, task: Task, callbacks: Callbacks) -> Summary:
    loaded = settled_recipe(loaded)
    check_supervised(loaded, task)
    with located(loaded), open_console(loaded.config) as console:
        restarts = Restarts(loaded.config, console)
        return restarts.run(lambda: _supervise(loaded, task, console, callbacks, restarts))


async def _supervise(
    loaded: LoadedConfig, task: Task, console: Console, callbacks: Callbacks, restarts: Restarts
) -> Summary:
    with open_run(loaded, run_dir(loaded), console, callbacks, restarts) as run:
        done = already_finished(run.folder, loaded.config, console)
        if done is not None:
            console.note(
                f"{run.folder.path}: this run is finished; to train again, set another trainer.run_dir"
            )
            return done
        config = await warm_started(run, run.folder.path, task.streams, task.kind)
        return await _trained(run, task, config)


async def _trained(run: OpenRun, task: Task, config: Config) -> Summary:
    planned = plan_run(config, task.roles(config), ["actor"])
    if planned is not None and planned.warning:
        run.console.warn(planned.warning)
    async with run.started(config, task.kind) as (cluster, reporter):
        reporter.speed = speed_of(config, planned)
        with run.console.phase("reading data") as tell:
            streams = await read_beside(partial(task.streams, config), tell)
        run.take_rows(streams[0])
        trainer = SupervisedTrainer(task, config, cluster, reporter, run.checkpoints, *streams)
        held_out = streams[1].digests() if streams[1] else {}
        run.warn_ahead(found_in_data(config, streams[0], {"actor": trainer.total_steps}, held_out))
        return await run.train(trainer)


async def warm_started(
    run: OpenRun, folder: Path, read: Callable[[Config], object], kind: Kind = "rl"
) -> Config:
    """Returns the run's configuration with its folder and a complete model: that of trainer.warm_start's
    recipe, trained once into <folder>/warm_start, where it is set; or found there, or among those that this
    machine has made before, and linked. Before that it warns of what is known ahead of a run of this kind,
    and where the warm start is to be trained reads the data, by `read`, so that their errors come first.
    """
    run.warn_ahead(known_ahead(run.loaded, kind))
    config, path = in_folder(run.loaded.config, run.folder.path), folder / "warm_start"
    if config.trainer.warm_start is None:
        return complete_model(config)
    recipe = load([str(beside_recipe(run.loaded, "trainer.warm_start", config.trainer.warm_start))])
    recipe = settled_recipe(dataclasses.replace(recipe, config=_warm_start_config(recipe.config, config)))
    if (path / "export" / "config.json").exists() and (path / "summary.json").exists():
        _check_same_warm_start(path, recipe.config)
        return complete_model(with_model(config, path / "export"))
    entry = entry_of(recipe.config)
    if path.is_symlink():  # to one that was removed since
        path.unlink()
    if entry is not None and entry.exists() and not path.exists():
        make_folder(path.parent)
        path.symlink_to(entry)
        run.console.note(f"warm start: made before on this machine ({entry})")
    else:
        ahead = before_warm_start(run.loaded)
        if ahead is not None:
            with run.console.phase("reading data, before the warm start") as tell:
                await read_beside(partial(read, complete_model(in_folder(ahead, run.folder.path))), tell)
        with located(recipe), open_run(recipe, path, run.console, restarts=run.restarts) as first:
            first.warn_ahead(known_ahead(recipe, "sft"))
            await _trained(first, SFT, complete_model(in_folder(recipe.config, path)))
        if entry is not None:
            keep(path, entry)
    return complete_model(with_model(config, path / "export"))


def _warm_start_config(sft_config: Config, config: Config) -> Config:
    """Returns the SFT recipe with this run's seed, trackers and cluster; it always exports.

    It trains the actor on as many devices as the run will, so that the placement of other roles changes
    nothing.
    """
    devices = len(placement_of(config).devices("actor"))
    return dataclasses.replace(
        sft_config,
        cluster=dataclasses.replace(config.cluster, devices=devices, pools={}, placement={}),
        trainer=dataclasses.replace(sft_config.trainer, seed=config.trainer.seed),
        tracking=dataclasses.replace(config.tracking, plot=False),
        checkpoint=dataclasses.replace(
            sft_config.checkpoint, export=True, export_dtype=sft_config.actor.param_dtype, resume="auto"
        ),
    )


def _check_same_warm_start(path: Path, wanted: Config) -> None:
    """Raises ConfigError where a warm start that is there already was made with other settings."""
    made = leaves_of(config_of(path), only=DEPENDS_ON)
    lines = "\n".join(f"  {line}" for line in changes(made, leaves_of(wanted, only=DEPENDS_ON), "before"))
    if lines:
        raise ConfigError(
            f"{path}: this warm start was made with other settings than those of trainer.warm_start's recipe "
            f"with this run's seed:\n{lines}\nRemove that folder, or choose another trainer.run_dir"
        )
