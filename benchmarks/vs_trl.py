"""rondo and TRL's GRPOTrainer on the quickstart task, alternately in one run: CPU seconds per step, tokens,
reward, memory.

    .venv/bin/python benchmarks/vs_trl.py            # makes .venv-trl with TRL 1.16 when it is not there
    .venv/bin/python benchmarks/vs_trl.py --shape qwen2.5-0.5b     # random weights; needs 20 GiB of memory

Both start from the same checkpoint (of the quickstart: a warm-started one), see the same prompts in the same
order, take the same number of steps with the same group size, learning rate and loss (token-mean, clip
0.2/0.28, no KL), one thread, float32. CPU seconds are those of the whole process per training step after
`--skip` warm-up steps for rondo, over all steps for TRL (whose first step costs no more than the others). The
machine may be shared: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRL = "trl==1.16.*"


@dataclass(frozen=True)
class Shape:
    """A model and how much of it both do in a step."""

    steps: int
    settings: dict[str, Any]
    """As `trl_side.py` reads them; rondo gets the same."""
    config: dict[str, Any] | None = None
    """transformers' keys of a model with random weights. None: the quickstart's own, warm-started."""
    rondo: tuple[str, ...] = ()
    """What rondo alone is told."""


# Random weights score nothing in word problems, and rondo computes no update for a group of equal rewards:
# the reward of such a model is its share of even token ids. It ends a response early once in 150,000 tokens.
SHAPES = {
    "quickstart": Shape(
        steps=20,
        settings={"batch_size": 16, "n": 8, "max_tokens": 28, "lr": 2e-4, "seed": 0, "reward": "gsm8k"},
    ),
    "qwen2.5-0.5b": Shape(
        steps=3,
        settings={"batch_size": 2, "n": 8, "max_tokens": 64, "lr": 1e-6, "seed": 0, "reward": "even_share"},
        config={
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        # TRL computes activations again by default, to have room; this is rondo's way.
        rondo=("rollout.sleep=true",),
    ),
}
REWARDS = {"gsm8k": "gsm8k", "even_share": f"{ROOT / 'benchmarks' / 'gpu' / 'train.py'}:even_share"}
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT / "src"),
    "TOKENIZERS_PARALLELISM": "false",
}


def trl_python(venv: Path) -> Path:
    """TRL's own environment, created when missing."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "torch==2.13.0", "transformers<5.24", TRL]
        subprocess.run(install, check=True)
    return python


def warm_start(work: Path) -> Path:
    """The checkpoint that both start from."""
    run = work / "warm_start"
    rondo("sft", "quickstart_sft", f"trainer.run_dir={run}")
    return run / "export"


def random_model(work: Path, config: dict[str, Any]) -> Path:
    """A folder with random weights of that config, and the quickstart's tokenizer (which knows the lowest of
    the model's token ids). In a process of its own, which gives its memory back.
    """
    code = (
        "import json, sys, torch; from transformers import AutoConfig, AutoModelForCausalLM; "
        "from rondo.recipes.quickstart import tokenizer\n"
        "folder, fields = sys.argv[1], json.loads(sys.argv[2])\n"
        "words = tokenizer()\n"
        "special = {'eos_token_id': words.eos_token_id, 'pad_token_id': words.pad_token_id}\n"
        "config = AutoConfig.for_model(**fields, **special, bos_token_id=None)\n"
        "torch.manual_seed(0)\n"
        "AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)\n"
        "words.save_pretrained(folder)\n"
    )
    folder = work / "model"
    command = [sys.executable, "-c", code, str(folder), json.dumps(config)]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    return folder


def measured(command: list[str], output: Path | None = None) -> float:
    """Runs a program. Returns the most memory it had, in GB (resident, with what it had mapped of files)."""
    with open(output or os.devnull, "w", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=out if output else None)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_maxrss * 1024 / 1e9


def rondo(*arguments: str) -> float:
    """Runs a command of rondo. Returns the most memory it had, in GB."""
    command = [
        sys.executable,
        "-m",
        "rondo.cli.main",
        *arguments,
        "tracking.console=off",
        "tracking.plot=false",
    ]
    return measured([*command, "cluster.threads=1"])


def write_prompts(model: Path, path: Path, number: int) -> None:
    """The prompts of rondo's stream, in its order, for TRL's data set."""
    code = (
        "import json, sys; from rondo.config import load; "
        "from rondo.trainers.program.inputs import load_prompts\n"
        "model, path, number = sys.argv[1:]\n"
        "over = [f'model.path={model}', 'trainer.warm_start=null']\n"
        "stream = load_prompts(load(['quickstart'], over).config).train\n"
        "rows = [stream.prompt(i) for i in range(int(number))]\n"
        "lines = [json.dumps({'messages': list(map(dict, p.messages)), 'answer': str(p.fields['answer'])}) "
        "for p in rows]\n"
        "open(path, 'w').write('\\n'.join(lines))\n"
    )
    command = [sys.executable, "-c", code, str(model), str(path), str(number)]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)


