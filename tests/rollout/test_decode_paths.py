"""What comes out is what the model says: tokens as transformers' generate, log-probs as a direct forward."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from rondo.core.errors import ConfigError
from rondo.rollout import NativeEngine, cache_bytes
from rondo.rollout.native import kernels
from tests.messages import full_text
from tests.rollout.conftest import (
    CONFIGS,
    LLAMA_LIKE,
    build,
    make_engine,
    own_engine,
    prompt,
    request,
    run,
    true_log_probs,
)

LENGTHS = (1, 2, 16, 17, 40)
CASES = [(family, path) for family in LLAMA_LIKE for path in ("generic", "lean", "compiled")]
CASES += [(family, "generic") for family in ("gpt_neox", "gpt2", "olmo2", "gemma3", "qwen3_moe")]


def greedy_by_transformers(model: torch.nn.Module, ids: np.ndarray, new: int) -> np.ndarray:
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new)
    return out[0, len(ids) :].numpy()


@pytest.mark.parametrize(("family", "path"), CASES)
def test_greedy_and_log_probs(family: str, path: str) -> None:
    model = build(family)
    engine = make_engine(model, decode=path)
    assert engine.decode_path == path
    prompts = [prompt(n) for n in LENGTHS]
    greedy = [request(f"g{i}", p, 30, temperature=0.0) for i, p in enumerate(prompts)]
    sampled = [request(f"s{i}.{j}", p, 30, temperature=0.7, seed=10 * i + j, affinity=str(i), top_p=0.9)
               for i, p in enumerate(prompts) for j in range(2)]  # fmt: skip
    out = run(engine, greedy + sampled)
    for ids, completion in zip(prompts, out, strict=False):
        np.testing.assert_array_equal(completion.prompt_ids, ids)
        np.testing.assert_array_equal(completion.token_ids, greedy_by_transformers(model, ids, 30))
        np.testing.assert_allclose(completion.log_probs, true_log_probs(model, completion), atol=1e-5, rtol=0)
        assert completion.finish_reason == "length"
    for completion in out[len(prompts) :]:
        np.testing.assert_allclose(
            completion.log_probs, true_log_probs(model, completion, 0.7), atol=1e-5, rtol=0
        )
    engine.close()


def test_paths_sample_the_same_tokens() -> None:
    model = build("qwen3")
    settings = [(1, 0, 1, 0), (1.3, 5, 1, 0), (0.8, 0, 0.7, 0), (1, 0, 1, 0.2), (1, 9, 0.8, 0.05)]
    requests = [request(f"{i}", prompt(3 + i), 20, seed=i, temperature=t, top_k=k, top_p=p, min_p=m)
                for i, (t, k, p, m) in enumerate(settings)]  # fmt: skip
    outs = []
    for path in ("generic", "lean", "compiled"):
        engine = make_engine(model, decode=path)
        outs.append(run(engine, requests))
        engine.close()
    for generic, lean, compiled in zip(*outs, strict=True):
        np.testing.assert_array_equal(generic.token_ids, lean.token_ids)
        np.testing.assert_array_equal(generic.token_ids, compiled.token_ids)
        np.testing.assert_allclose(generic.log_probs, compiled.log_probs, atol=1e-5, rtol=0)


def test_auto_says_what_it_took_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(build("qwen3"))
    assert (engine.decode_path, engine.describe()) == (
        "compiled",
        "native rollout engine: compiled path (the fastest path for this model, dtype and device)",
    )
    engine.close()
    engine = make_engine(build("gpt_neox"))
    assert engine.decode_path == "generic"
    assert "GPTNeoXForCausalLM is not one of" in engine.decode_reason
    engine.close()
    model = build("qwen3").to(torch.bfloat16)
    engine = make_engine(model, dtype="bfloat16")
    assert engine.decode_path == "lean"
    assert "float32 only" in engine.decode_reason
    completion = run(engine, [request("a", prompt(9), 20)])[0]
    np.testing.assert_allclose(completion.log_probs, true_log_probs(model, completion), atol=0.1)
    engine.close()
    kernels.library.cache_clear()
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    engine = make_engine(build("qwen3"))
    assert engine.decode_path == "lean"
    assert "no C compiler" in engine.decode_reason
    engine.close()
    with pytest.raises(ConfigError, match=full_text("decode=compiled cannot be used: no C")):
        make_engine(build("qwen3"), decode="compiled")
    kernels.library.cache_clear()


def test_asking_for_an_unusable_path_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"decode=lean cannot be used: GPTNeoX"):
        make_engine(build("gpt_neox"), decode="lean")
    with pytest.raises(ConfigError, match=full_text("float32 only, not in torch.bfloat16; set")):
        make_engine(build("qwen3").to(torch.bfloat16), decode="compiled", dtype="bfloat16")
    with pytest.raises(ConfigError, match="choose auto"):
        make_engine(build("qwen3"), decode="fast")


def test_what_attention_cannot_do_is_refused() -> None:
    from transformers import Phi3Config, Qwen3NextConfig

    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 32, "vocab_size": 32, "head_dim": 16}  # fmt: skip
    with pytest.raises(ConfigError, match="linear_attention"):
        own_engine(NativeEngine, Qwen3NextConfig(**tiny), max_concurrent=1, max_context=32)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope = Phi3Config(
        **{**tiny, "pad_token_id": None}, original_max_position_embeddings=32, rope_parameters=rope | factors
    )
    with pytest.raises(ConfigError, match=full_text("sequences of more than 32 tokens")):
        own_engine(NativeEngine, longrope, max_concurrent=1, max_context=33)
    own_engine(NativeEngine, longrope, max_concurrent=1, max_context=32).close()


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_cache_bytes_are_planned(family: str) -> None:
    engine = make_engine(build(family), max_concurrent=24)
    planned = cache_bytes(CONFIGS[family](), 24, 100, "float32")
    if engine.decode_path != "compiled":  # one block of 64 positions more, for padding: a slot has two
        planned += planned // 48
    assert asyncio.run(engine.stats()).maxima["rollout/cache_bytes"] == planned
    engine.close()
