"""Workers that judge tokens, and what a second critic and a refreshed reference need: through a cluster, as
the trainer calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rondo.config.schema import ClusterConfig, EngineConfig, OptimizerConfig
from rondo.controller import Cluster, WorkerGroup, start_cluster
from rondo.core.batch import ROW_ID, Batch, BatchRef
from rondo.core.errors import WorkerError
from rondo.training import ModelSpec
from rondo.workers.models import (
    ActorWorker,
    CriticWorker,
    ModelWorker,
    PrmWorker,
    ReferenceWorker,
    RewardModelWorker,
    TeacherWorker,
)
from tests.messages import full_text
from tests.training.helpers import PolicyLoss, ValueLoss, make_batch, source

TRAINED = {"optimizer": OptimizerConfig(lr=1e-2)}


class Roles:
    """Worker groups on one cluster; every role has weights of its own unless told otherwise."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def create(
        self, role: str, worker: type[ModelWorker], options: Mapping[str, Any] = {}, **model: Any
    ) -> WorkerGroup:
        spec = ModelSpec(**{"source": source(), "config": EngineConfig(token_budget=60), **model})
        return await self.cluster.create_group(role, worker, kwargs={"model": spec, **options})

    def put(self, batch: Batch) -> BatchRef:
        return self.cluster.put(batch, [name for name in batch.columns if name.endswith("mini_batch")])


def run(main: Any) -> Any:
    async def inside() -> Any:
        async with await start_cluster(ClusterConfig(device="cpu")) as cluster:
            body: Coroutine[Any, Any, Any] = main(Roles(cluster))
            return await body

    return asyncio.run(inside())


def test_teacher_prm_and_reward_model_write_their_columns() -> None:
    async def main(roles: Roles) -> Batch:
        actor = await roles.create("actor", ActorWorker)
        reference = await roles.create("reference", ReferenceWorker, source=source(initializer_range=0.1))
        teacher = await roles.create("teacher", TeacherWorker, {"top_k": 3})
        prm = await roles.create("prm", PrmWorker, {"beta": 0.5})
        judge = await roles.create("judge", RewardModelWorker, head="value")
        batch = roles.put(make_batch())
        alone = await (await actor.call(ActorWorker.compute_log_prob, batch)).fetch(["old_log_probs"])
        also = ("sum_p_squared", "entropy")
        batch = await actor.call(ActorWorker.compute_log_prob, batch, also=also)
        assert (await batch.fetch(["old_log_probs"])) == alone
        assert set(also) < set(batch.columns)
        single = await (await teacher.call(TeacherWorker.compute_log_prob, batch)).fetch(
            ["teacher_log_probs"]
        )
        batch = await teacher.call(TeacherWorker.compute_topk, batch)
        assert single == await batch.fetch(["teacher_log_probs"])
        batch = await reference.call(ReferenceWorker.compute_ref_log_prob, batch)
        batch = await prm.call(PrmWorker.compute_process_reward, batch)
        batch = await judge.call(RewardModelWorker.compute_reward, batch)
        return await batch.fetch()

    out = run(main)
    log_probs, reference = out.ragged("old_log_probs")[0], out.ragged("ref_log_probs")[0]
    assert torch.equal(out.ragged("teacher_log_probs")[0], log_probs)  # the same weights
    torch.testing.assert_close(out.ragged("process_rewards")[0], 0.5 * (log_probs - reference))
    assert out.ragged("process_rewards")[0].abs().max() > 0.01
    assert out.ragged("teacher_topk_ids")[0].shape == out.ragged("teacher_topk_log_probs")[0].shape
    assert out.ragged("teacher_topk_ids")[0].shape[1] == 3
    scores, empty = out.scalars("score/judge"), out.lengths("response_ids") == 0
    assert np.isnan(scores[empty]).all()
    assert (scores[~empty] == 0).all()  # a new head


@pytest.mark.slow
def test_two_critics_and_a_prm_learn_under_their_own_names() -> None:
    """One class for both critics; columns, mini-batches and metrics follow the role."""

    async def main(roles: Roles) -> None:
        losses = {"losses": {"critic": ValueLoss()}}
        critic = await roles.create("critic", CriticWorker, losses, head="value", **TRAINED)
        cost = await roles.create("cost_critic", CriticWorker, losses, head="value", **TRAINED)
        options = {"beta": 0.1, "losses": {"prm": PolicyLoss()}}
        prm = await roles.create("prm", PrmWorker, options, **TRAINED)
        halves = np.arange(len(make_batch())) % 2
        batch = roles.put(
            make_batch().with_columns({f"{r}_mini_batch": halves for r in ("critic", "cost_critic", "prm")})
        )
        for group, method, loss in (
            (critic, CriticWorker.update_critic, ValueLoss()),
            (cost, CriticWorker.update_critic, ValueLoss()),
            (prm, PrmWorker.update_prm, PolicyLoss()),
        ):
            reads = ["prompt_ids", "response_ids", *loss.columns, f"{group.role}_mini_batch"]
            stats = await group.call(method, batch, [[0, 1], [1, 0]], reads=reads)
            assert stats.means[f"{group.role}/grad_norm"][1] == 4
            assert f"{group.role}/lr" in stats.maxima
        batch = await critic.call(CriticWorker.compute_values, batch)
        batch = await cost.call(CriticWorker.compute_values, batch)
        out = await batch.fetch(["values", "cost_values"])
        assert torch.equal(out.ragged("values")[0], out.ragged("cost_values")[0])  # trained alike
        assert out.ragged("values")[0].any()

    run(main)


def test_the_reference_takes_over_the_actors_parameters() -> None:
    async def main(roles: Roles) -> None:
        losses = {"losses": {"policy": PolicyLoss()}}
        actor = await roles.create("actor", ActorWorker, losses, **TRAINED)
        reference = await roles.create("reference", ReferenceWorker)
        batch = roles.put(make_batch().with_columns({"mini_batch": np.zeros(len(make_batch()), np.int64)}))
        reads = ["prompt_ids", "response_ids", *PolicyLoss.columns, "mini_batch"]
        before = await (await reference.call(ReferenceWorker.compute_ref_log_prob, batch)).fetch(
            ["ref_log_probs"]
        )
        await actor.call(ActorWorker.update_actor, batch, [[0]], reads=reads)
        await reference.call(ModelWorker.copy_parameters_from, "actor")
        batch = await actor.call(ActorWorker.compute_log_prob, batch)
        batch = await reference.call(ReferenceWorker.compute_ref_log_prob, batch)
        out = await batch.fetch([ROW_ID, "old_log_probs", "ref_log_probs"])
        assert torch.equal(out.ragged("old_log_probs")[0], out.ragged("ref_log_probs")[0])
        assert not torch.equal(before.ragged("ref_log_probs")[0], out.ragged("ref_log_probs")[0])
        with pytest.raises(WorkerError, match=full_text("'teacher', which has no model")):
            await reference.call(ModelWorker.copy_parameters_from, "teacher")

    run(main)
