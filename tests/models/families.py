"""Every model family that users bring, made tiny: what differs between families (windows, soft-caps, scales,
rope kinds, experts, latent attention, buffers) is on, and small enough to bite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from rondo.models import ModelSource, load_model_config
from rondo.models.family import auto_class
from rondo.models.pixels import ImageReader
from rondo.models.vision import NamedTileFamily

VOCAB = 61
# In documents longer than it a window hides something, and than this many positions a stretched rope differs.
WINDOW = 8
MAX_POSITIONS = 128
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_BOTH_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# A tower of two blocks: patches of 4 pixels, four of which are a token.
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "initializer_range": 0.2,
}
IMAGE_TOKEN, VIDEO_TOKEN, IMAGE_START, IMAGE_END = 55, 56, 57, 58
_IMAGE_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
}


# Likewise, of images and tiles of 16 pixels.
_TILES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
# An image is up to 17 tiles, and as many names and what stands around them.
_LONGER = {"max_position_embeddings": 3 * MAX_POSITIONS}


def of_images(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2_moe": {**_MIXTURE, "shared_expert_intermediate_size": 16, "norm_topk_prob": True},
    "qwen3_moe": {**_MIXTURE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "mistral": {"head_dim": 8, "sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        **_BOTH_WINDOWS,
    },
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 24, **_BOTH_WINDOWS},
    "phi3": {"sliding_window": WINDOW},
    "phi4": {"model_type": "phi3", "rope_parameters": _HALF_ROPE, "tie_word_embeddings": True},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4": {"head_dim": 8, "rope_parameters": _HALF_ROPE, "attention_bias": True},
    "glm4_moe": {
        "rope_parameters": _HALF_ROPE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "olmo2": {},
    "olmo3": _BOTH_WINDOWS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
    },
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
    },
    "cohere2": {"head_dim": 8, "logit_scale": 0.5, **_BOTH_WINDOWS},
    "smollm3": {"no_rope_layers": [1, 0]},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": {
        **_LATENT,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
    },
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": _YARN,
        **_BOTH_WINDOWS,
    },
    "minimax_m2": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": _HALF_ROPE,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "seed_oss": {"head_dim": 16, "attention_bias": True, "attention_out_bias": False},
    "apertus": {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "stablelm": {"use_qkv_bias": True},
    "qwen3_next": {
        **_LINEAR,
        **_MIXTURE,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": _LINEAR,
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "gpt2": {},
    "qwen2_5_vl": {
        "text_config": {**_BASE, "rope_parameters": of_images([2, 1, 1])},
        "vision_config": {
            **_TOWER,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_IMAGE_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {
            **_BASE,
            "head_dim": 16,
            "rope_parameters": of_images([4, 2, 2], mrope_interleaved=True),
        },
        "vision_config": {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_IMAGE_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_BASE,
            **_MIXTURE,
            "head_dim": 16,
            "rope_parameters": of_images([4, 2, 2], mrope_interleaved=True),
        },
        "vision_config": {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_IMAGE_TOKENS,
    },
    "qwen3_5": {
        "text_config": {
            **_BASE,
            **_LINEAR,
            "rope_parameters": of_images([1, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.75),
        },
        "vision_config": {**_TOWER, "num_position_embeddings": 16},
        **_IMAGE_TOKENS,
    },
    "glm46v": {
        "text_config": {**_BASE, "rope_parameters": of_images([2, 1, 1])},
        "vision_config": {**_TOWER, "image_size": 16, "intermediate_size": 48},
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "image_start_token_id": IMAGE_START,
        "image_end_token_id": IMAGE_END,
    },
    "glm4v_moe": {
        "text_config": {
            **_BASE,
            "rope_parameters": of_images([2, 1, 1], partial_rotary_factor=1.0),
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        "vision_config": {**_TOWER, "image_size": 16, "intermediate_size": 48},
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VIDEO_TOKEN,
        "image_start_token_id": IMAGE_START,
        "image_end_token_id": IMAGE_END,
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **_BASE},
        "vision_config": {**_TILES, "image_size": 8, "vision_use_head": False},
        "image_grid_pinpoints": [[8, 8], [8, 16], [16, 8], [16, 16], [8, 32], [32, 8], [40, 40]],
        "image_token_index": IMAGE_TOKEN,
        "video_token_index": VIDEO_TOKEN,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **_BASE},
        "vision_config": {**_TILES, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE_TOKEN,
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
    "gemma3": {
        "text_config": {**_BASE, "head_dim": 8, "query_pre_attn_scalar": 24, **_BOTH_WINDOWS},
        "vision_config": {**_TILES, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": IMAGE_START,
        "eoi_token_index": IMAGE_END,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **_BASE, **_LONGER},
        "vision_config": _TILES,
        "scale_factor": 2,
        "image_token_id": IMAGE_TOKEN,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **_BASE, **_LONGER, "tie_word_embeddings": True},
        "vision_config": _TILES,
        "scale_factor": 4,
        "tie_word_embeddings": True,
        "image_token_id": IMAGE_TOKEN,
    },
}
WITH_IMAGES = tuple(family for family, own in FAMILIES.items() if "vision_config" in own)
STAND_INS = (IMAGE_TOKEN, VIDEO_TOKEN)

# One of each kind of difference; the tests of the others are `slow`.
DIFFERENT = (
    "qwen3",
    "llama3",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "phi4",
    "granitemoe",
    "cohere2",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "seed_oss",
    "apertus",
    "stablelm",
    "qwen3_next",
    "llama4_text",
    "gpt2",
    "qwen3_vl",
)


def every_family(*left_out: str) -> list[Any]:
    """Returns pytest's parameters for a test of all families."""
    slow = {family: () if family in DIFFERENT else (pytest.mark.slow,) for family in FAMILIES}
    return [pytest.param(family, marks=marks) for family, marks in slow.items() if family not in left_out]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """Returns transformers' keys of a family's tiny model, as `model.config` takes them."""
    own = FAMILIES[family]
    if family == "gpt2":
        names = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": MAX_POSITIONS, "vocab_size": VOCAB}
        return {"model_type": "gpt2", **names, "initializer_range": 0.2, **own, **changes}
    if family in WITH_IMAGES:
        own = {**own, "text_config": {**own["text_config"], **changes}}
        return {"model_type": family, **own}
    return {"model_type": family, **_BASE, **own, **changes}


