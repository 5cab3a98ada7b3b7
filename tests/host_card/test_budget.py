"""What each verb asks of a card stays within the limits of benchmarks/cards.py; a wait has its line."""

from __future__ import annotations

import pytest

import cards
from tests.host_card import on_the_host_card

pytestmark = on_the_host_card


@pytest.fixture(scope="module")
def costs() -> dict[str, cards.Cost]:
    return cards.costs()


@pytest.mark.parametrize("verb", list(cards.LIMITS))
def test_a_verb_stays_within_its_limits(costs: dict[str, cards.Cost], verb: str) -> None:
    cost, limit = costs[verb], cards.LIMITS[verb]
    assert costs.keys() == cards.LIMITS.keys()
    for what in ("reads", "copies_in"):
        lines = getattr(cost, what)
        assert lines.total() <= getattr(limit, what), f"{what} of {verb}: {lines.most_common()}"
    assert 0.9 * limit.kernels <= cost.kernels <= limit.kernels


def test_reads_do_not_grow_with_micro_batches(costs: dict[str, cards.Cost]) -> None:
    one, four = (costs[f"forward_backward{more}"] for more in ("", ", 4 micro-batches"))
    assert one.reads == four.reads
    assert four.kernels > 3.5 * one.kernels
