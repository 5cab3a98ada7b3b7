"""From a tree of YAML nodes to the typed schema. All that is wrong in it is said, each with its place."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rondo.config.keys import DEFAULTS, FLATTENED, ROOT, SchemaPlace, choices_of, meaning, unknown
from rondo.config.schema import Config
from rondo.config.tree import Node, Origin, describe, shown
from rondo.core.errors import ConfigError

Origins = dict[str, Origin]


@dataclass(frozen=True)
class BuiltConfig:
    """A configuration from a tree, as far as it could be made."""

    config: Config
    """What is broken in the tree has its defaults here."""
    origins: Mapping[str, Origin]
    """Of every leaf that was set."""
    problems: tuple[ConfigError, ...]
    """What was wrong in the tree."""
    broken: tuple[str, ...]
    """The keys that have their defaults because of it."""


def build(tree: Node) -> BuiltConfig:
    """Builds the configuration; what is wrong is taken out, so that the rules can look at the rest."""
    problems: list[ConfigError] = []
    broken: list[list[str]] = []
    while True:
        origins: Origins = {}
        try:
            # Read as JSON, which is what YAML says here: a list may stand for a tuple then, and nothing else
            # for something else.
            config = _validator().validate_json(json.dumps(_shaped(ROOT, tree, "", origins)))
        except ValidationError as error:
            found = [_problem(one, tree) for one in error.errors(include_url=False)]
            # What is taken out may be missed then: that is no second problem.
            problems += [problem for problem, _ in found if (problem.key or "").split(".") not in broken]
            broken += [path for _, path in found]
            for _, path in found:
                tree = _without(tree, path)
        else:
            return BuiltConfig(config, origins, tuple(problems), tuple(map(".".join, broken)))


@cache
def _validator() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _shaped(place: SchemaPlace, node: Node, key: str, origins: Origins) -> Any:
    """Shapes the node as the schema has it: names instead of short forms, options gathered. Notes the
    origins.
    """
    node = place.named(node)
    if not isinstance(node.value, dict | list) or (not node.value and place.tag is None):
        if key and node.origin is not DEFAULTS:
            origins[key] = node.origin
        return node.plain()
    if isinstance(node.value, list):
        return [_shaped(place.element(i), n, f"{key}.{i}", origins) for i, n in enumerate(node.value)]
    children: Mapping[str, Node] = node.value
    if place.tag is not None and place.tag not in children and place.choice(node) is not None:
        children = {place.tag: Node(place.choice(node), DEFAULTS, -1), **children}
    found = {
        name: _shaped(place.child(name, node), child, f"{key}.{name}" if key else name, origins)
        for name, child in children.items()
    }
    section = place.section(node)
    if section not in FLATTENED:
        return found
    own = {name: value for name, value in found.items() if name in place.keys(node) and name != "options"}
    return {**own, "options": {name: value for name, value in found.items() if name not in own}}


def _problem(error: Any, tree: Node) -> tuple[ConfigError, list[str]]:
    """Puts one of pydantic's errors in our words; returns it with the path to it as far as the tree goes."""
    steps = _steps(error["loc"], tree)
    key = ".".join(step.name for step in steps)
    there = [(step.name, step.node) for step in steps if step.node is not None]
    path = [name for name, _ in there]
    if path and error["type"] == "missing":
        last = steps[-1].name
        lacks = f"element {last}" if last.isdigit() else f"the key '{last}', which has no default"
        message = f"{'.'.join(path)} lacks {lacks}"
    elif error["type"] == "unexpected_keyword_argument":
        message = unknown(key, steps[-1].above, steps[-2].node if len(steps) > 1 else tree)
    else:
        message = _wrong(error, key, steps[-1])
    problem = ConfigError(f"{there[-1][1].origin.where}: {message}", key=key)
    # An element cannot be taken out of a list: the others would get other keys.
    lists = (i for i, (_, node) in enumerate(there) if isinstance(node.value, list))
    return problem, path[: next(lists, len(path)) + 1]


@dataclass(frozen=True)
class _Step:
    """One key on the way to a value."""

    name: str
    place: SchemaPlace
    node: Node | None
    """None: nothing is set here."""
    above: SchemaPlace
    """The place that has this key."""
    within: type
    """The section there."""


def _steps(location: Sequence[str | int], tree: Node) -> list[_Step]:
    place, node = ROOT, typing.cast("Node | None", tree)
    section: type = Config
    steps: list[_Step] = []
    parts = iter(map(str, location))
    for part in parts:
        if len(place.sections) > 1:  # pydantic names the section that was chosen; it is no key
            part = next(parts)
        if place.is_list:
            below = place.element(int(part))
            elements = node.value if node is not None and isinstance(node.value, list) else []
            child = elements[int(part)] if int(part) < len(elements) else None
        else:
            section = place.section(node) or section
            below = place.child(part, node)
            child = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
        steps.append(_Step(part, below, child, place, section))
        place, node = below, child
    return steps


# pydantic's words for what JSON has, where ours are YAML's.
_WANTED = {
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
}


def _wrong(error: Any, key: str, step: _Step) -> str:
    """Says `rollout.n must be an integer, got string 'four'`, and what the key means."""
    kind, value = error["type"], error["input"]
    choices: Sequence[Any]
    hint = ""
    if kind.startswith("union_tag"):
        tag = step.place.tag
        choices = [choice for section in step.place.sections for choice in choices_of(section)]
        if kind == "union_tag_not_found":
            return f"{key} lacks the key '{tag}', one of {', '.join(choices)}"
        value = value[tag]
        wanted, hint = f"one of {', '.join(choices)}", _near(value, choices)
    elif kind == "literal_error":
        choices = typing.get_args(step.place.kind)
        wanted, hint = f"one of {', '.join(map(shown, choices))}", _near(value, choices)
    elif kind in _WANTED:
        wanted = _WANTED[kind]
        if step.place.tag is not None:
            wanted = f"a name, or a mapping with `{step.place.tag}` and options"
        if kind == "string_type" and isinstance(value, int | float):
            hint = "; put it in quotes"
    else:
        wanted = error["msg"].removeprefix("Input should be ").removeprefix("Value error, must be ")
        if wanted == error["msg"]:
            return f"{key}: {wanted}"
    about = meaning(step.within, step.name).rstrip(".")
    return f"{key} must be {wanted}, got {describe(value)}{hint}{about and f' ({about})'}"


def _near(value: Any, choices: Sequence[Any]) -> str:
    near = difflib.get_close_matches(str(value), map(str, choices), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _without(node: Node, path: Sequence[str]) -> Node:
    """Returns the tree without what is at `path`; unchanged where that is gone already."""
    rest = dict(node.value)
    if len(path) == 1:
        rest.pop(path[0], None)
    elif path[0] in rest and isinstance(rest[path[0]].value, dict):
        rest[path[0]] = _without(rest[path[0]], path[1:])
    return Node(rest, node.origin, node.layer)
