"""Environments by name: those that ship, and the user's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, did_you_mean

# Where each class lives, so that only what a run names is imported.
BUILTINS: Mapping[str, str] = {
    "alfworld": "rondo.environments.alfworld_adapter:AlfWorld",
    "appworld": "rondo.environments.appworld_adapter:AppWorld",
    "bandit": "rondo.environments.bandit:Bandit",
    "frozen_lake": "rondo.environments.frozen_lake:FrozenLake",
    "gymnasium": "rondo.environments.gymnasium_adapter:Gymnasium",
    "minigrid": "rondo.environments.minigrid_adapter:MiniGrid",
    "miniwob": "rondo.environments.miniwob_adapter:MiniWob",
    "observed": "rondo.environments.observed:Observed",
    "openenv": "rondo.environments.openenv_adapter:OpenEnv",
    "reasoning_gym": "rondo.environments.reasoning_gym_adapter:ReasoningGym",
    "search_qa": "rondo.environments.search_qa:SearchQA",
    "shop": "rondo.environments.shop:Shop",
    "sokoban": "rondo.environments.sokoban:Sokoban",
    "textarena": "rondo.environments.textarena_adapter:TextArena",
    "textworld": "rondo.environments.textworld_adapter:TextWorld",
    "user": "rondo.environments.user:User",
    "verifiers": "rondo.environments.verifiers_adapter:Verifiers",
}
METHODS = {"reset": ("seed", "task"), "step": ("action",), "state": (), "close": ()}


def environment_class(name: str | Callable[..., Any], where: str) -> Any:
    """Returns the class that a recipe names. Raises ConfigError."""
    if isinstance(name, str) and name in BUILTINS:
        module, _, attribute = BUILTINS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if isinstance(name, str) and not set(".:/") & set(name):
        raise ConfigError(
            f"{where}: there is no environment {name!r}{did_you_mean(name, BUILTINS)} Built in: "
            f"{', '.join(BUILTINS)}. Your own: path/to/file.py:Class"
        )
    return resolve_function(name)


def row_name(name: str, made: type) -> str:
    """Returns what prompts' rows and metrics call an environment that was chosen by `name`."""
    return name if name in BUILTINS else made.__name__


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
