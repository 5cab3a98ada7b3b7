"""The second pass of configuration: do the chosen functions exist, fit their options, and fit each other?"""

from __future__ import annotations

import keyword
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.objective import ActorLoss, CriticLoss
from rondo.algorithms.registry import Kind, bind, bind_preparation, columns_read, lookup, names
from rondo.config.schema import AlgorithmConfig, FunctionConfig
from rondo.core.columns import TABLE, UPDATE_PLAN, ColumnFamily
from rondo.core.errors import ConfigError, TrainError, about
from rondo.platform import on_host

_log = logging.getLogger(__name__)


def example_columns(
    response_mask: Tensor,
    *,
    num_scores: int = 1,
    fill: Callable[[tuple[int, ...]], Tensor] = torch.zeros,
) -> dict[str, Tensor]:
    """Makes the columns that a function may read: the mask as given, ids and counts 0, the others by `fill`.

    response_mask: [B, T], or flat [N], where a column that is per row stands on each of its tokens. fill:
    shape -> floating-point tensor. Each row is a trajectory of one step and one turn of the policy, and all
    are samples of one prompt.
    """
    per_token, per_row = tuple(response_mask.shape), tuple(response_mask.shape[:1])
    per_turn = (*per_row, 1)
    shapes = {"row": per_row, "turn": per_turn, "token": per_token, "choice": (*per_token, 2), "batch": ()}
    known = (c for c in TABLE if c.made_by != UPDATE_PLAN and not isinstance(c, ColumnFamily))
    table = {c.name: c for c in known if c.per in shapes}
    floats = {name: shapes[c.per] for name, c in table.items() if c.is_float}
    floats["scores"] = (*per_row, num_scores)
    ids = [name for name, c in table.items() if c.per == "row" and not c.is_float]
    return {
        **{name: fill(shape) for name, shape in floats.items()},
        **{name: torch.zeros(per_row, dtype=torch.int64) for name in ids},
        "trajectory_id": torch.arange(len(response_mask)),
        "turn_stops": torch.full(per_turn, per_token[-1]),
        "turn_kinds": torch.zeros(per_turn, dtype=torch.int64),
        "response_mask": response_mask,
    }


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raises ConfigError for a function, option, value or combination that cannot work.

    Built-in functions are also called once on two made-up rows, so that a value out of range fails at start
    and not after the first rollouts; functions of the user's are not called.
    """
    # How many scores the reward functions have is not known here: as many as there are weights for them.
    num_scores = len(algorithm.advantage.options.get("weights") or [1.0])
    table = example_columns(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), num_scores=num_scores)
    arrays = {name: column.numpy() for name, column in table.items()}
    _try("advantage", algorithm.advantage, table)
    _try("aggregation", algorithm.aggregation, arrays | {"num_trained_tokens": np.array([2, 1])})
    _try("filter", algorithm.filter, arrays)
    _try("resample", algorithm.resample, table)
    for name, coefficient in algorithm.coefficients.items():
        with about(f"algorithm.coefficients.{name}"):
            _check_coefficient(name, coefficient)
    if algorithm.kl is not None:
        with about("algorithm.kl"):
            lookup("kl", algorithm.kl.name)
    _try_loss("policy_loss", algorithm.policy_loss, lambda: ActorLoss(algorithm))
    _try_loss("value_loss", algorithm.value_loss, lambda: CriticLoss(algorithm.value_loss))
    mask = table["response_mask"]
    per_token = {name: x[:, None].expand_as(mask) if x.ndim == 1 else x for name, x in table.items()}
    with about("algorithm.policy_loss"):
        prepare = bind_preparation(algorithm.policy_loss)
        if prepare is not None and algorithm.policy_loss.name in names("policy_loss"):
            prepare(**{name: 0 if name == "seed" else per_token[name] for name in columns_read(prepare)})


def try_loss(loss: Any, device: torch.device) -> None:
    """Calls a loss (`rondo.training.Loss`) once on two made-up rows that lie on `device`, before a model is
    there. Raises ConfigError where a function of the user's makes a tensor elsewhere. What else goes wrong
    need not go wrong on real rows, and is only logged.
    """
    if on_host(device):  # where tensors are made that are not told where
        return
    try:
        call_once(loss, device)
    except TrainError as error:
        _log.info("a loss could not be tried on %s with two made-up rows: %s", device, error)


def call_once(loss: Any, device: torch.device) -> tuple[Tensor, Mapping[str, Any]]:
    """Returns what a loss makes of two made-up rows (a pair, for losses of pairs) of three tokens."""
    # Weights and the columns of a KL estimator of the user's are not in the table.
    flat = {name: column.to(device) for name, column in example_columns(torch.ones(3)).items()}
    others = torch.ones(3, device=device)
    wide = torch.ones(3, 2, device=device)
    made_by_model = {name: wide if name.startswith("topk") else others for name in loss.outputs}
    outputs = {name: output.clone().requires_grad_() for name, output in made_by_model.items()}
    cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
    made: tuple[Tensor, Mapping[str, Any]] = loss(
        outputs, {name: flat.get(name, others) for name in loss.columns}, cu_seqlens
    )
    return made


def _try(kind: Kind, chosen: FunctionConfig | None, table: Mapping[str, Any]) -> None:
    """Binds what is chosen, and calls it where it is built in."""
    if chosen is not None:
        with about(f"algorithm.{kind}"):
            function = bind(kind, chosen)
            if chosen.name in names(kind):
                function(**{name: table[name] for name in columns_read(function)})


def _check_coefficient(name: str, chosen: FunctionConfig) -> None:
    """Raises ConfigError for a function that cannot work, or a name that a function would not read it by."""
    if name in {column.name for column in TABLE} or not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"algorithm.coefficients.{name}: functions read it by this name, which must be one of Python's "
            "and no column's; choose another one"
        )
    bind("coefficient", chosen, key=f"algorithm.coefficients.{name}")


def _try_loss(kind: Kind, chosen: FunctionConfig, make: Callable[[], ActorLoss | CriticLoss]) -> None:
    with about(f"algorithm.{kind}"):
        loss = make()
        if chosen.name in names(kind):
            call_once(loss, torch.device("cpu"))
