"""Adapters by themselves (actor.lora.send=adapters) on real engines: the base once, A and B per version."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rondo.core.errors import ConfigError, WeightSyncError
from rondo.models.loading import load_model_config
from rondo.models.lora import Adapter, AdapterSet
from rondo.models.source import ModelSource
from rondo.rollout.protocol import RolloutEngine
from rondo.rollout.sglang.options import ENGINE as SGLANG
from rondo.rollout.vllm.options import ENGINE as VLLM
from rondo.weights.checksum import checksum
from tests.engines.conftest import (
    LONG,
    QWEN3,
    TOLERANCE,
    Bench,
    build_model,
    gaps,
    paused_in_flight,
    prompt,
    request,
    start,
    weights,
)
from tests.messages import full_text
from tests.models.families import VOCAB, config_of, make

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
RANK, ALPHA = 4, 8.0
KINDS = ("native-process", "vllm", "sglang")


def adapter_set(modules: tuple[str, ...] = MODULES, layers: int = 2) -> AdapterSet:
    """Some of a layer's modules, so that fused matrices have parts without an adapter."""
    names = [f"model.layers.{layer}.{module}" for layer in range(layers) for module in modules]
    by_weight = {f"{name}.weight": Adapter(name, ALPHA / RANK, False) for name in names}
    return AdapterSet(RANK, ALPHA, by_weight, versions=2)


def factors(model: torch.nn.Module, adapters: AdapterSet, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = adapters.shapes({name: tuple(p.shape) for name, p in model.named_parameters()})
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def merged(base: Mapping[str, Any], adapters: AdapterSet, ab: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The model that an engine with these adapters should be."""
    model = build_model(0, base)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            adapter = adapters.by_weight.get(name)
            if adapter is not None:
                weight += adapter.scaling * ab[adapter.b] @ ab[adapter.a]
    return model


def all_linear(model: torch.nn.Module) -> AdapterSet:
    """What targets=[all-linear] gives, without peft."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    }
    by_weight = {f"{name}.weight": Adapter(name, ALPHA / RANK, False) for name in modules}
    return AdapterSet(RANK, ALPHA, by_weight, versions=2)


class Adapted:
    """An engine, and what it should compute at each version."""

    def __init__(
        self, kind: str, engine: RolloutEngine, adapters: AdapterSet, config: Mapping[str, Any] = QWEN3
    ) -> None:
        self.bench, self.config = Bench(kind, engine, config), config
        self.kind, self.engine, self.adapters = kind, engine, adapters
        self.base = self.bench.model
        self.models: dict[int, torch.nn.Module] = {}
        self._versions = itertools.count()

    def send(self, *, base: bool) -> int:
        """Gives the engine new adapters, after the base or alone. Returns the version."""
        version = next(self._versions)
        ab = factors(self.base, self.adapters, version)
        sent = (weights(self.base) if base else {}) | ab
        self.engine.begin(version)
        for name, tensor in sent.items():
            self.engine.receive(name, tensor)
        self.engine.commit(version, {name: checksum(tensor) for name, tensor in sent.items()})
        self.models[version] = merged(self.config, self.adapters, ab)
        return version

    def worst(self, completion: Any) -> float:
        """The largest gap to the model of the version that each token says."""
        by_version = [
            gaps(self.models[int(version)], completion)[completion.policy_versions == version].max()
            for version in np.unique(completion.policy_versions)
        ]
        return float(max(by_version))


@pytest.fixture(scope="module", params=KINDS)
def adapted(request: pytest.FixtureRequest) -> Iterator[Adapted]:
    adapters = adapter_set()
    engine = start(request.param, adapters=adapters)
    try:
        yield Adapted(request.param, engine, adapters)
    finally:
        engine.close()


def test_the_base_once_then_a_and_b_alone(adapted: Adapted) -> None:
    with pytest.raises(WeightSyncError, match="did not arrive"):
        adapted.send(base=False)  # nothing to add them to
    for base in (True, False, False, True, False):  # again with the base: another replica wanted it
        version = adapted.send(base=base)
        for completion in adapted.bench.run([request(prompt(9, seed), 12, seed=seed) for seed in range(4)]):
            assert set(completion.policy_versions.tolist()) == {version}
            assert adapted.worst(completion) < TOLERANCE
            assert gaps(adapted.base, completion).max() > 0.05  # they are used


def test_what_is_in_flight_ends_under_its_own_version(adapted: Adapted) -> None:
    """vLLM and SGLang serve several versions at one time; the native engine goes on under the new one."""
    old = adapted.send(base=adapted.engine.version < 0)

    async def change() -> tuple[Any, list[Any], int]:
        flight = await paused_in_flight(
            adapted.engine, lambda: [request(prompt(5, seed), LONG, seed=seed) for seed in range(2)], 8
        )
        new = await asyncio.to_thread(adapted.send, base=False)
        await adapted.engine.resume()
        fresh = await adapted.engine.generate(request(prompt(5), 12))
        return fresh, list(await asyncio.gather(*flight.tasks)), new

    fresh, flown, new = asyncio.run(change())
    assert set(fresh.policy_versions.tolist()) == {new}
    assert adapted.worst(fresh) < TOLERANCE
    for completion in flown:
        versions = {old, new} if adapted.kind == "native-process" else {old}
        assert set(completion.policy_versions.tolist()) == versions
        assert adapted.worst(completion) < 10 * TOLERANCE  # 900 tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_two_workers_share_each_product(kind: str) -> None:
    adapters, wide = adapter_set(), QWEN3 | {"intermediate_size": 128}
    if kind == "sglang":
        with pytest.raises(ConfigError, match=full_text("pads intermediate_size=96 to a multiple")):
            start(kind, adapters=adapters, tensor_parallel=2)
    engine = start(kind, source=ModelSource(config=wide), adapters=adapters, tensor_parallel=2)
    adapted = Adapted(kind, engine, adapters, wide)
    try:
        for base in (True, False):
            version = adapted.send(base=base)
            for completion in adapted.bench.run([request(prompt(9, seed), 12, seed=1) for seed in range(3)]):
                assert set(completion.policy_versions.tolist()) == {version}
                assert adapted.worst(completion) < TOLERANCE
                assert gaps(adapted.base, completion).max() > 0.05
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(("vllm", family) for family in sorted(VLLM.adapter_models)),
        *(("sglang", family) for family in sorted(SGLANG.adapter_models)),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_linear_modules_of_a_family(kind: str, family: str) -> None:
    # Sizes that both engines can have on a CPU.
    size: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 64}
    if hasattr(load_model_config(ModelSource(config=config_of(family))), "head_dim"):
        size["head_dim"] = 32
    if (kind, family) == ("sglang", "llama"):
        size["mlp_bias"] = False
    source, model = ModelSource(config=config_of(family, **size)), make(family, **size)
    adapters = all_linear(model)
    engine = start(kind, source=source, adapters=adapters, max_context=100)
    bench = Bench(kind, engine)
    try:
        for version in range(2):
            ab = factors(model, adapters, version)
            bench.send((weights(model) if version == 0 else {}) | ab)
            expected = copy.deepcopy(model)
            with torch.no_grad():
                for name, weight in expected.named_parameters():
                    adapter = adapters.by_weight.get(name)
                    if adapter is not None:
                        weight += adapter.scaling * ab[adapter.b] @ ab[adapter.a]
            for completion in bench.run(
                [request(prompt(9, seed) % VOCAB, 12, seed=seed) for seed in range(3)]
            ):
                assert gaps(expected, completion).max() < 1e-4
                assert gaps(model, completion).max() > 0.01
    finally:
        engine.close()
