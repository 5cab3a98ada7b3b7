"""LUFFY, RL-PLUS and ExGRPO: the reference's worked examples, and sampled tokens beside given ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rondo.core.errors import ConfigError
from tests.algorithms.policy_losses import D, evaluate, random_columns

LOSSES = ("luffy", "rl_plus", "exgrpo")


def given(log_probs: torch.Tensor, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
    ones = torch.ones_like(log_probs)
    return {"given": ones, "advantages": 0.5 * ones, "replaying": ones, **columns}


def test_luffys_example() -> None:
    pi = D([0.01, 0.1, 0.5, 0.9])
    loss, gradient, metrics = evaluate("luffy", pi.log(), **given(pi))
    torch.testing.assert_close(loss, D([-0.045455, -0.25, -0.416667, -0.45]), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, D([-0.041322, -0.125, -0.069444, -0.045]), rtol=0, atol=1e-6)
    total, number = metrics["actor/given_probability"]
    assert (total.item(), number.item()) == (pytest.approx(1.51), 4)
    assert metrics["actor/ratio"][1] == 0  # no token was sampled


def test_rl_plus_example() -> None:
    pi, old = D([0.25, 0.5]), D([0.2, 0.6])
    loss, gradient, _ = evaluate("rl_plus", pi.log(), **given(pi, old_log_probs=old.log()))
    torch.testing.assert_close(loss, D([-0.270633, -0.252538]), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, loss, rtol=0, atol=1e-12)  # C carries no gradient
    literal, _, _ = evaluate(
        "rl_plus", pi.log(), {"uniform": 1e-12, "kappa": 0.0}, **given(pi, old_log_probs=old.log())
    )
    torch.testing.assert_close(literal / -0.5, D([1.666667, 1.111111]), rtol=0, atol=1e-6)


def test_exgrpos_example() -> None:
    ratio, recorded = D([0.5, 1.0, 4.0]), D([-3.0, -2.0, -4.0])
    columns = given(ratio, given_log_probs=recorded, advantages=torch.ones_like(ratio))
    loss, gradient, _ = evaluate("exgrpo", recorded + ratio.log(), **columns)
    torch.testing.assert_close(loss, -D([0.833333, 0.909091, 0.97561]), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, -D([0.138889, 0.082645, 0.023795]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("clip", [0.2, None])
def test_sampled_tokens_have_the_ratio_and_its_metrics_alone(name: str, clip: float | None) -> None:
    """With a clip ppo_clip's, without it the plain ratio's; of exgrpo the switch decides."""
    columns = random_columns()
    mask = columns["response_mask"]
    some = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0, 0], dtype=torch.uint8)
    columns |= {"given": some, "given_log_probs": columns["old_log_probs"] * 0.9 * some}
    columns["replaying"] = torch.full_like(mask, float(clip is None))
    log_probs = columns.pop("log_probs")
    options: dict[str, Any] = {} if name == "exgrpo" else {"clip": clip}
    loss, gradient, metrics = evaluate(name, log_probs, options, **columns)
    wide = {"clip": 1e9 if clip is None else clip, "dual_clip": None}
    sampled = {**columns, "response_mask": mask * (1 - some)}
    theirs, their_gradient, told = evaluate("ppo_clip", log_probs, wide, **sampled)
    own = (some == 0) & (mask > 0)
    torch.testing.assert_close(loss[own], theirs[own])
    torch.testing.assert_close(gradient[own], their_gradient[own])
    for metric in ("actor/ppo_kl", "actor/ratio"):
        assert metrics[metric] == told[metric]
    assert metrics["actor/ratio_max"] == told["actor/ratio_max"]
    assert [x.item() for x in metrics["actor/given_share"]] == [1, 7]
    of_given = (some > 0) & (mask > 0)
    assert (loss[of_given] != theirs[of_given]).all()


@pytest.mark.parametrize("name", LOSSES)
def test_an_unlikely_or_certain_token_has_finite_numbers(name: str) -> None:
    log_probs = D([-200.0, 0.0, 1e-6, -1e-9])
    columns = given(log_probs, given_log_probs=D([-1.0, -300.0, 0.0, 0.0]), old_log_probs=D([0, -100, 0, 0]))
    for is_given in (0, 1):
        loss, gradient, _ = evaluate(name, log_probs, **{**columns, "given": columns["given"] * is_given})
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("luffy", {"gamma": 0.0}, "gamma"),
        ("luffy", {"clip": -0.1}, "clip"),
        ("rl_plus", {"kappa": -0.5}, "kappa"),
        ("rl_plus", {"uniform": 0.0}, "uniform"),
        ("exgrpo", {"gamma": -1.0}, "gamma"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], says: str) -> None:
    columns = given(D([-1.0]), given_log_probs=D([-1.0]))
    with pytest.raises(ConfigError, match=says):
        evaluate(name, D([-1.0]), options, **columns)
