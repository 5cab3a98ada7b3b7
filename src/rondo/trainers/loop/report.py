"""What a run tells: metrics to the trackers, steps to the console, rollouts and answers to the folder, the
end to a table; and what a step's rows say of rewards, lengths and staleness.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rondo.batch import BatchRef
from rondo.checkpoint.durable import write_atomic
from rondo.columns import GREEDY_REWARD, SCORE
from rondo.config.schema import Config
from rondo.controller import Cluster
from rondo.tracking import (
    BeforeAfter,
    Clock,
    Console,
    Header,
    Report,
    RunFolder,
    Sample,
    Timeline,
    build_summary,
    make_trackers,
    matplotlib_available,
    plot_curves,
)
from rondo.tracking.shown import Kind
from rondo.trainers.loop.evaluation import EvaluationResult
from rondo.types import StepStats
from rondo.usage import process_usage
from rondo.workers.rollout import EvaluationRecord

Status = Literal["finished", "failed", "stopped"]


class Reporter:
    """One per stage (RL, SFT, …). `watch` it, then `with reporter.running(…):` around the training."""

    # Of the run; `watch` starts it.
    clock: Clock

    def __init__(
        self, config: Config, folder: RunFolder, console: Console, *, title: str, kind: Kind = "rl"
    ) -> None:
        self.config, self.folder, self.console, self.title, self.kind = config, folder, console, title, kind
        self.stopped = False  # on request, before the end
        self.device: str = config.cluster.device
        self._samples: list[Sample] = []
        self._trackers = make_trackers(
            config.tracking.trackers,
            folder,
            config.tracking.project,
            title,
            dataclasses.asdict(config),
            resume_step=folder.resume_step,
            warn=console.warn,
        )

    def watch(self, cluster: Cluster, gauges: Callable[[], Mapping[str, float]] = dict) -> Clock:
        """Starts the run's clock, which hears of this cluster's calls, and returns it.

        gauges: for the timeline's counter of prompt groups.
        """
        self.clock = Clock(Timeline(self.folder.timeline_path), gauges)
        cluster.call_watchers.append(self.clock)
        return self.clock

    @contextmanager
    def running(self, total_steps: int, first_step: int, parameters: int) -> Iterator[None]:
        """The console's stage; trackers learn how it ended."""
        config = self.config
        header = Header(
            model=f"{_model_name(config)} ({parameters / 1e6:.2f} M parameters)",
            device=self.device,
            algorithm=_algorithm(config, self.kind),
            run_dir=str(self.folder.path),
        )
        self.console.start(header, total_steps, kind=self.kind, first_step=first_step)
        status: Status = "failed"
        self.clock.step = first_step
        try:
            yield
            status = "stopped" if self.stopped else "finished"
        except (KeyboardInterrupt, asyncio.CancelledError):
            status = "stopped"
            raise
        finally:
            self.console.end_stage()
            self.clock.close()
            self._trackers.finish(status)

    def note(self, message: str) -> None:
        self.console.note(message)

    def warn(self, message: str) -> None:
        self.console.warn(message)

    def step(
        self,
        step: int,
        stats: StepStats,
        extra: Mapping[str, float],
        evaluation: Sequence[EvaluationResult] = (),
    ) -> None:
        """One step's metrics, everywhere."""
        values = stats.values()
        trained = int(values.pop("perf/trained_tokens", 0))
        generated = int(values.get("rollout/generated_tokens", 0))
        generates = self.kind == "rl" and self.config.rollout.recorded is None
        tokens = {"trained": trained} | ({"generated": generated} if generates else {})
        stale = ("buffer/staleness_mean", "buffer/staleness_max")
        if values.keys() >= set(stale):
            self.clock.count("staleness", {name.rpartition("_")[2]: values[name] for name in stale})
        metrics = values | dict(extra) | self.clock.end_step(step, **tokens)
        update = metrics.get("timing/update_actor_s", 0.0)
        if update > 0:  # so that evaluations and checkpoints do not count; what is generated has no phase
            metrics["perf/trained_tokens_per_s"] = trained / update
        self._trackers.log(step, metrics)
        self.console.step(step, metrics)
        if self._samples:
            self.console.log_samples(step, self._samples)
            self._trackers.log_samples(step, self._samples)
        for result in evaluation:
            self._evaluated(step, result)

    def evaluation(self, step: int, result: EvaluationResult) -> None:
        """An evaluation with no training step of its own (before the first)."""
        self._trackers.log(step, result.metrics)
        self._evaluated(step, result)

    def has_evaluation(self, step: int) -> bool:
        """Whether this run has reported one of `step`, before it was resumed perhaps."""
        return _evaluation_file(self.folder.path, step).exists()

    def _evaluated(self, step: int, result: EvaluationResult) -> None:
        self.console.evaluation(step, _table(_evaluation_of(result.metrics)))
        file = _evaluation_file(self.folder.path, step)
        file.parent.mkdir(exist_ok=True)
        lines = [_record_line(record) for record in result.samples]
        write_atomic(file, "\n".join(lines) + "\n")

    async def rollouts(self, step: int, rows: BatchRef) -> None:
        """All rows of a step as Parquet, a few as text."""
        tracking = self.config.tracking
        if not tracking.save_rollouts and not tracking.samples:
            return
        if tracking.save_rollouts:
            self.folder.write_rollouts(step, await rows.fetch())
        if tracking.samples:
            groups = rows.index.scalars("group_id")
            firsts = np.sort(np.unique(groups, return_index=True)[1])[: tracking.samples]
            few = await rows.take(firsts).fetch(["text", "prompt_text", "reward", "outcome"])
            self._samples = [
                Sample(row["prompt_text"], row["text"], row["reward"], row["outcome"])
                for row in few.table.to_pylist()
            ]

    def finish(self, step: int, finished: bool) -> dict[str, Any]:
        """summary.json, curves.png and the final table; of a run that was stopped, nothing is written."""
        lines = self.folder.read_metrics()
        evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
        before = _evaluation_of(evaluations[0]) if evaluations and evaluations[0]["step"] == 0 else None
        after = _evaluation_of(evaluations[-1]) if evaluations and evaluations[-1]["step"] == step else None
        peak = max((line.get("perf/peak_memory_bytes", 0) for line in lines), default=0)
        usage = process_usage(children=True)
        summary = build_summary(
            lines,
            self.clock,
            steps=step,
            eval_before=before,
            eval_after=after,
            peak_memory_bytes=int(max(peak, usage.peak_memory_bytes)),
        )
        if not finished:
            return summary
        self.folder.write_summary(summary)
        facts = {"time": f"{summary['wall_seconds']:.0f} s ({summary['cpu_seconds']:.0f} CPU-s)"}
        if self.kind != "rl":
            held_out = [f"{name} {value:.4g}" for name, value in (after or {}).items()]
            self.console.note("; ".join([f"run folder {self.folder.path}", *held_out]))
        else:
            if self.config.tracking.plot:
                facts |= self._plot()
            facts |= {"run folder": str(self.folder.path)}
            answers = _answers(self.folder.path, step, self.config.tracking.samples)
            self.console.report(Report(_table(before), _table(after), answers, facts))
        return summary

    def _plot(self) -> dict[str, str]:
        if not matplotlib_available():
            return {"curves": 'not drawn: pip install "rondo-rl[plots]"'}
        return {"curves": str(plot_curves(self.folder.path))}


