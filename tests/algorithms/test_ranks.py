"""A tensor of a wrong rank is refused by name: by every registered function, and by those beside them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rondo.algorithms import correct, draw, kl_reward, lookup, loss_weights, names, token_mean
from rondo.algorithms.advantages.returns import returns_to_go
from rondo.algorithms.arguments import ranked
from rondo.algorithms.objective import rollout_gap
from rondo.algorithms.policy_losses.covariance import covariances, select_between, select_largest
from rondo.algorithms.policy_losses.ratio import clip_metrics, log_ratio, ratio_metrics
from rondo.algorithms.registry import Kind, columns_read
from rondo.algorithms.rollout_correction import accepted, importance_ratio
from rondo.algorithms.trial import example_columns
from rondo.config.schema import RolloutCorrectionConfig

ROWS = example_columns(torch.ones(2, 3))
FLAT = example_columns(torch.ones(6)) | {"cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32)}
TABLES: dict[Kind, dict[str, Tensor]] = {
    "advantage": ROWS,
    "aggregation": ROWS,
    "filter": ROWS,
    "resample": ROWS,
    "select": ROWS,
    "policy_loss": FLAT,
    "value_loss": FLAT,
    "kl": FLAT,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "passk_analytic": {"k": 2},
    "resample_on_correct": {"keep": 2},
    "chunk-mean-token-mean": {"rows": 2},
    "seq-mean-token-sum-norm": {"divisor": 8.0},
    "trajectory-mean-token-sum-norm": {"divisor": 8.0},
}


def registered() -> list[Any]:
    """(kind, name, the column that gets a wrong rank)"""
    cases = []
    for kind in (*TABLES, "pair_loss"):
        for name in names(kind):
            function = lookup(kind, name)
            for column in columns_read(function):
                cases.append(pytest.param(kind, name, column, id=f"{kind}-{name}-{column}"))
    return cases


def refused(function: Callable[..., Any], given: dict[str, Any], column: str, wrong: Tensor) -> str:
    """What the function says of one column that is wrong."""
    with pytest.raises(AssertionError) as caught:
        function(**given | {column: wrong})
    found = re.fullmatch(
        rf"{function.__name__}: {column} must be (\[.*\]), its shape is (\[.*\])", str(caught.value)
    )
    assert found is not None, caught.value
    assert found[2] == str(list(wrong.shape))
    return found[1]


@pytest.mark.parametrize(("kind", "name", "column"), registered())
def test_every_registered_function_refuses_a_wrong_rank_by_name(kind: Kind, name: str, column: str) -> None:
    function = lookup(kind, name)
    read = columns_read(function)
    table = TABLES.get(kind, dict.fromkeys(read, torch.ones(2)))
    # What only its own `prepare` makes is in no table, and one number a token.
    other = torch.ones(2 if kind == "select" else 6)  # where it is a score's name
    given = {name: table.get(name, other) for name in read} | OPTIONS.get(name, {})
    right = given[column]
    shape = refused(function, given, column, right[..., None, None])
    if not (kind == "kl" and column == read[0]):  # its first column says which of the two layouts it is
        assert shape.count(",") + (shape != "[]") == right.ndim


@pytest.mark.parametrize("name", names("kl"))
def test_an_estimator_of_the_kl_takes_rows_and_flat_columns_and_no_mixture(name: str) -> None:
    function = lookup("kl", name)
    for table in (FLAT, ROWS):
        given = {column: table[column] for column in columns_read(function)}
        assert function(**given).shape == table["log_probs"].shape
    mixed = {column: ROWS[column] for column in columns_read(function)}
    assert refused(function, mixed, "ref_log_probs", torch.zeros(3)) == "[B, T]"


OTHERS: dict[Callable[..., Any], dict[str, Any]] = {
    returns_to_go: ROWS,
    correct: FLAT | {"config": RolloutCorrectionConfig()},
    importance_ratio: {"gap": torch.zeros(6), "counted": torch.ones(6), "cu_seqlens": None, "level": "token"},
    accepted: {"gap": torch.zeros(6), "counted": torch.ones(6), "cu_seqlens": None, "rule": None},
    kl_reward: ROWS,
    covariances: ROWS,
    select_largest: ROWS,
    select_between: ROWS | {"seed": 0},
    draw: ROWS | {"probabilities": torch.ones(2), "seed": 0},
    loss_weights: {
        "aggregate": token_mean,
        "num_trained_tokens": np.ones(2),
        "mini_batch": np.zeros(2),
    },
    rollout_gap: FLAT | {"mask": torch.ones(6)},
    log_ratio: FLAT,
    ratio_metrics: {"delta": torch.zeros(6), "mask": torch.ones(6)},
    clip_metrics: FLAT | {"delta": torch.zeros(6), "is_clipped": torch.ones(6), "mask": torch.ones(6)},
}


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_so_do_the_functions_that_are_in_no_registry(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    given = {name: OTHERS[function][name] for name in parameters if name in OTHERS[function]}
    arrays = [name for name, value in given.items() if isinstance(value, Tensor | np.ndarray)]
    assert arrays
    for name in arrays:
        refused(function, given, name, given[name][None])


def test_options_and_columns_that_no_table_has_are_free() -> None:
    @ranked("rows")
    def mine(reward: Tensor, my_column: Tensor, *, values: Tensor) -> int:
        return reward.ndim + my_column.ndim + values.ndim

    assert mine(torch.ones(2), torch.ones(2, 3, 4), values=torch.ones(())) == 4
