"""Training on rows that are there from the start: conversations (SFT), pairs (DPO, a reward model).

One loop for all of them: rows of the stream -> weights -> [log-probs of the frozen reference] -> one
optimizer step -> held-out loss, checkpoint, report. What differs between them is a `Task`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import numpy as np

from rondo.checkpoint import ControllerState
from rondo.config import Config
from rondo.controller import Cluster, WorkerGroup
from rondo.core.batch import Batch, BatchRef
from rondo.core.columns import per_row
from rondo.core.types import StepStats
from rondo.planning import placement_of
from rondo.system.border import in_thread
from rondo.trainers.loop import Checkpoints, Reporter
from rondo.trainers.program import Roles, count_rows, create_model, notes_on_tokenizers
from rondo.trainers.supervised.tasks import RowStream, Task, rows_taken, total_steps
from rondo.training import Loss
from rondo.workers import ActorWorker, ReferenceWorker, update_columns


class SupervisedTrainer:
    """Takes one optimizer step on data.batch_size source rows at a time. Reads the data when it is made."""

    def __init__(
        self,
        task: Task,
        config: Config,
        cluster: Cluster,
        reporter: Reporter,
        checkpoints: Checkpoints,
        stream: RowStream,
        held_out: RowStream | None,
    ) -> None:
        self.task = task
        self.config = config
        self.cluster = cluster
        self.reporter = reporter
        self.checkpoints = checkpoints
        self.loss = task.loss(config)
        self.stream, self.held_out = stream, held_out
        self._epoch = rows_taken(config, self.stream.rows_per_epoch)
        self.total_steps = total_steps(config, self._epoch)
        self.step = 0
        self.roles: Roles
        """The actor, and the reference where the loss compares with it, unless that is the actor without its
        adapters; `start` makes them."""
        self.clock = reporter.watch(cluster)
        self._reads = update_columns(self.loss)
        self._held_out_batch: BatchRef | None = None
        self._stop = asyncio.Event()

    def request_stop(self) -> None:
        """Stops after the step that is being done; the state is saved and resumable."""
        self._stop.set()

    async def start(self) -> None:
        """Starts the worker groups, and resumes if there is something to resume."""
        config, task = self.config, self.task
        with self.reporter.console.phase("starting worker groups"):
            losses: dict[str, Loss] = {task.kind: self.loss}
            devices = placement_of(config, task.roles(config)).devices("actor")
            actor = await create_model(
                self.cluster, "actor", config, losses, self.total_steps, devices, value_head=task.value_head
            )
            self.roles = Roles(actor, None)
            if "reference" in task.roles(config):
                self.roles.models["reference"] = await create_model(self.cluster, "reference", config)
        for line in notes_on_tokenizers(config, self.stream.tokenizer):
            self.reporter.note(line)
        await self.checkpoints.restore(self)
        if self.checkpoints.best.enough:  # it was killed between that evaluation and its end
            self.reporter.is_enough = True
            self.request_stop()

    async def run(self) -> bool:
        """Trains. Returns False when stopped on request before the end."""
        parameters = await self.roles.actor.call(ActorWorker.num_parameters)
        with self.reporter.running(self.total_steps, self.step, parameters):
            self.clock.count_cpu(await self.cluster.cpu_seconds())  # from here on: not what loading took
            self.clock.start_step()
            await self.reporter.turn_profile(self.cluster, self.step)
            while self.step < self.total_steps and not self._stop.is_set():
                await self._train_step()
            self.clock.count_cpu(await self.cluster.cpu_seconds())
            finished = self.step >= self.total_steps
            self.reporter.stopped = not finished
        if not finished:
            await self.checkpoints.save_now(self)
        return finished

    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        """Leaves the reference out: it never changes, and is made anew from where it came from."""
        return {"actor": self.roles.actor}

    def state(self) -> ControllerState:
        """Returns the step: the stream is a function of it, so there is nothing else to keep."""
        return ControllerState(step=self.step, version=self.step)

    def waiting(self) -> Mapping[int, BatchRef]:
        return {}

    async def load_state(self, state: ControllerState) -> None:
        """Goes on where `state` was cut."""
        self.step = state.step
        self.clock.load_state(state.timers)

    async def _train_step(self) -> None:
        size = self.config.data.batch_size
        epochs, first = divmod(self.step * size, self._epoch)  # what an epoch leaves out is passed over
        first += epochs * self.stream.rows_per_epoch
        with self.clock.phase("data"):
            read = partial(self.stream.batch, range(first, first + size))
            rows = await asyncio.wrap_future(in_thread(read, "data"))
        batch = await self._prepared(rows)
        with self.clock.phase("update_actor"):
            stats: StepStats = await self.roles.actor.call(
                ActorWorker.update_actor, batch, [[0]], self.task.kind, reads=self._reads
            )
        self.step += 1
        stats.add_sum("perf/trained_tokens", float(rows.scalars("num_trained_tokens").sum()))
        lengths = rows.scalars("prompt_length") + rows.scalars("response_length")
        count_rows(stats, lengths)
        if self.reporter.speed is not None:
            self.reporter.speed.take_lengths(rows.scalars("prompt_length"), rows.scalars("response_length"))
        held_out: dict[str, float] = {}
        if self.held_out and self._evaluation_due():
            with self.clock.phase("evaluate"):
                held_out = await self._evaluate(self.held_out)
        await self.reporter.turn_profile(self.cluster, self.step)
        for peak in await self.roles.actor.call(ActorWorker.peak_memory_bytes):
            stats.add_max("perf/peak_memory_bytes", float(peak))
        self.clock.count_cpu(await self.cluster.cpu_seconds())
        self.reporter.step(self.step, stats, held_out)
        with self.clock.phase("checkpoint"):
            last = self.step == self.total_steps
            if self.checkpoints.due(self.step, last=last, evaluated=bool(held_out)):
                await self.checkpoints.save_now(self)

    def _evaluation_due(self) -> bool:
        evaluation, size = self.config.trainer.evaluation, self.config.data.batch_size
        begun = self.step * size % self._epoch < size  # another epoch, by this step's rows or the next one's
        due = evaluation.every is not None and self.step % evaluation.every == 0
        return due or self.step == self.total_steps or (evaluation.each_epoch and begun)

    async def _prepared(self, rows: Batch) -> BatchRef:
        """Returns the rows of one optimizer step with everything that the loss reads."""
        batch = self.cluster.put(rows, per_row(rows.columns)).with_index(
            {"mini_batch": np.zeros(len(rows), np.int64), "loss_weight": self.task.weights(self.config, rows)}
        )
        if self.task.needs_reference(self.config):
            with self.clock.phase("reference"):
                reference = self.roles.models.get("reference")
                if reference is None:  # the actor without its adapters
                    batch = await self.roles.actor.call(ActorWorker.compute_ref_log_prob, batch)
                else:
                    batch = await reference.call(ReferenceWorker.compute_ref_log_prob, batch)
        return batch

    async def _evaluate(self, stream: RowStream) -> dict[str, float]:
        """Measures the loss on every held-out row. They are prepared once: the reference's log-probs stay
        what they are.
        """
        if self._held_out_batch is None:
            self._held_out_batch = await self._prepared(stream.batch(range(stream.rows_per_epoch)))
        stats: StepStats = await self.roles.actor.call(
            ActorWorker.evaluate_loss, self._held_out_batch, self.task.kind, reads=self._reads
        )
        return {f"eval/{name}": value for name, value in stats.values().items()}
