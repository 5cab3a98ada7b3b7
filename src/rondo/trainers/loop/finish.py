"""The end of a run: summary.json, curves.png, and the table of what training has changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rondo.config import Config
from rondo.config.printing import plain
from rondo.core.errors import DataError
from rondo.system.usage import process_usage
from rondo.tracking import (
    BeforeAfter,
    Console,
    Health,
    Report,
    RunFolder,
    Sample,
    build_summary,
    matplotlib_available,
    named,
    plot_curves,
)
from rondo.tracking.shown import REWARD
from rondo.trainers.loop.evaluation import numbers_of, read_evaluation, table_of
from rondo.trainers.loop.report import Reporter
from rondo.workers import EvaluationRecord

_READ = ("step", "perf/peak_memory_bytes", *REWARD)  # of the metrics, beside evaluations


def finish(reporter: Reporter, step: int, best: Mapping[str, Any] | None) -> dict[str, Any]:
    """Writes summary.json and curves.png, shows the final table. Returns the summary. best: the evaluation
    whose model was exported instead of the last; None: none was asked for.
    """
    config, folder, console = reporter.config, reporter.folder, reporter.console
    lines, health = [], Health(plain(config.tracking.checks))
    for line in folder.each_metrics():
        health.add(line)
        lines.append({name: line[name] for name in line if name in _READ or name.startswith("eval/")})
    evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
    before = numbers_of(evaluations[0]) if evaluations and evaluations[0]["step"] == 0 else None
    after = numbers_of(evaluations[-1]) if evaluations and evaluations[-1]["step"] == step else None
    peak = max((line.get("perf/peak_memory_bytes", 0) for line in lines), default=0)
    usage = process_usage(children=True)
    summary = build_summary(
        lines,
        reporter.clock,
        algorithm=reporter.algorithm,
        steps=step,
        eval_before=before,
        eval_after=after,
        best=best,
        peak_memory_bytes=int(max(peak, usage.peak_memory_bytes)),
        found=[*reporter.ahead, *health.found],
    )
    tracking = config.tracking
    folder.remove_rollouts(tracking.keep_rollouts, tracking.keep_token_columns, ended=True)
    folder.write_summary(summary)
    facts = {"time": f"{summary['wall_seconds']:.0f} s ({summary['cpu_seconds']:.0f} CPU-s)"}
    if health.found:
        names = ", ".join(dict.fromkeys(one.check for one in health.found))
        facts["checks"] = f"{names}: `rondo doctor {folder.path}` says since when, and what to do"
    if best is not None:
        facts["best"] = (
            f"step {best['step']}: {best['metric']} {best['value']:.4g}, which is what export/ has"
        )
    if reporter.kind != "rl":
        held_out = [f"{name} {value:.4g}" for name, value in (after or {}).items()]
        kept = [f"{name}: {facts[name]}" for name in ("checks", "best") if name in facts]
        console.note("; ".join([f"run folder {folder.path}", *held_out, *kept]))
    else:
        if config.tracking.plot and matplotlib_available():
            try:
                facts["curves"] = str(plot_curves(folder.path))
            except DataError as error:  # a program that logged nothing has none, and ends all the same
                facts["curves"] = f"not drawn: {error}"
        elif config.tracking.plot:
            facts["curves"] = 'not drawn: pip install "rondo-rl[plots]"'
        facts["run folder"] = str(folder.path)
        answers = _answers(folder.path, step, config.tracking.samples)
        console.report(Report(table_of(before), table_of(after), answers, facts))
    return summary


def show_finished(
    config: Config, folder: RunFolder, console: Console, summary: dict[str, Any]
) -> dict[str, Any]:
    """Shows the final table of a run that was finished before; returns its summary."""
    answers = _answers(folder.path, summary["steps"], config.tracking.samples)
    facts = {"run folder": str(folder.path), "finished": "to train again, set another trainer.run_dir"}
    console.report(Report(table_of(summary["eval_before"]), table_of(summary["eval_after"]), answers, facts))
    return summary


def _answers(run: Path, step: int, number: int) -> list[BeforeAfter]:
    """Returns answers to the same prompts before and after; those that changed from wrong to right first."""
    before, after = read_evaluation(run, 0), read_evaluation(run, step)
    pairs = [(before.get(key), record) for key, record in after.items()]
    pairs.sort(key=lambda pair: -(pair[1].reward - (pair[0].reward if pair[0] else 0.0)))
    return [BeforeAfter(_sample(old), _sample(new)) for old, new in pairs[:number]]


def _sample(record: EvaluationRecord | None) -> Sample | None:
    if record is None:
        return None
    answer = record.transcript or record.text
    return Sample(record.prompt, answer, record.reward, record.finish_reason, named(record.images))
