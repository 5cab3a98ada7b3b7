"""What a run tells while it goes on: metrics to the trackers, steps to the console, rollouts and answers to
the folder; and what a step's rows say of rewards and lengths. Its end is in `finish`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rondo.config import Config
from rondo.config.printing import plain
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import BatchRef
from rondo.core.columns import IMAGES, ROUTES, TRANSCRIPT
from rondo.core.errors import RondoError
from rondo.core.images import images_of_text
from rondo.core.masking import masked_urls
from rondo.core.types import StepStats
from rondo.platform import ProfileTurn
from rondo.system.storage import storing
from rondo.system.urls import Place
from rondo.system.usage import counted_checks
from rondo.tracking import (
    Clock,
    Console,
    Found,
    Header,
    Health,
    Kind,
    RunFolder,
    Sample,
    Timeline,
    Tracker,
    TrackerContext,
    looked_at,
    make_trackers,
    metric_names,
)
from rondo.trainers.loop.evaluation import (
    EvaluationResult,
    evaluation_file,
    numbers_of,
    table_of,
    write_evaluation,
)
from rondo.trainers.loop.records import StepRecords, describe_rows
from rondo.trainers.loop.speed import Speed

_log = logging.getLogger(__name__)
Status = Literal["finished", "failed", "stopped"]


class Reporter:
    """One per stage (RL, SFT, …). `watch` it, `start_trackers`, then `with reporter.running(…):` around the
    training.
    """

    # Of the run; `watch` starts it.
    clock: Clock

    def __init__(
        self, config: Config, folder: RunFolder, console: Console, *, title: str, kind: Kind = "rl"
    ) -> None:
        self.config = config
        self.folder = folder
        self.console = console
        self.title = title
        self.kind = kind
        self.algorithm = _algorithm(config, kind)
        """What the run is called; a program's is its own."""
        self.stopped = False  # on request, before the end
        self.is_enough = (
            False  # it has ended before its last step by a rule of the user's: an end all the same
        )
        self.ahead: list[Found] = []
        """What was known of the run before it began."""
        self.speed: Speed | None = None
        self.restarts = 0  # of the run, by itself (trainer.max_restarts), so far
        # They hear the metrics of every step (`step` among them), and of every evaluation, once written.
        self.on_step: Callable[[Mapping[str, Any]], None] | None = None
        self.on_evaluation: Callable[[int, Mapping[str, Any]], None] | None = None
        self.callback: Callable[..., None] = lambda name, *arguments: None
        """Calls the user's function of this name, who hears the same after them."""
        self.device: str = config.cluster.device
        self.writers: WorkerGroup | None = None
        """The actor's ranks, which write the rows of a step."""
        self._samples: list[Sample] = []
        self.records = StepRecords(config, folder)
        """What is kept of each step's rows."""
        self._health = Health(plain(config.tracking.checks))
        self._trackers: list[Tracker] = []
        self._named: Callable[[Mapping[str, float]], dict[str, float]] = dict

    def start_trackers(self) -> None:
        """Starts what tracking.trackers names."""
        tracking, settings = self.config.tracking, plain(self.config)
        name = tracking.run_name or self.title
        context = TrackerContext(
            self.folder, tracking.project, name, settings, self.console.warn, self.algorithm
        )
        self._named = metric_names(tracking.metric_names)
        self._trackers = make_trackers(tracking.trackers, context)

    def watch(self, cluster: Cluster, gauges: Callable[[], Mapping[str, float]] = dict) -> Clock:
        """Starts the run's clock, which hears of this cluster's calls, and returns it.

        gauges: for the timeline's counter of prompt groups.
        """
        self.clock = Clock(Timeline(self.folder.timeline_dir, self.folder.wrote_timeline), gauges)
        cluster.call_watchers.append(self.clock)
        return self.clock

    @contextmanager
    def running(self, total_steps: int, first_step: int, parameters: int) -> Iterator[None]:
        """Opens the console's stage; trackers learn how it ended."""
        config = self.config
        header = Header(
            model=f"{_model_name(config)} ({parameters / 1e6:.2f} M parameters)",
            device=self.device,
            algorithm=self.algorithm,
            run_dir=str(self.folder.path),
        )
        self.folder.tell(kind=self.kind, total_steps=total_steps)
        self.console.start(header, total_steps, kind=self.kind, first_step=first_step)
        if first_step > total_steps:
            self.warn(
                f"this run has {first_step} steps already, and {total_steps} are asked for "
                "(trainer.total_steps, trainer.epochs): nothing is trained, and none of them is taken back"
            )
        if self.speed is not None and (line := self.speed.expected()):
            self.note(line)
        status: Status = "failed"
        self.clock.step = first_step
        try:
            yield
            status = "stopped" if self.stopped and not self.is_enough else "finished"
        except (KeyboardInterrupt, asyncio.CancelledError):
            status = "stopped"
            raise
        finally:
            self.console.end_stage()
            self.clock.close()
            self._finish_trackers(status)

    def _finish_trackers(self, status: Status) -> None:
        """Ends all trackers. What one of them raises ends the run, unless something else has done so."""
        failed: RondoError | None = None
        while self._trackers:
            tracker = self._trackers.pop()
            try:
                with storing(tracker.where):
                    tracker.finish(status)
            except RondoError as error:
                if status != "finished" or failed is not None:
                    self.warn(str(error))
                else:
                    failed = error
        if failed is not None:
            raise failed

    async def turn_profile(self, cluster: Cluster, step: int) -> None:
        """Ends the profile of this step, and begins that of the next one, where trainer.profile asks for
        them.
        """
        profile = self.config.trainer.profile
        if profile is None or not {step, step + 1} & set(profile.steps):
            return
        folder = self.folder.path.resolve() / "profile" / f"step-{step:06d}"
        ended = str(folder) if step in profile.steps else None
        with self.clock.phase("profile"):
            await cluster.turn_profile(ProfileTurn(ended, step + 1 in profile.steps, profile.memory))

    def note(self, message: str) -> None:
        _log.info("%s", message)
        self.console.note(message)

    def warn(self, message: str) -> None:
        _log.info("warning: %s", message)  # the console shows it
        self.console.warn(message)

    def step(
        self,
        step: int,
        stats: StepStats,
        extra: Mapping[str, float],
        evaluation: Sequence[EvaluationResult] = (),
    ) -> None:
        """Tells one step's metrics, everywhere."""
        values = stats.values()
        trained = int(values.pop("perf/trained_tokens", 0))
        of_rows, pairs = (values.pop(f"perf/row_{what}", 0.0) for what in ("tokens", "pairs"))
        generated = int(values.get("rollout/generated_tokens", 0))
        generates = self.kind == "rl" and self.config.rollout.recorded is None
        tokens = {"trained": trained} | ({"generated": generated} if generates else {})
        stale = ("buffer/staleness_mean", "buffer/staleness_max")
        if values.keys() >= set(stale):
            shown = {name.rpartition("_")[2]: values[name] for name in stale}
            self.clock.mark("staleness", shown, is_counter=True)
        metrics = values | dict(extra) | self.clock.end_step(step, **tokens)
        update = metrics.get("timing/update_actor_s", 0.0)
        if self.restarts:
            metrics["perf/restarts"] = self.restarts
        if update > 0:  # so that evaluations and checkpoints do not count; what is generated has no phase
            metrics["perf/trained_tokens_per_s"] = trained / update
            if self.kind != "rl":
                metrics["perf/row_tokens_per_s"] = of_rows / update
        if self.speed is not None:
            metrics |= self.speed.of_step(metrics, of_rows, pairs)
            planned, line = self.speed.beside_plan(metrics)
            metrics |= planned
            if line:
                self.note(line)
        self._log(step, metrics)
        self.console.step(step, metrics)
        if self._samples:
            self.console.log_samples(step, self._samples)
            for tracker in self._trackers:
                with storing(tracker.where):
                    tracker.log_samples(step, self._samples)
        for result in evaluation:
            self._evaluated(step, result)
        held_out = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if held_out and not evaluation:  # of a supervised run: numbers without answers
            self.callback("on_evaluation", step, EvaluationResult(held_out, ()))
        told = {"step": step, **metrics}
        self._check(told)
        if self.on_step is not None:
            self.on_step(told)
        self.callback("on_step", told)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """Tells an evaluation with no training step of its own (before the first)."""
        self._log(step, result.metrics)
        self._evaluated(step, result)
        self._check({"step": step, **result.metrics})

    def _check(self, line: Mapping[str, Any]) -> None:
        """Tells what is wrong with these metrics. Raises TrainError where that is to stop the run."""
        with counted_checks():
            found = self._health.add(line, self._samples[0] if self._samples else None)
        for one in found:
            self.warn(one.warning())
        self._health.stops(found)

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs everything in metrics.jsonl, and what is a finite number to the trackers."""
        self.folder.append_metrics(step, metrics)
        if self.on_evaluation is not None and numbers_of(metrics):
            self.on_evaluation(step, metrics)
        if self._trackers:
            plain = {
                name: float(value)
                for name, value in metrics.items()
                if isinstance(value, numbers.Real) and math.isfinite(float(value))
            }
            named = self._named(plain)
            for tracker in self._trackers:
                with storing(tracker.where):
                    tracker.log(step, named)

    def has_evaluation(self, step: int) -> bool:
        """Says whether this run has reported one of `step`, before it was resumed perhaps."""
        return evaluation_file(self.folder.path, step).exists()

    def _evaluated(self, step: int, result: EvaluationResult) -> None:
        self.console.evaluation(step, table_of(numbers_of(result.metrics)))
        write_evaluation(self.folder.path, step, result.samples)
        self.callback("on_evaluation", step, result)

    def saved(self, step: int, folder: Place) -> None:
        """Tells a checkpoint that is whole."""
        self.callback("on_checkpoint", step, folder)

    def rows(self, rows: BatchRef, stats: StepStats) -> None:
        """Adds what a step's scored rows say of rewards and lengths."""
        describe_rows(rows, stats)
        if self.speed is not None:
            prompts, responses = (rows.index.scalars(f"{part}_length") for part in ("prompt", "response"))
            self.speed.take_lengths(prompts, responses)

    async def rollouts(self, step: int, rows: BatchRef) -> None:
        """Writes all rows of a step as Parquet, and keeps a few as text."""
        tracking = self.config.tracking
        if not tracking.save_rollouts and not tracking.samples:
            return
        groups = rows.index.scalars("group_id")
        firsts = np.sort(np.unique(groups, return_index=True)[1])[: tracking.samples]
        shown = ["text", "prompt_text", "reward", "outcome"]
        shown += [name for name in (TRANSCRIPT, IMAGES) if name in rows.columns]
        if tracking.save_rollouts:
            # Routes are many times as large as all else, and mean nothing to another run.
            columns = rows.without(*(name for name in rows.columns if name in ROUTES))
            await self.records.write(self.writers, columns, step)
        if tracking.samples:
            few = await rows.take(firsts).fetch(shown)  # the other rows' text stays where it is
            # In a thread, as images are read from their files.
            self._samples = await asyncio.to_thread(lambda: [_sample(row) for row in few.table.to_pylist()])


def _sample(row: Mapping[str, Any]) -> Sample:
    images = looked_at(images_of_text(row.get(IMAGES) or ""))
    text = row.get(TRANSCRIPT) or row["text"]
    return Sample(row["prompt_text"], text, row["reward"], row["outcome"], images)


def _algorithm(config: Config, kind: Kind) -> str:
    algorithm = config.algorithm
    names = {
        "rl": algorithm.advantage.name,
        "sft": "supervised fine-tuning",
        "preference": algorithm.preference_loss.name,
        "reward_model": f"reward model ({algorithm.reward_model_loss.name})",
    }
    return names[kind]


def _model_name(config: Config) -> str:
    if config.model.path is None:
        return f"new {(config.model.config or {}).get('model_type', '')} model"
    path = Path(masked_urls(config.model.path))
    return str(Path(*path.parts[-3:])) if path.name == "export" else path.name