def run_rondo(
    model: Path, run: Path, settings: dict[str, Any], skip: int, others: Sequence[str]
) -> dict[str, Any]:
    """`rondo train` without evaluation and checkpoints."""
    peak = rondo(
        "train",
        "quickstart",
        f"model.path={model}",
        "trainer.warm_start=null",
        f"trainer.total_steps={settings['steps']}",
        f"trainer.seed={settings['seed']}",
        f"data.batch_size={settings['batch_size']}",
        f"rollout.n={settings['n']}",
        f"rollout.max_tokens={settings['max_tokens']}",
        f"actor.optimizer.lr={settings['lr']}",
        f"actor.optimizer.schedule.warmup_steps={settings['warmup_steps']}",
        f"reward.functions=[{{name: '{REWARDS[settings['reward']]}'}}]",
        "trainer.evaluation={before: false, after: false}",
        "tracking.trackers=[]",
        "checkpoint={every: null, export: false}",
        f"trainer.run_dir={run}",
        *others,
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = lines[skip:]

    def mean(*names: str) -> float:
        return statistics.fmean(sum(line.get(name, 0.0) for name in names) for line in timed)

    whole = mean("timing/cpu_s")
    generate = mean("perf/decode_cpu_seconds", "perf/prefill_cpu_seconds")
    update = mean("perf/update_cpu_seconds")
    return {
        "cpu_s_per_step": whole,
        "phases": {"decode": generate, "update": update, "rest": whole - generate - update},
        "peak_gb": peak,
        "tokens": sum(line["rollout/generated_tokens"] for line in lines),
        "rewards": [line["reward/mean"] for line in lines],
    }


def run_trl(
    python: Path, model: Path, prompts: Path, output: Path, settings: dict[str, Any]
) -> dict[str, Any]:
    """`trl_side.py` in TRL's environment."""
    command = [str(python), str(ROOT / "benchmarks" / "trl_side.py"), "--model", str(model)]
    command += ["--prompts", str(prompts), "--output", str(output), "--settings", json.dumps(settings)]
    told = output.with_suffix(".txt")
    peak = measured(command, told)
    result: dict[str, Any] = json.loads(told.read_text().strip().splitlines()[-1])
    return {**result, "peak_gb": peak}


def main() -> None:
    """Alternate the two, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--steps", type=int, help="default: 20 of the quickstart, 3 of a larger shape")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--skip", type=int, default=1, help="rondo's first steps left out of the times")
    parser.add_argument("--model", type=Path, help="model folder (default: made now)")
    parser.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    settings = {**shape.settings, "warmup_steps": 5, "steps": args.steps or shape.steps}
    python = trl_python(args.trl_venv)
    results: dict[str, list[dict[str, Any]]] = {"rondo": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = args.model or (warm_start(work) if shape.config is None else random_model(work, shape.config))
        prompts = work / "prompts.jsonl"
        write_prompts(model, prompts, settings["steps"] * settings["batch_size"])
        for repeat in range(args.repeats):
            results["rondo"].append(
                run_rondo(model, work / f"rondo-{repeat}", settings, args.skip, shape.rondo)
            )
            results["trl"].append(run_trl(python, model, prompts, work / f"trl-{repeat}", settings))
            for name, runs in results.items():
                last = runs[-1]
                phases = "  ".join(
                    f"{phase} {seconds:.3f}" for phase, seconds in sorted(last["phases"].items())
                )
                print(f"{name:6s} {last['cpu_s_per_step']:.3f} CPU-s/step   {phases}", flush=True)
    report(results, settings, args.json)


def report(results: dict[str, list[dict[str, Any]]], settings: dict[str, Any], path: Path | None) -> None:
    """Medians over the repeats, and the ratio."""
    seconds = {
        name: statistics.median(run["cpu_s_per_step"] for run in runs) for name, runs in results.items()
    }
    for name, runs in results.items():
        rewards = runs[-1]["rewards"]
        tail = statistics.fmean(rewards[-3:])
        print(
            f"{name:6s} {seconds[name]:.3f} CPU-s/step, tokens {runs[-1]['tokens']:.0f}, reward "
            f"{rewards[0]:.2f} -> {tail:.2f}, {runs[-1]['peak_gb']:.1f} GB at the highest"
        )
    print(f"TRL / rondo: {seconds['trl'] / seconds['rondo']:.2f}")
    if path is not None:
        path.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
