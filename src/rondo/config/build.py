"""From a tree of YAML nodes to the typed schema: unknown keys, wrong types, missing values are errors."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from rondo.config.schema import Config, FunctionConfig, RewardFunctionConfig
from rondo.config.tree import Node, Origin, describe
from rondo.errors import ConfigError

# Dataclasses with flattened options: every key that is no field of theirs is an option; a string is the name.
FLATTENED = (FunctionConfig, RewardFunctionConfig)


def build(tree: Node) -> tuple[Config, dict[str, Origin]]:
    """The configuration, and the origin of every leaf that was set. Raises ConfigError."""
    origins: dict[str, Origin] = {}
    config = _value(Config, tree, "", origins, Config())
    return typing.cast(Config, config), origins


@cache
def fields_of(schema: type) -> Mapping[str, Any]:
    """Field name to resolved type."""
    return typing.get_type_hints(schema)


def unwrap(kind: Any) -> tuple[Any, bool]:
    """(the type without None, whether None is allowed)."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        others = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        assert len(others) == 1, f"the schema uses unions with None only, not {kind}"
        return others[0], True
    return kind, False


def is_section(kind: Any) -> bool:
    """A dataclass of the schema."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def element_type(kind: Any, index: int) -> Any:
    """Of a tuple type: what stands at `index`."""
    args = typing.get_args(kind)
    return args[0] if args[-1] is Ellipsis else args[min(index, len(args) - 1)]


@cache
def schema_keys() -> tuple[str, ...]:
    """Every dotted key, sections included; list elements are `0`."""
    return tuple(_walk(Config, ""))


def _walk(kind: Any, prefix: str) -> Iterator[str]:
    kind, _ = unwrap(kind)
    if typing.get_origin(kind) is tuple:
        if is_section(unwrap(element_type(kind, 0))[0]):
            yield from _walk(element_type(kind, 0), f"{prefix}.0")
    elif is_section(kind):
        for name, field_type in fields_of(kind).items():
            if kind in FLATTENED and name == "options":
                continue
            key = f"{prefix}.{name}" if prefix else name
            yield key
            yield from _walk(field_type, key)


def _value(kind: Any, node: Node, key: str, origins: dict[str, Origin], default: Any = None) -> Any:
    """default: what stands here when nothing is set; a section starts from it (critic.optimizer's lr)."""
    kind, optional = unwrap(kind)
    if node.value is None and optional:
        origins[key] = node.origin
        return None
    if is_section(kind):
        return _section(kind, node, key, origins, default)
    shape = typing.get_origin(kind)
    if shape is tuple:
        return _tuple(kind, node, key, origins)
    origins[key] = node.origin
    if shape is Literal:
        choices = typing.get_args(kind)
        if not any(type(node.value) is type(choice) and node.value == choice for choice in choices):
            names = tuple(str(choice).lower() if isinstance(choice, bool) else choice for choice in choices)
            raise _wrong(node, key, "one of " + ", ".join(names), optional, _near(node.value, names))
        return node.value
    if getattr(shape, "__name__", "") == "Mapping":
        del origins[key]
        return _mapping(node, key, optional, origins)
    if kind is Any:
        return node.plain()
    return _scalar(kind, node, key, optional)


def _section(kind: Any, node: Node, key: str, origins: dict[str, Origin], default: Any) -> Any:
    if kind in FLATTENED and isinstance(node.value, str):
        node = Node({"name": node}, node.origin, node.layer)
    if not isinstance(node.value, dict):
        wanted = "a name, or a mapping with `name` and options" if kind in FLATTENED else "a mapping"
        raise _wrong(node, key or "the recipe", wanted, False)
    hints = fields_of(kind)
    defaults = _defaults(kind, default)
    values: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, child in node.value.items():
        child_key = f"{key}.{name}" if key else name
        if kind in FLATTENED and name == "options":
            raise ConfigError(
                f"{child.origin.where}: {child_key}: the options of a function are written beside its name: "
                f"{{name: {getattr(node.value.get('name'), 'value', '…')}, option: value}}"
            )
        if name in hints:
            values[name] = _value(hints[name], child, child_key, origins, defaults.get(name))
        elif kind in FLATTENED:
            options[name] = child.plain()
            origins.update((leaf_key, leaf.origin) for leaf_key, leaf in child.leaves(child_key))
        else:
            raise ConfigError(f"{child.origin.where}: unknown key '{child_key}'{_suggest(child_key, kind)}")
    missing = [name for name in hints if name not in values and name not in defaults]
    if missing:
        raise ConfigError(f"{node.origin.where}: {key} lacks the key '{missing[0]}', which has no default")
    if kind in FLATTENED:
        values["options"] = options
    if not node.value and key:
        origins[key] = node.origin
    return kind(**{**defaults, **values})


def _defaults(kind: Any, default: Any) -> dict[str, Any]:
    """Field values of the section when nothing is set: those of `default`, or else the schema's."""
    if isinstance(default, kind):
        return {field.name: getattr(default, field.name) for field in dataclasses.fields(kind)}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _tuple(kind: Any, node: Node, key: str, origins: dict[str, Origin]) -> tuple[Any, ...]:
    args = typing.get_args(kind)
    fixed = args[-1] is not Ellipsis
    wanted = f"a list of {len(args)} {_name(args[0])}s" if fixed else f"a list of {_name(args[0])}s"
    if not isinstance(node.value, list) or (fixed and len(node.value) != len(args)):
        length = f" of {len(node.value)}" if isinstance(node.value, list) else ""
        raise _wrong(node, key, wanted, False, got=f"{describe(node.plain())}{length}")
    if not node.value:
        origins[key] = node.origin
    return tuple(
        _value(element_type(kind, i), child, f"{key}.{i}", origins) for i, child in enumerate(node.value)
    )


def _mapping(node: Node, key: str, optional: bool, origins: dict[str, Origin]) -> dict[str, Any]:
    if not isinstance(node.value, dict):
        raise _wrong(node, key, "a mapping", optional)
    origins.update((leaf_key, leaf.origin) for leaf_key, leaf in node.leaves(key))
    return typing.cast(dict[str, Any], node.plain())


def _scalar(kind: type, node: Node, key: str, optional: bool) -> Any:
    value = node.value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    if not isinstance(value, bool):
        if kind is int and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
            return int(value)  # 1e3 is a number of steps as good as 1000
        if kind is float and isinstance(value, int | float):
            return float(value)
    hint = ""
    if kind is str and not isinstance(value, dict | list | None):
        hint = "; put it in quotes"
    raise _wrong(node, key, _name(kind, article=True), optional, hint)


def _wrong(node: Node, key: str, wanted: str, optional: bool, hint: str = "", got: str = "") -> ConfigError:
    nullable = " or null" if optional else ""
    found = got or describe(node.plain())
    return ConfigError(f"{node.origin.where}: {key} must be {wanted}{nullable}, got {found}{hint}")


def _name(kind: Any, article: bool = False) -> str:
    kind, _ = unwrap(kind)
    if kind is bool:
        return "true or false"
    name = {int: "integer", float: "number", str: "string"}.get(kind, "mapping")
    return f"{'an' if name == 'integer' else 'a'} {name}" if article else name


def _near(value: Any, choices: tuple[Any, ...]) -> str:
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _suggest(key: str, section: type) -> str:
    """The nearest valid keys: a sibling, the same name elsewhere in the schema, or something near."""
    prefix, _, last = key.rpartition(".")
    siblings = list(fields_of(section))
    everywhere = [k for k in schema_keys() if ".0." not in k]

    def full(name: str) -> str:
        return f"{prefix}.{name}" if prefix else name

    found = [full(name) for name in difflib.get_close_matches(last, siblings, n=1, cutoff=0.75)]
    if not found:
        same = [k for k in everywhere if k.rpartition(".")[2] == last]
        below = [k for k in same if prefix and k.startswith(prefix + ".")]
        found = (below or same)[:3]
    if not found:
        found = [full(name) for name in difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)]
    if not found:
        lasts = sorted({k.rpartition(".")[2] for k in everywhere})
        near = difflib.get_close_matches(last, lasts, n=1, cutoff=0.75)
        found = [k for k in everywhere if near and k.rpartition(".")[2] == near[0]][:3]
    if found:
        others = f" (or {', '.join(repr(k) for k in found[1:])})" if found[1:] else ""
        return f"; did you mean '{found[0]}'{others}?"
    return f". Keys of {prefix or 'a recipe'}: {', '.join(siblings)}"
