"""The environments that a run has chosen (`rollout.environments`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.config.functions import called_with, check_options
from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import ConfigError
from rondo.environments.protocol import Environment
from rondo.environments.registry import check_protocol, environment_class, row_name
from rondo.system.border import inside


@dataclass(frozen=True)
class EnvironmentChoice:
    """One of rollout.environments. make: an instance of it."""

    name: str
    """What prompts' rows and metrics call it."""
    config: EnvironmentConfig
    make: Callable[[], Environment]
    check: Callable[[], object] | None
    """Looks whether this machine has what it needs. Raises RondoError."""
    steps_many: bool = False
    """Its class has a `step_many`."""


def load_environments(configs: Sequence[EnvironmentConfig]) -> tuple[EnvironmentChoice, ...]:
    """Returns the environments of a run. Raises ConfigError: unknown, two of one name, no environment,
    options that it does not have.
    """
    loaded: list[EnvironmentChoice] = []
    for place, config in enumerate(configs):
        choice = _load(config, f"rollout.environments.{place}")
        if any(choice.name == other.name for other in loaded):
            raise ConfigError(
                f"rollout.environments.{place}: there are two environments called {choice.name}, and rows "
                "of prompts could not say which they mean"
            )
        loaded.append(choice)
    return tuple(loaded)


def _load(config: EnvironmentConfig, where: str) -> EnvironmentChoice:
    made: Any = environment_class(config.name, where)
    check_protocol(made, where)
    check_options(made, config.options, where, given=0, chosen=config)
    if config.options.get("image") is True:
        raise ConfigError(f"{where}: image: true shows pictures, and no policy sees one yet; leave it out")
    options = called_with(config.options, where)
    check = getattr(made, "check", None)
    if check is not None:
        check = inside(functools.partial(check, **options), where, ConfigError)
    return EnvironmentChoice(
        row_name(config.name, made),
        config,
        make=functools.partial(made, **options),
        check=check,
        steps_many=hasattr(made, "step_many"),
    )
