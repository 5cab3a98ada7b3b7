"""The stage that makes a step's advantages (and returns): an estimator over rewards and columns, on the
controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import torch

from rondo.algorithms import bind, columns_read, kl_reward
from rondo.algorithms.anchors import alike
from rondo.batch import ROW_ID, BatchRef
from rondo.columns import SCORE, SCORE_PREFIX, declared
from rondo.config import AlgorithmConfig
from rondo.data import firsts, lasts, trajectory_of_rows
from rondo.errors import ConfigError, DataError, TrainError
from rondo.roles import of_section
from rondo.trainers.program.step import Step, attach, check_one_row_each, numbers, padded_columns
from rondo.types import StepStats

# What the advantage stage makes its columns of.
MADE_OF: Mapping[str, tuple[str, ...]] = {
    "token_rewards": declared("reward", "response_mask"),
    "token_costs": declared("response_mask"),  # and the score that algorithm.constraint names
    "scores": (),
    "multiplier": (),
}


class AdvantageStage:
    """reads: what the estimator names. columns: what it (and a KL in the reward) needs from producers.
    writes: what it adds to the batch at least.
    """

    phase = "advantages"

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._name = algorithm.advantage.name
        self._estimator = bind("advantage", algorithm.advantage)
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
        needed = [column for name in self.reads for column in MADE_OF.get(name, (name,))]
        needed += [self._cost] if self._cost else []
        needed += ["reward", "response_mask", "old_log_probs", "ref_log_probs"] if self._kl else []
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(needed))
        targets = (role.learns_from for role in of_section("critic") if role.makes in self.reads)
        self.writes: tuple[str, ...] = ("advantages", *filter(None, targets))

    def describe(self) -> str:
        return f"{', '.join(self.writes)} <- controller ({self._name})"

    async def __call__(self, batch: BatchRef, step: Step) -> BatchRef:
        """Returns the batch with advantages (and returns).

        A row that counts k times (index column sample_weight) counts so in the estimator's mask and number of
        trained tokens. Raises TrainError when the estimator returns something else than it should.
        """
        inputs = await self._inputs(batch, step.kl_coef, step.stats)
        of_rows = self._trajectories(batch, inputs)
        if of_rows is not None:
            inputs = self._whole(batch, inputs, of_rows)
        if step.multiplier is not None:
            inputs["multiplier"] = torch.tensor(step.multiplier, dtype=torch.float32)
        counted = inputs["response_mask"] > 0 if "response_mask" in inputs else None
        if "sample_weight" in batch.index.columns:
            weight = numbers(batch.index, "sample_weight").to(torch.float32)
            for name in {"response_mask", "num_trained_tokens"} & set(inputs):
                inputs[name] = inputs[name] * (weight if inputs[name].ndim == 1 else weight[:, None])
        made = self._estimator(**{name: inputs[name] for name in self.reads})
        if isinstance(made, tuple):
            made = dict(zip(("advantages", "returns"), made, strict=True))
        elif not isinstance(made, Mapping):
            made = {"advantages": made}
        if of_rows is not None:
            made = {name: self._on_rows(column, of_rows) for name, column in made.items()}
        missing = sorted(set(self.writes) - set(made))
        if missing:
            raise TrainError(
                f"the estimator {self._name!r} must return {missing[0]}; it returned {sorted(made)}"
            )
        columns = dict(made)
        for name, column in made.items():
            if counted is not None and column.ndim == 2:  # nothing where the mask is 0
                columns[name] = torch.where(counted, column, 0.0)
        advantages, stats = columns["advantages"], step.stats
        per_row = advantages.ndim == 1
        values = advantages if counted is None or per_row else advantages[counted]
        if values.numel():
            stats.add_mean("actor/advantage", float(values.sum()), values.numel())
            stats.add_mean("actor/advantage_abs", float(values.abs().sum()), values.numel())
            stats.add_max("actor/advantage_max", float(values.max()))
            stats.add_min("actor/advantage_min", float(values.min()))
        rows = advantages if per_row else advantages.abs().sum(dim=1)
        stats.add_mean("actor/zero_advantage_share", float((rows == 0).sum()), max(len(rows), 1))
        return attach(batch, columns, step.cluster)

    def _trajectories(self, batch: BatchRef, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Returns the trajectory of each row, [B], where some have several rows and the estimator is to see
        each trajectory once; None where it sees rows.

        It sees rows where it says so by reading trajectory_id, or reads tokens: each row is then credited
        with the outcome of all.
        """
        if len(firsts(batch.index)) == len(batch) or "trajectory_id" in self.reads:
            return None
        if any(inputs[name].ndim > 1 for name in self.reads if name not in ("scores", "multiplier")):
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

    async def _inputs(self, batch: BatchRef, kl_coef: float, stats: StepStats) -> dict[str, torch.Tensor]:
        """Returns the estimator's arguments by name: per-row [B], per-token [B, T] float32, response_mask [B,
        T] float32.
        """
        in_index = set(self.columns) & set(batch.index.columns)
        inputs = {name: numbers(batch.index, name) for name in in_index}
        per_token = set(self.columns) - in_index
        if per_token:
            inputs |= await padded_columns(batch, {*per_token, "response_mask"})
        if self.similarity < 1:
            inputs["anchor_id"] = await self._alike(batch)
        if "scores" in self.reads:
            names = [name for name in batch.index.columns if name.startswith(SCORE_PREFIX)]
            scores = [numbers(batch.index, name).to(torch.float32) for name in names]
            inputs["scores"] = torch.stack(scores, 1) if scores else torch.empty(len(batch), 0)
        if self._kl is not None or "token_rewards" in self.reads:
            self._reward(inputs, kl_coef, stats)
        if {"token_rewards", "trajectory_id"} <= set(self.reads):
            self._end_once(batch, inputs, kl_coef)
        if self._cost is not None:
            self._charge(inputs, self._cost, kl_coef)
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
        inputs["token_rewards"], _ = self._on_tokens(inputs, outcome, self._share(kl_coef))

    def _reward(self, inputs: dict[str, torch.Tensor], kl_coef: float, stats: StepStats) -> None:
        """Adds token_rewards, and the reward with the KL inside."""
        inputs["token_rewards"], kl_stats = self._on_tokens(inputs, inputs["reward"], self._share(kl_coef))
        stats.merge(kl_stats)
        if self._kl is not None:  # a row without trained tokens keeps the reward that it got
            has_tokens = (inputs["response_mask"] > 0).any(1)
            with_kl = inputs["token_rewards"].sum(1)
            inputs["reward"] = torch.where(has_tokens, with_kl, inputs["reward"])

    def _charge(self, inputs: dict[str, torch.Tensor], cost: str, kl_coef: float) -> None:
        """Adds token_costs: the cost on the last trained token, plus half of the KL (Safe-RLHF,
        2310.12773).
        """
        if bool(inputs[cost].isnan().any()):
            raise DataError(f"{cost}, the cost of algorithm.constraint, is missing in some rows of the batch")
        inputs["token_costs"], _ = self._on_tokens(inputs, inputs[cost], -self._share(kl_coef))

    def _share(self, kl_coef: float) -> float:
        return kl_coef / 2 if self._cost is not None else kl_coef

    def _on_tokens(
        self, inputs: Mapping[str, torch.Tensor], outcome: torch.Tensor, coef: float
    ) -> tuple[torch.Tensor, StepStats]:
        return kl_reward(
            outcome,
            inputs["response_mask"],
            inputs.get("old_log_probs"),
            inputs.get("ref_log_probs"),
            estimator=self._kl.name if self._kl else None,
            coef=coef,
        )
