"""Models that the native engine cannot decode, trained on what the engine `transformers` samples."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondo.chat import encode_prompt
from rondo.rollout.transformers.engine import TransformersEngine
from tests.engines.conftest import greedy
from tests.models.families import config_of
from tests.trainers.conftest import RECIPE, Finished, hold_an_answer, inline, metrics, weights

TWO_STEPS = ("trainer.total_steps=2", "data.eval=[]", "trainer.evaluation.every=null")


def train(folder: Path, family: str, *overrides: str, check: bool = True) -> Finished:
    """A tiny GRPO run of the family's tiny model, with the task's vocabulary."""
    recipe: dict[str, Any] = copy.deepcopy(RECIPE)
    config = config_of(family, max_position_embeddings=256)
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):  # the tokenizer's
        config.pop(key)
    recipe["model"]["config"] = config
    path = folder.parent / f"{family}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    arguments = ("train", str(path), f"trainer.run_dir={folder}", "rollout.engine=transformers", *TWO_STEPS)
    return inline(*arguments, *overrides, check=check)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "lfm2"])
def test_the_sampler_is_the_trained_policy(family: str, tmp_path: Path) -> None:
    """In the trainer's own storage."""
    run = tmp_path / "run"
    train(run, family, "checkpoint.export=false")
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout/log_prob_gap"] <= 1e-5 for line in lines)
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert "rollout_correction/importance_mean" not in lines[0]  # nothing to correct


@pytest.mark.slow
def test_weights_that_are_sent_give_the_same_run(tmp_path: Path) -> None:
    """To an engine in a process of its own, checked by the canary, against one storage for both."""
    train(tmp_path / "shared", "qwen3_next")
    train(tmp_path / "sent", "qwen3_next", "rollout.engine.process=own")
    assert weights(tmp_path / "shared") == weights(tmp_path / "sent")


@pytest.mark.slow
def test_an_asynchronous_run_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on under new weights: what their caches held is computed anew, there and here."""
    asynchronous = ("trainer.max_staleness=2", "rollout.max_tokens=16", "rollout.max_concurrent=3")
    run, again = tmp_path / "run", tmp_path / "again"
    with monkeypatch.context() as patch:
        hold_an_answer(patch, TransformersEngine)
        train(run, "lfm2", *asynchronous)
    train(again, "lfm2", *asynchronous, "rollout.max_concurrent=5", f"trainer.replay={run}")
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    spans = [entry["spans"] for line in lines for entry in line.get("trajectories", ())]
    assert any(len(one) > 1 for one in spans)
    assert (run / "journal.jsonl").read_text() == (again / "journal.jsonl").read_text()
    assert weights(run) == weights(again)


def test_the_native_engine_names_it(tmp_path: Path) -> None:
    done = train(tmp_path / "run", "qwen3_next", "rollout.engine=native", check=False)
    assert done.returncode != 0
    assert "the native engine cannot decode qwen3_next models" in done.stderr
    assert "set rollout.engine=transformers" in done.stderr


@pytest.mark.slow
def test_generate_and_eval_take_it(tmp_path: Path) -> None:
    train(tmp_path / "run", "qwen3_next")
    model = str(tmp_path / "run" / "export")
    arguments = ("generate", model, "abc", "--max-tokens", "6", "--temperature", "0", "--json")
    assert "set rollout.engine=transformers" in inline(*arguments, check=False).stderr
    wrong = inline(*arguments, "--engine", "transformer", check=False).stderr
    assert "--engine transformer: there is no such engine; choose native, transformers, vllm" in wrong
    (line,) = inline(*arguments, "--engine", "transformers").stdout.splitlines()
    theirs = AutoModelForCausalLM.from_pretrained(model)
    ids = encode_prompt(AutoTokenizer.from_pretrained(model), "abc")
    assert json.loads(line)["token_ids"] == greedy(theirs, ids, 6).tolist()
    recipe = str(tmp_path / "qwen3_next.yaml")
    assert inline("eval", recipe, "--model", model, check=False).returncode != 0
    done = inline("eval", recipe, "--model", model, "rollout.engine=transformers")
    assert 0 <= json.loads(done.stdout)["eval/sampled/reward"] <= 1
