"""Whether verl's own launch scripts, where they are accepted, start here: the first update of each.

    python benchmarks/verl_starts.py verl_launches.jsonl [--only TEXT] [--most N] [--write FILE]

The file is that of `benchmarks/verl_launches.py`. Each launch that is accepted is trained for one step in
this process, on the CPU, by the native engine on one device. What a laptop has not is replaced, and each
replacement is printed once: the model by a tiny one, the rows by made ones in verl's format, lengths, batches
and samples by small ones, the layouts by one device, and rewards by one that differs from answer to answer.
All else is as translated. A launch with images gets a tiny model that sees, and rows that show some. A launch
has started if a step with a gradient is in its metrics.

--write keeps the N launches whose keys are the most different ones (40 of them are started in the tests),
without the places and names of their authors' machines, of those that start.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rondo.config import Config
from rondo.config.load import LoadedConfig, load
from rondo.core.errors import RondoError
from rondo.recipes import quickstart, visual
from rondo.trainers.commands.supervised import sft
from rondo.trainers.commands.train import train
from rondo_verl.programs import program
from verl_launches import launches, row

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    found = float(sum(map(ord, solution_str)) % 2)
    return {"score": found, "acc": found}
"""
TOOLS = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Rates an answer.
        parameters:
          type: object
          properties: {answer: {type: string, description: The answer.}}
          required: [answer]
