"""Policy losses: what holds for all of them, whatever they clip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rondo.algorithms import lookup, names
from rondo.algorithms.policy_losses.clipped import cispo, gmpo, gspo, ppo_clip, sapo
from rondo.algorithms.policy_losses.unclipped import dro, reinforce, sppo
from rondo.algorithms.registry import is_zero_at_zero_advantage
from rondo.core.errors import ConfigError
from tests.algorithms.policy_losses import D, bound, call, random_columns, value_and_gradient

T = torch.tensor
LOSSES = names("policy_loss")


@pytest.mark.parametrize(
    "name",
    ["ppo_clip", "cispo", "sapo", "gspo", "reinforce", "dppo_tv", "dppo_kl", "dro", "reinforce_is"],
)
def test_at_ratio_1_every_loss_is_the_policy_gradient(name: str) -> None:
    advantages = [1.5, -0.7, 0.0, 2.0, -3.0]
    _, gradient, _ = value_and_gradient(bound(name), [1.0] * 5, advantages)
    torch.testing.assert_close(gradient, -D(advantages))


# CISPO, GSPO, DPPO and reinforce_is hold back part of the gradient on purpose; theirs are in their tables.
@pytest.mark.parametrize("function", [ppo_clip, gmpo, sapo, reinforce, dro, functools.partial(sppo, eta=2.0)])
def test_gradcheck(function: Callable) -> None:
    columns = random_columns()
    log_probs = columns.pop("log_probs").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: (call(function, x, **columns)[0] * columns["response_mask"]).sum(), log_probs
    )


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [30.0, -30.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_huge_log_ratios_stay_finite(name: str, gap: float, advantage: float) -> None:
    old = torch.full((3,), -1.0)
    leaf = (old + gap).requires_grad_()
    loss, metrics = call(
        lookup("policy_loss", name), leaf, old_log_probs=old, advantages=torch.full((3,), advantage)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    values = [v for pair in metrics.values() for v in (pair if isinstance(pair, tuple) else (pair,))]
    assert all(v.isfinite() for v in values)


@pytest.mark.parametrize("name", [n for n in LOSSES if is_zero_at_zero_advantage(lookup("policy_loss", n))])
def test_zero_advantage_gives_exactly_zero(name: str) -> None:
    function = lookup("policy_loss", name)
    columns = random_columns()
    log_probs = columns.pop("log_probs").requires_grad_()
    columns["advantages"] = torch.zeros(10, dtype=torch.float64)
    loss, _ = call(function, log_probs, **columns)
    assert (loss == 0).all()
    assert (torch.autograd.grad(loss.sum(), log_probs)[0] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_rows_do_not_see_each_other(name: str) -> None:
    """Two rows together give what they give alone, in any order."""
    function, columns = lookup("policy_loss", name), random_columns()
    cu_seqlens = columns.pop("cu_seqlens")
    together, _ = call(function, cu_seqlens=cu_seqlens, **columns)
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        alone = {column: values[start:stop] for column, values in columns.items()}
        loss, _ = call(function, cu_seqlens=T([0, stop - start], dtype=torch.int32), **alone)
        torch.testing.assert_close(loss, together[start:stop], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_micro_batch_is_legal(name: str) -> None:
    leaf = torch.zeros(0, requires_grad=True)
    loss, _ = call(lookup("policy_loss", name), leaf, cu_seqlens=T([0], dtype=torch.int32))
    assert torch.autograd.grad(loss.sum(), leaf)[0].shape == (0,)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo_clip", {"clip": -0.1}),
        ("ppo_clip", {"dual_clip": 0.9}),
        ("gspo", {"clip_high": -1.0}),
        ("cispo", {"clip_low": -1.0}),
        ("sapo", {"tau_negative": 0.0}),
        ("dppo_tv", {"threshold": -0.1}),
        ("dppo_kl", {"threshold_low": -0.1}),
        ("dppo_tv", {"cap": 0.0}),
        ("reinforce_is", {"upper": -1.0}),
        ("reinforce_is", {"lower": 3.0}),
        ("reinforce_is", {"level": "row"}),
        ("reinforce_is", {"outside": "drop"}),
        ("dro", {"beta": -0.1}),
        ("sppo", {"eta": 0.0}),
        ("gvpo", {"beta": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss"):
        call(bound(name, **options), torch.zeros(2))


def test_registered_functions_are_these() -> None:
    ratio_losses = {"ppo_clip", "gspo", "cispo", "gmpo", "sapo", "reinforce", "reinforce_is"}
    others = {"dppo_tv", "dppo_kl", "dro", "sppo", "gvpo", "kl_cov", "clip_cov", "fipo", "top_entropy"}
    others |= {"luffy", "rl_plus", "exgrpo"}
    reads_no_advantage = {"forward_kl_topk", "reverse_kl_topk", "pacs"}
    assert set(LOSSES) == ratio_losses | others | reads_no_advantage
    zero = {name for name in LOSSES if is_zero_at_zero_advantage(lookup("policy_loss", name))}
    assert set(LOSSES) - zero == reads_no_advantage | {"dro", "sppo", "gvpo", "kl_cov"}
    assert lookup("policy_loss", "gspo") is gspo
    assert lookup("policy_loss", "cispo") is cispo
