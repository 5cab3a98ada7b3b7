"""What `auto` means on a kind of device, for the settings of training engines."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from rondo.config.schema import Config, EngineConfig, FrozenEngineConfig
from rondo.platform.base import Platform

Engine = TypeVar("Engine", bound=FrozenEngineConfig)


def engine_for(engine: Engine, platform: Platform) -> Engine:
    """Returns the settings of one engine with every `auto` replaced."""
    found: dict[str, Any] = {}
    if engine.compute_dtype == "auto":
        found["compute_dtype"] = platform.half
    if isinstance(engine, EngineConfig) and engine.gradient_checkpointing == "auto":
        found["gradient_checkpointing"] = platform.recomputes
    return dataclasses.replace(engine, **found)


def config_for(config: Config, platform: Platform) -> Config:
    """Returns the configuration with every `auto` of its engines replaced."""
    models = tuple(engine_for(model, platform) for model in config.reward.models)
    return dataclasses.replace(
        config,
        actor=engine_for(config.actor, platform),
        critic=engine_for(config.critic, platform),
        reference=engine_for(config.reference, platform),
        teacher=engine_for(config.teacher, platform),
        reward=dataclasses.replace(config.reward, models=models),
    )
