"""Layouts of several parallel axes over the ranks of a test, and each rank's rows of a batch."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rondo.config.schema import ParallelConfig
from rondo.controller import Mesh, WorkerContext
from rondo.controller.distributed import Groups, axis_groups
from rondo.planning.batches import balance
from rondo.training.views import Views
from rondo.workers.models import views_of
from tests.training.helpers import make_batch, with_groups


@functools.cache
def context_of(world: int, sizes: tuple[tuple[str, int], ...], device: str = "cpu") -> WorkerContext:
    """The groups of such a layout of the first `world` ranks. Collective over all that there are."""
    mesh, ranks, known = Mesh.parallel(world, ParallelConfig(**dict(sizes))), range(world), _GROUPS
    groups = {
        name: axis_groups(axes, ranks, known, timedelta(seconds=240)) for name, axes in mesh.grids.items()
    }
    return WorkerContext(
        role="actor",
        rank=dist.get_rank(),
        world_size=world,
        device=device,
        threads=1,
        peers={},
        mesh=mesh,
        ranks=tuple(ranks),
        groups=groups,
    )


_GROUPS: Groups = {}


def layout(world: int, device: str = "cpu", **sizes: int) -> tuple[Views, int, int]:
    """The views of this rank, and which of how many cuts of the rows it gets. Collective."""
    context = context_of(world, tuple(sorted(sizes.items())), device)
    return views_of(context), context.mesh.dp_shards[context.rank], context.mesh.axis_size("dp")


def rows_of(index: int, count: int, seed: int = 0) -> Any:
    """One of `count` parts of the batch; some of its prompts are shared, or not, as the cut falls."""
    batch = with_groups(make_batch(seed=seed), (4, 3))
    costs = batch.lengths("prompt_ids") + batch.lengths("response_ids")
    return batch.take(balance(costs, count)[index])
