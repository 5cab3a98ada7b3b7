"""Levels of generated environments: one for each seed, and none for an even seed and an odd one at once."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Environment

T = TypeVar("T")
_TRIES = 2000


def _itself(level: object) -> object:
    return level


def check_levels(environment: Environment, options: Mapping[str, Any]) -> None:
    """Raises ConfigError where the environment, made with these options, has no level for some seed of the
    first ones.
    """
    for seed in range(8):
        try:
            environment.reset(seed, None)
        except EnvironmentFailedError as error:
            raise ConfigError(f"{', '.join(f'{key}={options[key]}' for key in options)}: {error}") from error


def level_of(
    name: str,
    seed: int,
    make: Callable[[random.Random], T | None],
    fixed: Callable[[T], object] = _itself,
) -> T:
    """Returns a level that follows from the seed. make: draws one, whose `repr` says all of it; None: what
    was drawn is no level. fixed: what of it no move changes, or a move would lead from a level of one half
    to one of the other.

    A digest of that parts all levels in two halves, of which even seeds have one and odd seeds the other:
    those are held out (`episodes`), and what is learnt on even seeds was never seen on them.
    """
    rng = random.Random(f"rondo {name}: {seed}")
    for _ in range(_TRIES):
        level = make(rng)
        if level is not None and zlib.crc32(repr(fixed(level)).encode()) % 2 == seed % 2:
            return level
    raise EnvironmentFailedError(
        f"{name}: none of {_TRIES} drawn levels is one for seed {seed}; with these options there are too few "
        "that can be solved"
    )
