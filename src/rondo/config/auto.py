"""What `auto` means on a device, for the settings of training engines."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from rondo.config.schema import Config, EngineConfig, FrozenEngineConfig

DEVICES = ("cpu", "cuda")
Engine = TypeVar("Engine", bound=FrozenEngineConfig)


def engine_for(engine: Engine, device: str) -> Engine:
    """Returns the settings of one engine with every `auto` replaced. device: one of DEVICES."""
    found: dict[str, Any] = {}
    if engine.compute_dtype == "auto":
        found["compute_dtype"] = "bfloat16" if device == "cuda" else "float32"
    if isinstance(engine, EngineConfig) and engine.gradient_checkpointing == "auto":
        found["gradient_checkpointing"] = device == "cuda"
    return dataclasses.replace(engine, **found)


def config_for(config: Config, device: str) -> Config:
    """Returns the configuration with every `auto` of its engines replaced."""
    models = tuple(engine_for(model, device) for model in config.reward.models)
    return dataclasses.replace(
        config,
        actor=engine_for(config.actor, device),
        critic=engine_for(config.critic, device),
        reference=engine_for(config.reference, device),
        teacher=engine_for(config.teacher, device),
        reward=dataclasses.replace(config.reward, models=models),
    )
