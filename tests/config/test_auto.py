"""What the device decides: compute_dtype and gradient_checkpointing with `auto`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rondo.config import LoadedConfig, load, show, to_yaml
from rondo.config.schema import Config, CriticConfig, RewardModelConfig
from rondo.core.errors import ConfigError
from rondo.planning.roles import config_for
from rondo.platform import platform_of
from rondo.trainers.commands.recipe import changed_keys
from rondo.trainers.loop.resume import differences
from rondo.trainers.program.inputs import settled
from rondo.trainers.replay.journal import settings_of

ARGUMENTS = ["model.path=m", "trainer.total_steps=1"]


@pytest.mark.parametrize(
    ("device", "dtype", "checkpointing"), [("cpu", "float32", False), ("cuda", "bfloat16", True)]
)
def test_auto_is_settled_for_every_engine(device: str, dtype: str, checkpointing: bool) -> None:
    models = dataclasses.replace(Config().reward, models=(RewardModelConfig(),))
    config = config_for(dataclasses.replace(Config(), reward=models), platform_of(device))
    engines = (config.actor, config.critic, config.reference, config.teacher, *config.reward.models)
    assert {engine.compute_dtype for engine in engines} == {dtype}
    assert config.actor.gradient_checkpointing is config.critic.gradient_checkpointing is checkpointing
    assert config_for(config, platform_of("cpu")) == config


def test_what_is_chosen_stays() -> None:
    config = load(
        [], [*ARGUMENTS, "actor.compute_dtype=float16", "actor.gradient_checkpointing=false"]
    ).config
    assert config_for(config, platform_of("cuda")).actor == config.actor
    loaded = load([], ARGUMENTS)
    assert "actor.compute_dtype: auto" in show(loaded.config, loaded.origins)


@pytest.mark.parametrize("value", ["1", "yes", "bfloat16"])
def test_gradient_checkpointing_is_auto_true_or_false(value: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        load([], [*ARGUMENTS, f"actor.gradient_checkpointing={value}"])


def test_a_run_that_goes_on_on_another_device_says_so() -> None:
    config = load([], ARGUMENTS).config
    on_cuda, on_cpu = (config_for(config, platform_of(kind)) for kind in ("cuda", "cpu"))
    said = list(differences(on_cuda, on_cpu))
    assert 'actor.compute_dtype: "bfloat16" before, "float32" now' in said
    assert "actor.gradient_checkpointing: true before, false now" in said
    assert settings_of(on_cuda)["actor.compute_dtype"] == "bfloat16"  # in the journal: a replay must share it


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_config_of_a_run_sets_nothing_that_nobody_chose(in_tmp_path: object, device: str) -> None:
    """config.yaml has what `auto` became, also for engines that the run does not have."""
    with open("config.yaml", "w") as file:
        file.write(to_yaml(config_for(load([], ARGUMENTS).config, platform_of(device))))
    loaded = load(["config.yaml"])
    assert loaded.config.critic != CriticConfig()
    assert [key for key, _ in changed_keys(loaded)] == ["model.path", "trainer.total_steps"]


def test_devices_elsewhere_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    here = load([], [*ARGUMENTS, "cluster.backend=ray"])
    assert settled(here.config).actor.compute_dtype == "bfloat16"
    elsewhere = [*ARGUMENTS, "cluster.backend=ray", "cluster.backend.address=auto"]
    with pytest.raises(ConfigError, match=r"cluster\.device=auto"):
        settled(load([], elsewhere).config)
    named: LoadedConfig = load([], [*elsewhere, "cluster.device=cpu"])
    assert settled(named.config).actor.compute_dtype == "float32"
