"""The stage that makes a step's advantages (and returns): an estimator over rewards and columns. Where what
it makes of a row depends on that row's tokens and numbers of rows, the actor's workers call it, each with its
rows; where it looks at the tokens of other rows, the controller does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rondo.algorithms import (
    TokenRewards,
    Whitening,
    advantage_stats,
    bind,
    bind_by_row,
    check_finite,
    columns_read,
    made_columns,
)
from rondo.algorithms.advantages.agentic import alike
from rondo.config import AlgorithmConfig
from rondo.core.batch import ROW_ID, BatchRef
from rondo.core.columns import SCORE, SCORE_PREFIX, TABLE, declared, judges
from rondo.core.errors import ConfigError, TrainError
from rondo.core.roles import of_section
from rondo.data import firsts, lasts, trajectory_of_rows
from rondo.trainers.program.step import MULTIPLIER, Step, attach, check_one_row_each, numbers, padded_columns
from rondo.workers import ActorWorker
from rondo.workers.estimating import TOLD, Estimation, RowNumbers

# What the advantage stage makes its columns of.
MADE_OF: Mapping[str, tuple[str, ...]] = {
    "token_rewards": declared("reward", "response_mask"),
    "token_costs": declared("response_mask"),  # and the score that algorithm.constraint names
    "scores": (),
    "multiplier": (),
}


class AdvantageStage:
    """Computes advantages, and what critics learn. reads: what the estimator names. columns: what it (and a
    KL in the reward) needs from producers. writes: what it adds to the batch at least.
    """

    phase = "advantages"

    def __init__(self, algorithm: AlgorithmConfig, *, keep_rewards: bool = False) -> None:
        """keep_rewards: the rewards of tokens, which are made for the estimator, become columns, too."""
        self._keeps = TOLD if keep_rewards else ()
        self._name = algorithm.advantage.name
        self._estimator = bind("advantage", algorithm.advantage)
        self._adapting = {MULTIPLIER, *algorithm.coefficients}
        self._by_row = bind_by_row(algorithm.advantage)
        self.reads: tuple[str, ...] = columns_read(self._estimator)
        self.similarity = 1.0
        """Of observations that have one anchor."""
        if "anchor_id" in self.reads:
            self.similarity = float(algorithm.advantage.options.get("similarity", 1.0))
        self._kl = algorithm.kl if algorithm.kl is not None and algorithm.kl.where == "reward" else None
        cost = algorithm.constraint.cost if algorithm.constraint is not None else None
        if "token_costs" in self.reads and cost is None:
            raise ConfigError(
                f"algorithm.advantage={self._name} reads token_costs: set algorithm.constraint.cost to the "
                "name of the score that is the cost"
            )
        self._cost = SCORE(cost) if cost is not None and "token_costs" in self.reads else None
        self._rewards = TokenRewards(self._kl, self._cost)
        of_rows_or_tokens = [name for name in self.reads if name not in algorithm.coefficients]
        needed = [column for name in of_rows_or_tokens for column in MADE_OF.get(name, (name,))]
        needed += [self._cost] if self._cost else []
        needed += ["reward", "response_mask", "old_log_probs", "ref_log_probs"] if self._kl else []
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(needed))
        targets = (role.learns_from for role in of_section("critic") if role.makes in self.reads)
        self.writes: tuple[str, ...] = ("advantages", *filter(None, targets))

    def describe(self) -> str:
        where = "controller" if self._by_row is None else "actor's workers, each of its rows"
        return f"{', '.join(self.writes)} <- {where} ({self._name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """Returns the batch with advantages (and returns).

        A row that counts k times (index column sample_weight) counts so in the estimator's mask and number of
        trained tokens. Raises TrainError when the estimator returns something else than it should.
        """
        if self._by_row is not None:
            return await self._where_rows_lie(batch, step, *self._by_row)
        batch, inputs = await self._inputs(batch, step)
        told = {name: inputs[name] for name in self._keeps if name in inputs}
        of_rows = self._trajectories(batch, inputs)
        if of_rows is not None:
            inputs = self._whole(batch, inputs, of_rows)
        inputs |= {name: torch.tensor(one, dtype=torch.float32) for name, one in self._numbers(step).items()}
        counted = inputs["response_mask"] > 0 if "response_mask" in inputs else None
        if "sample_weight" in batch.index.columns:
            weight = numbers(batch.index, "sample_weight").to(torch.float32)
            for name in {"response_mask", "num_trained_tokens"} & set(inputs):
                inputs[name] = inputs[name] * (weight if inputs[name].ndim == 1 else weight[:, None])
        made = self._estimator(**{name: inputs[name] for name in self.reads})
        rows = len(batch) if of_rows is None else int(of_rows.max()) + 1
        width = None if counted is None else counted.shape[1]
        columns = made_columns(self._name, made, self.writes, rows, width)
        if of_rows is not None:
            columns = {name: self._on_rows(column, of_rows) for name, column in columns.items()}
        there = counted
        if there is None:
            width = max((column.shape[1] for column in columns.values() if column.ndim == 2), default=0)
            there = torch.arange(width) < torch.tensor(batch.index.scalars("response_length"))[:, None]
        check_finite(self._name, columns, there)
        for name, column in columns.items():
            if counted is not None and column.ndim == 2:  # nothing where the mask is 0
                columns[name] = torch.where(counted, column, 0.0)
        step.stats.merge(advantage_stats(columns["advantages"], counted))
        return attach(batch.without(*told), columns | told, step.cluster)

    async def _where_rows_lie(
        self, batch: BatchRef, step: Step, function: Callable[..., Any], whiten: bool
    ) -> BatchRef:
        """Has the actor's workers make what of a row depends on no other row; and whiten it, once the
        controller has joined what they say of each row.
        """
        actor, also = step.roles.actor, ("sample_weight",) if "sample_weight" in batch.index.columns else ()
        reads = tuple(dict.fromkeys((*self.columns, "response_mask", *also)))
        estimation = Estimation(
            self._name,
            function,
            whiten,
            self._rewards,
            self.columns,
            self.writes,
            width=int(batch.index.scalars("response_length").max(initial=0)),
            kl_coef=step.kl_coef,
            numbers=self._numbers(step),
            keeps=self._keeps,
        )
        batch, said = await actor.call(ActorWorker.estimate_advantages, batch, estimation, reads=reads)
        step.stats.merge(*(one.stats for one in said))
        if whiten:
            rows = RowNumbers.in_order([one.moments for one in said], batch.index.scalars(ROW_ID))
            how = Whitening.of(torch.from_numpy(rows))
            batch, stats = await actor.call(ActorWorker.whiten_advantages, batch, how)
            step.stats.merge(stats)
        return batch

    def _numbers(self, step: Step) -> dict[str, float]:
        """Returns the numbers that adapt and that the estimator reads."""
        return {name: step.coefficients[name] for name in self.reads if name in self._adapting}

    def _trajectories(self, batch: BatchRef, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Returns the trajectory of each row, [B], where some have several rows and the estimator is to see
        each trajectory once; None where it sees rows.

        It sees rows where it says so by reading trajectory_id, or reads tokens: each row is then credited
        with the outcome of all.
        """
        if len(firsts(batch.index)) == len(batch) or "trajectory_id" in self.reads:
            return None
        if any(inputs[name].ndim > 1 for name in self.reads if name not in ("scores", *self._adapting)):
            if "group_id" in self.reads:
                check_one_row_each(batch, f"algorithm.advantage={self._name}")
            return None
        return torch.from_numpy(trajectory_of_rows(batch.index))

    def _whole(
        self, batch: BatchRef, inputs: Mapping[str, torch.Tensor], of_rows: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Returns the estimator's arguments with a row per trajectory: its tokens are those of all its rows,
        and a KL in the reward is that of all, too.
        """
        first = torch.from_numpy(firsts(batch.index))
        whole = {name: inputs[name][first] for name in self.reads if name in inputs}
        if "num_trained_tokens" in whole:
            tokens = inputs["num_trained_tokens"]
            whole["num_trained_tokens"] = tokens.new_zeros(len(first)).index_add(0, of_rows, tokens)
        if self._kl is not None and "reward" in whole:
            outcome = numbers(batch.index, "reward")
            kl = (inputs["reward"] - outcome).new_zeros(len(first))
            whole["reward"] = outcome[first] + kl.index_add(0, of_rows, inputs["reward"] - outcome)
        return whole

    def _on_rows(self, column: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
        """Gives each row what was made for its trajectory."""
        number = int(of_rows.max()) + 1
        if column.shape != (number,):
            raise TrainError(
                f"the estimator {self._name!r} made a column of the shape {list(column.shape)} of {number} "
                f"trajectories; it must be [{number}]"
            )
        return column[of_rows]

    async def _inputs(self, batch: BatchRef, step: Step) -> tuple[BatchRef, dict[str, torch.Tensor]]:
        """Returns the estimator's arguments by name: per-row [B], per-token [B, T] float32, response_mask [B,
        T] float32. And the batch, with what of them was made elsewhere and is kept.
        """
        in_index = set(self.columns) & set(batch.index.columns)
        inputs = {name: numbers(batch.index, name) for name in in_index}
        of_rows = not any(map(_is_of_tokens, set(self.reads) - self._adapting))
        if of_rows and self._kl is not None:
            batch, inputs["reward"] = await self._reward_with_kl(batch, step)
            return batch, await self._other_inputs(batch, inputs)
        per_token = set(self.columns) - in_index
        if per_token:
            inputs |= await padded_columns(batch, {*per_token, "response_mask"})
        inputs = await self._other_inputs(batch, inputs)
        if self._kl is not None or "token_rewards" in self.reads:
            step.stats.merge(self._rewards.add(inputs, step.kl_coef))
        if {"token_rewards", "trajectory_id"} <= set(self.reads):
            self._end_once(batch, inputs, step.kl_coef)
        self._rewards.charge(inputs, step.kl_coef)
        return batch, inputs

    async def _reward_with_kl(self, batch: BatchRef, step: Step) -> tuple[BatchRef, torch.Tensor]:
        """Returns the rewards [B] less the KL of their tokens, which the actor's workers sum up; and the
        batch, with token_rewards where they are kept.
        """
        width, keep = int(batch.index.scalars("response_length").max(initial=0)), bool(self._keeps)
        call = ActorWorker.charge_rewards, batch, self._rewards, step.kl_coef, width, keep
        said = await step.roles.actor.call(*call)
        if keep:
            batch, said = said
        step.stats.merge(*(stats for _, stats in said))
        rows = RowNumbers.in_order([rewards for rewards, _ in said], batch.index.scalars(ROW_ID))
        return batch, torch.from_numpy(rows[:, 0].astype(np.float32))

    async def _other_inputs(
        self, batch: BatchRef, inputs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the inputs with what is made of the index, or of texts."""
        if self.similarity < 1:
            inputs["anchor_id"] = await self._alike(batch)
        if "scores" in self.reads:
            names = [x for x in batch.index.columns if x.startswith(SCORE_PREFIX) and judges(x)]
            scores = [numbers(batch.index, name).to(torch.float32) for name in names]
            inputs["scores"] = torch.stack(scores, 1) if scores else torch.empty(len(batch), 0)
        return inputs

    async def _alike(self, batch: BatchRef) -> torch.Tensor:
        """Returns the numbers of observations, [B], where those are the same that are alike. It may take
        seconds, in which other tasks go on.
        """
        if "anchor" not in batch.columns:
            raise ConfigError(
                f"algorithm.advantage={self._name}: similarity={self.similarity} compares texts of "
                "observations (column anchor), and these rows are of no agent; set similarity to 1"
            )
        texts = (await batch.fetch(["anchor"])).scalars("anchor").tolist()
        ids = [batch.index.scalars(name) for name in ("anchor_id", "group_id", ROW_ID)]
        made = await asyncio.to_thread(alike, ids[0], texts, ids[1], ids[2], self.similarity)
        return torch.from_numpy(made)

    def _end_once(self, batch: BatchRef, inputs: dict[str, torch.Tensor], kl_coef: float) -> None:
        """Leaves the outcome in token_rewards on each trajectory's last row alone, for an estimator that
        knows which rows are of one trajectory.
        """
        outcome = torch.zeros(len(batch))
        last = torch.from_numpy(lasts(batch.index))
        outcome[last] = numbers(batch.index, "reward")[last]
        self._rewards.end_once(inputs, outcome, kl_coef)


def _is_of_tokens(name: str) -> bool:
    """Says whether a column that an estimator reads may be one of tokens: a name of the user's may be."""
    if name == "scores" or SCORE.member(name) is not None:
        return False
    known = {one.name: one.per for one in TABLE}
    return known.get(name) != "row"
