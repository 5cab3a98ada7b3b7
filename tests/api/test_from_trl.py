"""docs/from_trl.md: its scripts run, here and in TRL, to the same losses; its table is the one of the errors.

`python -m tests.api.test_from_trl` writes the table anew. TRL has an environment of its own: `.venv-trl`,
made where it is missing; RONDO_TRL_VENV names another one.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

import rondo
from benchmarks.vs_trl import trl_python
from rondo.recipes.quickstart import tokenizer
from tests import begun
from tests.config.test_elsewhere import ROWS
from tests.trainers.conftest import MODEL, PYTHONPATH

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "from_trl.md"
MARK = "<!-- made by `python -m tests.api.test_from_trl` of src/rondo/config/elsewhere.tsv -->\n"
# That TRL 1.16 has no more, and earlier versions have.
EARLIER = {"warmup_ratio", "max_prompt_length"}
# TRL's answers in each step, by prompt: those of the run here.
ROLLOUT = """
import json
from tasks import rows

answers = json.load(open("answers.json"))
numbers = {row["prompt"][0]["content"]: str(i) for i, row in enumerate(rows)}


def rollout(prompts, trainer):
    left = {number: list(given) for number, given in answers[str(trainer.state.global_step + 1)].items()}
    taken = [left[numbers[prompt[0]["content"]]].pop() for prompt in prompts]
    return {name: [one[name] for one in taken] for name in ("prompt_ids", "completion_ids", "logprobs")}
