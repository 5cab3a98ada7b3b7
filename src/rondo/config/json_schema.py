"""The schema as JSON Schema, with which an editor completes and checks a recipe: `rondo config schema`."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import TypeAdapter

from rondo.config import schema
from rondo.config.keys import FLATTENED, SchemaPlace, choices_of, fields_of, meaning
from rondo.config.load import INCLUDE
from rondo.config.schema import Config

_TEXT = {"type": "string"}


def json_schema() -> dict[str, Any]:
    """Returns what pydantic says of the sections; short forms, options beside a name and `include` are
    ours.
    """
    written = TypeAdapter(Config).json_schema(ref_template="#/$defs/{model}")
    sections = {name: _section(getattr(schema, name), part) for name, part in written.pop("$defs").items()}
    recipe = _section(Config, written)
    recipe["properties"][INCLUDE] = {
        "description": "Recipes that are merged before this one: files beside it, or names of shipped ones.",
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT}],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of rondo",
        **recipe,
        "$defs": dict(sorted(sections.items())),
    }


def _section(section: type, written: dict[str, Any]) -> dict[str, Any]:
    place, flattened = SchemaPlace(section), section in FLATTENED
    properties = {
        name: _value(place.child(name), meaning(section, name), written["properties"][name])
        for name in fields_of(section)
        if not (flattened and name == "options")
    }
    # A function's name is missing where its options are set and its default stays: `_choice` asks for it.
    required = [name for name in written.get("required", ()) if not flattened or name != "name"]
    return {
        "type": "object",
        "description": " ".join(inspect.cleandoc(section.__doc__ or "").split()),
        "properties": properties,
        "additionalProperties": flattened,
        **({"required": required} if required else {}),
    }


def _value(place: SchemaPlace, about: str, written: dict[str, Any]) -> dict[str, Any]:
    """Says what may stand at one key."""
    if place.is_list and "items" in written:
        written = {**written, "items": _value(place.element(0), "", written["items"])}
    if isinstance(written.get("additionalProperties"), dict) and place.child("").sections:
        values = _value(place.child(""), "", written["additionalProperties"])
        written = {**written, "additionalProperties": values}
    if place.tag is not None:
        written = _choice(place, optional={"type": "null"} in written.get("anyOf", ()))
    elif place.sections:  # what it is by default stands at its keys
        written = {key: part for key, part in written.items() if key != "default"}
    written.pop("title", None)
    return {**({"description": about} if about else {}), **written}


def _choice(place: SchemaPlace, *, optional: bool) -> dict[str, Any]:
    """A name, or a mapping with it; it may be left out of the mapping where the choice is made by default."""
    names = [choice for section in place.sections for choice in choices_of(section)]
    forms: list[dict[str, Any]] = [{"enum": names} if names else _TEXT]
    for section in place.sections:
        form: dict[str, Any] = {"$ref": f"#/$defs/{section.__name__}"}
        named = {"required": [place.tag]}
        forms.append(form if isinstance(place.default, section) else {"allOf": [form, named]})
    default = {"default": place.choice(None)} if place.default is not None else {}
    return {"anyOf": [*forms, *([{"type": "null"}] if optional else [])], **default}
