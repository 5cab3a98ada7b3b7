"""A one-rank mesh in the test's own process."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.training.helpers import one_rank_mesh


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return one_rank_mesh()
