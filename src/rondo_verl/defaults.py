"""verl's defaults: what its command line means where it says nothing.

They are data: `main.json` (2026) and `0.6.1.json` have all keys of a version's `ppo_trainer.yaml`, with the
files that it includes; `defaults.tsv` has each key that is translated, our key where that means the same, and
why verl's default of some is none here. As soon as one key in verl's spelling is seen they are in force
beneath all that is written, in either spelling, and `table.py` translates them like what is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from rondo.config.tree import BENEATH, Node, Origin
from rondo.core.errors import ConfigError
from rondo_verl.resolved import every_default, interpolated
from rondo_verl.values import like, rows

VERSIONS = ("main", "0.6.1")
# Says which version's defaults hold; not a key of verl's.
VERSION = "verl.version"
# The section of the fully asynchronous trainer: its defaults are another file's.
ASYNC = "async_training."
# 0.6.1 has them, too: in the file of its recipe dapo.
_OF_DAPO = ("algorithm.filter_groups.", "data.gen_batch_size")


def _resolved(version: str, key: str) -> Any:
    """Returns the default of a key, which a version may lack: then the other's."""
    whole = next(every_default(one) for one in (version, *VERSIONS) if key in every_default(one))
    return interpolated(whole[key], key, whole)


_ROWS = rows("defaults.tsv")
# Keys that mean the same here by another name, and that.
SAME: Mapping[str, str] = {key: ours for key, ours, _, _ in _ROWS if ours}
# Keys that are translated, but have no default here, and why.
WITHOUT_DEFAULT: Mapping[str, str] = {key: why for key, _, _, why in _ROWS if why}
# Of ppo_trainer.yaml, and those of fully_async_ppo_trainer.yaml, by version.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    version: {
        key: json.loads(default) if default else _resolved(version, key)
        for key, _, default, why in _ROWS
        if not why
    }
    for version in VERSIONS
}


@cache
def _sections(version: str) -> frozenset[str]:
    """Returns all keys of a version, and all sections that they are in."""
    parts = [key.split(".") for key in every_default(version)]
    return frozenset(".".join(one[:end]) for one in parts for end in range(1, len(one) + 1))


def only_in(key: str) -> str | None:
    """Returns the version that alone has a key, or keys below it; None where both have it, or none."""
    having = [version for version in VERSIONS if key in _sections(version)]
    return having[0] if len(having) == 1 and not key.startswith(_OF_DAPO) else None


def default(key: str, value: Any) -> Node:
    """Makes the node of a default, which says so."""
    return like(Node(None, Origin(f"verl's default of {key}", written=False), BENEATH), value)


def version_of(written: dict[str, Node], problems: list[ConfigError]) -> tuple[str, str]:
    """Returns the version of verl whose keys these are, and what says so. A guess joins what is written.

    It is 0.6.1 where that alone has one of the keys, and none is main's alone. Where no key tells it is main,
    which is no guess: what the versions read differently is an error then.
    """
    if VERSION in written:
        node = written[VERSION]
        if node.plain() in VERSIONS:
            return node.plain(), node.origin.where
        known = " or ".join(VERSIONS)
        problems.append(ConfigError(f"{node.origin.where}: {VERSION} is {known}", key=VERSION))
        return VERSIONS[0], node.origin.where
    told = {version: [key for key in written if only_in(key) == version] for version in VERSIONS}
    version = "0.6.1" if told["0.6.1"] and not told["main"] else "main"
    if not told[version]:
        return version, "no key tells"
    first = told[version][0]
    written[VERSION] = like(written[first], version)
    return version, f"only it has {first}"


def defaults_beside(written: Collection[str], version: str) -> dict[str, Node]:
    """Returns the defaults that are in force where these keys of verl's are written, those of the keys
    themselves left out; those of the asynchronous trainer where one of its keys is.
    """
    ahead = any(key.startswith(ASYNC) for key in written)
    return {
        key: default(key, value)
        for key, value in DEFAULTS[version].items()
        if key not in written and (ahead or not key.startswith(ASYNC))
    }
