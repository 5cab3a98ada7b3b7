"""What the schema says about a place in a recipe: what may stand there, and which keys it has."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rondo.config.schema import (
    CoefficientConfig,
    Config,
    EnvironmentConfig,
    FilterConfig,
    FunctionConfig,
    RewardFunctionConfig,
    SglangEngineConfig,
    TermConfig,
    ToolConfig,
    VllmEngineConfig,
)
from rondo.config.schema.types import choices_of, fields_of
from rondo.config.tree import Node, Origin

# Every key of these that is no field of theirs is an option, and stands beside the name.
FLATTENED = (
    *(FunctionConfig, FilterConfig, CoefficientConfig, TermConfig),
    *(RewardFunctionConfig, ToolConfig, EnvironmentConfig),
    *(VllmEngineConfig, SglangEngineConfig),
)
DEFAULTS = Origin("default")


@dataclass(frozen=True)
class SchemaPlace:
    """What may stand at one key."""

    kind: Any
    """The type; None: anything, as in an open mapping."""
    default: Any = None
    """What stands there when nothing is set."""

    @property
    def sections(self) -> tuple[type, ...]:
        """The sections of which one stands here: none for a value, a list or an open mapping."""
        union = typing.get_origin(self.kind) in (types.UnionType, typing.Union)
        kinds = typing.get_args(self.kind) if union else (self.kind,)
        return tuple(kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind))

    @property
    def tag(self) -> str | None:
        """The key that chooses: `name` of a function, the first key of sections that exclude each other.

        A section without others beside it has one, too, where its first field lists what may stand there.
        """
        sections = self.sections
        if not sections:
            return None
        name, kind = next(iter(fields_of(sections[0]).items()))
        one_of = typing.get_origin(kind) is typing.Literal
        return name if len(sections) > 1 or one_of or sections[0] in FLATTENED else None

    def section(self, node: Node | None) -> type | None:
        """Returns the section that `node` is, or would be."""
        if len(self.sections) < 2:
            return self.sections[0] if self.sections else None
        chosen = self.choice(node)
        return next((s for s in self.sections if chosen in choices_of(s)), None)

    def choice(self, node: Node | None) -> Any:
        """Returns the value of the tag in `node`, or else by default; None: nothing is chosen."""
        assert self.tag is not None
        named = self.named(node) if node is not None else None
        if named is not None and isinstance(named.value, dict) and self.tag in named.value:
            return named.value[self.tag].value
        return getattr(self.default, self.tag, None)

    def differ(self, old: Node | None, new: Node) -> bool:
        """Says whether the two choose different functions, or sections that exclude each other."""
        if len(self.sections) > 1:
            return self.section(old) is not self.section(new)
        return self.tag is not None and self.choice(old) != self.choice(new)

    def named(self, node: Node) -> Node:
        """Spells the short form `grpo` out, {name: grpo}."""
        if self.tag is None or not isinstance(node.value, str):
            return node
        return Node({self.tag: node}, node.origin, node.layer)

    def child(self, key: str, node: Node | None = None) -> SchemaPlace:
        """Returns the place at `key` below this one. node: what stands here, where that decides."""
        if typing.get_origin(self.kind) is Mapping:  # its keys are the user's, its values may be sections
            return SchemaPlace(_not_none(typing.get_args(self.kind)[1]))
        section = self.section(node)
        if section is None or key not in fields_of(section):
            return ANYTHING
        default = section.__pydantic_fields__[key].get_default(call_default_factory=True)  # type: ignore[attr-defined]
        if isinstance(self.default, section):
            default = getattr(self.default, key)
        return SchemaPlace(_not_none(fields_of(section)[key]), default)

    def keys(self, node: Node | None = None) -> tuple[str, ...]:
        """Returns the keys of the section that `node` chooses."""
        section = self.section(node)
        return tuple(fields_of(section)) if section is not None else ()

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    def element(self, index: int) -> SchemaPlace:
        """Returns the place of an element of a list."""
        kinds = typing.get_args(self.kind) if self.is_list else (None, ...)
        return SchemaPlace(_not_none(kinds[0] if kinds[-1] is ... else kinds[min(index, len(kinds) - 1)]))


ANYTHING = SchemaPlace(None)
ROOT = SchemaPlace(Config, Config())


def _not_none(kind: Any) -> Any:
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return kind
    others = tuple(other for other in typing.get_args(kind) if other is not type(None))
    return others[0] if len(others) == 1 else typing.Union[others]  # noqa: UP007


def has_unknown_keys(node: Node, place: SchemaPlace = ROOT) -> bool:
    """Says whether the tree has a key that is none of the schema's."""
    if not isinstance(node.value, dict) or not place.sections:
        return False
    known = place.keys(node)
    return any(
        (key not in known and place.section(node) not in FLATTENED)
        or has_unknown_keys(child, place.child(key, node))
        for key, child in node.value.items()
    )