def show_finished(
    config: Config, folder: RunFolder, console: Console, summary: dict[str, Any]
) -> dict[str, Any]:
    """The final table of a run that was finished before."""
    answers = _answers(folder.path, summary["steps"], config.tracking.samples)
    facts = {"run folder": str(folder.path), "finished": "to train again, set another trainer.run_dir"}
    console.report(Report(_table(summary["eval_before"]), _table(summary["eval_after"]), answers, facts))
    return summary


def _answers(run: Path, step: int, number: int) -> list[BeforeAfter]:
    """Answers to the same prompts before and after; those that changed from wrong to right first."""
    before, after = _read_records(run, 0), _read_records(run, step)
    pairs = [(before.get(key), record) for key, record in after.items()]
    pairs.sort(key=lambda pair: -(pair[1].reward - (pair[0].reward if pair[0] else 0.0)))
    return [BeforeAfter(_sample(old), _sample(new)) for old, new in pairs[:number]]


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
    path = Path(config.model.path)
    return str(Path(*path.parts[-3:])) if path.name == "export" else path.name


def _table(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """What the final table shows of an evaluation: rewards, scores and lengths, in words."""
    shown = {}
    for name, value in (metrics or {}).items():
        kind, _, what = name.partition("/")
        if (
            what == "reward"
            or "@" in what
            or what.startswith(("reward/", "score/"))
            or what == "response_length"
        ):
            words = what.replace("_", " ").replace("/", ", ")
            shown[f"{kind} {words}"] = value
    return shown


def _evaluation_of(line: Mapping[str, Any]) -> dict[str, float]:
    return {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}


def _evaluation_file(run: Path, step: int) -> Path:
    return run / "evaluations" / f"step-{step:06d}.jsonl"


def _read_records(run: Path, step: int) -> dict[str, EvaluationRecord]:
    path = _evaluation_file(run, step)
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["prompt_id"]: EvaluationRecord(**line) for line in lines if line["reward"] is not None}


