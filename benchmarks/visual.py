"""Policies that learn to see: every visual recipe from its own warm start, and what pictures cost in a step.

    OMP_NUM_THREADS=1 python benchmarks/visual.py                     # all, seeds 0, 1, 2
    OMP_NUM_THREADS=1 python benchmarks/visual.py --only figures --seeds 0 --out pictures

Needs Pillow. A run whose summary is in WORK is not repeated. Prints the tables of docs/benchmarks.md and
draws visual.png. What pictures cost is measured with the model of `visual` as it is before any training, so
that all answers have the same length, and with a reward that differs within groups, so that all of them are
learnt: rows with one picture of 64 × 64 or 1024 × 1024 pixels, which are 16 tokens both
(`model.images.max_pixels`), and rows with as many tokens of text in its place.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import yaml

from algorithms import ROOT, SETTINGS, Results, Task, machine, run_all
from rondo.config import load
from rondo.core.images import ImageRef
from rondo.models import ModelSource, load_model_config
from rondo.models.pixels import ImageReader
from rondo.recipes.visual import MOVES, QUESTION, boards
from rondo.system.names import offered
from rondo.tracking import read_metrics
from rondo.trainers.commands import train as runs

if TYPE_CHECKING:
    from rondo.core.types import Prompt, Trajectory

RECIPES = ("visual", "figures", "compare")
SIDES = (64, 1024)  # pixels
TOKENS = 16  # of a picture of either size: 4 × 4 of 16 pixels
STEPS = 20  # with which the cost is measured, the first not counted
QUIET = ("tracking={save_rollouts: false, samples: 0}", "checkpoint={every: null, export: false}")
COSTS = {"text": "text, as many tokens", **{str(side): f"a picture of {side} × {side}" for side in SIDES}}


def training(name: str, seed: int, work: Path) -> Task:
    folder = work / f"{name}_{seed}"
    overrides = [
        *SETTINGS,
        *QUIET,
        f"trainer.seed={seed}",
        f"trainer.run_dir={folder}",
        "trainer.evaluation={every: 10, greedy: true, samples: 4}",
    ]
    return Task(name, seed, folder, lambda: runs.train(load([name], overrides)))


def described(folder: Path) -> dict[str, Any] | None:
    """Greedy and sampled reward by step, the cost, and memory; None: not finished."""
    if not (folder / "summary.json").exists():
        return None
    lines = list(read_metrics(folder))
    summaries = [json.loads((at / "summary.json").read_text()) for at in (folder / "warm_start", folder)]
    made: dict[str, Any] = {"cpu_seconds": [summary["cpu_seconds"] for summary in summaries]}
    for how in ("greedy", "sampled"):
        key = f"eval/{how}/reward"
        made[how] = {line["step"]: line[key] for line in lines if key in line}
    made["gap"] = max(line["rollout/log_prob_gap"] for line in lines if "rollout/log_prob_gap" in line)
    made["memory"] = max(line.get("perf/peak_memory_bytes", 0.0) for line in lines)
    return made


def table(results: Results) -> list[str]:
    """A row of Markdown per recipe; numbers of the seeds separated by commas."""
    head = ["recipe", "greedy before → after", "sampled before → after", "log-prob gap"]
    head += ["CPU-s, warm start + RL", "peak memory, MB"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, by_seed in results.items():
        made = list(by_seed.values())
        cells = [f"`{name}`"]
        for how in ("greedy", "sampled"):
            curves = [list(run[how].values()) for run in made]
            cells.append(", ".join(f"{curve[0]:.3f} → {curve[-1]:.3f}" for curve in curves))
        cells.append(f"{max(run['gap'] for run in made):.1e}")
        cells.append(", ".join("{:.0f} + {:.0f}".format(*run["cpu_seconds"]) for run in made))
        cells.append(f"{max(run['memory'] for run in made) / 1e6:.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def picture_rows(side: int, size: int = 16 * STEPS, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of `visual` whose pictures are of side × side pixels."""
    return [{"prompt": QUESTION, "image": picture} for picture in enlarged(side, size, seed)]


