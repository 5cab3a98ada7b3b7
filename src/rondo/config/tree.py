"""YAML text as a tree in which every value remembers where it was written. No schema here.

Scalars follow YAML 1.2, not 1.1: `1e-4` is a number; `yes`, `on`, `010`, `1:30`, `1_000`, dates are nothing
special.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rondo.core.errors import ConfigError, half_of_a_pair, is_deep
from rondo.core.masking import masked_settings
from rondo.system.names import offered

INT = re.compile(r"[-+]?[0-9]+$|0x[0-9a-fA-F]+$|0o[0-7]+$")
FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}


BENEATH = -1  # the layer under all files and arguments
# Of one recipe or argument, so that whatever is written there is read or refused in a second.
MOST_BYTES = 1 << 20
MOST_NODES = 20_000  # keys, values and list elements
MOST_LEVELS = 64
MOST_DIGITS = 100  # of an integer; Python reads no more than 4,300


@dataclass(frozen=True)
class Origin:
    """Where a value was written."""

    where: str
    """`recipe.yaml:12` or `argument 'actor.optimizer.lr=1e-4'`."""
    written: bool = True
    """False: another system's default, in force because one of its keys is set."""


@dataclass
class Node:
    """A value (scalar, list of nodes, mapping of nodes) and where it came from."""

    value: Any
    """A scalar, a list of nodes, or a dict of nodes by key."""
    origin: Origin
    """Of this value itself; those below it have their own."""
    layer: int
    """Later files and arguments have higher numbers, another system's defaults have BENEATH. It decides
    between two spellings of one key.
    """

    def plain(self) -> Any:
        """Returns the value without origins: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def at(self, key: str) -> Node | None:
        """Returns what is set at a dotted key; None: nothing."""
        node: Node | None = self
        for part in key.split("."):
            node = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
        return node

    def leaves(self, prefix: str) -> Iterator[tuple[str, Node]]:
        """Yields scalars and empty containers below, with their dotted keys."""
        if self.value and isinstance(self.value, dict | list):
            items = self.value.items() if isinstance(self.value, dict) else enumerate(self.value)
            for key, node in items:
                yield from node.leaves(f"{prefix}.{key}" if prefix else str(key))
        else:
            yield prefix, self


def read_file(path: str, layer: int) -> Node:
    """Reads the tree of a YAML file; an empty file is an empty mapping. Raises ConfigError naming file and
    line.
    """
    _refuse_deletion(path)
    try:
        file = Path(path).expanduser()
        if not file.is_file():
            kind = "is a folder" if file.is_dir() else "does not exist"
            raise ConfigError(f"configuration file {path} {kind}{_near_files(file)}")
        if file.stat().st_size > MOST_BYTES:
            raise ConfigError(
                f"{path}: {file.stat().st_size} bytes, and a recipe has at most {MOST_BYTES}: rows belong in "
                "files of their own, which data.train names"
            )
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); is this a YAML file?") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of a user that does not exist
        raise ConfigError(f"configuration file {cut(path)} cannot be read: {error}") from error
    node = _compose(text, path)
    if node is None:
        return Node({}, Origin(f"{path}:1"), layer)
    tree = _Conversion(path, layer).node(node)
    if not isinstance(tree.value, dict):
        raise ConfigError(
            f"{tree.origin.where}: a recipe is a mapping of sections (model: …, data: …), "
            f"this is a {describe(tree.plain())}"
        )
    return tree


def read_argument(argument: str, layer: int, place: str = "argument") -> tuple[list[str], Node]:
    """Reads `key.sub=value` as (key parts, tree of the value, which is parsed as YAML). place: where it
    stands, if nobody typed it. Raises ConfigError.
    """
    _refuse_deletion(argument)
    key, equals, text = argument.partition("=")
    key = key.strip().lstrip("+")  # Hydra's `+key=value` adds a key; here every key exists already
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(f"{place} '{_shown_argument(argument)}': overrides are written key.sub=value")
    origin = Origin(f"{place} '{_shown_argument(argument)}'")
    try:
        node = _nodes(text)
    except yaml.YAMLError as error:
        detail = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{origin.where}: the value is not valid YAML ({detail}); quote it: {key}='\"…\"'"
        ) from error
    except _TooLargeError as error:
        raise ConfigError(f"{origin.where}: {error}", key=key) from None
    value = Node(None, origin, layer) if node is None else _Conversion(None, layer, origin).node(node, key)
    return key.split("."), value


def _shown_argument(argument: str) -> str:
    return cut(masked_settings(argument))


def _refuse_deletion(argument: str) -> None:
    """Raises ConfigError for Hydra's `~key`, which is no user's home folder."""
    key = argument[1:].partition("=")[0]
    if argument.startswith("~") and "/" not in key and "." in key and not key.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"argument '{_shown_argument(argument)}': a key cannot be deleted; write {key}=null for none, or "
            f"{key}= with another value (`rondo config show` has the defaults)",
            key=key,
        )


def read_value(key: str, value: Any, layer: int, origin: Origin) -> tuple[list[str], Node]:
    """Reads a value of a program as (key parts, tree): mappings, lists and scalars, paths, numpy's scalars.
    Raises ConfigError for anything else.
    """
    if not isinstance(key, str) or not all(key.split(".")):
        raise ConfigError(f"{origin.where}: {key!r} is no key; keys are written key.sub")
    if is_deep(value, MOST_LEVELS):
        raise ConfigError(
            f"{origin.where}: {key} is nested more than {MOST_LEVELS} deep, or holds itself", key=key
        )
    return key.split("."), _of_value(key, value, layer, origin)


def _of_value(key: str, value: Any, layer: int, origin: Origin) -> Node:
    if isinstance(value, Mapping):
        below = {str(name): _of_value(f"{key}.{name}", child, layer, origin) for name, child in value.items()}
        return Node(below, origin, layer)
    if isinstance(value, list | tuple):
        parts = [_of_value(f"{key}.{i}", child, layer, origin) for i, child in enumerate(value)]
        return Node(parts, origin, layer)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if getattr(value, "shape", None) == ():  # numpy's
        value = value.item()
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ConfigError(
            f"{origin.where}: {key} is {type(value).__name__}, which no recipe can hold", key=key
        )
    return Node(value, origin, layer)


def parse_scalar(text: str) -> bool | int | float | str | None:
    """Reads an unquoted YAML 1.2 scalar."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if INT.match(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if FLOAT.match(text):
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    return text


