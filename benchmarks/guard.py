"""Whether a change of the house left the numbers alone: fourteen small runs, recorded, and compared later.

    python benchmarks/guard.py record FOLDER     at the commit that is trusted
    python benchmarks/guard.py compare FOLDER    at any later one: exit 1 where a bit differs

Runs `rondo` of this checkout (the folder above this file, or RONDO_SOURCE) on its own tiny task, which is
written into FOLDER, so that nothing but the library changes between the two; for tools, environments and
search on recipes that rondo ships, whose names go where their modules go. Compared are metrics.jsonl without
clocks, every rollout table, and the exported weights, those of a warm start too. Asynchronous runs are
compared by replaying the recorded run's journal. FOLDER is no part of the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = Path(os.environ.get("RONDO_SOURCE", ROOT / "src" if (ROOT / "src").is_dir() else ROOT))

TASK = """
import itertools
import random


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<eos>", *"0123456789+-=# abcdefghijklmnopqrstuvwxyz\\n?:.<>|"]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "?"}
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    return fast


def rows(size=64, seed=0):
    rng = random.Random(seed)
    made = []
    for _ in range(size):
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        made.append({"prompt": f"{a}+{b}=", "answer": str(a + b), "solution": f"{a + b}"})
    return made


def demonstrations(size=64, seed=1):
    made = []
    for row in rows(size, seed):
        said = (("user", row["prompt"]), ("assistant", row["solution"]))
        made.append({"messages": [{"role": role, "content": text} for role, text in said]})
    return made


def pairs(size=64, seed=2):
    made = rows(size, seed)
    return [{"prompt": r["prompt"], "chosen": r["solution"], "rejected": "# " + r["solution"]} for r in made]


def even_share(prompt, trajectory):
    return float((trajectory.response_ids % 2 == 0).mean())


def programs(size=64, seed=3):
    cases = '{"inputs": ["2 3", "5 5"], "outputs": ["5", "10"]}'
    return [{"prompt": row["prompt"], "cases": cases} for row in rows(size, seed)]


PROGRAMS = ["print(sum(map(int, input().split())))", "print(5)", "1 / 0", "print(input())"]


async def writes(messages, policy):
    answer = await policy.chat(messages)
    return f"```python\\n{PROGRAMS[int(answer.token_ids[0]) % 4]}\\n```"
"""
# The verbs of a user's own loop, as examples/ has them.
PROGRAM = """
import asyncio
import sys

from rondo.trainers.sessions import open_session


async def main():
    async with open_session(sys.argv[1:2], sys.argv[2:]) as session:
        actor, reference = await session.actor(), await session.reference()
        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            batch = await actor.compute_log_prob(batch)
            batch = await reference.compute_log_prob(batch)
            batch = await session.compute_advantages(batch, "grpo")
            await session.log(batch, await actor.update_actor(batch))


