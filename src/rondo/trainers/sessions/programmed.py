"""The run behind a program: where its loop stands, and what it has asked of the engines and brought itself.

`Session` and the handles of the roles are what a program sees of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rondo.checkpoint import pack, unpack
from rondo.config import Config
from rondo.core.batch import ROW_ID, BatchRef
from rondo.core.errors import CheckpointError, ConfigError, DataError, TrainError
from rondo.core.images import images_as_text, images_of_text
from rondo.core.types import Completion, Prompt, SamplingParams, StepStats
from rondo.data import FIRST_GIVEN, firsts, is_scored
from rondo.rewards import check_dropped_share
from rondo.trainers.loop import At, Branching, BranchNumbers, Reporter, RLRun, failures
from rondo.trainers.loop.feeder import cancel
from rondo.trainers.loop.served import ServedPolicy
from rondo.trainers.program import Prompts, Step, given_rows, stops_of
from rondo.workers import RolloutWorker

FIRST_OWN = 1 << 30
"""The sequence number of the first prompt of a program's own: no stream comes that far."""

FIRST_GREEDY = 1 << 17
"""The sample index of a greedy answer: a row of its own beside those that were sampled."""


class SampledBy(NamedTuple):
    """Who sampled a row."""

    policy: str
    """By its name; "": no policy of the program."""
    other: str | None = None
    """Why that is not the policy as it is trained; None: it is."""
    is_said: bool = True
    """Whether its log-probs are known."""


@dataclass(frozen=True)
class Question:
    """Prompts whose answers are under way, or there."""

    policy: ServedPolicy
    """Who answers."""
    sampling: SamplingParams
    """How they are sampled."""
    n: int
    """Samples of each."""
    prompts: Sequence[Prompt | None]
    """What is asked; None: it was answered before a checkpoint of an older rondo."""
    groups: Sequence[asyncio.Future[BatchRef]]
    """All rows of each prompt, failures included."""


