"""The canary: proves that every engine computes with the weights that the trainer holds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from rondo.config import Config
from rondo.controller import WorkerGroup
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import WeightSyncError
from rondo.core.images import ImageRef
from rondo.core.types import Prompt, SamplingParams, request_seed
from rondo.models.precision import LARGEST_GAP
from rondo.planning import adapters_of, rollout_dtype
from rondo.planning.step_time import CANARY
from rondo.weights import Sent
from rondo.workers import ActorWorker, RolloutWorker
from rondo.workers.transfer import probed

NUM_PROMPT_TOKENS, NUM_TOKENS = CANARY.prompt, CANARY.responses[0]
# An engine without the adapters has the log-probs of the model without them, but for rounding: so many times
# nearer to them than to the trainer's, which rounding alone does not make it.
NEARER = 4.0
SMALLEST_EFFECT = 1e-4  # of adapters on a log-prob, above what float32 rounds

_Asked = tuple[list[int], tuple[ImageRef, ...]]  # the tokens of a prompt, and its images


class Canary:
    """A few tokens after the first tokens of a prompt, from every engine, past the router and before all that
    waits in an engine (a publish waits for it): no statistics of requests change, and no other request's
    noise does. The trainer computes them again in one small pass, so it must hold the version that the
    engines serve.

    sampling: of a version, at the temperature that the trainer has then.
    long: the first check also asks behind a prompt of data.max_prompt_tokens: what is wrong at high positions
    only is wrong from the start. With actor.lora the trainer also computes them without its adapters, for an
    engine that ignores these: what they change may be less than the tolerance of half precision.
    """

    def __init__(
        self,
        actor: WorkerGroup,
        engines: WorkerGroup,
        config: Config,
        prompt: Prompt,
        sampling: Callable[[int], SamplingParams],
        *,
        long: bool = True,
    ) -> None:
        self._actor = actor
        self._rollout = engines
        self._dtype = rollout_dtype(config)
        tokens, length = [int(token) for token in prompt.token_ids], config.data.max_prompt_tokens
        self._prompt: _Asked = (tokens[:NUM_PROMPT_TOKENS], ())
        long_prompt: _Asked = (list(itertools.islice(itertools.cycle(tokens), length)), ())
        if prompt.images:  # none is cut
            times = max(1, length // len(tokens))
            self._prompt, long_prompt = (tokens, prompt.images), (tokens * times, prompt.images * times)
        self._long_prompt = long_prompt if long else None
        self._sampling = sampling
        self._seed = request_seed(config.trainer.seed, "canary")
        self._adapters = config.actor.lora is not None
        # What an engine can be asked for: with adapters by themselves it received no merged weights.
        self._held: Sent = "all" if adapters_of(config) == "alone" else "merged"
        self._dtypes = sorted({self._dtype, config.actor.compute_dtype})
        self.tolerance = max(LARGEST_GAP[dtype] for dtype in self._dtypes)

    async def check(self, version: int) -> float:
        """Returns the largest gap of one log-prob, over all engines that serve `version`; they must be
        running.

        Raises WeightSyncError where it is over the tolerance, naming engine and, where that engine can read
        its weights back, the first tensor that differs; and for an engine that computes without the adapters.
        """
        if self._long_prompt is not None:
            await self._gap(self._long_prompt, version)
            self._long_prompt = None
        return await self._gap(self._prompt, version)

    async def _gap(self, prompt: _Asked, version: int) -> float:
        sampling = self._sampling(version)
        sampling = dataclasses.replace(sampling, max_tokens=min(NUM_TOKENS, sampling.max_tokens))
        asked = (*prompt, sampling, self._seed, version)
        parts = list((await self._rollout.call_each(RolloutWorker.probe, *asked, keep=())).values())
        rows = BatchRef.concat([part for part in parts if len(part)] or parts[:1])
        if not len(rows):
            return 0.0  # every engine is being started again
        scored = await self._actor.call(ActorWorker.compute_log_prob, rows)
        columns = ["rollout_log_probs", "old_log_probs"]
        if self._adapters:
            scored = await self._actor.call(ActorWorker.compute_ref_log_prob, scored)
            columns.append("ref_log_probs")
        batch = await scored.fetch(columns)
        gaps = _largest(batch, "old_log_probs")
        worst = int(np.argmax(gaps))
        if not gaps[worst] <= self.tolerance:
            await self._fail(version, gaps[worst], int(batch.scalars("row_id")[worst]), len(prompt[0]))
        if self._adapters:
            for row, (gap, without) in enumerate(zip(gaps, _largest(batch, "ref_log_probs"), strict=True)):
                if without * NEARER < gap and gap > SMALLEST_EFFECT:
                    _fail_without_adapters(version, gap, without, int(batch.scalars("row_id")[row]))
        return gaps[worst]

    async def _fail(self, version: int, gap: float, row_id: int, length: int) -> None:
        rank, number = probed(row_id)
        checksums = await self._actor.call(ActorWorker.parameter_checksums, self._dtype, self._held)
        found = await self._rollout.call_rank(rank, RolloutWorker.differing_tensor, number, checksums)
        raise WeightSyncError(
            f"version {version}: the log-probs of engine {number} of rollout[{rank}] differ from the "
            f"trainer's by {gap:.3g} (tolerance {self.tolerance:g} for {', '.join(self._dtypes)}) behind a "
            f"prompt of {length} tokens: it does not hold the trainer's weights, or computes another model; "
            f"{found}"
        )


def _largest(batch: Batch, column: str) -> list[float]:
    """Returns, for each row, the largest distance of the engine's log-probs from those of `column`."""
    theirs, bounds = batch.ragged("rollout_log_probs")
    difference = np.abs(theirs.numpy() - batch.ragged(column)[0].numpy())
    difference = np.where(np.isfinite(difference), difference, np.inf)
    return [float(difference[a:b].max(initial=0.0)) for a, b in itertools.pairwise(bounds.tolist())]


def _fail_without_adapters(version: int, gap: float, without: float, row_id: int) -> None:
    rank, number = probed(row_id)
    raise WeightSyncError(
        f"version {version}: engine {number} of rollout[{rank}] computes without the adapters of actor.lora: "
        f"its log-probs differ by {gap:.3g} from the trainer's, and by {without:.3g} from those of the model "
        "without them"
    )
