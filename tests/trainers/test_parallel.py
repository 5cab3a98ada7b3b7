"""Runs along several parallel axes end as one process does: the program, its engines, checkpoints and exports
do not know of them. Layouts that cannot work are refused before anything starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rondo.config import load
from rondo.core.errors import ConfigError
from rondo.trainers.commands.check import check_rl
from rondo.trainers.program import check_parallel, settled
from tests.trainers.conftest import inline, metrics, weights
from tests.trainers.test_placement import PPO
from tests.trainers.test_restarts import FOUR_STEPS, TWO, Kill, Killer, drafts, restarts_of

DENSE = ("model.config.num_attention_heads=4", "model.config.num_key_value_heads=2")
MIXTURE = (
    *DENSE,
    "model.config.model_type=qwen3_moe",
    "model.config.moe_intermediate_size=32",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
)
GRPO = ("trainer.total_steps=2", "checkpoint.every=2")
ADAPTED = (*GRPO, "algorithm.kl={name: k3, where: loss, coef: 0.1}", "actor.lora={rank: 4, send: adapters}")
QUIET = ("trainer.evaluation.every=null",)


def _weights(folder: Path) -> dict[str, np.ndarray]:
    return dict(safetensors.numpy.load_file(folder / "export" / "model.safetensors"))


@pytest.mark.parametrize(
    ("model", "algorithm", "devices", "axes"),
    [
        (DENSE, GRPO, 2, "{tensor: 2}"),
        pytest.param(DENSE, PPO, 4, "{tensor: 2}", marks=pytest.mark.slow),
        pytest.param(DENSE, PPO, 2, "{context: 2}", marks=pytest.mark.slow),
        pytest.param(DENSE, GRPO, 4, "{replicate: 2, context: 2}", marks=pytest.mark.slow),
        pytest.param(MIXTURE, GRPO, 4, "{tensor: 2, expert: 2}", marks=pytest.mark.slow),
        pytest.param(MIXTURE, PPO, 2, "{expert: 2}", marks=pytest.mark.slow),
        pytest.param(DENSE, ADAPTED, 2, "{tensor: 2}", marks=pytest.mark.slow),
        pytest.param(MIXTURE, ADAPTED, 4, "{tensor: 2, expert: 2}", marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_as_on_one_process(
    run: Any, model: tuple[str, ...], algorithm: tuple[str, ...], devices: int, axes: str
) -> None:
    alone = run("alone", *model, *algorithm, *QUIET)
    spread = ("cluster.backend=process", f"cluster.devices={devices}", f"actor.parallel={axes}")
    folder = run("spread", *model, *algorithm, *QUIET, *spread)
    expected, found = _weights(alone), _weights(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.linalg.norm(found[name] - tensor) <= 1e-4 * np.linalg.norm(tensor), name
    for a, b in zip(metrics(alone)[1:], metrics(folder)[1:], strict=True):
        for key in ("actor/loss", "actor/grad_norm", "reward/mean"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-6), key
    # what was saved along these axes goes on without them
    again = run("spread", *model, *algorithm, *QUIET, "trainer.total_steps=3")
    assert [line["step"] for line in metrics(again)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "message", "key"),
    [
        (
            ("actor.parallel={tensor: 2}",),
            "actor.parallel: replicate=1 · tensor=2 does not divide the 1 ranks",
            "actor.parallel",
        ),
        (
            ("cluster.backend=process", "cluster.devices=2", "actor.parallel.tensor=2"),
            "actor.parallel.tensor=2: the model's num_key_value_heads=1 cannot be divided by it",
            "actor.parallel.tensor",
        ),
        (
            ("cluster.backend=process", "cluster.devices=2", "actor.parallel.expert=2"),
            "actor.parallel.expert=2: the model has no experts",
            "actor.parallel.expert",
        ),
        (
            (*PPO, "cluster.backend=process", "cluster.devices=3", "critic.parallel={context: 2}"),
            "critic.parallel.context=2 does not divide the 3 ranks that shard",
            "critic.parallel.context",
        ),
        (
            (
                *PPO,
                "cluster.backend=process",
                "cluster.devices=3",
                "cluster.pools={policy: 2, judges: 1}",
                "cluster.placement={critic: judges, reference: judges}",
                "actor.parallel={context: 2}",
                *DENSE,
            ),
            "(of the critic, which has the actor's: set critic.parallel for its own)",
            "actor.parallel.context",
        ),
        (
            (
                *MIXTURE,
                "cluster.backend=process",
                "cluster.devices=2",
                "actor.parallel.expert=2",
                "actor.backend.mlp_chunk=512",
            ),
            "actor.backend.mlp_chunk: the actor's experts get tokens of other ranks",
            "actor.backend.mlp_chunk",
        ),
        (
            ("actor.parallel.tensors=2",),
            "unknown key 'actor.parallel.tensors'; did you mean 'actor.parallel.tensor'",
            "actor.parallel.tensors",
        ),
    ],
)
def test_layouts_that_cannot_work_are_refused_before_anything_starts(
    recipe: Path, overrides: tuple[str, ...], message: str, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rl(load([str(recipe)], overrides))
    assert message in str(caught.value)
    assert caught.value.key == key


def test_a_model_that_a_warm_start_has_yet_to_make_is_not_looked_at() -> None:
    config = settled(load(["quickstart"], ["cluster.device=cpu"]).config)
    assert (config.model.path, config.model.config) == (None, None)
    check_parallel("actor", config)


@pytest.mark.slow
def test_a_run_that_loses_a_rank_along_an_axis_equals_an_undisturbed_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an update, in a weight sync, where its peer waits for it in the middle of gathering, and in a
    save.
    """
    settings = (*DENSE, *FOUR_STEPS, *TWO, "actor.parallel={tensor: 2}")
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    inline("train", str(recipe), *settings, f"trainer.run_dir={undisturbed}")
    sync = Kill("load_weights", 3, role="rollout")
    killer = Killer(monkeypatch, Kill("update_actor", 2), Kill("write_snapshot", 2, drafts(run)), sync)
    done = inline("train", str(recipe), *settings, f"trainer.run_dir={run}", "tracking.console=plain")
    assert killer.left == []
    said = done.stdout + done.stderr
    assert re.search(r"rollout\[1\]\.load_weights failed: host process 1 died \(signal SIGKILL\)", said)
    assert "lost in rollout.load_weights in step 4; restart 3 of 3" in said
    assert restarts_of(run)[-1] == (4, 3)
    assert weights(run) == weights(undisturbed)
    assert metrics(run) == metrics(undisturbed)


@pytest.mark.slow
def test_a_run_that_loses_a_sender_along_an_axis_equals_an_undisturbed_one(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point to point, to an engine on a host of its own: in the first sync, and behind a checkpoint."""
    split = ("cluster.devices=3", "cluster.pools={train: 2, serve: 1}", "cluster.placement={rollout: serve}")
    settings = (*DENSE, *FOUR_STEPS, *TWO, *split, "actor.parallel={context: 2}")
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    inline("train", str(recipe), *settings, f"trainer.run_dir={undisturbed}")
    killer = Killer(monkeypatch, Kill("send_weights", 1), Kill("send_weights", 4))
    done = inline("train", str(recipe), *settings, f"trainer.run_dir={run}", "tracking.console=plain")
    assert killer.left == []
    said = done.stdout + done.stderr
    assert re.search(r"actor\[1\]\.send_weights failed: host process 1 died \(signal SIGKILL\)", said)
    assert restarts_of(run)[-1] == (4, 2)
    assert weights(run) == weights(undisturbed)
    placed = "weights/"  # a sync that was begun again counts what moved
    for one, other in zip(metrics(run), metrics(undisturbed), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(placed)} == {
            k: v for k, v in other.items() if not k.startswith(placed)
        }
