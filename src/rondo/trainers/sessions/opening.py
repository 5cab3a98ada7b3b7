"""An RL algorithm as a program: the roles of a run, handed out one by one to a loop that you write.

    async with open_session(["ppo"]) as session:
        actor, critic, reward = await session.actor(), await session.critic(), await session.reward()
        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            ...

The recipe has the numbers, the program the algorithm. Episodes, asynchrony, filters, evaluation, checkpoints
and resume are the built-in loop's (`loop/rl.py`). docs/programming_guide.md explains a program line by line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from rondo.config import Config, LoadedConfig, RewardConfig, RewardFunctionConfig, load
from rondo.core.errors import ConfigError, told_shortly
from rondo.planning import effective_correction
from rondo.system.signals import exiting
from rondo.trainers.commands.check import without_data
from rondo.trainers.commands.check_machine import check_backend, check_files, check_reward_models
from rondo.trainers.commands.event_loop import LoopWatch, read_beside
from rondo.trainers.commands.open_run import open_console, open_run
from rondo.trainers.commands.plan_run import speed_of
from rondo.trainers.commands.recipe import changed_keys, second_pass, settled_recipe
from rondo.trainers.commands.supervised import warm_started
from rondo.trainers.loop import already_finished
from rondo.trainers.program import describe_correction, load_prompts
from rondo.trainers.sessions.handles import Function
from rondo.trainers.sessions.programmed import ProgrammedRun
from rondo.trainers.sessions.session import Session


@contextlib.asynccontextmanager
async def open_session(
    recipes: Sequence[str | Path], overrides: Sequence[str] = (), *, reward: Function | None = None
) -> AsyncIterator[Session]:
    """Starts a cluster and a run folder for the program inside.

    recipes (files or shipped names, merged in order) and overrides (`key.sub=value`) as for `rondo train`.
    reward: replaces reward.functions by one, which may be a Python function of (prompt, trajectory). The
    folder is trainer.run_dir (default runs/session). With checkpoint.every a program that was killed or
    stopped goes on where it was when it is started again; without, what an earlier program wrote there moves
    to discarded/. A warm start is kept beside the folder, for all programs that run next to each other. When
    the program ends without an error, curves, summary and (checkpoint.export) the model are written. Raises
    ConfigError for what cannot work.
    """
    with told_shortly():
        loaded = settled_recipe(load([str(recipe) for recipe in recipes], overrides))
        check_session(loaded)
    config = loaded.config
    folder = Path(config.trainer.run_dir or "runs/session")
    with (
        told_shortly(),
        exiting(),
        LoopWatch(config.cluster.hang_seconds),
        open_console(config) as console,
        open_run(loaded, folder, console) as run,
    ):
        for note in loaded.notes:
            console.note(note)
        if effective_correction(config) is not None:
            console.note(describe_correction(config))
        # A program cannot be left out: without a checkpoint it is trained anew, and the earlier run moves.
        if run.folder.resuming and already_finished(run.folder, config, console) is not None:
            console.note(f"{folder}: this program is finished, and nothing is left to train")
        config = await warm_started(run, folder.parent, load_prompts)
        if reward is not None:
            own = RewardConfig(functions=(RewardFunctionConfig(reward),))  # type: ignore[arg-type]
            config = dataclasses.replace(config, reward=own)
        with console.phase("reading prompts") as tell:
            data = await read_beside(partial(load_prompts, config), tell)
        run.take_rows(data.train)
        for note in data.notes:
            console.note(note)
        async with run.started(config) as (cluster, reporter):
            reporter.algorithm = "a program of your own"
            reporter.speed = speed_of(config, None)
            program = ProgrammedRun(config, data, reporter)
            session = Session(program, cluster, run.checkpoints, begin=partial(run.begin, reporter))
            with run.stoppable(session.request_stop):
                try:
                    yield session
                except BaseException as error:
                    await session.close(error)
                    raise
                await session.close()
            if session.step or reporter.stopped:
                await run.end(program.run, finished=not reporter.stopped)


# ---- the second pass over the configuration of a program, before anything starts ----


# What the built-in loop does by configuration, and a program by a line of its own.
YOURS: Mapping[str, str] = {
    "trainer.stages": "session.step says where the run is; temperature=, max_tokens= are arguments of a call",
    "algorithm.branches": "await actor.branch_values(batch, places, n=…)",
    "trainer.replay": "nothing writes a journal, or follows one",
    "reference.refresh_every": "await reference.follow(actor)",
    "algorithm.mix": "session.rows(prompts, responses) makes rows of another sampler",
    "rollout.recorded": "read the rows: cluster.put(Batch.read_parquet(file), index_columns())",
}


def check_session(loaded: LoadedConfig) -> None:
    """Raises ConfigError for all that a program of the user's cannot do as configured."""
    config = loaded.config
    with second_pass(loaded) as found:
        found.problems += without_data(config)
        found.problems += _of_the_built_in_loop(config)
        found.problems += _restarts(loaded)
        found.of(check_backend, config)
        found.of(functools.partial(check_files, context=True), loaded)
        found.of(check_reward_models, config, [model.name for model in config.reward.models])


def _restarts(loaded: LoadedConfig) -> Iterator[ConfigError]:
    key = "trainer.max_restarts"
    if loaded.config.trainer.max_restarts and any(key == changed for changed, _ in changed_keys(loaded)):
        text = f"{key} is for the built-in loop; a program of your own goes on when you start it again"
        yield ConfigError(text, key=key)


def _of_the_built_in_loop(config: Config) -> Iterator[ConfigError]:
    for key, instead in YOURS.items():
        section, name = key.split(".")
        if getattr(getattr(config, section), name) not in (None, ()):
            text = f"{key} is for the built-in loop; in a program of your own, {instead}"
            yield ConfigError(text, key=key)
    if config.teacher.by_source:
        key, name = "teacher.by_source", next(iter(config.teacher.by_source.values()))
        text = f"{key} is for the built-in loop; in a program of your own, await session.scorer({name!r})"
        yield ConfigError(text, key=key)
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction.mode"
    if correction is not None and correction.mode == "bypass":
        yield ConfigError(
            f"{key}=bypass is for the built-in loop: here compute_log_prob gives old_log_probs; use "
            "mode=decoupled, or `rondo train`",
            key=key,
        )
