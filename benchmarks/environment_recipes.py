"""Policies that learn to act, in the worlds of the recipes: in Sokoban and FrozenLake with GRPO, GiGPO, HGPO
and PPO with bi-level GAE, in both by pictures alone, in ALFWorld and MiniWoB as the recipes have it.

    OMP_NUM_THREADS=1 python benchmarks/environment_recipes.py                                  # all of it
    OMP_NUM_THREADS=1 python benchmarks/environment_recipes.py --only sokoban --algorithms grpo gigpo
    OMP_NUM_THREADS=1 .venv-environments/bin/python benchmarks/environment_recipes.py --only alfworld miniwob

ALFWorld and MiniWoB want their packages, which `make test-environments` installs, and the latter Chromium.
Each run is a recipe, perhaps with another estimator, from the warm start that the recipe has at that seed:
all estimators of a seed begin with the same weights. Runs whose summary is in WORK are not repeated. Prints,
for each recipe, the share of held-out levels that are solved before and after, and where estimators are
compared the difference between GiGPO and GRPO of the same seed after BUDGET steps in the environment; draws
docs/environments_RECIPE.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from algorithms import ROOT, SETTINGS, Task, machine, run_all
from rondo.config import load
from rondo.tracking import read_metrics
from rondo.trainers.commands import train as runs

# As in the recipes, no group is divided by its deviation, so that what differs is the credit.
ALGORITHMS = {
    "grpo": ("algorithm.advantage={name: grpo, normalize_std: false}",),
    "gigpo": ("algorithm.advantage={name: gigpo, gamma: 0.95, normalize_std: false}",),
    "hgpo": ("algorithm.advantage={name: hgpo, gamma: 0.95, normalize_std: false}",),
    # As in quickstart_ppo, whose critic begins with the policy's weights, too.
    "ppo": (
        "algorithm.advantage={name: bi_level_gae, lam: 0.95, high_level_gamma: 0.95, high_level_lam: 0.95}",
        "algorithm.value_loss={name: clipped_value, clip: 0.5}",
        "actor.mini_batch_size=4",
        "critic={token_budget: 8192, mini_batch_size: 2, warmup_steps: 3}",
        "critic.optimizer={lr: 5.0e-4, betas: [0.9, 0.99], schedule: {name: constant, warmup_steps: 5}}",
    ),
}
TITLES = {
    "grpo": "GRPO",
    "gigpo": "GiGPO",
    "hgpo": "HGPO",
    "ppo": "PPO, bi-level GAE",
    "recipe": "as in the recipe",
}
SEEDS = {
    "sokoban": (0, 1, 2, 3, 4),
    "frozen_lake": (0, 1, 2),
    "frozen_lake_seen": (0, 1, 2),  # by pictures alone
    "sokoban_seen": (0, 1, 2),
    "alfworld": (0, 1, 2),
    "miniwob": (0, 1, 2),
}
# Steps in the environment after which estimators are compared, in the recipes in which they are.
BUDGET = {"sokoban": 10_000, "frozen_lake": 10_000}
SAMPLED, GREEDY = "eval/sampled/reward", "eval/greedy/reward"
# 97.5 % quantiles of Student's t, by degrees of freedom.
QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

Curve = list[tuple[float, float]]  # (steps in the environment, share solved)
Results = Mapping[str, Mapping[int, Mapping[str, Any]]]  # algorithm -> seed -> run


def training(recipe: str, algorithm: str, seed: int, work: Path) -> Task:
    folder = work / f"{recipe}_{algorithm}_{seed}"
    overrides = [
        *SETTINGS,
        f"trainer.seed={seed}",
        f"trainer.run_dir={folder}",
        "tracking={save_rollouts: false, samples: 0}",
        "checkpoint={every: null, export: false}",
    ]
    if algorithm != "recipe":
        overrides += [*ALGORITHMS[algorithm], "trainer.evaluation={every: 15, samples: 2}"]
    return Task(f"{recipe} {algorithm}", seed, folder, lambda: runs.train(load([recipe], overrides)))


def described(folder: Path, recipe: str) -> dict[str, Any] | None:
    """Curves over the steps made in the environment, and what the run cost; None: not finished."""
    if not (folder / "summary.json").exists():
        return None
    per_step, world = _episodes_per_step(recipe), recipe.removesuffix("_seen")
    made, curves = 0.0, {SAMPLED: [], GREEDY: []}  # type: tuple[float, dict[str, Curve]]
    for line in read_metrics(folder):
        made += per_step * line.get(f"environment/steps/{world}", 0.0)
        for name, curve in curves.items():
            if name in line:
                curve.append((made, line[name]))
    summaries = [json.loads((at / "summary.json").read_text()) for at in (folder / "warm_start", folder)]
    return {**curves, "cpu_seconds": [summary["cpu_seconds"] for summary in summaries], "steps": made}


def _episodes_per_step(recipe: str) -> int:
    config = load([recipe]).config
    return config.data.batch_size * config.rollout.n


def solved_at(curve: Curve, steps: float) -> float:
    """Share solved after so many steps in the environment, on a line between the evaluations around."""
    if steps > curve[-1][0]:
        raise SystemExit(f"a run ended after {curve[-1][0]:.0f} steps in the environment, before {steps:.0f}")
    for (before, low), (after, high) in itertools.pairwise(curve):
        if steps <= after:
            return low + (high - low) * (steps - before) / (after - before)
    return curve[0][1]


def difference(ours: Results, recipe: str, name: str) -> str:
    """GiGPO less GRPO, seed by seed, with the 95 % interval of Student's t for the mean of pairs."""
    seeds = sorted(set(ours.get("gigpo", {})) & set(ours.get("grpo", {})))
    if len(seeds) < 2:
        return f"{recipe}, {_said(name)}: {len(seeds)} pairs of runs"
    at = {a: [solved_at(ours[a][seed][name], BUDGET[recipe]) for seed in seeds] for a in ("gigpo", "grpo")}
    pairs = [one - other for one, other in zip(at["gigpo"], at["grpo"], strict=True)]
    half = QUANTILES[len(pairs) - 1] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return (
        f"{recipe}, {_said(name)} after {BUDGET[recipe]} steps in the environment, "
        f"seeds {_joined(seeds, 'd')}: "
        f"GRPO {_joined(at['grpo'])}; GiGPO {_joined(at['gigpo'])}; "
        f"difference {statistics.fmean(pairs):+.3f} ± {half:.3f} ({_joined(pairs, '+.3f')})"
    )


