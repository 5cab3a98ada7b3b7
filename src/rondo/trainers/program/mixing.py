"""Rows of responses that the policy did not sample in their step: made as rows of sampled ones are, for
`session.rows` of a program and for algorithm.mix of a recipe (`Mixing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from rondo.checkpoint import pack, unpack
from rondo.config import Config
from rondo.controller import WorkerGroup
from rondo.core.batch import BatchRef, ragged_rows
from rondo.core.columns import declared
from rondo.core.errors import TrainError
from rondo.core.types import Completion, Prompt, request_seed
from rondo.data import FIRST_GIVEN, MIX, Given, Mixer, is_scored
from rondo.rewards import check_dropped_share
from rondo.trainers.program.given import completion_of
from rondo.trainers.program.inputs import Prompts
from rondo.trainers.program.stages import columns_of_loss
from rondo.trainers.program.step import Step, with_tokens
from rondo.workers import ActorWorker, RolloutWorker

(GIVEN_LOG_PROBS,) = declared("given_log_probs")
# What a mix may read of the sampled answers' tokens, and the column that has it.
_TOKENS = {"responses": "response_ids", "log_probs": "rollout_log_probs"}


class GivenAnswer(NamedTuple):
    """A response that may join a group."""

    prompt: Prompt
    """The group's."""
    completion: Completion
    """The response, as of a sampler that says nothing."""
    log_probs: np.ndarray | None
    """What its sampler said of each token; None: nothing."""


async def given_rows(
    engines: WorkerGroup,
    ranks: Sequence[int],
    columns: Sequence[str],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    rewards: Sequence[float] | None,
    first: Mapping[int, int],
) -> BatchRef:
    """Returns the rows of completions, in this order, failures included. ranks: those of the engines' group
    that make them. columns: of the index. rewards: None: the reward functions say them. first: the sample
    index of a prompt's first row, by seq.
    """
    of_prompt: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        of_prompt.setdefault(prompt.seq, []).append(place)
    calls = [
        engines.call_rank(
            ranks[number % len(ranks)],
            RolloutWorker.score_given,
            prompts[places[0]].lent(),
            [completions[place] for place in places],
            None if rewards is None else [rewards[place] for place in places],
            first.get(seq, FIRST_GIVEN),
            keep=columns,
        )
        for number, (seq, places) in enumerate(of_prompt.items())
    ]
    rows = BatchRef.concat(await asyncio.gather(*calls))
    back = np.argsort([place for places in of_prompt.values() for place in places], kind="stable")
    return rows.take(back)


class Makers(Protocol):
    """Who makes the rows of a run, as seen from here."""

    prompts: Prompts | None
    index_columns: tuple[str, ...]

    def alive(self) -> Sequence[int]: ...


