"""A configuration as text: YAML that loads back to an equal one, and a table of keys with their origins; and
two of them side by side, by one flat form.

Which keys may differ is said where it is asked (a resumed run, a replay, a warm start, …). A key in such
a list is a leaf, or a section with all that is below it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import yaml

from rondo.config.keys import FLATTENED, within
from rondo.config.schema import Config
from rondo.config.tree import FLOAT, INT, Origin
from rondo.core.masking import digest, is_secret, masked, masked_urls

# The fields below which names are not the schema's, and may be those of secrets.
_OPEN = {"options", "env"}


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either YAML 1.1 or our reader would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", INT, None)


class _FastDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """The same by libyaml, where it is installed."""

    yaml_implicit_resolvers = _Dumper.yaml_implicit_resolvers


def _dumped(value: Any, **options: Any) -> str:
    text: str = yaml.dump(value, Dumper=_FastDumper, allow_unicode=True, **options)
    if text.isascii() and "\\" not in text:
        return text
    # libyaml escapes more than has to be.
    return yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **options)


def to_yaml(config: Config) -> str:
    """Writes every key with its value; loads back to an equal configuration, but for secrets (`plain`)."""
    return _dumped(plain(config), sort_keys=False, width=110)


def show(config: Config, origins: Mapping[str, Origin]) -> str:
    """Writes every leaf as `key: value   # origin`; one that nothing has set has the origin `default`. Files
    in folders go by their names, which stand with the whole paths at the head.
    """
    rows = [(f"{key}: {flow(value)}", _origin(key, origins)) for key, value in leaves(plain(config))]
    files = _short_names({file for _, origin in rows if (file := _file_of(origin)) is not None})
    width = min(60, max(len(text) for text, _ in rows))
    lines = [f"# {short}: {file}" for file, short in files.items()]
    for text, origin in rows:
        file = _file_of(origin)
        shown = files[file] + origin.removeprefix(file) if file in files else origin
        lines.append(f"{text:<{width}}  # {shown}")
    return "\n".join(lines)


def _file_of(origin: str) -> str | None:
    """Returns the file of `file:line`; None: an argument, say."""
    found = re.fullmatch(r"(.*\.ya?ml):[0-9]+", origin)
    return found[1] if found else None


def _short_names(files: Iterable[str]) -> dict[str, str]:
    """Returns the names of files, sorted, by their paths, where these are longer; two of one name have a
    number.
    """
    short: dict[str, str] = {}
    for file in sorted(files):
        name, taken = os.path.basename(file), [os.path.basename(other) for other in short]
        if name != file:
            short[file] = f"{name} ({taken.count(name) + 1})" if name in taken else name
    return short


def plain(value: Any, *, secrets: bool = False) -> Any:
    """Turns a configuration, or a part of one, into mappings and lists, spelt as in a recipe: the options of
    a function stand beside its name.

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


def flow(value: Any) -> str:
    """Writes a value on one line of YAML."""
    text = _dumped(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _origin(key: str, origins: Mapping[str, Origin]) -> str:
    if key in origins:
        return origins[key].where
    below = [origin.where for known, origin in origins.items() if known.startswith(key + ".")]
    return below[0] if below else "default"


# ---- the flat form, and the keys in which two configurations differ ----


Settings = Mapping[str, Any]


def leaves_of(config: Config, *, only: Collection[str] = (), free: Collection[str] = ()) -> dict[str, Any]:
    """Returns every leaf by its key (`data.batch_size`, `data.train.0.path`), as JSON has it, in the schema's
    order.

    only: the keys to take; none given: all of them. free: keys to leave out.
    """
    found = json.loads(json.dumps(dict(leaves(plain(config), lists=True)), default=str))
    return {
        key: value
        for key, value in found.items()
        if (not only or within(key, only)) and not within(key, free)
    }


def differing(old: Settings, new: Settings, *, free: Collection[str] = ()) -> list[str]:
    """Returns the keys whose values differ, but for those that are `free`; a missing value equals null.

    Where one side has a section and the other has null or nothing in its place, the section is what differs.
    """
    differ = (key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key))
    return list(dict.fromkeys(_replaced(key, old, new) for key in differ if not within(key, free)))


def changes(old: Settings, new: Settings, place: str, *, free: Collection[str] = ()) -> list[str]:
    """Returns what is `differing` as lines: `rollout.n: 4 in the journal, 2 now`. place: where `old` is. One
    side may be from a rondo that masked no secrets, and left `~` in paths.
    """
    old, new = _masked(old), _masked(new)
    return [
        f"{key}: {_shown(old, key)} {place}, {_shown(new, key)} now" for key in differing(old, new, free=free)
    ]


def side_by_side(*all_of: Settings) -> dict[str, list[str]]:
    """Returns the keys whose values differ from those of the first, with the value in each, as JSON, or
    `not set`.
    """
    first, *others = map(_masked, all_of)
    keys = dict.fromkeys(key for other in others for key in differing(first, other))
    return {key: [_shown(one, key) for one in (first, *others)] for key in keys}


def _masked(settings: Settings) -> Settings:
    return {key: _masked_leaf(key, value) for key, value in settings.items()}


def _masked_leaf(key: str, value: Any) -> Any:
    parts = key.split(".")
    if isinstance(value, str) and value.startswith("~/"):
        value = os.path.expanduser(value)
    if parts[-1] == "env" and any(map(is_secret, parts[-2:-1])):
        return masked(parts[-2], {"env": value})["env"]
    return masked(next(filter(is_secret, parts), parts[-1]), value)


def _replaced(key: str, old: Settings, new: Settings) -> str:
    """Returns the shortest part of `key` that is a leaf on either side: `algorithm.kl`, where one side has no
    KL.
    """
    parts = key.split(".")
    shorter = (".".join(parts[:stop]) for stop in range(1, len(parts)))
    return next((part for part in shorter if part in old or part in new), key)


def _shown(record: Settings, key: str) -> str:
    if key in record:
        return json.dumps(record[key])
    below = {name.removeprefix(key + "."): value for name, value in record.items() if within(name, [key])}
    return json.dumps(below) if below else "not set"
