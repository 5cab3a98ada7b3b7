"""The engines of a worker when their processes are killed: while idle, while weights arrive, and for good."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rondo.core.errors import DeadlyRequestError, ReplicaLostError, RolloutError, WeightSyncError
from rondo.core.types import Completion, GenerateRequest, SamplingParams, StepStats
from rondo.models.source import ModelSource
from rondo.rollout import EngineSpec
from rondo.rollout.members import ENGINES
from rondo.rollout.requests import so_far
from rondo.rollout.server import EngineProcess
from rondo.system.pool import Supervision
from rondo.workers import replicas as module
from rondo.workers.replicas import Replicas
from tests.messages import full_text

CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 50,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SPEC = EngineSpec(
    "native", ModelSource(config={**CONFIG, "model_type": "qwen3"}), "float32", "cpu", 64, 8, threads=1
)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG), dtype=torch.float32)
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def undisturbed(weights: dict[str, torch.Tensor]) -> list[Completion]:
    here = Replicas(SPEC, count=1, own_process=False, bucket_bytes=1 << 20, parameters=weights)
    try:
        return asyncio.run(generate(here))
    finally:
        here.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Replicas]:
    both = Replicas(SPEC, count=2, own_process=True, bucket_bytes=10_000)
    yield both
    both.close()


def load(
    replicas: Replicas, weights: dict[str, torch.Tensor], version: int, kill_at: int | None = None
) -> None:
    """kill_at: after so many tensors replica 1 is killed."""
    sink = replicas.sink()
    sink.begin(version)
    for number, (name, tensor) in enumerate(weights.items()):
        if number == kill_at:
            kill(replicas, "1")
        sink.receive(name, tensor)
    sink.commit(version)
    replicas.loaded(version)


def kill(replicas: Replicas, name: str) -> None:
    engine = replicas.router.engines()[name]
    assert isinstance(engine, EngineProcess)
    os.kill(engine.pid, signal.SIGKILL)


async def generate(replicas: Replicas) -> list[Completion]:
    requests = [
        GenerateRequest(str(i), np.arange(1, 4 + i, dtype=np.int32), SamplingParams(40), seed=i)
        for i in range(12)
    ]
    return list(await asyncio.gather(*(replicas.router.generate(one) for one in requests)))


def assert_same(done: list[Completion], expected: list[Completion], version: int) -> None:
    for one, other in zip(done, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert set(one.policy_versions) == {version}


def test_engines_say_where_they_are(two: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rondo.workers.replicas.STACKS_SECONDS", 240.0)
    engines = [engine for engine in two.router.engines().values() if isinstance(engine, EngineProcess)]
    whole = False
    while not whole:  # a coroutine that goes on while its frames are read is told without those outside of it
        parts = two.stacks().split("--- stacks of engine ")[1:]
        assert [part.splitlines()[0] for part in parts] == [
            f"{engine.name} (pid {engine.pid}) ---" for engine in engines
        ]
        whole = all("rondo/system/actor.py" in part for part in parts)


def test_killed_while_idle(
    two: Replicas, weights: dict[str, torch.Tensor], undisturbed: list[Completion]
) -> None:
    load(two, weights, 1)
    assert two.num_processes == 2
    assert two.describe().startswith("2 × native rollout engine: ")

    async def main() -> None:
        await two.router.statistics()  # of the tests before, which share the engines
        assert_same(await generate(two), undisturbed, 1)
        news = asyncio.create_task(two.restarted())
        kill(two, "0")
        sentence = await news
        assert "SIGKILL" in sentence
        assert sentence.endswith("it was started again and wants weights")
        assert two.wanting == 1
        assert_same(await generate(two), undisturbed, 1)  # by the other one
        await two.router.pause()
        await asyncio.to_thread(load, two, weights, 2)
        await two.router.resume()
        assert two.wanting == 0
        assert {engine.version for engine in two.router.engines().values()} == {2}
        assert_same(await generate(two), undisturbed, 2)
        stats = (await two.router.statistics()).sums
        assert stats["rollout/engine_restarts"] == 1
        assert (await two.router.statistics()).sums["rollout/engine_restarts"] == 0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(two.restarted(), 0.05)  # nothing is wanted any more

    asyncio.run(main())


def test_killed_while_weights_arrive(
    two: Replicas, weights: dict[str, torch.Tensor], undisturbed: list[Completion]
) -> None:
    load(two, weights, 3, kill_at=5)

    async def main() -> None:
        assert_same(await generate(two), undisturbed, 3)  # by the one that has them
        await two.restarted()
        load(two, weights, 4)  # waits for the other one
        assert {name: engine.version for name, engine in two.router.engines().items()} == {"0": 4, "1": 4}

    asyncio.run(main())


def test_wrong_weights_serve_nothing(two: Replicas, weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(WeightSyncError, match=full_text("has shape (3,), the model wants (32,)")):
        load(two, {**weights, "model.norm.weight": torch.zeros(3)}, 5)
    assert two.wanting == 2
    load(two, weights, 6)
    assert two.wanting == 0


def test_the_last_one_dies_for_good(
    two: Replicas, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.router.members.supervisor, "numbers", Supervision(restarts=0, deaths=2))

    async def main() -> None:
        running = asyncio.create_task(generate(two))
        await asyncio.sleep(0)
        for name in "01":
            kill(two, name)
        with pytest.raises(RolloutError, match=full_text("no replica left (0")):
            await running

    asyncio.run(main())
    with pytest.raises(RolloutError, match="no replica left"):
        load(two, weights, 7)


class Fake:
    """An engine without a process. It dies of the requests that `deaths` has a number for, so many times."""

    version = 0

    def __init__(self, deaths: dict[str, int]) -> None:
        self.deaths = deaths

    async def generate(self, request: GenerateRequest, on_tokens: object = None) -> Completion:
        left = self.deaths.get(request.request_id, 0)
        if left:
            self.deaths[request.request_id] = left - 1
            raise ReplicaLostError("it fell over", so_far(request, "cancelled"))
        return so_far(request, "stop")

    async def stats(self) -> StepStats:
        return StepStats()

    def close(self) -> None: ...


def test_deaths_that_a_request_is_to_blame_for_are_no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = {"poison": 8, "unlucky": 1, "unluckier": 1, "unluckiest": 1, "the last straw": 1}
    monkeypatch.setattr(module, "start_engine", lambda *args, **settings: Fake(deaths))
    replicas = Replicas(SPEC, count=1, own_process=True, bucket_bytes=10_000)

    async def ask(name: str) -> str:
        ids = np.arange(1, 4, dtype=np.int32)
        request = GenerateRequest(name, ids, SamplingParams(40))
        return (await replicas.router.generate(request)).finish_reason

    async def main() -> None:
        for died in (3, 4, 5, 6, 7, 8):  # once it is known, one engine each time
            with pytest.raises(
                DeadlyRequestError, match=rf"'poison' \(3 prompt tokens.* {died} replicas died"
            ):
                await ask("poison")
        assert [await ask(name) for name in ("unlucky", "unluckier", "unluckiest")] == ["stop"] * 3
        assert (await replicas.router.statistics()).sums["rollout/engine_restarts"] == 8 + ENGINES.restarts
        with pytest.raises(RolloutError, match=r"no replica left \(0: it fell over\)"):
            await ask("the last straw")

    asyncio.run(main())
    replicas.close()


def test_no_thread_is_left_to_start_an_engine_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_engine", lambda *args, **settings: Fake({"r": 1}))
    replicas = Replicas(SPEC, count=1, own_process=True, bucket_bytes=10_000)

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    async def main() -> None:
        monkeypatch.setattr(module.threading, "Thread", NoThread)
        request = GenerateRequest("r", np.arange(1, 4, dtype=np.int32), SamplingParams(40))
        with pytest.raises(RolloutError, match=r"no replica left"):
            await replicas.router.generate(request)

    asyncio.run(main())
    assert replicas.wanting == 0


def test_no_process_can_be_started_again(
    weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Replicas(SPEC, count=1, own_process=True, bucket_bytes=10_000)
    load(one, weights, 0)

    def start(*args: object, **settings: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    async def main() -> None:
        monkeypatch.setattr(module, "start_engine", start)
        waiting = asyncio.create_task(generate(one))
        await asyncio.sleep(0)
        kill(one, "0")
        with pytest.raises(RolloutError, match=full_text("allocate memory")):
            await asyncio.wait_for(waiting, 240)

    asyncio.run(main())
    one.close()
