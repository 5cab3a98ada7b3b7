"""Where a run's prompt groups come from, as the loop sees it: generation engines that get every version of
the policy, or a recording (`trainers/recorded.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rondo.config.schema import Config
from rondo.data.buffer import Buffer
from rondo.planning.admission import OnUpdate, effective_on_update
from rondo.planning.residency import Phase
from rondo.rollout.protocol import WASTED_TOKENS
from rondo.trainers.canary import Canary
from rondo.trainers.episodes import Episodes, WorkerEpisodes
from rondo.trainers.evaluation import EvaluationResult, evaluate
from rondo.trainers.roles import Roles
from rondo.trainers.routes import Route, make_route
from rondo.trainers.setup import Program, Prompts
from rondo.types import Prompt, StepStats
from rondo.workers.rollout import RolloutWorker, runs_in_own_process


class RolloutSide(Protocol):
    """episodes: what the feeder asks for groups. route: how weights get there. index_columns: of the groups'
    rows. on_update: see `EpisodeFeeder`. enter: see `WeightPublisher`. canary: compares engines and trainer;
    None: there is nothing to compare. eval: held-out prompts; none where nothing can answer them.
    """

    episodes: Episodes
    route: Route
    index_columns: tuple[str, ...]
    on_update: OnUpdate
    enter: Callable[[Phase], Awaitable[None]] | None
    canary: Callable[[int], Coroutine[Any, Any, float]] | None
    eval: Sequence[Prompt]

    def describe(self) -> str:
        """One line for the log."""
        ...

    def buffer(self, **options: Any) -> Buffer:
        """The buffer of the run. options: those of `Buffer` but `max_staleness`."""
        ...

    def taken_at(self, seq: int, version: int) -> int:
        """The policy version at which the group is trained that is taken now, at `version`, as far as its
        staleness is concerned.
        """
        ...

    async def statistics(self) -> StepStats:
        """Counters of all engines since the last call."""
        ...

    async def evaluate(self) -> EvaluationResult:
        """Answers to `eval`, scored."""
        ...


class EngineSide:
    """`RolloutSide` with the rollout worker group of `roles`. folder: of the run."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        program: Program,
        prompts: Prompts,
        score_names: Sequence[str],
        folder: Path,
    ) -> None:
        self._config, self._prompts, self._rollout = config, prompts, roles.engines
        workers = WorkerEpisodes(
            roles.engines,
            prompts.train.prompt,
            sampling=prompts.sampling,
            n=config.rollout.n,
            score_names=score_names,
            deadline_seconds=config.rollout.deadline_seconds,
            greedy_baseline=program.greedy_baseline,
            may_lose=roles.rollout_stands_alone(),
            own_processes=runs_in_own_process(config.rollout),
        )
        self.episodes: Episodes = workers
        self.index_columns: tuple[str, ...] = workers.index_columns
        self.enter: Callable[[Phase], Awaitable[None]] | None = (
            workers.enter if config.rollout.sleep else None
        )
        self.on_update: OnUpdate = effective_on_update(config.trainer.on_update, config.trainer.max_staleness)
        self.route: Route = make_route(config, roles, folder)
        self.canary: Callable[[int], Coroutine[Any, Any, float]] | None
        self.canary = Canary(roles, prompts, config).check
        self.eval: Sequence[Prompt] = prompts.eval

    def describe(self) -> str:
        return self.route.describe()

    def buffer(self, **options: Any) -> Buffer:
        return Buffer(max_staleness=self._config.trainer.max_staleness, **options)

    def taken_at(self, seq: int, version: int) -> int:
        return version

    async def statistics(self) -> StepStats:
        stats = StepStats()
        parts: Mapping[int, StepStats] = await self._rollout.call_each(RolloutWorker.statistics)
        for part in parts.values():
            stats.merge(part)
        stats.add_sum("buffer/wasted_tokens", stats.sums.pop(WASTED_TOKENS, 0.0))
        return stats

    async def evaluate(self) -> EvaluationResult:
        evaluation, sampling = self._config.trainer.evaluation, self._prompts.sampling
        return await evaluate(self._rollout, self.eval, evaluation, sampling)
