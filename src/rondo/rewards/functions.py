"""Reward functions chosen in a recipe: loaded, their options checked, their score names fixed before the run
starts.
"""

from __future__ import annotations

import importlib.util
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rondo.config.functions import check_options, resolve_function
from rondo.config.schema import RewardFunctionConfig
from rondo.errors import ConfigError, about

RunIn = Literal["loop", "thread", "process"]
F = TypeVar("F", bound=Callable[..., Any])

MARKS = ("run_in", "score_names", "scores_group", "requires", "memory_bytes")


def reward_function(
    *,
    run_in: RunIn = "thread",
    score_names: Sequence[str] = (),
    group: bool = False,
    requires: tuple[str, str] | None = None,
    memory_bytes: int | None = None,
) -> Callable[[F], F]:
    """Say how a reward function wants to be run. A plain function needs no such mark.

    run_in: `thread` (the default), `process` (its own process, which is killed at the time limit: for code
    that may hang or hold Python's lock), `loop` (at once on the event loop, without a time limit: only for a
    few microseconds of work). score_names: what the mapping it returns has. group: it is given the list of a
    prompt's scored trajectories, `fn(trajectories, **options)`, and returns one score for each. requires:
    (module, what to pip install). memory_bytes: `process` only, the most address space it may take.
    """

    def mark(function: F) -> F:
        values = (run_in, tuple(score_names), group, requires, memory_bytes)
        for name, value in zip(MARKS, values, strict=True):
            setattr(function, name, value)
        return function

    return mark


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function. name: of its score (weighted into the reward); parts: further named
    scores.
    """

    name: str
    spec: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    weight: float
    sources: tuple[str, ...] | None
    parts: tuple[str, ...]
    run_in: RunIn
    group: bool
    takes_seed: bool
    is_async: bool
    memory_bytes: int | None

    def applies(self, source: str) -> bool:
        return self.sources is None or source in self.sources

    @property
    def names(self) -> tuple[str, ...]:
        """Its scores: `name`, and `name/part` for each part it declared."""
        return (self.name, *(f"{self.name}/{part}" for part in self.parts))


def load_functions(
    configs: Sequence[RewardFunctionConfig], builtins: Mapping[str, Callable[..., Any]]
) -> tuple[RewardFunction, ...]:
    """The functions of `reward.functions`, each score name unique (`format`, `format_2`).

    Raises ConfigError: unknown name, package missing, option unknown or of a wrong type.
    """
    loaded: list[RewardFunction] = []
    for i, config in enumerate(configs):
        taken = [function.name for function in loaded]
        with about(f"reward.functions.{i}"):
            loaded.append(_load(config, f"reward.functions.{i}", taken, builtins))
    return tuple(loaded)


def _load(
    config: RewardFunctionConfig, where: str, taken: Sequence[str], builtins: Mapping[str, Callable[..., Any]]
) -> RewardFunction:
    function = resolve_function(config.name, builtins)
    spec = getattr(config.name, "__name__", config.name)  # from Python it may be the function itself
    group = bool(getattr(function, "scores_group", False))
    requires = getattr(function, "requires", None)
    if requires and importlib.util.find_spec(requires[0]) is None:
        raise ConfigError(
            f"{where}: {config.name} needs the package {requires[0]}: pip install '{requires[1]}'"
        )
    takes_seed = _check_signature(function, config, where, group)
    run_in: Any = getattr(function, "run_in", "thread")
    if run_in not in typing.get_args(RunIn):
        raise ConfigError(
            f"{where}: {config.name} is marked run_in={run_in!r}; it must be one of {typing.get_args(RunIn)}"
        )
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    if is_async and run_in == "process":
        raise ConfigError(
            f"{where}: {config.name} is a coroutine and marked run_in='process'; make it a plain function"
        )
    return RewardFunction(
        name=_free_name(spec.replace(":", ".").rsplit(".", 1)[-1], taken),
        spec=spec,
        function=function,
        options=dict(config.options),
        weight=config.weight,
        sources=config.sources,
        parts=tuple(getattr(function, "score_names", ())),
        run_in=run_in,
        group=group,
        takes_seed=takes_seed,
        is_async=is_async,
        memory_bytes=getattr(function, "memory_bytes", None),
    )


def _check_signature(
    function: Callable[..., Any], config: RewardFunctionConfig, where: str, group: bool
) -> bool:
    """Options, and the positional arguments we pass. Returns whether the function wants a `seed` of its
    own.
    """
    given = 1 if group else 2
    signature = inspect.signature(function)
    takes_seed = "seed" in signature.parameters and "seed" not in config.options
    options = {**config.options, "seed": 0} if takes_seed else dict(config.options)
    check_options(function, options, where, given=given)
    try:
        signature.bind(*[None] * given, **options)
    except TypeError as error:
        wanted = "trajectories" if group else "prompt, trajectory"
        raise ConfigError(
            f"{where}: {config.name}{signature} cannot be called as a reward function, ({wanted}, "
            f"**options): {error}"
        ) from error
    for key, choices in _literals(function).items():
        if key in options and options[key] not in choices:
            raise ConfigError(
                f"{where}: {config.name}.{key} must be one of {', '.join(choices)}, got {options[key]!r}"
            )
    return takes_seed


def _literals(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Parameters that are annotated with Literal[…], and their choices."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # annotations that cannot be evaluated say nothing
        return {}
    return {key: typing.get_args(hint) for key, hint in hints.items() if typing.get_origin(hint) is Literal}


def _free_name(name: str, taken: Sequence[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