def describe(value: Any) -> str:
    """Names a value as messages do: `string 'abc'`, `integer 3`, `mapping`."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "mapping", list: "list"}
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean {str(value).lower()}"
    if isinstance(value, dict | list):
        return names[type(value)]
    return f"{names.get(type(value), type(value).__name__)} {cut(repr(value))}"


def shown(value: Any) -> str:
    """Returns the value as it is written in a recipe; mappings are cut short."""
    if value is None or isinstance(value, Mapping):
        return "null" if value is None else "{…}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def cut(text: str, length: int = 200) -> str:
    """Returns the text as a message shows it, with an ellipsis for what is too long."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text)} characters)"


class _TooLargeError(Exception):
    """More than a recipe or an argument holds."""


class _Loader(yaml.SafeLoader):
    """Composes nodes only; scalars are resolved by `parse_scalar`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Counts as it goes, so that no more is read than there may be."""
        self._nodes += 1
        self._level += 1
        where = self.peek_event().start_mark.line + 1
        if self._nodes > MOST_NODES:
            raise _TooLargeError(f"more than {MOST_NODES} keys and values up to line {where}")
        if self._level > MOST_LEVELS:
            raise _TooLargeError(f"line {where} is nested more than {MOST_LEVELS} deep")
        try:
            return super().compose_node(parent, index)
        finally:
            self._level -= 1


