"""Rows for environments, so that a run needs no file: a prompt, and the seed of what it is about. And what a
run reads of such rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rondo.core.errors import ConfigError, DataError
from rondo.environments.protocol import HELD_OUT
from rondo.environments.registry import environment_class, row_name


def episodes(
    environment: str,
    size: int = 1024,
    seed: int = 0,
    held_out: bool = False,
    prompt: str | None = None,
    task: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Makes `size` rows, of which each is one start of an environment: {prompt, environment, seed, task}.

    environment: as in rollout.environments. seed, held_out: row i has seed 2 · (seed + i), and one more where
    it is held out, so that the two never share one; what an environment generates of the seeds that are held
    out is different for each, so that there are HELD_OUT of them at most. prompt: what the policy is told;
    default: the class's `instructions`. task: given to `reset`.
    """
    if size < 1 or seed < 0:
        raise ConfigError(f"episodes: needs size >= 1 and seed >= 0, got {size} and {seed}")
    if held_out and seed + size > HELD_OUT:
        raise ConfigError(
            f"episodes: seed + size may be {HELD_OUT} where rows are held out, got {seed + size}: beyond, "
            "levels would repeat"
        )
    made = environment_class(environment, "episodes")
    text = prompt or getattr(made, "instructions", "")
    if not text:
        raise ConfigError(f"episodes: {environment} has no instructions; set the option prompt")
    same: dict[str, Any] = {"prompt": text, "environment": row_name(environment, made)}
    same |= {} if task is None else {"task": task}
    return [{**same, "seed": 2 * (seed + row) + held_out} for row in range(size)]


def start_of(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, int | None]:
    """Returns which of a run's environments a row is about, and the seed, if it has one. names: of the
    environments. Raises DataError.
    """
    name = row.get("environment", names[0] if len(names) == 1 else None)
    if name not in names:
        raise DataError(
            f"column 'environment' is {name!r}, and rollout.environments has {', '.join(names)}; name one of "
            "them"
        )
    seed = row.get("seed")
    if seed is not None and not isinstance(seed, int):
        raise DataError(f"column 'seed' is {seed!r}, no integer")
    return name, seed
