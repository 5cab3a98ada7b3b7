"""The commands as a user types them: what they write, and what bad input says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainers.conftest import RECIPE, inline

NO_EVALUATION = "trainer.evaluation={before: false, after: false, every: null}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def recipe_file(folder: Path) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return str(path)


@pytest.fixture(scope="module")
def trained(folder: Path, recipe_file: str) -> Path:
    """A finished run with a checkpoint."""
    inline(
        "train",
        recipe_file,
        "checkpoint.every=3",
        f"trainer.run_dir={folder / 'run'}",
        "tracking.console=plain",
    )
    return folder / "run"


def test_export_of_the_last_checkpoint_is_the_exported_model(trained: Path, folder: Path) -> None:
    inline("export", str(trained), str(folder / "exported"))
    ours = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(trained / "export").state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert inline("export", str(trained), str(folder / "exported"), check=False).returncode == 2


def test_generate_greedy_equals_transformers(trained: Path) -> None:
    prompt = "Sam took 3 nuts, won 7, lent 8. How many?"
    done = inline(
        "generate", str(trained / "export"), prompt, "--temperature", "0", "--max-tokens", "6", "--json"
    )
    ours = json.loads(done.stdout)["token_ids"]
    tokenizer = AutoTokenizer.from_pretrained(trained / "export")
    model = AutoModelForCausalLM.from_pretrained(trained / "export")
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert ours == theirs[: len(ours)]


def test_eval_of_the_export_is_the_evaluation_after_training(
    trained: Path, recipe_file: str, folder: Path
) -> None:
    answers = folder / "answers.jsonl"
    done = inline("eval", recipe_file, "--model", str(trained / "export"), "--output", str(answers))
    metrics = json.loads(done.stdout)
    after = json.loads((trained / "summary.json").read_text())["eval_after"]
    assert metrics["eval/greedy/reward"] == pytest.approx(after["greedy/reward"])
    assert metrics["eval/sampled/reward"] == pytest.approx(after["sampled/reward"])
    assert len(answers.read_text().splitlines()) == 4


def test_sft_learns_its_demonstrations_and_resumes_nothing_twice(folder: Path) -> None:
    task = {"type": "function", "task": "rondo.data.quickstart.demonstrations", "options": {"size": 256}}
    recipe = {key: RECIPE[key] for key in ("model", "tracking")}
    recipe["data"] = {"train": [task], "batch_size": 16, "max_prompt_tokens": 64}
    recipe["actor"] = {"token_budget": 512, "optimizer": {"lr": 1.0e-2}}
    recipe["trainer"] = {"total_steps": 12}
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(recipe))
    inline("sft", str(path), f"trainer.run_dir={folder / 'sft'}")
    lines = [json.loads(line) for line in (folder / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["sft/loss"] < 0.7 * lines[0]["sft/loss"]
    resolved = str(
        folder / "sft" / "config.yaml"
    )  # every key is written there; those at their default are no error
    inline("sft", resolved, f"trainer.run_dir={folder / 'again'}", "trainer.total_steps=1")
    done = inline("sft", str(path), "rollout.n=4", check=False)
    assert done.returncode == 2
    assert "rollout.n has no meaning for supervised fine-tuning" in done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollot.n=4", "did you mean"),
        ("rollout.n=four", "rollout.n"),
        ("actor.mini_batch_size=3", "mini_batch_size"),
        ("trainer.on_update=resume", "on_update"),
        ("rollout.engine=vllm", "vllm"),
        ("algorithm.advantage=grpp", "grpo"),
        ("algorithm.policy_loss.clip_lo=0.1", "clip_low"),
        ("reward.functions=[gsm9k]", "gsm8k"),
        ("model={path: nowhere/at/all}", "nowhere/at/all"),
        ("data.train=[{type: jsonl, path: missing.jsonl}]", "missing.jsonl"),
        ("tracking.trackers=[tensorbord]", "tensorboard"),
    ],
)
def test_bad_settings_are_named_with_the_remedy(
    recipe_file: str, tmp_path: Path, override: str, said: str
) -> None:
    done = inline("train", recipe_file, override, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_line_of_a_prompt_file_is_named(recipe_file: str, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{i} + 1 ="}) for i in range(20)]
    rows[16] = rows[16][:-3]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    source = f"data.train=[{{type: jsonl, path: {tmp_path / 'rows.jsonl'}}}]"
    done = inline("train", recipe_file, source, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert "rows.jsonl, line 17" in done.stderr
    source = source.replace("}]", ", prompt_key: question}]")
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:16]))
    done = inline("train", recipe_file, source, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert "question" in done.stderr
    assert "prompt" in done.stderr


def test_a_model_folder_without_a_tokenizer_says_so(recipe_file: str, trained: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained / "export", model)
    for file in model.glob("tokenizer*"):
        file.unlink()
    overrides = (f"model={{path: {model}}}", "model.config=null", "model.tokenizer=null")
    done = inline("train", recipe_file, *overrides, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert "model.tokenizer" in done.stderr


def test_a_scorer_error_is_one_clear_block(recipe_file: str, tmp_path: Path) -> None:
    scorer = "reward.functions=[tests/trainers/scorers.py:raises]"
    done = inline(
        "train", recipe_file, scorer, NO_EVALUATION, f"trainer.run_dir={tmp_path / 'run'}", check=False
    )
    assert done.returncode == 2
    assert "no answer column" in done.stderr
    assert "reward.on_error" in done.stderr
