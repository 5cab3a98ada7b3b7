"""The stages of a run (trainer.stages): which keys may be otherwise from a step on, and the configuration of
each.

Models, engines, memory and the order of prompts are made once, of the recipe; a stage changes what a request,
an optimizer step or a loss is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from rondo.config.schema import Config, FunctionConfig, StageConfig
from rondo.core.errors import ConfigError, did_you_mean

SAMPLED = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
"""Keys of rollout that each request has."""
CHANGE = (
    *(f"rollout.{name}" for name in SAMPLED),
    "actor.optimizer.lr",
    "critic.optimizer.lr",
    "algorithm.entropy_coef",
)
"""What a stage may change; and every option of algorithm.coefficients."""
_OPTIONS = "algorithm.coefficients."
# Why others may not, where more is to be said than that they are made once.
_WHY = {
    "rollout.n": "buffer, mini-batches and ledger count it; data.sampler gives prompts numbers of their own",
    f"{_OPTIONS}*.start": "the number goes on from where it is",
    f"{_OPTIONS}*.name": "its state is the first one's; a rule of your own may do both",
}
_ONCE = "what it says is made once, before the first step"


@dataclass(frozen=True)
class RunStage:
    """The steps from one border to the next."""

    step: int
    """The first of them; the run's first step is 1."""
    changes: Mapping[str, Any]
    """What is otherwise than in the recipe: dotted key -> value."""
    config: Config
    """The recipe with these changes."""

    def describe(self) -> str:
        """Writes one line."""
        changes = ", ".join(f"{key}={value}" for key, value in self.changes.items())
        return f"from step {self.step}: {changes or 'as the recipe says'}"


def stages_of(config: Config) -> tuple[RunStage, ...]:
    """Returns the stages of a run; the first begins at step 1. Raises ConfigError for what cannot be one."""
    written = config.trainer.stages
    steps = [stage.step for stage in written]
    if late := [b for a, b in pairwise(steps) if b <= a]:
        key = f"trainer.stages.{steps.index(late[0], 1)}.step"
        raise ConfigError(f"{key}: stages are in the order of their steps, each later than the last", key=key)
    first = [] if steps[:1] == [1] else [RunStage(1, {}, config)]
    return (*first, *(_stage(config, number, stage) for number, stage in enumerate(written)))


def number_at(stages: Sequence[RunStage], step: int) -> int:
    """Returns which stage a step is in; the first is 1."""
    return sum(stage.step <= step for stage in stages)


def _stage(config: Config, number: int, written: StageConfig) -> RunStage:
    made, changes, place = config, dict[str, Any](), f"trainer.stages.{number}"
    for section in ("rollout", "actor", "critic", "algorithm"):
        for key, value in _leaves(getattr(written, section), section):
            _check(config, key, value, f"{place}.{key}")
            made, changes[key] = _with(made, key.split("."), value, f"{place}.{key}"), value
    return RunStage(written.step, changes, made)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}")
    else:
        yield key, value


def _check(config: Config, key: str, value: Any, place: str) -> None:
    """Raises ConfigError where a stage may not set a key to a value."""
    general = key
    if key.startswith(_OPTIONS):
        name, _, option = key.removeprefix(_OPTIONS).partition(".")
        general = f"{_OPTIONS}*.{option}"
        if name not in config.algorithm.coefficients:
            near = did_you_mean(name, config.algorithm.coefficients)
            raise ConfigError(f"{place}: there is no {name!r} in algorithm.coefficients{near}", key=place)
    if key not in CHANGE and (general == key or general in _WHY or not option):
        near = did_you_mean(key, CHANGE)
        raise ConfigError(
            f"{place}: no stage changes {key}, as {_WHY.get(general, _ONCE)}{near} A stage may change "
            f"{', '.join(CHANGE)}, and options of algorithm.coefficients",
            key=place,
        )
    if key == "rollout.max_tokens" and isinstance(value, int) and value > config.rollout.max_tokens:
        raise ConfigError(
            f"{place}={value} is more than rollout.max_tokens={config.rollout.max_tokens}, for which engines "
            "and memory are made: say the largest there, and less in the stages that have less",
            key=place,
        )


def _with(section: Any, parts: Sequence[str], value: Any, place: str) -> Any:
    """Returns a section with another value at a path below it. Raises ConfigError for one that may not be
    there.
    """
    name, *rest = parts
    if isinstance(section, Mapping):
        return {**section, name: _with(section[name], rest, value, place) if rest else value}
    if isinstance(section, FunctionConfig):
        return dataclasses.replace(section, options={**section.options, ".".join(parts): value})
    below = _with(getattr(section, name), rest, value, place) if rest else value
    try:
        return dataclasses.replace(section, **{name: below})
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, must be ")
        raise ConfigError(f"{place} must be {said}, got {value!r}", key=place) from error
