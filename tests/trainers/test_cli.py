"""The commands as a user types them: what they write, and what bad input says."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from rondo.algorithms import registry
from rondo.config import load
from rondo.core.errors import ConfigError
from rondo.recipes.quickstart import tokenizer
from rondo.trainers.commands.check import check_rl
from rondo.trainers.commands.evaluate import generate
from tests.trainers.conftest import MODEL, RECIPE, SFT_RECIPE, inline

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


def test_generate_names_what_is_not_there_and_what_is_too_long(trained: Path) -> None:
    done = inline("generate", "nowhere", "a", check=False)
    assert done.returncode == 2
    assert "model.path: there is no folder nowhere in" in done.stderr
    done = inline("generate", str(trained / "export"), "How many?", "--max-tokens", "250", check=False)
    assert done.returncode == 2
    said = r"a prompt of (\d+) tokens \+ max_tokens=250 is (\d+) tokens, .* positions for 256 tokens only"
    found = re.search(said, done.stderr)
    assert found is not None, done.stderr
    assert int(found[1]) + 250 == int(found[2])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"n": 0}, "rollout.n"),
        ({"n": 10**9}, "rollout.n"),
        ({"max_tokens": -1}, "rollout.max_tokens"),
        ({"temperature": float("nan")}, "rollout.temperature"),
        ({"temperature": -1.0}, "rollout.temperature"),
        ({"top_p": 1.5}, "rollout.top_p"),
        ({"seed": 2**70}, "trainer.seed"),
    ],
)
def test_generate_refuses_numbers_that_cannot_be(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate("nowhere", ["a"], **options)
    assert caught.value.key == key


def test_eval_of_a_recipe_whose_model_is_not_trained_yet_asks_for_one() -> None:
    done = inline("eval", "quickstart", check=False)
    assert done.returncode == 2
    assert "folder that the run exports (--model" in " ".join(done.stderr.split())


def test_a_run_folder_that_cannot_be_is_found_before_anything_starts(recipe_file: str, folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("loop", "tiny.yaml/run"):
        with pytest.raises(ConfigError, match=r"cannot be a folder: (Too many|Not a)") as caught:
            check_rl(load([recipe_file], [f"trainer.run_dir={folder / name}"]))
        assert caught.value.key == "trainer.run_dir"


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
    task = {"type": "function", "task": "rondo.recipes.quickstart.demonstrations", "options": {"size": 256}}
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
    short = ("model.config.max_position_embeddings=40", "data.overlong_prompts=error")
    done = inline("sft", str(path), *short, check=False)
    assert done.returncode == 2
    assert "data.max_prompt_tokens=64 and the 40 that" in done.stderr
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
        (
            "algorithm.policy_loss.clip=-1",
            "algorithm.policy_loss: the clip range or threshold needs low >= 0, got -1",
        ),
        ("algorithm.kl={name: k9, where: loss, coef: 0.1}", "algorithm.kl: unknown name 'k9'"),
        ("algorithm.aggregation=tokenmean", "did you mean 'token-mean'"),
        ("algorithm.value_loss=clipped", "algorithm.value_loss: unknown name"),
        ("algorithm.filter=mixed", "algorithm.filter: unknown name 'mixed'"),
        ("algorithm.resample=pf", "algorithm.resample: unknown name 'pf'"),
        ("rollout.agent=no.py:agent", "rollout.agent: 'no.py:agent': there is no file"),
        ("reward.functions=[gsm9k]", "reward.functions.0: unknown name 'gsm9k'; did you mean 'gsm8k'"),
        ("model={path: nowhere/at/all}", "nowhere/at/all"),
        (
            "model={path: nowhere/at/all, config: null}",
            "model.path: there is no folder nowhere/at/all in",
        ),
        (
            "model={path: nowhere, config: null}",
            "check the spelling and the network, or set model.hub=local",
        ),
        ("model={path: nowhere, hub: local, config: null}", "model.path: there is no folder nowhere in"),
        (
            "rollout.max_tokens=193",
            "data.max_prompt_tokens=64 + rollout.max_tokens=193 is 257 tokens, but model.config's model has "
            "positions for 256 tokens only (max_position_embeddings); lower one of the two",
        ),
        ("model.config.hidden_sise=3", "a qwen3 config has no key 'hidden_sise'; did you mean 'hidden_size'"),
        ("model.tokenizer=rondo.recipes.quickstart.tokeniser", "model.tokenizer: "),
        (
            "data.train=[{type: jsonl, path: missing.jsonl}]",
            "data.train.0: source 'missing': file missing.jsonl",
        ),
        ("data.eval=[{type: function, task: rondo.recipes.quickstart.rows}]", "data.eval.0: "),
        ("tracking.trackers=[tensorbord]", "tensorboard"),
        ("reward.models=[{path: no/model}]", "reward.models.0.path: there is no folder no/model in"),
        ("reward.models=[{path: src}]", "reward.models.0.path: model folder src has no config.json"),
    ],
)
def test_bad_settings_are_named_with_the_remedy(
    recipe_file: str, tmp_path: Path, override: str, said: str
) -> None:
    done = inline("train", recipe_file, override, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert f"\n  argument '{override}': " in done.stderr or said == "nowhere/at/all"  # two places are named
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward.functions=[{name: gsm8k, sources: [nope]}]", "there is no source 'nope'"),
        ("trainer.profile={steps: [3], memory: true}", "trainer.profile.memory=true needs a GPU"),
    ],
)
def test_check_tells_what_train_would_refuse(recipe_file: str, override: str, said: str) -> None:
    done = inline("check", recipe_file, override, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert f"argument '{override}'" in done.stderr


def test_check_tells_that_calls_cannot_be_told_from_text(recipe_file: str, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    settings = ["rollout.tools=[calculator]", f"model.chat_template={template}"]
    done = inline("check", recipe_file, *settings, check=False)
    assert done.returncode == 2, done.stderr
    assert "set model.tool_format to one of" in done.stderr
    assert inline("check", recipe_file, *settings, "model.tool_format=hermes").returncode == 0


def test_a_wrong_name_in_a_recipe_is_at_its_line(recipe_file: str, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("algorithm:\n  advantage:\n    name: grpp\n")
    done = inline("check", recipe_file, str(more), check=False)
    assert done.stderr.startswith(
        f"rondo check: ConfigError\n  {more}:3: algorithm.advantage: unknown name 'grpp'"
    )
    more.write_text(
        "algorithm:\n  kl: {name: k3, where: loss, coef: 0.1}\nreference:\n  path: ./no/such/folder\n"
    )
    done = inline("train", recipe_file, str(more), f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert f"{more}:4: reference.path: there is no folder ./no/such/folder" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_name_of_this_process_does_not_reach_workers_of_other_processes(recipe_file: str) -> None:
    @registry.policy_loss("mine")
    def mine(log_probs: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return -log_probs * advantages, {}

    try:
        done = inline(
            "check",
            recipe_file,
            "algorithm.policy_loss=mine",
            "cluster.backend=process",
            check=False,
        )
        here = inline("check", recipe_file, "algorithm.policy_loss=mine")
    finally:
        del registry._FUNCTIONS["policy_loss"]["mine"]
    assert "argument 'algorithm.policy_loss=mine': algorithm.policy_loss: the name 'mine'" in done.stderr
    assert f"name the function with its file, {__file__}:test_a_name" in done.stderr
    assert "actor.update_actor reads" in here.stdout


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


BROKEN_ROW = "data.train=[{{type: jsonl, path: {folder}/rows.jsonl}}]"
EARLY = {
    "a row": ("train", (BROKEN_ROW,)),
    "a row of SFT": ("sft", (BROKEN_ROW,)),
    "weights": ("train", ("model={{path: {folder}/model}}", "model.config=null", "model.tokenizer=null")),
    "a stop": ("train", ("rollout.stop=['<|im_end|> and more']",)),
    "a device": ("train", ("cluster.device=cuda",)),
}


@pytest.mark.parametrize("what", EARLY)
def test_an_error_before_the_first_step_leaves_things_as_they_were(
    recipe_file: str, trained: Path, tmp_path: Path, what: str
) -> None:
    """Also an earlier run that has no checkpoint, and would have moved."""
    command, settings = EARLY[what]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 ="\n')
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT_RECIPE))
    recipe = str(tmp_path / "sft.yaml") if command == "sft" else recipe_file
    shutil.copytree(trained / "export", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"<html>")
    earlier = tmp_path / "earlier"
    for name in ("config.yaml", "metrics.jsonl", "rollouts/step-000001.parquet", "run.lock"):
        (earlier / name).parent.mkdir(parents=True, exist_ok=True)
        (earlier / name).write_text("")
    before = sorted(tmp_path.rglob("*"))
    for run in ("earlier", "new/run"):
        overrides = [setting.format(folder=tmp_path) for setting in settings]
        done = inline(command, recipe, *overrides, f"trainer.run_dir={tmp_path / run}", check=False)
        assert done.returncode == 2
        assert sorted(tmp_path.rglob("*")) == before


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
    assert "goes on from" not in done.stderr  # there is nothing to go on from
    shown = ("tracking.console=plain", "trainer.total_steps=1", f"trainer.run_dir={tmp_path / 'run'}")
    again = inline("train", recipe_file, *shown)
    moved = tmp_path / "run" / "discarded" / "1"
    assert f"no checkpoint to go on from: it is now in {moved}" in " ".join(again.stdout.split())
    assert (moved / "config.yaml").exists()
    assert "no answer column" in done.stderr
    assert "reward.on_error" in done.stderr


def test_an_error_in_a_run_with_a_checkpoint_says_how_it_goes_on(recipe_file: str, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "left = [16 + 4]\n\n\ndef fails(prompt, trajectory):\n"
        "    left[0] -= 1\n    assert left[0] >= 0\n    return float(left[0])\n"
    )
    run = tmp_path / "run"
    settings = [
        f"reward.functions=[{scorer}:fails]",
        "checkpoint.every=1",
        f"trainer.run_dir={run}",
        NO_EVALUATION,
    ]
    done = inline("train", recipe_file, *settings, check=False)
    assert done.returncode == 2
    saved = run / "checkpoints" / "step-00000001"
    way_on = f"  all up to step 1 is saved ({saved}): the same command goes on from there"
    assert way_on in done.stderr.splitlines()
    scorer.write_text("def fails(prompt, trajectory):\n    return 1.0\n")
    inline("train", recipe_file, *settings)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
    ]


CHECKS = """
def echo(words: str) -> str:
    'Says it again.'
    return words
