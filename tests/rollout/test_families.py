"""The native engine on families whose attention or head is their own: windows, soft-caps, sinks, scales."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, PreTrainedModel

from rondo.core.errors import ConfigError
from rondo.core.types import GenerateRequest
from rondo.platform.cpu import Cpu
from rondo.rollout import NativeEngine
from rondo.rollout.native.cache import block_bytes, layer_shapes
from rondo.rollout.native.generic import Rule, grouped_attention
from tests.messages import full_text
from tests.models.families import VOCAB, WINDOW, as_engines_do, every_family, make, of_text
from tests.rollout.conftest import make_engine, request, run, true_log_probs
from tests.rollout.test_decode_paths import greedy_by_transformers
from tests.rollout.test_invariance import same
from tests.rollout.test_paging import preemptions, run_in_order
from tests.training.test_families import CHANGES

FAMILIES = (
    "mistral",
    "phi3",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "granite",
    "granitemoe",
    "cohere2",
    "smollm3",
    "gpt_oss",
)
REFUSED = ("lfm2", "llama4_text", "qwen3_5", "qwen3_5_text", "qwen3_next")
OTHERS = every_family(*FAMILIES, *REFUSED)
# What the cache, the window's mask, and the blocks of soft-capped scores do at their edges.
LENGTHS = (1, WINDOW - 1, WINDOW, 17, 40, 63, 70)
CONTEXT = 128


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    model = make(family, **changes)
    model.generation_config.eos_token_id = None
    return as_engines_do(model)


def prompt(length: int) -> np.ndarray:
    return of_text(np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32))


def engine_of(model: PreTrainedModel, **settings: Any) -> NativeEngine:
    return make_engine(model, **{"max_context": CONTEXT} | settings)


def requests(new: int = 30) -> list[GenerateRequest]:
    return [
        request(f"{n}.{i}", prompt(n), new + 4 * i, seed=10 * n + i, affinity=f"{n}", temperature=temperature)
        for n in LENGTHS
        for i, temperature in enumerate((0.0, 0.9))
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_greedy_and_log_probs(family: str) -> None:
    model = tiny(family)
    engine = engine_of(model)
    assert engine.decode_path == "generic" or family not in FAMILIES
    for one, completion in zip(requests(), run(engine, requests()), strict=True):
        temperature = one.sampling.temperature
        if temperature == 0.0:
            expected = greedy_by_transformers(model, one.token_ids, 30)
            np.testing.assert_array_equal(completion.token_ids, expected)
        np.testing.assert_allclose(
            completion.log_probs, true_log_probs(model, completion, temperature or 1.0), atol=1e-5, rtol=0
        )
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phimoe", {"sliding_window": WINDOW}),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
        ("phi3", CHANGES["mimo_v2_flash"]),
        ("phi3", CHANGES["gemma4_text"]),
    ],
)
def test_windows_that_were_refused_or_not_seen(family: str, changes: dict[str, Any]) -> None:
    """PhiMoE tells of its window in masks alone; Qwen2 with a window does not take the lean path; heads of
    MiMo and of Gemma 4 differ by layer.
    """
    model = tiny(family, **changes)
    engine = engine_of(model)
    assert engine.decode_path == "generic"
    for n in LENGTHS:
        (completion,) = run(engine, [request(f"{n}", prompt(n), 30, temperature=0.0)])
        np.testing.assert_array_equal(completion.token_ids, greedy_by_transformers(model, prompt(n), 30))
    engine.close()


@pytest.fixture(scope="module", params=["gemma3_text", "gemma2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A window; soft-caps beside it."""
    return tiny(request.param)


