"""Runs of mixtures of experts: balanced, and with routes that are replayed; what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from rondo.config import load
from rondo.core.batch import Batch
from rondo.core.columns import ROUTED, ROUTES
from rondo.core.errors import ConfigError
from rondo.trainers.commands.check import check_rl
from rondo.trainers.commands.check_supervised import check_supervised
from rondo.trainers.program import plan_program
from rondo.trainers.supervised import SFT
from rondo.workers import ActorWorker
from tests.trainers.conftest import MODEL, RECIPE, SFT_RECIPE, inline, metrics, weights
from tests.trainers.test_journal import ASYNCHRONOUS, assert_equal, record
from tests.trainers.test_parallel import MIXTURE, _weights

Run = Callable[..., Path]
QUIET = ("trainer.evaluation.every=null",)
ONE_STEP = ("actor.mini_batch_size=4",)
SEVERAL = ("actor.mini_batch_size=1", "actor.optimizer.lr=0.03")
TRAINER, SAMPLER = "actor.router.replay=trainer", "actor.router.replay=sampler"


def numbers(run: Path, key: str) -> list[float]:
    return [line[key] for line in metrics(run) if key in line]


@pytest.mark.slow
def test_with_one_update_per_batch_own_routes_change_nothing(run: Run) -> None:
    """Nothing has moved between the pass that keeps the routes and the update; and the sampler is exact."""
    plain = run("plain", *MIXTURE, *QUIET, *ONE_STEP)
    trainer = run("trainer", *MIXTURE, *QUIET, *ONE_STEP, TRAINER)
    assert weights(trainer) == weights(plain)
    sampler = run("sampler", *MIXTURE, *QUIET, *ONE_STEP, SAMPLER)
    for name, tensor in _weights(plain).items():
        assert np.linalg.norm(_weights(sampler)[name] - tensor) <= 1e-5 * np.linalg.norm(tensor), name
    assert numbers(trainer, "actor/rerouted") == numbers(sampler, "actor/rerouted") == [0.0] * 3
    assert numbers(trainer, "actor/replayed") == numbers(sampler, "actor/replayed") == [1.0] * 3
    assert numbers(plain, "actor/rerouted") == numbers(plain, "actor/replayed") == []
    assert all(1 <= load <= 4 for load in numbers(plain, "actor/expert_load_max"))
    for file in sorted((sampler / "rollouts").iterdir()):  # routes are for the run alone
        assert not set(ROUTES) & set(pq.read_schema(file).names)


@pytest.mark.slow
@pytest.mark.parametrize("replay", [TRAINER, SAMPLER])
def test_routes_hold_through_all_updates_of_a_batch(
    run: Run, replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every pass of a step is told, and what tokens would have chosen by then."""
    told: list[tuple[str, dict[int, bytes]]] = []

    def noting(name: str) -> None:
        method = getattr(ActorWorker, name)

        def wrapped(self: ActorWorker, batch: Batch, *args: Any, **kwargs: Any) -> Any:
            made = method(self, batch, *args, **kwargs)
            shown = batch if ROUTED in batch.columns else made
            if ROUTED not in shown.columns:  # the canary's, with the sampler's routes
                return made
            rows = shown.rows(ROUTED)
            told.append(
                (name, {row: one.tobytes() for row, one in zip(shown.scalars("row_id"), rows, strict=True)})
            )
            return made

        wrapped.__dict__.update(vars(method))
        wrapped.__name__ = name
        monkeypatch.setattr(ActorWorker, name, wrapped)

    noting("compute_log_prob")
    noting("update_actor")
    folder = run("run", *MIXTURE, *QUIET, *SEVERAL, replay, "cluster.inline=true")
    before: dict[int, set[bytes]] = {}  # the canary's rows, too, whose numbers are those of others
    known: dict[int, bytes] = {}
    for name, rows in told:
        for row, routes in rows.items():
            if name == "compute_log_prob":
                before.setdefault(row, set()).add(routes)
            else:
                assert known.setdefault(row, routes) == routes
                assert routes in before[row]
    assert len(known) >= 3 * 8
    assert max(numbers(folder, "actor/rerouted")) > 0