"""


def table() -> str:
    """TRL's rows of elsewhere.tsv, as the page has them."""
    lines = ["| TRL | rondo | |", "|---|---|---|"]
    for library, name, keys, note in ROWS:
        if library.startswith("TRL"):
            whose = f" ({library.removeprefix('TRL ')})" if " " in library else ""
            ours = ", ".join(f"`{key}`" for key in keys.split() if key != "-") or "–"
            lines.append(f"| `{name}`{whose} | {ours} | {note.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def test_the_table_is_that_of_the_errors() -> None:
    assert PAGE.read_text(encoding="utf-8").partition(MARK)[2] == table()


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A folder with the page's files, and a small model for them in the place of theirs.

    Its template writes nothing behind the end of a turn, which TRL would train, too.
    """
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    for name, text in blocks:
        saved = "trainer.save_state()\n" if name.endswith("_trl.py") else ""
        (tmp_path / name).write_text(text.replace("Qwen/Qwen3-0.6B", "model") + saved)
    words = tokenizer()
    assert isinstance(words.chat_template, str)
    words.chat_template = words.chat_template.replace("<|im_end|>\\n", "<|im_end|>")
    # Without an index of padding, whose row of the embeddings would learn nothing as an input of theirs.
    special = {"eos_token_id": words.eos_token_id, "pad_token_id": None, "bos_token_id": None}
    config = AutoConfig.for_model(
        **{**MODEL, "max_position_embeddings": 2048, "vocab_size": len(words)}, **special
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    return tmp_path


def change(script: Path, *pairs: tuple[str, str]) -> None:
    text = script.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script.write_text(text)


def run_here(folder: Path, kind: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    command = [f"{kind}_rondo.py"]
    done = begun.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return rondo.load(folder / "runs" / kind)


def run_there(folder: Path, kind: str) -> Mapping[str, list[float]]:
    """Runs TRL's side. Returns what it logged, a number for each step."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**without, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(trl()), f"{kind}_trl.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    state = json.loads((folder / "runs" / f"{kind}_trl" / "trainer_state.json").read_text())
    *steps, _ = state["log_history"]  # the last one is about the run
    return {name: [step[name] for step in steps] for name in steps[0]}


def trl() -> Path:
    """The interpreter of TRL's environment."""
    venv = Path(os.environ.get("RONDO_TRL_VENV", ROOT / ".venv-trl"))
    try:
        return trl_python(venv)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(venv)  # else it would be taken for one
        pytest.skip(f"TRL's environment cannot be made on this machine: {error}")


# ---- this side ----


def test_grpo_here(scripts: Path) -> None:
    """Four prompts of a step with eight answers each; rewards are those of the functions by hand."""
    run = run_here(scripts, "grpo")
    answers = {f"{a} red, {b} blue": str(a + b + 2) for a in range(2, 6) for b in range(2, 6)}
    assert run.summary["steps"] == 4
    for step in range(1, 5):
        rows = run.samples(step)
        assert len(rows) == 32
        assert rows["group_id"].value_counts().tolist() == [8] * 4
        for row in rows.to_dict("records"):
            (answer,) = (a for asked, a in answers.items() if f"{asked} and 2" in row["prompt_text"])
            even = float((np.array(row["response_ids"]) % 2 == 0).mean())
            right = float(row["text"].strip().endswith(f"#### {answer}"))
            assert row["score/even"] == pytest.approx(even, rel=1e-6)
            assert row["score/right"] == right
            assert row["reward"] == pytest.approx(even + 0.5 * right, rel=1e-6)
    assert (run.model / "model.safetensors").is_file()


def test_sft_here(scripts: Path) -> None:
    """The first loss is the mean over the assistant's tokens and the end of the turn; it falls from there."""
    losses = run_here(scripts, "sft").metrics["sft/loss"].tolist()
    words = tokenizer()
    model = AutoModelForCausalLM.from_pretrained(scripts / "model", dtype=torch.float32)
    summed, counted = 0.0, 0
    for a in range(2, 6):
        for b in range(2, 6):
            asked = f"{a} red, {b} blue and 2 green pens. How many?"
            prompt = words(f"<|im_start|>user\n{asked}<|im_end|><|im_start|>assistant\n")["input_ids"]
            answer = words(f"#### {a + b + 2}<|im_end|>")["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            summed += float(cross_entropy(logits, torch.tensor(answer), reduction="sum"))
            counted += len(answer)
    assert losses[0] == pytest.approx(summed / counted, rel=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 6


def test_dpo_here(scripts: Path) -> None:
    losses = run_here(scripts, "dpo").metrics["pair/loss"].tolist()
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)  # policy and reference are one model
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 6


# ---- both sides ----


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loss"), [("sft", "sft/loss"), ("dpo", "pair/loss")])
def test_both_have_the_same_losses(scripts: Path, kind: str, loss: str) -> None:
    ours, theirs = run_here(scripts, kind).metrics, run_there(scripts, kind)
    assert len(theirs["loss"]) == 6
    assert ours[loss].tolist() == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["actor/grad_norm"].tolist() == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert ours["actor/lr"].tolist() == pytest.approx(theirs["learning_rate"], rel=1e-9)


@pytest.mark.slow
def test_both_have_the_same_gradients_for_the_same_answers(scripts: Path) -> None:
    """All prompts are in each step, as the two draw them in another order."""
    change(scripts / "grpo_rondo.py", ('"data.batch_size": 4,', '"data.batch_size": 16,'))
    change(
        scripts / "grpo_trl.py",
        ("per_device_train_batch_size=16", "per_device_train_batch_size=64"),
        ("    args=config,\n", "    args=config,\n    rollout_func=rollout,\n"),
        ("from tasks import", "from rollouts import rollout\nfrom tasks import"),
    )
    (scripts / "rollouts.py").write_text(ROLLOUT)
    run = run_here(scripts, "grpo")
    answers: dict[int, dict[str, list[Any]]] = {}
    for step in range(1, 5):
        of_step = answers[step] = {}
        for row in run.samples(step).to_dict("records"):
            given = {
                "prompt_ids": "prompt_ids",
                "completion_ids": "response_ids",
                "logprobs": "rollout_log_probs",
            }
            number = row["prompt_id"].rpartition("/")[2]
            of_step.setdefault(number, []).append(
                {
                    name: list(map(float if name == "logprobs" else int, row[column]))
                    for name, column in given.items()
                }
            )
    (scripts / "answers.json").write_text(json.dumps(answers))
    theirs, ours = run_there(scripts, "grpo"), run.metrics
    assert ours["reward/mean"].tolist() == pytest.approx(theirs["reward"], rel=1e-5)
    assert ours["actor/grad_norm"].tolist() == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert ours["actor/loss"].tolist() == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_functions_are_given_the_same_arguments(scripts: Path) -> None:
    """TRL's script as it stands has as many answers as ours: 16 × 2 in a step, 8 to each of 4 prompts."""
    function = "def even(completion_ids, **kwargs):\n"
    spy = (
        "    with open('given.txt', 'a') as file:\n"
        "        kind = type(completion_ids[0][0]).__name__\n"
        "        print(len(completion_ids), kind, *sorted(kwargs), file=file)\n"
    )
    change(scripts / "tasks.py", (function, function + spy))
    logged = run_there(scripts, "grpo")
    assert len(logged["reward"]) == 4
    given = scripts / "given.txt"
    (there,) = set(given.read_text().splitlines())
    given.unlink()
    run_here(scripts, "grpo")
    (here,) = set(given.read_text().splitlines())
    assert there == "32 int answer completions log_extra log_metric prompts trainer_state"
    assert here == there.replace("32", "8")


@pytest.mark.slow
def test_the_names_are_trls(tmp_path: Path) -> None:
    code = (
        "import dataclasses, inspect, json, trl\n"
        "names = {}\n"
        "for kind in ('GRPO', 'SFT', 'DPO', 'Reward'):\n"
        "    config, trainer = getattr(trl, kind + 'Config'), getattr(trl, kind + 'Trainer')\n"
        "    names[kind] = {field.name: repr(field.default) for field in dataclasses.fields(config)}\n"
        "    names[kind] |= {name: '' for name in inspect.signature(trainer.__init__).parameters}\n"
        "names['Model'] = {field.name: '' for field in dataclasses.fields(trl.ModelConfig)}\n"
        "print(json.dumps(names))\n"
    )
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(trl()), "-c", code], cwd=tmp_path, env=without, capture_output=True, text=True)
    names = json.loads(done.stdout.strip().splitlines()[-1])
    everywhere = {name for of_kind in names.values() for name in of_kind}
    for library, name, *_ in ROWS:
        if library.startswith("TRL"):
            kind = library.removeprefix("TRL").strip()
            assert name in (names[kind] if kind else everywhere | EARLIER), (library, name)
    # Defaults that the page says TRL has.
    grpo = names["GRPO"]
    assert {name: grpo[name] for name in ("loss_type", "beta", "delta", "epsilon", "scale_rewards")} == {
        "loss_type": "'dapo'", "beta": "0.0", "delta": "None", "epsilon": "0.2", "scale_rewards": "'group'",
    }  # fmt: skip
    rates = {kind: names[kind]["learning_rate"] for kind in ("GRPO", "DPO", "SFT", "Reward")}
    assert rates == {"GRPO": "1e-06", "DPO": "1e-06", "SFT": "2e-05", "Reward": "0.0001"}
    common = ("weight_decay", "seed", "save_steps", "num_train_epochs", "per_device_train_batch_size")
    assert [grpo[name] for name in common] == ["0.0", "42", "500", "3.0", "8"]
    assert (grpo["use_bias_correction_kl"], grpo["num_generations"]) == ("True", "8")
    assert (grpo["lr_scheduler_type"].lower().count("linear"), names["SFT"]["max_length"]) == (1, "1024")


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(text + MARK + table(), encoding="utf-8")