def _said(name: str) -> str:
    return "sampled" if name == SAMPLED else "greedy"


def _joined(values: Sequence[float], form: str = ".3f") -> str:
    return ", ".join(format(value, form) for value in values)


def table(recipe: str, ours: Results) -> list[str]:
    """A row of Markdown per algorithm; numbers of the seeds separated by commas."""
    head = [
        "",
        "seeds",
        "sampled, before → after",
        "greedy, before → after",
        "steps made",
        "CPU-s, warm start + RL",
    ]
    rows = [f"| {' | '.join([recipe, *head[1:]])} |", "|---" * len(head) + "|"]
    for algorithm, by_seed in ours.items():
        made = list(by_seed.values())
        cells = [TITLES[algorithm], _joined(list(by_seed), "d")]
        for name in (SAMPLED, GREEDY):
            cells.append(", ".join(f"{run[name][0][1]:.2f} → {run[name][-1][1]:.2f}" for run in made))
        cells.append(_joined([run["steps"] for run in made], ".0f"))
        warm, rl = (statistics.fmean(run["cpu_seconds"][part] for run in made) for part in (0, 1))
        cells.append(f"{warm:.0f} + {rl:.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def draw(recipe: str, ours: Results, path: Path) -> None:
    """Sampled success on held-out levels by steps in the environment, each seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    colours = dict(zip(TITLES, ("#777777", "#2457a8", "#2a8a57", "#c2571a", "#2457a8"), strict=True))
    axes = figure.subplots()
    for algorithm, by_seed in ours.items():
        for number, run in enumerate(by_seed.values()):
            label = TITLES[algorithm] if number == 0 else None
            steps, solved = zip(*run[SAMPLED], strict=True)
            axes.plot(steps, solved, color=colours[algorithm], linewidth=1, marker="o", ms=2, label=label)
    if recipe in BUDGET:
        axes.axvline(BUDGET[recipe], color="#777777", linewidth=0.6, linestyle=":")
    axes.set_title(recipe, fontsize=9, loc="left")
    axes.set(ylim=(0, 1), xlabel="steps in the environment", ylabel="held-out levels solved, sampled")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)


def main() -> None:
    """The runs, seed by seed; then tables, differences and the picture, of all that is in WORK."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SEEDS), default=list(SEEDS))
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", help="comma list; default: 0 to 4 in sokoban, 0 to 2 in the others")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "environments", help="run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time, one thread each")
    args = parser.parse_args()
    work, out = args.work.resolve(), args.out.resolve()
    os.chdir(ROOT)
    work.mkdir(parents=True, exist_ok=True)
    tasks = []
    for recipe in args.only:
        seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else SEEDS[recipe]
        names = args.algorithms if recipe in BUDGET else ["recipe"]
        tasks += [training(recipe, name, seed, work) for seed in seeds for name in names]
    run_all(tasks, args.jobs)
    results = {recipe: _found(recipe, work) for recipe in SEEDS}
    results = {recipe: ours for recipe, ours in results.items() if ours}
    if not results:
        raise SystemExit(f"no run finished; the logs are in {work}/*.log")
    print(machine())
    for recipe, ours in results.items():
        print("\n".join(["", *table(recipe, ours), ""]))
        if recipe in BUDGET:
            print("\n".join(difference(ours, recipe, name) for name in (SAMPLED, GREEDY)))
        draw(recipe, ours, out / f"environments_{recipe}.png")


def _found(recipe: str, work: Path) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for algorithm in TITLES:
        for seed in SEEDS[recipe]:
            made = described(work / f"{recipe}_{algorithm}_{seed}", recipe)
            if made is not None:
                found.setdefault(algorithm, {})[seed] = made
    return found


if __name__ == "__main__":
    main()
