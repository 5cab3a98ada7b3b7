"""A command line in verl's spelling, translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from rondo.config import LoadedConfig
from rondo.config import load as load_ours
from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError

BASE = ("model.path=model", "trainer.total_steps=10", "algorithm.adv_estimator=grpo")
GAE = ("algorithm.adv_estimator=gae", "critic.model.path=critic")
A, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
C = "algorithm.rollout_correction"


def load(files: list[str], overrides: Sequence[str]) -> LoadedConfig:
    return load_ours(files, overrides)


def settings(*overrides: str) -> dict[str, object]:
    """What the overrides set, as {our key: value}, besides BASE and verl's defaults."""
    loaded = load([], [*BASE, *overrides])
    found: dict[str, object] = {}
    for key in loaded.origins:
        value: object = loaded.config
        for part in key.split("."):
            if isinstance(value, FunctionConfig) and part in value.options:
                value = value.options[part]
            elif isinstance(value, Mapping):
                value = value[part]
            else:
                value = value[int(part)] if part.isdigit() else getattr(value, part)  # type: ignore[index]
        found[key] = value
    in_base = ("model.path", "trainer.total_steps", "algorithm.advantage.name")
    return {key: value for key, value in found.items() if key not in in_base and loaded.origins[key].written}


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([], [*BASE, *overrides])
    return str(caught.value)
