"""Weights on their way to the engines: hold, load, confirm, release; and the canary that proves that they
arrived.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rondo.batch import BatchRef
from rondo.config.schema import Config
from rondo.errors import WeightSyncError
from rondo.planning.placement import Phase
from rondo.trainers.loop.buffer import Buffer
from rondo.trainers.loop.feeder import EpisodeFeeder, Episodes
from rondo.trainers.loop.mender import Mender
from rondo.trainers.loop.routes import Route
from rondo.trainers.program.inputs import Prompts
from rondo.trainers.program.roles import Roles, rollout_dtype
from rondo.types import StepStats, request_seed
from rondo.weights.sync import SyncReport
from rondo.workers.models import ActorWorker
from rondo.workers.rollout import RolloutWorker
from rondo.workers.transfer import probed


class WeightPublisher:
    """Serves the trainer's versions: hold, load, confirm, release. Every engine has the one that is served.

    shared: trainer and sampler use one storage, so episodes are held before the first optimizer step. enter:
    tells the engines which phase begins (rollout.sleep); None: they never rest. canary: compares engines and
    trainer after each sync, and returns the gap (`Canary.check`).
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
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._route = route
        self._episodes = episodes
        self._feeder = feeder
        self._buffer = buffer
        self._shared = shared
        self._enter = enter
        self._canary = canary
        self._version = -1  # that the engines serve
        self._held = False  # the episodes
        self._changes = False  # the weights: `mender.changing` is ours
        self.mender = Mender(episodes.restarted, self._reload, check=self._check, warn=warn)

    async def start(self, version: int) -> None:
        """Serves the first weights, before the first episode."""
        await self._episodes.pause()
        await self._load(version)
        await self._buffer.advance(version)
        await self._feeder.release()

    async def rest(self) -> None:
        """Engines that rest while the trainer computes (rollout.sleep) are held from here to `release`."""
        assert self._enter is not None
        await self._hold()
        await self._enter("train")

    async def hold_if_shared(self) -> None:
        """Comes before the first optimizer step: from here to `publish` the trainer's weights are no version
        that anybody is served. Engines with the trainer's storage are held.
        """
        await self._begin_change()
        if self._shared:
            await self._hold()

    async def publish(self, version: int, stats: StepStats) -> None:
        """Holds the episodes, if nobody has; every engine loads `version` and confirms it."""
        await self._hold()
        (await self._load(version)).count(stats)
        if self._enter is not None:
            await self._enter("generate")
        stats.add_sum("buffer/in_flight", float(self._buffer.in_flight))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Between `publish` and `release`: the engines run inside, for an evaluation."""
        await self._episodes.resume()
        self.mender.changing.release()  # only now: the mender pauses and resumes engines that run
        yield
        await self.mender.changing.acquire()
        await self._episodes.pause()

    async def release(self, version: int, stats: StepStats) -> None:
        """Prompts start on the credits of `version`, and episodes go on under its weights."""
        await self._buffer.advance(version)
        await self._feeder.release()
        self._held = self._changes = False
        self.mender.changing.release()
        if self._canary is not None:  # the engines run, and the trainer holds what they serve
            gap = await self.mender.served(self._canary(version))
            stats.add_max("weights/canary_gap", gap)

    async def _begin_change(self) -> None:
        if not self._changes:
            await self.mender.changing.acquire()
            self._changes = True

    async def _hold(self) -> None:
        await self._begin_change()
        if not self._held:
            await self._feeder.hold(self.mender.stranded)
            self._held = True

    async def _load(self, version: int) -> SyncReport:
        report = await self._route.load(version)
        self._version = version
        return report

    async def _reload(self) -> None:
        """The weights once more, for an engine that has none. What is in flight keeps its place."""
        await self._episodes.pause()
        await self._load(self._version)
        await self._episodes.resume()

    async def _check(self) -> None:
        if self._canary is not None:
            await self._canary(self._version)


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
