"""The rollout worker: generation engines behind a router, and the episodes that run next to them. Token data
is born here and stays; what an evaluation keeps of a trajectory leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.agents import replay
from rondo.agents.ended import Entry, ended_of
from rondo.agents.external import ExternalAgent, agent_of
from rondo.agents.runner import AgentLoop, EpisodeRunner, TrajectoryScorer, giving, going_on, single_turn
from rondo.agents.tools import load_tools, prepare_tools
from rondo.agents.worlds import Worlds
from rondo.chat import decode
from rondo.config.schema import RewardConfig, RolloutConfig
from rondo.controller import Worker, WorkerContext, dispatch
from rondo.core.batch import ROW_ID, Batch
from rondo.core.columns import GREEDY_REWARD, IMAGES, ROUTES, SCORE
from rondo.core.types import (
    SCORED,
    Completion,
    Ended,
    EvaluationRecord,
    GenerateRequest,
    Hop,
    Prompt,
    SamplingParams,
    StepStats,
    Trajectory,
)
from rondo.data.images import episode_images
from rondo.data.rows import prompt_text, rows_from_trajectories
from rondo.models import load_tokenizer
from rondo.models.pixels import image_reader
from rondo.models.routers import routes_of
from rondo.planning import Phase, runs_in_own_process
from rondo.rewards import Scorer
from rondo.rewards.answers import final_answer
from rondo.rollout import EngineSpec
from rondo.rollout.protocol import OnTokens
from rondo.weights.sync import Sent, SyncReport, assert_shared, gather_into
from rondo.workers.replicas import Replicas
from rondo.workers.transfer import ReceivesWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutWorker(ReceivesWeights, Worker):
    """Runs the engines of one rollout rank, and the episodes on them. spec: of its engines, on this worker's
    device. share: the storage of the actor's engine is used in place (one rank, same process): the weights,
    or, where adapters come by themselves, their base. image_folder: where pictures of environments are kept.
    images_per_prompt: so many at most.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        spec: EngineSpec,
        rollout: RolloutConfig,
        reward: RewardConfig,
        share: bool = False,
        hop: Hop = "host",
        trainer: str = "actor",
        image_folder: Path | None = None,
        images_per_prompt: int | None = None,
    ) -> None:
        super().__init__(context)
        self._spec = spec = dataclasses.replace(spec, device=context.device)
        self._share = share and spec.adapters is None
        self._sleep = rollout.sleep
        self._bucket_bytes = rollout.bucket_bytes
        reader = image_reader(spec.source)
        self.routes = routes_of(spec.source) if spec.routes else None
        self._beside: dict[str, Any] = {  # the tokens
            "routes": self.routes,
            "images": None if reader is None else lambda: reader.fingerprint,
        }
        self._trainer = trainer
        sharer: Any = context.peers[trainer] if share else None
        self.replicas = Replicas(
            spec,
            count=rollout.replicas,
            own_process=runs_in_own_process(rollout),
            bucket_bytes=rollout.bucket_bytes,
            parameters=sharer.engine.parameters_in_place() if sharer is not None else None,
            accelerators=context.accelerators,
            hop=hop,
        )
        assert spec.tokenizer is not None
        self._tokenizer = load_tokenizer(spec.tokenizer)
        if reader is not None:  # for what agents show
            reader.tell(self._tokenizer)
        self.scorer = Scorer(reward, seed=spec.seed) if reward.functions else None
        self._scores: Scorer | Unscored = self.scorer or Unscored()
        self._score_columns = {SCORE(name): name for name in self._scores.names}
        chosen, tools = agent_of(rollout), load_tools(rollout.tools)
        prepare_tools(tools)
        worlds = None
        if rollout.environments:
            worlds = Worlds(rollout.environments, episode_workers=rollout.episode_workers)
        images = None if reader is None else episode_images(reader, image_folder, images_per_prompt)
        self._agent = (
            ExternalAgent(
                chosen,
                self._tokenizer,
                max_context=spec.max_context,
                tools=tools,
                worlds=worlds,
                on_full=rollout.on_full,
                episode_workers=rollout.episode_workers,
                images=images,
            )
            if chosen
            else None
        )
        self._beside["records"] = worlds is not None and worlds.restores
        self._unscored = self._make_runner(Unscored())
        self._runner = self._make_runner(self._scores, self._agent or single_turn)
        self._evaluator = self._make_runner(self._scores, self._agent or single_turn, urgent=True)

    def _make_runner(
        self, scorer: TrajectoryScorer, agent: AgentLoop = single_turn, *, urgent: bool = False
    ) -> EpisodeRunner:
        async def first(request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
            return await self.replicas.router.generate(dataclasses.replace(request, urgent=True), on_tokens)

        return EpisodeRunner(
            first if urgent else self.replicas.router.generate,
            scorer,
            lambda ids: decode(self._tokenizer, ids),
            run_seed=self._spec.seed,
            agent=agent,
        )

    @dispatch("broadcast")
    def load_weights(self, version: int, what: Sent = "merged") -> SyncReport:
        """Makes the engines serve `version` of the trainer's weights. Collective; they must be paused.

        One that dies meanwhile is left out, and wants weights (`wants_weights`, `restarted`).
        """
        trainer: Any = self.context.peers[self._trainer].engine  # type: ignore[attr-defined]
        if self._share:
            shared: list[Any] = list(self.replicas.router.engines().values())
            (engine,) = shared  # in this process, as it shares storage
            parameters = engine.parameters()
            # One storage: the update has changed the engine's weights already, which only get their version.
            assert_shared(trainer.parameters_in_place(), parameters)
            engine.set_version(version)
            return SyncReport(version, len(parameters), 0)
        with closing(self.replicas.sink(what)) as sink:
            report = gather_into(
                trainer.parameters(what),
                sink,
                version,
                self._bucket_bytes,
                dtype=self._spec.dtype,
                processes=self.replicas.num_processes,
            )
        self.replicas.loaded(version)
        return report

    @dispatch("per_rank")
    async def wants_weights(self) -> int:
        """Counts how many of the engines here have no weights, because they were started again."""
        return self.replicas.wanting

    @dispatch("per_rank")
    async def restarted(self) -> str:
        """Returns when an engine was started again and wants weights, with a sentence that says so."""
        return await self.replicas.restarted()

    @dispatch("broadcast")
    async def pause(self) -> None:
        """Stops at the next token boundary; requests keep their place."""
        await self.replicas.router.pause()

    @dispatch("broadcast")
    async def resume(self) -> None:
        await self.replicas.router.resume()

    @dispatch("broadcast")
    async def enter(self, phase: Phase) -> None:
        """Gives the key/value cache back, or makes it again, as rollout.sleep asks in this phase; of a native
        engine on a CPU its packed weights, too. The engine must be paused; nothing is lost of what it holds.
        """
        if self._sleep and phase == "train":
            await self.replicas.router.sleep()
        else:
            await self.replicas.router.wake()

    @dispatch("per_rank")
    def decode_path(self) -> str:
        """Says what kind of engines there are, which decode path they chose, and why."""
        return self.replicas.describe()

    async def run_group(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        n: int,
        deadline_seconds: float | None = None,
        *,
        purpose: str = "train",
        greedy_baseline: bool = False,
        first: int = 0,
    ) -> tuple[Batch, Ended]:
        """Returns all rows of one prompt group, failed trajectories included (column outcome), and how each
        ended, for the journal. purpose: seeds the samples' noise, beside prompt and sample index. first: the
        sample index of the first.

        greedy_baseline: with the column greedy_reward, the reward of one greedy answer to the same prompt
        (NaN where that was not scored).
        """
        made = await self._runner.run_group(
            prompt,
            sampling,
            n,
            purpose=purpose,
            deadline_seconds=deadline_seconds,
            greedy_baseline=greedy_baseline,
            first=first,
        )
        return self._rows(made, n)

    async def score_given(
        self, prompt: Prompt, given: Sequence[Completion], rewards: Sequence[float] | None, first: int
    ) -> Batch:
        """Returns the rows of responses that are there, as `run_group` does of sampled ones. rewards: of
        each; None: the reward functions say it. first: the sample index of the first.
        """
        known = None if rewards is None else {first + i: reward for i, reward in enumerate(rewards)}
        runner = self._make_runner(self._scores if known is None else Unscored(known), giving(given, first))
        nothing_sampled = SamplingParams(max_tokens=0)
        made = await runner.run_group(prompt, nothing_sampled, len(given), first=first)
        return self._rows(made, len(given))[0]

    async def branch_group(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        prefixes: Sequence[Any],
        first: int,
        deadline_seconds: float | None = None,
    ) -> Batch:
        """Returns the rows of responses to one prompt that go on from these prefixes (a Completion; None:
        nothing), as `run_group` does; of an agent's from these forks (`agents/forks.py`), with parent_id and
        fork. first: the sample index of the first.
        """
        n = len(prefixes)
        forks = None if self._agent is None else self._agent.branching(prompt, prefixes, first)
        runner = self._make_runner(self._scores, forks or going_on(prefixes, first))
        made = await runner.run_group(prompt, sampling, n, first=first, deadline_seconds=deadline_seconds)
        rows = self._rows(made, n)[0]
        if forks is None:
            return rows
        parents, places = forks.origins(made, rows.scalars(ROW_ID).tolist())
        return rows.with_columns({"parent_id": np.array(parents), "fork": np.array(places, np.int32)})

    async def continue_group(
        self,
        before: Batch | None,
        prompt: Prompt,
        sampling: SamplingParams,
        entries: Sequence[Entry],
        version: int,
        *,
        greedy_baseline: bool = False,
    ) -> Batch:
        """Makes, for a replay, the tokens of `version` of the responses to one prompt, nothing scored.
        entries: how they ended in the journal. before: what the call for an earlier version returned. The
        columns are `replay.PIECE`, a row for each call; the greedy answer's are the last.
        """
        so_far: Sequence[Sequence[Completion]] = [()] * len(entries)
        if before is not None:
            so_far = replay.completions_of(before, entries)
        agent = replay.pieces(self._agent or single_turn, entries, version, so_far)
        runner = self._make_runner(Unscored(), agent)
        n = len(entries) - greedy_baseline
        made = await runner.run_group(prompt, sampling, n, greedy_baseline=greedy_baseline)
        rows = rows_from_trajectories(made, **self._beside)
        return rows.select(
            (ROW_ID, *replay.PIECE, *(name for name in (*ROUTES, IMAGES) if name in rows.columns))
        )

    async def finish_group(
        self,
        made: Batch,
        prompt: Prompt,
        sampling: SamplingParams,
        entries: Sequence[Entry],
        deadline_seconds: float | None = None,
        *,
        greedy_baseline: bool = False,
    ) -> tuple[Batch, Ended]:
        """Makes, for a replay, what `run_group` returns of responses that are there (`continue_group`).
        entries: how they ended in the journal.
        """
        scores = replay.ReplayedScores(self._scores, entries)
        so_far = replay.completions_of(made, entries)
        runner = self._make_runner(scores, replay.whole(self._agent or single_turn, entries, so_far))
        n = len(entries) - greedy_baseline
        made_again = await runner.run_group(
            prompt, sampling, n, deadline_seconds=deadline_seconds, greedy_baseline=greedy_baseline
        )
        return self._rows(made_again, n)

    def _rows(self, made: Sequence[Trajectory], n: int) -> tuple[Batch, Ended]:
        """Returns the n samples as rows, with the reward of a greedy answer after them as a column, and how
        all of them ended.
        """
        trajectories, greedy = made[:n], made[n:]
        rows = rows_from_trajectories(
            trajectories,
            self._score_columns,
            accuracy=self._scores.accuracy,
            of_agents=self._agent is not None,
            **self._beside,
        )
        if greedy:
            # `commands/check.py` refuses functions that score whole groups: they cannot score this one.
            rows = rows.with_columns({GREEDY_REWARD: np.full(len(rows), greedy[0].reward, np.float32)})
        return rows, ended_of(trajectories, greedy)

    async def run_unscored(self, prompt: Prompt, sampling: SamplingParams, n: int, purpose: str) -> Batch:
        """Returns rows without a reward (0): for the canary, and for `rondo generate`."""
        made = await self._unscored.run_group(prompt, sampling, n, purpose=purpose)
        return rows_from_trajectories(made, **self._beside)

    async def evaluate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, n: int, purpose: str
    ) -> list[EvaluationRecord]:
        """Returns n scored answers to each prompt, as small records. Urgent: the next publish waits for
        them.
        """
        trajectories = await self._evaluator.run_groups(prompts, sampling, n, purpose)
        scores = self._scores
        return [record_of(t, scores.source(t), scores.answer(t), self._tokenizer) for t in trajectories]

    @dispatch("per_rank")
    async def end_step(self) -> StepStats:
        """Returns the counters of engines, router and scorer for the step that ends here; the next begins at
        0.
        """
        stats = await self.replicas.router.statistics()
        return stats.merge(*(part.stats() for part in (self.scorer, self._agent) if part))

    @dispatch("per_rank")
    async def start_counting(self) -> None:
        """Begins a step: what was counted until now belongs to no step."""
        # Reading the counters sets them to 0.
        await self.end_step()

    def stacks(self) -> str:
        """See Worker.stacks: those of engines' processes; not of scorers, which answer nothing meanwhile."""
        return self.replicas.stacks()

    def turn_profile(self, change: Any) -> None:
        """See Worker.turn_profile: those of rondo's own engines."""
        self.replicas.turn_profile(change, f"{self.context.role}-{self.context.rank}")

    def close(self) -> None:
        """Ends the agents' endpoint, the engines, the scorers and all their processes; called when the
        cluster shuts down.
        """
        super().close()
        if self._agent:
            self._agent.close()
        self.replicas.close()
        if self.scorer:
            self.scorer.close()


