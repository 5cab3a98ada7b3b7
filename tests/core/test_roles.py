"""The table of roles: workers, sections and columns that exist, and the workers' arguments made from it."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from rondo.config.schema import (
    Config,
    CriticConfig,
    ModelConfig,
    PrmConfig,
    RewardConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rondo.core.columns import column
from rondo.core.errors import ConfigError
from rondo.core.roles import ENGINE_SECTIONS, REWARD_MODEL, ROLES, TRAINED_SECTIONS
from rondo.models.value_head import FILE as VALUE_HEAD_FILE
from rondo.planning import engine_of
from rondo.trainers.program.producers import PRODUCERS
from rondo.trainers.program.roles import role_spec, worker_class
from rondo.workers.models import CriticWorker, ModelWorker
from rondo.workers.rollout import RolloutWorker

POLICY = ModelConfig(path="policy")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models are looked up: here they are folders."""
    monkeypatch.chdir(tmp_path)
    for name in ("policy", "a", "t", "judge", "r"):
        (tmp_path / name).mkdir()


def test_every_row_names_what_exists() -> None:
    config = Config()
    for role in (*ROLES.values(), REWARD_MODEL):
        worker = worker_class(role)
        assert issubclass(worker, RolloutWorker if role.name == "rollout" else ModelWorker)
        assert set(role.options) <= set(inspect.signature(worker).parameters)
        column(role.makes)
        column(role.learns_from or role.makes)
    for role in ROLES.values():
        assert hasattr(config, role.section)
        assert role.weights is None or hasattr(getattr(config, role.weights), "path")
    assert ENGINE_SECTIONS == ("actor", "critic", "reference", "teacher")
    assert TRAINED_SECTIONS == ("actor", "critic")


def test_producers_call_their_roles_workers_for_what_the_roles_make() -> None:
    for producer in PRODUCERS:
        assert getattr(worker_class(ROLES[producer.role]), producer.method.__name__) is producer.method
    made = {(p.role, name) for p in PRODUCERS for name in p.columns}
    assert {(r.name, r.makes) for r in ROLES.values() if r.engine} <= made


def test_arguments_of_a_worker_come_from_the_sections_of_its_row() -> None:
    config = Config(model=POLICY, critic=CriticConfig(path="a"), prm=PrmConfig(lr=0.5, beta=0.25))
    worker, critic = role_spec("cost_critic", config, {}, 7)
    assert worker is CriticWorker
    model = critic["model"]
    assert (model.source.path, model.config, model.head) == ("a", config.critic, "value")
    assert (model.optimizer, model.total_optimizer_steps) == (config.critic.optimizer, 7)
    _, prm = role_spec("prm", config, {})
    assert (prm["model"].config, prm["beta"]) == (config.actor, 0.25)
    assert prm["model"].optimizer == dataclasses.replace(config.actor.optimizer, lr=0.5)
    assert prm["model"].temperature == config.rollout.temperature


def test_a_model_that_is_only_used_has_no_optimizer() -> None:
    config = Config(model=POLICY)
    used = role_spec("actor", config)[1]
    trained = dataclasses.replace(used["model"], optimizer=config.actor.optimizer)
    assert role_spec("actor", config, {})[1] == {"model": trained, "losses": {}}
    reference = role_spec("reference", config, {})[1]
    for kwargs in (used, reference):
        assert set(kwargs) == {"model"}
        assert kwargs["model"].optimizer is None


def test_a_reward_model_is_a_role_by_its_name(tmp_path: Path) -> None:
    models = (RewardModelConfig(name="kind", path="x"), RewardModelConfig(name="harm", path=str(tmp_path)))
    config = Config(reward=RewardConfig(models=models))
    assert engine_of("harm", config) == ("reward.models.1", models[1])
    with pytest.raises(ConfigError, match=VALUE_HEAD_FILE):
        role_spec("harm", config)
    (tmp_path / VALUE_HEAD_FILE).touch()
    worker, harm = role_spec("harm", config)
    assert worker is worker_class(REWARD_MODEL)
    assert (harm["model"].source.path, harm["model"].head) == (str(tmp_path), "value")


def test_what_is_no_role_or_names_no_weights_is_an_error() -> None:
    for role in ("harm", "rollout"):
        with pytest.raises(ConfigError, match=f"no role '{role}'"):
            engine_of(role, Config())
    with pytest.raises(ConfigError, match=r"teacher\.path is not set"):
        role_spec("teacher", Config())
    assert role_spec("teacher", Config(teacher=TeacherConfig(path="t", top_k=3)))[1]["top_k"] == 3
