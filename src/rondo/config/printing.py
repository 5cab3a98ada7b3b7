"""A configuration as text: YAML that loads back to an equal one, and a table of keys with their origins."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rondo.config.keys import FLATTENED
from rondo.config.schema import Config
from rondo.config.tree import FLOAT, INT, Origin
from rondo.core.masking import digest, masked, masked_urls

# The fields below which names are not the schema's, and may be those of secrets.
_OPEN = {"options", "env"}


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either YAML 1.1 or our reader would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", INT, None)


def to_yaml(config: Config) -> str:
    """Writes every key with its value; loads back to an equal configuration, but for secrets (`plain`)."""
    return yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def show(config: Config, origins: Mapping[str, Origin]) -> str:
    """Writes every leaf as `key: value   # origin`; one that nothing has set has the origin `default`."""
    rows = [(f"{key}: {_flow(value)}", _origin(key, origins)) for key, value in leaves(plain(config))]
    width = min(60, max(len(text) for text, _ in rows))
    return "\n".join(f"{text:<{width}}  # {origin}" for text, origin in rows)


def plain(value: Any, *, secrets: bool = False) -> Any:
    """Makes a configuration or a part of it mappings and lists, spelt as in a recipe: the options of a
    function stand beside its name.

    This is the form in which it is kept, shown and sent: `secrets` are masked (`rondo.core.masking`), unless
    they are asked for.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name), secrets=secrets) for f in dataclasses.fields(value)}
        for name in () if secrets else _OPEN & fields.keys():
            fields[name] = masked(name, fields[name])
        beside = fields.pop("options") if isinstance(value, FLATTENED) else {}
        return fields | beside
    if isinstance(value, Mapping):
        return {key: plain(child, secrets=secrets) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child, secrets=secrets) for child in value]
    return masked_urls(value, digest) if isinstance(value, str) and not secrets else value


def literal_secrets(config: Config) -> list[str]:
    """Returns the keys whose values are masked where the configuration is kept."""
    written, kept = (dict(leaves(plain(config, secrets=secrets))) for secrets in (True, False))
    return [key for key, value in written.items() if kept[key] != value]


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