"""
PROMPTS, SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 4, 4, 32, 8


def made(folder: Path) -> Mapping[str, str]:
    """Makes the models, the rows and the reward; returns where they are."""
    words = visual.tokenizer()
    words.save_pretrained(folder / "seeing")
    seeing: Any = load(["visual_sft"]).config.model.config
    rope = {**seeing["text_config"]["rope_parameters"], "mrope_section": [4, 2, 2]}
    seeing["text_config"] |= {**MODEL, "rope_parameters": rope}
    seeing["vision_config"] |= {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32}
    torch.manual_seed(0)
    sees = AutoConfig.for_model(**seeing, vocab_size=len(words))
    AutoModelForImageTextToText.from_config(sees).save_pretrained(folder / "seeing")
    pixels = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
    pixels |= {"temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "seeing" / "preprocessor_config.json").write_text(json.dumps(pixels))
    tokenizer = quickstart.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    config = AutoConfig.for_model("qwen3", **MODEL, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    number = range(16)
    rows = {
        "data_source": ["openai/gsm8k" for _ in number],
        "prompt": [[{"role": "user", "content": f"{one} + {one}"}] for one in number],
        "reward_model": [{"style": "rule", "ground_truth": str(2 * one)} for one in number],
        "extra_info": [
            {"index": one, "split": "train", "question": f"{one} + {one}", "answer": str(2 * one)}
            for one in number
        ],
        "response": [str(2 * one) for one in number],
        "messages": [
            [{"role": "user", "content": f"{one} + {one}"}, {"role": "assistant", "content": str(2 * one)}]
            for one in number
        ],
    }
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    shown = io.BytesIO()
    Image.new("RGB", (48, 48), (200, 40, 40)).save(shown, "PNG")
    rows["prompt"] = [[{"role": "user", "content": f"<image>{one} + {one}"}] for one in number]
    rows["images"] = [[{"bytes": shown.getvalue()}] for _ in number]
    pq.write_table(pa.table(rows), folder / "images.parquet")
    (folder / "score.py").write_text(SCORE)
    (folder / "tools.yaml").write_text(TOOLS)
    return {name: str(folder / path) for name, path in PATHS.items()}


# Of verl's keys: how many devices there are, and which of them generate.
DEVICES = re.compile(r"\+*((trainer|rollout)\.(n_gpus_per_node|nnodes)|actor_rollout_ref\.hybrid_engine)=")
PATHS = {
    **{"model": "model", "rows": "rows.parquet", "score": "score.py"},
    **{"seeing": "seeing", "images": "images.parquet", "tools": "tools.yaml"},
}


HERE: Mapping[str, Any] = {
    **{"cluster.device": "cpu", "cluster.devices": 1, "cluster.backend": "local"},
    **{"trainer.total_steps": 1, "tracking.trackers": [], "tracking.plot": False},  # curves of one point
}


def replacements(loaded: LoadedConfig, here: Mapping[str, str], run: str) -> dict[str, Any]:
    """Returns what is said differently, in rondo's spelling."""
    config = loaded.config
    if loaded.command == "sft":
        return supervised(config, here, run)
    sees = "data.train.0.image_key" in loaded.origins
    model = here["seeing" if sees else "model"]
    source = {"type": "parquet", "path": here["images" if sees else "rows"], "prompt_key": "prompt"}
    updates = max(1, math.ceil(config.data.batch_size / config.actor.mini_batch_size))
    found: dict[str, Any] = {
        "model.path": model,
        **({"model.images": {"min_pixels": 256, "max_pixels": 4096}} if sees else {}),
        "data.train": [source],
        "data.eval": [{**source, "name": "held-out"}] if config.data.eval else [],
        "data.batch_size": PROMPTS,
        "data.max_prompt_tokens": PROMPT_TOKENS,
        "actor.mini_batch_size": max(1, PROMPTS // updates),
        "actor.token_budget": 1024,
        "rollout.n": min(config.rollout.n, SAMPLES),
        "rollout.max_tokens": ANSWER_TOKENS,
        "rollout.max_concurrent": 16,
        "rollout.engine": {"name": "native"},
        **HERE,
        "trainer.run_dir": run,
    }
    for key in loaded.origins:
        section, _, name = key.partition(".")
        if section in ("actor", "critic", "reference") and name.startswith("parallel."):
            found[key] = 1
        elif key in ("critic.path", "reference.path"):
            found[key] = model
    scorers: list[dict[str, Any]] = []
    for scorer in config.reward.functions:
        if scorer.name == "verl" or ":" in scorer.name:  # a rule, of which tiny answers have none right
            scorers.append({"name": f"{here['score']}:compute_score"})
            found["reward.accuracy"] = "compute_score/acc"
        elif scorer.name == "overlong":
            scorers.append({"name": "overlong", "weight": scorer.weight, "max_tokens": ANSWER_TOKENS})
            scorers[-1] |= {"buffer": ANSWER_TOKENS // 2, "bounded": False}
    found["reward.functions"] = scorers
    if tools := config.rollout.tools:
        found["model.tool_format"] = "hermes"  # the tiny model's template has none
        found["rollout.tools"] = [{"name": one.name, **one.options, "path": here["tools"]} for one in tools]
    return found


def supervised(config: Config, here: Mapping[str, str], run: str) -> dict[str, Any]:
    """Returns what is said differently of supervised training: rows of both forms are there."""
    one = config.data.train[0]
    rows: dict[str, Any] = {"type": "parquet", "path": here["rows"]}
    if config.data.turns == "eos":
        rows |= {"prompt_key": one.prompt_key, "response_key": one.response_key, "messages_key": "none"}
    else:
        rows["response_key"] = "none"
    return {
        "model.path": here["model"],
        "data.train": [{**rows, "name": "train", "weight": one.weight}],
        "data.eval": [{**rows, "name": "held-out"}] if config.data.eval else [],
        "data.batch_size": PROMPTS,
        "data.max_tokens": None,
        "data.max_prompt_tokens": 1024,
        "actor.token_budget": 1024,
        "actor.backend.kernels": "auto",
        "actor.parallel.context": 1,
        "actor.parallel.replicate": 1,
        **HERE,
        "trainer.run_dir": run,
    }


def starts(launch: Mapping[str, Any], here: Mapping[str, str], told: set[str]) -> str:
    """Trains a launch for a step; returns why that did not go, or nothing."""
    programs = [launch["module"]] if program(launch["module"]) is not None else []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            overrides = [one for one in launch["overrides"] if not DEVICES.match(one)]
            first = load(programs, overrides)
            instead = replacements(first, here, f"{folder}/run")
            for key, value in instead.items():
                if key not in told:
                    told.add(key)
                    print(f"replaced: {key} = {value}")
            run = sft if first.command == "sft" else train
            with contextlib.redirect_stdout(said):
                run(load(programs, overrides, settings=instead))
            lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
            norms = [line["actor/grad_norm"] for line in lines if "actor/grad_norm" in line]
            return "" if norms else "no update in its metrics"
        except RondoError as error:
            return str(error)
        except Exception:  # whatever it is, it is what this program is to find
            return traceback.format_exc()[-1500:]


def accepted(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the launches that the loader takes."""
    for launch in launches(path):
        if row(launch)[4] == "accepted":
            yield launch


# Places and names on the machines of a launch's authors; which files there are is replaced anyway.
PLACES = re.compile(
    r"\+*[\w.]*(_files|path|_dir|project_name|experiment_name|env_vars\S*|logger)=|.*(=/|://|/home|\$)"
)
INSTEAD = ("data.train_files=train.parquet", "data.val_files=val.parquet")
MODELS = ("actor_rollout_ref.model.path", "critic.model.path", "model.path", "model.partial_pretrain")


def kept(launch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the tests have of a launch: its program, and its keys but for places, with stand-ins for
    those that must be set.
    """
    own = [one for one in launch["overrides"] if not PLACES.match(one)]
    models = {one.partition("=")[0].lstrip("+") for one in launch["overrides"]} & set(MODELS)
    overrides = [*INSTEAD, *(f"{key}=model" for key in sorted(models)), *own]
    return {**launch, "overrides": overrides}


def by_difference(launches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields launches, first those with most keys, and values that are words, that none before them has."""
    has = [
        {word for one in launch["overrides"] for word in (one.partition("=")[0], re.sub(r"=.*\d.*", "", one))}
        for launch in launches
    ]
    seen: set[str] = set()
    rest = set(range(len(launches)))
    while rest:
        best = max(sorted(rest), key=lambda at: (len(has[at] - seen), -len(has[at])))
        rest.remove(best)
        seen |= has[best]
        yield launches[best]


def main() -> None:
    """Starts every launch that is accepted, and prints those that do not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", default="", help="scripts whose path has this in it")
    parser.add_argument("--most", type=int, default=10_000)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    chosen = [one for one in accepted(arguments.data) if arguments.only in one["script"]]
    replaced: set[str] = set()
    counts: Counter[bool] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        here = made(Path(folder))
        if arguments.write:
            fit = by_difference([one for one in map(kept, chosen) if row(one)[4] == "accepted"])
            few = islice((one for one in fit if not starts(one, here, replaced)), arguments.most)
            lines = ["\t".join([one["module"], *one["overrides"]]) + "\n" for one in few]
            arguments.write.write_text("".join(lines), encoding="utf-8")
            return
        for launch in chosen[: arguments.most]:
            why = starts(launch, here, replaced)
            counts[not why] += 1
            where = f"{launch['repo']} {launch['script']} {launch['launch']}"
            print(f"{'refused' if why else 'started'}  {where}" + (f"\n    {why}" if why else ""), flush=True)
    print(f"{counts[True]} of {counts.total()} started")


if __name__ == "__main__":
    main()