class ProgrammedRun:
    """Carries a program through its steps. config: the run's. reporter: the run's."""

    def __init__(self, config: Config, data: Prompts, reporter: Reporter) -> None:
        self.config = config
        self.data = data
        self.reporter = reporter
        self.started: RLRun | None = None
        """The run, once there is an actor."""
        self.current: Step | None = None
        """The step of the program's loop; None outside of it."""
        self.generated: tuple[BatchRef, Mapping[str, int]] | None = None
        """What the stream has generated for this step: rows, and group ids by prompt."""
        self.corrected = False
        """Whether the program has made a rollout correction."""
        self._samplers: dict[int, SampledBy] = {}
        """Of rows that the run's policy has not sampled as it is trained: by row_id."""
        self.num_prompts = 0
        """Prompts that the program has made."""
        self.kept: dict[str, Any] = {}
        """What the program keeps in checkpoints (`Session.state`)."""
        self.ahead: deque[Question] = deque()
        """What was asked ahead, and is not handed over yet, in this order."""
        self._outside: Step | None = None
        self._asked: tuple[int, frozenset[object]] = (0, frozenset())
        """The version of the weights, and the prompts that were sampled under them: ids; seqs with tokens."""
        self._prompts: tuple[int, dict[int, Prompt]] = (0, {})
        """The version, and the prompts of the rows that were handed over in its step: by seq."""
        self._branching: dict[str, Branching] = {}
        self._branch_numbers = BranchNumbers()
        self._given: tuple[int, dict[int, int]] = (0, {})
        """The version, and how many rows were given in its step: by the prompt's seq."""

    @property
    def run(self) -> RLRun:
        """Returns the run. Raises ConfigError before there is an actor."""
        if self.started is None:
            raise ConfigError(
                "the session has no actor yet: `actor = await session.actor()` comes before the loop"
            )
        return self.started

    @property
    def policies(self) -> Mapping[str, ServedPolicy]:
        """Returns those that were made, by name; the run's is the first."""
        made = () if self.started is None else (self.started, *self.started.others)
        return {policy.name: policy for policy in made}

    @property
    def number(self) -> int:
        """Counts the trainer steps that are done: the version of the policy that is served."""
        return 0 if self.started is None else self.started.step

    @property
    def step(self) -> Step:
        """Returns what the stages of this step share; outside of the loop, of the step that the next update
        makes.
        """
        if self.current is not None:
            return self.current
        if self._outside is None or self._outside.number != self.number:
            self._outside = self.run.new_step()
        return self._outside

    async def updated(self, policy: ServedPolicy) -> None:
        """Notes an update of a policy; outside of the loop the new weights are served at once, as a step of
        their own.
        """
        if self.current is None:
            await self.run.publish(StepStats())
        elif policy is self.run:
            self.current.updated = True

    def check_published(self, policy: ServedPolicy, verb: str) -> None:
        """Raises TrainError where the engines stand still for weights that this step still changes."""
        if self.current is not None and policy.weights.changing:
            raise TrainError(
                f"{verb} after update_actor in one step: the new weights are served when the step ends; "
                "generate before the update, or in the next step"
            )

    # ---- samples ----

    def of_stream(self, prompts: Sequence[Prompt]) -> BatchRef | None:
        """Returns the scored rows that the run generated for `prompts` in this step, in their order; None
        where it did not.
        """
        if self.generated is None:
            return None
        rows, seqs = self.generated
        if not all(prompt.prompt_id in seqs for prompt in prompts):
            return None
        groups = rows.index.scalars("group_id")
        wanted = [np.flatnonzero(groups == seqs[prompt.prompt_id]) for prompt in prompts]
        return self.run.scored(rows.take(np.concatenate(wanted)), self.step.stats)

    def check_asked_once(self, prompts: Sequence[Prompt]) -> None:
        """Raises TrainError for a prompt that was sampled under these weights before: noise is a function of
        seed, `seq` and sample, so its samples would be the same ones, and count twice.
        """
        asked = set(self._asked[1]) if self._asked[0] == self.number else set()
        for prompt in prompts:
            tokens = (prompt.seq, np.asarray(prompt.token_ids).tobytes())  # the same one by another name
            if not asked.isdisjoint((prompt.prompt_id, tokens)):
                raise TrainError(
                    f"generate_sequences: prompt {prompt.prompt_id!r} was sampled under these weights "
                    "already, and would get the same samples again. Ask for all of them at once (n=…), or "
                    "make another one of it: session.prompt(prompt)"
                )
            asked.update((prompt.prompt_id, tokens))
        self._asked = (self.number, frozenset(asked))

    def check_fits(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        """Raises DataError for what is no prompt, and for one with which a response is longer than the
        engines take.
        """
        fitting = self.config.data.max_prompt_tokens + self.config.rollout.max_tokens
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise DataError(f"{prompt!r} is no prompt; session.prompt(…) makes one of a text or messages")
            if len(prompt.token_ids) + sampling.max_tokens > fitting:
                raise DataError(
                    f"prompt {prompt.prompt_id!r} has {len(prompt.token_ids)} tokens, and with a response of "
                    f"{sampling.max_tokens} more than the engines' {fitting} (data.max_prompt_tokens + "
                    "rollout.max_tokens): raise one of these, or ask for less, max_tokens=…"
                )

    def ask(
        self,
        policy: ServedPolicy,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        n: int,
        *,
        greedy: bool = False,
    ) -> Question:
        """Sends prompts to a policy's engines."""
        groups = [self._ask(policy, prompt, sampling, n, greedy=greedy) for prompt in prompts]
        return Question(policy, sampling, n, prompts, groups)

    def _ask(
        self, policy: ServedPolicy, prompt: Prompt, sampling: SamplingParams, n: int, *, greedy: bool = False
    ) -> asyncio.Future[BatchRef]:
        lent = prompt.lent()

        async def group(rank: int) -> BatchRef:
            rows, _ = await policy.roles.engines.call_rank(
                rank,
                RolloutWorker.run_group,
                lent,
                sampling,
                n,
                purpose="greedy" if greedy else "train",
                first=FIRST_GREEDY if greedy else 0,
                keep=policy.side.index_columns,
            )
            return rows  # type: ignore[no-any-return]

        return asyncio.ensure_future(policy.feeder.ask(group, prompt.seq))

    async def next_answers(self, policy: ServedPolicy) -> BatchRef:
        """Waits for the answers to what was asked first of what is ahead of a policy; see `Actor.answers`."""
        asked = next((question for question in self.ahead if question.policy is policy), None)
        if asked is None:
            raise TrainError("actor.answers: nothing was asked; actor.ask(prompts) comes before it")
        self.ahead.remove(asked)
        rows = await self.answers(asked)
        groups = rows.index.scalars("group_id")
        ages = [
            self.number - int(rows.index.scalars("oldest_version")[groups == group].min())
            for group in np.unique(groups)
        ]
        allowed = self.config.trainer.max_staleness
        if max(ages, default=0) > allowed:
            raise TrainError(
                f"actor.answers: these are the answers of a policy {max(ages)} versions older than this one, "
                f"more than trainer.max_staleness={allowed}: ask no more than that many steps ahead"
            )
        if ages:
            with self.stats_of(rows) as stats:
                self.run.count_staleness(stats, ages)
        return rows

    async def answers(self, asked: Question) -> BatchRef:
        """Waits for the answers; returns the scored rows, prompt by prompt. Raises RewardError for too many
        that failed.
        """
        run, mender = self.run, asked.policy.weights.mender
        try:
            with run.clock.phase("generate"):
                rows = BatchRef.concat(await mender.served(asyncio.gather(*asked.groups)))
        finally:
            for group in asked.groups:  # of others than the one that failed
                group.cancel()
        sampler = SampledBy(asked.policy.name, self._why_other(asked.sampling))
        self._note_samplers(rows, [sampler] * len(rows))
        self._note_prompts(prompt for prompt in asked.prompts if prompt is not None)
        with self.stats_of(rows) as stats:
            stats.add_sum("rollout/generated_tokens", float(rows.index.scalars("num_trained_tokens").sum()))
        return self._scored(rows)

    async def branches(
        self, policy: ServedPolicy, batch: BatchRef, at: At, sampling: SamplingParams, n: int
    ) -> BatchRef:
        """Returns the scored branches; see `Actor.branch`."""
        with self.run.clock.phase("generate"):
            stats = StepStats()
            rows = await self._branches(policy)(batch, at, sampling, n, stats)
        self.step.stats.merge(policy.told(stats))
        # Their beginnings are their parents'; a later row of an episode has all of its tokens from here.
        why, own = self._why_other(sampling), set(rows.index.scalars(ROW_ID).tolist())
        samplers = [
            SampledBy(policy.name, why)
            if row in own
            else SampledBy(policy.name, why or self.other_sampler(row, policy), self._sampler(row).is_said)
            for row in rows.index.scalars("parent_id").tolist()
        ]
        self._note_samplers(rows, samplers)
        return rows

    async def branch_values(
        self,
        policy: ServedPolicy,
        batch: BatchRef,
        at: At,
        sampling: SamplingParams,
        n: int,
        most: int | None,
    ) -> BatchRef:
        """Returns the batch with branch_values; see `Actor.branch_values`."""
        with self.run.clock.phase("generate"):
            stats = StepStats()
            batch = await self._branches(policy).values(batch, at, sampling, n, most, stats)
        self.step.stats.merge(policy.told(stats))
        return batch

    def _branches(self, policy: ServedPolicy) -> Branching:
        if policy.name not in self._branching:
            self._branching[policy.name] = Branching(
                policy, self.run.cluster, self._prompt_of, self._branch_numbers
            )
        return self._branching[policy.name]

    def _note_prompts(self, prompts: Iterable[Prompt]) -> None:
        if self._prompts[0] != self.number:
            self._prompts = (self.number, {})
        self._prompts[1].update({prompt.seq: prompt for prompt in prompts})

    def _prompt_of(self, seq: int) -> Prompt:
        known = self._prompts[1].get(seq) if self._prompts[0] == self.number else None
        if known is None and seq >= FIRST_OWN:
            raise DataError(
                f"branches: the prompt of some rows (seq {seq}) is one of the program's own, and its answers "
                "were not handed over in this step"
            )
        return self.data.train.prompt(seq) if known is None else known

    def _why_other(self, sampling: SamplingParams) -> str | None:
        """Says why the sampler of such rows is not the policy as it is trained; None: it is, or greedy."""
        usual, own = self.config.rollout.temperature, sampling.temperature
        why = f"sampled at temperature={own:g}, and trained at rollout.temperature={usual:g}"
        return why if own not in (0, usual) else None

    def _note_samplers(self, rows: BatchRef, samplers: Sequence[SampledBy]) -> None:
        """Keeps who sampled rows. A row has the id of that of the same prompt and sample in an earlier
        step.
        """
        usual = SampledBy(self.run.name)
        for row_id, sampler in zip(rows.index.scalars(ROW_ID).tolist(), samplers, strict=True):
            self._samplers.pop(row_id, None)
            if sampler != usual:
                self._samplers[row_id] = sampler

    def _sampler(self, row_id: int) -> SampledBy:
        return self._samplers.get(row_id, SampledBy(self.run.name))

    def other_sampler(self, row_id: int, policy: ServedPolicy) -> str | None:
        """Says why a row is no sample of a policy as it is trained; None: it is one."""
        sampler = self._sampler(row_id)
        if sampler.policy not in ("", policy.name):
            return f"sampled by {sampler.policy}, and trained by {policy.name}"
        return sampler.other

    def check_said(self, batch: BatchRef, reads: Iterable[str], who: str) -> None:
        """Raises TrainError where `who` reads what a sampler has not said."""
        if "rollout_log_probs" not in reads:
            return
        rows = sum(not self._sampler(row).is_said for row in batch.index.scalars(ROW_ID).tolist())
        if rows:
            raise TrainError(
                f"{who} reads rollout_log_probs, and {rows} of {len(batch)} rows came without: pass "
                "session.rows(…, log_probs=…)"
            )

    @contextmanager
    def stats_of(self, rows: BatchRef) -> Iterator[StepStats]:
        """Takes metrics of these rows: the run's, unless another policy has sampled all of them."""
        stats = StepStats()
        yield stats
        names = {self._sampler(row).policy for row in rows.index.scalars(ROW_ID).tolist()}
        (name,) = names if len(names) == 1 else ("",)
        self.step.stats.merge(self.policies[name].told(stats) if name else stats)

    def _scored(self, rows: BatchRef) -> BatchRef:
        failed, trajectories = failures(rows), len(firsts(rows.index))
        check_dropped_share(failed, trajectories, self.config.reward.max_dropped_share)
        with self.stats_of(rows) as stats:
            stats.add_mean("reward/failed_share", len(failed), trajectories)
        return rows.take(np.flatnonzero(is_scored(rows.index)))

    # ---- rows ----

    async def given(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        rewards: Sequence[float] | None,
        *,
        are_said: bool,
    ) -> BatchRef:
        """Returns a scored row of each completion, in this order; see `Session.rows`. are_said: whether the
        sampler's log-probs are known.
        """
        run, of_prompt = self.run, dict[int, list[int]]()
        for place, prompt in enumerate(prompts):
            places = of_prompt.setdefault(prompt.seq, [])
            places.append(place)
            first_of = prompts[places[0]]
            if not np.array_equal(prompt.token_ids, first_of.token_ids):
                raise DataError(
                    f"session.rows: {first_of.prompt_id!r} and {prompt.prompt_id!r} are different prompts "
                    f"with one number ({prompt.seq}), and would be one group; session.prompt(prompt) makes "
                    "another one, with a number of its own"
                )
        if self._given[0] != self.number:
            self._given = (self.number, {})
        first = dict(self._given[1])
        for seq, places in of_prompt.items():
            self._given[1][seq] = first.get(seq, FIRST_GIVEN) + len(places)
        where = run.roles.engines, run.side.alive(), run.side.index_columns
        rows = await given_rows(*where, prompts, completions, rewards, first)
        other = "session.rows(…, log_probs=…)" if are_said else None
        self._note_samplers(rows, [SampledBy("", other, are_said)] * len(rows))
        self._note_prompts(prompts)
        return self._scored(rows)

    def new_number(self) -> int:
        """Returns the sequence number of one more prompt of the program's."""
        self.num_prompts += 1
        return FIRST_OWN + self.num_prompts - 1

    def sampling(
        self, *, temperature: float | None, max_tokens: int | None, stop: Sequence[str] | None
    ) -> SamplingParams:
        """Returns how the recipe samples, with what is given in its place."""
        changed: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
        sampling = self.data.sampling
        if stop is not None:
            ends = stops_of(self.data.train.tokenizer, stop)
            changed |= {"stop_token_ids": ends[0], "stop": ends[1]}
        given = {name: value for name, value in changed.items() if value is not None}
        return dataclasses.replace(sampling, **given) if given else sampling

    # ---- in a checkpoint ----

    def check_state(self) -> None:
        """Raises CheckpointError where the program keeps what no checkpoint can give back."""
        pack(self.kept, "session.state", {})

    def check_kept(self, prompts: Sequence[Prompt]) -> None:
        """Raises CheckpointError for prompts that could not be asked again: whether a checkpoint has them
        depends on when the answers are there.
        """
        for prompt in prompts:
            pack(_record(prompt), f"prompt {prompt.prompt_id!r}", {})

    def state(self) -> tuple[Any, Mapping[str, np.ndarray]]:
        """See `Carried`. Prompts that are not answered yet will be asked again."""
        arrays: dict[str, np.ndarray] = {}
        number, ahead = 0, []
        for question in self.ahead:
            groups: list[Any] = []
            for prompt, group in zip(question.prompts, question.groups, strict=True):
                record = None
                if prompt is not None:
                    record = pack(_record(prompt), f"prompt {prompt.prompt_id!r}", arrays)
                if _is_answered(group):
                    number += 1
                    groups.append([-number, record])
                else:
                    groups.append(record)
            sampling = dataclasses.asdict(question.sampling)
            asked = {"sampling": sampling, "n": question.n, "groups": groups}
            ahead.append({"policy": question.policy.name, **asked})
        kept = pack(self.kept, "session.state", arrays)
        return {"prompts": self.num_prompts, "state": kept, "ahead": ahead}, arrays

    def waiting(self) -> Mapping[int, BatchRef]:
        """See `Carried`; the numbers are those of `state`."""
        groups = [group for question in self.ahead for group in question.groups if _is_answered(group)]
        return {-number: group.result() for number, group in enumerate(groups, 1)}

    def load(self, state: Any, arrays: Mapping[str, np.ndarray], rows: Mapping[int, BatchRef]) -> None:
        """See `Carried`."""
        if state is None:  # an older rondo wrote it
            return
        # The run that goes on has asked before its loop, too: that is in the checkpoint, or was handed over.
        for question in self.ahead:
            for asking in question.groups:
                asking.cancel()
        self.ahead.clear()
        self.num_prompts = state["prompts"]
        self.kept.clear()
        self.kept.update(unpack(state["state"], arrays))
        for asked in state["ahead"]:
            given: Any = {
                name: tuple(x) if isinstance(x, list) else x for name, x in asked["sampling"].items()
            }
            sampling, n = SamplingParams(**given), asked["n"]
            name = asked.get("policy", self.run.name)  # an older rondo knew one only
            if name not in self.policies:
                raise CheckpointError(
                    f"the checkpoint has questions to {name}, which this program does not make any more: "
                    f"make it (session.actor({name!r})) before the loop, or begin another run"
                )
            policy = self.policies[name]
            prompts, groups = list[Prompt | None](), list[asyncio.Future[BatchRef]]()
            for group in asked["groups"]:
                answer, packed = group if isinstance(group, list) else (None, group)
                if isinstance(group, int):  # an older rondo kept no prompt that was answered
                    answer, packed = group, None
                prompt = None if packed is None else _prompt(unpack(packed, arrays))
                prompts.append(prompt)
                if answer is None:
                    assert prompt is not None
                    groups.append(self._ask(policy, prompt, sampling, n))
                else:
                    groups.append(asyncio.get_running_loop().create_future())
                    groups[-1].set_result(rows[answer])
            self.ahead.append(Question(policy, sampling, n, prompts, groups))

    async def close(self) -> None:
        """Gives up what is under way."""
        await cancel(*(group for question in self.ahead for group in question.groups))


def _is_answered(group: asyncio.Future[BatchRef]) -> bool:
    return group.done() and not group.cancelled() and group.exception() is None


def _record(prompt: Prompt) -> dict[str, Any]:
    """Returns a prompt as `pack` takes it."""
    fields = {field.name: getattr(prompt, field.name) for field in dataclasses.fields(prompt)}
    return {**fields, "messages": list(prompt.messages), "images": images_as_text(prompt.images)}


def _prompt(record: Mapping[str, Any]) -> Prompt:
    return Prompt(
        **{
            **record,
            "messages": tuple(record["messages"]),
            "images": images_of_text(record.get("images", "")),
        }
    )
