"""The RL loop.

    prompts ──ticket──▶ feeder: episodes on the rollout workers, scored ──put──▶ buffer ──take──▶ this loop
       ▲ credits                                                                                    │
       └──────── advance ◀── publish: update, hold, load, snapshot, release ◀───────────────────────┘

The feeder waits for credit (buffer.ticket), this loop waits for complete groups (buffer.take), a publish
waits for the feeder to hold: until what is in flight is done (finish), or at a token boundary (resume,
abort). Evaluation runs while episodes are held after a drain; otherwise beside them from the release on, and
the next publish waits for it. The trainer owns the policy version, the engine stamps every token with it, the
buffer learns it last. A step's metrics and rollouts are on disk before its checkpoint is renamed into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rondo.batch import BatchRef
from rondo.trainers.loop.buffer import Group
from rondo.trainers.loop.run import RLRun
from rondo.trainers.program.plan import Program
from rondo.trainers.program.stages import Stage, Step, with_scores_of
from rondo.trainers.program.update import Pretraining, update_actor


class RLTrainer(RLRun):
    """The built-in loop over the stages of a planned program. Built by `commands/train.py`."""

    def __init__(self, program: Program, *arguments: Any, **options: Any) -> None:
        """arguments, options: of `RLRun`."""
        super().__init__(*arguments, learners=[x.role for x in program.learners], **options)
        self.program = program
        config = self.config
        self._pretraining = Pretraining(config) if config.algorithm.pretrain_coef else None
        has_critic = program.learner("critic") is not None
        self._warmup_steps = config.critic.warmup_steps if has_critic else 0

    async def run(self) -> bool:
        """Trains. Returns False when stopped on request before the end."""
        async with self.serving():
            async with self.feeding():
                while groups := await self.take():
                    await self._train_step(groups)
            return await self.ended()

    async def _train_step(self, groups: Sequence[Group]) -> None:
        everything, step = self.begin_step(groups)
        await self.let_engines_rest()
        scored = await self._through(self.program.scoring, self.scored(everything, step.stats), step)
        with self.clock.phase("write_rollouts"):
            await self.reporter.rollouts(self.step + 1, with_scores_of(everything, scored))
        batch = await self._through(self.program.stages, scored, step)
        await self.weights.hold_if_shared()
        if self.step >= self._warmup_steps:
            await self._update_actor(batch, step)
            self.coefficients.adapt(scored, step.stats)
        await self.publish(step.stats)
        await self.report(scored, step.stats)
        with self.clock.phase("checkpoint"):
            await self.checkpoints.write_if_due(self)

    async def _through(self, stages: Sequence[Stage], batch: BatchRef, step: Step) -> BatchRef:
        for stage in stages:
            with self.clock.phase(stage.phase):
                batch = await stage(batch, step)
        return batch

    async def _update_actor(self, batch: BatchRef, step: Step) -> None:
        loss, epochs = self.program.actor_loss, self.config.actor.epochs
        with self.clock.phase("update_actor"):
            step.stats.merge(
                await update_actor(self.roles.actor, batch, loss, epochs, step, self._pretraining)
            )
