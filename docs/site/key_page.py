"""The index of every key of a recipe, made of its JSON Schema (src/rondo/recipes/schema.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).resolve().parents[2] / "src" / "rondo" / "recipes" / "schema.json"
HEAD = """# Every key

All keys of a recipe, with what may stand there, the default and a sentence for each. It is made of the same
schema as `rondo config schema`, by which editors complete recipes. `rondo config show RECIPE` prints the keys
of a recipe with the place that set each. How recipes and overrides go together: [configuration](config.md).

`[]` stands for a place in a list, `<name>` for a name of your own. Where a key takes a section of several
kinds, each kind has its table, and the key that chooses (`name` or `type`) can be written alone:
`rollout.engine=vllm`.
"""


@dataclass(frozen=True)
class Key:
    """A key of a section."""

    name: str
    kind: str
    default: str
    about: str


@dataclass(frozen=True)
class Section:
    """A mapping with known keys, at a place in a recipe."""

    path: str
    """Empty: the recipe itself."""
    definition: str
    about: str
    keys: tuple[Key, ...] = ()
    options: bool = False
    """Other keys are options of a function."""
    same_as: str | None = None
    """The place at which a section of this kind was listed before."""
    choice: str | None = None
    """`name: vllm` of a section that is one of several."""
    inside: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(path, definition) of what stands in it."""


@cache
def sections() -> tuple[Section, ...]:
    """Returns the sections in the order of the schema, what stands in one behind it."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    listed: dict[str, str] = {}
    return tuple(_walk("", "", schema, schema["$defs"], listed, several=False))


def key_anchors() -> dict[str, str]:
    """Returns the anchor on the page of each key that a recipe may write: `actor.optimizer.lr`."""
    anchors: dict[str, str] = {}
    by_path: dict[str, list[Section]] = {}
    for section in sections():
        by_path.setdefault(section.path, []).append(section)
        for key in section.keys:
            name = _join(section.path, key.name)
            anchors.setdefault(name, _anchor(_headings().get(name, name)))
    # critic.optimizer.lr stands where the keys of its section do: at actor.optimizer.lr.
    for path, alike in list(by_path.items()):
        for section in alike:
            first = section.same_as
            if first is None:
                continue
            for key, anchor in list(anchors.items()):
                if key.startswith(first + "."):
                    anchors.setdefault(path + key.removeprefix(first), anchor)
    return anchors


def key_page() -> str:
    """Returns the page."""
    parts, headed, seen = [HEAD], set[str](), set[str]()
    for section in sections():
        level = "##" if "." not in section.path else "###"
        if section.path and section.path not in headed:
            parts.append(f"{level} `{section.path}` {{#{_anchor(section.path)}}}\n")
        elif not section.path:
            parts.append("## A recipe\n")
        headed.add(section.path)
        if section.same_as is not None:
            parts.append(
                f"{section.about} Its keys are those of [`{section.same_as}`](#{_anchor(section.same_as)}).\n"
            )
            continue
        chosen = "" if section.choice is None else f"**`{section.choice}`** – "
        parts.append(chosen + section.about + "\n")
        if section.keys:
            lines = ["| key | what may stand there | default | |", "|---|---|---|---|"]
            lines += [_row(section.path, key, seen) for key in section.keys]
            parts.append("\n".join(lines) + "\n")
        if section.options:
            parts.append("Further keys are options of the function that is named.\n")
    return "\n".join(parts)


def _row(path: str, key: Key, seen: set[str]) -> str:
    name = _join(path, key.name)
    below = _headings().get(name)
    if below is not None:  # a heading has the anchor
        written = f"[`{key.name}`](#{_anchor(below)})"
    else:
        written = f"`{key.name}`" + ("" if name in seen else f"{{#{_anchor(name)}}}")
    seen.add(name)
    return f"| {written} | {_cell(key.kind)} | {_cell(key.default)} | {_cell(key.about)} |"


@cache
def _headings() -> dict[str, str]:
    """Returns the heading of what stands at a key: that of `data.train[]` for `data.train`."""
    found: dict[str, str] = {}
    for section in sections():
        found.setdefault(re.split(r"\[|\.<", section.path)[0], section.path)
    return found


def _walk(
    path: str,
    definition: str,
    written: Mapping[str, Any],
    known: Mapping[str, Any],
    listed: dict[str, str],
    *,
    several: bool,
) -> Iterator[Section]:
    about = written.get("description", "")
    if definition and definition in listed and listed[definition] != path:
        yield Section(path, definition, about, same_as=listed[definition], choice=_choice(written, several))
        return
    keys, inside = [], []
    for name, value in written["properties"].items():
        keys.append(
            Key(name, _kind(value, known), _default(value, written, name), value.get("description", ""))
        )
        inside += _inside(_join(path, name), value)
    if definition:
        listed[definition] = path
    yield Section(
        path,
        definition,
        about,
        tuple(keys),
        options=bool(written.get("additionalProperties")),
        choice=_choice(written, several),
    )
    for where, names in _together(inside).items():
        for name in names:
            yield from _walk(where, name, known[name], known, listed, several=len(names) > 1)


def _together(inside: list[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for where, name in inside:
        if name not in places.setdefault(where, []):
            places[where].append(name)
    return places


def _inside(path: str, value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (path, definition) of the sections that may stand at a key."""
    found = []
    if "$ref" in value:
        found.append((path, value["$ref"].rpartition("/")[2]))
    for one in (*value.get("anyOf", ()), *value.get("allOf", ())):
        found += _inside(path, one)
    if isinstance(value.get("items"), Mapping):
        found += _inside(path + "[]", value["items"])
    if isinstance(value.get("additionalProperties"), Mapping):
        found += _inside(path + ".<name>", value["additionalProperties"])
    return found


