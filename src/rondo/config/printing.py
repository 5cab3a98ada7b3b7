"""A configuration as text: YAML that loads back to an equal one, and a table of keys with their origins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from rondo.config.keys import FLATTENED
from rondo.config.schema import Config
from rondo.config.tree import FLOAT, INT, Origin

if TYPE_CHECKING:
    from rondo.config.load import LoadedConfig


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either YAML 1.1 or our reader would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", INT, None)


def to_yaml(config: Config) -> str:
    """Writes every key with its value, which loads back to an equal configuration."""
    return yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def show(loaded: LoadedConfig) -> str:
    """Writes every leaf as `key: value   # origin`; one that nothing has set has the origin `default`."""
    rows = [
        (f"{key}: {_flow(value)}", _origin(key, loaded.origins))
        for key, value in leaves(plain(loaded.config))
    ]
    width = min(60, max(len(text) for text, _ in rows))
    return "\n".join(f"{text:<{width}}  # {origin}" for text, origin in rows)


def plain(value: Any) -> Any:
    """Makes a configuration or a part of it mappings and lists, spelt as in a recipe: the options of a
    function stand beside its name.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        beside = fields.pop("options") if isinstance(value, FLATTENED) else {}
        return fields | beside
    if isinstance(value, Mapping):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    return value


def leaves(value: Any, key: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and what stands there. An empty list or mapping is a leaf, so that it is told from
    one that is not there; so is a list without mappings, unless `lists` are taken apart too.
    """
    if isinstance(value, list) and value and (lists or any(isinstance(child, dict) for child in value)):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from leaves(child, f"{key}.{name}" if key else str(name), lists=lists)
    else:
        yield key, value


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _origin(key: str, origins: Mapping[str, Origin]) -> str:
    if key in origins:
        return origins[key].where
    below = [origin.where for known, origin in origins.items() if known.startswith(key + ".")]
    return below[0] if below else "default"
