"""The second pass of configuration: do the chosen functions exist, fit their options, and fit each other? And
before models are there: do those of the user's make tensors where their columns are?
"""

from __future__ import annotations

import functools
import inspect
import keyword
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rondo.algorithms.objective import ActorLoss, CriticLoss, term_losses
from rondo.algorithms.registry import (
    IN_TABLE,
    Kind,
    bind,
    bind_preparation,
    columns_read,
    is_of_devices,
    lookup,
    names,
    on_wrong_device,
)
from rondo.config.schema import AlgorithmConfig, CoefficientConfig, FunctionConfig
from rondo.core.columns import TABLE, UPDATE_PLAN, ColumnFamily
from rondo.core.errors import ConfigError, RondoError, TrainError, WrongDeviceError, about
from rondo.platform import on_host
from rondo.system.border import users_code

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
        "row_id": torch.arange(len(response_mask)),
        "parent_id": torch.full(per_row, -1),
        "turn_stops": torch.full(per_turn, per_token[-1]),
        "turn_kinds": torch.zeros(per_turn, dtype=torch.int64),
        "turn_flags": torch.zeros(per_turn, dtype=torch.int64),
        "response_mask": response_mask,
    }


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Raises ConfigError for a function, option, value or combination that cannot work.

    Built-in functions are also called once on two made-up rows, so that a value out of range fails at start
    and not after the first rollouts; functions of the user's are not called.
    """
    term_losses(algorithm)  # before the loss that they are in, so that an error is about their key
    if algorithm.kl is not None:
        with about("algorithm.kl"):
            lookup("kl", algorithm.kl.name)
    _try_loss("policy_loss", algorithm.policy_loss, lambda: ActorLoss(algorithm))
    _try_loss("value_loss", algorithm.value_loss, lambda: CriticLoss(algorithm.value_loss))
    for name, coefficient in algorithm.coefficients.items():
        with about(f"algorithm.coefficients.{name}"):
            _check_coefficient(name, coefficient)
    for kind, name, bound, columns in _of_rows(algorithm, torch.zeros):
        with about(f"algorithm.{kind}"):
            function = bound()
            if function is not None and name in names(kind):
                # What a selection reads beside columns are scores by their names.
                also = columns["reward"] if kind == "select" else None
                function(**{column: columns.get(column, also) for column in columns_read(function)})


def try_functions(algorithm: AlgorithmConfig, device: str) -> None:
    """Calls each function of the user's that is given rows (the estimator, the aggregation, the filter, the
    resampling, a KL in the reward, the `prepare` of a policy loss) once on two made-up rows, before a model
    is there. They are on the CPU, as in a run. Raises WrongDeviceError where it makes a tensor elsewhere.
    device: the run's; on a CPU nothing is called, as in `try_loss`.
    """
    if on_host(device):
        return
    for kind, name, bound, columns in _of_rows(algorithm, _rising):
        function = bound()
        if function is not None and name not in names(kind):
            # A column that is in no table is taken for one of tokens.
            read = {one: columns.get(one, columns["response_mask"]) for one in columns_read(function)}
            _tried(f"the {kind} function {name}", functools.partial(function, **read), torch.device("cpu"))


def try_loss(loss: Any, device: torch.device) -> None:
    """Calls a loss (`rondo.training.Loss`) once on two made-up rows that lie on `device`, before a model is
    there. Raises WrongDeviceError where a function of the user's makes a tensor elsewhere.
    """
    if not on_host(device):  # where tensors are made that are not told where
        _tried(f"the loss {type(loss).__name__}", functools.partial(call_once, loss, device), device)


def _tried(who: str, call: Callable[[], Any], device: torch.device) -> None:
    """Calls a function of the user's for what it says of devices. What else goes wrong need not go wrong on
    real rows (it may refuse just these), and is only logged. device: that of its columns.
    """
    try:
        with users_code(who, TrainError):
            call()
    except WrongDeviceError:
        raise
    except RondoError as error:
        if is_of_devices(error.__cause__):  # of a loss that is an object of the user's own
            raise on_wrong_device(None, str(error), device) from error
        _log.info("%s could not be tried with two made-up rows: %s", who, error)


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


def _of_rows(
    algorithm: AlgorithmConfig, fill: Callable[[tuple[int, ...]], Tensor]
) -> Iterator[tuple[Kind, str, Callable[[], functools.partial[Any] | None], Mapping[str, Any]]]:
    """Yields the chosen functions that are given rows and not the tokens of a micro-batch: kind, name, what
    binds the function, and made-up columns, of two samples of one prompt: of a group of one many functions
    compute nothing.
    """
    # How many scores the reward functions have is not known here: as many as there are weights for them.
    num_scores = len(algorithm.advantage.options.get("weights") or [1.0])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    table = example_columns(mask, num_scores=num_scores, fill=fill)
    arrays = {name: column.numpy() for name, column in table.items()}
    per_token = {name: x[:, None].expand_as(mask) if x.ndim == 1 else x for name, x in table.items()}
    kl, loss = algorithm.kl, algorithm.policy_loss
    chosen: list[tuple[Kind, FunctionConfig | None, Mapping[str, Any]]] = [
        ("advantage", algorithm.advantage, table),
        ("aggregation", algorithm.aggregation, arrays | {"num_trained_tokens": np.array([2, 1])}),
        ("filter", algorithm.filter, arrays),
        ("select", algorithm.select, table),
        ("resample", algorithm.resample, table),
        ("kl", FunctionConfig(kl.name) if kl is not None and kl.where == "reward" else None, table),
    ]
    for kind, one, columns in chosen:
        if one is not None:
            yield kind, one.name, functools.partial(bind, kind, one), columns
    yield "policy_loss", loss.name, functools.partial(bind_preparation, loss), {**per_token, "seed": 0}


def _rising(shape: tuple[int, ...]) -> Tensor:
    """Makes numbers that differ: rewards that are all equal are a case of their own."""
    return torch.linspace(0, 1, math.prod(shape)).reshape(shape)


def _check_coefficient(name: str, chosen: CoefficientConfig) -> None:
    """Raises ConfigError for a function that cannot work, or a name that a function would not read it by."""
    if name in IN_TABLE or not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(
            f"algorithm.coefficients.{name}: functions read it by this name, which must be one of Python's "
            "and no column's; choose another one"
        )
    rule = bind("coefficient", chosen, key=f"algorithm.coefficients.{name}")
    parameters = inspect.signature(lookup("coefficient", chosen.name)).parameters
    if len(columns_read(rule)) != 2 or "start" in parameters:
        raise ConfigError(
            f"algorithm.coefficients.{name}: a rule is (value, metrics, *, options), and no option is called "
            f"'start', which is the key; {chosen.name} is ({', '.join(parameters)})"
        )
    if chosen.name in names("coefficient"):
        rule(chosen.start, defaultdict(lambda: 1.0))  # whatever it reads


def _try_loss(kind: Kind, chosen: FunctionConfig, make: Callable[[], ActorLoss | CriticLoss]) -> None:
    with about(f"algorithm.{kind}"):
        loss = make()
        if chosen.name in names(kind):
            call_once(loss, torch.device("cpu"))