class Unscored:
    """No reward: for the canary, `rondo generate`, and a model without reward functions. given: rewards that
    are known, by sample index; others are 0.
    """

    names: tuple[str, ...] = ()
    accuracy: str | None = None

    def __init__(self, given: Mapping[int, float] = MappingProxyType({})) -> None:
        self._given = given

    def answer(self, trajectory: Trajectory) -> str | None:
        return final_answer(trajectory.text)

    def source(self, trajectory: Trajectory) -> str:
        return trajectory.prompt.source

    async def score(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.outcome != SCORED:  # without a token: nothing that a reward model could score
            return trajectory
        return trajectory.replaced(reward=self._given.get(trajectory.sample_index, 0.0))

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        return list(trajectories)


def record_of(
    t: Trajectory, source: str, answer: str | None, tokenizer: PreTrainedTokenizerBase
) -> EvaluationRecord:
    """Returns the record of a trajectory that is scored. source, answer: what it is reported under, and what
    it votes for. tokenizer: reads a prompt that is token ids only.
    """
    return EvaluationRecord(
        prompt_id=t.prompt.prompt_id,
        source=source,
        sample_index=t.sample_index,
        reward=float(t.reward),
        response_length=t.num_tokens,
        finish_reason=t.finish_reason,
        outcome=t.outcome,
        prompt=prompt_text(t.prompt) or decode(tokenizer, t.prompt.token_ids),
        text=t.text,
        transcript=t.transcript,
        answer=answer,
        scores=dict(t.scores),
        images=t.images,
    )