def _record_line(record: EvaluationRecord) -> str:
    """One JSON line; the reward of an answer that could not be scored is null."""
    fields = dataclasses.asdict(record)
    fields["reward"] = record.reward if math.isfinite(record.reward) else None
    return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def _sample(record: EvaluationRecord | None) -> Sample | None:
    return None if record is None else Sample(record.prompt, record.text, record.reward, record.finish_reason)


def describe_rows(batch: BatchRef, stats: StepStats) -> None:
    """Reward and length metrics of a step's scored rows."""
    index = batch.index
    reward = index.scalars("reward").astype(np.float64)
    lengths = index.scalars("response_length")
    stats.add_mean("reward/mean", float(reward.sum()), len(reward))
    stats.add_max("reward/max", float(reward.max(initial=-np.inf)))
    stats.add_min("reward/min", float(reward.min(initial=np.inf)))
    if GREEDY_REWARD in index.columns:
        greedy = index.scalars(GREEDY_REWARD)
        stats.add_mean("reward/greedy", float(greedy.sum(dtype=np.float64)), len(greedy))
    for name in SCORE.among(index.columns):
        scores = index.scalars(name)
        known = np.isfinite(scores)
        stats.add_mean("reward/" + name, float(scores[known].sum()), int(known.sum()))
    sources = index.scalars("source").astype(str)
    for source in np.unique(sources) if len(np.unique(sources)) > 1 else ():
        stats.add_mean(
            f"reward/mean/{source}", float(reward[sources == source].sum()), int((sources == source).sum())
        )
    stats.add_mean("rollout/response_length", float(lengths.sum()), len(lengths))
    stats.add_max("rollout/response_length_max", float(lengths.max(initial=0)))
    truncated = index.scalars("finish_reason") == "length"
    stats.add_mean("rollout/truncated_share", float(truncated.sum()), len(truncated))
    groups, counts = np.unique(index.scalars("group_id"), return_counts=True)
    means = np.array([reward[index.scalars("group_id") == group].std() for group in groups])
    stats.add_mean("reward/constant_group_share", float((means == 0).sum()), len(counts))


def describe_staleness(staleness: Sequence[int], max_staleness: int, stats: StepStats) -> None:
    """Of the prompt groups of a step: mean, largest, and the share of the groups at each value."""
    stats.add_mean("buffer/staleness_mean", float(sum(staleness)), len(staleness))
    stats.add_max("buffer/staleness_max", float(max(staleness)))
    for value in range(max_staleness + 1):
        stats.add_mean(f"buffer/staleness_{value}", float(staleness.count(value)), len(staleness))
