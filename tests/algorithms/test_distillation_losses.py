"""KL divergences to a teacher on its likeliest tokens: exact where K is the vocabulary, bounded elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rondo.algorithms import ActorLoss, check_algorithm, lookup
from rondo.config.schema import AlgorithmConfig, FunctionConfig
from rondo.core.errors import ConfigError

forward = lookup("policy_loss", "forward_kl_topk")
reverse = lookup("policy_loss", "reverse_kl_topk")


def logits(seed: int, size: int = 4, vocabulary: int = 5) -> tuple[Tensor, Tensor]:
    """(student's, with gradient; teacher's), float64 [size, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, size, vocabulary, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher


def topk(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the engine makes of logits: log-probs at the teacher's top k (student, teacher) and the mask."""
    log_student, log_teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    values, ids = log_teacher.topk(k)
    return log_student.gather(1, ids), values, torch.ones(len(student), dtype=student.dtype)


@pytest.mark.parametrize("renormalize", [False, True])
def test_forward_with_the_whole_vocabulary_is_the_kl_and_its_gradient(renormalize: bool) -> None:
    student, teacher = logits(0)
    loss, metrics = forward(*topk(student, teacher, 5), renormalize=renormalize)
    exact = torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=x) for x in (teacher, student))
    )
    torch.testing.assert_close(loss, exact)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    torch.testing.assert_close(gradient, (student.softmax(-1) - teacher.softmax(-1)).detach())
    mass, number = metrics["actor/teacher_mass"]
    assert (mass / number).item() == pytest.approx(1.0)


def test_reverse_with_the_whole_vocabulary_is_the_kl_and_its_gradient() -> None:
    student, teacher = logits(1)
    loss, _ = reverse(*topk(student, teacher, 5))
    student_, teacher_ = (torch.distributions.Categorical(logits=x) for x in (student, teacher))
    exact = torch.distributions.kl_divergence(student_, teacher_)
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(
        torch.autograd.grad(loss.sum(), student)[0], torch.autograd.grad(exact.sum(), student)[0]
    )


def test_forward_on_two_tokens_by_hand() -> None:
    """Teacher .5, .3 (.2 missing), student .4, .4."""
    teacher, student = torch.tensor([[0.5, 0.3]]).double(), torch.tensor([[0.4, 0.4]]).double()
    mask = torch.ones(1, dtype=torch.float64)
    loss, metrics = forward(student.log(), teacher.log(), mask)
    assert loss.item() == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4), rel=1e-6)
    assert metrics["actor/teacher_mass"][0].item() == pytest.approx(0.8)
    loss, _ = forward(student.log(), teacher.log(), mask, renormalize=True)
    assert loss.item() == pytest.approx(
        0.625 * math.log(0.625 / 0.5) + 0.375 * math.log(0.375 / 0.5), rel=1e-6
    )
    loss, _ = reverse(student.log(), teacher.log(), mask)
    assert loss.item() == pytest.approx(0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375), rel=1e-6)


def test_without_its_tail_the_forward_sum_may_be_negative_and_still_has_a_gradient() -> None:
    teacher = torch.tensor([[0.3, 0.2]]).double().log()
    student = torch.tensor([[0.5, 0.4]]).double().log().requires_grad_()
    loss, _ = forward(student, teacher, torch.ones(1))
    assert loss.item() < 0
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), student)[0], -teacher.exp())


def test_the_truncated_gradient_moves_mass_to_the_top_k_only() -> None:
    """In logits: mass_T · p_S - p_T on the top k, mass_T · p_S elsewhere."""
    student, teacher = logits(2)
    columns = topk(student, teacher, 2)
    (gradient,) = torch.autograd.grad(forward(*columns)[0].sum(), student)
    p_teacher, ids = teacher.softmax(-1).topk(2)
    expected = p_teacher.sum(1, keepdim=True) * student.detach().softmax(-1)
    torch.testing.assert_close(gradient, expected.scatter_add(1, ids, -p_teacher))


@pytest.mark.parametrize("function", [forward, reverse])
def test_where_they_agree_neither_pushes(function: Any) -> None:
    _, teacher = logits(3)
    student = teacher.clone().requires_grad_()
    loss, _ = function(*topk(student, teacher, 5))
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), student)[0], torch.zeros_like(teacher))


@pytest.mark.parametrize("options", [{}, {"renormalize": True}])
def test_gradients_in_float64(options: dict[str, Any]) -> None:
    student, teacher = logits(4)
    _, fixed, mask = topk(student, teacher, 3)
    assert torch.autograd.gradcheck(
        lambda x: forward(topk(x, teacher, 3)[0], fixed, mask, **options)[0], student
    )
    assert torch.autograd.gradcheck(lambda x: reverse(topk(x, teacher, 3)[0], fixed, mask)[0], student)


