"""Settings side by side: the one flat form of a configuration, and the keys in which two of them differ.

Which keys may differ is said where it is asked (a resumed run, a replay, a warm start, …).
A key in such a list is a leaf, or a section with all that is below it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from rondo.config.keys import within
from rondo.config.printing import leaves, plain
from rondo.config.schema import Config
from rondo.core.masking import is_secret, masked

Settings = Mapping[str, Any]


def leaves_of(config: Config, *, only: Collection[str] = (), free: Collection[str] = ()) -> dict[str, Any]:
    """Returns every leaf by its key (`data.batch_size`, `data.train.0.path`), as JSON has it, in the schema's
    order.

    only: the keys to take; none given: all of them. free: keys to leave out.
    """
    found = json.loads(json.dumps(dict(leaves(plain(config), lists=True)), default=str))
    return {
        key: value
        for key, value in found.items()
        if (not only or within(key, only)) and not within(key, free)
    }


def differing(old: Settings, new: Settings, *, free: Collection[str] = ()) -> list[str]:
    """Returns the keys whose values differ, but for those that are `free`; a missing value equals null.

    Where one side has a section and the other has null or nothing in its place, the section is what differs.
    """
    differ = (key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key))
    return list(dict.fromkeys(_replaced(key, old, new) for key in differ if not within(key, free)))


def changes(old: Settings, new: Settings, place: str, *, free: Collection[str] = ()) -> list[str]:
    """Returns what is `differing` as lines: `rollout.n: 4 in the journal, 2 now`. place: where `old` is. One
    side may be from a rondo that masked no secrets.
    """
    old, new = _masked(old), _masked(new)
    return [
        f"{key}: {_shown(old, key)} {place}, {_shown(new, key)} now" for key in differing(old, new, free=free)
    ]


def _masked(settings: Settings) -> Settings:
    return {key: _masked_leaf(key, value) for key, value in settings.items()}


def _masked_leaf(key: str, value: Any) -> Any:
    parts = key.split(".")
    if parts[-1] == "env" and any(map(is_secret, parts[-2:-1])):
        return masked(parts[-2], {"env": value})["env"]
    return masked(next(filter(is_secret, parts), parts[-1]), value)


def _replaced(key: str, old: Settings, new: Settings) -> str:
    """Returns the shortest part of `key` that is a leaf on either side: `algorithm.kl`, where one side has no
    KL.
    """
    parts = key.split(".")
    shorter = (".".join(parts[:stop]) for stop in range(1, len(parts)))
    return next((part for part in shorter if part in old or part in new), key)


def _shown(record: Settings, key: str) -> str:
    if key in record:
        return json.dumps(record[key])
    below = {name.removeprefix(key + "."): value for name, value in record.items() if within(name, [key])}
    return json.dumps(below) if below else "not set"
