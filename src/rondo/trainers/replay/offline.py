"""Training on recorded rollouts (rollout.recorded): the loop is the same, and in the place of engines there
are the Parquet files of an earlier run.

    files ──read one at a time──▶ RecordedSide ──▶ feeder ──▶ RecordedBuffer ──▶ the loop
    nothing is sampled, scored, published or evaluated; sequence number = ordinal of the prompt group
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rondo.config import Config, load
from rondo.controller import Cluster
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import CheckpointError, ConfigError
from rondo.core.types import Ended, Prompt, StepStats
from rondo.data import index_columns
from rondo.data.rollout_files import KEY, Recording, RowLimits, open_recording
from rondo.models import load_model_config
from rondo.planning import OnUpdate, Phase, engine_of
from rondo.trainers.loop import (
    Buffer,
    EpisodeFeeder,
    EvaluationResult,
    Group,
    Ledger,
    Route,
    ValuesOfSteps,
    differences,
)
from rondo.trainers.program import Program, Prompts, Recorded, model_source, positions_of
from rondo.weights import SyncReport

# Settings of what is not done again: they change no number.
UNREAD = (
    KEY,
    "data.train",
    "data.eval",
    "data.shuffle",
    "data.overlong_prompts",
    "reward.functions",
    "reward.timeout_seconds",
    "reward.on_error",
    "reward.on_timeout",
    "reward.max_retries",
    "trainer.replay",
)


def recorded_rollouts(config: Config) -> Recorded | None:
    """Opens what rollout.recorded names; None where it is not set. Raises ConfigError or DataError for what
    cannot be trained on as configured.
    """
    if config.rollout.recorded is None:
        return None
    recording, total = open_recording(config.rollout.recorded), config.trainer.total_steps
    _check_stays(recording)
    sizes = recording.step_sizes(config.data.batch_size)
    if total is not None and total > len(sizes):
        raise ConfigError(
            f"trainer.total_steps={total}, but {KEY}={recording.path} has {recording.num_groups} prompt "
            f"groups, enough for {len(sizes)} of data.batch_size={config.data.batch_size}; lower it, or set "
            "it to null for all that is there"
        )
    changed = tuple(_changed(recording, config, total or len(sizes)))
    return Recorded(recording, tuple(sizes[:total]), changed)


def _check_stays(recording: Recording) -> None:
    """Raises ConfigError where a run that has not ended would remove the files that are to be read."""
    for run in {file.parent.parent for file in recording.files if file.parent.name == "rollouts"}:
        written = run / "config.yaml"
        if not written.is_file() or (run / "summary.json").exists():
            continue
        try:
            keep = load([str(written)]).config.tracking.keep_rollouts
        except ConfigError:
            continue  # an older rondo's, which removed none, or a damaged one, which is said for whole runs
        if keep is not None:
            raise ConfigError(
                f"{KEY}={recording.path}: {run} has not ended, and removes its oldest rollouts "
                f"(tracking.keep_rollouts={keep}); wait for its end, or copy the files and name the copies"
            )


def _changed(recording: Recording, config: Config, steps: int) -> Iterable[str]:
    written = None if recording.run is None else recording.run / "config.yaml"
    if written is None or not written.is_file():
        yield f"there is no config.yaml that says what {recording.path} was recorded with"
        return
    try:
        old = load([str(written)]).config
    except ConfigError as error:
        yield f"{written} cannot be read: {error}"
        return
    _check_rewards(recording, old, config)
    if old.rollout.recorded is not None:
        yield f"{recording.path} was trained on recorded rollouts itself"
    yield from differences(old, config, free=UNREAD)
    sections = (config.actor, config.critic)
    length = old.trainer.total_steps or len(recording.files)
    if steps != length and any(section.optimizer.schedule.name != "constant" for section in sections):
        yield f"the learning rate's schedule is over {steps} steps, and was over {length}"


def _check_rewards(recording: Recording, old: Config, new: Config) -> None:
    """Raises ConfigError where other rewards are asked for than those that are recorded, and used."""
    why = f"the rewards of {KEY}={recording.path} are used as they are"
    if new.reward.functions and new.reward.functions != old.reward.functions:
        raise ConfigError(
            f"reward.functions are others than those that {recording.run} was scored with, and {why}; set "
            "reward.functions=[], or generate again"
        )
    before = {model.name: model for model in old.reward.models}
    for model in new.reward.models:
        if model.name in recording.scores and model != before.get(model.name):
            raise ConfigError(
                f"reward.models: {model.name} is another one than {recording.run} was scored with, and "
                f"{why}; set it back, or give the new one another name: then its score is added"
            )


def check_own_folder(recorded: Recorded | None, run_dir: str) -> None:
    """Raises ConfigError where the run would write into the folder that it reads."""
    own = os.path.realpath(run_dir)  # not `resolve`, for which a link to itself is an error of its own
    if recorded and any(file.resolve().is_relative_to(own) for file in recorded.recording.files):
        raise ConfigError(
            f"{KEY}={recorded.recording.path} is in this run's own folder {run_dir}, where a step's rollouts "
            "are written; choose another trainer.run_dir"
        )


class RecordedBuffer(Buffer):
    """A buffer with the steps of a recording: a short one in the middle stays short. There is no bound on
    staleness: it was kept when the rollouts were made, and means nothing to another program.
    """

    def __init__(self, recorded: Recorded, **options: Any) -> None:
        super().__init__(**options | {"max_staleness": 0, "order": "prompt"})
        self._recorded = recorded
        self._leave_empty()

    @property
    def rules(self) -> dict[str, Any]:
        return super().rules | {"first": self._recorded.recording.files[0].name}

    def restore(
        self, ledger: Ledger, groups: Iterable[Group], version: int, rules: Mapping[str, Any]
    ) -> None:
        first = self.rules["first"]
        if rules.get("first", first) != first:  # an older rondo has not written it
            raise CheckpointError(
                f"{KEY}={self._recorded.recording.path} began with {rules['first']} and begins with {first} "
                "now, so that its prompt groups have other places; put the files before it back"
            )
        super().restore(ledger, groups, version, rules)
        self._leave_empty()

    def advance(self, version: int) -> None:
        super().advance(version)
        self._leave_empty()

    def _leave_empty(self) -> None:
        """Counts the places of this step and of those before that have no group."""
        sizes = self._recorded.sizes
        self.step_size = sizes[self.version] if self.version < len(sizes) else self.batch_size
        places = (self.version + 1) * self.batch_size
        self._unused = places - self.ledger.num_trained - self.step_size

    def staleness(self, groups: Sequence[Group]) -> list[int]:
        """Returns the staleness that they had when they were recorded."""
        recording = self._recorded.recording
        versions = [recording.version(recording.place(group.seq)[0]) for group in groups]
        return [at - group.oldest_version for at, group in zip(versions, groups, strict=True)]


class NoRoute:
    """A `Route` where no engine wants weights."""

    moves = False

    async def load(self, version: int) -> SyncReport:
        return SyncReport(version, 0, 0)

    def describe(self) -> str:
        return "weights: no engine wants them"


class RecordedSide:
    """`RolloutSide` of a recording, whose prompt groups are read from files: the one that is read from now
    stays in memory.
    """

    size = 1
    on_update: OnUpdate = "finish"
    enter: Callable[[Phase], Awaitable[None]] | None = None
    canary: Callable[[int], Coroutine[Any, Any, float]] | None = None
    values: ValuesOfSteps | None = None
    eval: Sequence[Prompt] = ()
    prompts: Prompts | None = None

    def __init__(self, recorded: Recorded, program: Program, config: Config, cluster: Cluster) -> None:
        self._recorded = recorded
        self._cluster = cluster
        self._limits = _limits(config, program)
        self._reading = asyncio.Lock()
        self._file = -1  # the one that `_rows` are of; -1: none yet
        self._rows = Batch.of({})
        self.index_columns = index_columns(recorded.recording.scores, greedy_baseline=program.greedy_baseline)
        self.route: Route = NoRoute()

    def describe(self) -> str:
        return f"{self._recorded.describe()}; {self._recorded.describe_policy()}"

    def buffer(self, **options: Any) -> Buffer:
        return RecordedBuffer(self._recorded, **options)

    def feeder(self, buffer: Buffer, **options: Any) -> EpisodeFeeder:
        return EpisodeFeeder(buffer, self, on_update=self.on_update, **options)

    def alive(self) -> Sequence[int]:
        return (0,)

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        file, group = self._recorded.recording.place(seq)
        async with self._reading:
            if file != self._file:
                self._rows = await asyncio.to_thread(self._recorded.recording.read, file, self._limits)
                self._file = file
            rows = np.flatnonzero(self._rows.scalars("group_id") == group)
            return self._cluster.put(self._rows.take(rows), self.index_columns), {}

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def restarted(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def end_step(self) -> StepStats:
        return StepStats()

    async def start_counting(self) -> None: ...

    async def evaluate(self) -> EvaluationResult:
        raise AssertionError("there are no prompts to evaluate on")


def _limits(config: Config, program: Program) -> RowLimits:
    """Returns what every model of the run can take; the smallest token budget or number of positions
    decides.
    """
    tokens: dict[str, int] = {}
    for role in ("actor", *program.roles):
        section, engine = engine_of(role, config)
        tokens[f"{section}.token_budget"] = engine.token_budget
        positions = positions_of(role, config)
        if positions is not None:
            tokens[f"max_position_embeddings of the {role}'s model"] = positions
    key = min(tokens, key=lambda key: tokens[key])
    vocab_size = int(load_model_config(model_source(config)).get_text_config().vocab_size)
    return RowLimits(vocab_size, tokens[key], key, accuracy=program.reads_accuracy)