def test_log_probs_have_a_floor_and_the_loss_a_limit() -> None:
    teacher = torch.tensor([[-0.01, -1e4]])
    student = torch.tensor([[-1e4, -0.01]], requires_grad=True)
    mask = torch.ones(1)
    loss, _ = forward(student, teacher, mask)
    assert loss.item() == pytest.approx(math.exp(-0.01) * 9.99, rel=1e-3)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    wanted = torch.tensor([[-math.exp(-0.01), 0.0]])  # -p_T: neither bound cuts the gradient
    torch.testing.assert_close(gradient, wanted)
    low, _ = forward(student, teacher, mask, limit=2.0)
    assert low.item() == 2.0
    torch.testing.assert_close(torch.autograd.grad(low.sum(), student)[0], wanted)
    deep, _ = forward(student, teacher, mask, floor=-20.0, limit=100.0)
    assert deep.item() == pytest.approx(math.exp(-0.01) * 19.99, rel=1e-3)


@pytest.mark.parametrize("renormalize", [False, True])
def test_bounds_cut_the_value_but_not_the_gradient(renormalize: bool) -> None:
    """In logits the gradient is that without bounds, p_S - p_T here, with a student far below the floor."""
    student = torch.tensor([[30.0, 0.0, -5.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-4.0, 3.0, 2.0]], dtype=torch.float64)
    columns = topk(student, teacher, 3)
    for options in ({}, {"limit": 1.0}, {"floor": -1.0}):
        (gradient,) = torch.autograd.grad(
            forward(*columns, renormalize=renormalize, **options)[0].sum(), student, retain_graph=True
        )
        torch.testing.assert_close(gradient, (student.softmax(-1) - teacher.softmax(-1)).detach())


def test_the_weight_is_the_teachers_probability_below_the_floor_too() -> None:
    teacher, student = torch.tensor([[-0.1, -3.0]]), torch.tensor([[-0.5, -0.7]])
    loss, _ = forward(student, teacher, torch.ones(1), floor=-1.0)
    assert loss.item() == pytest.approx(math.exp(-0.1) * 0.4 + math.exp(-3.0) * -0.3)


@pytest.mark.parametrize("function", [forward, reverse])
def test_impossible_columns_stay_finite(function: Any) -> None:
    for student, teacher in ((1e4, -1e4), (-1e4, 1e4), (0.0, 0.0), (-math.inf, -1.0)):
        wide = torch.tensor([[student, -1.0]], requires_grad=True)
        loss, metrics = function(wide, torch.tensor([[teacher, -2.0]]), torch.ones(1))
        (gradient,) = torch.autograd.grad(loss.sum(), wide)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
        assert metrics["actor/teacher_mass"][0].isfinite()


def test_through_the_actors_loss() -> None:
    """The engine is asked for current log-probs at the teacher's ids; masked tokens (NaN) have no part."""
    config = AlgorithmConfig(policy_loss=FunctionConfig("forward_kl_topk"))
    check_algorithm(config)
    loss = ActorLoss(config)
    assert loss.outputs == ("log_probs", "topk_log_probs")
    assert {"teacher_topk_ids", "teacher_topk_log_probs"} <= set(loss.columns)
    assert "advantages" not in loss.columns
    assert not loss.zero_where_advantage_is_zero
    student, teacher = logits(5)
    wide, fixed, _ = topk(student, teacher, 3)
    mask = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    hidden = (mask == 0)[:, None]
    leaf = torch.where(hidden, math.nan, wide.detach()).requires_grad_()
    log_probs = torch.zeros(4, dtype=torch.float64)
    columns = {
        "response_mask": mask,
        "loss_weight": torch.full((4,), 1 / 3, dtype=torch.float64),
        "rollout_log_probs": log_probs,
        "teacher_topk_ids": torch.zeros(4, 3, dtype=torch.int32),
        "teacher_topk_log_probs": torch.where(hidden, math.nan, fixed),
    }
    value, metrics = loss(
        {"log_probs": log_probs, "topk_log_probs": leaf}, columns, torch.tensor([0, 2, 4], dtype=torch.int32)
    )
    expected, _ = forward(wide, fixed, mask.double())
    assert value.item() == pytest.approx((expected * mask).sum().item() / 3)
    (gradient,) = torch.autograd.grad(value, leaf)
    torch.testing.assert_close(gradient, torch.where(hidden, 0.0, -fixed.exp() / 3))
    mass, number = metrics["actor/teacher_mass"]
    assert number == 3
    assert mass.item() == pytest.approx((fixed.exp().sum(1) * mask).sum().item())


@pytest.mark.parametrize("options", [{"floor": 0.0}, {"limit": 0.0}, {"renormalise": True}])
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss"):
        check_algorithm(AlgorithmConfig(policy_loss=FunctionConfig("forward_kl_topk", options)))
