"""80/20: the reference's example, PPO where all tokens are kept, ties and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rondo.algorithms.policy_losses.top_entropy import least_sure
from rondo.core.errors import ConfigError
from tests.algorithms.policy_losses import D, evaluate, random_columns


def weights(entropy: list[list[float]], mask: list[list[float]] | None = None, **options: Any) -> Any:
    there = torch.ones(len(entropy), len(entropy[0])) if mask is None else torch.tensor(mask)
    return least_sure(torch.tensor(entropy), there, **options)["entropy_weight"].tolist()


def test_the_references_example() -> None:
    """H = x = .1 … 1.0, a fifth: the last two; divided by these .95, by all .19."""
    tenths = [i / 10 for i in range(1, 11)]
    for divide, mean in (("kept", 0.95), ("all", 0.19)):
        (row,) = weights([tenths], divide=divide)
        assert [weight > 0 for weight in row] == [False] * 8 + [True] * 2
        assert sum(w * x for w, x in zip(row, tenths, strict=True)) / 10 == pytest.approx(mean)


@pytest.mark.parametrize(("number", "kept"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_how_many_are_kept(number: int, kept: int) -> None:
    (row,) = weights([[float(i) for i in range(number)]])
    assert sum(weight > 0 for weight in row) == kept
    assert sum(row) == pytest.approx(number)


def test_tokens_without_a_loss_are_no_candidates_and_ties_go_to_the_earlier() -> None:
    made = weights([[9.0, 1.0, 1.0], [1.0, 0.5, 9.0]], [[0.0, 1, 1], [1, 1, 0]], share=0.5, divide="all")
    assert made == [[0, 1, 1], [0, 0, 0]]


def test_with_all_tokens_it_is_ppo() -> None:
    columns = random_columns()
    given = {name: column for name, column in columns.items() if name != "log_probs"}
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    ours = evaluate("top_entropy", columns["log_probs"], {}, **given, entropy_weight=torch.ones(10))
    theirs = evaluate("ppo_clip", columns["log_probs"], clip, **given)
    torch.testing.assert_close(ours[:2], theirs[:2])
    kept = evaluate("top_entropy", D([-0.5] * 4), {}, entropy_weight=D([0, 5, 0, 0]))
    assert kept[0].tolist() == [0, -5, 0, 0]
    assert [one.item() for one in kept[2]["actor/entropy_kept"]] == [1, 4]


@pytest.mark.parametrize("options", [{"share": 0.0}, {"share": 1.1}, {"divide": "some"}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss"):
        weights([[1.0, 2.0]], **options)