asyncio.run(main())
"""

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}


def _source(task: str, size: int) -> dict[str, Any]:
    return {"type": "function", "name": task, "task": f"task.py:{task}", "options": {"size": size}}


COMMON = {
    "model": {"config": MODEL, "tokenizer": "task.py:tokenizer"},
    "actor": {"token_budget": 512, "optimizer": {"lr": 1.0e-3}},
    "cluster": {"threads": 1},
    "tracking": {"console": "off", "plot": False},
    "checkpoint": {"export": True},
}
RL = {
    **COMMON,
    "data": {
        "train": [_source("rows", 64)],
        "eval": [_source("rows", 4)],
        "batch_size": 4,
        "max_prompt_tokens": 64,
    },
    "actor": {**COMMON["actor"], "mini_batch_size": 2},
    "rollout": {"n": 4, "max_tokens": 12, "max_concurrent": 16},
    "reward": {"functions": [{"name": "task.py:even_share"}]},
    "trainer": {"total_steps": 4, "evaluation": {"every": 2, "samples": 2}},
}
KL = {"kl": {"name": "k3", "where": "loss", "coef": 0.05}}
# Of recipes that rondo ships: as long as it takes until tools are called and boxes pushed.
SHORT = {
    "data": {"batch_size": 4},
    "rollout": {"n": 4},
    "trainer": {"total_steps": 2, "evaluation": {"every": 2, "samples": 1}},
    "tracking": {"console": "off", "plot": False, "trackers": []},
    "checkpoint": {"every": None, "export": True},
}
SHIPPED = {"tools": "python_tool", "boxes": "sokoban", "corpus": "search_r1"}
WARM_STARTS = {
    f"{name}_warm": {
        "include": f"{recipe}_sft.yaml",
        "trainer": {"total_steps": 60},
        "tracking": SHORT["tracking"],
    }
    for name, recipe in SHIPPED.items()
}
PPO = {"advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95}, **KL}
RECIPES: dict[str, Any] = {
    "grpo": {**RL, "algorithm": KL},
    "ppo": {**RL, "algorithm": PPO, "critic": {"warmup_steps": 1, "mini_batch_size": 2}},
    "resume": RL,
    "abort": RL,
    "recorded": RL,
    "ranks": RL,
    "sft": {
        **COMMON,
        "data": {"train": [_source("demonstrations", 64)], "batch_size": 8, "max_prompt_tokens": 64},
        "trainer": {"total_steps": 5},
    },
    "preference": {
        **COMMON,
        "data": {
            "train": [_source("pairs", 64)],
            "eval": [_source("pairs", 8)],
            "batch_size": 8,
            "max_prompt_tokens": 64,
        },
        "algorithm": {"preference_loss": {"name": "dpo", "beta": 0.1}},
        "trainer": {"total_steps": 4, "evaluation": {"every": 2}},
    },
    "lora": {
        **RL,
        "algorithm": KL,
        "actor": {**RL["actor"], "lora": {"rank": 4, "alpha": 8}},
    },
    "code": {
        **RL,
        "data": {**RL["data"], "train": [_source("programs", 64)], "eval": [_source("programs", 4)]},
        "rollout": {**RL["rollout"], "agent": "task.py:writes"},
        "reward": {"functions": [{"name": "code", "cases_key": "cases"}], "accuracy": "code/solved"},
    },
    "session": {**RL, "algorithm": KL, "trainer": {"total_steps": 4}},
    **{
        name: {
            "include": f"{recipe}.yaml",
            **SHORT,
            "trainer": SHORT["trainer"] | {"warm_start": f"{name}_warm.yaml"},
        }
        for name, recipe in SHIPPED.items()
    },
}
ASYNC = ("trainer.max_staleness=2", "checkpoint.every=2")
SETTINGS: dict[str, tuple[str, ...]] = {
    "resume": (*ASYNC, "trainer.on_update=resume"),
    "abort": (*ASYNC, "trainer.on_update=abort"),
    "ranks": ("cluster.backend=ray", "cluster.devices=2"),
}
TIMED = ("tokens_per_second", "queue_length", "in_flight", "cache_hit_rate")
CLOCKS = ("timing/", "perf/", "plan/", *(f"rollout/{x}" for x in TIMED))


# What a run of CHECKOUT with these arguments says of itself: its config.yaml, and the head of its journal.
SPELLING = """
import json, sys
from rondo.config import load, to_yaml
from rondo.trainers.program.inputs import settled
from rondo.trainers.replay.journal import settings_of
config = settled(load(sys.argv[1:2], sys.argv[2:]).config)
print(json.dumps([to_yaml(config), settings_of(config)]))
"""


def run(name: str, folder: Path, out: Path, replay: Path | None) -> None:
    """One run of RECIPES by the command line of CHECKOUT; exits with its output where it fails."""
    command = {"sft": "sft", "preference": "preference"}.get(name, "train")
    settings = [*SETTINGS.get(name, ()), f"trainer.run_dir={out / name}"]
    if name == "recorded":
        recorded = folder / "base" / "grpo"
        settings.append(f"rollout.recorded={respelled('grpo', folder, out) if replay else recorded}")
    if replay is not None and name in ("resume", "abort"):
        settings.append(f"trainer.replay={respelled(name, folder, out)}")
    program = ["session.py"] if name == "session" else ["-m", "rondo.cli.main", command]
    python(name, folder, *program, str(folder / f"{name}.yaml"), *settings)


def respelled(name: str, folder: Path, out: Path) -> Path:
    """A copy of a recorded run with its settings in the words of CHECKOUT: keys may have other names now."""
    copy = out / f"{name}-respelled"
    shutil.copytree(folder / "base" / name, copy)
    run_dir = f"trainer.run_dir={folder / 'base' / name}"
    recipe = (str(folder / f"{name}.yaml"), *SETTINGS.get(name, ()), run_dir)
    config, settings = json.loads(python(name, folder, "-c", SPELLING, *recipe))
    (copy / "config.yaml").write_text(config)
    head, _, lines = (copy / "journal.jsonl").read_text().partition("\n")
    head = json.dumps({**json.loads(head), "settings": settings})
    (copy / "journal.jsonl").write_text(f"{head}\n{lines}")
    return copy


def python(name: str, folder: Path, *arguments: str) -> str:
    """The output of CHECKOUT's Python with these arguments."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RONDO_CACHE": ""},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{name}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def facts(run_folder: Path) -> Iterator[tuple[str, Any]]:
    """(what, value) of everything that must stay the same, in the run and in its warm start."""
    if (run_folder / "warm_start").is_dir():
        yield from ((f"warm_start/{what}", value) for what, value in facts(run_folder / "warm_start"))
    for number, line in enumerate((run_folder / "metrics.jsonl").read_text().splitlines()):
        for key, value in json.loads(line).items():
            if not key.startswith(CLOCKS) and "seconds" not in key and key != "time":
                yield f"metrics.jsonl:{number + 1} {key}", value
    for path in sorted((run_folder / "rollouts").glob("step-??????.parquet")):
        table = pq.read_table(path)
        for name in sorted(table.column_names):
            yield f"{path.name} {name}", table.column(name).to_pylist()
    for path in sorted((run_folder / "export").glob("*.safetensors")):
        yield f"export/{path.name}", hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(RECIPES), help="names of runs")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    base, here = folder / "base", folder / f"here-{os.getpid()}"
    if arguments.what == "record":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.py").write_text(TASK)
        (folder / "session.py").write_text(PROGRAM)
        for name, recipe in (RECIPES | WARM_STARTS).items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    out = base if arguments.what == "record" else here
    shutil.rmtree(out, ignore_errors=True)
    different = 0
    for name in arguments.only:
        run(name, folder, out, None if arguments.what == "record" else base)
        if arguments.what == "compare":
            ours, theirs = dict(facts(here / name)), dict(facts(base / name))
            keys = sorted(ours.keys() | theirs.keys())
            wrong = [k for k in keys if repr(ours.get(k)) != repr(theirs.get(k))]  # NaN is NaN
            print(f"{name}: {len(theirs)} facts, {len(wrong)} differ", flush=True)
            for key in wrong[:10]:
                print(f"  {key}: {str(theirs.get(key))[:100]} -> {str(ours.get(key))[:100]}")
            different += len(wrong)
        else:
            print(f"{name}: {len(dict(facts(base / name)))} facts", flush=True)
    if not different:
        shutil.rmtree(here, ignore_errors=True)
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