@pytest.mark.slow
def test_routes_travel_between_processes(run: Run) -> None:
    settings = (*MIXTURE, *QUIET, "trainer.total_steps=2", SAMPLER, "actor.router.balance={weight: 0.1}")
    alone = run("alone", *settings)
    spread = run(
        "spread", *settings, "cluster.backend=process", "cluster.devices=2", "actor.parallel.expert=2"
    )
    for name, tensor in _weights(alone).items():
        assert np.linalg.norm(_weights(spread)[name] - tensor) <= 1e-4 * np.linalg.norm(tensor), name
    for key in ("actor/expert_load_max", "actor/balance_loss", "actor/rerouted"):
        np.testing.assert_allclose(numbers(spread, key), numbers(alone, key), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_asynchronous_run_with_the_samplers_routes_is_replayed(recipe: Path, tmp_path: Path) -> None:
    run, again, mixture = tmp_path / "run", tmp_path / "again", (*MIXTURE, SAMPLER)
    record(run, recipe, *mixture)
    inline(
        "train",
        str(recipe),
        *ASYNCHRONOUS,
        *mixture,
        f"trainer.run_dir={again}",
        f"trainer.replay={run}",
        "rollout.max_concurrent=5",
    )
    assert_equal(run, again)
    assert len(numbers(run, "actor/rerouted")) == 5


@pytest.mark.slow
def test_a_balanced_run_balances_all_rows(run: Run) -> None:
    """A row whose advantage is 0 has no part in the policy's loss, and is left out of it; not here."""
    plain = run("plain", *MIXTURE, *QUIET, *ONE_STEP, "trainer.total_steps=8")
    balance = "actor.router.balance={weight: 1.0, over: mini_batch}"
    balanced = run("balanced", *MIXTURE, *QUIET, *ONE_STEP, "trainer.total_steps=8", balance)
    loss, largest = numbers(balanced, "actor/balance_loss"), "actor/expert_load_max"
    assert 1 <= min(loss)
    assert np.mean(loss[1:]) < loss[0]
    assert numbers(balanced, largest)[-1] < numbers(plain, largest)[-1]
    config = load(["quickstart"], ["actor.router.bias_speed=0.001", "algorithm.advantage=grpo"]).config
    assert not plan_program(config).actor_loss.zero_where_advantage_is_zero


@pytest.mark.slow
def test_biases_go_where_the_weights_go(recipe: Path, tmp_path: Path) -> None:
    """To the engine, the checkpoint and the export: a run that goes on has them."""
    model = {key: value for key, value in MODEL.items() if key != "head_dim"}
    model |= {"model_type": "glm4_moe", "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    model |= {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    recipe.write_text(yaml.safe_dump({**RECIPE, "model": {**RECIPE["model"], "config": model}}))

    def run(name: str, steps: int) -> Path:
        settings = (*QUIET, *ONE_STEP, "actor.router.bias_speed=0.03125", "checkpoint.every=1")
        ends = (f"trainer.total_steps={steps}", f"trainer.run_dir={tmp_path / name}")
        inline("train", str(recipe), *settings, *ends)
        return tmp_path / name

    whole = run("whole", 3)
    (name,) = (name for name in _weights(whole) if name.endswith("e_score_correction_bias"))
    bias = _weights(whole)[name]
    assert set(np.abs(bias * 32) % 1) == {0.0}  # whole steps
    assert np.abs(bias).max() > 0
    run("cut", 2)
    assert weights(run("cut", 3)) == weights(whole)


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ((TRAINER,), "actor.router.replay", "this qwen3 model has no experts"),
        (
            ("actor.router.bias_speed=0.1", *MIXTURE),
            "actor.router.bias_speed",
            "a qwen3_moe model have no biases",
        ),
        (
            (TRAINER, *MIXTURE, "algorithm.rollout_correction={mode: bypass}"),
            "actor.router.replay",
            "replays the pass that computes old log-probs",
        ),
        (
            (SAMPLER, *MIXTURE, "rollout.engine=vllm"),
            "actor.router.replay",
            "does not say where tokens went; set replay=trainer",
        ),
        (
            ("actor.router.balance={weight: 0}",),
            "actor.router.balance.weight",
            "greater than 0",
        ),
        (
            ("actor.router.balance={weight: 1}", "actor.backend.mlp_chunk=512", *MIXTURE),
            "actor.router.balance.over",
            "there is a part of them at a time; set over=mini_batch",
        ),
        (("actor.router.replays=trainer",), "actor.router.replays", "did you mean 'actor.router.replay'"),
    ],
)
def test_what_cannot_be_is_refused(
    recipe: Path, tmp_path: Path, overrides: tuple[str, ...], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rl(load([str(recipe)], [f"trainer.run_dir={tmp_path}/run", *overrides]))
    assert key in {problem.key for problem in caught.value.problems}
    assert message in str(caught.value)


def test_supervised_training_refuses_replay(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT_RECIPE))
    loaded = load([str(tmp_path / "sft.yaml")], [*MIXTURE, TRAINER, f"trainer.run_dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match=r"actor\.router\.replay has no meaning"):
        check_supervised(loaded, SFT)
