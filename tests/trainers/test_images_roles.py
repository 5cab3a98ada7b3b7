"""Models beside a policy that sees, each by its command: reward models, pairs, critics and teachers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from rondo.config import load
from rondo.core.errors import DataError
from rondo.core.images import images_of_text
from rondo.models import ModelSource, load_model_config
from rondo.models.family import auto_class
from rondo.models.pixels import image_reader, write_settings
from rondo.models.value_head import FILE
from rondo.recipes import visual
from rondo.trainers.commands.supervised import preference, reward_model, sft
from rondo.trainers.commands.train import train
from tests.models.families import shown_to
from tests.trainers.conftest import RECIPE, SFT_RECIPE, metrics
from tests.trainers.test_images import MODEL, RL


def pairs(seed: int = 0) -> list[dict[str, Any]]:
    """Makes pairs with the same texts, and boards of a seed."""
    answers = {"chosen": "#### up", "rejected": "#### down"}
    drawn = visual.boards("tests", 8, seed)
    return [{"prompt": "<image>Which way?", "images": [one.picture], **answers} for one in drawn]


def demonstrated() -> list[dict[str, Any]]:
    """Makes rows whose answers are worked."""
    drawn = visual.boards("tests", 16, 0)
    return [{"prompt": "Which way?", "image": one.picture, "response": one.worked()} for one in drawn]


HERE = "tests.trainers.test_images_roles"
OF_PAIRS = {
    **SFT_RECIPE,
    "model": MODEL,
    "data": {
        "train": [{"type": "function", "task": f"{HERE}.pairs"}],
        "batch_size": 4,
        "max_prompt_tokens": 64,
    },
}
WORKED = {"type": "function", "task": f"{HERE}.demonstrated"}
SFT = {**SFT_RECIPE, "model": MODEL, "data": {**SFT_RECIPE["data"], "train": [WORKED]}}


def run(command: Any, recipe: dict[str, Any], folder: Path, *settings: str) -> Path:
    """Runs a command for two steps; returns the run's folder."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    given = [f"trainer.run_dir={folder / 'run'}", "trainer.total_steps=2", *settings]
    command(load([str(folder / "recipe.yaml")], given))
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("command", [preference, reward_model])
def test_what_is_learnt_from_pairs_depends_on_the_images(command: Any, tmp_path: Path) -> None:
    """Of the same texts: with other pictures the second step's loss is another one."""
    losses = []
    for number, seed in enumerate((0, 1)):
        options = f"data.train.0.options={{seed: {seed}}}"
        done = run(command, OF_PAIRS, tmp_path / str(number), options)
        losses.append([line["pair/loss"] for line in metrics(done)])
    assert losses[0][0] == losses[1][0] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(losses[0][1] - losses[1][1]) > 1e-5


@pytest.mark.slow
def test_critic_reward_model_and_teacher_see_the_rows_images(tmp_path: Path) -> None:
    """Scores, values and the teacher's likeliest tokens in a run's first step are those of transformers' own
    forward of the exported models.
    """
    judge = run(reward_model, OF_PAIRS, tmp_path / "judge") / "export"
    teacher = run(sft, SFT, tmp_path / "teacher") / "export"
    done = run(
        train, RL, tmp_path / "rl",
        "algorithm.advantage={name: gae, lam: 0.9}", "algorithm.policy_loss=forward_kl_topk",
        "algorithm.kl={name: k3, where: loss, coef: 0.1}",
        f"critic={{path: {judge}, token_budget: 512}}",
        f"reward.models=[{{path: {judge}, name: judge, token_budget: 512}}]",
        f"teacher={{path: {teacher}, top_k: 4, token_budget: 512}}",
    )  # fmt: skip
    line, _ = metrics(done)
    seen = pq.read_table(done / "rollouts" / "step-000001.parquet").to_pylist()
    head = load_file(judge / FILE)
    trunk, lm = (AutoModelForImageTextToText.from_pretrained(one) for one in (judge, teacher))
    reader = image_reader(ModelSource(path=str(judge)))
    assert reader is not None
    values, masses = [], []
    for one in seen:
        images = images_of_text(one["images"])
        ids = torch.tensor([one["prompt_ids"] + one["response_ids"]])
        shown = {"input_ids": ids, **shown_to(lm, ids, images, reader)}
        start = len(one["prompt_ids"]) - 1
        with torch.no_grad():
            hidden = trunk.model(**shown).last_hidden_state[0, start:]
            value = hidden @ head["weight"][0] + head["bias"]
            masses.append(lm(**shown).logits[0, start:-1].softmax(-1).topk(4).values.sum(-1))
        assert one["score/judge"] == pytest.approx(float(value[-1]), abs=1e-5)
        values.append(value[:-1])
    assert line["critic/value"] == pytest.approx(float(torch.cat(values).mean()), abs=1e-5)
    assert line["actor/teacher_mass"] == pytest.approx(float(torch.cat(masses).mean()), abs=1e-5)
    assert len({one["score/judge"] for one in seen}) == len(seen)


def test_a_judge_without_eyes_is_refused_before_the_run(tmp_path: Path) -> None:
    """By its key and the first row with images, as is one for which an image is other tokens."""
    text = RECIPE["model"]["config"]
    closer = {
        **MODEL["config"],
        "vision_config": {**MODEL["config"]["vision_config"], "spatial_merge_size": 1},
    }
    for made, message in (
        (text, "is a model that reads none"),
        (closer, "is other tokens (4"),
    ):
        folder, size = tmp_path / made["model_type"], {"vocab_size": len(visual.tokenizer())}
        given = made | size if made is text else {**made, "text_config": {**made["text_config"], **size}}
        config = load_model_config(ModelSource(config=given))
        auto_class(config).from_config(config).save_pretrained(folder)
        if made is closer:
            write_settings(ModelSource(config=given), config, folder)
        save_file({"weight": torch.zeros(1, 32), "bias": torch.zeros(1)}, folder / FILE)
        with pytest.raises(DataError, match="it has images, and") as caught:
            run(train, RL, tmp_path / message, f"reward.models=[{{path: {folder}, name: judge}}]")
        assert message in str(caught.value)
        assert "row 0" in str(caught.value)
        assert "reward.models.0.path" in str(caught.value)
        assert not (tmp_path / message / "run" / "metrics.jsonl").exists()
