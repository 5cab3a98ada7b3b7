"""How far runs of the quickstart on Megatron end from the same runs on torch: weights and rewards, by seed.

    python -m tests.host_card.build --cards 2 python benchmarks/megatron_runs.py FOLDER

Each seed has a warm start, from which GRPO goes on along `tensor` and PPO along `pipeline`, in float32. With
fewer steps than the recipe has, and smaller ones (--prompts, --responses), a run takes a minute on a card in
host memory. In longer ones a token may be drawn otherwise, as log-probs differ in their last digits, and the
runs go apart from there on; with --recorded Megatron's trains on the rows of torch's (`rollout.recorded`).
The tables of docs/megatron.md are what this prints, the second one with `--whole --recorded`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

GAE = ("algorithm.advantage={name: gae, gamma: 1.0, lam: 0.95}", "critic.compute_dtype=float32")
# Name: (settings of both runs, those of Megatron's).
ALGORITHMS = {
    "GRPO, tensor 2": ((), ("actor.parallel.tensor=2",)),
    "PPO, pipeline 2": (GAE, ("actor.parallel.pipeline=2",)),
}
MEGATRON = ("actor.backend=megatron", "cluster.backend=process", "cluster.devices=2")
COMMON = (
    "trainer.warm_start=null",
    "trainer.evaluation={before: false, after: false, every: null}",
    "checkpoint={every: null, export: true}",
    "cluster.device=cuda",
    "actor.compute_dtype=float32",
)
WARM = ("cluster.device=cpu", "checkpoint.export=true")
WARM_STEPS = 80


def rondo(folder: Path, *arguments: str) -> Path:
    """Runs a command that is not done yet; returns its folder."""
    if not (folder / "export").exists():
        quiet = ("tracking.console=off", "tracking.trackers=[]", f"trainer.run_dir={folder}")
        subprocess.run([sys.executable, "-m", "rondo.cli.main", *arguments, *quiet], check=True)
    return folder


def rewards_of(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--whole", action="store_true", help="the recipe's steps, sizes and warm start")
    parser.add_argument("--recorded", action="store_true", help="Megatron's runs have the rows of torch's")
    given = parser.parse_args()
    if given.whole and any(
        vars(given)[one] != parser.get_default(one) for one in ("steps", "prompts", "responses")
    ):
        parser.error("--whole has the recipe's own --steps, --prompts and --responses: leave them out")
    print("| run | seed | steps | furthest weight | furthest tensor, of its norm | rewards differ | reward |")
    print("|---|---|---|---|---|---|---|")
    warm_steps = (f"trainer.total_steps={WARM_STEPS}",)
    sizes = (
        f"trainer.total_steps={given.steps}",
        f"data.batch_size={given.prompts}",
        f"rollout.n={given.responses}",
    )
    if given.whole:
        sizes = warm_steps = ()
    for seed in given.seeds:
        of_seed = f"trainer.seed={seed}"
        warm = rondo(given.folder / f"warm-{seed}", "sft", "quickstart_sft", of_seed, *WARM, *warm_steps)
        for number, (name, (both, megatron)) in enumerate(ALGORITHMS.items()):
            settings = (f"model.path={warm / 'export'}", of_seed, *COMMON, *sizes, *both)
            torch = rondo(given.folder / f"torch-{number}-{seed}", "train", "quickstart", *settings)
            folder = given.folder / f"megatron-{number}-{seed}"
            rows = (f"rollout.recorded={torch}",) if given.recorded else ()
            ours = rondo(folder, "train", "quickstart", *settings, *MEGATRON, *megatron, *rows)
            one, other = (load_file(run / "export" / "model.safetensors") for run in (torch, ours))
            furthest = max(float((one[key] - other[key]).abs().max()) for key in one)
            of_norm = max(float((one[key] - other[key]).norm() / one[key].norm()) for key in one)
            rewards = list(zip(rewards_of(torch), rewards_of(ours), strict=True))
            differ = [step for step, (a, b) in enumerate(rewards, start=1) if a != b]
            said = f"from step {differ[0]}" if differ else "never"
            print(
                f"| {name} | {seed} | {len(rewards)} | {furthest:.1e} | {of_norm:.1e} | {said} | "
                f"{rewards[0][1]:.3f} to {rewards[-1][1]:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
