"""The engine `transformers` with models of all kinds: greedy tokens are those of `generate`, and a request's
bits are its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rondo.core.errors import ConfigError, RolloutError
from rondo.core.types import Completion, GenerateRequest
from rondo.rollout import NativeEngine
from rondo.rollout.transformers.engine import TransformersEngine, nbytes
from tests.engines.conftest import Collected, gaps, greedy, paused_in_flight, request
from tests.messages import full_text
from tests.models.families import FAMILIES, MAX_POSITIONS, VOCAB, as_engines_do, make, of_text, persistent
from tests.rollout.conftest import own_engine

# State-space models and hybrids beside the families that users bring: caches under three names, and Bamba,
# which counts positions from 0 whatever its cache holds.
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
STATES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "jamba": {
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bloom": {"n_head": 4, "n_layer": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": MAX_POSITIONS},
}
# A forward sums states up in chunks, a decoder token by token: so far apart are the two in float32.
RECURRENT_TOLERANCE = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5", *STATES), 1e-4)
# What the native engine refuses, or what differs from the rest by its cache; the others are `slow`.
HARD = ("qwen3_next", "qwen3_5_text", "gpt_oss", "lfm2", "llama4_text", "gemma2", "deepseek_v3", "gpt2")
QUICK = (*STATES, *HARD)
MAX_CONTEXT = 100


def model_of(family: str) -> PreTrainedModel:
    if family in FAMILIES:
        return as_engines_do(make(family))
    base = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**base, **STATES[family]})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def engine_of(model: PreTrainedModel, **settings: Any) -> TransformersEngine:
    """Shares the model's storage unless told otherwise."""
    settings = {"parameters": persistent(model), "max_concurrent": 4, "max_context": MAX_CONTEXT} | settings
    return own_engine(TransformersEngine, model.config, **settings)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return of_text(np.random.default_rng([length, seed]).integers(0, VOCAB, length).astype(np.int32))


def run(engine: TransformersEngine, *requests: GenerateRequest) -> list[Completion]:
    async def all_requests() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))

    return asyncio.run(all_requests())


@pytest.mark.parametrize(
    "family",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK)],
)
def test_greedy_is_generate_and_log_probs_are_a_direct_forwards(family: str) -> None:
    model = model_of(family)
    engine = engine_of(model)
    prompts = [prompt(length) for length in (1, 7, 30)]  # below, about and above a window
    *answers, sampled = run(
        engine,
        *(request(ids, 24, temperature=0.0) for ids in prompts),
        request(prompts[1], 60, temperature=1.1, seed=5),
    )
    engine.close()
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids.tolist() == greedy(model, ids, 24).tolist()
    tolerance = RECURRENT_TOLERANCE.get(family, 1e-5)
    assert max(gaps(model, answer).max() for answer in answers) < tolerance
    assert gaps(model, sampled, 1.1).max() < tolerance


