"""Which models Megatron computes, and what its parameters are in a checkpoint. Imports no megatron-core.

A parameter of Megatron's is made of several tensors of a checkpoint, interleaved:

    linear_qkv   [groups, heads of a group + 2, width, H]    q, k and v of each group of heads
    linear_fc1   [2, F, H]                                   gate, up

Along the axis `tensor` each rank has whole groups, and the same share of every other tensor but for experts:
of those each rank along the axis `expert` has whole ones. Routers and experts are transformers' own modules,
and their parameters a checkpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from rondo.config.schema import (
    EngineConfig,
    FrozenEngineConfig,
    MegatronBackendConfig,
    OptimizerConfig,
    ParallelConfig,
)
from rondo.core.errors import ConfigError
from rondo.models.family import family_of, rope_changes_at
from rondo.models.lora import Adapter
from rondo.platform import on_host
from rondo.training.torch_backend.axes import check_heads, num_experts, refused

# Of the families below: whose products of q, k and v have biases, and whose heads have norms.
_HAS_QKV_BIAS = {"qwen2"}
_NORMS_HEADS = {"qwen3", "qwen3_moe"}
# Whose cosines may be scaled (YaRN).
ROTARY_SCALE = {"deepseek_v3"}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
FACTORS = "lora"  # what adapters beside a product are called in it
_FACTOR = re.compile(rf"(.*)\.{FACTORS}\.(\d+)\.([ab])")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class TensorPiece:
    """A checkpoint's tensor in a parameter of Megatron's."""

    name: str
    """The checkpoint's."""
    cut: int | None
    """The dimension along which ranks share it out; None: each has all of it."""
    view: Callable[[torch.Tensor], torch.Tensor]
    """This rank's part, seen in the parameter: its elements in the tensor's order, in any shape."""
    along: Literal["tensor", "expert"] = "tensor"
    """The axis whose ranks they are."""


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns what a model of this transformers config is to megatron-core's TransformerConfig."""
    text = config.get_text_config()
    experts = num_experts(text)
    of_experts = {
        "num_moe_experts": experts,
        "moe_router_topk": getattr(text, "num_experts_per_tok", None),
        "moe_ffn_hidden_size": getattr(text, "moe_intermediate_size", None),
        "moe_shared_expert_intermediate_size": _shared_width(text) or None,
    }
    return (of_experts if experts else {}) | {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": _width_of_heads(text),
        "ffn_hidden_size": text.intermediate_size,
        "layernorm_epsilon": text.rms_norm_eps,
        "add_qkv_bias": text.model_type in _HAS_QKV_BIAS,
        "qk_layernorm": text.model_type in _NORMS_HEADS,
    }


def pieces_of(name: str, offset: int, config: PreTrainedConfig) -> tuple[TensorPiece, ...]:
    """Returns the tensors that a parameter of local layers consists of; () for one that is not known.

    offset: of the stage's layers, among all. config: the model's, as transformers has it.
    """
    factor = _FACTOR.fullmatch(name)
    if factor is not None:
        return (_factor_of(pieces_of(f"{factor[1]}.weight", offset, config)[int(factor[2])], factor[3]),)
    text = config.get_text_config()
    alone = {
        "embedding.word_embeddings.weight": ("model.embed_tokens.weight", 0),
        "output_layer.weight": ("lm_head.weight", 0),
        "decoder.final_layernorm.weight": ("model.norm.weight", None),
        "head.value_head.weight": ("value_head.weight", None),
        "head.value_head.bias": ("value_head.bias", None),
    }
    if name in alone:
        return (TensorPiece(*alone[name], _as_it_is),)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return ()
    prefix, inner = f"model.layers.{offset + int(layer[1])}.", layer[2]
    alike = {
        "input_layernorm.weight": ("input_layernorm.weight", None),
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
        "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
        "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight", 1),
        "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight", 1),
        "self_attention.q_proj.weight": ("self_attn.q_proj.weight", 0),
        "self_attention.q_a_proj.weight": ("self_attn.q_a_proj.weight", None),
        "self_attention.q_a_layernorm.weight": ("self_attn.q_a_layernorm.weight", None),
        "self_attention.q_b_proj.weight": ("self_attn.q_b_proj.weight", 0),
        "self_attention.kv_a_proj_with_mqa.weight": ("self_attn.kv_a_proj_with_mqa.weight", None),
        "self_attention.kv_a_layernorm.weight": ("self_attn.kv_a_layernorm.weight", None),
        "self_attention.kv_b_proj.weight": ("self_attn.kv_b_proj.weight", 0),
        "self_attention.o_proj.weight": ("self_attn.o_proj.weight", 1),
    }
    if inner in alike:
        own, cut = alike[inner]
        return (TensorPiece(prefix + own, cut, _as_it_is),)
    for ours, theirs in (("mlp.router.gate.", "mlp.gate."), ("mlp.experts.own.", "mlp.experts.")):
        if inner.startswith(ours):
            full = prefix + theirs + inner.removeprefix(ours)
            cut = 0 if theirs == "mlp.experts." else None
            return (TensorPiece(full, cut, _as_it_is, along="expert" if cut == 0 else "tensor"),)
    module, _, kind = inner.rpartition(".")
    if module == "self_attention.linear_qkv":
        per_group = text.num_attention_heads // text.num_key_value_heads
        heads = {
            "q": slice(0, per_group),
            "k": slice(per_group, per_group + 1),
            "v": slice(per_group + 1, None),
        }
        width = _width_of_heads(text)
        return tuple(
            TensorPiece(f"{prefix}self_attn.{one}_proj.{kind}", 0, _Heads(per_group + 2, width, which))
            for one, which in heads.items()
        )
    if module in ("mlp.linear_fc1", "mlp.shared_experts.linear_fc1"):
        owner = prefix + module.removesuffix("linear_fc1")
        return tuple(
            TensorPiece(f"{owner}{one}_proj.{kind}", 0, _Half(number))
            for number, one in enumerate(("gate", "up"))
        )
    return ()


