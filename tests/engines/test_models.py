"""Other models than the suite's: a mixture of experts, and one in bfloat16. An engine of its own for each."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch

from rondo.core.errors import ConfigError, WeightSyncError
from rondo.core.types import Completion
from rondo.models.loading import load_model_config
from rondo.models.routers import RouteRecorder
from rondo.models.source import ModelSource
from rondo.rollout.build import third_party
from rondo.weights.checksum import checksum
from tests.engines.conftest import (
    IN_PROCESS,
    QWEN3,
    TOLERANCE,
    Bench,
    gaps,
    greedy,
    no_children_left,
    prompt,
    request,
    scores,
    start,
    weights,
)
from tests.messages import full_text
from tests.models.families import VOCAB, config_of, make, source_of

pytestmark = pytest.mark.timeout(900)  # the start of an engine included, on a machine that is slow

MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,  # SGLang's has an output head of its own always
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
LLAMA = QWEN3 | {"model_type": "llama", "tie_word_embeddings": False}
BFLOAT16_TOLERANCE = 0.15  # nats; four times of what was seen. Other weights: 1 on average, and up to 4
KINDS = (*IN_PROCESS, "vllm", "sglang")
PROMPTS = [prompt(length) for length in (3, 17, 40)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    left = no_children_left({child.pid for child in psutil.Process().children(recursive=True)})
    yield request.param
    if request.param not in IN_PROCESS:
        assert not left()


def answers(bench: Bench) -> tuple[list[Completion], list[Completion]]:
    """Greedy ones, and sampled ones."""
    outs = bench.run(
        [
            *(request(ids, 16, temperature=0.0) for ids in PROMPTS),
            *(request(prompt(9, i), 16, seed=i) for i in range(5)),
        ]
    )
    return outs[:3], outs[3:]


def test_a_mixture_of_experts(kind: str) -> None:
    """Two sets of weights, and between them an update that fails when the experts have arrived."""
    engine = start(kind, source=ModelSource(config=MOE))
    bench = Bench(kind, engine, MOE)

    def serves(model: torch.nn.Module) -> None:
        outs, sampled = answers(bench)
        for ids, out in zip(PROMPTS, outs, strict=True):
            np.testing.assert_array_equal(out.token_ids, greedy(model, ids, 16))
        assert max(gaps(model, out).max() for out in [*outs, *sampled]) < TOLERANCE

    try:
        bench.load(bench.model)
        serves(bench.model)
        tensors = weights(bench.other)
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        sums["model.layers.1.mlp.experts.down_proj"] += 1
        with pytest.raises(WeightSyncError, match=full_text("down_proj' is not what was sent")):
            bench.send(tensors, None, sums)
        bench.load(bench.other)
        serves(bench.other)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["native", "native-process", "transformers", "sglang"], indirect=True)
def test_routes_of_a_mixture(kind: str) -> None:
    """Those that the model itself computes. Three answers share a prompt."""
    engine = start(kind, source=ModelSource(config=MOE), routes=True)
    bench = Bench(kind, engine, MOE)

    def chosen(model: torch.nn.Module, out: Completion) -> list[list[set[int]]]:
        recorder = RouteRecorder(model)
        ids = np.concatenate([out.prompt_ids, out.token_ids[:-1]]).astype(np.int64)
        with torch.no_grad():
            model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
        return as_sets(recorder.latest().numpy())

    def as_sets(routes: np.ndarray) -> list[list[set[int]]]:
        return [[set(one) for one in token] for token in routes.reshape(len(routes), 2, 2).tolist()]

    try:
        for model in (bench.model, bench.other):
            bench.load(model)
            requests = [request(prompt(9), 12, seed=i) for i in range(3)]
            requests += [request(prompt(40), 16, temperature=0.0), request(prompt(3), 1, seed=7)]
            for out in bench.run(requests):
                assert out.routes is not None
                assert (out.routes.dtype, out.routes.shape[1]) == (np.uint8, 4)
                assert as_sets(out.routes) == chosen(copy.deepcopy(model), out)
    finally:
        engine.close()


def test_a_rotary_embedding_that_is_stretched(kind: str) -> None:
    """model.override: 64 positions become 1024. All three compute YaRN as transformers does."""
    short = QWEN3 | {"max_position_embeddings": 64}
    override = {"rope_parameters": {"rope_type": "yarn", "factor": 16.0}, "max_position_embeddings": 1024}
    engine = start(kind, source=ModelSource(config=short, override=override))
    yarn = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    }
    bench = Bench(kind, engine, short | {"rope_parameters": yarn, "max_position_embeddings": 1024})
    try:
        bench.load(bench.model)
        prompts = [prompt(length) for length in (17, 100, 200)]
        outs = bench.run([request(ids, 16, temperature=0.0) for ids in prompts])
        for ids, out in zip(prompts, outs, strict=True):
            np.testing.assert_array_equal(out.token_ids, greedy(bench.model, ids, 16))
        assert max(gaps(bench.model, out).max() for out in outs) < TOLERANCE
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "family", "size"),
    [
        ("vllm", "mixtral", {"head_dim": 32}),
        ("vllm", "gemma3_text", {"head_dim": 32}),
        ("vllm", "granitemoe", {"hidden_size": 128}),
        ("sglang", "qwen2", {"hidden_size": 128}),
    ],
)
def test_families(kind: str, family: str, size: dict[str, int]) -> None:
    """Other names in checkpoints, other norms, windows, scales; more were tried by hand (docs/models.md)."""
    engine = start(kind, source=ModelSource(config=config_of(family, **size)), max_context=100)
    bench, model = Bench(kind, engine), make(family, **size)
    try:
        bench.load(model)
        prompts = [ids % VOCAB for ids in PROMPTS]
        outs = bench.run([request(ids, 16, temperature=0.0) for ids in prompts])
        for ids, out in zip(prompts, outs, strict=True):
            np.testing.assert_array_equal(out.token_ids, greedy(model, ids, 16))
            assert gaps(model, out).max() < 1e-4  # these models are surer of their tokens
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "family", "message"),
    [
        ("vllm", "cohere2", "a cohere2 model has not been seen to be the same model in vLLM"),
        ("vllm", "deepseek_v3", "the CPU build of vLLM does not serve a deepseek_v3 model"),
        ("sglang", "gemma2", "a gemma2 model has not been seen to be the same model in SGLang"),
        ("sglang", "llama", r"SGLang leaves out the biases of the MLP of this llama model \(mlp_bias\)"),
    ],
)
def test_families_that_are_refused_by_name(kind: str, family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*use rollout.engine=native or transformers"):
        third_party(kind).check_model(load_model_config(source_of(family)), "cpu")


def test_bfloat16(kind: str) -> None:
    """Weights trained in float32 travel and serve in bfloat16. What decides is the bfloat16 model."""
    engine = start(kind, source=ModelSource(config=LLAMA), dtype="bfloat16")
    bench = Bench(kind, engine, LLAMA)
    try:
        for model in (bench.model, bench.other):
            bench.load(model, torch.bfloat16)
            model.bfloat16()
            outs, sampled = answers(bench)
            assert max(gaps(model, out).max() for out in [*outs, *sampled]) < BFLOAT16_TOLERANCE
            for out in outs:  # the likeliest token, or one that rounding cannot tell from it
                best = scores(model, out).max(-1).values.numpy()
                assert (best - out.log_probs).max() < 2 * BFLOAT16_TOLERANCE
    finally:
        engine.close()
