"""What the translations of single keys and of several together share: the values that are set, in verl's
spelling, and what becomes of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.config.tree import Node, describe
from rondo.core.errors import ConfigError


@dataclass(frozen=True)
class Note:
    """A key of verl's that has no meaning here, given the others, and why."""

    key: str
    """Their key."""
    reason: str
    """Why it has no meaning here."""


def rows(name: str) -> list[list[str]]:
    """Returns the rows of one of this package's tables (*.tsv), without the heads of the columns."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()[1:]]


# Our key, and the node with its value: written where the value comes from.
Setting = tuple[str, Node] | Note


class NoCounterpartError(Exception):
    """A value without a counterpart; the text is the remedy."""


@dataclass(frozen=True)
class Values:
    """Keys that are set or have a default of verl's, and their nodes; errors name them behind `prefix`."""

    nodes: Mapping[str, Node]
    """The nodes, by key below the prefix."""
    prefix: str = ""
    """What errors write in front of a key."""

    def below(self, prefix: str) -> Values:
        """Returns the keys below this one, by their names there."""
        own = {key.removeprefix(prefix): node for key, node in self.nodes.items() if key.startswith(prefix)}
        return Values(own, self.prefix + prefix)

    def written(self, *keys: str) -> list[str]:
        """Returns the keys that somebody wrote, without verl's defaults."""
        return [key for key in keys if key in self.nodes and self.nodes[key].origin.written]

    def plain(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key that may not be set."""
        return self.nodes[key].plain() if key in self.nodes else default

    def converted(self, key: str, convert: Callable[[Any], Any], default: Any = None) -> Any:
        """Returns the value through `convert`, whose NoCounterpartError becomes `refused`."""
        try:
            return convert(self.nodes[key].plain()) if key in self.nodes else default
        except NoCounterpartError as error:
            raise self.refused(key, str(error)) from None

    def made(self, value: Any, *keys: str) -> Node:
        """Makes a node of a value that was derived from those of `keys` that are set.

        It counts as written where the last layer of them is, and within a layer where the first of them is.
        """
        known = (self.nodes[key] for key in keys if key in self.nodes)
        return like(max(known, key=lambda node: node.layer), value)

    def node(self, key: str, convert: Callable[[Any], Any]) -> Node:
        """Returns the key's node with its value converted."""
        return self.made(self.converted(key, convert), key)

    def refused(self, key: str, remedy: str) -> ConfigError:
        """Returns the error for a key whose value has no counterpart here."""
        node = self.nodes[key]
        value = node.plain()
        shown = describe(value) if isinstance(value, bool | dict | list | None) else value
        text = f"{self.prefix}{key} (verl's spelling) cannot be {shown} here: {remedy}"
        return ConfigError(f"{node.origin.where}: {text}", key=self.prefix + key)


def like(node: Node, value: Any) -> Node:
    """Makes a plain value a tree that was written where `node` was. Nodes in it stay as they are."""
    if isinstance(value, Node):
        return value
    if isinstance(value, dict):
        return Node({key: like(node, child) for key, child in value.items()}, node.origin, node.layer)
    if isinstance(value, list):
        return Node([like(node, child) for child in value], node.origin, node.layer)
    return Node(value, node.origin, node.layer)


def choice(names: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Returns a converter that knows these names only."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str) or value not in names:
            raise NoCounterpartError(f"use one of {', '.join(names)}, or rondo's own keys (docs/config.md)")
        return names[value]

    return convert


def number(remedy: str, *, whole: bool = False, least: float = -math.inf) -> Callable[[Any], Any]:
    """Returns a converter that takes numbers only, from `least` on."""

    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < least:
            raise NoCounterpartError(remedy)
        return value

    return convert


whole = number("give a whole number", whole=True)
count = number("give a whole number, 1 or more", whole=True, least=1)
