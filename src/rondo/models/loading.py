"""Model configs, tokenizers and causal language models from a folder, the hub, or a transformers config."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, DataError, about, did_you_mean
from rondo.models.attention import IMPLEMENTATION, implementation, register_varlen
from rondo.models.carried import end_token_ids
from rondo.models.family import Family, auto_class, family_of, record_of
from rondo.models.files import (
    check_config,
    check_tokenizer,
    check_weights,
    file_of,
    json_object,
    names_in,
)
from rondo.models.fused import use_fused_modules
from rondo.models.liger import use_liger
from rondo.models.names import parts_of, weights_of, whole_part
from rondo.models.override import overridden
from rondo.models.precision import cast_model
from rondo.models.quantised import plain_tensors, quantisation_of
from rondo.models.shards import joined_tensors, rank_files
from rondo.models.source import ModelSource, TokenizerSource
from rondo.models.stored import StoredModel, parameters_on_meta
from rondo.models.value_head import KNOWN_AS, is_of_head
from rondo.system.border import users_code
from rondo.system.hub import local_folder
from rondo.system.urls import is_url

Kernels = Literal["auto", "norms", "liger", "transformers"]
# Keys that every config takes although its class does not declare them.
_UNDECLARED = frozenset({"rope_theta", "rope_scaling", "dtype"})
_log = logging.getLogger(__name__)
# The largest that a size of a model can be; ten times what is known.
_MOST = {
    "vocab_size": 10**7,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 10**6),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 10**4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 10**4),
}
# What transformers raises for files whose contents it does not expect.
_UNEXPECTED = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    ArithmeticError,
    StrictDataclassError,
)


def load_model_config(source: ModelSource) -> PreTrainedConfig:
    """Reads the transformers config, with what overrides it, or makes it. Raises DataError (folder or hub id
    cannot be read) or ConfigError (unknown keys, values that its class refuses).
    """
    config = _config_from_mapping(source.config) if source.config is not None else _config_of_folder(source)
    key = f"{source.section}.override"
    _check_sizes(source.override, key)
    return overridden(config, source.override, key)


def dtype_of(source: ModelSource) -> torch.dtype | None:
    """Returns the dtype that a model's folder says of its weights; None for a quantised model, a model from
    scratch, and a folder that says none.
    """
    if source.path is None:
        return None
    folder = Path(local_folder(source.path, source.hub))
    if quantisation_of(folder, json_object(folder / "config.json")):
        return None
    config = load_model_config(source)
    found: torch.dtype | None = config.dtype or config.get_text_config().dtype
    return found


def _check_sizes(said: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError for a size that no model has. key: below which it is said."""
    for name in said.keys() & _MOST.keys():
        size = said[name]
        if isinstance(size, int) and not 1 <= size <= _MOST[name]:
            where = f"{key}.{name}".lstrip(".")
            raise ConfigError(f"{where}={size}, and a model's is between 1 and {_MOST[name]}", key=where)


def _config_of_folder(source: ModelSource) -> PreTrainedConfig:
    path = local_folder(str(source.path), source.hub)
    check_config(path)
    written = json_object(Path(path) / "config.json")
    try:
        _check_sizes(written, "")
        config = AutoConfig.from_pretrained(path, trust_remote_code=source.trust_remote_code)
    except _UNEXPECTED as error:
        raise DataError(f"{path}/config.json cannot be a model's: {_in_one_line(error)}") from error
    if quantisation_of(Path(path), written):  # its weights are plain from here on
        vars(config).pop("quantization_config", None)
    if record_of(str(config.model_type)).text_prefix:
        config = config.text_config
        vars(config).pop("quantization_config", None)
    return config


