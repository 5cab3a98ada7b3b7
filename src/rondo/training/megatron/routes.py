"""A mixture's routers where each rank has some of the layers, and some of the tokens of its rows."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rondo.config.schema import RouterConfig
from rondo.models.context import Context
from rondo.models.routers import routers_of
from rondo.training.megatron.stage import ModelStage
from rondo.training.packed import PackedRows
from rondo.training.passes import Passes, RecordedRoutes
from rondo.training.torch_backend.routing import Around, Parts, Routing, around_passes, check_router
from rondo.training.views import Views


def routing_of(
    lm: PreTrainedModel,
    config: RouterConfig,
    views: Views,
    device: torch.device,
    stage: ModelStage,
    *,
    lora: bool,
) -> Routing | None:
    """Returns what watches the routers of this stage's layers; None: the model has none. lm: on meta, or with
    weights that nobody computes with.
    """
    routers = {router.layer: router for router in routers_of(lm)}
    if not routers:
        return None
    check_router(lm, config, lora=lora, tiles=False)
    for layer, gate in stage.routers():
        routers[layer] = dataclasses.replace(routers[layer], module=gate, block=gate)
    # Between their products tensor ranks divide the tokens that context ranks have left them.
    axes = [] if views.context is None else [views.context]
    if views.tensor is not None:
        axes.append(Context(views.tensor.get_group(), views.tensor.get_local_rank(), views.tensor.size()))
    kind = lm.config.get_text_config().model_type
    return Routing(list(routers.values()), kind, config, views, device, Parts(tuple(axes)))


def count_ahead(routing: Routing, passes: Passes, stage: ModelStage) -> None:
    """Begins a mini-batch: see `Routing.begin`."""

    def ahead(around: Around) -> None:
        stage.run(passes.without_topk(), len(passes), _nothing, around, backward=False)

    routing.begin(passes.num_rows, ahead)


def _nothing(hidden: torch.Tensor, packed: PackedRows) -> torch.Tensor:
    return hidden.sum() * 0.0


class StageRoutes:
    """Has the routers of a stage know of its passes, and keeps the routes of its layers, as they come pass by
    pass, of each of its chunks.
    """

    def __init__(self, routing: Routing | None, recorded: RecordedRoutes | None, *, counts: bool) -> None:
        self._recorded = recorded
        self._passes: dict[tuple[int, ...], tuple[PackedRows, torch.Tensor]] = {}
        self.around = around_passes(routing, counts=counts, recorded=None if recorded is None else self)
        """Surrounds each pass."""

    def add(self, packed: PackedRows, routes: torch.Tensor) -> None:
        """See `RecordedRoutes.add`. routes: 0 in the layers of others."""
        rows = tuple(packed.rows)
        if rows in self._passes:
            routes = routes + self._passes[rows][1]
        if rows:  # it is no dummy
            self._passes[rows] = packed, routes

    def tell(self, stages: dist.ProcessGroup) -> None:
        """Records those of all stages, where anybody wants them. Collective over the stages."""
        for packed, routes in self._passes.values():
            assert self._recorded is not None
            dist.all_reduce(routes, group=stages)
            self._recorded.add(packed, routes)
