"""Tiny random models and a helper that runs requests through an engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rondo.core.types import Completion, GenerateRequest, SamplingParams
from rondo.models.names import persistent_buffers
from rondo.models.source import ModelSource
from rondo.rollout import EngineSpec, NativeEngine
from rondo.rollout.build import OWN
from rondo.rollout.transformers.engine import TransformersEngine

EngineT = TypeVar("EngineT", NativeEngine, TransformersEngine)

VOCAB = 101
_BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**_BASE, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_BASE, num_key_value_heads=2),
    "llama": lambda: LlamaConfig(**_BASE, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "llama3": lambda: LlamaConfig(
        **_BASE,
        num_key_value_heads=4,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_BASE),
    "gpt2": lambda: GPT2Config(
        **_BASE | {"n_inner": 96}, n_positions=100, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "olmo2": lambda: Olmo2Config(**_BASE),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_BASE, num_key_value_heads=2, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "gemma3": lambda: Gemma3TextConfig(**_BASE, num_key_value_heads=2, head_dim=16),
}
LLAMA_LIKE = ("qwen3", "qwen2", "llama", "llama3")


def build(family: str, seed: int = 0) -> torch.nn.Module:
    """A random model whose norms and biases are not trivial."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.data for name, tensor in (*model.named_parameters(), *persistent_buffers(model))}


def make_engine(model: torch.nn.Module, **settings: Any) -> NativeEngine:
    """Shares the model's storage unless told otherwise."""
    settings = {"parameters": weights(model), "max_concurrent": 8, "max_context": 100} | settings
    return own_engine(NativeEngine, model.config, **settings)


def own_engine(
    kind: type[EngineT],
    model_config: Any,
    parameters: Mapping[str, torch.Tensor] | None = None,
    **settings: Any,
) -> EngineT:
    """An engine of rondo's own in this process; settings: fields of its spec, and its options."""
    options = {name: settings.pop(name) for name in ("decode", "cache_bytes") if name in settings}
    defaults = {"dtype": "float32", "device": "cpu", "max_context": 2048, "max_concurrent": 256, "threads": 1}
    name = next(name for name, own in OWN.items() if own is kind)
    source = ModelSource(config={"model_type": model_config.model_type})
    return kind(EngineSpec(name, source, **{**defaults, **settings}), model_config, parameters, **options)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed * 1000 + length).integers(0, VOCAB, length).astype(np.int32)


def request(name: str, token_ids: np.ndarray, max_tokens: int = 12, **fields: Any) -> GenerateRequest:
    """Fields of the request or of its sampling parameters."""
    own = {
        key: fields.pop(key) for key in ("seed", "affinity", "deadline_seconds", "prefix") if key in fields
    }
    return GenerateRequest(name, token_ids, SamplingParams(max_tokens, **fields), **own)


def run(engine: NativeEngine, requests: Iterable[GenerateRequest]) -> list[Completion]:
    async def all_requests() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(r) for r in requests)))

    return asyncio.run(all_requests())


class Hold:
    """The engine stands still at the token boundary where a running request has `tokens` tokens, until it is
    paused or `release` is called, once: whoever wants to do something to a request that has begun and is not
    done has the time for it.
    """

    def __init__(self, engine: NativeEngine, tokens: int) -> None:
        self._engine, self._tokens, self._drain = engine, tokens, engine._drain
        self._reached, self._over = threading.Event(), threading.Event()
        engine._drain = self._hold_and_drain  # type: ignore[method-assign]

    async def reached(self) -> None:
        """Until it stands still."""
        while not self._reached.is_set():
            await asyncio.sleep(0.001)

    def release(self) -> None:
        self._over.set()

    def _hold_and_drain(self) -> bool:
        scheduler = self._engine._decoder.scheduler
        if any(scheduler.table.indices[slot] >= self._tokens for slot, _ in scheduler.running):
            self._reached.set()
            while not (self._over.is_set() or self._engine._paused):
                time.sleep(0.0005)
            self._over.set()
        return self._drain()


def true_log_probs(model: torch.nn.Module, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """Of the response's tokens, by one float32 forward over prompt and response."""
    n = len(completion.prompt_ids)
    ids = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        scores = model(ids[None]).logits[0, n - 1 : -1].float() / temperature
    return scores.log_softmax(-1).gather(1, ids[n:, None])[:, 0].numpy()


@pytest.fixture(scope="module", params=["generic", "lean", "compiled"])
def decode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
