"""Other values than those of a model's config.json (`model.override`), checked against the config's class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from rondo.core.errors import ConfigError, did_you_mean

# What says it instead, or why it is said nowhere.
_GOVERNED: Mapping[str, str] = {
    "model_type": "the folder's files are of that type",
    "architectures": "the folder's files are of that class",
    "auto_map": "it is the folder's own code (model.trust_remote_code)",
    "quantization_config": "it says how the folder's files are written",
    "transformers_version": "it says who wrote the folder",
    "dtype": "actor.param_dtype and rollout.dtype say it",
    "torch_dtype": "actor.param_dtype and rollout.dtype say it",
    "attn_implementation": "model.attention says it",
}
_ROPE = "rope_parameters"
_ROPE_SPELLINGS = ("rope_scaling", "rope_theta")  # of older configs
# What a rotary embedding keeps when its type is changed.
_OF_ALL_TYPES = ("rope_theta", "partial_rotary_factor")
_NEEDS_TRAINED_LENGTH = ("yarn", "longrope", "llama3")


def overridden(config: PreTrainedConfig, override: Mapping[str, Any], key: str) -> PreTrainedConfig:
    """Returns the config with the values of `override` in place of its own; what is a mapping in both is
    merged. key: where they were written.

    Raises ConfigError naming the key that the config's class does not have, whose value it refuses, or
    that is not for the user to say.
    """
    if not override:
        return config
    values = _values(config, override, key)
    try:
        return type(config).from_dict(values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        if len(override) == 1:
            key = f"{key}.{next(iter(override))}"
        else:  # raises for the one that is refused by itself
            for name, value in override.items():
                overridden(config, {name: value}, key)
        raise ConfigError(f"{key}: {' '.join(str(error).split())}", key=key) from error


def _values(config: PreTrainedConfig, override: Mapping[str, Any], key: str) -> dict[str, Any]:
    values = copy.deepcopy(config.to_dict())
    for name, value in override.items():
        _check_name(config, name, value, f"{key}.{name}")
        part = getattr(config, name, None)
        if name == _ROPE or name in _ROPE_SPELLINGS:
            values[_ROPE] = _rope(config, values.get(_ROPE) or {}, name, value, f"{key}.{name}")
        elif isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            values[name] = overridden(part, value, f"{key}.{name}").to_dict()
        else:
            values[config.attribute_map.get(name, name)] = _merged(values.get(name), value)
    return values


def _check_name(config: PreTrainedConfig, name: str, value: Any, key: str) -> None:
    if name in _GOVERNED:
        raise ConfigError(f"{key} cannot be set: {_GOVERNED[name]}; remove it", key=key)
    known = {own for own in vars(config) if not own.startswith("_")} | set(config.attribute_map)
    if name not in known and not (name in _ROPE_SPELLINGS and _ROPE in known):
        near = did_you_mean(name, sorted(known - set(_GOVERNED)))
        raise ConfigError(f"{key}: a {config.model_type} config has no key {name!r}{near}", key=key)
    if "drop" in name and isinstance(value, int | float) and value:
        raise ConfigError(
            f"{key}={value}: rondo trains without dropout, because the log-probs of the trainer must be the "
            "sampler's; set it to 0, or remove it",
            key=key,
        )


def _rope(
    config: PreTrainedConfig, now: Mapping[str, Any], name: str, value: Any, key: str
) -> dict[str, Any]:
    """Returns the parameters of the rotary embedding. now: those that it has."""
    layers = {kind: part for kind, part in now.items() if isinstance(part, Mapping)}
    if name == "rope_theta" and not layers:
        return {**now, name: value}
    if value is None:
        value = {"rope_type": "default"}
    if layers:
        if not isinstance(value, Mapping) or not set(value) <= set(layers):
            kinds = " and ".join(sorted(layers))
            raise ConfigError(
                f"{key}: the layers of this model have different rotary embeddings; set "
                f"{key.rpartition('.')[0]}.{_ROPE} with {kinds}",
                key=key,
            )
        return {
            **now,
            **{kind: _one_rope(config, layers[kind], value[kind], f"{key}.{kind}") for kind in value},
        }
    return _one_rope(config, now, value, key)


def _one_rope(config: PreTrainedConfig, now: Mapping[str, Any], value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is a mapping ({{rope_type: yarn, factor: 4.0}}), not {value!r}", key=key)
    new = {("rope_type" if name == "type" else name): item for name, item in value.items()}
    _check_rope(new, now, key)
    kind = new.get("rope_type", now.get("rope_type"))
    if kind != now.get("rope_type"):
        now = {name: item for name, item in now.items() if name in _OF_ALL_TYPES}
    made = {**now, **new}
    if kind in _NEEDS_TRAINED_LENGTH:  # by default the one in the folder, not one that is set beside it
        made.setdefault("original_max_position_embeddings", getattr(config, "max_position_embeddings", None))
    return made


def _check_rope(new: Mapping[str, Any], now: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError for rotary embeddings that transformers would only warn of, and compute with."""
    kinds = get_type_hints(RopeParameters)
    types = {*ROPE_INIT_FUNCTIONS, "default", now.get("rope_type", "default")}
    for name, value in new.items():
        if name not in kinds and name not in now:
            near = did_you_mean(name, sorted({*kinds, *now}))
            raise ConfigError(f"{key}: a rotary embedding has no key {name!r}{near}", key=f"{key}.{name}")
        if name == "rope_type" and value not in types:
            near = did_you_mean(str(value), sorted(types))
            raise ConfigError(f"{key}.{name}: transformers knows no {value!r}{near}", key=f"{key}.{name}")
        if float in get_args(kinds.get(name)) and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise ConfigError(f"{key}.{name} is a number, not {value!r}", key=f"{key}.{name}")


def _merged(now: Any, value: Any) -> Any:
    return {**now, **value} if isinstance(now, Mapping) and isinstance(value, Mapping) else value
