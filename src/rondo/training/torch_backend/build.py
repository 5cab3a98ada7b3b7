"""A model made ready for training on this rank: its part of each parameter along every axis, sharded by
FSDP2, and read from the files that it comes from.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.fsdp import FSDPModule

from rondo.config.schema import EngineConfig, FrozenEngineConfig, TorchBackendConfig
from rondo.models.attention import fitting
from rondo.models.family import family_of
from rondo.models.loading import Kernels, build_empty
from rondo.models.names import Parts, parts_of
from rondo.models.nf4 import check_nf4
from rondo.models.source import ModelSource
from rondo.models.stored import StoredModel, materialise
from rondo.models.value_head import replace_lm_head
from rondo.training.packed import PackedLayout
from rondo.training.torch_backend.adapters import Adapters
from rondo.training.torch_backend.axes import check_axes
from rondo.training.torch_backend.head import TokenModel, check_fused, check_head
from rondo.training.torch_backend.parallel import parallelise
from rondo.training.torch_backend.routing import Routing, check_router
from rondo.training.torch_backend.sharding import shard_model
from rondo.training.views import Views

_log = logging.getLogger(__name__)
_LOADED_WHOLE = "model %s: not in the form that save_pretrained writes, so each of %d ranks loaded all of it"


@dataclass(frozen=True)
class Built:
    """A model, and what its engine needs to know of it. units: of FSDP. stored: what it is to be read from;
    None: it is there.
    """

    model: TokenModel
    units: list[FSDPModule]
    parts: Parts
    packing: PackedLayout
    adapters: Adapters | None
    routing: Routing | None
    stored: StoredModel | None


def build_sharded(
    source: ModelSource,
    engine: FrozenEngineConfig,
    backend: TorchBackendConfig,
    views: Views,
    device: torch.device,
    *,
    head: Literal["lm", "value"],
    temperature: float,
    trained: bool,
) -> Built:
    """Builds a model whose parameters have memory on the device, this rank's part of each, and, where
    `stored` says so, nothing in it yet. engine: without `auto`. Raises ConfigError, DataError.
    """
    dtype, compute_dtype = getattr(torch, engine.param_dtype), getattr(torch, engine.compute_dtype)
    lora, sizes = engine.lora if isinstance(engine, EngineConfig) else None, views.sizes
    if lora is not None and lora.base_dtype is not None:
        check_nf4(engine.param_dtype, engine.compute_dtype, views.size)
    kernels: Kernels = backend.kernels
    if kernels == "auto" and (sizes.tensor, sizes.context) != (1, 1):
        kernels = "norms"  # leaner attention multiplies with whole weights, and needs all tokens
    lm, stored = build_empty(source, dtype, device, kernels, output_head=head == "lm")
    check_axes(lm.config, sizes)
    if isinstance(engine, EngineConfig):
        check_router(lm, engine.router, lora=lora is not None, tiles=backend.mlp_chunk is not None)
    text, family, parts = lm.config.get_text_config(), family_of(lm.config), parts_of(lm)
    value_head = None
    if head == "value":
        wide = torch.promote_types(dtype, torch.float32)
        value_head = replace_lm_head(lm, source.path, wide).to(device)
    else:
        check_head(lm, family.logits)
        if engine.logits_bytes is None:
            check_fused(device, compute_dtype)
    adapters = None if lora is None else Adapters(lm, lora, source, device)
    attention = fitting(source.attention, lm.config)
    model = TokenModel(
        lm,
        value_head,
        temperature=temperature,
        logits_bytes=engine.logits_bytes,
        transform=family.logits,
        vocabulary=views.vocabulary(text.vocab_size),
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained and (adapters is None or adapters.learns(name)))
    experts = parallelise(lm, views)
    units = shard_model(model, views, experts, compute_dtype, engine, backend)
    materialise(model, device)
    routing = None
    if trained and isinstance(engine, EngineConfig):
        routing = Routing.of(lm, engine.router, views, device)
    if stored is None and source.path is not None and views.size > 1:
        _log.warning(_LOADED_WHOLE, source.path, views.size)
    packing = PackedLayout(family, device, compute_dtype, attention, views.context)
    return Built(model, units, parts, packing, adapters, routing, stored)
