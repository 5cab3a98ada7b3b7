"""Environments by name: which a run has chosen (`rollout.environments`), and what their classes must be."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.config.functions import called_with, check_options, resolve_function
from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import ConfigError
from rondo.environments.protocol import Environment
from rondo.system.border import inside
from rondo.system.names import offered

METHODS = {"reset": ("seed", "task"), "step": ("action",), "state": (), "close": ()}


def environment_class(name: str | Callable[..., Any], where: str) -> Any:
    """Returns the class that a recipe names. Raises ConfigError."""
    try:
        return resolve_function(name, offered("environments"))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def row_name(name: str, made: type) -> str:
    """Returns what prompts' rows and metrics call an environment that was chosen by `name`."""
    return name if name in offered("environments") else made.__name__


def check_protocol(made: Any, where: str) -> None:
    """Raises ConfigError for what is no class of an environment."""
    if not inspect.isclass(made):
        raise ConfigError(f"{where}: {made.__name__} is no class, as an environment is")
    for name, wanted in METHODS.items():
        method = getattr(made, name, None)
        if method is None:
            raise ConfigError(f"{where}: {made.__name__} has no method {name}({', '.join(wanted)})")
        if inspect.iscoroutinefunction(method):
            raise ConfigError(f"{where}: {made.__name__}.{name} is a coroutine; make it a plain function")
        try:
            inspect.signature(method).bind(None, *wanted)
        except TypeError as error:
            raise ConfigError(
                f"{where}: {made.__name__}.{name} cannot be called with ({', '.join(wanted)}): {error}"
            ) from error
    if hasattr(made, "restore"):
        try:
            inspect.signature(made.restore).bind(None, {})
        except TypeError as error:
            raise ConfigError(
                f"{where}: {made.__name__}.restore cannot be called with (state): {error}"
            ) from error
    if hasattr(made, "step_many"):
        try:
            inspect.signature(made.step_many).bind([], [])
        except TypeError as error:
            raise ConfigError(
                f"{where}: {made.__name__}.step_many is no class method with (environments, actions): {error}"
            ) from error


# ---- what a run has chosen ----


@dataclass(frozen=True)
class EnvironmentChoice:
    """One of rollout.environments."""

    name: str
    """What prompts' rows and metrics call it."""
    config: EnvironmentConfig
    """The environment's own section."""
    make: Callable[[], Environment]
    """Makes an instance of it."""
    check: Callable[[], object] | None
    """Looks whether this machine has what it needs. Raises RondoError."""
    steps_many: bool = False
    """Its class has a `step_many`."""
    restores: bool = False
    """Its class has a `restore`, and its states are kept."""


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
        restores=hasattr(made, "restore") and config.keep_state,
    )
