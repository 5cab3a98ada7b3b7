"""What a row costs beside the model: all of a step's CPU time but decode, prefill and update, over its rows.

    python benchmarks/rows.py [--rows 512,2048,8192] [--against CHECKOUT] [--profile 25]

Each size is a run of `rondo train` of its own: the smallest model there is, GRPO, 8 answers of 4 tokens to a
prompt, scored by a plain function. The cheapest step after the first counts. against: another checkout, whose
runs alternate with those of this one; the last column is what this one takes of that one's time. A machine
that others use varies by a tenth and more: compare what one call printed. profile: of a run of the first
size in this process, the functions of the event loop's thread with the most time of their own.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

N = 8
STEPS = 4
OTHERS = ("perf/decode_cpu_seconds", "perf/prefill_cpu_seconds", "perf/update_cpu_seconds")
REWARD = "def short(prompt, trajectory):\n    return float(len(trajectory.text) % 2)\n"
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
RECIPE = {
    "model": {"config": MODEL, "tokenizer": "rondo.recipes.quickstart.tokenizer"},
    "rollout": {"n": N, "max_tokens": 4, "max_concurrent": 256},
    "actor": {"token_budget": 16384},
    "algorithm": {"advantage": {"name": "grpo"}},
    "trainer": {"total_steps": STEPS},
    "cluster": {"threads": 1, "device": "cpu"},
}


def arguments(folder: Path, rows: int) -> list[str]:
    """Writes a recipe for steps of this many rows; returns the command's arguments."""
    (folder / "mine.py").write_text(REWARD)
    task = {"type": "function", "task": "rondo.recipes.quickstart.train_rows", "options": {"size": 4096}}
    data = {"train": [{"name": "problems", **task}], "batch_size": rows // N, "max_prompt_tokens": 64}
    reward = {"functions": [{"name": f"{folder}/mine.py:short"}]}
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({**RECIPE, "data": data, "reward": reward}))
    return ["train", str(recipe), f"trainer.run_dir={folder}/run"]


def rest(folder: Path, rows: int) -> float:
    """The milliseconds of the cheapest step after the first, per row."""
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [step["timing/cpu_s"] - sum(step[name] for name in OTHERS) for step in steps[1:]]
    return 1000 * min(found) / rows


def measure(checkout: Path, rows: int) -> float:
    """Runs a checkout's `rondo train`."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        own = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rondo", *arguments(folder, rows)]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"rondo train failed:\n{done.stdout}\n{done.stderr}")
        return rest(folder, rows)


def profile(rows: int, top: int) -> None:
    """Prints where the event loop's thread spends its time; the profile's own cost is in it."""
    from rondo.cli.main import main as rondo

    with tempfile.TemporaryDirectory() as place:
        profiler = cProfile.Profile()
        profiler.enable()
        rondo(arguments(Path(place), rows))
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(top)


def main(given: Sequence[str] | None = None) -> None:
    """Measures; a table to stdout."""
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, of which the cheapest counts")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--profile", type=int, metavar="TOP")
    options = parser.parse_args(given)
    if options.profile:
        profile(options.rows[0], options.profile)
        return
    here = Path(__file__).parent.parent
    checkouts = [here, *([options.against.absolute()] if options.against else [])]
    print("| rows | ms a row |" + (" there | ratio |" if options.against else ""), flush=True)
    print("|---|---|" + ("---|---|" if options.against else ""))
    for rows in options.rows:
        costs = [[measure(one, rows) for one in checkouts] for _ in range(options.repeat)]
        best = [min(column) for column in zip(*costs, strict=True)]
        cells = [f"{rows:,}", *(f"{one:.3f}" for one in best)]
        cells += [f"{best[0] / best[1]:.2f}"] if options.against else []
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
