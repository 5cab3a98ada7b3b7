"""The preparation stage, on the controller, after the advantages: what a policy loss wants to know of a whole
mini-batch before it is cut into micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.registry import bind, bind_preparation, columns_read
from rondo.batch import BatchRef
from rondo.config.schema import AlgorithmConfig
from rondo.controller import Cluster
from rondo.errors import TrainError
from rondo.trainers.columns import attach, numbers, padded_columns
from rondo.trainers.producers import FROM_CONTROLLER, FROM_EPISODES, PRODUCERS
from rondo.types import request_seed

FROM_ENGINE = frozenset({"log_probs", "entropy", "topk_log_probs", "cu_seqlens"})


class PreparationStage:
    """The mini-batch statistics of a policy loss that has a `prepare` (Clip-Cov's selection, …).

    columns: what `prepare` reads. writes: what the loss reads and nothing else makes, so that `prepare` must.
    """

    def __init__(self, algorithm: AlgorithmConfig, prepare: Callable[..., Any]) -> None:
        self._name, self._prepare = algorithm.policy_loss.name, prepare
        self._mask_truncated = algorithm.mask_truncated
        self._takes_seed = "seed" in inspect.signature(prepare).parameters
        self.columns: tuple[str, ...] = tuple(name for name in columns_read(prepare) if name != "seed")
        elsewhere = {column for producer in PRODUCERS for column in producer.columns}
        elsewhere |= FROM_EPISODES | FROM_CONTROLLER | FROM_ENGINE
        read = columns_read(bind("policy_loss", algorithm.policy_loss))
        self.writes: tuple[str, ...] = tuple(name for name in read if name not in elsewhere)

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> PreparationStage | None:
        """The stage of the configured policy loss, None where it needs none."""
        prepare = bind_preparation(algorithm.policy_loss)
        return None if prepare is None else cls(algorithm, prepare)

    async def __call__(self, batch: BatchRef, cluster: Cluster, seed: int) -> BatchRef:
        """batch with what `prepare` makes of each mini-batch (index column `mini_batch`). seed: of the step.

        Raises TrainError when `prepare` returns another shape, or not what the loss reads.
        """
        inputs = await self._inputs(batch)
        mini_batch = batch.index.scalars("mini_batch")
        made: dict[str, Tensor] = {}
        for number in np.unique(mini_batch):
            rows = torch.from_numpy(np.flatnonzero(mini_batch == number))
            given = {name: inputs[name][rows] for name in self.columns}
            option = {"seed": request_seed(seed, "prepare", int(number))} if self._takes_seed else {}
            for name, column in self._prepare(**given, **option).items():
                whole = made.setdefault(name, column.new_zeros(inputs["response_mask"].shape))
                if column.shape != (len(rows), whole.shape[1]):
                    raise TrainError(
                        f"the preparation of the policy loss {self._name!r} made {name!r} of shape "
                        f"{list(column.shape)}; it must be {[len(rows), whole.shape[1]]}, as response_mask"
                    )
                whole[rows] = column
        missing = sorted(set(self.writes) - set(made))
        if missing:
            raise TrainError(
                f"the policy loss {self._name!r} reads {missing[0]!r}, which its preparation did not make; "
                f"it made {sorted(made)}"
            )
        return attach(batch, made, cluster)

    async def _inputs(self, batch: BatchRef) -> dict[str, Tensor]:
        """Every column [B, T], 0 where a token carries no loss; per-row columns are repeated over the row."""
        in_index = [name for name in self.columns if name in batch.index.columns]
        inputs = await padded_columns(batch, {*self.columns, "response_mask"} - set(in_index))
        counted = inputs["response_mask"] > 0
        if self._mask_truncated:
            counted &= torch.from_numpy(batch.index.scalars("finish_reason") != "length")[:, None]
        inputs |= {name: numbers(batch.index, name)[:, None].expand_as(counted) for name in in_index}
        return {name: torch.where(counted, column, 0) for name, column in inputs.items()}
