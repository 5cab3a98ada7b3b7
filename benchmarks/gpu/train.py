"""What a GRPO step costs on one GPU: seconds by phase, tokens per second, peak memory, and how far the
trainer's log-probs are from the sampler's.

    python benchmarks/gpu/train.py [--json FILE] [RECIPE.yaml] [key.sub=value …]     default: qwen3_0.6b.yaml
    python benchmarks/gpu/train.py --kernels 30 …          which kernels took the device's time

The first step warms up (kernels are chosen and compiled) and is not in the medians. With --kernels everything
is recorded, and slower: the shares count, not the seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from rondo.config import load
from rondo.core.types import Prompt, Trajectory
from rondo.trainers.commands.recipe import run_dir
from rondo.trainers.commands.train import train

RECIPE = Path(__file__).with_name("qwen3_0.6b.yaml")
PHASES = ("generate", "prepare", "advantages", "update_actor", "publish")


def even_share(prompt: Prompt, trajectory: Trajectory) -> float:
    """Share of tokens with an even id. Random weights get various rewards of it, so there are gradients."""
    return float((trajectory.response_ids % 2 == 0).mean())


def row_of(line: dict[str, Any]) -> dict[str, float]:
    """What is reported of one step, from its line of metrics.jsonl."""
    seconds = line["timing/step_s"]
    row = {"seconds": seconds} | {f"{phase}_seconds": line.get(f"timing/{phase}_s", 0.0) for phase in PHASES}
    row["tokens_per_s"] = line["rollout/generated_tokens"] / seconds
    row["generated_tokens_per_s"] = line["rollout/tokens_per_second"]
    row["trained_tokens_per_s"] = line["perf/trained_tokens_per_s"]
    row["peak_memory_gib"] = line["perf/peak_memory_bytes"] / 2**30
    row["log_prob_gap"] = line["rollout/log_prob_gap"]
    row["log_prob_gap_max"] = line["rollout/log_prob_gap_max"]
    return row


def table(rows: list[dict[str, float]]) -> str:
    """A line per quantity, a column per step."""
    return "\n".join(name.ljust(26) + "".join(f"{row[name]:12.4g}" for row in rows) for name in rows[0])


@contextlib.contextmanager
def kernels(most: int | None) -> Iterator[None]:
    """Prints the kernels that took the most of the device's time inside, if asked."""
    if most is None:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    whole = sum(row.self_device_time_total for row in rows)
    sys.stdout.write(f"{whole / 1e6:.3f} s of kernels, {sum(row.count for row in rows)} of them\n")
    for row in rows[:most]:
        share = row.self_device_time_total / whole
        sys.stdout.write(
            f"{share:7.1%} {row.self_device_time_total / 1e6:8.3f} s {row.count:8d}  {row.key[:110]}\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", type=int, metavar="N", help="list the N that took the most time")
    parser.add_argument("settings", nargs="*", metavar="RECIPE.yaml or key.sub=value")
    arguments = parser.parse_args()
    files = [text for text in arguments.settings if "=" not in text] or [str(RECIPE)]
    loaded = load(files, [text for text in arguments.settings if "=" in text])
    with kernels(arguments.kernels):
        train(loaded)
    lines = (Path(run_dir(loaded)) / "metrics.jsonl").read_text().splitlines()
    steps = [row_of(line) for line in map(json.loads, lines) if "timing/step_s" in line]
    measured = steps[1:] or steps
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": "cpu",
        "recipe": files,
        "median": {name: statistics.median(row[name] for row in measured) for name in steps[0]},
        "steps": steps,
    }
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    sys.stdout.write(table([*steps, result["median"]]) + "\n")
    text = json.dumps(result, indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
