"""Policies that learn to use tools: every agent recipe from its own warm start, on held-out prompts.

    OMP_NUM_THREADS=1 python benchmarks/agent_recipes.py                     # all, seeds 0, 1, 2
    OMP_NUM_THREADS=1 python benchmarks/agent_recipes.py --only calculator --seeds 0 --out pictures

Needs `pip install -e '.[serve]' openai-agents` for the agent of examples/ (whose package `agents` a file of
that name here would hide), and a sandbox for Python's. Runs whose summary is in WORK are not repeated. Prints
the table of docs/agents.md and draws docs/agents.png; docs/agents_search.png is that of

    … python benchmarks/agent_recipes.py --only "search in a corpus" --picture agents_search.png
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from algorithms import ROOT, SETTINGS, Results, Task, draw, machine, result_of, run_all
from rondo.config import load
from rondo.tracking import read_metrics
from rondo.trainers.commands import train as runs

RECIPES = {
    "calculator": "calculator",
    "Python in the sandbox": "python_tool",
    "search in a corpus": "search_r1",
    "openai-agents": "examples/agents_sdk.yaml",
}
LAST = 5  # steps of which means are shown


def training(name: str, seed: int, work: Path) -> Task:
    folder = work / f"{Path(RECIPES[name]).stem}_{seed}"
    overrides = [
        *SETTINGS,
        f"trainer.seed={seed}",
        f"trainer.run_dir={folder}",
        "tracking={save_rollouts: false, samples: 0}",
        "checkpoint={every: null, export: false}",
    ]
    return Task(name, seed, folder, lambda: runs.train(load([RECIPES[name]], overrides)))


def described(folder: Path) -> dict[str, Any] | None:
    """`result_of`, with the warm start's CPU seconds and means over the last steps; None: not finished."""
    made = result_of(folder)
    if made is None:
        return None
    lines = [line for line in read_metrics(folder) if "agent/calls" in line]
    warm_start = json.loads((folder / "warm_start" / "summary.json").read_text())
    made["cost"] = f"{warm_start['cpu_seconds']:.0f} + {made['cpu_seconds']:.0f}"
    made["first_calls"] = lines[0]["agent/calls"]
    for name, key in (("calls", "agent/calls"), ("gap", "rollout/log_prob_gap")):
        made[name] = statistics.fmean(line[key] for line in lines[-LAST:])
    return made


def table(results: Results) -> list[str]:
    """A row of Markdown per recipe; numbers of the seeds separated by commas."""
    head = ["agent", "greedy before → after", f"sampled, first → last {LAST} steps", "answers per episode"]
    head += ["log-prob gap", "CPU-s, warm start + RL"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, by_seed in results.items():
        cells = [f"{name} (`{RECIPES[name]}`)", "", "", "", "", ""]
        made = list(by_seed.values())
        accuracy = [list(run["accuracy"].values()) for run in made]
        sampled = [list(run["sampled"].values()) for run in made]
        cells[1] = ", ".join(f"{values[0]:.3f} → {values[-1]:.3f}" for values in accuracy)
        cells[2] = ", ".join(
            f"{statistics.fmean(values[:LAST]):.2f} → {statistics.fmean(values[-LAST:]):.2f}"
            for values in sampled
        )
        cells[3] = ", ".join(f"{run['first_calls']:.2f} → {run['calls']:.2f}" for run in made)
        cells[4] = f"{max(run['gap'] for run in made):.1e}"
        cells[5] = ", ".join(run["cost"] for run in made)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """The runs, then the table and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the picture")
    parser.add_argument("--picture", default="agents.png", help="its name")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "agents", help="run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time, one thread each")
    args = parser.parse_args()
    work, out = args.work.resolve(), args.out.resolve()
    os.chdir(ROOT)  # the example is named relative to the repository
    work.mkdir(parents=True, exist_ok=True)
    tasks = [training(name, int(seed), work) for name in args.only for seed in args.seeds.split(",")]
    run_all(tasks, args.jobs)
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for task in tasks:
        made = described(task.folder)
        if made is not None:
            results.setdefault(task.name, {})[task.seed] = made
    if not results:
        raise SystemExit(f"no run finished; the logs are in {work}/*.log")
    draw(results, out / args.picture)
    print(machine())
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