def check():
    return {}["no such key"]
echo.check = check
"""


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("checkpoint.path={folder}/tiny.yaml", "tiny.yaml: cannot be made"),
        ("checkpoint.path=/proc/nowhere", "/proc/nowhere: cannot be made"),
        ("model.chat_template={folder}/empty.jinja", "empty.jinja is empty"),
        ("cluster={{backend: process, devices: 2, device: cuda}}", "has 0 GPUs"),
        ("cluster={{device: cpu, backend: {{name: ray, address: '127.0.0.1:1'}}}}", "127.0.0.1:1"),
        ("model={{path: {folder}/model, config: null}}", "not finite"),
        ("model={{path: {folder}/t5, config: null}}", "t5 is an encoder-decoder model"),
        ("rollout.tools=[{{name: '{folder}/own.py:echo'}}]", "KeyError: 'no such key' (own.py, line 6)"),
    ],
)
def test_an_error_before_the_first_step_leaves_no_folder(recipe: Path, setting: str, said: str) -> None:
    folder = recipe.parent
    (folder / "empty.jinja").write_text(" \n")
    (folder / "own.py").write_text(CHECKS)
    if "t5" in setting:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes)).save_pretrained(folder / "t5")
        tokenizer().save_pretrained(folder / "t5")
    if "/model" in setting:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL, vocab_size=len(tokenizer())))
        torch.nn.init.constant_(model.model.norm.weight, math.nan)
        model.save_pretrained(folder / "model")
    given = (setting.format(folder=folder), f"trainer.run_dir={folder}/runs/one")
    done = inline("train", str(recipe), *given, check=False)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not (folder / "runs").exists()
