"""PRIME (the advantage of Eq. 5, the loss of the implicit process reward model) and the teacher's gap."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from rondo.algorithms.advantages.dense import prime, teacher_gap
from rondo.algorithms.advantages.group import rloo
from rondo.algorithms.objective import PrmLoss
from rondo.core.errors import ConfigError

T = torch.tensor
NAN, INF = float("nan"), float("inf")


def test_prime_table() -> None:
    """Group 7 = rows 0, 2, 3; r̄ = 2, 3, 0. Baselines: 1.5, 1, 2.5. Outcomes 1, 0, 0: rloo 1, -½, -½.

    Row 0 (a hole at position 1), γ = ½: r - b = -½, 1½ → returns ¼, 1½; row 2: 2, row 3: -2½, -2½ → -3¾, -2½.
    """
    process = T([[1.0, NAN, 3.0], [9.0, 9.0, 9.0], [3.0, NAN, NAN], [1.0, -1.0, NAN]])
    mask = T([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    out = prime(process, T([1.0, 5.0, 0.0, 0.0]), T([7, 1, 7, 7]), mask, gamma=0.5)
    row_3 = [1 - 2.5 + 0.5 * (-1 - 2.5) - 0.5, -1 - 2.5 - 0.5]
    expected = T([[1.25, 0.0, 2.5], [0.0] * 3, [1.5, 0.0, 0.0], [*row_3, 0.0]])
    torch.testing.assert_close(out, expected)
    doubled = prime(2 * process, T([1.0, 5.0, 0.0, 0.0]), T([7, 1, 7, 7]), mask, gamma=0.5, process_coef=0.5)
    torch.testing.assert_close(doubled, expected)


def test_prime_without_process_rewards_is_rloo() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, group = torch.randn(8, generator=generator), T([0, 1, 1, 0, 2, 1, 0, 0])
    mask = (torch.rand(8, 5, generator=generator) < 0.7).float()
    expected = rloo(reward, group).unsqueeze(1) * mask
    assert torch.equal(prime(torch.zeros(8, 5), reward, group, mask, gamma=0.3), expected)


@pytest.mark.parametrize("value", [0.9, -0.3, 1e30])
def test_prime_of_equal_rewards_is_exactly_zero(value: float) -> None:
    mask = (torch.rand(9, 7, generator=torch.Generator().manual_seed(1)) < 0.6).float()
    group = T([0] * 4 + [1] * 4 + [2])
    for dtype in (torch.float32, torch.float64):
        process = torch.full((9, 7), value, dtype=dtype)
        assert (prime(process, process[:, 0], group, mask, gamma=0.9) == 0).all()


def test_prime_of_rows_without_tokens_and_alone() -> None:
    """A row without trained tokens is in no process baseline; alone beside it means no baseline."""
    mask = T([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    process = T([[4.0, 5.0], [NAN, NAN], [6.0, -6.0], [2.0, NAN], [NAN, NAN]])
    reward, group = torch.zeros(5), T([0, 0, 1, 1, 1])
    out = prime(process, reward, group, mask)
    torch.testing.assert_close(out, T([[0.0, 0.0], [0.0, 0.0], [-4.0, -8.0], [2.0, 0.0], [0.0, 0.0]]))
    assert prime(process[:0], reward[:0], group[:0], mask[:0]).shape == (0, 2)


class Packed:
    """Four packed responses; row 1 has a hole, row 2 no trained token; values at masked positions are NaN."""

    cu_seqlens = T([0, 3, 6, 8, 9], dtype=torch.int32)
    mask = T([1, 1, 1, 1, 0, 1, 0, 0, 1], dtype=torch.uint8)
    log_probs = T([-1.0, -2.0, -0.5, -0.1, NAN, -3.0, NAN, NAN, -0.25], dtype=torch.float64)
    reference = T([-2.0, -1.5, -1.0, -0.4, NAN, -1.0, NAN, NAN, -0.25], dtype=torch.float64)
    accuracy = T([1.0] * 3 + [0.0] * 3 + [NAN] * 2 + [-1.0], dtype=torch.float64)
    weight = T([1 / 9] * 3 + [1 / 6] * 3 + [0.0] * 2 + [1 / 3], dtype=torch.float64)  # seq-mean-token-mean

    def columns(self) -> dict[str, torch.Tensor]:
        names = ("response_mask", "ref_log_probs", "accuracy", "prm_loss_weight")
        return dict(zip(names, (self.mask, self.reference, self.accuracy, self.weight), strict=True))


def test_prm_loss_is_the_mean_cross_entropy_over_rows() -> None:
    """Σ(ℓ - ℓ_ref): row 0: 1 - ½ + ½ = 1, row 1: .3 - 2 = -1.7, row 3: 0. β = 2, labels 1, 0, 0."""
    rows = Packed()
    log_probs = rows.log_probs.clone().requires_grad_()
    loss_function = pickle.loads(pickle.dumps(PrmLoss(2.0)))
    assert loss_function.outputs == ("log_probs",)
    assert set(loss_function.columns) == set(rows.columns())
    loss, metrics = loss_function({"log_probs": log_probs}, rows.columns(), rows.cu_seqlens)
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-3.4)) + math.log(2)) / 3
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert {name: (n / d).item() for name, (n, d) in metrics.items()} == pytest.approx(
        {"prm/loss": expected, "prm/accuracy": 1.0, "prm/reward": 2 * (1 - 1.7) / 6}
    )
    loss.backward()
    sigmoid = T([2.0, -3.4, 0.0], dtype=torch.float64).sigmoid()
    slope = 2 * (sigmoid - T([1.0, 0.0, 0.0])) / 3  # β (p - o) on every token of the row, mean over rows
    wanted = [slope[0]] * 3 + [slope[1], 0.0, slope[1], 0.0, 0.0, slope[2]]
    torch.testing.assert_close(log_probs.grad, T(wanted, dtype=torch.float64))


def test_prm_loss_over_any_split_of_the_rows() -> None:
    rows = Packed()
    whole, metrics = PrmLoss(0.05)({"log_probs": rows.log_probs}, rows.columns(), rows.cu_seqlens)
    total, right = torch.zeros(()), T([0.0, 0.0])
    for start, stop, cu_seqlens in ((0, 6, [0, 3, 6]), (6, 9, [0, 2, 3]), (0, 0, [0])):
        columns = {name: column[start:stop] for name, column in rows.columns().items()}
        part, counts = PrmLoss(0.05)({"log_probs": rows.log_probs[start:stop]}, columns, T(cu_seqlens))
        total, right = total + part, right + torch.stack(counts["prm/accuracy"])
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(right.double(), torch.stack(metrics["prm/accuracy"]))


def test_prm_loss_of_huge_ratios_is_finite() -> None:
    rows = Packed()
    far = (1e6 * rows.log_probs).float().requires_grad_()
    loss, _ = PrmLoss(1.0)({"log_probs": far}, rows.columns(), rows.cu_seqlens)
    loss.backward()
    assert loss.isfinite()
    assert far.grad is not None
    assert far.grad.isfinite().all()


def test_teacher_gap_is_per_token_bounded_and_masked() -> None:
    teacher = T([[-1.0, NAN, -0.5], [-100.0, -INF, 0.0]])
    student = T([[-3.0, NAN, -0.25], [-1.0, -2.0, -1e9]])
    mask = T([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    assert teacher_gap(teacher, student, mask).tolist() == [[2.0, 0.0, -0.25], [-20.0, -20.0, 20.0]]
    assert teacher_gap(teacher, student, mask, clamp=0.5).tolist() == [[0.5, 0.0, -0.25], [-0.5, -0.5, 0.5]]
    assert (teacher_gap(student, student, mask) == 0).all()  # the student's own judgement
    with pytest.raises(ConfigError, match="teacher_gap needs clamp"):
        teacher_gap(teacher, student, mask, clamp=0.0)


def test_teacher_gap_expects_minus_the_reverse_kl() -> None:
    """Σ_y π(y) A(y) = -KL(π || π_teacher)."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 9, generator=generator, dtype=torch.float64).log_softmax(1)
    gap = teacher_gap(teacher[None], student[None], torch.ones(1, 9))[0]
    reverse = torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="sum")
    torch.testing.assert_close((student.exp() * gap).sum(), -reverse)
