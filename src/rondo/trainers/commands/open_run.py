"""The start and the end of a run, for every command that trains and for a program of the user's:

with open_run(loaded, folder, console) as run:      the folder is held; what is in it fits
    config = await warm_started(run)                where the model comes from
    async with run.started(config) as (cluster, reporter):
        …                                           data, worker groups, a trainer
        return await run.train(trainer)             until the end or a signal; then export and summary
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rondo.chat import FLAGS, stop_token_ids
from rondo.config import Config, LoadedConfig, to_yaml
from rondo.controller import Cluster, start_cluster
from rondo.data import PromptStream
from rondo.data.plain import plain
from rondo.data.sources import Source, open_sources
from rondo.system.signals import came, caught
from rondo.system.storage import replacing_folder
from rondo.tracking import Console, Found, Kind, RunFolder, logged_to
from rondo.trainers.commands.export import export_model, write_cards
from rondo.trainers.commands.restarts import NOBODY, Callbacks, Restarts
from rondo.trainers.loop import (
    Checkpoints,
    Reporter,
    RLRun,
    RLTrainer,
    finish,
    remove_files,
)
from rondo.trainers.program import open_tokenizer
from rondo.trainers.supervised import RowStream, SupervisedTrainer

Summary = dict[str, Any]


def open_console(config: Config) -> Console:
    """Returns the console that the configuration asks for."""
    return Console(config.tracking.console, samples=config.tracking.samples)


@contextmanager
def open_run(
    loaded: LoadedConfig,
    path: str | Path,
    console: Console,
    callbacks: Callbacks = NOBODY,
    restarts: Restarts | None = None,
) -> Iterator[OpenRun]:
    """Holds the folder of a run. restarts: whose attempt this is; None: there are none.
    Raises CheckpointError where the run cannot go on from what is in it.
    """
    restarts = restarts or Restarts(loaded.config, console)
    kept = loaded.config.checkpoint
    resume = "auto" if restarts.number else kept.resume  # what it finds is its own
    with RunFolder(path, resume=resume, checkpoints=kept.path) as folder, ExitStack() as at_end:
        at_end.callback(remove_files, folder.path)
        run = OpenRun(loaded, folder, console, at_end, callbacks, restarts)
        for line in run.checkpoints.check():
            console.warn(line)
        if run.checkpoints.was_read_before(1):
            console.warn(read_otherwise(loaded.config))
        yield run


class OpenRun:
    """A run whose folder is held."""

    def __init__(
        self,
        loaded: LoadedConfig,
        folder: RunFolder,
        console: Console,
        at_end: ExitStack,
        callbacks: Callbacks,
        restarts: Restarts,
    ) -> None:
        self.loaded = loaded
        """As the user wrote it: before a warm start says where the model comes from."""
        self.folder = folder
        self.console = console
        self.at_end = at_end
        """What is closed before the folder is."""
        self.restarts = restarts
        self.checkpoints = Checkpoints(loaded.config, folder)
        self.ahead: list[Found] = []
        """What was known before it began, and warned of."""
        self._callbacks = callbacks
        self._request_stop: Callable[[], None] | None = None  # while it can be stopped

    @asynccontextmanager
    async def started(self, config: Config, kind: Kind = "rl") -> AsyncIterator[tuple[Cluster, Reporter]]:
        """Starts the cluster. config: what is trained, complete."""
        reporter = Reporter(config, self.folder, self.console, title=self.folder.path.name, kind=kind)
        reporter.on_step = self._stepped
        reporter.on_evaluation = partial(self._evaluated, reporter)
        reporter.callback = partial(self._call, reporter)
        self.checkpoints.on_checkpoint = reporter.saved
        reporter.restarts = self.restarts.number
        reporter.ahead = self.ahead
        backend, devices = config.cluster.backend.name, config.cluster.devices
        logs = self.folder.logs_dir
        with logged_to(logs / "controller.log", self.folder.attempt):
            with self.console.phase(f"starting {backend} backend, {devices} device(s)"):
                cluster = await start_cluster(config.cluster, logs)
            async with cluster:
                reporter.device = f"{cluster.num_devices} x {cluster.device} ({backend})"
                yield cluster, reporter

    def warn_ahead(self, found: list[Found]) -> None:
        """Warns of what is known before the run begins, once; it is in the summary, too."""
        if self.restarts.number:
            return
        self.ahead += found
        for one in found:
            self.console.warn(one.warning())

    def take_rows(self, stream: RowStream | PromptStream) -> None:
        """Takes what the run is trained on: looks at the rows that were not read yet, beside the run. Says
        where an older rondo had another order of them. Raises CheckpointError where they are not those of the
        checkpoint to go on from.
        """
        chosen = isinstance(stream, PromptStream) and stream.chosen is not None
        for line in self.checkpoints.take_rows(stream, chosen=chosen):
            self.console.warn(line)
        self.at_end.enter_context(stream.looked_at())
        drops = self.loaded.config.data.overlong_prompts == "drop"
        if drops and stream.large_sources and self.checkpoints.was_read_before(2):
            self.console.warn(
                "an older rondo began this run, and left rows that are too long out of the order of large "
                f"sources: where {', '.join(stream.large_sources)} has some, rows come in another order from "
                "here"
            )

    async def train(self, trainer: RLTrainer | SupervisedTrainer) -> Summary:
        """Trains, and ends the run."""
        await trainer.start()
        self.restarts.reached = trainer.step
        self.begin(trainer.reporter)
        if self.restarts.number:
            trainer.reporter.note(f"{self.restarts.name}: {_goes_on_from(trainer.step)}")
            trainer.clock.mark("restart", {"number": self.restarts.number})
        with self.stoppable(trainer.request_stop):
            # A task of its own, like what runs beside it (feeder, mender).
            finished = await asyncio.create_task(trainer.run(), name="trainer")
        return await self.end(trainer, finished)

    def begin(self, reporter: Reporter) -> None:
        """Makes the folder this run's and starts the trackers, once what can fail before the first step has
        not failed: what was in the folder is as it was until then.
        """
        moved_to = self.folder.begin(to_yaml(self.loaded.config))
        if moved_to is not None:
            self.console.warn(
                f"the earlier run here has no checkpoint to go on from: it is now in {moved_to}"
            )
        self.console.tell_silence(self.folder.note)
        reporter.start_trackers()

    def _stepped(self, metrics: Mapping[str, Any]) -> None:
        self.restarts.reached = metrics["step"]

    def _call(self, reporter: Reporter, name: str, *arguments: Any) -> None:
        """Calls a function of the user's, where there is one, and ends the run where it says so."""
        if self._callbacks.call(name, *arguments):
            self._end_early(reporter)

    def _evaluated(self, reporter: Reporter, step: int, metrics: Mapping[str, Any]) -> None:
        """Looks after every evaluation whether it is the best, or the last that is waited for."""
        best = self.checkpoints.best
        if self.checkpoints.evaluated(step, metrics):
            reporter.note(f"step {step}: the best {best.config.metric} so far, {best.value:.4g}")
        elif best.enough:
            reporter.note(
                f"{best.waited} evaluations without a better {best.config.metric} than that of step "
                f"{best.step} (checkpoint.best.patience): the run ends"
            )
            self._end_early(reporter)

    def _end_early(self, reporter: Reporter) -> None:
        reporter.is_enough = True
        assert self._request_stop is not None
        self._request_stop()

    @contextmanager
    def stoppable(self, request_stop: Callable[[], None]) -> Iterator[None]:
        """Around training: the first Ctrl-C (SIGTERM, SIGHUP) asks it to stop at the next safe point and to
        save its state, the second one stops it at once. An error that ends it says how the run can go on.
        """

        def stop() -> None:
            self.restarts.stopping = True
            request_stop()
            name = "Ctrl-C" if came() == signal.SIGINT else came().name
            self.console.note(
                f"stopping at the next safe point, then saving; {name} again stops at once, without saving"
            )

        self._request_stop = request_stop
        with caught(stop), self.checkpoints.way_on_noted():
            yield

    async def end(self, trained: RLRun | SupervisedTrainer, finished: bool) -> Summary:
        """Exports the model, writes and returns the summary. Raises KeyboardInterrupt where the run was
        stopped before its end.
        """
        reporter, best = trained.reporter, self.checkpoints.best
        if not finished and not reporter.is_enough:
            raise KeyboardInterrupt(
                f"stopped after step {trained.step}; run the same command again to go on from there "
                f"({self.folder.checkpoints_dir})"
            )
        with self.checkpoints.way_on_noted():
            others = trained.others if isinstance(trained, RLRun) else []
            if trained.config.checkpoint.export:
                which = "" if best.step is None else f" of step {best.step}, the best"
                for policy in (trained, *others):
                    group, folder = policy.roles.actor, self.folder.export_dir
                    if policy is not trained:
                        folder = self.folder.exports_dir / group.role
                    what = "the model" if policy is trained else group.role
                    with self.console.phase(f"exporting {what}{which}"), replacing_folder(folder) as part:
                        await self.checkpoints.load_best(group, trained.step)
                        rounded = await export_model(group, policy.config, part)
                    if rounded is not None:
                        self.console.note(rounded)
            summary = finish(reporter, trained.step, best.told())
            if trained.config.checkpoint.export:  # they say what the summary does
                names = [other.roles.actor.role for other in others]
                write_cards(self.folder, self.loaded.config, best.step or trained.step, names)
            return summary


