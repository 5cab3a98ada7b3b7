"""Where a mixture's tokens went, as engines keep it: what the model itself computes of the whole sequence,
whatever was shared, given back, continued or sent between processes; rows of agents have theirs.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rondo.agents.record import rows_of
from rondo.core.columns import PROMPT_ROUTED, ROUTED
from rondo.core.errors import ConfigError
from rondo.core.types import Completion, PolicyCall, Prompt, RouteShape, Trajectory
from rondo.data.rows import rows_from_trajectories
from rondo.models.routers import RouteRecorder
from rondo.models.source import ModelSource
from rondo.rollout import EngineSpec, NativeEngine, start_engine
from rondo.rollout.transformers.engine import TransformersEngine
from tests.rollout.conftest import _BASE, Hold, build, own_engine, prompt, request, run, weights
from tests.rollout.test_paging import long_requests, run_in_order

SHAPE = RouteShape(4, 4)  # two layers, two of four experts
MIXTURE = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3_moe")


def expected(model: torch.nn.Module, completion: Completion) -> np.ndarray:
    """What the model chooses at all tokens but the last, in one pass."""
    twin = copy.deepcopy(model)
    recorder = RouteRecorder(twin)
    ids = np.concatenate([completion.prompt_ids, completion.token_ids[:-1]]).astype(np.int64)
    with torch.no_grad():
        twin(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    return recorder.latest().numpy()


def make(kind: type[Any], model: torch.nn.Module, **settings: Any) -> Any:
    settings = {"parameters": weights(model), "max_concurrent": 8, "max_context": 192} | settings
    return own_engine(kind, model.config, routes=True, **settings)


@pytest.mark.parametrize("kind", [NativeEngine, TransformersEngine])
def test_routes_are_those_of_one_pass(model: torch.nn.Module, kind: type[Any]) -> None:
    """Two requests share a prompt, one continues another's beginning, one goes over a block's edge."""
    engine = make(kind, model)
    asked = [
        request("a", prompt(9), 12, seed=1),
        request("b", prompt(9), 12, seed=2),
        request("c", prompt(70), 6, seed=3),
        request("d", prompt(1), 1, seed=4),
    ]
    first = run(engine, asked)
    longer = np.concatenate([first[0].prompt_ids, first[0].token_ids, prompt(5)])
    for completion in (*first, *run(engine, [request("e", longer, 7, seed=5)])):
        assert completion.routes is not None
        assert completion.routes.dtype == np.uint8
        np.testing.assert_array_equal(completion.routes, expected(model, completion))
    engine.close()


@pytest.mark.parametrize("kind", [NativeEngine, TransformersEngine])
def test_routes_of_more_experts_than_a_byte_can_name(kind: type[Any]) -> None:
    config = Qwen3MoeConfig(**{**_BASE, **MIXTURE, "num_experts": 300})
    torch.manual_seed(0)
    many = AutoModelForCausalLM.from_config(config).eval()
    engine, twin = make(kind, many), copy.deepcopy(many)
    for completion in run(engine, [request(f"{i}", prompt(9), 12, seed=i) for i in range(3)]):
        recorder = RouteRecorder(copy.deepcopy(twin))
        assert completion.routes.dtype == recorder.shape.dtype == np.uint16
        np.testing.assert_array_equal(completion.routes, expected(twin, completion))
        assert completion.routes.max() > 255
    engine.close()


@pytest.mark.slow
def test_who_gives_its_blocks_back_keeps_its_routes(model: torch.nn.Module) -> None:
    engine = make(NativeEngine, model)
    block = engine._decoder.path.block_nbytes
    engine.close()
    tiny = make(NativeEngine, model, cache_bytes=5 * block)
    completions = run_in_order(tiny, long_requests())
    assert asyncio.run(tiny.stats()).sums["rollout/preemptions"] > 0
    for completion in completions:
        np.testing.assert_array_equal(completion.routes, expected(model, completion))
    tiny.close()


def test_tokens_keep_the_routes_of_the_weights_that_sampled_them(model: torch.nn.Module) -> None:
    """Weights come in the middle of an answer: its beginning goes through the new ones, too."""
    other = build("qwen3_moe", seed=5)
    engine = own_engine(NativeEngine, model.config, max_context=192, routes=True)

    def send(one: torch.nn.Module, version: int) -> None:
        engine.begin(version)
        for name, tensor in weights(one).items():
            engine.receive(name, tensor)
        engine.commit(version)

    async def change() -> Completion:
        hold = Hold(engine, 5)
        call = asyncio.create_task(engine.generate(request("a", prompt(9), 12, seed=1)))
        await hold.reached()
        await engine.pause()
        send(other, 2)
        await engine.resume()
        return await call

    send(model, 1)
    completion = asyncio.run(change())
    old = int((completion.policy_versions == 1).sum())
    assert 5 <= old < 12
    assert completion.routes is not None
    at = 9 + old - 1  # the positions that had gone through the model then
    np.testing.assert_array_equal(completion.routes[:at], expected(model, completion)[:at])
    np.testing.assert_array_equal(completion.routes[at:], expected(other, completion)[at:])
    engine.close()


def test_a_prefix_brings_its_routes(model: torch.nn.Module) -> None:
    engine = make(NativeEngine, model)
    (part,) = run(engine, [request("a", prompt(9), 5, seed=1)])
    marked = Completion(**{**vars(part), "routes": 3 - part.routes})
    (whole,) = run(engine, [request("b", prompt(9), 12, seed=1, prefix=marked)])
    assert len(whole.token_ids) == 12
    np.testing.assert_array_equal(whole.routes[:13], 3 - part.routes)
    np.testing.assert_array_equal(whole.routes[13:], expected(model, whole)[13:])
    engine.close()


@pytest.mark.slow
def test_routes_come_from_another_process(model: torch.nn.Module) -> None:
    source = ModelSource(config={"model_type": "qwen3_moe", **_BASE, **MIXTURE})
    spec = EngineSpec(
        "native", source, "float32", device="cpu", max_context=100, max_concurrent=4, threads=1, routes=True
    )
    engine = start_engine(spec)
    try:
        engine.begin(1)
        for name, tensor in weights(model).items():
            engine.receive(name, tensor)
        engine.commit(1)
        (completion,) = run(engine, [request("a", prompt(9), 12, seed=1)])
        np.testing.assert_array_equal(completion.routes, expected(model, completion))
    finally:
        engine.close()


def test_a_model_without_experts_has_no_routes_to_keep() -> None:
    dense = build("llama")
    with pytest.raises(ConfigError, match="llama model has no routes to keep"):
        make(NativeEngine, dense)


# ---- rows


def completion(prompt_ids: list[int], token_ids: list[int], routes: np.ndarray | None) -> Completion:
    ids = np.array(token_ids, np.int32)
    floats = np.zeros(len(ids), np.float32)
    return Completion("x", np.array(prompt_ids, np.int32), ids, floats, ids * 0, "stop", routes)


def numbered(*numbers: int) -> np.ndarray:
    return np.repeat(np.array(numbers, np.uint8)[:, None], 4, 1)


ROWS: list[tuple[Callable[[], list[PolicyCall]], list[int], list[int]]] = [
    # One call: the prompt's tokens but the last, then where each token was predicted.
    (lambda: [PolicyCall(completion([1, 2, 3], [4, 5], numbered(10, 11, 12, 13)))], [10, 11], [12, 13]),
    # The second call goes on from the first, behind what a tool wrote (6): 14 is where the first call's last
    # token was read, 20 where 6 was; what the first call said of its own tokens stays.
    (
        lambda: [
            PolicyCall(completion([1, 2], [3, 4], numbered(10, 11, 12))),
            PolicyCall(completion([1, 2, 3, 4, 6], [7], numbered(90, 91, 92, 14, 20))),
        ],
        [10],
        [11, 12, 14, 20],
    ),
    # Nothing is known of the first call.
    (lambda: [PolicyCall(completion([1, 2], [3, 4], None))], [255], [255, 255]),
    # Of its end nothing is known.
    (lambda: [PolicyCall(completion([1, 2], [3, 4], numbered(10)))], [10], [255, 255]),
]


@pytest.mark.parametrize(("calls", "before", "after"), ROWS)
def test_rows_have_the_routes_of_their_calls(
    calls: Callable[[], list[PolicyCall]], before: list[int], after: list[int]
) -> None:
    rows = tuple(rows_of(calls()))
    whole = Trajectory(Prompt(0, "p", "s", rows[0].prompt_ids), "t", 0, rows, reward=1.0)
    batch = rows_from_trajectories([whole], routes=SHAPE)
    assert batch.rows(PROMPT_ROUTED)[0].tolist() == numbered(*before).tolist()
    assert batch.rows(ROUTED)[0].tolist() == numbered(*after).tolist()
    assert ROUTED not in rows_from_trajectories([whole]).columns
