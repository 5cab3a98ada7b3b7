"""Every algorithm recipe on the quickstart task: held-out accuracy, cost and stability over seeds.

    OMP_NUM_THREADS=1 python benchmarks/algorithms.py                  # all recipes, seeds 0, 1, 2
    OMP_NUM_THREADS=1 python benchmarks/algorithms.py --recipes grpo,ppo --seeds 0 --out curves

One warm start per seed, which all recipes share. Each run is a forked process of this one, which has imported
everything, so that its CPU seconds are training alone. A run whose summary is in WORK is not repeated; the
table (docs/algorithm_curves.md) and the picture (docs/algorithms.png) are made from all that is in WORK.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rondo.config import load
from rondo.system.names import offered
from rondo.tracking import read_metrics
from rondo.tracking.metrics import versions
from rondo.trainers.commands import supervised
from rondo.trainers.commands import train as runs
from rondo.trainers.commands.evaluate import evaluate_model
from rondo.trainers.loop.evaluation import write_evaluation

ROOT = Path(__file__).parents[1]
NO_ALGORITHM = (
    "quickstart",
    "reasoning_gym",
    "reward_model",
    "calculator",
    "grpo_roc",  # of that task
    "python_tool",
    "search_r1",
    "frozen_lake",
    "sokoban",
    "alfworld",
    "miniwob",
    "visual",
    "figures",
    "compare",
)  # and theirs
FROM_PAIRS = ("dpo",)  # trained by `rondo preference`, without rollouts: two points, no curve
TEACHER = "grpo"  # whose model teaches the `distill` recipes
TARGET = 0.6
SETTINGS = ("cluster.threads=1", "tracking={console: 'off', plot: false, trackers: []}")
SCORERS = ("gsm8k", "exact_match")  # of which each task has one
_SCORE = "reward/score/"
RL_SETTINGS = (
    "tracking={save_rollouts: false, samples: 0}",
    "trainer.evaluation={every: 2, samples: 0, limit: 128}",
)


@dataclass(frozen=True)
class Task:
    """One training run in a process of its own. folder: its run folder; its log lies beside it."""

    name: str
    seed: int
    folder: Path
    train: Callable[[], object]

    @property
    def log(self) -> Path:
        return self.folder.with_name(self.folder.name + ".log")


def recipe_names() -> list[str]:
    """The recipes of algorithms, DPO and those with a teacher last."""
    names = list(offered("recipes"))
    names = [name for name in names if not name.startswith(NO_ALGORITHM)]
    return sorted(names, key=lambda name: (name in FROM_PAIRS, name.startswith("distill"), name))


def warm_start(seed: int, work: Path) -> Task:
    folder = work / f"warm_start_{seed}"
    overrides = [*SETTINGS, f"trainer.seed={seed}", f"trainer.run_dir={folder}"]
    recipe = "quickstart_sft"
    return Task("warm_start", seed, folder, lambda: supervised.sft(load([recipe], overrides)))


def training(name: str, seed: int, steps: int, work: Path) -> Task:
    """A recipe from the shared warm start."""
    folder = work / f"{name}_{seed}"
    overrides = [
        *SETTINGS,
        *_starting_from(work / f"warm_start_{seed}"),
        f"trainer.seed={seed}",
        f"trainer.run_dir={folder}",
        f"trainer.total_steps={steps}",
        "checkpoint.every=null",
    ]
    recipe = name
    if name in FROM_PAIRS:
        return Task(
            name, seed, folder, lambda: _from_pairs(recipe, overrides, folder, work / f"warm_start_{seed}")
        )
    if name.startswith("distill"):
        overrides.append(f"teacher.path={work / f'{TEACHER}_{seed}' / 'export'}")
    overrides += [*RL_SETTINGS, f"checkpoint.export={str(name == TEACHER).lower()}"]
    return Task(name, seed, folder, lambda: runs.train(load([recipe], overrides)))


def _starting_from(run: Path) -> list[str]:
    return ["trainer.warm_start=null", f"model.path={run / 'export'}"]


def _from_pairs(recipe: str, overrides: Sequence[str], folder: Path, start: Path) -> None:
    """Train from pairs, then evaluate both ends as a run with rollouts would."""
    steps = supervised.preference(load([recipe], overrides))["steps"]
    for step, model in ((0, start), (steps, folder)):
        settings = [*_starting_from(model), *SETTINGS, *RL_SETTINGS]
        result = evaluate_model(load(["quickstart"], settings))
        write_evaluation(folder, step, result.samples)


def run_all(tasks: Sequence[Task], jobs: int) -> None:
    """Run what is not finished, `jobs` at a time; a failure is reported and leaves the others alone."""
    context = multiprocessing.get_context("fork")  # a child starts with everything imported
    pending = [task for task in tasks if not (task.folder / "summary.json").exists()]
    running: dict[Any, tuple[Task, float, Any]] = {}
    while pending or running:
        while pending and len(running) < jobs:
            task = pending.pop(0)
            process = context.Process(target=_in_child, args=(task,))
            process.start()
            running[process.sentinel] = (task, time.monotonic(), process)
        for sentinel in wait(list(running)):
            task, started, process = running.pop(sentinel)
            process.join()
            outcome = "done" if process.exitcode == 0 else f"FAILED, see {task.log}"
            seconds = time.monotonic() - started
            print(f"{task.name:24s} seed {task.seed}  {outcome}  {seconds:.0f} s", flush=True)


def _in_child(task: Task) -> None:
    log = os.open(task.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        task.train()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def result_of(folder: Path) -> dict[str, Any] | None:
    """Accuracy by step, CPU seconds and stability of a finished run; None for one that is not finished."""
    if not (folder / "summary.json").exists():
        return None
    summary = json.loads((folder / "summary.json").read_text())
    lines = [line for line in read_metrics(folder) if "actor/grad_norm" in line]
    curve = {int(file.stem.removeprefix("step-")): _accuracy(file) for file in _evaluations(folder)}
    norms = [line["actor/grad_norm"] for line in lines]
    return {
        "accuracy": curve,
        "sampled": {line["step"]: _sampled(line) for line in lines if _right(line, _SCORE) is not None},
        "cpu_seconds": summary["cpu_seconds"],
        "steps": summary["steps"],
        "grad_norm_mean": statistics.fmean(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
        "clip_fraction": _mean(lines, "actor/clip_fraction", "actor/clip_fraction_high"),
        "ppo_kl": _mean(lines, "actor/ppo_kl"),
        "skipped_steps": sum(line.get("actor/skipped_steps", 0) for line in lines),
        "response_length": _mean(lines[-5:], "rollout/response_length"),
    }


def _evaluations(folder: Path) -> list[Path]:
    return sorted((folder / "evaluations").glob("step-*.jsonl"))


def _accuracy(file: Path) -> float:
    """Share of right answers by the task's own scorer, whatever else the recipe rewards."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return statistics.fmean(_right(record["scores"]) or 0.0 for record in records)


