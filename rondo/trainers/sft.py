"""Supervised fine-tuning: the same engine and verbs in another order. Loss on the assistant's tokens only."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rondo.algorithms import sft_loss
from rondo.checkpoint import ControllerState
from rondo.config.schema import Config, FunctionConfig
from rondo.controller import Cluster, WorkerGroup
from rondo.data import ConversationStream
from rondo.errors import ConfigError
from rondo.planning.update import loss_weights
from rondo.tracking import Timers
from rondo.trainers.checkpoints import Checkpoints
from rondo.trainers.reporting import Reporter
from rondo.trainers.setup import model_source, open_tokenizer
from rondo.types import StepStats
from rondo.workers.models import ActorWorker

INDEX = ("prompt_length", "response_length", "num_trained_tokens")
TOKEN_MEAN = FunctionConfig("token-mean")
READS = ("prompt_ids", "response_ids", "response_mask", "loss_weight", "mini_batch")


def conversation_stream(config: Config, *, held_out: bool) -> ConversationStream:
    """Rows of data.train or data.eval as token sequences with a loss mask."""
    tokenizer = open_tokenizer(config)
    return ConversationStream(
        config.data.eval if held_out else config.data.train,
        tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.actor.token_budget,
        overlong=config.data.overlong_prompts,
        shuffle=config.data.shuffle and not held_out,
        seed=config.trainer.seed,
    )


def sft_steps(config: Config, rows_per_epoch: int) -> int:
    """Optimizer steps of the run: one per batch."""
    if config.trainer.total_steps is not None:
        return config.trainer.total_steps
    steps = math.ceil((config.trainer.epochs or 0) * rows_per_epoch / config.data.batch_size)
    if steps < 1:
        raise ConfigError("trainer.epochs gives a run of 0 steps; ask for at least one")
    return steps


class SFTTrainer:
    """data.batch_size conversations per optimizer step; a whole conversation has at most actor.token_budget
    tokens.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        actor: WorkerGroup,
        stream: ConversationStream,
        held_out: ConversationStream | None,
        total_steps: int,
        reporter: Reporter,
        checkpoints: Checkpoints,
    ) -> None:
        self.config, self.cluster, self.actor, self.stream = config, cluster, actor, stream
        self.held_out, self.total_steps = held_out, total_steps
        self.reporter, self.checkpoints = reporter, checkpoints
        self.step = 0
        self.timers = Timers()
        self._stop = asyncio.Event()

    @classmethod
    async def create(
        cls, config: Config, cluster: Cluster, reporter: Reporter, checkpoints: Checkpoints
    ) -> SFTTrainer:
        """Load the data, then start the one worker group."""
        stream = conversation_stream(config, held_out=False)
        held_out = conversation_stream(config, held_out=True) if config.data.eval else None
        total_steps = sft_steps(config, stream.rows_per_epoch)
        actor = await cluster.create_group(
            "actor",
            ActorWorker,
            kwargs={
                "source": model_source(config),
                "engine": config.actor,
                "optimizer": config.actor.optimizer,
                "total_optimizer_steps": total_steps,
                "losses": {"sft": sft_loss()},
            },
        )
        return cls(config, cluster, actor, stream, held_out, total_steps, reporter, checkpoints)

    def request_stop(self) -> None:
        self._stop.set()

    async def start(self) -> None:
        """Resume if there is something to resume."""
        await self.checkpoints.restore(self)

    async def run(self) -> bool:
        """Train. Returns False when stopped on request before the end."""
        parameters = await self.actor.call(ActorWorker.num_parameters)
        with self.reporter.running(self.total_steps, self.step, parameters):
            self.timers.start_step()
            await self._loop()
            finished = self.step >= self.total_steps
            self.reporter.stopped = not finished
        if not finished:
            await self.checkpoints.save_now(self)
        return finished

    async def _loop(self) -> None:
        while self.step < self.total_steps and not self._stop.is_set():
            await self._train_step()

    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        return {"actor": self.actor}

    async def state(self) -> ControllerState:
        """The stream is a function of the step: there is nothing else to keep."""
        return ControllerState(step=self.step, version=self.step, timers=self.timers.state())

    async def load_state(self, state: ControllerState) -> None:
        """Go on where `state` was cut."""
        self.step = state.step
        self.timers.load_state(state.timers)

    async def _train_step(self) -> None:
        size = self.config.data.batch_size
        with self.timers.phase("data"):
            rows = self.stream.batch(range(self.step * size, (self.step + 1) * size))
        tokens = rows.scalars("num_trained_tokens")
        weights = loss_weights(TOKEN_MEAN, tokens, np.zeros(len(rows), np.int64))
        batch = self.cluster.put(rows, INDEX).with_index(
            {"mini_batch": np.zeros(len(rows), np.int64), "loss_weight": weights}
        )
        with self.timers.phase("update_actor"):
            stats: StepStats = await self.actor.call(
                ActorWorker.update_actor, batch, [[0]], "sft", reads=READS
            )
        self.step += 1
        stats.add_sum("perf/trained_tokens", float(tokens.sum()))
        extra: dict[str, Any] = {}
        evaluation = self.config.trainer.evaluation
        last = self.step == self.total_steps
        if self.held_out and (last or (evaluation.every and self.step % evaluation.every == 0)):
            with self.timers.phase("evaluate"):
                extra |= await self._evaluate(self.held_out)
        for peak in await self.actor.call(ActorWorker.peak_memory_bytes):
            stats.add_max("perf/peak_memory_bytes", float(peak))
        self.reporter.step(self.step, stats, extra, self.timers)
        with self.timers.phase("checkpoint"):
            await self.checkpoints.snapshot_if_due(self)
            await self.checkpoints.write_if_due(self)

    async def _evaluate(self, stream: ConversationStream) -> dict[str, float]:
        rows = stream.batch(range(stream.rows_per_epoch))
        weights = loss_weights(TOKEN_MEAN, rows.scalars("num_trained_tokens"), np.zeros(len(rows), np.int64))
        batch = self.cluster.put(rows, INDEX).with_index(
            {"mini_batch": np.zeros(len(rows), np.int64), "loss_weight": weights}
        )
        stats: StepStats = await self.actor.call(ActorWorker.evaluate_loss, batch, "sft", reads=READS)
        return {f"eval/{name}": value for name, value in stats.values().items()}
