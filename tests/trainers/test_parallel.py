"""Runs along several parallel axes end as one process does: the program, its engines, checkpoints and exports
do not know of them. Layouts that cannot work are refused before anything starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rondo.config import load
from rondo.errors import ConfigError
from rondo.trainers.commands.check import check_rl
from tests.trainers.conftest import metrics
from tests.trainers.test_placement import PPO

DENSE = ("model.config.num_attention_heads=4", "model.config.num_key_value_heads=2")
MIXTURE = (
    *DENSE,
    "model.config.model_type=qwen3_moe",
    "model.config.moe_intermediate_size=32",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
)
GRPO = ("trainer.total_steps=2", "checkpoint.every=2")
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
