"""How weights reach the engines, by hand: a row for each condition that decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rondo.config import Config, load
from rondo.core.errors import ConfigError
from rondo.planning import WeightPlan, adapters_of, carried, plan_hop, plan_weights
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
        (ONE, ONE, ("rollout.weight_transport=host",), "gathered"),
        (ONE, ONE, ("rollout.weight_transport=ipc", "rollout.replicas=2"), "gathered"),
        (TWO, OTHERS, ("rollout.weight_transport=ipc", "rollout.replicas=2"), "collective"),
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


@pytest.mark.parametrize(
    ("settings", "hop"),
    [
        (("rollout.replicas=2",), "auto"),
        (("rollout.engine.process=own",), "auto"),
        (("rollout.engine=vllm",), "auto"),
        (("rollout.replicas=2", "rollout.weight_transport=collective"), "auto"),
        (("rollout.replicas=2", "rollout.weight_transport=ipc"), "ipc"),
        (("rollout.replicas=2", "rollout.weight_transport=host"), "host"),
        (("rollout.replicas=2", "rollout.weight_transport=disk"), "host"),  # the bytes are there already
        (("rollout.replicas=2", LORA), "auto"),
        (("rollout.engine=vllm", LORA), "host"),  # A and B end in a file
        (("rollout.engine=vllm", "actor.lora={send: merged}"), "auto"),
        (("rollout.engine={name: vllm, tensor_parallel: 2}",), "host"),
        ((), "host"),  # there is no such step
    ],
)
def test_the_last_step(settings: tuple[str, ...], hop: str) -> None:
    config = config_of(*settings)
    assert plan_hop(config, ipc=True) == hop
    if hop != "ipc":
        assert plan_hop(config, ipc=False) == "host"


@pytest.mark.parametrize(
    ("settings", "ipc", "message"),
    [
        ((), True, "the engine is in the host's process"),
        (("rollout.replicas=2",), False, "no memory that another process can open"),
        (("rollout.engine={name: vllm, tensor_parallel: 2}",), True, "tensor_parallel=2: only the first"),
        (("rollout.engine=sglang", LORA), True, "sglang reads adapters from a file"),
    ],
)
def test_ipc_by_name_is_refused_where_it_cannot_be(
    settings: tuple[str, ...], ipc: bool, message: str
) -> None:
    config = config_of("rollout.weight_transport=ipc", *settings)
    with pytest.raises(ConfigError, match=message) as refused:
        plan_hop(config, ipc=ipc)
    assert refused.value.key == "rollout.weight_transport"
    assert str(refused.value).endswith("; set rollout.weight_transport=auto")
    assert plan_hop(config, ipc=ipc, trains=False) in ("auto", "host")  # loaded once


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
