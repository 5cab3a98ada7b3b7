"""Loading: YAML files merged in order, then `key.sub=value` arguments, translated, typed and validated.

Imports neither torch nor ray nor transformers, so that errors in a recipe are instant.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.config.build import FLATTENED, build, element_type, fields_of, is_section, unwrap
from rondo.config.schema import Config
from rondo.config.tree import RECIPES, Node, Origin, read_argument, read_file
from rondo.config.validate import validate
from rondo.config.verl import Assignment, translate
from rondo.errors import ConfigError

INCLUDE = "include"


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where it came from.

    origins: dotted key to origin, of the leaves that were set (list elements are `data.train.0.path`); all
    others have their defaults. files: as given, in order. notes: keys in verl's spelling that have no meaning
    here, each with the reason; whoever starts the run shows them once.
    """

    config: Config
    origins: Mapping[str, Origin]
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def load(files: Sequence[str], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Merge `files` in order, then `overrides`, into one validated configuration.

    A file is a path, or the name of a recipe that rondo ships (`quickstart`). Its top-level
    `include: other.yaml` (or a list; relative to the file, or shipped) is merged before the file itself.
    Mappings merge deeply, lists and scalars replace; `key.0.sub=value` reaches into a list. The options of a
    function belong to its name: another name replaces them all. Values of overrides are YAML (`lr=1e-4`,
    `stop=[a, b]`). Keys in verl's spelling are translated. Raises ConfigError, which names key, file and line
    or argument, and the nearest valid key or the remedy.
    """
    tree = Node({}, Origin("defaults"), -1)
    files = [recipe_path(file) for file in files]
    layers = [path for file in files for path in _with_includes(file, ())]
    for layer, path in enumerate(layers):
        tree = _merge(Config, tree, _without_include(read_file(path, layer)))
    for layer, argument in enumerate(overrides, start=len(layers)):
        parts, value = read_argument(argument, layer)
        tree = _override(Config, tree, parts, value, "")
    tree, assignments, notes = translate(tree)
    for assignment in assignments:
        tree = _assign(tree, assignment)
    config, origins = build(tree)
    validate(config, origins)
    return LoadedConfig(config, origins, tuple(files), notes)


def recipe_path(name: str) -> str:
    """The file of the recipe `name` that rondo ships; `name` itself where there is none, or a file here."""
    shipped = RECIPES / f"{name}.yaml"
    return str(shipped) if Path(name).name == name and shipped.is_file() and not Path(name).exists() else name


def _with_includes(path: str, including: tuple[str, ...]) -> list[str]:
    """`path` preceded by what it includes, outermost first. Raises ConfigError for a circle."""
    if path in including:
        raise ConfigError(
            f"{path}: includes itself by way of {' -> '.join([*including, path])}; break the circle"
        )
    node = read_file(path, 0)
    listed = node.value.get(INCLUDE) if isinstance(node.value, dict) else None
    if listed is None:
        return [path]
    names = listed.value if isinstance(listed.value, list) else [listed]
    found: list[str] = []
    for name in names:
        if not isinstance(name.value, str):
            raise ConfigError(
                f"{name.origin.where}: {INCLUDE} is a file name or a list of them, got {name.value!r}"
            )
        beside = Path(path).parent / name.value
        other = str(beside) if beside.is_file() else recipe_path(name.value)
        if not Path(other).is_file():
            raise ConfigError(f"{name.origin.where}: {INCLUDE}: no such file: {beside} (relative to {path})")
        found += _with_includes(other, (*including, path))
    return [*found, path]


def _without_include(node: Node) -> Node:
    if not isinstance(node.value, dict):
        return node
    return Node({key: child for key, child in node.value.items() if key != INCLUDE}, node.origin, node.layer)


def _merge(kind: Any, old: Node | None, new: Node) -> Node:
    """`new` over `old`, guided by the schema where it has one for this place (kind None: an open mapping)."""
    kind = unwrap(kind)[0]
    if kind in FLATTENED:
        new, old = _named(new), None if old is None else _named(old)
        if old is not None and isinstance(old.value, dict) and isinstance(new.value, dict):
            name, old_name = new.value.get("name"), old.value.get("name")
            if name is not None and old_name is not None and name.value != old_name.value:
                return new
    if not isinstance(new.value, dict):
        return new
    merged = dict(old.value) if old is not None and isinstance(old.value, dict) else {}
    for key, child in new.value.items():
        merged[key] = _merge(_child_type(kind, key), merged.get(key), child)
    return Node(merged, new.origin, new.layer)


def _override(kind: Any, old: Node | None, parts: Sequence[str], value: Node, done: str) -> Node:
    """`value` at the place `parts` below `old`; done: the dotted key of `old`, for messages."""
    if not parts:
        return _merge(kind, old, value)
    kind = unwrap(kind)[0]
    head, rest = parts[0], parts[1:]
    if kind in FLATTENED and old is not None:
        old = _named(old)
        if head == "name" and not rest:
            return _merge(kind, old, Node({"name": value}, value.origin, value.layer))
    key = f"{done}.{head}" if done else head
    if (old is not None and isinstance(old.value, list)) or typing.get_origin(kind) is tuple:
        return _override_element(kind, old, head, rest, value, done)
    if old is not None and not isinstance(old.value, dict | None) and kind is None:
        raise ConfigError(f"{value.origin.where}: {done} is no mapping, so there is no {key}")
    merged = dict(old.value) if old is not None and isinstance(old.value, dict) else {}
    merged[head] = _override(_child_type(kind, head), merged.get(head), rest, value, key)
    origin = old.origin if old is not None and isinstance(old.value, dict) else value.origin
    return Node(merged, origin, value.layer)


def _override_element(
    kind: Any, old: Node | None, head: str, rest: Sequence[str], value: Node, done: str
) -> Node:
    elements = list(old.value) if old is not None and isinstance(old.value, list) else []
    if not head.isdigit():
        raise ConfigError(
            f"{value.origin.where}: {done} is a list; write {done}.0.{'.'.join([head, *rest])}=… for its "
            f"first element, or {done}=[…] for all"
        )
    index = int(head)
    if index >= len(elements):
        there = f"ends with element {len(elements) - 1}" if elements else "is empty"
        raise ConfigError(f"{value.origin.where}: {done} {there}; set the whole list with {done}=[…]")
    child_type = element_type(kind, index) if typing.get_origin(kind) is tuple else None
    elements[index] = _override(child_type, elements[index], rest, value, f"{done}.{head}")
    assert old is not None
    return Node(elements, old.origin, value.layer)


def _assign(tree: Node, assignment: Assignment) -> Node:
    """A translated key, unless a later layer has set ours."""
    parts = assignment.key.split(".")
    node: Node | None = tree
    for part in parts:
        node = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
    value = assignment.value
    if node is not None and node.layer == value.layer and node.origin != value.origin:
        raise ConfigError(
            f"{value.origin.where}: sets {assignment.key} in verl's spelling, and {node.origin.where} sets "
            "it "
            "in rondo's; keep one of them"
        )
    if node is not None and node.layer > value.layer:
        return tree
    return _override(Config, tree, parts, value, "")


def _named(node: Node) -> Node:
    """The shorthand `grpo` as {name: grpo}."""
    return Node({"name": node}, node.origin, node.layer) if isinstance(node.value, str) else node


def _child_type(kind: Any, key: str) -> Any:
    return fields_of(kind).get(key) if is_section(kind) else None
