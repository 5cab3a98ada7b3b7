"""verl's defaults: what its command line means where it says nothing.

They are data: `defaults.tsv` has each key that is translated, its default in verl's main branch in 2026, that
of 0.6.1 where it is another one, and in which of the two the key is, where only one has it. As soon as one
key in verl's spelling is seen they are in force beneath all that is written, in either spelling, and
`table.py` translates them like what is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from rondo.config.tree import BENEATH, Node, Origin
from rondo.core.errors import ConfigError
from rondo_verl.values import like, rows

VERSIONS = ("main", "0.6.1")
# Says which version's defaults hold; not a key of verl's.
VERSION = "verl.version"
# The section of the fully asynchronous trainer: its defaults are another file's.
ASYNC = "async_training."

_ROWS = rows("defaults.tsv")
# Of ppo_trainer.yaml, and those of fully_async_ppo_trainer.yaml, by version.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    version: {
        key: json.loads((older if version == "0.6.1" else "") or main)
        for key, main, older, _, _ in _ROWS
        if main
    }
    for version in VERSIONS
}
# Keys that are translated, but have no default here, and why.
WITHOUT_DEFAULT: Mapping[str, str] = {key: why for key, main, _, _, why in _ROWS if not main}
# Keys that only one version has.
ONLY_IN: Mapping[str, str] = {
    **{key: version for key, _, _, version, _ in _ROWS if version},
    **{key: version for key, _, _, version in rows("plain.tsv") if version},
}


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
    told = {version: [key for key in written if ONLY_IN.get(key) == version] for version in VERSIONS}
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