@functools.lru_cache(maxsize=64)
def _nodes(text: str) -> yaml.Node | None:
    """Kept, for nobody changes them: a start reads its recipe several times, and many recipes include one."""
    return yaml.compose(text, Loader=_Loader)  # type: ignore[no-any-return]


def _compose(text: str, path: str) -> yaml.Node | None:
    try:
        return _nodes(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        context = f" ({error.context})" if error.context else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}{context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except _TooLargeError as error:
        raise ConfigError(f"{path}: {error}") from None


class _Conversion:
    """Makes YAML's nodes ours. path: of the file, for line numbers; origin: of an argument, for all below."""

    def __init__(self, path: str | None, layer: int, origin: Origin | None = None) -> None:
        self._path = path
        self._layer = layer
        self._origin = origin
        self._made = 0
        self._above: list[yaml.Node] = []
        """Those that are being made: an alias of one of them would never end."""

    def node(self, node: yaml.Node, key: str = "") -> Node:
        """Returns `node` with all below. key: the dotted one. Raises ConfigError."""
        here = self._place(node)
        self._made += 1
        if node in self._above:
            raise _wrong(here, key, "holds itself, by an alias (*)")
        if self._made > MOST_NODES:  # an alias stands for all that it names
            raise _wrong(here, key, f"is beyond {MOST_NODES} keys and values, with what aliases (*) repeat")
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, here, key), here, self._layer)
        self._above.append(node)
        value: dict[str, Node] | list[Node]
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node, key)
        else:
            value = self._list(node, key)
        self._above.pop()
        return Node(value, here, self._layer)

    def _place(self, node: yaml.Node) -> Origin:
        return self._origin or Origin(f"{self._path}:{node.start_mark.line + 1}")

    def _scalar(self, node: yaml.ScalarNode, here: Origin, key: str) -> bool | int | float | str | None:
        text: str = node.value
        if node.style in ("'", '"', "|", ">"):
            if half_of_a_pair(text) is not None:
                raise _wrong(here, key, f"is no text, with half of a surrogate pair in it: {text!a}")
            return text
        if len(text) > MOST_DIGITS and INT.match(text):
            raise _wrong(here, key, f"is an integer of {len(text)} digits; none has more than {MOST_DIGITS}")
        value = parse_scalar(text)
        if value != value:
            raise _wrong(here, key, "must be a number, got .nan, which is none")
        return value

    def _list(self, node: yaml.Node, key: str) -> list[Node]:
        return [self.node(child, f"{key}.{i}" if key else str(i)) for i, child in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Node]:
        mapping: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place.where}: a key must be a plain word, not a list or mapping")
            name = key_node.value
            if half_of_a_pair(name) is not None:
                raise ConfigError(f"{place.where}: key {name!a} is no text")
            if name in mapping:
                first = f"(first at {mapping[name].origin.where})"
                raise ConfigError(f"{place.where}: key '{name}' is set twice in one mapping {first}")
            child = self.node(value_node, f"{key}.{name}" if key else name)
            child.origin = place  # a value counts as written where its key is
            mapping[name] = child
        return mapping


def _wrong(here: Origin, key: str, problem: str) -> ConfigError:
    return ConfigError(f"{here.where}: {key or 'the recipe'} {problem}", key=key or None)


def _near_files(file: Path) -> str:
    """Says what may have been meant instead of a file that is not there."""
    folder = file if file.is_dir() else file.parent
    if folder == Path() and file.suffix not in (".yaml", ".yml"):
        shipped = difflib.get_close_matches(file.name, offered("recipes"), n=1)
        meant = f"; did you mean the recipe {shipped[0]}?" if shipped else ""
        return f"{meant or '; there is no recipe of that name.'} A setting is written key.sub=value"
    names = sorted(p.name for p in folder.glob("*.yaml")) if folder.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=3)
    if near:
        return f"; did you mean {' or '.join(str(folder / name) for name in near)}?"
    listed = ", ".join(names[:12])
    return f"; {folder}/ has: {listed}" if names else " (paths are relative to the working directory)"
