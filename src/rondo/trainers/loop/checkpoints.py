"""When a run's state is cut, written and restored. What a state is belongs to the trainer, how it is kept to
`checkpoint`. Which evaluation was the
best so far, and so which checkpoint is kept for it, is decided here, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from rondo.checkpoint import (
    READER,
    Checkpoint,
    CheckpointStore,
    ControllerState,
    Grown,
    alike,
    check_compatible,
    compatibility_record,
    load_compatibility,
    load_controller_state,
    load_named,
    load_rows,
    save_controller_state,
    taking_over,
)
from rondo.config import BestConfig, Config, changes, leaves_of
from rondo.controller import WorkerGroup
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import ConfigError, OtherRunError, StorageError
from rondo.system.urls import Place, spelled
from rondo.tracking import Clock, RunFolder
from rondo.trainers.loop.evaluation import OF_SCORED, numbers_of
from rondo.trainers.loop.named import changed_files, named_files, refuse_changed
from rondo.trainers.loop.resume import FREE
from rondo.workers import ModelWorker

T = TypeVar("T")
# What checkpoints carry that lie elsewhere than their run; of an older rondo, all metrics so far, too.
_SETTINGS, _METRICS = "settings.json", "metrics.jsonl"


class Resumable(Protocol):
    """A trainer, as seen from here."""

    step: int
    clock: Clock

    def saved_roles(self) -> Mapping[str, WorkerGroup]: ...

    def state(self) -> ControllerState:
        """Returns the controller's part of a checkpoint, without the rows of groups."""
        ...

    def waiting(self) -> Mapping[int, BatchRef]:
        """Returns the groups whose rows are part of it, by sequence number."""
        ...

    async def load_state(self, state: ControllerState) -> None: ...


class TrainingRows(Protocol):
    """The training data, as seen from here."""

    @property
    def content(self) -> Mapping[str, Any]: ...

    def changes_since(self, content: Mapping[str, Any]) -> list[str]: ...