def test_no_bit_depends_on_batch_mates(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many rows attention gathers at one time: all of them, a few, or one."""
    engine = engine_of(model, max_concurrent=24)
    together = run(engine, requests())
    for i in (0, 3, 8, 13):
        assert same(together[i], run(engine, [requests()[i]])[0])
    engine.close()
    monkeypatch.setattr(Cpu, "numbers", replace(Cpu.numbers, gathered_bytes=1))
    row_by_row = engine_of(model, max_concurrent=24)
    assert all(same(a, b) for a, b in zip(together, run(row_by_row, requests()), strict=True))
    row_by_row.close()


@pytest.mark.slow
def test_a_tiny_cache_gives_the_bits_of_a_large_one(model: PreTrainedModel) -> None:
    block = block_bytes(layer_shapes(model.config), torch.float32)
    large, small = (engine_of(model, cache_bytes=n * block) for n in (31, 4))
    whole, cut = (run_in_order(one, requests(50)) for one in (large, small))
    assert all(same(a, b) for a, b in zip(whole, cut, strict=True))
    assert preemptions(large) == 0
    assert preemptions(small) > 0
    large.close()
    small.close()


def test_sinks_depend_on_no_batch_mates() -> None:
    """The arithmetic alone: GPT-OSS' experts round with the batch."""
    generator = torch.Generator().manual_seed(0)
    query, sinks = torch.randn(20, 4, 1, 8, generator=generator), torch.randn(4, generator=generator)
    keys, values = (torch.randn(20, 192, 2, 8, generator=generator).transpose(1, 2) for _ in "kv")
    mask = torch.zeros(20, 1, 1, 192).masked_fill_(torch.arange(192) > 100, float("-inf"))
    rule = Rule(sinks=sinks)
    together = grouped_attention(query, keys, values, mask, rule)
    for rows, width in ((slice(0, 1), 192), (slice(7, 8), 128), (slice(3, 9), 128)):
        part = grouped_attention(
            query[rows], keys[rows, :, :width], values[rows, :, :width], mask[rows, ..., :width], rule
        )
        assert torch.equal(part, together[rows])


def test_a_prefix_goes_on_as_if_uninterrupted(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    whole = run(engine, [request("a", prompt(9), 40, seed=4)])[0]
    part = run(engine, [request("p", prompt(9), 17, seed=4)])[0]
    rest = run(engine, [request("q", prompt(9), 40, seed=4, prefix=part)])[0]
    np.testing.assert_array_equal(rest.token_ids, whole.token_ids)
    np.testing.assert_allclose(rest.log_probs, whole.log_probs, atol=1e-5)
    engine.close()


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_by_blocks_equals_a_softmax(softcap: float | None, sinks: bool) -> None:
    """In float64: five query positions, three blocks of keys of which each row sees another part."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, keys, values = draw(2, 4, 5, 8), draw(2, 2, 192, 8), draw(2, 2, 192, 6)
    mask = torch.zeros(2, 1, 5, 192, dtype=torch.float64)
    mask[0, :, :, 70:] = float("-inf")
    mask[1, :, :, :150] = float("-inf")
    of_heads = draw(4) if sinks else None
    got = grouped_attention(query, keys, values, mask, Rule(0.4, None, softcap, of_heads))
    scores = 0.4 * query @ keys.repeat_interleave(2, 1).mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if of_heads is not None:
        scores = torch.cat((scores, of_heads.view(1, 4, 1, 1).expand(2, 4, 5, 1)), -1)
    expected = torch.softmax(scores, -1)[..., :192] @ values.repeat_interleave(2, 1)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_a_layer_that_calls_attention_twice_is_refused() -> None:
    """Its second keys and values would lie where the first ones do."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = DiffLlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=full_text("DiffLlamaAttention calls attention")):
        engine_of(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def test_no_row_of_padding_ceases_to_be_finite() -> None:
    """What padding computes lies in the cache, and is multiplied by 0 where it is masked: NaN would stay."""
    engine = engine_of(tiny("gemma3_text", sliding_window=1))
    run(engine, [request(f"{n}", prompt(n), 20, seed=n) for n in (3, 90)])
    cache = engine._decoder.path.cache
    assert all(torch.isfinite(tensor).all() for tensor in (*cache.keys, *cache.values))
    assert asyncio.run(engine.stats()).maxima["rollout/cache_bytes"] == cache.nbytes
    engine.close()
