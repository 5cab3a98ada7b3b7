"""Branches: responses that go on from some token of others, for values of prefixes and for trees.

A branch answers its parent's prompt. Its response begins with the parent's tokens up to the fork, with the
log-probs and versions that were recorded there, so a reward judges a whole answer, and what branches share
can be trained. `max_tokens` counts the whole response. Branches of episodes are played in `agents/forks.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from rondo.agents.external import agent_of
from rondo.agents.forks import Fork
from rondo.chat import StopMatcher
from rondo.config import BranchesConfig, Config
from rondo.controller import Cluster
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.columns import BRANCH_VALUES, IMAGES, PROMPT_ROUTED, RECORD, ROUTED
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import TURN_KINDS, Completion, Prompt, Row, SamplingParams, StepStats, Turn
from rondo.data import firsts, is_scored, trajectory_of_rows
from rondo.rewards import check_dropped_share
from rondo.trainers.loop.buffer import Buffer, failures
from rondo.trainers.loop.feeder import EpisodeFeeder, cancel
from rondo.trainers.loop.publish import WeightPublisher
from rondo.trainers.program import Prompts, Roles, with_tokens
from rondo.workers import RolloutWorker

FIRST_BRANCH = 1 << 18
"""The sample index of a prompt's first branch: nobody samples so many."""

TOKENS = ("prompt_ids", "response_ids", "rollout_log_probs", "policy_versions")

At = Sequence[int | Sequence[int] | np.ndarray]
"""For each row, one place in its response or several: how many of its tokens a branch keeps."""


class Columns(Protocol):
    """The side of a run where rows are made."""

    @property
    def index_columns(self) -> tuple[str, ...]: ...


class AskedPolicy(Protocol):
    """What is needed of a `ServedPolicy`."""

    config: Config
    roles: Roles
    buffer: Buffer
    feeder: EpisodeFeeder
    weights: WeightPublisher

    @property
    def side(self) -> Columns: ...


class BranchNumbers:
    """Counts the branches of each prompt (seq) under a version of the weights: those of a run's policies are
    counted together, so that no two rows have one number.
    """

    def __init__(self) -> None:
        self._version = 0
        self._next: dict[int, int] = {}

    def take(self, version: int, seq: int, number: int) -> int:
        """Returns the sample index of the first of so many branches."""
        if self._version != version:
            self._version, self._next = version, {}
        first = self._next.get(seq, FIRST_BRANCH)
        self._next[seq] = first + number
        return first


