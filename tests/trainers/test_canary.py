"""The canary: silent where weights and versions are right; names engine and tensor where they are not; and
leaves no trace in statistics or in other requests' noise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.config import load
from rondo.config.schema import Config
from rondo.controller import WorkerGroup, start_cluster
from rondo.core.errors import WeightSyncError, WorkerError
from rondo.core.types import Completion, GenerateRequest, SamplingParams
from rondo.rollout.native.engine import NativeEngine
from rondo.rollout.protocol import Capabilities
from rondo.rollout.router import Router
from rondo.trainers.loop.canary import Canary
from rondo.trainers.loop.routes import GatheredRoute, SharedRoute, make_route
from rondo.trainers.program.inputs import Prompts, complete_model, load_prompts, settled
from rondo.trainers.program.roles import create_model, create_rollout
from rondo.trainers.program.step import Roles
from rondo.weights.checksum import checksum
from rondo.workers.rollout import RolloutWorker
from rondo.workers.transfer import ReceivesWeights, probed
from tests.messages import full_text

LAYER = "model.layers.1.mlp.down_proj.weight"


class _Probed(RolloutWorker):
    """With a hand on the engine of this process."""

    def change(self, name: str, by: float) -> None:
        (engine,) = self.replicas.router.engines().values()
        engine.parameter(name).add_(by)  # type: ignore[attr-defined]


class _AndOneLost(WorkerGroup):
    """A group's first rank, beside one that dies of every call."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    @property
    def alive(self) -> tuple[int, ...]:
        return (0, 1)

    async def call_rank(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 0:
            return await self._group.call_rank(rank, method, *args, **kwargs)
        error = WorkerError("rollout", rank, method.__name__, "gone")
        error.died = True
        raise error


@pytest.fixture
def with_roles(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """with_roles(use, *overrides): `use(roles, canary, config, prompts)` on engines that serve version 3."""
    monkeypatch.setattr("rondo.workers.rollout.RolloutWorker", _Probed)

    def start(
        use: Callable[[Roles, Canary, Config, Prompts], Awaitable[Any]], *overrides: str, share: bool = False
    ) -> Any:
        config = complete_model(settled(load([str(recipe)], [*overrides]).config))

        async def main() -> Any:
            cluster = await start_cluster(config.cluster)
            try:
                actor = await create_model(cluster, "actor", config)
                prompts = load_prompts(config)
                rollout = await create_rollout(cluster, config, actor.devices)
                roles = Roles(actor, rollout)
                route = make_route(config, roles, tmp_path)
                assert isinstance(route, SharedRoute if share else GatheredRoute)
                await rollout.call(RolloutWorker.pause)
                await route.load(3)
                await rollout.call(RolloutWorker.resume)
                asked = (config, prompts.train.prompt(0), lambda version: prompts.sampling)
                return await use(roles, Canary(roles.actor, roles.engines, *asked), config, prompts)
            finally:
                await cluster.shutdown()

        return asyncio.run(main())

    return start


ASYNCHRONOUS = "trainer.max_staleness=1"
IN_PLACE = "rollout.engine.decode=generic"  # this path reads the storage itself, the others a packed copy


@pytest.mark.parametrize("share", [True, False])
def test_equal_weights_have_no_gap_and_leave_no_trace(
    with_roles: Callable[..., Any], share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent: list[bool] = []
    generate = Router.generate

    async def asked_for(self: Router, request: GenerateRequest, *rest: Any, **options: Any) -> Completion:
        urgent.append(request.urgent)
        return await generate(self, request, *rest, **options)

    monkeypatch.setattr(Router, "generate", asked_for)

    async def use(roles: Roles, canary: Canary, config: Config, prompts: Prompts) -> None:
        asked, sampling = prompts.train.prompt(1), prompts.sampling

        async def sampled() -> Any:
            rows = await roles.rollout.call_rank(0, RolloutWorker.run_unscored, asked, sampling, 4, "train")
            return [rows.rows("response_ids"), rows.rows("rollout_log_probs")]

        before = await sampled()
        assert urgent == [False] * 4
        await roles.rollout.call(RolloutWorker.end_step)
        assert await canary.check(3) < 1e-5
        (stats,) = await roles.rollout.call(RolloutWorker.end_step)
        values = stats.values()
        for name in ("rollout/in_flight", "rollout/queue_length", "rollout/reissued"):
            assert values.get(name, 0) == 0, name
        after = await sampled()
        for one, other in zip(before, after, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        urgent.clear()
        await roles.rollout.call_rank(0, RolloutWorker.evaluate, [asked], sampling, 2, "eval")
        assert urgent == [True, True]  # the next publish waits for them
        asked_first = (config, prompts.train.prompt(0), lambda version: sampling)
        with_one_lost = Canary(roles.actor, _AndOneLost(roles.rollout), *asked_first)
        assert await with_one_lost.check(3) < 1e-5

    with_roles(use, *(() if share else (ASYNCHRONOUS,)), share=share)


def test_a_tensor_that_differs_is_named(with_roles: Callable[..., Any]) -> None:
    async def use(roles: Roles, canary: Canary, config: Config, prompts: Prompts) -> str:
        await roles.rollout.call_rank(0, _Probed.change, LAYER, 0.5)
        with pytest.raises(WeightSyncError) as caught:
            await canary.check(3)
        return str(caught.value)

    message = with_roles(use, ASYNCHRONOUS, IN_PLACE)
    assert message.startswith(
        "version 3: the log-probs of engine 0 of rollout[0] differ from the trainer's by"
    )
    assert "(tolerance 0.001 for float32)" in message
    assert message.endswith(f"the first tensor that differs is {LAYER!r}")


def test_the_first_check_also_looks_at_high_positions(
    with_roles: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    generate = NativeEngine.generate

    async def asked_for(self: NativeEngine, request: GenerateRequest, *rest: Any) -> Completion:
        lengths.append(len(request.token_ids))
        return await generate(self, request, *rest)

    monkeypatch.setattr(NativeEngine, "generate", asked_for)

    async def use(roles: Roles, canary: Canary, config: Config, prompts: Prompts) -> int:
        await canary.check(3)
        await canary.check(3)
        return min(32, len(prompts.train.prompt(0).token_ids))

    short = with_roles(use, ASYNCHRONOUS)
    assert lengths == [64, short, short]  # data.max_prompt_tokens is 64


def test_an_engine_that_cannot_read_back_says_so(
    with_roles: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = Capabilities("vllm", "0", sleep=False, reads_back=False)

    async def use(roles: Roles, canary: Canary, config: Config, prompts: Prompts) -> str:
        await roles.rollout.call_rank(0, _Probed.change, LAYER, 0.5)
        monkeypatch.setattr(NativeEngine, "capabilities", lambda self: blind)
        with pytest.raises(WeightSyncError, match="vllm cannot read its weights back") as caught:
            await canary.check(3)
        return str(caught.value)

    assert LAYER not in with_roles(use, ASYNCHRONOUS, IN_PLACE)


def test_equal_weights_and_another_model_are_told_apart(
    with_roles: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer divides by another temperature: nothing is wrong with the transport."""

    async def use(roles: Roles, canary: Canary, config: Config, prompts: Prompts) -> None:
        canary._sampling = lambda version: SamplingParams(8, temperature=0.3)
        with pytest.raises(WeightSyncError, match=full_text("all 24 tensors are equal: the weights")):
            await canary.check(3)

    with_roles(use, ASYNCHRONOUS)


def test_tokens_of_another_version_are_refused(with_roles: Callable[..., Any]) -> None:
    async def use(roles: Roles, canary: Canary, config: Config, prompts: Prompts) -> None:
        with pytest.raises(WorkerError, match=full_text("no engine of rollout[0] serves version 4")):
            await canary.check(4)

    with_roles(use, ASYNCHRONOUS)


def test_the_engine_that_is_named_is_the_one_that_answered() -> None:
    """Where an engine before it has no weights yet."""

    class Engine:
        def __init__(self, version: int) -> None:
            self.version = version

        async def generate(self, request: GenerateRequest) -> Completion:
            assert request.urgent
            tokens, one = np.array([5], np.int32), np.array([self.version], np.int32)
            return Completion(
                request.request_id, request.token_ids, tokens, np.zeros(1, np.float32), one, "stop"
            )

        def capabilities(self) -> Capabilities:
            return Capabilities("native", "0", sleep=False, reads_back=True)

        def parameter(self, name: str) -> torch.Tensor:
            return torch.ones(2) * self.version

    engines = {"0": Engine(-1), "1": Engine(3)}
    receiver: Any = ReceivesWeights()
    receiver.context = SimpleNamespace(rank=1)
    receiver.replicas = SimpleNamespace(router=SimpleNamespace(engines=lambda: engines), wanting=1)
    rows = asyncio.run(receiver.probe([1, 2], (), SamplingParams(1), 0, 3))
    (rank, number) = probed(int(rows.scalars("row_id")[0]))
    assert (rank, number) == (1, 1)
    right = {LAYER: checksum(torch.full((2,), 3.0))}
    assert receiver.differing_tensor(number, right).startswith("all 1 tensors are equal")
    assert receiver.differing_tensor(number, {LAYER: 1}).endswith(repr(LAYER))
