"""Levels of generated environments: one for each seed, none for an even seed and an odd one at once, and no
two held-out ones alike.
"""

from __future__ import annotations

import hashlib
import random
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import HELD_OUT, Environment

T = TypeVar("T")
_TRIES = 2000


@dataclass
class _HeldOut:
    """The levels that odd seeds have, as far as this process was asked for them."""

    digests: list[bytes] = field(default_factory=list)
    """That of seed 1, of seed 3, …"""
    lock: threading.Lock = field(default_factory=threading.Lock)


_held_out: defaultdict[str, _HeldOut] = defaultdict(_HeldOut)


def _itself(level: object) -> object:
    return level


def check_levels(environment: Environment, options: Mapping[str, Any]) -> None:
    """Raises ConfigError where the environment, made with these options, has no level for some seed of the
    first ones. Of those that are held out only the first: there may be few, and rows for no more of them.
    """
    for seed in (0, 1, 2, 4, 6):
        try:
            environment.reset(seed, None)
        except EnvironmentFailedError as error:
            raise ConfigError(f"{', '.join(f'{key}={options[key]}' for key in options)}: {error}") from error


def level_of(
    name: str,
    seed: int,
    make: Callable[[random.Random], T | None],
    fixed: Callable[[T], object] = _itself,
    *,
    whole: Callable[[T], object] | None = None,
    are_distinct: bool = True,
) -> T:
    """Returns a level that follows from the seed. make: draws one; None: what was drawn is no level. fixed:
    what of it no move changes, or a move would lead from a level of one half to one of the other. whole: what
    tells it from others; default: what is fixed. Both are told by their `repr`.

    A digest of what is fixed parts all levels in two halves, of which even seeds have one and odd seeds the
    other: those are held out (`episodes`), and what is learnt on even seeds was never seen on them. Each of
    the first HELD_OUT odd seeds has another level than those before it, whose levels are therefore drawn
    first, once in a process. are_distinct: false where a level takes too long for that.
    """
    number, is_held_out = divmod(seed, 2)
    if not (are_distinct and is_held_out and number < HELD_OUT):
        return _drawn(name, seed, make, fixed)[0]
    told = whole or fixed
    there = _held_out[name]
    with there.lock:
        for earlier in range(len(there.digests), number):
            there.digests.append(_drawn(name, 2 * earlier + 1, make, fixed, told, there.digests)[1])
        level, digest = _drawn(name, seed, make, fixed, told, there.digests[:number])
        if number == len(there.digests):
            there.digests.append(digest)
    return level


def _drawn(
    name: str,
    seed: int,
    make: Callable[[random.Random], T | None],
    fixed: Callable[[T], object],
    told: Callable[[T], object] = _itself,
    others: list[bytes] | tuple[()] = (),
) -> tuple[T, bytes]:
    """Returns the first level drawn that is of the seed's half and none of the others, and its digest."""
    rng = random.Random(f"rondo {name}: {seed}")
    known = set(others)
    for _ in range(_TRIES):
        level = make(rng)
        if level is not None and zlib.crc32(repr(fixed(level)).encode()) % 2 == seed % 2:
            digest = hashlib.blake2b(repr(told(level)).encode(), digest_size=8).digest()
            if digest not in known:
                return level, digest
    besides = f" and differs from the {len(known)} of the held-out seeds before" if known else ""
    raise EnvironmentFailedError(
        f"{name}: none of {_TRIES} drawn levels is one for seed {seed}{besides}; with these options there "
        "are too few"
    )
