"""The order of a publish: hold, (update,) load, confirm, snapshot if due, advance the buffer, release.

The canary: after each sync, the engines' log-probs of a few tokens must be the trainer's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np

from rondo.batch import BatchRef
from rondo.config.schema import Config
from rondo.errors import WeightSyncError
from rondo.planning.residency import Phase
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.feeder import EpisodeFeeder, Episodes
from rondo.trainers.loop.routes import Route
from rondo.trainers.loop.waiting import attended
from rondo.trainers.program.inputs import Prompts
from rondo.trainers.program.roles import Roles, rollout_dtype
from rondo.types import StepStats, request_seed
from rondo.workers.models import ActorWorker
from rondo.workers.rollout import RolloutWorker
from rondo.workers.transfer import probed

T = TypeVar("T")


async def _nothing(version: int) -> None: ...


class WeightPublisher:
    """shared: trainer and sampler use one storage, so episodes must be held before the first optimizer
    step. enter: tells the engines which phase begins (rollout.sleep); None: they never rest. phase: counts
    the time inside to a name (`Timers.phase`). canary: compares engines and trainer after each sync, and
    returns the gap (`Canary.check`).
    """

    def __init__(
        self,
        route: Route,
        episodes: Episodes,
        feeder: EpisodeFeeder,
        buffer: Buffer,
        *,
        shared: bool,
        enter: Callable[[Phase], Awaitable[None]] | None = None,
        canary: Callable[[int], Coroutine[Any, Any, float]] | None = None,
        phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._route, self._episodes, self._feeder = route, episodes, feeder
        self._buffer, self._shared, self._enter = buffer, shared, enter
        self._phase, self._canary, self._warn = phase, canary, warn

    async def train_phase(
        self, version: int, *, before_hold: Callable[[int], Awaitable[None]] = _nothing
    ) -> None:
        """The trainer begins to compute on the way to `version`. Engines that rest meanwhile are held from
        here until `publishing` has loaded it.
        """
        if self._enter is not None:
            await before_hold(version)
            await self._feeder.hold()
            await self._enter("train")

    @asynccontextmanager
    async def publishing(
        self,
        version: int,
        *,
        before_hold: Callable[[int], Awaitable[None]] = _nothing,
        before_release: Callable[[int], Awaitable[None]] = _nothing,
    ) -> AsyncIterator[StepStats]:
        """The update runs inside. before_hold(version) waits for what must end under the old weights.
        before_release(version) runs while nothing decodes: the snapshot, and an evaluation of its own.

        An error inside leaves the episodes held and the version old. Yields statistics that are full
        afterwards.
        """
        stats = StepStats()
        if self._shared:
            await before_hold(version)
            await self._feeder.hold()
        yield stats
        with self._phase("publish"):
            if not self._shared:
                await before_hold(version)
                await self._feeder.hold()
            report = await self._route.load(version)
            if self._enter is not None:
                await self._enter("generate")
            report.count(stats)
            stats.add_sum("buffer/in_flight", float(self._buffer.in_flight))
            await before_release(version)
            await self._buffer.advance(version)
            await self._feeder.release()
            if self._canary is not None:  # the engines run, and the trainer holds what they serve
                gap = await self.served(self._canary(version), version)
                stats.add_max("weights/canary_gap", gap)

    async def start(self, version: int) -> None:
        """The first weights, before the first episode."""
        await self._episodes.pause()
        await self._route.load(version)
        await self._buffer.advance(version)
        await self._feeder.release()

    async def served(self, work: Coroutine[Any, Any, T], version: int) -> T:
        """The result of `work`, which waits for engines. One that is started again meanwhile has no weights,
        and whoever waits for it would wait for ever: it gets `version`. Only while the trainer holds that.
        """

        async def mend(news: str) -> None:
            self._warn(news)
            await self.republish(version)

        return await attended(work, self._episodes.restarted, mend)

    async def republish(self, version: int) -> None:
        """The weights once more, for an engine that has none. What is in flight keeps its place."""
        await self._episodes.pause()
        await self._route.load(version)
        await self._episodes.resume()
        if self._canary is not None:
            await self.served(self._canary(version), version)


# Largest believable difference of one log-prob between two correct implementations, by the sampler's dtype.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
NUM_TOKENS, NUM_PROMPT_TOKENS = 8, 32


class Canary:
    """A few tokens after the first tokens of the first prompt, from every engine, past the router and before
    all that waits in an engine (a publish waits for it): no statistics of requests change, and no other
    request's noise does. The trainer computes them again in one
    small pass, so it must hold the version that the engines serve. The first check of a run also asks behind
    a prompt of data.max_prompt_tokens: what is wrong at high positions only is wrong from the start.
    """

    def __init__(self, roles: Roles, prompts: Prompts, config: Config) -> None:
        self._actor, self._rollout, self._dtype = roles.actor, roles.engines, rollout_dtype(config)
        prompt = [int(token) for token in prompts.train.prompt(0).token_ids]
        self._prompt = prompt[:NUM_PROMPT_TOKENS]
        longest = config.data.max_prompt_tokens
        self._long_prompt: list[int] | None = list(itertools.islice(itertools.cycle(prompt), longest))
        count = min(NUM_TOKENS, prompts.sampling.max_tokens)
        self._sampling = dataclasses.replace(prompts.sampling, max_tokens=count)
        self._seed = request_seed(config.trainer.seed, "canary")
        self._dtypes = sorted({self._dtype, config.actor.compute_dtype})
        self.tolerance = max(TOLERANCE[dtype] for dtype in self._dtypes)

    async def check(self, version: int) -> float:
        """The largest gap of one log-prob, over all engines that serve `version`; they must be running.

        Raises WeightSyncError where it is over the tolerance, naming engine and, where that engine can read
        its weights back, the first tensor that differs.
        """
        if self._long_prompt is not None:
            await self._gap(self._long_prompt, version)
            self._long_prompt = None
        return await self._gap(self._prompt, version)

    async def _gap(self, prompt: list[int], version: int) -> float:
        asked = (prompt, self._sampling, self._seed, version)
        parts = list((await self._rollout.call_each(RolloutWorker.probe, *asked, keep=())).values())
        rows = BatchRef.concat([part for part in parts if len(part)] or parts[:1])
        if not len(rows):
            return 0.0  # every engine is being started again
        scored = await self._actor.call(ActorWorker.compute_log_prob, rows)
        batch = await scored.fetch(["rollout_log_probs", "old_log_probs"])
        theirs, bounds = batch.ragged("rollout_log_probs")
        difference = np.abs(theirs.numpy() - batch.ragged("old_log_probs")[0].numpy())
        difference = np.where(np.isfinite(difference), difference, np.inf)
        gaps = [float(difference[a:b].max(initial=0.0)) for a, b in itertools.pairwise(bounds.tolist())]
        worst = int(np.argmax(gaps))
        if not gaps[worst] <= self.tolerance:
            await self._fail(version, gaps[worst], int(batch.scalars("row_id")[worst]), len(prompt))
        return gaps[worst]

    async def _fail(self, version: int, gap: float, row_id: int, length: int) -> None:
        rank, number = probed(row_id)
        checksums = await self._actor.call(ActorWorker.parameter_checksums, self._dtype)
        found = await self._rollout.call_rank(rank, RolloutWorker.differing_tensor, number, checksums)
        raise WeightSyncError(
            f"version {version}: the log-probs of engine {number} of rollout[{rank}] differ from the "
            f"trainer's by {gap:.3g} (tolerance {self.tolerance:g} for {', '.join(self._dtypes)}) behind a "
            f"prompt of {length} tokens: it does not hold the trainer's weights, or computes another model; "
            f"{found}"
        )
