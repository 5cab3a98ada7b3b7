"""How many positions a model has, as its config says."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.core.errors import ConfigError
from rondo.models import ModelSource, check_positions, load_model_config, longest_context
from tests.messages import full_text


def positions(model_type: str, **fields: Any) -> int | None:
    return longest_context(load_model_config(ModelSource(config={"model_type": model_type, **fields})))


def test_what_configs_of_published_models_allow() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    llama3 = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    gemma3 = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    long = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
    assert positions("qwen3", max_position_embeddings=40960) == 40960
    assert positions("qwen3", max_position_embeddings=40960, rope_parameters=yarn) == 131072  # as Qwen says
    assert positions("llama", max_position_embeddings=131072, rope_parameters=llama3) == 131072
    assert positions(
        "llama", max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0}
    ) == (16384)
    dynamic = {"type": "dynamic", "factor": 4.0}  # beyond 4096 a sequence would depend on others
    assert positions("llama", max_position_embeddings=4096, rope_scaling=dynamic) == 4096
    assert positions("gemma3_text", max_position_embeddings=131072, rope_parameters=gemma3) == 131072
    assert positions("phi3", max_position_embeddings=131072, rope_parameters=long) == 131072
    assert positions("gpt2", n_positions=1024) == 1024
    assert positions("bloom") is None  # ALiBi


def test_one_token_too_many_names_both_numbers() -> None:
    config = load_model_config(ModelSource(config={"model_type": "qwen3", "max_position_embeddings": 64}))
    check_positions(config, 64, "64 tokens are asked for", "lower it")
    with pytest.raises(ConfigError, match=full_text("65 tokens are asked for, but the model")):
        check_positions(config, 65, "65 tokens are asked for", "lower it")