class Mixing:
    """The rows of another sampler that join the groups of a step (algorithm.mix). mixer: gives them. makers:
    say which ranks of the engines can make rows, and which columns of them are in an index. keeps: whether
    the loss reads given_log_probs.

    They are what rows of `session.rows` without log-probs are: with the run's own reward, a sample index from
    FIRST_GIVEN on, and no log-probs that the correction or the gap between sampler and trainer would look at.
    """

    phase = "mix"

    def __init__(
        self,
        config: Config,
        prompts: Prompts,
        mixer: Mixer,
        makers: Makers,
        *,
        keeps: bool,
    ) -> None:
        self.mixer = mixer
        self.longest = config.rollout.max_tokens
        """Tokens of the longest response, in this stage of the run."""
        self._config = config
        self._prompts = prompts
        self._makers = makers
        self._keeps = keeps

    @classmethod
    def of(cls, config: Config, makers: Makers) -> Mixing | None:
        """Returns that of a run; None where algorithm.mix is not set."""
        prompts = makers.prompts
        if prompts is None or prompts.mixer is None:
            return None
        keeps = GIVEN_LOG_PROBS in columns_of_loss(config.algorithm)
        return cls(config, prompts, prompts.mixer, makers, keeps=keeps)

    def packed(self, arrays: dict[str, np.ndarray]) -> Any:
        """Returns the mixer's state as JSON; what of it is arrays is added to `arrays`."""
        return pack(self.mixer.call("state"), self.mixer.who("state"), arrays)

    def load(self, state: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on where `packed` was."""
        self.mixer.call("load", state=unpack(state, arrays))

    async def __call__(self, sampled: BatchRef, step: Step) -> tuple[BatchRef, BatchRef | None]:
        """Returns the scored rows of a step, and those that join them; None: there are none."""
        answers = await self._answers(sampled, step)
        if self.mixer.picks:
            answers = await self._picked(answers, step)
        stats, mixed = step.stats, None
        stats.add_sum("mix/rows", float(len(answers)))
        if not self.mixer.chooses:  # else they are told when the step ends, as a sampler's
            for name, number in self.mixer.metrics().items():
                stats.add_sum(name.replace("sampler/", "mix/", 1), number)
        if answers:
            made = await self._rows(answers, None, step)
            scored = is_scored(made.index)
            failed = [str(outcome) for outcome in made.index.scalars("outcome")[~scored]]
            check_dropped_share(failed, len(made), self._config.reward.max_dropped_share)
            mixed = made.take(np.flatnonzero(scored))
            if self._keeps:
                kept = [answer for answer, is_kept in zip(answers, scored, strict=True) if is_kept]
                mixed = self._with_log_probs(mixed, [self._said(answer) for answer in kept], step)
            rewards = mixed.index.scalars("reward")
            stats.add_mean("mix/reward", float(rewards.sum(dtype=np.float64)), len(rewards))
        if self._keeps:
            none = [np.zeros(length) for length in sampled.index.scalars("response_length").tolist()]
            sampled = self._with_log_probs(sampled, none, step)
        return sampled, mixed

    async def _answers(self, sampled: BatchRef, step: Step) -> list[GivenAnswer]:
        """Asks the mix, group by group; returns what is no longer than `longest`."""
        index, mixer, n = sampled.index, self.mixer, self._config.rollout.n
        groups, chosen = index.scalars("group_id"), self._prompts.train.chosen
        wanted = {name: column for name, column in _TOKENS.items() if mixer.reads("rows", name)}
        tokens = await sampled.fetch([*wanted.values()]) if wanted else None
        found: list[GivenAnswer] = []
        too_long = 0
        for seq in dict.fromkeys(groups.tolist()):
            rows, prompt = np.flatnonzero(groups == seq), self._prompts.train.prompt(seq)
            given = {
                "prompt": prompt,
                "rewards": index.scalars("reward")[rows],
                "accuracy": index.scalars("accuracy")[rows],
                "asked": n if chosen is None else chosen[seq].n,
                "n": n,
                "seed": request_seed(step.seed, "mix", step.number, seq),
                "step": step.number + 1,
                **step.coefficients,
            }
            if tokens is not None:
                given |= {name: tokens.rows(column, rows) for name, column in wanted.items()}
            for one in mixer.rows(**given):
                answer = self._answer(prompt, one)
                if len(answer.completion.token_ids) <= self.longest:
                    found.append(answer)
                else:
                    too_long += 1
        step.stats.add_sum("mix/too_long", float(too_long))
        return found

    def _answer(self, prompt: Prompt, one: Given) -> GivenAnswer:
        completion = completion_of(
            prompt,
            one.response,
            self._prompts.train,
            self._prompts.sampling.stop_token_ids,
            log_probs=np.nan if one.log_probs is None else one.log_probs,
            versions=-1,
            who=f"{MIX}={self.mixer.name}",
        )
        unsaid = np.full(len(completion.token_ids), np.nan, np.float32)
        return GivenAnswer(prompt, replace(completion, log_probs=unsaid), one.log_probs)

    async def _picked(self, answers: Sequence[GivenAnswer], step: Step) -> list[GivenAnswer]:
        """Returns those that the mix picks of a prompt's, by what the policy thinks of each now."""
        of_prompt: dict[int, list[int]] = {}
        for place, answer in enumerate(answers):
            of_prompt.setdefault(answer.prompt.seq, []).append(place)
        if all(len(places) == 1 for places in of_prompt.values()):
            return list(answers)
        rows = await self._rows(answers, [0.0] * len(answers), step)  # what they are worth is not asked yet
        rows = await step.roles.actor.call(ActorWorker.compute_log_prob, rows, also=("entropy",))
        entropy = (await rows.fetch(["entropy"])).rows("entropy")
        picked: list[GivenAnswer] = []
        for seq, places in of_prompt.items():
            seed = request_seed(step.seed, "pick", step.number, seq)
            given = {"prompt": answers[places[0]].prompt, "entropy": [entropy[place] for place in places]}
            chosen = self.mixer.pick(len(places), **given, seed=seed, step=step.number + 1)
            picked += [answers[places[one]] for one in chosen]
        return picked

    async def _rows(
        self, answers: Sequence[GivenAnswer], rewards: Sequence[float] | None, step: Step
    ) -> BatchRef:
        prompts, completions = [one.prompt for one in answers], [one.completion for one in answers]
        where = step.roles.engines, self._makers.alive(), self._makers.index_columns
        return await given_rows(*where, prompts, completions, rewards, {})

    def _said(self, answer: GivenAnswer) -> np.ndarray:
        if answer.log_probs is None:
            raise TrainError(
                f"algorithm.policy_loss={self._config.algorithm.policy_loss.name} reads {GIVEN_LOG_PROBS}, "
                f"and {MIX}={self.mixer.name} gave a response to {answer.prompt.prompt_id!r} without "
                "log-probs; return pairs, (token ids, log-probs)"
            )
        return answer.log_probs

    def _with_log_probs(self, batch: BatchRef, log_probs: Sequence[np.ndarray], step: Step) -> BatchRef:
        return with_tokens(batch, {GIVEN_LOG_PROBS: ragged_rows(list(log_probs), np.float32)}, step.cluster)