class Branching:
    """Asks the engines of a policy for branches. prompt_of: the prompt by its seq. numbers: those of the run.

    The noise of a branch is that of a sample of its prompt with an index from `FIRST_BRANCH` on, which counts
    on while the weights are the same: no two branches of a version have the same noise, and a run that goes
    on from a checkpoint asks for the same ones.
    """

    def __init__(
        self,
        policy: AskedPolicy,
        cluster: Cluster,
        prompt_of: Callable[[int], Prompt],
        numbers: BranchNumbers,
    ) -> None:
        rollout = policy.config.rollout
        agent = agent_of(rollout)
        if agent is not None and (rollout.tools or not rollout.environments):
            raise ConfigError(
                f"branches of episodes play their actions again, and {agent.name} plays episodes that have "
                "rollout.tools, which would act a second time, or no rollout.environments: leave out "
                "rollout.tools; a rollout.agent of yours can be branched where it acts in an environment"
            )
        self._of_episodes = agent is not None
        self._policy = policy
        self._cluster = cluster
        self._prompt_of = prompt_of
        self._numbers = numbers

    async def __call__(
        self, batch: BatchRef, at: At, sampling: SamplingParams, n: int, stats: StepStats
    ) -> BatchRef:
        """Returns n scored branches from each place: row by row, place by place, the samples of a place
        next to each other; with the columns parent_id and fork. Raises DataError for a place at which nothing
        is to be sampled, RewardError for too many that failed. stats: gets the metrics.
        """
        policy = self._policy
        longest = int(batch.index.scalars("prompt_length").max(initial=0)) + sampling.max_tokens
        fitting = policy.config.data.max_prompt_tokens + policy.config.rollout.max_tokens
        if longest > fitting:
            raise DataError(
                f"branches: a prompt and a response of {sampling.max_tokens} have {longest} tokens, more "
                f"than the engines' {fitting} (data.max_prompt_tokens + rollout.max_tokens)"
            )
        routes = [name for name in (PROMPT_ROUTED, ROUTED) if name in batch.columns]
        also = [*routes, *([IMAGES] if IMAGES in batch.columns else [])]
        if self._of_episodes:
            also += ["response_mask", "turn_stops", "turn_kinds"]
            also += [RECORD] if RECORD in batch.columns else []
        rows = await batch.fetch([*TOKENS, *also, *batch.index.columns])
        parents, forks = _places(rows, at)
        prefixes = (_forks if self._of_episodes else _prefixes)(rows, parents, forks)
        seqs = rows.scalars("seq")[parents]
        prompts = {seq: self._prompt_of(seq) for seq in dict.fromkeys(seqs.tolist())}  # before any is asked
        firsts_of, calls = [], []
        for seq, prompt in prompts.items():
            mine = np.flatnonzero(seqs == seq).repeat(n)
            first = self._numbers.take(policy.buffer.version, seq, len(mine))
            firsts_of.append((mine, first))
            calls.append(self._group(prompt, sampling, [prefixes[place] for place in mine], first))
        try:
            answered = await policy.weights.mender.served(asyncio.gather(*calls))
        finally:
            await cancel(*calls)  # those of others than the one that failed
        # Of an episode there may be several rows.
        order = [
            mine[part.index.scalars("sample_index") - first]
            for part, (mine, first) in zip(answered, firsts_of, strict=True)
        ]
        made = BatchRef.concat(answered).take(np.argsort(np.concatenate(order), kind="stable"))
        if not self._of_episodes:
            made = self._with_parents(made, parents.repeat(n), forks.repeat(n), rows.scalars(ROW_ID))
        masks = (await made.fetch(["response_mask"])).rows("response_mask")
        sampled = [mask[fork:].sum() for mask, fork in zip(masks, made.index.scalars("fork"), strict=True)]
        number = len(firsts(made.index))
        stats.add_sum("rollout/branches", float(number))
        stats.add_sum("rollout/generated_tokens", float(sum(sampled)))
        failed = failures(made)
        check_dropped_share(failed, number, policy.config.reward.max_dropped_share)
        stats.add_mean("reward/failed_share", len(failed), number)
        return made.take(np.flatnonzero(is_scored(made.index)))

    async def values(
        self, batch: BatchRef, at: At, sampling: SamplingParams, n: int, most: int | None, stats: StepStats
    ) -> BatchRef:
        """Adds branch_values: at each place the mean reward of n branches from there, NaN elsewhere.

        most: so many places of a row are valued, the first ones. A later one, and one of which no branch was
        scored, is worth what the next one is, and the last one the row's own reward: nothing is gained
        between. Raises ConfigError where a reward model is part of the reward: branches are scored without.
        """
        config = self._policy.config
        constraint = config.algorithm.constraint
        models = {model.name for model in config.reward.models} - {constraint.cost if constraint else ""}
        if models:
            raise ConfigError(
                f"branch_values are means of reward.functions, and reward.models ({min(models)}) is part of "
                "the reward: branch, compute_reward of the branches, and take the means"
            )
        places = [np.unique(np.asarray(own)) for own in at]
        for row, (own, length) in enumerate(
            zip(places, batch.index.scalars("response_length"), strict=False)
        ):
            if len(own) and own[-1] >= length:
                raise DataError(f"branch_values: place {own[-1]} of row {row} has no token behind it")
        made = await self(batch, [own[:most] for own in places], sampling, n, stats)
        names = ("parent_id", "fork", "reward")
        sums = dict[tuple[int, int], list[float]]()
        for parent, fork, reward in zip(*(made.index.scalars(name).tolist() for name in names), strict=True):
            sums.setdefault((parent, fork), []).append(reward)
        index, columns = batch.index, []
        names = (ROW_ID, "response_length", "reward")
        rows = zip(*(index.scalars(name).tolist() for name in names), places, strict=True)
        for row, length, worth, own in rows:
            column = np.full(length, np.nan, np.float32)
            for place in own[::-1].tolist():
                rewards = sums.get((row, place))
                worth = worth if rewards is None else float(np.mean(rewards))
                column[place] = worth
            columns.append(column)
        return with_tokens(batch, {BRANCH_VALUES: ragged_rows(columns, np.float32)}, self._cluster)

    @staticmethod
    def _with_parents(made: BatchRef, parents: np.ndarray, forks: np.ndarray, ids: np.ndarray) -> BatchRef:
        """Adds parent_id and fork. parents: the place of each row's parent in `ids`. Raises DataError where
        nothing was sampled.
        """
        nothing = np.flatnonzero(is_scored(made.index) & (made.index.scalars("response_length") <= forks))
        if len(nothing):
            row, fork = int(parents[nothing[0]]), int(forks[nothing[0]])
            raise DataError(
                f"a branch at token {fork} of row {row} has nothing to sample: its response has ended there "
                "(a stop token, a stop string), or has max_tokens"
            )
        return made.with_index({"parent_id": ids[parents], "fork": forks.astype(np.int32)})

    def _group(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        prefixes: Sequence[Completion | Fork | None],
        first: int,
    ) -> asyncio.Task[BatchRef]:
        policy, lent = self._policy, prompt.lent()

        async def group(rank: int) -> BatchRef:
            seconds = policy.config.rollout.deadline_seconds
            keep = (*policy.side.index_columns, *(("parent_id", "fork") if self._of_episodes else ()))
            call = RolloutWorker.branch_group, lent, sampling, prefixes, first, seconds
            return await policy.roles.engines.call_rank(rank, *call, keep=keep)  # type: ignore[no-any-return]

        return asyncio.create_task(policy.feeder.ask(group, prompt.seq))