def meaning(section: type, name: str) -> str:
    """Returns the text below a field in the schema, or below the field that it overrides."""
    texts = (_texts(base).get(name) for base in section.__mro__[:-1])
    return next((text for text in texts if text), "")


@cache
def _texts(section: type) -> Mapping[str, str]:
    found: dict[str, str] = {}
    # Python keeps no strings below fields: they are read from the source.
    (definition,) = ast.parse(inspect.getsource(section)).body
    for field, text in itertools.pairwise(typing.cast(ast.ClassDef, definition).body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                found[name] = " ".join(said.split())
    return found


@cache
def schema_keys() -> tuple[str, ...]:
    """Returns every dotted key, sections included; list elements are `0`."""
    return tuple(dict.fromkeys(_walk(ROOT, "")))


def _walk(place: SchemaPlace, prefix: str) -> Iterator[str]:
    if place.is_list:
        if place.element(0).sections:
            yield from _walk(place.element(0), f"{prefix}.0")
    for section in place.sections:
        for name, kind in fields_of(section).items():
            if section in FLATTENED and name == "options":
                continue
            key = f"{prefix}.{name}" if prefix else name
            yield key
            yield from _walk(SchemaPlace(_not_none(kind)), key)


def within(key: str, keys: Collection[str]) -> bool:
    """Says whether a dotted key is one of `keys`, or below one."""
    return any(key == other or key.startswith(other + ".") for other in keys)


def unknown(key: str, place: SchemaPlace, node: Node | None) -> str:
    """Says of a key that the section at `place` does not have: who has it, or the nearest one."""
    prefix, _, last = key.rpartition(".")
    owners = [section for section in place.sections if last in fields_of(section)]
    if owners:
        names = " or ".join(choice for section in owners for choice in choices_of(section))
        tag = prefix if place.tag == "name" else f"{prefix}.{place.tag}"
        return f"{key} is for {tag}={names}, and not for {place.choice(node)}"
    return f"unknown key '{key}'{_nearest(key, prefix, last, place.keys(node))}"


def elsewhere(name: str) -> str:
    """Continues a message about a name with what TRL or OpenRLHF have of it, and the key here; empty for a
    name that they do not have.
    """
    return "; ".join(["", *_names_elsewhere().get(name, ())])


@cache
def _names_elsewhere() -> Mapping[str, Sequence[str]]:
    text = Path(__file__).with_name("elsewhere.tsv").read_text(encoding="utf-8")
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            library, name, keys, note = line.split("\t")
            named = " and ".join(repr(key) for key in keys.split())
            here = "has no key here" if keys == "-" else f"is {named} here"
            said.setdefault(name, []).append(f"{library}'s {name} {here}{note and f': {note}'}")
    return said


def _nearest(key: str, prefix: str, last: str, siblings: Sequence[str]) -> str:
    """Suggests a known key: of a name of another library ours, else a sibling like it, else the same name
    elsewhere, else a similar one.
    """
    everywhere = [k for k in schema_keys() if ".0." not in k]
    same = [k for k in everywhere if k.rpartition(".")[2] == last]
    theirs = elsewhere(last)
    # In a section it may be our own name of that key, in the wrong place.
    if theirs and not (prefix and any(repr(k) in theirs for k in same)):
        return theirs

    def full(names: list[str]) -> list[str]:
        return [f"{prefix}.{name}" if prefix else name for name in names]

    # From what is surely meant to what is only like it: 0.75 is about one letter wrong in four, 0.6 two in
    # five.
    found = full(difflib.get_close_matches(last, siblings, n=1, cutoff=0.75))
    if not found:
        below = [k for k in same if prefix and k.startswith(prefix + ".")]
        found = (below or same)[:3]
    if not found:
        found = full(difflib.get_close_matches(last, siblings, n=1, cutoff=0.6))
    if not found:
        near = difflib.get_close_matches(last, {k.rpartition(".")[2] for k in everywhere}, n=1, cutoff=0.75)
        found = [k for k in everywhere if near and k.rpartition(".")[2] == near[0]][:3]
    if not found:
        return f". Keys of {prefix or 'a recipe'}: {', '.join(siblings)}"
    others = f" (or {', '.join(repr(k) for k in found[1:])})" if found[1:] else ""
    return f"; did you mean '{found[0]}'{others}?"