@pytest.fixture(params=["qwen3_next", "gpt_oss", "jamba"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return model_of(request.param)


def same(one: Completion, other: Completion, start: int = 0) -> None:
    """Bit for bit."""
    assert one.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_array_equal(one.log_probs[start:], other.log_probs[start:])


@pytest.mark.slow
def test_a_requests_bits_are_its_own(model: PreTrainedModel) -> None:
    """Alone; among others, with which it takes turns and shares a prompt; and in an engine where it waits."""
    engine, narrow = engine_of(model), engine_of(model, max_concurrent=1)
    one = request(prompt(20), 40, seed=9)
    (alone,) = run(engine, one)
    others = [request(prompt(20), 30, seed=1), request(prompt(3), 50, seed=2), request(prompt(20), 9, seed=3)]
    for among in (run(engine, *others[:2], one, others[2]), run(narrow, *others[:2], one, others[2])):
        same(among[2], alone)
    engine.close()
    narrow.close()


def paused_at(
    engine: TransformersEngine, one: Callable[[], GenerateRequest], between: Callable[[], Any]
) -> tuple[Completion, int]:
    """Has `between` run while the request is under way. Returns its completion, and the tokens it had."""

    async def main() -> tuple[Completion, int]:
        held = await paused_in_flight(engine, lambda: [one()], 5)
        count = len(engine._decoder.sequences()[0].token_ids)
        await asyncio.to_thread(between)
        await engine.resume()
        return await held.tasks[0], count

    return asyncio.run(main())


def test_what_sleep_gave_up_is_computed_again_as_it_was(model: PreTrainedModel) -> None:
    engine = engine_of(model)

    def one() -> GenerateRequest:
        return request(prompt(20), 70, seed=9)

    (undisturbed,) = run(engine, one())

    def sleep_and_wake() -> None:
        asyncio.run(engine.sleep())
        assert asyncio.run(engine.stats()).maxima["rollout/cache_bytes"] == 0
        asyncio.run(engine.wake())

    woken, count = paused_at(engine, one, sleep_and_wake)
    assert 5 <= count < 70
    same(woken, undisturbed)
    engine.close()


def test_new_weights_in_mid_generation_are_a_prefix_under_new_weights(model: PreTrainedModel) -> None:
    """What a replay and a replica that takes over make of it: bit for bit, from the same prefix."""
    engine = engine_of(model)

    def one() -> GenerateRequest:
        return request(prompt(20), 70, seed=9)

    def new_weights() -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1.01)
        engine.set_version(1)

    changed, count = paused_at(engine, one, new_weights)
    assert changed.policy_versions.tolist() == [0] * count + [1] * (70 - count)
    assert gaps(model, changed)[count:].max() < 1e-4
    begun = dataclasses.replace(
        changed,
        token_ids=changed.token_ids[:count],
        log_probs=changed.log_probs[:count],
        policy_versions=changed.policy_versions[:count],
    )
    (again,) = run(engine, dataclasses.replace(one(), prefix=begun))
    same(again, changed)
    engine.close()


def test_the_cache_is_planned_and_bounds_who_runs(model: PreTrainedModel) -> None:
    """Two sequences and the latest prompt fit; the others wait, and all get the same."""
    engine = engine_of(model)
    longest = engine._decoder._forward.cache_bytes(MAX_CONTEXT)
    small = engine_of(model, cache_bytes=3 * longest + 300)
    requests = [request(prompt(20, i), 30, seed=i) for i in range(4)]
    for ours, theirs in zip(run(small, *requests), run(engine, *requests), strict=True):
        same(ours, theirs)
    stats = asyncio.run(small.stats()).values()
    assert 1.9 < stats["perf/batch_occupancy"] <= 2  # the first starts, and the last ends, alone for a step
    assert stats["perf/decode_steps"] == stats["perf/decoded_tokens"] == 4 * 30
    seen: list[int] = []

    def measure() -> None:
        (sequence,) = small._decoder.sequences()
        seen.append(nbytes(sequence.cache))

    _, count = paused_at(small, lambda: request(prompt(29), 70, seed=9), measure)
    assert 0 < seen[0] <= small._decoder._forward.cache_bytes(29 + count - 1) <= longest
    with pytest.raises(ConfigError, match=full_text("is less than the keys and values of one")):
        engine_of(model, cache_bytes=longest)
    engine.close()
    small.close()


def test_weights_that_are_not_finite_are_an_error_and_the_next_request_is_served(
    model: PreTrainedModel,
) -> None:
    engine, name = engine_of(model), next(name for name, _ in model.named_parameters())
    whole = persistent(model)[name].clone()
    (before,) = run(engine, request(prompt(6), 8, seed=2))
    persistent(model)[name].fill_(torch.nan)
    engine.set_version(1)
    with pytest.raises(RolloutError, match=r"logits of request .* are not finite"):
        run(engine, request(prompt(6), 8))
    persistent(model)[name].copy_(whole)
    engine.set_version(2)
    (after,) = run(engine, request(prompt(6), 8, seed=2))
    same(after, before)
    engine.close()


def test_tokens_come_while_others_take_turns(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    seen = [Collected() for _ in range(3)]

    async def main() -> list[Completion]:
        calls = (engine.generate(request(prompt(4), 60, seed=i), one) for i, one in enumerate(seen))
        return list(await asyncio.gather(*calls))

    for collected, out in zip(seen, asyncio.run(main()), strict=True):
        assert len(collected.parts) > 1
        assert collected.token_ids == out.token_ids.tolist()
    engine.close()


@pytest.mark.parametrize("family", ["recurrent_gemma", "openai-gpt"])
def test_a_model_without_a_cache_for_each_sequence_is_refused(family: str) -> None:
    """RecurrentGemma keeps its states in its modules."""
    names = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": VOCAB, "lru_width": 32}  # fmt: skip
    if family == "openai-gpt":
        names = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB}
    with pytest.raises(ConfigError, match=full_text("returns no cache to go")):
        own_engine(TransformersEngine, AutoConfig.for_model(family, **names), max_context=16)


def test_an_encoder_decoder_is_refused() -> None:
    config = AutoConfig.for_model("bart", d_model=32, vocab_size=VOCAB)
    for engine in (NativeEngine, TransformersEngine):
        with pytest.raises(ConfigError, match="bart is an encoder-decoder model"):
            own_engine(engine, config, max_context=16)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "bloom", "mpt", "lfm2", "llama4_text"])
def test_what_the_native_engine_refuses_it_sends_here(family: str) -> None:
    with pytest.raises((ConfigError, RolloutError), match=r"set rollout\.engine=transformers"):
        own_engine(NativeEngine, model_of(family).config, max_context=MAX_POSITIONS)
