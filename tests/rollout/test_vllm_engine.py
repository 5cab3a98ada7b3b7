"""What vLLM's engine does around vLLM, with a stand-in for vLLM itself: sleep and the weights after it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rondo.core.errors import RefusedRequestError, RolloutError, WeightSyncError
from rondo.core.images import ImageRef
from rondo.core.types import GenerateRequest, SamplingParams
from rondo.models.source import ModelSource
from rondo.rollout.protocol import Capabilities, EngineSpec
from rondo.rollout.vllm.engine import VllmEngine
from rondo.rollout.vllm.options import ENGINE
from rondo.weights.bucket import BucketWriter, Confirmation, SharedBucket

MODEL = ModelSource(
    config={"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 16, "head_dim": 8}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
)


class FakeCore:
    """Says token 7 to whoever asks, and writes down what it was told."""

    cache_bytes = 0

    def __init__(self, spec: EngineSpec) -> None:
        self.told: list[str] = []
        self.counts: list[int] | None = None  # by vLLM's own count; None: it says nothing
        self._keys: list[tuple[str, GenerateRequest]] = []
        self._names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append(" ".join([name, *map(str, arguments)]))

    def add(self, key: str, request: GenerateRequest, adapters: None = None, shown: None = None) -> None:
        self._keys.append((key, request))

    def step(self) -> list[Any]:
        steps = [Token(key, request.token_ids, self.counts) for key, request in self._keys]
        self._keys.clear()
        return steps

    def receive(self, bucket: Any, parts: Any) -> None:
        self._names += [entry.name for entry in bucket.entries]

    def sums(self) -> list[dict[str, int]]:
        return [dict.fromkeys(self._names, 0)]

    def worker_lost(self) -> bool:
        return False


class Token:
    """A `VllmStep` that ends its request."""

    token_ids, log_probs, finished, cached = (7,), (-1.0,), "length", 0

    def __init__(self, key: str, prompt_ids: np.ndarray, versions: list[int] | None) -> None:
        self.key, self.prompt_ids, self.versions = key, prompt_ids, versions


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
    can = Capabilities("vllm", "0", sleep=True, reads_back=False)
    module = ModuleType("rondo.rollout.vllm.core")
    module.VllmCore = FakeCore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rondo.rollout.vllm.core", module)
    monkeypatch.setattr(ENGINE, "check", lambda *_: None)
    monkeypatch.setattr(ENGINE, "capabilities", lambda *_: can)
    engine = VllmEngine(EngineSpec("vllm", MODEL, "float32", "cpu", 32, 4, 1))
    yield engine
    engine.close()


def send(engine: VllmEngine, version: int) -> None:
    def ship(bucket: SharedBucket) -> Confirmation:
        engine.receive_bucket(bucket)
        return lambda: None

    engine.begin(version)
    writer = BucketWriter(1 << 20, ship)
    for name in engine._weights.missing():
        writer.add(name, torch.zeros(engine._weights.shapes[name]))
    writer.finish()
    engine.commit(version)


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(name, np.arange(3, dtype=np.int32), SamplingParams(max_tokens=1))


def test_weights_come_from_the_trainer_while_it_sleeps(engine: VllmEngine) -> None:
    """The order of a publish with rollout.sleep: a request that waits goes on under the new version."""

    async def publish() -> int:
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(ask("waits")))
        await asyncio.sleep(0.05)
        await engine.sleep()
        await asyncio.to_thread(send, engine, 1)
        await engine.wake()
        await engine.resume()
        return int((await waiting).policy_versions[0])

    send(engine, 0)
    told = engine._core.told
    told.clear()
    assert asyncio.run(publish()) == 1
    assert told == ["sleep", "wake weights", "begin", "commit", "name_weights 1", "wake kv_cache"]


def test_stamps_are_those_that_the_engine_has_counted(engine: VllmEngine) -> None:
    send(engine, 3)
    for counts in (None, [3]):
        engine._core.counts = counts  # type: ignore[attr-defined]
        assert asyncio.run(engine.generate(ask("alike"))).policy_versions.tolist() == [3]
    engine._core.counts = [2]  # type: ignore[attr-defined]
    with pytest.raises(RolloutError) as caught:
        asyncio.run(engine.generate(ask("other")))
    assert str(caught.value) == (
        "request 'other': vLLM made its tokens with versions 2×1, and they are stamped 3×1; report it"
    )


def test_without_new_weights_it_serves_nothing(engine: VllmEngine) -> None:
    """It has none after it slept: neither a request that waited nor a new one gets an answer."""

    async def wake_empty() -> None:
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(ask("waits")))
        await asyncio.sleep(0.05)
        await engine.sleep()
        await engine.wake()
        await engine.resume()
        with pytest.raises(WeightSyncError, match="gave its weights up"):
            await waiting
        with pytest.raises(WeightSyncError, match="gave its weights up"):
            await engine.generate(ask("new"))

    send(engine, 0)
    asyncio.run(wake_empty())
    send(engine, 1)
    assert asyncio.run(engine.generate(ask("again"))).policy_versions.tolist() == [1]


def test_a_prompt_that_the_engine_read_otherwise_is_an_error(engine: VllmEngine) -> None:
    """What it expands again, say: the row would be another than the one that was answered."""
    send(engine, 0)
    core: Any = engine._core
    core.step_of = core.step
    core.step = lambda: [Token(one.key, np.array([0, 9, 9]), None) for one in core.step_of()]
    with pytest.raises(RolloutError, match=r"vLLM read another .* \[0, 9, 9\]"):
        asyncio.run(engine.generate(ask("a")))
    assert not engine._pending


def test_images_are_refused_by_name(engine: VllmEngine) -> None:
    send(engine, 0)
    shown = replace(ask("a"), images=(ImageRef("path:a.png", "0", (1, 2, 2), 1),))
    with pytest.raises(RefusedRequestError, match="rondo gives no images to a qwen3 model"):
        asyncio.run(engine.generate(shown))
