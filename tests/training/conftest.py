"""A one-rank mesh in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.training.helpers import one_rank_mesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    ours = not dist.is_initialized()
    yield one_rank_mesh()
    if ours:
        dist.destroy_process_group()