def source_of(family: str, **changes: Any) -> ModelSource:
    return ModelSource(config=config_of(family, **changes), seed=3)


def make(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Returns transformers' own model, with its own attention, whose every tensor is drawn at random: norms,
    sinks, biases and persistent buffers too, which constructors leave at 0 or 1.
    """
    config = load_model_config(source_of(family, **changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation="eager").eval()
        constant = _constants(model)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and name not in constant:
                tensor.data += 0.1 * torch.randn_like(tensor)
    return model


def _constants(model: PreTrainedModel) -> set[str]:
    """Returns the persistent buffers of one number, which are settings and not weights (Apertus' beta)."""
    return {name for name, buffer in model.named_buffers() if buffer.ndim == 0}


def write(family: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Writes a checkpoint folder of several files as transformers itself does, and returns its model."""
    model = make(family, **changes)
    logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def persistent(model: PreTrainedModel) -> Mapping[str, torch.Tensor]:
    """Returns all parameters and persistent buffers, tied ones under each of their names."""
    return model.state_dict()


def reader_of(source: ModelSource) -> ImageReader:
    reader = ImageReader(source, load_model_config(source))
    if isinstance(reader.family, NamedTileFamily):
        reader.tell(TileNames())
    return reader


def shown_to(model: PreTrainedModel, ids: torch.Tensor, images: Sequence[Any], reader: Any) -> dict[str, Any]:
    """Returns what transformers' own forward takes beside ids [1, T] that show images."""
    if not images:
        return {}
    kinds, made = (ids == reader.token).int(), [torch.from_numpy(reader.pixels(one)) for one in images]
    if model.config.model_type == "llava_onevision":
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(made, batch_first=True),
            "image_sizes": torch.tensor([one.grid[1:] for one in images]),
            "batch_num_images": torch.tensor([len(images)]),
        }
    given: dict[str, Any] = {"pixel_values": torch.cat(made)}
    if isinstance(reader.family, NamedTileFamily):
        return {"pixel_values": given["pixel_values"][None]}
    if reader.family.turns:
        return {
            **given,
            "mm_token_type_ids": kinds,
            "image_grid_thw": torch.tensor([one.grid for one in images]),
        }
    return {**given, "token_type_ids": kinds} if reader.family.sees_itself else given


class TileNames:
    """A tokenizer of what is between the tokens of an image, where they are not side by side."""

    image_text = None

    def convert_ids_to_tokens(self, token: int) -> str:
        assert token == IMAGE_TOKEN
        return "<image>"

    def get_added_vocab(self) -> dict[str, int]:
        return {"<image>": IMAGE_TOKEN, "<fake_token_around_image>": IMAGE_START, "<global-img>": IMAGE_END}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        known = {**self.get_added_vocab(), "\n": 40, "\n\n": 41}
        words = re.findall(r"<row_(\d)_col_(\d)>|(<[^>]*>|\n+)", text)
        return {"input_ids": [known[word] if word else 6 * int(r) + int(c) for r, c, word in words]}


def of_text(token_ids: np.ndarray) -> np.ndarray:
    """Returns the ids with other tokens for those that stand for images, which a prompt of text has not."""
    return np.where(np.isin(token_ids, STAND_INS), IMAGE_START, token_ids).astype(token_ids.dtype)


def stand_ins(model: PreTrainedModel) -> list[int]:
    """Returns the tokens that stand for images and videos: of some families there are none for videos."""
    named = (getattr(model.config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in named if token is not None]


def as_engines_do(model: PreTrainedModel) -> PreTrainedModel:
    """Has `generate` sample none of the tokens that stand for images, as rondo's engines do; in place."""
    if model.config.model_type in WITH_IMAGES:
        model.generation_config.suppress_tokens = stand_ins(model)
    return model