def _choice(written: Mapping[str, Any], several: bool) -> str | None:
    """Returns what chooses one of several sections, as a recipe writes it."""
    if not several:
        return None
    for key in ("name", "type", "where", "statistic", "mode"):
        value = written["properties"].get(key, {})
        values = [value["const"]] if "const" in value else value.get("enum", ())
        if values:
            return f"{key}: {' or '.join(map(_written, values))}"
    return None


def _kind(value: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Says what may stand at a key."""
    if "const" in value:
        return f"`{_written(value['const'])}`"
    if "enum" in value:
        return " or ".join(f"`{_written(one)}`" for one in value["enum"])
    if "$ref" in value:
        return "a section"
    if "allOf" in value:
        return _kind(value["allOf"][0], known)
    if "anyOf" in value:
        kinds = dict.fromkeys(_kind(one, known) for one in value["anyOf"])
        return ", ".join(kinds).replace(", null", " or null")
    kind = value.get("type")
    if kind == "array":
        items = value.get("items")
        return "a list" if not isinstance(items, Mapping) or not items else f"a list: {_kind(items, known)}"
    if kind == "object":
        return "a mapping"
    if kind in ("integer", "number"):
        return kind + _bounds(value)
    names = {"string": "text", "boolean": "true or false", "null": "null"}
    return names.get(str(kind), "anything")


def _bounds(value: Mapping[str, Any]) -> str:
    """Says the bounds of a number; those that only keep out what no machine holds are left out."""
    most = [
        f" {sign} {value[key]:g}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in value and abs(value[key]) < 65536
    ]
    return ",".join(most)


def _default(value: Mapping[str, Any], section: Mapping[str, Any], name: str) -> str:
    if name in section.get("required", ()):
        return "required"
    if "default" not in value:
        return ""
    return f"`{_written(value['default'])}`"


def _written(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _anchor(path: str) -> str:
    """Returns the anchor of a key: its path without the marks of lists and of names of one's own."""
    return re.sub(r"\[\]|[<>]", "", path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
