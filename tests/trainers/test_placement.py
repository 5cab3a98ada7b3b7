"""Where the roles stand changes nothing of what is learned: one recipe colocated, mixed and split. Engines
that rest while the trainer computes, and errors for placements that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rondo.config import load
from rondo.core.errors import ConfigError
from rondo.rollout.native.engine import NativeEngine
from rondo.trainers.commands import train as runner
from rondo.trainers.commands.check import check_rl
from rondo.trainers.program.step import Roles
from tests.messages import full_text
from tests.trainers.conftest import inline, metrics, weights

PPO = (  # a critic and a reference, so that there is something to place
    "algorithm.advantage={name: gae, lam: 0.9}",
    "algorithm.kl={name: k3, where: loss, coef: 0.1}",
    "critic.token_budget=512",
    "reference.token_budget=512",
    "trainer.total_steps=2",
    "checkpoint.every=2",
)
MIXED = (
    "cluster.backend=process",
    "cluster.devices=2",
    "cluster.pools={policy: 1, judges: 1}",
    "cluster.placement={critic: judges, reference: judges}",
)
SPLIT = (
    "cluster.backend=process",
    "cluster.devices=2",
    "cluster.pools={train: 1, serve: 1}",
    "cluster.placement={rollout: serve}",
)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """Role → device numbers of the run that was started last."""
    found: dict[str, tuple[int, ...]] = {}
    original = runner.create_roles

    async def create(*args: Any, **kwargs: Any) -> Roles:
        roles = await original(*args, **kwargs)
        found.update({group.role: group.devices for group in roles.all()})
        return roles

    monkeypatch.setattr(runner, "create_roles", create)
    return found


@pytest.fixture
def colocated(run: Any, devices: dict[str, tuple[int, ...]]) -> Path:
    """All roles in this process."""
    folder: Path = run("colocated", *PPO)
    assert devices == dict.fromkeys(("actor", "critic", "reference", "rollout"), (0,))
    return folder


@pytest.mark.slow
def test_mixed_equals_colocated_bit_for_bit(
    run: Any, colocated: Path, devices: dict[str, tuple[int, ...]]
) -> None:
    mixed = run("mixed", *PPO, *MIXED)
    assert devices == {"actor": (0,), "critic": (1,), "reference": (1,), "rollout": (0,)}
    assert weights(mixed) == weights(colocated)
    assert [line["step"] for line in metrics(mixed)] == [0, 1, 2]
    assert learned(mixed) == learned(colocated)
    # what was saved with the critic on another host goes on with all roles in one process
    again = run("mixed", *PPO, "trainer.total_steps=3", "checkpoint.every=1")
    assert weights(again) == weights(run("colocated", *PPO, "trainer.total_steps=3", "checkpoint.every=1"))


@pytest.mark.slow
def test_split_equals_colocated_bit_for_bit(
    run: Any, colocated: Path, devices: dict[str, tuple[int, ...]]
) -> None:
    split = run("split", *PPO, *SPLIT)
    assert devices == {"actor": (0,), "critic": (0,), "reference": (0,), "rollout": (1,)}
    assert weights(split) == weights(colocated)
    assert learned(split) == learned(colocated)


def learned(folder: Path) -> list[dict[str, Any]]:
    """Metrics of training: without the bytes that a placement moves, and who was busy."""
    placed = ("weights/", "timing/", "perf/", "plan/", "rollout/")
    return [{k: v for k, v in line.items() if not k.startswith(placed)} for line in metrics(folder)]


@pytest.mark.parametrize("shared", [True, False])
def test_engines_that_rest_while_the_trainer_computes(
    run: Any, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The cache is really gone then, and nothing else changes. shared: one storage for both sides."""
    bytes_before_and_after: list[tuple[int, int]] = []
    original = NativeEngine.sleep

    async def sleep(engine: NativeEngine) -> None:
        before = (await engine.stats()).values()["rollout/cache_bytes"]
        await original(engine)
        after = (await engine.stats()).values()["rollout/cache_bytes"]
        bytes_before_and_after.append((int(before), int(after)))

    monkeypatch.setattr(NativeEngine, "sleep", sleep)
    settings = ["checkpoint.every=null", "trainer.total_steps=2", "trainer.evaluation.every=1"]
    settings += [] if shared else ["rollout.engine.process=host", "actor.offload_params=true"]
    awake = run(f"awake-{shared}", *settings)
    assert bytes_before_and_after == []
    asleep = run(f"asleep-{shared}", *settings, "rollout.sleep=true")
    assert len(bytes_before_and_after) == 2  # once in every step
    assert all(before > 0 and after == 0 for before, after in bytes_before_and_after)
    assert weights(asleep) == weights(awake)
    assert [line["eval/greedy/reward"] for line in metrics(asleep)] == [
        line["eval/greedy/reward"] for line in metrics(awake)
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("cluster.pools={a: 2}",), full_text("cluster.pools have 2 devices together")),
        (MIXED, full_text("cluster.placement.critic=judges")),
        (SPLIT[:3], full_text("cluster.pools.serve=1: no role")),
        (
            (*PPO, *MIXED, "reference.refresh_every=1"),
            full_text("judges and actor in policy: name one"),
        ),
        ((*SPLIT, "rollout.sleep=true"), full_text("rollout.sleep needs rollout and actor")),
    ],
)
def test_placements_that_cannot_work_are_refused_before_anything_starts(
    recipe: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rl(load([str(recipe)], overrides))


def test_check_says_which_role_is_where(recipe: Path) -> None:
    out = inline("check", str(recipe), *PPO, *MIXED).stdout
    assert out.split("Placement:\n")[1].splitlines() == [
        "  policy: device 0: actor, rollout",
        "  judges: device 1: critic, reference",
    ]
