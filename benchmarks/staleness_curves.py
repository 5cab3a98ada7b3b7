"""How stale samples change learning: the quickstart with trainer.max_staleness 0, 1, 4, corrected and not.

    OMP_NUM_THREADS=1 python benchmarks/staleness_curves.py                       # seeds 0 and 1, 30 steps
    OMP_NUM_THREADS=1 python benchmarks/staleness_curves.py --seeds 0 --start runs/quickstart/warm_start
    OMP_NUM_THREADS=1 python benchmarks/staleness_curves.py --work W --out W actor.optimizer.lr=1e-3

All runs begin at one warm start per seed (--start: at that one) and train on as many prompts. "Corrected" is
what algorithm.rollout_correction=auto does: old log-probs under the policy of the start of the step, and
token-level importance weights truncated at 2; "not corrected" sets it to null. Runs whose summary is in WORK
are not repeated. Prints the table of docs/async.md and draws docs/staleness.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from algorithms import ROOT, SETTINGS, Task, machine, result_of, run_all, warm_start
from rondo.config import load
from rondo.tracking import read_metrics
from rondo.trainers.commands import train as runs

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "0": ("trainer.max_staleness=0",),
    "1, corrected": ("trainer.max_staleness=1",),
    "1, not corrected": ("trainer.max_staleness=1", "algorithm.rollout_correction=null"),
    "4, corrected": ("trainer.max_staleness=4",),
    "4, not corrected": ("trainer.max_staleness=4", "algorithm.rollout_correction=null"),
}
COLOURS = {"0": "#777777", "1": "#2457a8", "4": "#c2571a"}
SHOWN = {  # columns of the table: metric, mean over the steps
    "staleness": "buffer/staleness_mean",
    "largest log-prob gap": "rollout/log_prob_gap_max",
    "effective sample size": "rollout_correction/effective_sample_size",
}


def folder_of(variant: str, seed: int, work: Path) -> Path:
    return work / f"staleness_{variant.replace(', ', '_').replace(' ', '_')}_{seed}"


def training(variant: str, seed: int, options: argparse.Namespace) -> Task:
    """The quickstart from the warm start, with the settings of a variant."""
    folder = folder_of(variant, seed, options.work)
    start = options.start or options.work / f"warm_start_{seed}"
    export = start / "export" if (start / "export").is_dir() else start
    overrides = [
        *SETTINGS,
        "trainer.warm_start=null",
        f"model.path={export}",
        f"trainer.seed={seed}",
        f"trainer.run_dir={folder}",
        f"trainer.total_steps={options.steps}",
        f"trainer.evaluation={{every: {options.every}, samples: 0, limit: 256}}",
        "tracking={save_rollouts: false, samples: 0}",
        "checkpoint={every: null, export: false}",
        *options.settings,
        *VARIANTS[variant],
    ]
    recipe = "quickstart"
    return Task(f"staleness {variant}", seed, folder, lambda: runs.train(load([recipe], overrides)))


def described(folder: Path) -> dict[str, Any] | None:
    """`result_of` with the means of SHOWN, and wall seconds; None for a run that is not finished."""
    made = result_of(folder)
    if made is None:
        return None
    lines = read_metrics(folder)
    for column, metric in SHOWN.items():
        values = [line[metric] for line in lines if line.get(metric) is not None]
        made[column] = statistics.fmean(values) if values else None
    return made


Results = Mapping[str, Mapping[int, dict[str, Any]]]


def table(results: Results) -> list[str]:
    """A row of Markdown per variant; numbers of the seeds separated by commas."""
    head = ["max_staleness", "greedy before → after", "sampled, last 5 steps", *SHOWN, "CPU-s"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for variant, by_seed in results.items():
        made = list(by_seed.values())
        ends = [f"{_first(m['accuracy']):.3f} → {_last(m['accuracy']):.3f}" for m in made]
        late = [f"{statistics.fmean(list(m['sampled'].values())[-5:]):.3f}" for m in made]
        shown = [", ".join(_number(m[column]) for m in made) for column in SHOWN]
        cpu = ", ".join(f"{m['cpu_seconds']:.0f}" for m in made)
        rows.append(f"| {' | '.join([variant, ', '.join(ends), ', '.join(late), *shown, cpu])} |")
    return rows


def _first(curve: Mapping[int, float]) -> float:
    return curve[min(curve)]


def _last(curve: Mapping[int, float]) -> float:
    return curve[max(curve)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def draw(results: Results, path: Path) -> None:
    """Greedy accuracy on held-out prompts, and accuracy of the samples, by step; a line per seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"accuracy": "greedy accuracy, held out", "sampled": "accuracy of the samples"}
    for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for variant, by_seed in results.items():
            style = {"color": COLOURS[variant[0]], "linestyle": "--" if "not" in variant else "-"}
            for number, made in enumerate(by_seed.values()):
                steps, values = list(made[key]), list(made[key].values())
                label = f"max_staleness {variant}" if number == 0 else None
                axes.plot(steps, values, linewidth=1.4, label=label, **style)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Warm starts where none is given, the variants; then table, picture and staleness.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="for all runs; needs its own --work")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--start", type=Path, help="a run folder, or an export, to start from")
    parser.add_argument("--variants", default="; ".join(VARIANTS), help="separated by semicolons")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the picture")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "staleness", help="run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time, one thread each")
    options = parser.parse_args(arguments)
    options.work, options.out = options.work.resolve(), options.out.resolve()
    options.start = options.start.resolve() if options.start else None
    os.chdir(ROOT)  # recipes name files relative to the repository
    options.work.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    variants = [name.strip() for name in options.variants.split(";")]
    if options.start is None:
        run_all([warm_start(seed, options.work) for seed in seeds], options.jobs)
    run_all([training(name, seed, options) for name in variants for seed in seeds], options.jobs)
    found = {
        name: {
            seed: made
            for seed in seeds
            if (made := described(folder_of(name, seed, options.work))) is not None
        }
        for name in variants
    }
    results = {name: by_seed for name, by_seed in found.items() if by_seed}
    if not results:
        raise SystemExit(f"no run finished; the logs are in {options.work}/*.log")
    (options.work / "staleness.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, options.out / "staleness.png")
    print("\n".join([machine(), "", *table(results)]))


if __name__ == "__main__":
    main()