class ValuesOfSteps:
    """Values the steps of a run's responses, as algorithm.branches says: adds branch_values. sampling: of a
    version, as the run's stage says.
    """

    def __init__(
        self, chosen: BranchesConfig, prompts: Prompts, sampling: Callable[[int], SamplingParams]
    ) -> None:
        self._chosen = chosen
        self._prompts = prompts
        self._sampling = sampling
        self._branching: Branching | None = None

    async def __call__(
        self, policy: AskedPolicy, cluster: Cluster, batch: BatchRef, stats: StepStats
    ) -> BatchRef:
        if self._branching is None:
            self._branching = Branching(policy, cluster, self._prompts.train.prompt, BranchNumbers())
        chosen, tokenizer = self._chosen, self._prompts.train.tokenizer
        rows = (await batch.fetch(["response_ids"])).rows("response_ids")
        at = [starts_of_steps(tokenizer, ids, chosen.ends) for ids in rows]
        sampling = self._sampling(policy.buffer.version)
        # Rows that were admitted in an earlier stage may be longer than this one's may be.
        longest = max([sampling.max_tokens, *map(len, rows)])
        sampling = replace(sampling, max_tokens=longest)
        return await self._branching.values(batch, at, sampling, chosen.n, chosen.most, stats)


def starts_of_steps(tokenizer: Any, ids: np.ndarray, ends: Sequence[str]) -> list[int]:
    """Returns where the steps of a response begin: at 0, and behind each token that completes one of `ends`
    and is not the last.
    """
    starts, tokens = [0], ids.tolist()
    while length := StopMatcher(tokenizer, ends).length_to_stop(tokens[starts[-1] :]):
        if starts[-1] + length == len(tokens):
            break
        starts.append(starts[-1] + length)
    return starts


def trees_of(batch: BatchRef, branches: Sequence[BatchRef]) -> BatchRef:
    """Joins responses and their branches, and branches of these; see `Session.trees`."""
    ids = batch.index.scalars(ROW_ID)
    roots = ids[firsts(batch.index)][trajectory_of_rows(batch.index)]
    first = {"parent_id": np.full(len(batch), -1), "fork": np.zeros(len(batch), np.int32)}
    tree_of = dict(zip(ids.tolist(), roots.tolist(), strict=True))
    parts = [batch.with_index({**first, "tree_id": roots})]
    for part in branches:
        ids = part.index.scalars(ROW_ID).tolist()
        unknown = []
        # In this order an episode's later row, which goes on from the one before it, comes behind that one.
        for row, parent in sorted(zip(ids, part.index.scalars("parent_id").tolist(), strict=True)):
            if parent in tree_of:
                tree_of[row] = tree_of[parent]
            else:
                unknown.append(parent)
        if unknown:
            raise DataError(
                f"session.trees: {len(unknown)} branches go on from rows that are not there (row_id "
                f"{unknown[0]}); give the rows of every round, the parents before their branches"
            )
        parts.append(part.with_index({"tree_id": np.array([tree_of[row] for row in ids], np.int64)}))
    return BatchRef.concat(parts)


