"""The lower bound of a run's memory: what it adds up, and when it refuses."""

from __future__ import annotations

import pytest

from rondo.core.errors import ConfigError
from rondo.planning.memory import Need, check_fits, model_bytes

GIB = 1 << 30


def test_a_model_that_is_trained_is_held_four_times() -> None:
    assert model_bytes(1000, 2) == 2000
    assert model_bytes(1000, 4, "full") == 16_000
    assert model_bytes(1000, 4, "8bit") == 10_000


def test_the_largest_owner_is_named_first_and_is_what_to_lower() -> None:
    needs = [
        Need("rows", GIB, ("data.batch_size",)),
        Need("actor", 6 * GIB, ("a", "b")),
        Need("none", 0, ("c",)),
    ]
    check_fits(needs, 7 * GIB, "memory")
    with pytest.raises(ConfigError) as caught:
        check_fits(needs, 7 * GIB - 1, "memory")
    assert "at least 7.00 GiB of memory" in str(caught.value)
    assert "actor 6.00, rows 1.00; lower a or b" in str(caught.value)
    assert caught.value.key == "a"
