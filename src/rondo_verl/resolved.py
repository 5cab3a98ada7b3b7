"""A config of verl's as Hydra writes it: hundreds of keys, of which those count that differ from verl's."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rondo.config.tree import Node, parse_scalar, read_file
from rondo.core.errors import ConfigError

_MOST_FOREIGN = 10  # keys that one adds by hand; more are another version's
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# Without a default here, as verl's is its authors' or their machine's: what a file says of these counts.
_SAID = (
    *("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "critic.model.path"),
    *("model.path", "model.partial_pretrain", "trainer.experiment_name"),
    *("trainer.default_local_dir", "trainer.project_name", "trainer.logger"),
    *("trainer.n_gpus_per_node", "trainer.nnodes"),
)
_WHOLE = "write it whole: `python -m verl.trainer.main_ppo … --cfg job --resolve > config.yaml`"


@cache
def every_default(version: str) -> Mapping[str, Any]:
    """Returns all keys of a version's `ppo_trainer.yaml`, with the files that it includes, and their defaults
    as they are written there.
    """
    text = Path(__file__).with_name(f"{version}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def read_config(
    path: str, version: str, usual: Mapping[str, Any], translated: Collection[str]
) -> list[tuple[str, str]]:
    """Returns what a config sets, as (key=value, file:line); what is verl's default is not said. Raises
    ConfigError for a file that is none, that Hydra has still to compose, or that another version wrote.
    """
    tops = read_file(path, 0).value
    if "defaults" in tops:
        named = tops["defaults"].plain()
        raise ConfigError(
            f"{tops['defaults'].origin.where}: defaults: {named}: Hydra composes this file from others, and "
            f"rondo does not; {_WHOLE}"
        )
    if not {"actor_rollout_ref", "optim"} & tops.keys():
        raise ConfigError(
            f"{path}: this is no config of verl's: it has neither actor_rollout_ref nor optim; a recipe in "
            "rondo's spelling goes without --verl"
        )
    tops.pop("hydra", None)
    leaves = {key: node for top, child in tops.items() for key, node in _leaves(child, top)}
    known = {**dict.fromkeys(translated), **usual}
    foreign = [key for key in leaves if key not in known and not _is_open(key, known)]
    if len(foreign) > _MOST_FOREIGN:
        raise ConfigError(
            f"{path}: {len(foreign)} of its keys are none of verl {version} ({', '.join(foreign[:5])}, …): "
            "another version wrote it; name that, if rondo knows it (--verl-version)"
        )
    values = {key: node.plain() for key, node in leaves.items()}
    pairs = []
    for key, node in leaves.items():
        value = interpolated(values[key], key, values)
        is_usual = key in usual and value == interpolated(usual[key], key, values)
        if not is_usual or (key in _SAID and value is not None):
            pairs.append((f"{key}={json.dumps(value, ensure_ascii=False)}", node.origin.where))
    return pairs


def _leaves(node: Node, key: str) -> Iterator[tuple[str, Node]]:
    if isinstance(node.value, dict) and node.value:
        for name, child in node.value.items():
            if name != "_target_":  # verl's class for the section
                yield from _leaves(child, f"{key}.{name}")
    else:
        yield key, node


def _is_open(key: str, usual: Mapping[str, Any]) -> bool:
    """Says whether a key lies in a section that is empty in verl: its keys are its user's."""
    parts = key.split(".")
    return any(usual.get(".".join(parts[:end]), 0) in ({}, None) for end in range(1, len(parts)))


def interpolated(value: Any, key: str, values: Mapping[str, Any]) -> Any:
    """Returns the value of a key with OmegaConf's `${other.key}` and `${oc.select:other.key,else}` resolved;
    what is of another kind stays. values: of all keys.
    """
    for _ in range(20):
        found = _INNERMOST.search(value) if isinstance(value, str) else None
        if found is None:
            break
        select = found[1].startswith("oc.select:")
        name, _, otherwise = found[1].removeprefix("oc.select:").partition(",")
        name = name.strip()
        if name.startswith("."):  # beside the key; ..name: one section above
            dots = len(name) - len(name.lstrip("."))
            name = ".".join([*key.split(".")[:-dots], name[dots:]])
        if not select and name not in values:
            break
        result = values[name] if name in values else parse_scalar(otherwise.strip())
        result = [] if result == "[]" else result
        if found[0] == value:
            value = result
        else:
            value = value.replace(found[0], "null" if result is None else str(result))
    return value