def _places(rows: Batch, at: At) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the fork of each place, int64 each. Raises DataError for what is no place."""
    if len(at) != len(rows):
        raise DataError(f"branches: {len(at)} places for {len(rows)} rows; there is one, or a list, for each")
    parents, forks = [], []
    for row, (places, ids) in enumerate(zip(at, rows.rows("response_ids"), strict=True)):
        for place in np.atleast_1d(np.asarray(places)).tolist():
            if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place <= len(ids):
                raise DataError(
                    f"branches: row {row} has a response of {len(ids)} tokens, and {place!r} is no place"
                )
            parents.append(row)
            forks.append(place)
    if not parents:
        raise DataError(f"branches: no place in any of {len(rows)} rows")
    return np.array(parents), np.array(forks)


def _forks(rows: Batch, parents: np.ndarray, forks: np.ndarray) -> list[Fork]:
    """Returns where each branch leaves its parent's episode. Raises DataError for rows of a part of an
    episode, and for places at which the policy did not sample.
    """
    of_rows, steps, ids = trajectory_of_rows(rows), rows.scalars("step_index"), rows.scalars(ROW_ID)
    columns = [rows.rows(name) for name in (*TOKENS, "response_mask", "turn_stops", "turn_kinds")]
    routes = [rows.rows(name) for name in (PROMPT_ROUTED, ROUTED) if name in rows.columns]
    images = rows.images()

    def row_at(place: int) -> Row:
        prompt, response, log_probs, versions, mask, stops, kinds = (column[place] for column in columns)
        starts = [0, *stops.tolist()]
        turns = tuple(
            Turn(TURN_KINDS[kind], *ends) for kind, ends in zip(kinds, pairwise(starts), strict=True)
        )
        along = np.concatenate([column[place] for column in routes]) if routes else None
        reason = rows.scalars("finish_reason")[place]
        return Row(prompt, response, mask, log_probs, versions, turns, reason, along, images[place])

    episodes = dict[int, tuple[list[int], list[Row]]]()
    made = list[Fork]()
    for parent, fork in zip(parents.tolist(), forks.tolist(), strict=True):
        number = int(of_rows[parent])
        if number not in episodes:
            places = sorted(np.flatnonzero(of_rows == number).tolist(), key=lambda place: int(steps[place]))
            if [int(steps[place]) for place in places] != list(range(len(places))):
                raise DataError(f"branches: row {parent} is of an episode of which not all rows are there")
            episodes[number] = places, [row_at(place) for place in places]
        places, episode = episodes[number]
        row = episode[places.index(parent)]
        if not any(turn.kind == "policy" and turn.start <= fork < turn.stop for turn in row.turns):
            starts = [turn.start for turn in row.turns if turn.kind == "policy"]
            raise DataError(
                f"branches: at token {fork} of row {parent} the policy sampled nothing; its turns there "
                f"begin at {', '.join(map(str, starts))}"
            )
        record = rows.scalars(RECORD)[parent] if RECORD in rows.columns else ""
        made.append(Fork(episode, ids[places].tolist(), places.index(parent), fork, record))
    return made


def _prefixes(rows: Batch, parents: np.ndarray, forks: np.ndarray) -> list[Completion | None]:
    """Returns how the response of each branch begins; None: with a token of its own."""
    columns = [rows.rows(name) for name in TOKENS]
    routes = [rows.rows(name) for name in (PROMPT_ROUTED, ROUTED) if name in rows.columns]
    images = rows.images()
    prefixes: list[Completion | None] = []
    for row, fork in zip(parents.tolist(), forks.tolist(), strict=True):
        prompt, *response = (column[row] for column in columns)
        ids, log_probs, versions = (array[:fork].copy() for array in response)
        along = None
        if routes:
            along = np.concatenate([routes[0][row], routes[1][row][:fork]])
        whole = Completion("", prompt, ids, log_probs, versions, "length", along, images[row])
        prefixes.append(whole if fork else None)
    return prefixes
