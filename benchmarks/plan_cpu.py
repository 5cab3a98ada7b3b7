"""How far the planner's seconds are from small runs on this machine's processor.

    python benchmarks/plan_cpu.py [--row FILE.tsv] [--sizes 30M 120M] [--turns 2]
    python benchmarks/plan_cpu.py --products      the native engine's products, by rows

Runs GRPO on models with random weights in three placements, and prints CPU-seconds of a step beside the
planned ones: medians of 5 steps, after one that is left out. Before each run it measures the processor as
`rondo plan --measure` does (or takes the row of a file): machines in a cloud are a third faster or slower
some minutes later. A device is a core, and a host's seconds are CPU-seconds, so that a machine which does
other things meanwhile changes little; how much, two equal runs say. FITTED is the size whose runs the
formulas were mended after; docs/plan.md says what was seen of the others by then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rondo.core.types import Prompt, Trajectory

# Hidden, intermediate, layers, heads (of 64).
SIZES = {"30M": (512, 1536, 8, 8), "60M": (640, 2048, 10, 10), "120M": (768, 2560, 14, 12)}
FITTED = "60M"
TWO = "backend: process, devices: 2"
APART = "pools: {train: 1, rollout: 1}, placement: {actor: train, rollout: rollout}"
PLACEMENTS = {
    "one device": "cluster={devices: 1}",
    "two devices, FSDP": f"cluster={{{TWO}}}",
    "a pool that trains, one that generates": f"cluster={{{TWO}, {APART}}}",
}
VOCABULARY = 466  # of the quickstart's tokenizer
PHASES = {
    "update": ("perf/update_cpu_seconds",),
    "generate": ("perf/decode_cpu_seconds", "perf/prefill_cpu_seconds"),
    "all": ("timing/cpu_s",),
}
STEPS = 6
PRODUCTS = (1, 2, 4, 8, 16, 32, 64)


def uneven(prompt: Prompt, trajectory: Trajectory) -> float:
    """Scores responses so that every group has something to learn from."""
    return float(int(trajectory.response_ids.sum()) % 7)


def settings(size: str, placement: str) -> list[str]:
    """Returns the overrides of a run."""
    hidden, intermediate, layers, heads = SIZES[size]
    model = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    made = json.dumps({"config": model, "tokenizer": "rondo.recipes.quickstart.tokenizer"})
    return [
        f"model={made}",
        "trainer.warm_start=null",
        f"trainer.total_steps={STEPS}",
        "trainer.evaluation.every=null",
        "data.eval=[]",
        "data.batch_size=4",
        "rollout.n=4",
        "rollout.max_tokens=64",
        "actor.token_budget=2048",
        "checkpoint.every=1000",
        "tracking.trackers=[]",
        f"reward.functions=[{{name: {Path(__file__).resolve()}:uneven}}]",
        PLACEMENTS[placement],
        "cluster.threads=1",
    ]


def run(size: str, placement: str, turn: int, folder: Path) -> list[Mapping[str, float]]:
    """Returns the metrics of a run's steps but the first, made now or there already."""
    kept = folder / f"{size}, {placement}, {turn}.jsonl"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "rondo", "train", "quickstart", *settings(size, placement)]
            command.append(f"trainer.run_dir={temporary}/run")
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            kept.write_bytes(Path(temporary, "run", "metrics.jsonl").read_bytes())
    return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()[1:]]


def median(steps: list[Mapping[str, float]], *names: str) -> float:
    """Returns the median over steps of the sum of metrics."""
    return statistics.median(sum(step[name] for name in names) for step in steps)


def planned(size: str, placement: str, steps: list[Mapping[str, float]], row: Any) -> dict[str, float]:
    """Returns the planned CPU-seconds of each phase, with the lengths of rows that the run had."""
    from rondo.config import load
    from rondo.planning.roles import ON_HOST, config_for, roles_of
    from rondo.planning.runs import Lengths, runs_of, shapes_of
    from rondo.planning.step_time import plan_time

    config = config_for(load(["quickstart"], settings(size, placement)).config, ON_HOST)
    rows = config.data.batch_size * config.rollout.n
    prompt = median(steps, "perf/prefill_tokens", "perf/shared_prefill_tokens") / rows
    lengths = Lengths(round(prompt), round(median(steps, "rollout/response_length")), "as recorded")
    runs = runs_of(config, roles_of(config), ("actor",), shapes_of(config), lengths, on_host=True)
    plan = plan_time(runs, row)
    trains, generates = len(runs.placement.devices("actor")), runs.engines
    found = {"update": plan.seconds("update") * trains, "generate": plan.seconds("generate") * generates}
    # Who sends weights and who gets them are busy alike.
    involved = len({*runs.placement.devices("actor"), *runs.placement.devices("rollout")})
    others = plan.seconds("score") * trains + plan.seconds("sync") * involved
    return {**found, "all": sum(found.values()) + others}