def _goes_on_from(step: int) -> str:
    if step:
        return f"goes on behind step {step}, of which the newest checkpoint is"
    return "begins with the first step, as there was no checkpoint (checkpoint.every)"


# ---- what an older rondo read otherwise, said once where its run goes on ----


def read_otherwise(config: Config) -> str:
    """Returns, in one line, what is in the sources that is read otherwise now, and whether responses end at
    other tokens. Reads all rows. Raises ConfigError and DataError as a run's start does.
    """
    there = [
        f"{source.name!r} ({source.origin}) has {', '.join(found)}"
        for sources in (config.data.train, config.data.eval)
        for source in (open_sources(sources) if sources else ())
        if (found := _found(source))
    ]
    tokenizer = open_tokenizer(config)
    ends = stop_token_ids(tokenizer)
    tokenizer.end_token_ids = ()
    added = [tokenizer.convert_ids_to_tokens(i) for i in ends if i not in stop_token_ids(tokenizer)]
    stops = f"end at {', '.join(map(repr, added))}, too" if added else "end at the same tokens"
    return (
        "an older rondo began this run, and read conversations otherwise: "
        f"{'; '.join(there) or 'no source has message parts, calls, flags or nulls'}; responses {stops}"
    )


def _found(source: Source) -> list[str]:
    found: set[str] = set()
    for row in source.rows:
        for name, value in row.items():
            if name == "tools" and _has_null(plain(value)):
                found.add("nulls")
            if isinstance(value, list | tuple):
                found.update(word for message in value for word in _said(message))
    return [word for word in ("message parts", "calls", "flags", "nulls") if word in found]


def _said(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping) or "role" not in message:
        return
    if not isinstance(message.get("content"), str | None):
        yield "message parts"
    if message.get("tool_calls"):
        yield "calls"
    if any(message.get(flag) is not None for flag in FLAGS):
        yield "flags"
    if any(_has_null(value) for value in plain(message.get("tool_calls") or ())):
        yield "nulls"


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(child is None or _has_null(child) for child in value.values())
    return isinstance(value, list) and any(map(_has_null, value))