def text_rows(size: int = 16 * STEPS, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with words in a picture's place, one for each of its tokens and of the two around them. They
    differ, as pictures do.
    """
    rng = random.Random(seed)
    words = [[rng.choice(list(MOVES)) for _ in range(TOKENS + 2)] for _ in range(size)]
    return [{"prompt": f" {' '.join(ours)}{QUESTION}"} for ours in words]


@functools.cache
def enlarged(side: int, size: int, seed: int) -> list[bytes]:
    """Boards of `visual` as PNGs of side × side pixels."""
    from PIL import Image

    pictures = []
    for board in boards("enlarged", size, seed):
        file = io.BytesIO()
        Image.open(io.BytesIO(board.picture)).resize((side, side)).save(file, "PNG")
        pictures.append(file.getvalue())
    return pictures


def even(prompt: Prompt, trajectory: Trajectory) -> float:
    """1 where the sum of the response's tokens is even."""
    return float(int(sum(trajectory.response_ids)) % 2 == 0)


def measuring(name: str, work: Path) -> Task:
    """STEPS steps of `visual` from new weights, on rows of text or of pictures."""
    folder = work / f"cost_{name}"
    model = yaml.safe_load(offered("recipes")["visual_sft"].read_text())["model"]
    source: dict[str, Any] = {"type": "function", "name": name, "task": f"{__file__}:text_rows"}
    if name != "text":
        source |= {"task": f"{__file__}:picture_rows", "options": {"side": int(name)}}
    overrides = [
        *SETTINGS,
        *QUIET,
        f"trainer.run_dir={folder}",
        f"trainer.total_steps={STEPS}",
        "trainer.warm_start=null",
        "trainer.evaluation={before: false, after: false, every: null}",
        f"model={json.dumps(model)}",
        f"data.train={json.dumps([source])}",
        "data.eval=[]",
        f"reward.functions={json.dumps([{'name': f'{__file__}:even'}])}",
    ]
    return Task(f"cost {name}", 0, folder, lambda: runs.train(load(["visual"], overrides)))


def costs(work: Path) -> list[str]:
    """A row of Markdown per kind of row: medians over the steps, without the first."""
    head = ["rows of", "CPU-s per step", "of these update", "tokens of a response", "driver, bytes per step"]
    head += ["peak memory, MB"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, title in COSTS.items():
        lines = [line for line in read_metrics(work / f"cost_{name}") if "actor/grad_norm" in line][1:]

        def median(key: str, lines: Sequence[Mapping[str, Any]] = lines) -> float:
            return statistics.median(line[key] for line in lines)

        cells = [title, f"{median('timing/cpu_s'):.3f}", f"{median('perf/update_cpu_seconds'):.3f}"]
        cells += [f"{median('rollout/response_length'):.1f}", f"{median('perf/driver_bytes'):,.0f}"]
        cells.append(f"{max(line['perf/peak_memory_bytes'] for line in lines) / 1e6:.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def decoded(side: int, work: Path, size: int = 200) -> float:
    """Pictures of side × side pixels per CPU-second, from the file to the numbers that the tower reads."""
    model = yaml.safe_load(offered("recipes")["visual_sft"].read_text())["model"]
    source = ModelSource(config=model["config"], **model["images"])
    reader = ImageReader(source, load_model_config(source))
    shown: list[ImageRef] = []
    for number, content in enumerate(enlarged(side, size, 0)):
        path = work / f"picture_{side}_{number}.png"
        path.write_bytes(content)
        shown.append(reader.reference(path))
        assert shown[-1].n_tokens == TOKENS
    started = time.process_time()
    for reference in shown:
        reader.pixels(reference)
    return size / (time.process_time() - started)


def draw(results: Results, path: Path) -> None:
    """Held-out reward by step, each seed: greedy in blue, sampled in orange."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.3 * len(results) + 0.6, 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(results), sharey=True, squeeze=False)
    for axes, (name, by_seed) in zip(grid.flat, results.items(), strict=True):
        for number, run in enumerate(by_seed.values()):
            for how, colour in (("greedy", "#2457a8"), ("sampled", "#c2571a")):
                label = how if number == 0 else None
                axes.plot(*zip(*run[how].items(), strict=True), color=colour, linewidth=1, label=label)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set(ylim=(0, 1.02), xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[0].set_ylabel("held-out reward")
    grid.flat[-1].legend(fontsize=7, frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)


def main() -> None:
    """The runs, then the tables and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*RECIPES, "costs"], default=[*RECIPES, "costs"])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the picture")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "visual", help="run folders")
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time, one thread each")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    tasks = [training(name, seed, work) for seed in seeds for name in args.only if name != "costs"]
    if "costs" in args.only:
        tasks += [measuring(name, work) for name in COSTS]
    run_all(tasks, args.jobs)
    print(machine())
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for task in tasks:
        made = described(task.folder) if task.name in RECIPES else None
        if made is not None:
            results.setdefault(task.name, {})[task.seed] = made
    if results:
        draw(results, args.out / "visual.png")
        print("\n".join(["", *table(results)]))
    if "costs" in args.only:
        print("\n".join(["", *costs(work), ""]))
        for side in SIDES:
            print(f"{side} × {side}: {decoded(side, work):,.0f} pictures read per CPU-second")


if __name__ == "__main__":
    main()