def _config_from_mapping(mapping: Mapping[str, Any]) -> PreTrainedConfig:
    _check_sizes(mapping, "model.config")
    fields = dict(mapping)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.config has no model_type; set for example model.config.model_type=qwen3")
    types = list(CONFIG_MAPPING.keys())
    if model_type not in types:
        raise ConfigError(
            f"model.config.model_type: transformers knows no {model_type!r}{did_you_mean(model_type, types)}"
        )
    default = _default_of(CONFIG_MAPPING[model_type])
    _check_known(default, fields, "model.config", _UNDECLARED | record_of(model_type).undeclared)
    try:
        return AutoConfig.for_model(model_type, **fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from error


@functools.cache
def _default_of(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Returns a config of this class without settings, to look at: nobody changes it."""
    return kind()


def _check_known(
    default: PreTrainedConfig, fields: Mapping[str, Any], key: str, passed: frozenset[str]
) -> None:
    """Raises ConfigError for a key that the config's class, or that of a part of it, does not have."""
    known = {*vars(default), *default.attribute_map}  # with the other names that a key has
    for name, value in fields.items():
        part = getattr(default, name, None) if name in default.sub_configs else None
        if isinstance(part, PreTrainedConfig) and isinstance(value, Mapping):
            _check_known(part, value, f"{key}.{name}", passed | {"model_type"})
        elif name not in known and name not in passed:
            near = did_you_mean(name, known)
            with about(f"{key}.{name}"):
                raise ConfigError(f"{key}: a {default.model_type} config has no key {name!r}{near}")


def model_on_meta(source: ModelSource) -> PreTrainedModel:
    """Returns a model of which nothing is made or read but its modules. Raises ConfigError, DataError."""
    config = load_model_config(source)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=source.trust_remote_code)


def build_model(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: Kernels = "auto",
    *,
    output_head: bool = True,
) -> PreTrainedModel:
    """A causal LM with parameters in `dtype` (`cast_model`) on `device`, in evaluation mode, whose attention
    reads packed documents.

    Random weights depend on `source.seed` only; the global generator is left as it was. Models that cannot be
    packed (`Family.not_packable`) keep transformers' own attention. kernels: "auto" replaces norms and
    attention modules by leaner ones that compute the same (`models/fused.py`), "norms" those only.
    output_head: whether a folder must have one (a critic's has none, and the model's is random then). Raises
    DataError or ConfigError.
    """
    config = _config_for_packing(source)
    if source.config is not None:
        model = _random_model(config, source, torch.float32)
    else:
        model = _pretrained_model(config, source, dtype, output_head)
    return _finished(model, dtype, device, kernels)


def build_empty(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    kernels: Kernels = "auto",
    *,
    output_head: bool = True,
) -> tuple[PreTrainedModel, StoredModel | None]:
    """`build_model`, with parameters that are not read yet (they are on `meta`), and what they are read from.

    None: they are there, on every rank all of them. Random weights are, and those of a folder whose files are
    not safetensors, or have other names than transformers writes: transformers converts them as a whole.
    """
    if source.config is None:
        config = _config_for_packing(source)
        check_weights(local_folder(str(source.path), source.hub))
        with parameters_on_meta():
            model = _random_model(config, source, torch.promote_types(dtype, torch.float32))
        stored = _stored_model(source, model, output_head)
        if stored is not None:
            return _finished(model, dtype, device, kernels), stored
    return build_model(source, dtype, device, kernels, output_head=output_head), None


def _config_for_packing(source: ModelSource) -> PreTrainedConfig:
    config = load_model_config(source)
    not_packable = family_of(config).not_packable
    config._attn_implementation = "eager" if not_packable else implementation(IMPLEMENTATION, config)
    register_varlen()
    return config


def attention_by_part(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Returns the attention of the model's parts, where its text's is `name`: a tower keeps its images apart
    by itself.
    """
    if record_of(str(config.model_type)).images is None:
        return name
    return {"": name, "text_config": name, "vision_config": "sdpa"}


def _finished(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device | str, kernels: Kernels
) -> PreTrainedModel:
    cast_model(model, dtype)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    embedding: Any = model.get_input_embeddings()
    # There is no padding here. With an index of it, that token had no gradient as an input, and often it is
    # the end of a turn, too.
    embedding.padding_idx = None
    model.eval()  # no dropout, no noise in routers, in training either: samplers have none
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped product of matrices has no float64
    if kernels == "liger":
        use_liger(model, device)
    elif kernels != "transformers" and not family_of(model.config).not_packable:
        use_fused_modules(model, device, attention=kernels == "auto")
    return model


def _stored_model(source: ModelSource, model: PreTrainedModel, output_head: bool) -> StoredModel | None:
    """Returns the files of a model's weights; None where they do not hold just its tensors, by the names and
    in the shapes that transformers writes (it may know how to convert them, or what is wrong with them).
    """
    folder = Path(local_folder(str(source.path), source.hub))
    written = json_object(folder / "config.json")
    family = record_of(written.get("model_type", ""))
    stored = StoredModel(folder, quantisation_of(folder, written), family.text_prefix)
    shapes, parts = stored.shapes, parts_of(model)
    unexpected, seen = set(shapes), set()
    head = model.get_output_embeddings()
    without = None if output_head or head is None else head.weight
    for name, tensor in weights_of(model):
        shape = tuple(tensor.shape)
        found = {part.name: part.shape for part in parts.get(name, (whole_part(name, shape),))}
        absent = tensor is without or id(tensor) in seen  # a tied tensor is there by its first name only
        if not absent and any(shapes.get(one) != of for one, of in found.items()):
            return None
        if id(tensor) in seen and not unexpected.isdisjoint(found):
            return None
        unexpected -= found.keys()
        seen.add(id(tensor))
    if not output_head:
        unexpected = {name for name in unexpected if not is_of_head(name)}
    ignored = [re.escape(prefix) for prefix in family.beside_text]
    ignored += model._keys_to_ignore_on_load_unexpected or ()
    if any(not any(re.search(one, name) for one in ignored) for name in unexpected):
        return None
    _report_left_out(folder, model, family)
    return stored


def count_parameters(source: ModelSource, *, output_head: bool) -> int:
    """Returns the number of a model's parameters, tied ones once; nothing of them is made or read."""
    model = model_on_meta(source)
    head = model.get_output_embeddings()
    tied = head is None or head.weight is model.get_input_embeddings().weight
    without = 0 if output_head or tied else head.weight.numel()
    return sum(parameter.numel() for parameter in model.parameters()) - without


def _random_model(config: PreTrainedConfig, source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        return auto_class(config).from_config(
            config,
            dtype=dtype,
            trust_remote_code=source.trust_remote_code,
            attn_implementation=attention_by_part(config, str(config._attn_implementation)),
        )


def _pretrained_model(
    config: PreTrainedConfig, source: ModelSource, dtype: torch.dtype, output_head: bool
) -> PreTrainedModel:
    path = local_folder(str(source.path), source.hub)
    check_weights(path)
    folder = Path(path)
    written = json_object(folder / "config.json")
    quantisation = quantisation_of(folder, written)
    whole = record_of(written.get("model_type", ""))
    loader: Any = auto_class(config)
    origin: dict[str, Any] = {"pretrained_model_name_or_path": path}
    ranks = [] if any(folder.glob("*.safetensors")) else rank_files(folder)
    if quantisation or ranks:  # the automatic class wants files
        loader = auto_class(config)._model_mapping[type(config)]
        origin = {
            "pretrained_model_name_or_path": None,
            "state_dict": joined_tensors(ranks)
            if ranks
            else plain_tensors(sorted(folder.glob("*.safetensors")), quantisation),
        }
    elif source.trust_remote_code:
        origin["trust_remote_code"] = True
    if whole.text_prefix:
        origin["key_mapping"] = {f"^{re.escape(whole.text_prefix)}": ""}
    try:
        with _quiet_loading():
            model, found = loader.from_pretrained(
                **origin,
                config=config,
                dtype=dtype,
                attn_implementation=attention_by_part(config, str(config._attn_implementation)),
                ignore_mismatched_sizes=True,  # they are told below, with what is missing
                output_loading_info=True,
            )
    except (*_UNEXPECTED, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        raise DataError(f"model {path!r}: its weights cannot be loaded: {_in_one_line(error)}") from error
    found["unexpected_keys"] = [
        name for name in found["unexpected_keys"] if not name.startswith(whole.beside_text)
    ]
    _check_loaded(path, model, found, output_head)
    _report_left_out(folder, model, whole)
    return model


def _report_left_out(folder: Path, model: PreTrainedModel, whole: Family) -> None:
    """Logs the tensors of a folder's files that its family declares to be no part of the language model
    (other parts of a larger model, layers that predict further tokens).
    """
    declared = [re.escape(prefix) for prefix in whole.beside_text]
    declared += model._keys_to_ignore_on_load_unexpected or ()
    if not declared:
        return
    stored = {name for file in sorted(folder.glob("*.safetensors")) for name in names_in(file)}
    parts = parts_of(model)
    own = {part.name for name in parts for part in parts[name]} | {name for name, _ in weights_of(model)}
    left_out = {name for name in stored - own if any(re.search(one, name) for one in declared)}
    if left_out:
        _log.warning(
            "model %s: left out %s, no part of a %s language model",
            folder,
            _some(left_out),
            model.config.model_type,
        )


def _check_loaded(path: str, model: PreTrainedModel, found: Mapping[str, Any], output_head: bool) -> None:
    """Raises DataError for tensors that the files lack (transformers makes them up), that the model does not
    have, or that have another shape.
    """
    missing = set(found["missing_keys"])
    if not output_head:
        head = model.get_output_embeddings()
        missing -= {name for name, tensor in model.named_parameters() if tensor is head.weight}
    kind, wrong = model.config.model_type, []
    if missing:
        wrong.append(f"lack {_some(missing)} of a {kind} model")
    unexpected = {name for name in found["unexpected_keys"] if output_head or not is_of_head(name)}
    if unexpected:
        first, known = file_of(Path(path), min(unexpected)), "" if output_head else f"; {KNOWN_AS}"
        wrong.append(f"hold {_some(unexpected)}, in {first}, that a {kind} model does not have{known}")
    if found["mismatched_keys"]:
        name, stored, wanted = min(found["mismatched_keys"])
        wrong.append(
            f"hold {len(found['mismatched_keys'])} of another shape than config.json says (first: {name!r} "
            f"in {file_of(Path(path), name)} is {tuple(stored)}, the model wants {tuple(wanted)})"
        )
    if wrong:
        raise DataError(f"model {path!r}: its files {'; they '.join(wrong)}")


def _some(names: Collection[str]) -> str:
    """Returns how many there are, and which is the first."""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} (first: {min(names)!r})"


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Silences transformers: its bar would run through the console's picture, and what it reports becomes an
    error.
    """
    shown, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if shown:
            hf_logging.enable_progress_bar()


def load_tokenizer(source: TokenizerSource) -> Any:
    """Loads the tokenizer, or has the function make it. Raises DataError or ConfigError."""
    name, chat_template = source.name, source.chat_template
    if is_function(name):
        with about("model.tokenizer"):
            make = resolve_function(name)
            with users_code(f"model.tokenizer: {name}", ConfigError):
                tokenizer = make()
        if not hasattr(tokenizer, "encode") or not hasattr(tokenizer, "decode"):
            raise ConfigError(
                f"tokenizer function {name!r} returned {type(tokenizer).__name__}, which is no tokenizer"
            )
    else:
        folder = local_folder(name, source.hub, weights=False)
        check_tokenizer(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
        except Exception as error:  # tokenizers raises just that for contents that it does not expect
            raise DataError(f"tokenizer {name!r} cannot be read: {_in_one_line(error)}") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model.chat_template: {chat_template} cannot be read: {error}") from error
        if not tokenizer.chat_template.strip():
            raise ConfigError(
                f"model.chat_template: {chat_template} is empty; write a Jinja template there, or leave the "
                "key out for the tokenizer's own",
                key="model.chat_template",
            )
    tokenizer.chat_template_options = dict(source.chat_template_options)
    tokenizer.tool_format = source.tool_format
    tokenizer.end_token_ids = ()
    if source.model is not None:
        tokenizer.end_token_ids = end_token_ids(Path(local_folder(source.model, source.hub, weights=False)))
    return tokenizer


def is_function(name: str) -> bool:
    """Says whether a tokenizer's name is that of a function which makes it."""
    if is_url(name) or os.path.isdir(name):
        return False
    return ":" in name or ("." in name and "/" not in name)


def _in_one_line(error: Exception) -> str:
    if "weights_only" in str(error):  # torch's advice is to run it
        return "its weights are a pickle, which could run code; take the model's safetensors"
    return " ".join(str(error).split())[:400] or type(error).__name__
