"""Prints the table of docs/models.md, from the tiny model of every family: python -m tests.models.table"""

from __future__ import annotations

from typing import Any

from rondo.core.errors import RondoError
from rondo.models import family_of, load_model_config
from rondo.models.family import why_blind
from rondo.rollout import NativeEngine
from rondo.rollout.sglang.options import ENGINE as SGLANG
from rondo.rollout.third_party import ThirdParty
from rondo.rollout.vllm.options import ENGINE as VLLM
from tests.models.families import FAMILIES, MAX_POSITIONS, config_of, source_of
from tests.rollout.conftest import own_engine

_WHAT = {
    "sliding_window": "window",
    "attn_logit_softcapping": "soft-caps",
    "logits_scaling": "scales",
    "logit_scale": "scales",
    "kv_lora_rank": "latent attention",
    "n_group": "groups of experts",
    "conv_L_cache": "convolutions",
    "linear_num_key_heads": "linear attention",
    "attention_chunk_size": "chunks",
}


def lines() -> list[str]:
    out = [
        "| family | what is in the tiny model | trainer | native engine | vLLM | SGLang |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        config = load_model_config(source_of(family))
        trainer = "a pass per document" if family_of(config).not_packable else "packed"
        native = _decode_path(config)
        if native == "lean":  # heads of the tiny model may be narrower than this processor's vectors
            config.head_dim = 64
            native = _decode_path(config)
        thirds = [_served(engine, config) for engine in (VLLM, SGLANG)]
        out.append(f"| {family} | {what(family)} | {trainer} | {native} | {' | '.join(thirds)} |")
    return out


def _served(engine: ThirdParty, config: Any) -> str:
    kind = config.model_type
    if kind in engine.gpu_models:
        return "GPU only, not run"
    if kind not in engine.models:
        return "refused"
    return "yes" if why_blind(config) or kind in engine.seeing_models else "text alone"


def _decode_path(config: Any) -> str:
    try:
        engine = own_engine(NativeEngine, config, max_context=MAX_POSITIONS)
    except RondoError:
        return "`transformers`"
    engine.close()
    return engine.decode_path


def what(family: str) -> str:
    """Returns what makes it another model than Llama, as its config says."""
    config = config_of(family)
    found = [name for key, name in _WHAT.items() if config.get(key)]
    text = config.get("text_config", config)
    if any("expert" in key and text[key] for key in text):
        found.append("experts")
    if "vision_config" in config:
        found.append("images")
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type", "default") != "default":
        found.append(f"rope {rope['rope_type']}")
    if "partial_rotary_factor" in rope:
        found.append("partial rotation")
    return ", ".join(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join(lines()))