def _factor_of(weight: TensorPiece, factor: str) -> TensorPiece:
    """Returns A, or B, of an adapter of a weight: A is cut as its inputs are, and B as its outputs."""
    adapter = Adapter(weight.name.removesuffix(".weight"), 1.0, transposed=False)
    if factor == "a":
        return TensorPiece(adapter.a, 1 if weight.cut == 1 else None, _as_it_is)
    return TensorPiece(adapter.b, 0 if weight.cut == 0 else None, _as_it_is)


def _as_it_is(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


@dataclass(frozen=True)
class _Heads:
    """Some heads of each group in linear_qkv."""

    of_group: int
    width: int
    which: slice

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view(-1, self.of_group, self.width, *parameter.shape[1:])[:, self.which]


@dataclass(frozen=True)
class _Half:
    """Gate, or up, in linear_fc1."""

    number: int

    def __call__(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.view(2, -1, *parameter.shape[1:])[self.number]


def _width_of_heads(text: PreTrainedConfig) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _shared_width(text: PreTrainedConfig) -> int:
    """Returns the width of the experts that all tokens go to, together."""
    shared: int = (getattr(text, "n_shared_experts", None) or 0) * getattr(text, "moe_intermediate_size", 0)
    return shared


# ---- what is refused -------------------------------------------------------------------------------------


def check_settings(
    engine: FrozenEngineConfig, optimizer: OptimizerConfig | None, device: str | torch.device
) -> None:
    """Raises ConfigError for settings of an engine, without `auto`, that Megatron does not have. optimizer:
    None: it is frozen.
    """
    where, trained = "actor.backend=megatron", isinstance(engine, EngineConfig)
    if on_host(device):
        raise ConfigError(
            f"{where}: megatron-core calls CUDA everywhere, and the model would be on the {device}; use torch"
        )
    asked = {"logits_bytes": engine.logits_bytes is None}
    if isinstance(engine, EngineConfig):
        asked |= {
            "lora.base_dtype": engine.lora is not None and engine.lora.base_dtype is not None,
            "freeze": bool(engine.freeze),
            "gradient_checkpointing": engine.gradient_checkpointing == "offload",
        }
    if optimizer is not None:
        asked |= {
            "optimizer.moments": optimizer.moments == "8bit",
            "optimizer.lr_of_parts": bool(optimizer.lr_of_parts),
        }
    for key in (key for key, wanted in asked.items() if wanted):
        raise ConfigError(
            f"{key}: {where} does not have what it asks for; leave it out, or use torch", key=key
        )
    if isinstance(engine, EngineConfig) and engine.lora is not None:
        if engine.param_dtype != engine.compute_dtype:
            raise ConfigError(
                f"param_dtype={engine.param_dtype}: with {where} the weights beside adapters (lora) rest as "
                f"they compute: set param_dtype={engine.compute_dtype}",
                key="param_dtype",
            )
    elif trained and engine.param_dtype != "float32":
        raise ConfigError(
            f"param_dtype={engine.param_dtype}: {where} adds steps to weights in float32, whatever computes "
            "(compute_dtype): leave it out",
            key="param_dtype",
        )


def check_family(config: PreTrainedConfig) -> None:
    """Raises ConfigError for a model that Megatron does not compute as transformers does."""
    why_not = _why_not(config)
    if why_not:
        raise ConfigError(
            f"actor.backend=megatron: {why_not}; use torch, or one of {', '.join(FAMILIES)} without it"
        )


def check_layout(config: PreTrainedConfig, sizes: ParallelConfig, backend: MegatronBackendConfig) -> None:
    """Raises ConfigError for such a model, or where it cannot be spread over so many ranks; its key is that
    of the axis then.
    """
    check_family(config)
    text = config.get_text_config()
    experts = num_experts(text)
    if sizes.replicate > 1:
        why = f"with megatron a {text.model_type} model is copied by its data ranks already"
        raise refused("replicate", sizes, why)
    if sizes.expert > 1 and (experts is None or experts % sizes.expert):
        why = f"it does not divide the {experts} experts" if experts else "the model has no experts"
        raise refused("expert", sizes, why)
    of_tensor = {
        "num_key_value_heads": text.num_key_value_heads,
        "intermediate_size": text.intermediate_size,
        "vocab_size": text.vocab_size,
    }
    if _shared_width(text):
        of_tensor["n_shared_experts · moe_intermediate_size"] = _shared_width(text)
    for name, number in of_tensor.items():
        if number % sizes.tensor:
            raise refused("tensor", sizes, f"the model's {name}={number} cannot be divided by it")
    check_heads(text.num_attention_heads // sizes.tensor, text.num_key_value_heads // sizes.tensor, sizes)
    layers_of_stages(int(text.num_hidden_layers), sizes, backend)


def layers_of_stages(layers: int, sizes: ParallelConfig, backend: MegatronBackendConfig) -> tuple[int, ...]:
    """Returns the layers of each pipeline stage. Raises ConfigError where they cannot be shared out."""
    first, last, stages = backend.first_stage_layers, backend.last_stage_layers, sizes.pipeline
    said = [number for number in (first, last) if number is not None]
    if stages == 1:
        asked = {"first_stage_layers": first, "last_stage_layers": last, "virtual": backend.virtual > 1}
        for key in (key for key, wanted in asked.items() if wanted):
            raise ConfigError(
                f"actor.backend.{key}: there is one stage (parallel.pipeline=1), which has all layers; "
                "remove it",
                key=f"actor.backend.{key}",
            )
        return (layers,)
    others, rest = stages - len(said), layers - sum(said)
    fits = rest == 0 if others == 0 else rest >= others and rest % others == 0
    if not fits:
        beside = f" beside the {sum(said)} of first_stage_layers and last_stage_layers" if said else ""
        raise refused("pipeline", sizes, f"{rest} layers{beside} cannot be shared out among {others} stages")
    each = [rest // others] * others if others else []
    found = (*([] if first is None else [first]), *each, *([] if last is None else [last]))
    for number in found:
        if number % backend.virtual:
            raise ConfigError(
                f"actor.backend.virtual={backend.virtual}: the {number} layers of a stage cannot be divided "
                "by it; lower it, or leave it out",
                key="actor.backend.virtual",
            )
    return found


def chunks_of(layers: Sequence[int], virtual: int, stage: int) -> list[range]:
    """Returns which of all layers the chunks of a stage have: a token goes through the first chunk of every
    stage, then through the second of every stage. layers: of each stage.
    """
    each = [number // virtual for number in layers]
    starts = [turn * sum(each) + sum(each[:stage]) for turn in range(virtual)]
    return [range(start, start + each[stage]) for start in starts]


def check_targets(weights: Iterable[str], stages: Sequence[Sequence[range]]) -> None:
    """Raises ConfigError for a stage of which nothing would learn. weights: those that have adapters; stages:
    the layers of each one's chunks, but for a stage that has a value head.
    """
    adapted = {int(found[1]) for name in weights if (found := re.search(r"\.layers\.(\d+)\.", name))}
    for number, chunks in enumerate(stages):
        if not any(layer in chunk for chunk in chunks for layer in adapted):
            raise ConfigError(
                f"lora.targets: none of them is in a layer of pipeline stage {number}, of which nothing "
                "would learn; name modules of all stages, or have fewer stages",
                key="lora.targets",
            )


def _why_not(config: PreTrainedConfig) -> str:
    """Returns what of a model Megatron would compute otherwise than transformers; "": nothing."""
    text = config.get_text_config()
    if config.model_type not in FAMILIES:
        return f"there is no table for {config.model_type} models"
    kind = f"a {config.model_type} model with"
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    known = {"default", "llama3"} | ({"yarn"} if text.model_type in ROTARY_SCALE else set())
    if rope_changes_at(text) is not None or rope.get("rope_type", "default") not in known:
        return f"{kind} rope_parameters of the type {rope.get('rope_type')}"
    if text.hidden_act != "silu":
        return f"{kind} hidden_act={text.hidden_act}"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(text, name, False):
            return f"{kind} {name}"
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        return f"{kind} windows of attention (layer_types, sliding_window)"
    if family_of(config).logits.softcap is not None or family_of(config).logits.scale != 1.0:
        return f"{kind} scaled logits"
    return ""
