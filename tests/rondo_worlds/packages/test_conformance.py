"""Environments of other packages keep the promises, too."""

from __future__ import annotations

import pytest

from rondo.environments import check_environment
from rondo.environments.registry import environment_class
from tests.installed import needs, needs_programs
from tests.rondo_worlds.shipped import SHIPPED, Shipped


@pytest.mark.parametrize(("name", "shipped"), [pair for pair in SHIPPED if pair[1].packages])
def test_promises_are_kept(name: str, shipped: Shipped) -> None:
    needs(*shipped.packages)
    needs_programs(*shipped.programs)
    made = shipped.make()
    assert isinstance(made, environment_class(name, "here"))
    made.close()
    check_environment(shipped.make, seeds=range(shipped.seeds), act=shipped.act, steps=shipped.steps)
