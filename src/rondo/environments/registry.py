"""Environments by name, and what an environment's class has to be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError
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
    if hasattr(made, "step_many"):
        try:
            inspect.signature(made.step_many).bind([], [])
        except TypeError as error:
            raise ConfigError(
                f"{where}: {made.__name__}.step_many is no class method with (environments, actions): {error}"
            ) from error
