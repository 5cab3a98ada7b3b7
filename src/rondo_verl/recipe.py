"""A launch of verl as a recipe of rondo's, with a comment for each line: what it was there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rondo.config.load import LoadedConfig
from rondo.config.printing import flow, plain
from rondo.config.tree import Origin


def recipe(loaded: LoadedConfig, head: str, without_meaning: Sequence[str]) -> str:
    """Writes what somebody or verl has set; all else has rondo's default, as in the launch.

    Args:
        loaded: the launch.
        head: where it comes from, for the first line.
        without_meaning: what is said of keys that are nothing here.
    """
    lines = [f"# {head}, in rondo's spelling", *_mapping(plain(loaded.config), "", loaded.origins)]
    if without_meaning:
        lines += ["", "# Without a meaning here:", *(f"# {note}" for note in without_meaning)]
    return "\n".join(lines) + "\n"


def _mapping(value: Mapping[str, Any], key: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    for name, child in value.items():
        whole = f"{key}.{name}" if key else name
        if whole in origins:
            yield f"{flow(name)}: {flow(child)}  # {_comment(origins[whole])}"
        elif any(known.startswith(whole + ".") for known in origins):
            yield f"{flow(name)}:"
            below = _list(child, whole, origins) if isinstance(child, list) else _mapping(child, whole, origins)
            yield from ("  " + line for line in below)


def _list(value: Sequence[Any], key: str, origins: Mapping[str, Origin]) -> Iterator[str]:
    for number, child in enumerate(value):
        whole = f"{key}.{number}"
        if isinstance(child, dict):
            first, *rest = _mapping(child, whole, origins)
            yield from (f"- {first}", *("  " + line for line in rest))
        else:
            yield f"- {flow(child)}  # {_comment(origins[whole])}"


def _comment(origin: Origin) -> str:
    return origin.where.replace("\n", " ")
