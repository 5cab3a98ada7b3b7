"""How weights reach the engines, by hand: a row for each condition that decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rondo.config import Config, load
from rondo.core.errors import ConfigError
from rondo.planning import WeightPlan, adapters_of, carried, plan_weights
from tests.messages import full_text

ONE, TWO, OTHERS = (0,), (0, 1), (2, 3)
LORA = "actor.lora={send: adapters}"


def config_of(*settings: str) -> Config:
    common = ["model.path=x", "trainer.total_steps=1", "actor.compute_dtype=float32"]
    return load([], [*common, *settings]).config


def plan(actor: tuple[int, ...], rollout: tuple[int, ...], *settings: str, trains: bool = True) -> WeightPlan:
    return plan_weights(config_of(*settings), actor, rollout, trains=trains)


@pytest.mark.parametrize(
    ("actor", "rollout", "settings", "route"),
    [
        (ONE, ONE, (), "shared"),
        (ONE, ONE, ("rollout.replicas=1", "rollout.engine.process=host"), "shared"),
        (TWO, TWO, (), "gathered"),  # sharded: no rank has whole parameters
        (TWO, ONE, (), "gathered"),  # an engine on both devices
        (ONE, ONE, ("trainer.max_staleness=1",), "gathered"),  # engines go on during an update
        (ONE, ONE, ("rollout.replicas=2",), "gathered"),  # in processes of their own
        (ONE, ONE, ("rollout.engine.process=own",), "gathered"),
        (ONE, ONE, ("rollout.dtype=bfloat16",), "gathered"),
        (ONE, ONE, ("actor.offload_params=true",), "gathered"),  # not where it was
        (ONE, ONE, ("rollout.weight_transport=collective",), "gathered"),  # as asked for
        (ONE, ONE, ("actor.lora={}",), "gathered"),  # merged: other numbers than the trainer's
        (ONE, ONE, (LORA,), "gathered"),
        (TWO, OTHERS, (), "collective"),
        (ONE, OTHERS, (LORA,), "collective"),
        (ONE, ONE, ("rollout.weight_transport=disk",), "disk"),
        (TWO, OTHERS, ("rollout.weight_transport=disk",), "disk"),
        (TWO, (1, 2), ("rollout.weight_transport=disk",), "disk"),
    ],
)
def test_the_route(
    actor: tuple[int, ...], rollout: tuple[int, ...], settings: tuple[str, ...], route: str
) -> None:
    decided = plan(actor, rollout, *settings)
    assert decided.route == route
    assert decided.shares_storage == (route == "shared" or decided.shares_base)


def test_some_devices_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match=full_text("devices [0, 1] and the rollout engines")):
        plan(TWO, (1, 2))


@pytest.mark.parametrize(
    ("settings", "adapters", "shares_base"),
    [
        ((), "none", False),
        (("actor.lora={}",), "merged", False),
        ((LORA,), "alone", True),
        ((LORA, "trainer.max_staleness=1"), "alone", True),  # the base never changes
        ((LORA, "rollout.replicas=2"), "alone", False),
        ((LORA, "rollout.dtype=bfloat16"), "alone", False),
        ((LORA, "rollout.weight_transport=collective"), "alone", False),
        (("actor.lora={send: adapters, base_dtype: nf4}",), "alone", False),  # in 4 bits
    ],
)
def test_adapters_and_their_base(settings: tuple[str, ...], adapters: str, shares_base: bool) -> None:
    decided = plan(ONE, ONE, *settings)
    assert (adapters_of(config_of(*settings)), decided.shares_base) == (adapters, shares_base)
    assert not plan(TWO, TWO, *settings).shares_base


def test_weights_that_are_served_once_need_no_route_for_the_next() -> None:
    """Evaluation loads them once: neither staleness nor the transport says anything."""
    for setting in ("trainer.max_staleness=1", "rollout.weight_transport=collective"):
        assert plan(ONE, ONE, setting, trains=False) == plan(ONE, ONE)
        assert plan(ONE, ONE, LORA, setting, trains=False) == plan(ONE, ONE, LORA)
    assert plan(ONE, ONE, "rollout.replicas=2", trains=False).route == "gathered"


def test_it_is_written_behind_the_route() -> None:
    config = load([], ["model.path=x", "trainer.total_steps=1"]).config
    lora = load([], ["model.path=x", "trainer.total_steps=1", LORA]).config
    assert (carried(config), carried(lora)) == ("", ", adapters alone after the first time")
    assert lora.actor.lora is not None
    merged = replace(lora, actor=replace(lora.actor, lora=replace(lora.actor.lora, send="merged")))
    assert carried(merged) == ", adapters merged"
