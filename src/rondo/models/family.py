"""Everything that differs between model families: one record each, in one table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from rondo.core.errors import ConfigError
from rondo.models.vision import (
    GEMMA3,
    GLM46V,
    IDEFICS3,
    INTERNVL,
    LLAVA_ONEVISION,
    QWEN2_5_VL,
    QWEN3_VL,
    SMOLVLM,
    ImageFamily,
)


@dataclass(frozen=True)
class LogitTransform:
    """What a model does with its output head's product z before that is its logits: scale · z, and with a
    soft-cap softcap · tanh(scale · z / softcap).
    """

    scale: float = 1.0
    """Multiplies z."""
    softcap: float | None = None
    """Logits stay between -softcap and softcap; None: as they are."""


AS_THEY_ARE = LogitTransform()


@dataclass(frozen=True)
class Family:
    """What a transformers config does not say about its model type. A new family is one record in FAMILIES; a
    type without one has the defaults.
    """

    model_type: str
    """The model type as transformers names it."""
    not_packable: str = ""
    """Why documents must not share a forward pass; each has one of its own then, with transformers' eager
    attention. "": they may, kept apart by the variable-length attention function."""
    llama_class: str = ""
    """The class whose modules are Llama's (perhaps with biases or norms of queries and keys), so that the
    lean and compiled decode paths can run it. "": none."""
    undeclared: frozenset[str] = frozenset()
    """Keys that the model reads although its config class does not declare them."""
    text_prefix: str = ""
    """Its language model, which is what is trained, is a part of a larger one: the config's `text_config`,
    and in checkpoints the tensors whose names begin so. "": all of the model is trained."""
    beside_text: tuple[str, ...] = ()
    """How the names of its other parts begin, which are left out."""
    images: ImageFamily | None = None
    """How it reads images; None: rondo gives it none."""
    why_blind: str = ""
    """Why not, of a model that could be shown some."""
    logits: LogitTransform = AS_THEY_ARE
    """As its config sets it; filled in by `family_of`."""
    rope_changes_at: int | None = None
    """Documents of more positions have other rotary embeddings (longrope), for all of their tokens; those of
    a pass have the same ones. Filled in by `family_of`."""


_WANTS_TORCHVISION = "its image processor needs torchvision, which rondo does without"
_ENDS = frozenset({"bos_token_id", "eos_token_id"})
_ELSEWHERE = "its state or positions do not go through the attention interface"
FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", llama_class="LlamaForCausalLM"),
        Family("qwen2", llama_class="Qwen2ForCausalLM"),
        Family("qwen3", llama_class="Qwen3ForCausalLM"),
        Family("qwen3_moe", undeclared=frozenset({"head_dim"})),
        # What vLLM asks for before it makes the router's bias; transformers has it always.
        Family("deepseek_v3", undeclared=frozenset({"topk_method"})),
        Family(
            "kimi_k25",
            text_prefix="language_model.",
            beside_text=("vision_tower.", "mm_projector."),
            why_blind=_WANTS_TORCHVISION,
        ),
        Family("qwen2_5_vl", images=QWEN2_5_VL),
        Family("qwen3_vl", undeclared=_ENDS, images=QWEN3_VL),
        Family("qwen3_vl_moe", undeclared=frozenset({"norm_topk_prob"}), images=QWEN3_VL),
        Family("qwen3_5", images=QWEN3_VL),
        Family("glm46v", undeclared=_ENDS, images=GLM46V),
        Family("glm4v_moe", undeclared=_ENDS | {"head_dim", "use_qk_norm"}, images=GLM46V),
        Family("llava_onevision", images=LLAVA_ONEVISION),
        Family("internvl", images=INTERNVL),
        Family("gemma3", undeclared=frozenset({"vision_use_head"}), images=GEMMA3),
        Family("idefics3", images=IDEFICS3),
        Family("smolvlm", images=SMOLVLM),
        Family("kimi_vl", why_blind=_WANTS_TORCHVISION),
        Family("phi4_multimodal", why_blind=_WANTS_TORCHVISION),
        Family("stablelm", not_packable="its attention is not told where documents begin"),
        Family("gpt2", not_packable=_ELSEWHERE),
        Family("bloom", not_packable=_ELSEWHERE),
        Family("mpt", not_packable=_ELSEWHERE),
        Family("falcon", not_packable=_ELSEWHERE),
        Family("mamba", not_packable=_ELSEWHERE),
        Family("mamba2", not_packable=_ELSEWHERE),
        Family("rwkv", not_packable=_ELSEWHERE),
        Family("jamba", not_packable=_ELSEWHERE),
        Family("bamba", not_packable=_ELSEWHERE),
    )
}


def record_of(model_type: str) -> Family:
    """Returns what is known of a model type, whatever its config says."""
    return FAMILIES.get(model_type, Family(model_type))


def why_blind(config: Any) -> str:
    """Returns why models of this config are given no images; "" if they are."""
    record = record_of(str(config.model_type))
    if record.images is not None:
        return ""
    return f"rondo gives no images to a {record.model_type} model" + (
        record.why_blind and f": {record.why_blind}"
    )


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns transformers' class that makes and loads models of this config. Raises ConfigError where that
    has none, and for encoder-decoder models.
    """
    model_type = str(config.model_type)
    if getattr(config.get_text_config(), "is_encoder_decoder", False):
        raise ConfigError(f"{model_type} is an encoder-decoder model; rondo has causal (decoder-only) ones")
    takes_images = record_of(model_type).images is not None
    kind = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    brings_code = kind.__name__ in (getattr(config, "auto_map", None) or {})
    if not brings_code and type(config) not in kind._model_mapping:
        raise ConfigError(
            f"transformers has no {kind.__name__} of type {model_type}: rondo trains models that write text"
        )
    return kind


def family_of(config: PreTrainedConfig) -> Family:
    """Returns the family of a causal language model with this config, which may forbid packing by itself."""
    text = config.get_text_config()
    family = dataclasses.replace(
        record_of(str(config.model_type)), logits=_logits_of(text), rope_changes_at=rope_changes_at(text)
    )
    other = layers_beside_attention(text)
    if other:
        return dataclasses.replace(family, not_packable=f"it has layers of type {', '.join(other)}")
    return family


def _logits_of(config: PreTrainedConfig) -> LogitTransform:
    """Reads the logit transform from settings that mean the same in all families that have them (`check_head`
    of `training` tries it).
    """
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def rope_changes_at(config: Any) -> int | None:
    """Returns how many positions a document has at most with the rotary embeddings of short ones, of a model
    that has others for long ones; None for all other models.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None


def layers_beside_attention(config: Any) -> list[str]:
    """Returns the types of a config's layers that are no plain attention: they keep states that no mask
    shows.
    """
    return sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})


def layer_configs(config: Any) -> list[Any]:
    """Returns what a config says of each layer: most say the same of all."""
    layers = range(config.num_hidden_layers)
    if getattr(config, "is_heterogeneous", False):  # transformers refuses to read such keys of the whole
        return [config.per_layer_config[layer] for layer in layers]
    return [config for _ in layers]


def head_widths(config: Any) -> tuple[int, int]:
    """Returns the width of one head's queries and keys, and that of its values, in the layer whose are the
    widest. (Of latent attention: after expansion.)
    """
    if getattr(config, "is_heterogeneous", False):
        return max(map(head_widths, layer_configs(config)))
    if getattr(config, "qk_nope_head_dim", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width, getattr(config, "v_head_dim", None) or width
