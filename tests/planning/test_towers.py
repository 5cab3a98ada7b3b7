"""What reads images in a plan: which parts learn, patches of a pass, and what the plan says of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest

from activations import SEEING, Seen
from rondo.config import load
from rondo.config.schema import LoraConfig, ModelPart
from rondo.models import ModelSource
from rondo.planning.memory import GIB, adapter_share, in_host, learning, on_device
from rondo.planning.model_run import ModelRun, Spread
from rondo.planning.plan import plan_memory
from rondo.planning.roles import ON_CARD, config_for
from rondo.planning.runs import Runs, lengths_of, runs_of, shapes_of
from rondo.planning.shapes import shape_of
from rondo.planning.telling import keys_of
from rondo.planning.time import image_flops
from tests.training.helpers import one_rank_mesh, tiny_engine

PARTS = get_args(ModelPart)


def _learnt(model_type: str, **engine: Any) -> int:
    """Counts the parameters that learn in a real engine."""
    model = ModelSource(config=Seen(model_type).fields)
    made = tiny_engine(one_rank_mesh(), model, config=engine)
    return sum(one.numel() for one in made.backend.model.parameters() if one.requires_grad)


@pytest.mark.parametrize("model_type", SEEING)
@pytest.mark.parametrize("frozen", [(), ("tower",), ("projector",), ("language",), ("tower", "language")])
def test_parts_that_do_not_learn_have_no_gradients(model_type: str, frozen: tuple[str, ...]) -> None:
    shape = shape_of(Seen(model_type).fields, model_type)
    parts = tuple(part for part in PARTS if part not in frozen)
    run = ModelRun(shape, trains=True, parts=parts)
    learns = _learnt(model_type, freeze=frozen)
    assert learning(run) == (learns, 4)
    assert on_device(run, "update", 1)["moments"] == (8 * learns, 8 * learns)
    two = ModelRun(shape, Spread(2), trains=True, parts=parts)
    assert learning(two)[0] == pytest.approx(learns / 2, abs=2)


@pytest.mark.parametrize("model_type", SEEING)
@pytest.mark.parametrize("parts", [("language",), ("tower",), ("projector",), PARTS])
def test_adapters_are_where_their_parts_are(model_type: str, parts: Any) -> None:
    shape = shape_of(Seen(model_type).fields, model_type)
    run = ModelRun(shape, trains=True, lora=2, parts=parts)
    assert adapter_share(run) == _learnt(model_type, lora=LoraConfig(rank=2, parts=parts))


def test_adapters_at_modules_that_somebody_named_are_not_certain() -> None:
    """A run with few of them is not refused for all."""
    model = {"model_type": "qwen3", **SEEING["qwen3_vl"]["text_config"], "tie_word_embeddings": True}
    lora = "actor.lora={rank: 4, targets: [q_proj]}"
    least = {}
    for name, settings in (("all", "actor.lora={rank: 4}"), ("named", lora)):
        run = _runs(model, settings).models["actor"]
        update = on_device(run, "update", 1)
        assert update["moments"].expected == 2 * 4 * adapter_share(run)
        least[name] = update["moments"].least, update["gradients"].least
        alone = on_device(replace(run, lora=0), "update", 1)["weights"].least
        adapters = 4 * adapter_share(run) if name == "all" else 0
        assert update["weights"].least == alone + adapters
    assert least == {"all": (2 * 4 * adapter_share(run), 4 * adapter_share(run)), "named": (0, 0)}


def _runs(model: dict[str, Any], *settings: str) -> Runs:
    base = [
        f"model.config={json.dumps(model)}",
        "model.tokenizer=rondo.recipes.visual.tokenizer",
        "trainer.total_steps=1",
        "actor.token_budget=1000",
        "data.batch_size=3",
        "rollout.n=4",
    ]
    config = config_for(load([], [*base, *settings]).config, ON_CARD)
    roles, lengths = ("actor", "rollout"), lengths_of(config, "80,20")
    return runs_of(config, roles, ("actor",), shapes_of(config), lengths)


def test_patches_of_a_pass_are_those_of_its_prompts() -> None:
    """Ten rows of 100 tokens may be of three prompts, each of which may be images alone: 80 tokens of four
    patches."""
    model = Seen("qwen3_vl").fields
    runs = _runs(model)
    assert runs.tokens["actor"] == 1000
    assert runs.models["actor"].patches == 3 * 80 * 4 / 1000
    assert "of a prompt 80 tokens are images', the most that there can be" in runs.lengths.said
    # A token is 16 x 16 pixels here: two images of ten.
    some = _runs(model, "model.images={max_pixels: 2600, per_prompt: 2}")
    assert some.models["actor"].patches == 3 * 20 * 4 / 1000
    assert (
        "20 tokens are images', as many as model.images.max_pixels and per_prompt allow" in some.lengths.said
    )
    # Of one prompt at a time.
    alone = _runs(model, "model.images={max_pixels: 2600, per_prompt: 2}", "actor.mini_batch_size=1")
    assert alone.models["actor"].patches == 20 * 4 / alone.tokens["actor"]
    text = {"model_type": "qwen3", **model["text_config"], "tie_word_embeddings": True}
    assert _runs(text).models["actor"].patches == 0
    assert "images" not in _runs(text).lengths.said


def test_a_plan_names_images_and_what_makes_them_smaller() -> None:
    runs = _runs(Seen("qwen3_vl").fields)
    (pool,) = plan_memory(runs, card=80 * GIB).pools
    run, tokens = runs.models["actor"], runs.tokens["actor"]
    images = on_device(run, "update", tokens)["images"]
    assert pool.phases["update"]["actor images"] == images
    assert images.least == 0 < images.expected
    away = replace(run, recompute="offload")
    inputs = tokens * (2 * 64 + run.patches * 6 * 128) * run.compute
    assert in_host(away, tokens)["block inputs"].expected == pytest.approx(inputs, abs=1)
    assert keys_of("actor images", runs.config) == ("model.images.max_pixels", "model.images.per_prompt")
    # Products of patches, by hand: each once forward, twice back, and once again.
    tower = run.shape.tower
    assert tower is not None
    patch = 6 * tower.block + 384 * 128 + tower.mergers / 4
    assert image_flops(run, learns=True, again=1) == pytest.approx(2 * patch * run.patches * 4)
    assert image_flops(run, learns=False, again=0) == pytest.approx(2 * patch * run.patches)
