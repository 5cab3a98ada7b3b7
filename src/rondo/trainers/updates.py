"""One trainer step's update of a role: the order of its mini-batches, the rows and columns that travel, the
call. For the loop and for hand-written programs alike."""

from __future__ import annotations

import numpy as np

from rondo.algorithms.objective import ActorLoss
from rondo.batch import BatchRef
from rondo.config.schema import Config
from rondo.controller import Cluster, WorkerGroup
from rondo.trainers.pretraining import Pretraining
from rondo.trainers.setup import Learner
from rondo.trainers.update_plan import orders, with_learner_weights, without_idle
from rondo.types import StepStats
from rondo.workers.models import ActorWorker, update_columns


async def update_actor(
    actor: WorkerGroup,
    batch: BatchRef,
    loss: ActorLoss,
    config: Config,
    step: int,
    cluster: Cluster,
    pretraining: Pretraining | None,
    name: str = "policy",
) -> StepStats:
    """All optimizer steps of the policy on a batch whose mini-batches and loss weights are planned. loss: the
    worker's loss called `name`. pretraining: joins every mini-batch.
    """
    order = orders(batch, "mini_batch", config.actor.epochs, seed=config.trainer.seed, step=step)
    if loss.zero_where_advantage_is_zero and "advantages" in batch.index.columns:
        batch = batch.take(np.flatnonzero(batch.index.scalars("advantages") != 0))
    stats = StepStats()
    stats.add_sum("perf/trained_tokens", float(batch.index.scalars("num_trained_tokens").sum()))
    columns = update_columns(loss)
    if pretraining is not None:
        batch = await pretraining.join(batch, columns, step, cluster)
    weights = [column for column in ("loss_weight", "lm_weight") if column in batch.index.columns]
    order, idle = without_idle(order, batch, "mini_batch", *weights)
    stats.add_sum("actor/idle_mini_batches", float(idle))
    return stats.merge(await actor.call(ActorWorker.update_actor, batch, order, loss=name, reads=columns))


async def update_learner(
    group: WorkerGroup, learner: Learner, batch: BatchRef, config: Config, step: int
) -> StepStats:
    """All optimizer steps of a role beside the actor; plans its loss weights, too."""
    batch = with_learner_weights(batch, learner, config)
    column, epochs = f"{learner.role}_mini_batch", learner.section.epochs
    order = orders(batch, column, epochs, seed=config.trainer.seed, step=step)
    order, _ = without_idle(order, batch, column, f"{learner.role}_loss_weight")
    stats: StepStats = await group.call(learner.method, batch, order, reads=learner.columns)
    return stats
