"""A config of verl's as Hydra writes it: hundreds of keys, of which those count that differ from verl's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rondo.config.tree import Node, parse_scalar, read_file
from rondo.core.errors import ConfigError
from rondo_verl.table import TABLE

_MOST_FOREIGN = 10  # keys that one adds by hand; more are another version's
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# Without a default of verl's here, as they are its authors' or their machine's: what a file says of these counts.
_SAID = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "trainer.default_local_dir",
    "trainer.project_name",
    "trainer.logger",
    "trainer.device",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)


@cache
def every_default(version: str) -> Mapping[str, Any]:
    """Returns all keys of a version's `ppo_trainer.yaml`, with the files that it includes, and their defaults as
    they are written there.
    """
    found: dict[str, Any] = json.loads(Path(__file__).with_name(f"{version}.json").read_text(encoding="utf-8"))
    return found


def read_config(path: str, version: str) -> list[tuple[str, str]]:
    """Returns what a config sets, as (key=value, file:line); what is verl's default is not said. Raises
    ConfigError for a file that is none, that Hydra has still to compose, or that another version wrote.
    """
    tree = read_file(path, 0)
    tops = tree.value if isinstance(tree.value, dict) else {}
    if "defaults" in tops:
        named = ", ".join(str(one) for one in tops["defaults"].plain() or ())
        raise ConfigError(
            f"{tops['defaults'].origin.where}: defaults: [{named}]: Hydra composes this file from others, which "
            "rondo does not; give the whole: `python -m verl.trainer.main_ppo … --cfg job --resolve > config.yaml`"
        )
    if "actor_rollout_ref" not in tops:
        raise ConfigError(
            f"{path}: this is no config of verl's: it has no actor_rollout_ref; a recipe in rondo's spelling goes "
            "without --verl"
        )
    leaves = {key: node for top, child in tops.items() if top != "hydra" for key, node in _leaves(child, top)}
    usual = every_default(version)
    foreign = [key for key in leaves if key not in usual and key not in TABLE and not _is_open(key, usual)]
    if len(foreign) > _MOST_FOREIGN:
        shown = ", ".join(foreign[:5])
        raise ConfigError(
            f"{path}: {len(foreign)} of its keys are none of verl {version} ({shown}, …): another version wrote it; "
            "name it, if rondo knows it (--verl-version), or give the launch script"
        )
    plain = {key: node.plain() for key, node in leaves.items()}
    pairs = []
    for key, node in leaves.items():
        value = interpolated(plain[key], key, plain)
        is_usual = key in usual and value == interpolated(usual[key], key, plain)
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
    """Returns a value with OmegaConf's `${other.key}` and `${oc.select:other.key,else}` resolved; what is of
    another kind stays. values: all keys.
    """
    for _ in range(20):
        found = _INNERMOST.search(value) if isinstance(value, str) else None
        if found is None:
            return value
        is_select, _, rest = found[1].rpartition("oc.select:")
        name, has_else, other = rest.partition(",")
        name = _absolute(name.strip(), key)
        if name in values:
            result = values[name]
        elif "oc.select:" in found[1]:
            result = parse_scalar(other.strip()) if has_else and other.strip() != "[]" else ([] if has_else else None)
        else:
            return value
        if found[0] == value:
            value = result
        else:
            value = value.replace(found[0], "null" if result is None else str(result))
    return value


def _absolute(name: str, key: str) -> str:
    """Returns the key that a name, `.beside` or `..above` it, means in the value of `key`."""
    dots = len(name) - len(name.lstrip("."))
    return name if not dots else ".".join([*key.split(".")[:-dots], name.lstrip(".")])