def _sampled(line: Mapping[str, Any]) -> float:
    """Accuracy of a step's samples; with a filter the mean reward before it, which is nearly that."""
    return float(line.get("reward/generated_mean", _right(line, _SCORE)))


def _right(scores: Mapping[str, Any], prefix: str = "") -> float | None:
    """Returns the score that says whether an answer is right; None: there is none, as of a failure."""
    return next((scores[prefix + name] for name in SCORERS if prefix + name in scores), None)


def _mean(lines: Sequence[Mapping[str, Any]], *names: str) -> float | None:
    """Mean over the steps of the first of `names` that there is."""
    for name in names:
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            return statistics.fmean(values)
    return None


def steps_to_target(curve: Mapping[int, float]) -> int | None:
    """The first step with accuracy of at least TARGET."""
    return min((step for step, accuracy in curve.items() if accuracy >= TARGET), default=None)


Results = Mapping[str, Mapping[int, dict[str, Any]]]


def table(results: Results) -> list[str]:
    """A row of Markdown per recipe."""
    head = ["recipe", "before", "after", f"greedy {TARGET} at", f"sampled {TARGET} at", "CPU-s"]
    head += ["gradient norm", "clipped", "KL per update", "skipped"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, by_seed in results.items():
        made = list(by_seed.values())
        firsts = [run["accuracy"][min(run["accuracy"])] for run in made]
        lasts = [run["accuracy"][max(run["accuracy"])] for run in made]
        norm_max = max(
            (run["grad_norm_max"] for run in made if run["grad_norm_max"] is not None), default=None
        )
        norms = f"{_number(_over(made, 'grad_norm_mean'))} ({_number(norm_max)})"
        cells = [
            f"`{name}`",
            _spread(firsts),
            _spread(lasts),
            _steps([run["accuracy"] for run in made]),
            _steps([run["sampled"] for run in made]),
            f"{statistics.fmean(run['cpu_seconds'] for run in made):.0f}",
            norms,
            _number(_over(made, "clip_fraction")),
            _number(_over(made, "ppo_kl")),
            f"{sum(run['skipped_steps'] for run in made):.0f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _steps(curves: Sequence[Mapping[int, float]]) -> str:
    reached = [steps_to_target(curve) for curve in curves]
    return ", ".join("–" if step is None else str(step) for step in reached)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _over(made: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [run[key] for run in made if run[key] is not None]
    return statistics.fmean(values) if values else None


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    return f"{value:.2g}"


def machine() -> str:
    """What ran, for the page's head."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = versions()
    return (
        f"{(names or [platform.processor()])[0]}, {os.cpu_count()} cores shared with other work, "
        "one thread per run; "
        f"Python {found['python']}, torch {found['torch']}"
    )


PAGE = """\
# Every algorithm on the quickstart task

Written by

```bash
{command}
```

Seeds {seeds}; {steps} steps of each recipe (`rondo train <name>`), all from the same warm start of the seed.
{machine}.
{minutes:.0f} CPU-minutes in all, without the warm starts.

![held-out accuracy by step](algorithms.png)

Blue: greedy accuracy on 128 held-out prompts, mean over the seeds and band from least to most. Orange: of the
samples of the step. Grey: GRPO.

{table}

- before, after: greedy accuracy, mean (least–most) over the seeds; its standard error is up to 0.04, so that
  differences of a few hundredths mean nothing.
- greedy {target} at: the first evaluation, every second step, at or above it, one number per seed.
- sampled {target} at: the first step whose samples, at temperature 1, are as often right (before any filter).
- CPU-s: per run, evaluations included.
- gradient norm: the actor's before clipping, mean (largest) over steps and seeds.
- clipped: share of trained tokens whose ratio was clipped; KL per update: mean of −log ratio to the policy
  that sampled; – where the loss takes no ratio.
- skipped: optimizer steps left out because a gradient was not finite, over all seeds.
"""


BY_HAND = "## What stands out\n"


def write_page(results: Results, out: Path, command: str) -> None:
    """algorithm_curves.md: how it was run, the picture, the table; BY_HAND and what follows it stay."""
    made = [run for by_seed in results.values() for run in by_seed.values()]
    text = PAGE.format(
        command=command,
        seeds=", ".join(
            str(seed) for seed in sorted({seed for by_seed in results.values() for seed in by_seed})
        ),
        steps=" or ".join(str(steps) for steps in sorted({run["steps"] for run in made})),
        machine=machine(),
        minutes=sum(run["cpu_seconds"] for run in made) / 60,
        table="\n".join(table(results)),
        target=TARGET,
    )
    page = out / "algorithm_curves.md"
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    out.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{text}\n{BY_HAND}{old.partition(BY_HAND)[2]}", encoding="utf-8")


def draw(results: Results, path: Path) -> None:
    """Small multiples, as the page explains them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {name: _curves(by_seed) for name, by_seed in results.items()}
    columns = min(6, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(1.75 * columns, max(1.5 * rows, 2.2)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    last = max(max(steps) for steps, _ in curves.values())
    sampled = {name: _curves(by_seed, "sampled") for name, by_seed in results.items()}
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, (name, (steps, values)) in zip(grid.flat, curves.items(), strict=False):
        if "grpo" in curves and name != "grpo":
            other_steps, others = curves["grpo"]
            axes.plot(other_steps, [statistics.fmean(v) for v in others], color="#bbbbbb", linewidth=1)
        axes.fill_between(
            steps, [min(v) for v in values], [max(v) for v in values], color="#2457a8", alpha=0.2, linewidth=0
        )
        axes.plot(
            sampled[name][0], [statistics.fmean(v) for v in sampled[name][1]], color="#c2571a", linewidth=0.7
        )
        marker = "o" if len(steps) < 3 else None
        axes.plot(
            steps, [statistics.fmean(v) for v in values], color="#2457a8", linewidth=1.5, marker=marker, ms=3
        )
        axes.axhline(TARGET, color="#777777", linewidth=0.6, linestyle=":")
        axes.set_title(name, fontsize=8, loc="left", pad=2)
        axes.set(xlim=(0, last), ylim=(0, 1))
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("greedy accuracy, held out", fontsize=8)
    figure.savefig(path, dpi=100)


def _curves(
    by_seed: Mapping[int, Mapping[str, Any]], key: str = "accuracy"
) -> tuple[list[int], list[list[float]]]:
    """(steps, values of the seeds at each) at the steps that every seed has."""
    accuracies = [run[key] for run in by_seed.values()]
    steps = sorted(set.intersection(*(set(curve) for curve in accuracies)))
    return steps, [[curve[step] for curve in accuracies] for step in steps]


def main() -> None:
    """Warm starts, the recipes, those with a teacher; then table, picture and results.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", help="comma list; default: all algorithm recipes")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of table and picture")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "algorithms", help="run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time, one thread each")
    args = parser.parse_args()
    work, out = args.work.resolve(), args.out.resolve()
    os.chdir(ROOT)  # recipes name files relative to the repository
    work.mkdir(parents=True, exist_ok=True)
    names = args.recipes.split(",") if args.recipes else recipe_names()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    taught = [name for name in names if name.startswith("distill")]
    first = [name for name in names if name not in taught]
    if taught and TEACHER not in first:
        first.append(TEACHER)
    run_all([warm_start(seed, work) for seed in seeds], args.jobs)
    for wave in (first, taught):
        run_all([training(name, seed, args.steps, work) for name in wave for seed in seeds], args.jobs)
    found = {name: {seed: result_of(work / f"{name}_{seed}") for seed in seeds} for name in names}
    results = {
        name: {seed: run for seed, run in by_seed.items() if run is not None}
        for name, by_seed in found.items()
    }
    results = {name: by_seed for name, by_seed in results.items() if by_seed}
    if not results:
        raise SystemExit(f"no run finished; the logs are in {work}/*.log")
    (work / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(results, out, "OMP_NUM_THREADS=1 python benchmarks/algorithms.py " + " ".join(sys.argv[1:]))
    draw(results, out / "algorithms.png")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
