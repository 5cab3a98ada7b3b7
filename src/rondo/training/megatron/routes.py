"""A mixture's routers where each rank has some of the layers, and some of the tokens of its rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rondo.config.schema import RouterConfig
from rondo.models.context import Context
from rondo.models.routers import routers_of
from rondo.training.megatron.stage import ModelStage
from rondo.training.packed import PackedRows
from rondo.training.passes import Passes, RecordedRoutes
from rondo.training.torch_backend.routing import Again, Parts, Routing, check_router
from rondo.training.views import Views


def routing_of(
    lm: PreTrainedModel, config: RouterConfig, views: Views, device: torch.device, stage: ModelStage
) -> Routing | None:
    """Returns what watches the routers of this stage's layers; None: the model has none. lm: on meta, or with
    weights that nobody computes with.
    """
    routers = {router.layer: router for router in routers_of(lm)}
    if not routers:
        return None
    check_router(lm, config, lora=False, tiles=False)
    for layer, gate in stage.routers():
        routers[layer] = dataclasses.replace(routers[layer], module=gate, block=gate)
    # Between their products tensor ranks divide the tokens that context ranks have left them.
    axes = [] if views.context is None else [views.context]
    if views.tensor is not None:
        axes.append(Context(views.tensor.get_group(), views.tensor.get_local_rank(), views.tensor.size()))
    kind = lm.config.get_text_config().model_type
    return Routing(list(routers.values()), kind, config, views, device, Parts(tuple(axes)))


def around_passes(
    routing: Routing | None, **what: Any
) -> Callable[[PackedRows], AbstractContextManager[Again]]:
    """Returns what has routers know of each pass: see `Routing.during`."""
    if routing is None:
        return lambda packed: contextlib.nullcontext(contextlib.nullcontext)
    return functools.partial(routing.during, **what)


def count_ahead(routing: Routing, passes: Passes, stage: ModelStage) -> None:
    """Begins a mini-batch, whose tokens are counted ahead where the loss that balances wants that."""
    routing.begin(passes.num_rows)
    if routing.counts_first:
        around = around_passes(routing, counts=True)
        with torch.no_grad():
            stage.run(passes.without_topk(), len(passes), _nothing, around, backward=False)
        routing.counted()


def _nothing(hidden: torch.Tensor, packed: PackedRows) -> torch.Tensor:
    return hidden.sum() * 0.0


class StageRoutes:
    """The routes of a stage's layers, as they come pass by pass, of each of its chunks."""

    def __init__(self) -> None:
        self._passes: dict[tuple[int, ...], tuple[PackedRows, torch.Tensor]] = {}

    def add(self, packed: PackedRows, routes: torch.Tensor) -> None:
        """See `RecordedRoutes.add`. routes: 0 in the layers of others."""
        rows = tuple(packed.rows)
        if rows in self._passes:
            routes = routes + self._passes[rows][1]
        if rows:  # it is no dummy
            self._passes[rows] = packed, routes

    def told_to(self, recorded: RecordedRoutes, stages: dist.ProcessGroup) -> None:
        """Adds those of all stages. Collective over them."""
        for packed, routes in self._passes.values():
            dist.all_reduce(routes, group=stages)
            recorded.add(packed, routes)
