"""The full-size recipes on Geometry3K, on tiny models of their families and made rows of the set's schema."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rondo.config import load
from rondo.core.images import images_of_text
from rondo.recipes import visual
from rondo.tracking.trajectories import read_trajectories
from tests.models.families import IMAGE_END, IMAGE_START, IMAGE_TOKEN, VIDEO_TOKEN, config_of
from tests.trainers.conftest import inline, metrics

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
FAMILIES = {"geo3k_qwen2_5_vl_7b": "qwen2_5_vl", "geo3k_qwen3_vl_8b": "qwen3_vl"}


def rows(path: Path, count: int) -> None:
    """Writes rows as hiyouga/geometry3k has them: images (structs of bytes and path), problem, answer."""
    made: list[dict[str, Any]] = []
    for number in range(count):
        file = io.BytesIO()
        Image.new("RGB", (60 + 4 * number, 44), (20 * number, 40, 60)).save(file, "PNG")
        images = [{"bytes": file.getvalue(), "path": None}]
        made.append({"images": images, "problem": f"<image>Find x in {number}.", "answer": str(number)})
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(made), path)


def model_of(family: str) -> dict[str, Any]:
    config = config_of(family, max_position_embeddings=2048)
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        config["text_config"].pop(key, None)
    own = {IMAGE_START: 3, IMAGE_END: 4, IMAGE_TOKEN: 5, VIDEO_TOKEN: 6}
    tokens = {key: own[value] for key, value in config.items() if isinstance(value, int) and value in own}
    tokenizer = f"tests.trainers.test_geo3k:{family}_tokenizer" if family in REWRITTEN else QWENS
    return {"path": None, "config": {**config, **tokens}, "tokenizer": tokenizer}


QWENS = "rondo.recipes.visual.tokenizer"
REWRITTEN = ("gemma3", "idefics3", "smolvlm")
# As SmolVLM's: a content that is a text is left out.
IN_PARTS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}{{ '<|image_pad|>' }}{% endif %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def gemma3_tokenizer() -> Any:
    """Returns that of the recipe, with a template that writes only the beginning of an image."""
    made = visual.tokenizer()
    made.chat_template = made.chat_template.replace("<|image_pad|><|vision_end|>", "")
    return made


def idefics3_tokenizer() -> Any:
    """Returns that of the recipe, with the token around tiles, whose names it writes in letters."""
    made = visual.tokenizer()
    made.add_tokens(["<fake_token_around_image>"], special_tokens=True)
    made.chat_template = IN_PARTS
    return made


def smolvlm_tokenizer() -> Any:
    """Returns the same with tokens for the names."""
    made = idefics3_tokenizer()
    names = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    made.add_tokens(["<global-img>", *names], special_tokens=True)
    return made


@pytest.mark.parametrize(
    "name", [one if "qwen3" in one else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_two_steps_of_a_tiny_model(name: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows(tmp_path / "set" / "train.parquet", 4)
    images = {"min_pixels": 256, "max_pixels": 4096}
    inline(
        "train", str(ROOT / "examples" / f"{name}.yaml"),
        f"model={json.dumps({**model_of(FAMILIES[name]), 'images': images})}",
        f"data.train.0.path={tmp_path / 'set'}", "data.eval=[]", "data.batch_size=4",
        "actor.mini_batch_size=2", "actor.compute_dtype=float32", "reference.compute_dtype=float32",
        "rollout.dtype=float32", "rollout.max_tokens=8", "rollout.sleep=false", "rollout.n=4",
        "reward.functions=[{name: 'tests/trainers/scorers.py:first_is_even'}]",
        "reward.accuracy=first_is_even", "actor.optimizer.lr=1e-3",
        "cluster={backend: local, devices: 1, threads: 1}",
        "tracking={console: 'off', plot: false, trackers: [tensorboard]}",
        "trainer={epochs: null, total_steps: 2, evaluation: {before: false, after: false, every: null}}",
        "checkpoint.every=null", f"trainer.run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    first, last = metrics(tmp_path / "run")
    assert (first["step"], last["step"]) == (1, 2)
    assert max(line["rollout/log_prob_gap_max"] for line in (first, last)) < 2e-5
    assert (
        0 < first["actor/kl_loss"] < last["actor/kl_loss"]
    )  # its second mini-batch begins to leave the start
    assert math.isfinite(last["actor/grad_norm"])
    assert last["actor/skipped_steps"] == 0
    shown = read_trajectories(tmp_path / "run", number=16)
    assert len(shown) == 16
    assert all("Find x in" in one.prompt and "boxed" in one.prompt for one in shown)
    assert len({one.images for one in shown}) == 4
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard")).Reload()
    assert sorted(events.Tags()["images"]) == ["samples/0/image 1", "samples/1/image 1"]
    table = pq.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist()
    token = visual.tokenizer().convert_tokens_to_ids("<|image_pad|>")
    for row in table:
        (image,) = images_of_text(row["images"])
        assert list(row["prompt_ids"]).count(token) == image.n_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_that_is_asked_for_is_the_one_that_pays(name: str) -> None:
    config = load([str(ROOT / "examples" / f"{name}.yaml")]).config
    form = re.compile(config.reward.functions[1].options["pattern"], re.DOTALL)
    assert form.fullmatch("<think>two sides</think> so \\boxed{3}")
    assert not form.fullmatch("two sides, so \\boxed{3}")
    assert not form.fullmatch("<think>two sides</think> so 3")
    assert "put in \\boxed{}." in (config.data.train[0].system_prompt or "")
    assert config.data.eval[0].system_prompt == config.data.train[0].system_prompt