class Checkpoints:
    """Writes, finds and reads a run's checkpoints. config: as the user wrote it (before a warm start set
    model.path); a resumed run must agree with it.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._store = CheckpointStore(folder.checkpoints_dir, config.checkpoint.keep)
        self.best = Best(config.checkpoint.best)
        self._reader = READER  # that of the checkpoint to go on from
        self.on_checkpoint: Callable[[int, Place], None] | None = None
        """Hears the step and the folder of each that is whole."""
        self.cut: ControllerState | None = None
        """The trainer's part of a state that `snapshot` has copied and nobody has written yet."""
        self._waiting: Mapping[int, BatchRef] = {}  # as it was cut
        self._grown = Grown()  # the metrics that checkpoints elsewhere have
        self._goes_on = False  # whether the newest of their parts is from here
        self._rows: Mapping[str, Any] = {}  # what the rows of the training data are
        self._named: Mapping[str, Any] = {}  # what is meant by the names of models and code

    def check(self) -> list[str]:
        """Looks, before anything starts, whether there is a checkpoint that is whole and fits, and whether
        one can be written. Returns what to say of models and code that have changed, and where the run goes
        on in a folder that has nothing of it: so, and each setting that differs. Raises CheckpointError,
        StorageError.
        """
        checkpoint = self._newest
        self._store.check_place()
        if checkpoint is None:
            return []
        said = [f"goes on with what has changed under its name: {line}" for line in self._changed(checkpoint)]
        if _SETTINGS not in checkpoint.files or self._folder.has_run:
            return said
        with taking_over(checkpoint):
            old = dict(json.loads(checkpoint.read(_SETTINGS)))
        changed = changes(old, leaves_of(self._config), "before", free=FREE)
        return [
            f"{self._folder.path} has nothing of this run yet: it goes on from {checkpoint.path}",
            *(f"goes on with another setting than it began with: {line}" for line in changed),
            *said,
        ]

    def _changed(self, checkpoint: Checkpoint) -> list[str]:
        """Returns what has changed of models and code that may. Raises OtherRunError for the others."""
        with self._store.way_out_named(checkpoint.step):
            before = load_named(checkpoint)
        fixed, free = changed_files(before, named_files(self._config))
        refuse_changed(fixed, "or begin another run in a folder of its own: trainer.run_dir=…")
        return free

    def was_read_before(self, reader: int) -> bool:
        """Says whether the run that is gone on with was begun by a rondo that read data otherwise, as before
        this READER.
        """
        return self._newest is not None and self._reader < reader

    def take_rows(self, stream: TrainingRows, *, chosen: bool) -> list[str]:
        """Takes the run's training rows, of which each checkpoint says what they are. chosen: a sampler
        chooses them, whose state names rows by number. Returns what to say where they are others than those
        of the checkpoint to go on from; raises OtherRunError where the run is not to go on with these.
        """
        self._rows = stream.content
        if self._newest is None:
            return []
        with self._store.way_out_named(self._newest.step):
            before = load_rows(self._newest)
        changed = stream.changes_since(before)
        if not changed:
            return []
        what = "data.train has other rows than when the checkpoint was written"
        if self._config.checkpoint.changed_data == "warn" and not chosen:
            effect = "some of this pass may come again, and others not at all"
            return [f"{what} ({'; '.join(changed)}): {effect} (checkpoint.changed_data=warn)"]
        lines = "\n".join(f"  {line}" for line in changed)
        otherwise = "" if chosen else ", or set checkpoint.changed_data=warn to go on with these"
        raise OtherRunError(
            f"{what}:\n{lines}\nWhich come next depends on all of them: prompts would come again, and others "
            "not at all. Put the rows back, begin another run in a folder of its own (trainer.run_dir=…)"
            f"{otherwise}"
        )

    @cached_property
    def _newest(self) -> Checkpoint | None:
        """Returns what an earlier attempt left to go on from, if anything; looked at once."""
        checkpoint = self._store.latest() if self._folder.resuming else None
        if checkpoint is not None:
            with self._store.way_out_named(checkpoint.step):
                record, self._reader = load_compatibility(checkpoint)
            check_compatible(record, compatibility_record(self._config))
        return checkpoint

    async def restore(self, trainer: Resumable) -> int | None:
        """Loads the newest checkpoint into the trainer and its roles; what was logged beyond it moves aside.

        Every file is read once, and checked as it is read. Returns the step, or None when there is nothing to
        resume. Raises CheckpointError for a damaged or foreign one.
        """
        self._named = await _waited_for(named_files, self._config)  # now that models are on this machine
        checkpoint = self._newest
        if checkpoint is None:
            return None
        with self._store.way_out_named(checkpoint.step):
            state = load_controller_state(checkpoint)
            self._take_over_metrics(checkpoint)
            self._folder.discard_beyond(checkpoint.step)
            for role, group in trainer.saved_roles().items():
                if not (files := checkpoint.files_in(role)):
                    raise OtherRunError(
                        f"{checkpoint.path} has nothing of {role}, which learns here and did not when it was "
                        "written: go on without it, or begin another run (trainer.run_dir=…)"
                    )
                await group.call(ModelWorker.load, spelled(checkpoint.path / role), files)
            with taking_over(checkpoint):
                await trainer.load_state(state)
        self.best.read(self._folder.each_metrics())
        if self.best.step is not None and not self._store.has(self.best.step):
            self.best.forget()  # checkpoint.best was set when the run went on
        self._store.spared = self.best.step
        return checkpoint.step

    def _take_over_metrics(self, checkpoint: Checkpoint) -> None:
        """Takes the metrics that lie with a checkpoint elsewhere, unless the run's folder has them."""
        folder = self._folder
        with taking_over(checkpoint):
            grown = Grown.of(checkpoint)
        if grown is not None:
            self._grown = grown
            if not folder.metrics_begin_with(grown.num_bytes, grown.crc32):
                folder.take_over_metrics(grown.parts(self._store.metrics))
        elif _METRICS in checkpoint.files:
            if all(line["step"] < checkpoint.step for line in folder.each_metrics()):
                folder.take_over_metrics([checkpoint.read(_METRICS)])

    def due(self, step: int, *, last: bool, evaluated: bool) -> bool:
        """Says whether a step ends with a checkpoint. Each evaluation has one where the best is wanted: it
        may end while the next step is under way.
        """
        every = self._config.checkpoint.every
        if every is not None and (last or step % every == 0):
            return True
        return self._config.checkpoint.best.metric is not None and (last or evaluated)

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Takes the metrics of an evaluation. Returns whether it is the best so far: its checkpoint is kept,
        from the next that is written on instead of the one that was.
        """
        is_best = self.best.add(step, metrics)
        self._store.spared = self.best.step
        return is_best

    async def load_best(self, policy: WorkerGroup, step: int) -> None:
        """Gives a policy the weights of the best checkpoint. step: whose it has now."""
        best = self.best.step
        if best is None or best == step:
            return
        checkpoint = self._store.open(best)
        with self._store.way_out_named(best):
            name = policy.role
            await policy.call(ModelWorker.load, spelled(checkpoint.path / name), checkpoint.files_in(name))

    def way_on(self) -> str | None:
        """Says how a run that ends now can go on, in one line; None where there is no checkpoint."""
        resume = self._config.checkpoint.resume
        try:
            steps = self._store.steps()
        except StorageError as error:  # it may be why the run ends
            return f"whether there is a checkpoint to go on from cannot be seen now: {error}"
        if not steps:
            return None
        setting = " with checkpoint.resume=auto" if resume == "never" else ""
        return (
            f"all up to step {steps[-1]} is saved ({self._store.path_of(steps[-1])}): the same command"
            f"{setting} goes on from there"
        )

    @contextmanager
    def way_on_noted(self) -> Iterator[None]:
        """Goes around training: an error that ends it says how the run can go on."""
        try:
            yield
        except Exception as error:
            way_on = self.way_on()
            if way_on is not None:
                error.add_note(way_on)
            raise

    async def save_now(self, trainer: Resumable) -> None:
        """Cuts and writes, unless this step has a checkpoint already, or nothing has been learned yet."""
        if trainer.step > 0 and not self._store.has(trainer.step):
            await self.snapshot(trainer)
            await self.write(trainer)

    async def snapshot(self, trainer: Resumable) -> None:
        """Copies all state, while nothing decodes and nothing trains; of the groups that wait what refers to
        their rows, which nobody changes.
        """
        for group in trainer.saved_roles().values():
            await group.call(ModelWorker.snapshot)
        self.cut, self._waiting = trainer.state(), trainer.waiting()

    async def write(self, trainer: Resumable) -> None:
        """Writes what was cut; the trainer may go on meanwhile. The clock's totals are those of now: the step
        whose end was cut has been counted only when it was told.
        """
        assert self.cut is not None
        cut, waiting = self.cut, self._waiting
        self.cut, self._waiting = None, {}
        timers, groups = trainer.clock.state(), await _fetched(waiting)
        grown, goes_on = self._grown, self._goes_on
        self._goes_on = False  # unless this is finished: it may leave a part
        state = dataclasses.replace(cut, timers=timers, groups=groups)
        async with _off_the_loop(self._store.writing(state.step)) as draft:
            for role, group in trainer.saved_roles().items():
                draft.note(role, await group.call(ModelWorker.write_snapshot, spelled(draft.folder / role)))
            settings = compatibility_record(self._config)
            await _waited_for(save_controller_state, draft, state, settings, self._rows, self._named)
            self._folder.sync()
            if self._config.checkpoint.path is not None:  # the run may go on without its folder
                all_settings = json.dumps(leaves_of(self._config)).encode()
                await _waited_for(partial(draft.write, private=True), _SETTINGS, all_settings)
                if not goes_on:
                    await _waited_for(grown.remove_later, self._store.metrics)
                part = self._folder.metrics_from(grown.num_bytes)
                grown = await _waited_for(grown.with_part, self._store.metrics, state.step, part)
                await _waited_for(grown.note, draft)
        self._grown = grown
        self._goes_on = True
        self._folder.checkpoint_steps = await _waited_for(self._store.steps)
        if self.on_checkpoint is not None:
            self.on_checkpoint(state.step, self._store.path_of(state.step))


async def _fetched(waiting: Mapping[int, BatchRef]) -> dict[int, Batch]:
    """Returns the rows of each group: in one piece from where they lie, where the groups have the same
    columns.
    """
    found: dict[int, Batch] = {}
    for refs in alike(waiting):
        rows = await BatchRef.concat(list(refs.values())).fetch()
        found |= zip(refs, rows.cut(list(accumulate(map(len, refs.values())))), strict=True)
    return found


@asynccontextmanager
async def _off_the_loop(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enters and leaves in a thread: what is written may go over a network, and episodes go on meanwhile."""
    value = await _waited_for(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        await _waited_for(manager.__exit__, type(error), error, error.__traceback__)
        raise
    await _waited_for(manager.__exit__, None, None, None)


async def _waited_for(work: Callable[..., T], *arguments: Any) -> T:
    """Does it in a thread, to its end also where the caller is cancelled: nothing is left half done."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


# ---- the best evaluation so far ----


class Best:
    """Finds the best evaluation. It has no state in a checkpoint: a resumed run reads its metrics again.

    The evaluation before the first step is left out: there is no checkpoint of it.
    """

    def __init__(self, config: BestConfig) -> None:
        self.config = config
        self.step: int | None = None
        self.value: float | None = None
        self.waited = 0
        """Evaluations since, none of them better."""

    @property
    def enough(self) -> bool:
        """Whether `patience` is over."""
        return self.config.patience is not None and self.waited >= self.config.patience

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes the evaluations in the lines of metrics.jsonl."""
        for line in lines:
            self.add(line["step"], line)

    def add(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Takes the metrics of a step; those without an evaluation make no difference. Returns whether it is
        the best so far. Raises ConfigError where evaluations have no such metric.
        """
        name = self.config.metric
        evaluation = numbers_of(metrics)
        if name is None or not evaluation:
            return False
        value = metrics.get(name)
        if value is None:
            self._check_possible(name, evaluation)
        if step == 0:
            return False
        if value is None or not self._is_better(float(value)):
            self.waited += 1
            return False
        self.step, self.value, self.waited = step, float(value), 0
        return True

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return math.isfinite(value)
        return self.config.sign * (value - self.value) > self.config.min_delta  # not where it is no number

    def _check_possible(self, name: str, evaluation: Mapping[str, float]) -> None:
        if self.value is None and not OF_SCORED.fullmatch(name):
            known = ", ".join(f"eval/{one}" for one in evaluation)
            raise ConfigError(
                f"checkpoint.best.metric={name}: evaluations have no such metric; they have {known}",
                key="checkpoint.best.metric",
            )

    def forget(self) -> None:
        """Begins anew, because the best checkpoint is gone."""
        self.step, self.value, self.waited = None, None, 0

    def told(self) -> dict[str, Any] | None:
        """Returns what summary.json says of it; None where there is nothing to say."""
        if self.step is None:
            return None
        return {"metric": self.config.metric, "step": self.step, "value": self.value}
