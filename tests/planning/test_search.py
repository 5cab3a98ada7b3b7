"""`rondo plan --auto`: equal to trying everything, and what it says."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from rondo.config import Config, load
from rondo.core.errors import ConfigError
from rondo.planning.devices import DeviceRow, find_device
from rondo.planning.plan import plan_memory
from rondo.planning.roles import ON_CARD, config_for, roles_of
from rondo.planning.runs import lengths_of, runs_of, shapes_of
from rondo.planning.search import ROOM, Space, differing, search, space_of, with_settings
from rondo.planning.step_time import plan_time
from tests.trainers.conftest import inline

TRAINED = ("actor", "critic")


def config(model: str, devices: int, *settings: str) -> Config:
    base = (
        f"model.path={model}",
        "trainer.total_steps=1",
        f"cluster={{backend: ray, devices: {devices}}}",
        "data.batch_size=64",
        "rollout={engine: vllm, max_tokens: 2048, n: 4}",
    )
    return config_for(load([], [*base, *settings]).config, ON_CARD)


def thinned(space: Space, seed: int) -> Space:
    """Some fifty of the trainer's combinations, from all over."""
    step = max(1, len(space.trainer) // 50)
    return replace(space, trainer=space.trainer[seed % step :: step])


def exhaustive(one: Config, card: DeviceRow, space: Space) -> dict[str, float]:
    """Placement → the seconds of the best there, of all combinations."""
    shape, lengths, roles = shapes_of(one), lengths_of(one, None), roles_of(one)
    found: dict[str, float] = {}
    for placement, trainer, engine in itertools.product(space.placements, space.trainer, space.engine):
        try:
            runs = runs_of(
                with_settings(one, {**placement, **trainer, **engine}), roles, TRAINED, shape, lengths
            )
        except ConfigError:
            continue
        if plan_memory(runs, card=card.memory).peak <= int(ROOM * card.memory):
            seconds, name = plan_time(runs, card).step, json.dumps(placement, sort_keys=True)
            found[name] = min(found.get(name, math.inf), seconds)
    return found


@pytest.mark.parametrize(
    ("model", "devices", "card", "settings"),
    [
        ("Qwen3-8B", 4, "h100", ()),
        pytest.param("Qwen3-4B", 16, "a100-40", ("trainer.max_staleness=1",), marks=pytest.mark.slow),
        pytest.param("Qwen3-30B-A3B", 16, "h100", (), marks=pytest.mark.slow),
        pytest.param("Qwen2.5-7B", 8, "h100", ("algorithm.advantage=gae",), marks=pytest.mark.slow),
    ],
)
def test_a_search_finds_what_trying_all_finds(
    model: str, devices: int, card: str, settings: tuple[str, ...]
) -> None:
    one, device = config(model, devices, *settings), find_device(card)
    shape, lengths, roles = shapes_of(one), lengths_of(one, None), roles_of(one)
    space = thinned(space_of(one, roles, shape("actor"), lengths.row), devices)
    found = search(one, roles, TRAINED, shape, lengths, device, space)
    names = {
        json.dumps(
            {key: choice.settings[key] for key in space.placements[0]}, sort_keys=True
        ): choice.time.step
        for choice in found.best
    }
    wanted = exhaustive(one, device, space)
    assert wanted
    assert names == pytest.approx(wanted)
    steps = [choice.time.step for choice in found.best]
    assert steps == sorted(steps)
    # What it says is what a plan of these keys says.
    best = found.best[0]
    runs = runs_of(with_settings(one, best.settings), roles, TRAINED, shape, lengths)
    assert plan_memory(runs, card=device.memory).peak == best.peak <= ROOM * device.memory
    assert plan_time(runs, device) == best.time


def test_nothing_fits_and_the_nearest_is_said() -> None:
    one, device = config("Qwen3-235B-A22B", 2), find_device("rtx4090")
    shape, lengths, roles = shapes_of(one), lengths_of(one, None), roles_of(one)
    space = thinned(space_of(one, roles, shape("actor"), lengths.row), 0)
    found = search(one, roles, TRAINED, shape, lengths, device, space)
    assert found.best == ()
    assert found.nearest is not None
    assert found.nearest.peak > device.memory


def test_axes_divide_heads_experts_and_ranks() -> None:
    one = config("Qwen3-30B-A3B", 8)
    shape = shapes_of(one)("actor")  # 32 heads, 4 of keys and values, 128 experts
    space = space_of(one, roles_of(one), shape, 100)
    axes = {
        tuple(settings[f"actor.parallel.{axis}"] for axis in ("tensor", "context"))
        for settings in space.trainer
    }
    assert max(tensor for tensor, _ in axes) == 4
    assert (4, 2) in axes
    assert (4, 4) not in axes  # 16 of 8 ranks
    assert {settings["rollout.engine.tensor_parallel"] for settings in space.engine} == {1, 2, 4, 8}


def test_what_the_recipe_says_already_is_no_advice() -> None:
    one = config("Qwen3-8B", 4)
    settings = {"actor.parallel.tensor": 1, "rollout.sleep": False, "actor.parallel.context": 2}
    assert differing(one, settings) == {"actor.parallel.context": 2}
    assert differing(with_settings(one, settings), settings) == {}


def test_the_command_writes_keys_that_plan_as_it_says() -> None:
    base = ("grpo", "trainer.warm_start=null", "model.path=Qwen/Qwen3-4B", "--devices", "4", "--card", "h100")
    told = json.loads(inline("plan", *base, "--auto", "--json", "--lengths", "256,512").stdout)
    best = told["best"][0]
    keys = [f"{key}={json.dumps(value)}" for key, value in best["settings"].items()]
    planned = json.loads(inline("plan", *base, "--json", "--lengths", "256,512", *keys).stdout)
    assert planned["time"]["step"] == pytest.approx(best["step"])
    failed = inline("plan", *base[:-2], "--auto", check=False)
    assert failed.returncode == 2
    assert "say for which card" in failed.stderr
