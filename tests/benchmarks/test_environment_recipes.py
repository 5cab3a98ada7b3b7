"""What benchmarks/environment_recipes.py makes of curves."""

from __future__ import annotations

import pytest

from environment_recipes import BUDGET, GREEDY, QUANTILES, SAMPLED, difference, solved_at, table

CURVE = [(0.0, 0.25), (6_000.0, 0.5), (10_000.0, 0.75)]


def run(last: float) -> dict[str, object]:
    """A run that comes on a straight line from 0.25 to `last`, over twice the budget."""
    curve = [(0.0, 0.25), (2.0 * BUDGET["sokoban"], last)]
    return {SAMPLED: curve, GREEDY: curve, "cpu_seconds": [60.0, 90.0], "steps": curve[-1][0]}


def test_what_is_solved_between_two_evaluations() -> None:
    assert [solved_at(CURVE, steps) for steps in (0, 3_000, 6_000, 8_000, 10_000)] == [
        *(0.25, 0.375, 0.5, 0.625, 0.75)
    ]
    with pytest.raises(SystemExit, match="ended after 10000 steps"):
        solved_at(CURVE, 10_001)


def test_difference_of_pairs() -> None:
    """At the budget 0.1, 0.2 and 0.3: mean 0.2, deviation 0.1, interval 4.303 · 0.1 / √3."""
    ours = {
        "grpo": {seed: run(0.25) for seed in (0, 1, 2, 3)},
        "gigpo": {seed: run(0.25 + 0.2 * (seed + 1)) for seed in (0, 1, 2)},
    }
    text = difference(ours, "sokoban", SAMPLED)
    assert "seeds 0, 1, 2:" in text
    assert text.endswith("difference +0.200 ± 0.248 (+0.100, +0.200, +0.300)")
    assert difference({"gigpo": {0: run(0.5)}}, "sokoban", SAMPLED) == "sokoban, sampled: 0 pairs of runs"
    assert table("sokoban", ours)[2:] == [
        "| GRPO | 0, 1, 2, 3 | "
        + ", ".join(["0.25 → 0.25"] * 4)
        + " | "
        + ", ".join(["0.25 → 0.25"] * 4)
        + " | "
        + ", ".join(["20000"] * 4)
        + " | 60 + 90 |",
        "| GiGPO | 0, 1, 2 | 0.25 → 0.45, 0.25 → 0.65, 0.25 → 0.85 | 0.25 → 0.45, 0.25 → 0.65, 0.25 → 0.85 "
        "| 20000, 20000, 20000 | 60 + 90 |",
    ]


def test_quantiles_are_students() -> None:
    """P(|t| < q) = 0.95, by integrating the density."""
    import torch

    for freedom, quantile in QUANTILES.items():
        density = torch.distributions.StudentT(float(freedom)).log_prob
        points = torch.linspace(-quantile, quantile, 200_001, dtype=torch.float64)
        assert float(torch.trapezoid(density(points).exp(), points)) == pytest.approx(0.95, abs=5e-5)