class Compared(NamedTuple):
    """One phase of one placement."""

    size: str
    """Of the model."""
    placement: str
    """Of roles."""
    phase: str
    """Of a step; all: the whole of it."""
    measured: list[float]
    """CPU-seconds of a step, of each of the equal runs."""
    planned: float
    """CPU-seconds of a step."""


def row_before(run_of: str, folder: Path) -> Any:
    """Returns the processor's row, measured now, or there already. run_of: what runs next."""
    from rondo.platform import planned as platform_named
    from rondo.platform.measure import measure, measured_row, write_row
    from rondo.rollout.native.kernels import random_product

    path = folder / f"{run_of}.tsv"
    if path.exists():
        return measured_row(path)
    return write_row(measure(platform_named("cpu"), lambda _: None, own_product=random_product), path)


def compare(sizes: list[str], turns: int, row: Any, folder: Path) -> Iterator[Compared]:
    """Runs all placements, each as often as said, and yields the phases of each. row: of the processor; None:
    it is measured before each run.
    """
    for size, placement in itertools.product(sizes, PLACEMENTS):
        equal, plans = [], []
        for turn in range(turns):
            now = row or row_before(f"{size}, {placement}, {turn}", folder)
            equal.append(run(size, placement, turn, folder))
            plans.append(planned(size, placement, equal[-1], now))
        for phase, names in PHASES.items():
            plan = statistics.mean(one[phase] for one in plans)
            yield Compared(size, placement, phase, [median(one, *names) for one in equal], plan)


def products() -> Iterator[str]:
    """Yields a table: CPU milliseconds of the native engine's products of so many rows, and as they are
    planned from those of one row and of the most; of the weights that `--measure` has.
    """
    from rondo.planning.time import host_products
    from rondo.platform import planned as platform_named
    from rondo.platform.measure import FULL, Device
    from rondo.rollout.native.kernels import random_product

    device, of_set = Device(platform_named("cpu"), 0), sum(FULL.widths) * FULL.widths[0]

    def took(rows: int, weights: int) -> float:
        numbers = max(1, weights // of_set) * of_set
        return 1e3 * 2 * rows * numbers / device.own_products(random_product, rows, FULL, weights)

    yield "| weights, MiB | rows | measured, ms | planned | |"
    yield "|---|---|---|---|---|"
    for weights in (FULL.near, FULL.far):
        several = [took(rows, weights) for rows in PRODUCTS]
        for rows, found in zip(PRODUCTS, several, strict=True):
            plan = host_products(several[0], several[-1] * rows / PRODUCTS[-1], rows)
            yield f"| {4 * weights >> 20} | {rows} | {found:.1f} | {plan:.1f} | {plan / found - 1:+.0%} |"


def main() -> None:
    from rondo.planning.devices import find_device

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--row", help="a row of `rondo plan --measure` (default: one is measured before each run)"
    )
    parser.add_argument("--sizes", nargs="+", default=[one for one in SIZES if one != FITTED], choices=SIZES)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--products", action="store_true", help="nothing but these")
    parser.add_argument("--runs", type=Path, help="a folder: runs that it has are not made again")
    args = parser.parse_args()
    if args.products:
        print(*products(), sep="\n")
        return
    row = None if args.row is None else find_device(args.row)
    print("| model | placement | phase | measured, CPU-s of a step | planned | error | two equal runs |")
    print("|---" * 7 + "|")
    folder = args.runs or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    for one in compare(args.sizes, args.turns, row, folder):
        mean = statistics.mean(one.measured)
        spread = f"{max(one.measured) / min(one.measured) - 1:.0%}" if len(one.measured) > 1 else ""
        print(
            f"| {one.size} | {one.placement} | {one.phase} | {mean:.2f} | {one.planned:.2f} | "
            f"{one.planned / mean - 1:+.0%} | {spread} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
