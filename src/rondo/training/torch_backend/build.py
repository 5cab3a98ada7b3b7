"""A model made ready for training on this rank: its part of each parameter along every axis, sharded by
FSDP2, and read from the files that it comes from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rondo.config.schema import EngineConfig, FrozenEngineConfig, TorchBackendConfig
from rondo.core.errors import ConfigError
from rondo.models.attention import fitting
from rondo.models.family import family_of, record_of
from rondo.models.loading import Kernels, build_empty, model_on_meta
from rondo.models.lora import adapted_name
from rondo.models.names import Parts, parts_of
from rondo.models.nf4 import check_nf4
from rondo.models.pixels import ImageReader
from rondo.models.precision import kept_in_float32
from rondo.models.stored import StoredModel, materialise
from rondo.models.value_head import replace_lm_head
from rondo.platform import on_host
from rondo.training.adapters import learns_with_adapters
from rondo.training.backend import Head, ModelSpec
from rondo.training.packed import PackedLayout
from rondo.training.torch_backend.activations import checkpoint_blocks, lean_mlps, tile_mlps
from rondo.training.torch_backend.adapters import Adapters
from rondo.training.torch_backend.axes import check_axes
from rondo.training.torch_backend.head import TokenModel, check_fused, check_head
from rondo.training.torch_backend.parallel import parallelise
from rondo.training.torch_backend.routing import Routing, check_router
from rondo.training.views import Views

_log = logging.getLogger(__name__)
_LOADED_WHOLE = "model %s: not in the form that save_pretrained writes, so each of %d ranks loaded all of it"


@dataclass(frozen=True)
class BuiltModel:
    """A model, and what its engine needs to know of it."""

    model: TokenModel
    """The module."""
    units: list[FSDPModule]
    """The modules that FSDP wraps."""
    parts: Parts
    """How its tensors become a checkpoint's."""
    packing: PackedLayout
    """How its documents are laid out."""
    adapters: Adapters | None
    """Its LoRA adapters; None: all parameters are trained."""
    routing: Routing | None
    """What replays and watches a mixture's routers; None: it has none, or is not trained."""
    stored: StoredModel | None
    """What it is to be read from; None: its weights are there."""


def check_settings(engine: FrozenEngineConfig, head: Head, ranks: int, device: str | torch.device) -> None:
    """Raises ConfigError for settings, without `auto`, with which no model can be built on so many ranks."""
    lora = engine.lora if isinstance(engine, EngineConfig) else None
    if lora is not None and lora.base_dtype is not None:
        check_nf4(engine.param_dtype, engine.compute_dtype, ranks)
    if head == "lm" and engine.logits_bytes is None:
        check_fused(torch.device(device), getattr(torch, engine.compute_dtype))


def check_model_spec(spec: ModelSpec) -> None:
    """Raises ConfigError or DataError for a model that cannot be built as its settings say, or not be
    exported. Nothing of its weights is made or read.
    """
    adapters = _adapted(spec, model_on_meta(spec.source), torch.device("cpu"))
    if adapters is not None:
        adapters.check_export()


def _check_frozen(spec: ModelSpec, model_type: str) -> tuple[str, ...]:
    """Returns the parts of the model that do not learn. Raises ConfigError where it has none, where nothing
    would learn, or beside adapters.
    """
    engine = spec.config
    if not isinstance(engine, EngineConfig) or not engine.freeze:
        return ()
    why = ""
    if record_of(model_type).images is None:
        why = f"a {model_type} model has no parts for images; remove the key"
    elif engine.lora is not None:
        why = "beside lora nothing but adapters learns; remove one of the two"
    elif len({*engine.freeze}) == 3 and spec.head == "lm":
        why = "nothing would learn; leave a part out"
    if why:
        raise ConfigError(f"freeze={','.join(engine.freeze)}: {why}", key="freeze")
    return engine.freeze


def shares_of(
    names: Iterable[str], of_parts: Mapping[Any, float], images: ImageReader | None
) -> dict[str, float]:
    """Returns what the learning rate of parameters is multiplied with, by name. Raises ConfigError for a part
    that none of them belongs to: the model has no images, or the part does not learn.
    """
    if not of_parts:
        return {}
    part_of = {} if images is None else {name: images.family.part_of(adapted_name(name)) for name in names}
    for part in of_parts:
        if part not in part_of.values():
            raise ConfigError(
                f"optimizer.lr_of_parts: nothing learns that is of the {part}: the model has no parts for "
                "images, or the part is in freeze, or has no adapters (lora.parts); remove it",
                key="optimizer.lr_of_parts",
            )
    return {name: of_parts[part] for name, part in part_of.items() if part in of_parts}


def _adapted(spec: ModelSpec, lm: PreTrainedModel, device: torch.device) -> Adapters | None:
    """Puts adapters into a model, if it gets any. Raises ConfigError for a model that cannot be what its
    settings say. It may be on `meta`.
    """
    engine, backend = spec.config, spec.backend
    assert isinstance(backend, TorchBackendConfig)
    if not isinstance(engine, EngineConfig):
        return None
    _check_frozen(spec, str(lm.config.model_type))
    check_router(lm, engine.router, lora=engine.lora is not None, tiles=backend.mlp_chunk is not None)
    return None if engine.lora is None else Adapters(lm, engine.lora, spec.source, device)


def build_sharded(spec: ModelSpec, views: Views, device: torch.device) -> BuiltModel:
    """Builds a model whose parameters have memory on the device, this rank's part of each, and, where
    `stored` says so, nothing in it yet. spec: its config without `auto`. Raises ConfigError, DataError.
    """
    source, engine, backend = spec.source, spec.config, spec.backend
    assert isinstance(backend, TorchBackendConfig)
    trained = spec.optimizer is not None
    dtype, compute_dtype = getattr(torch, engine.param_dtype), getattr(torch, engine.compute_dtype)
    sizes = views.sizes
    check_settings(engine, spec.head, views.size, device)
    kernels: Kernels = backend.kernels
    if kernels == "auto" and (sizes.tensor, sizes.context) != (1, 1):
        kernels = "norms"  # leaner attention multiplies with whole weights, and needs all tokens
    lm, stored = build_empty(source, dtype, device, kernels, output_head=spec.head == "lm")
    check_axes(lm.config, sizes)
    text, family, parts = lm.config.get_text_config(), family_of(lm.config), parts_of(lm)
    value_head = None
    if spec.head == "value":
        wide = torch.promote_types(dtype, torch.float32)
        value_head = replace_lm_head(lm, source.path, wide).to(device)
    else:
        check_head(lm, family.logits)
    adapters = _adapted(spec, lm, device)
    attention = fitting(source.attention, text)
    model = TokenModel(
        lm,
        value_head,
        temperature=spec.temperature,
        logits_bytes=engine.logits_bytes,
        transform=family.logits,
        vocabulary=views.vocabulary(text.vocab_size),
    )
    frozen = _check_frozen(spec, str(lm.config.model_type))
    for name, parameter in model.named_parameters():
        learns = adapters is None or learns_with_adapters(name)
        if frozen and family.images is not None and name.startswith("lm."):
            learns = family.images.part_of(name.removeprefix("lm.")) not in frozen
        parameter.requires_grad_(trained and learns)
    experts = parallelise(lm, views)
    on_a_laptop = trained and views.size == 1 and on_host(device)
    again = isinstance(engine, EngineConfig) and engine.gradient_checkpointing
    if on_a_laptop and not again and backend.mlp_chunk is None:
        lean_mlps(_blocks(model))
    units = shard_model(model, views, experts, compute_dtype, engine, backend)
    materialise(model, device)
    if on_a_laptop and not units and dtype.itemsize >= 4:
        model.add_gradients()
    routing = None
    if trained and isinstance(engine, EngineConfig):
        routing = Routing.of(lm, engine.router, views, device)
    if stored is None and source.path is not None and views.size > 1:
        _log.warning(_LOADED_WHOLE, source.path, views.size)
    reader = ImageReader(source, lm.config) if family.images is not None else None
    packing = PackedLayout(family, device, compute_dtype, attention, views.context, reader)
    return BuiltModel(model, units, parts, packing, adapters, routing, stored)


# ---- FSDP2 around a model ----


def shard_model(
    model: TokenModel,
    views: Views,
    experts: Sequence[torch.nn.Module],
    compute_dtype: torch.dtype,
    engine: FrozenEngineConfig,
    backend: TorchBackendConfig,
) -> list[FSDPModule]:
    """Shards what is left of each parameter, block by block; gradients are summed over ranks, not averaged.
    Returns the units that are gathered each for itself. experts: modules that are spread over the view of
    experts.

    Parameters are cast to compute_dtype for the forward and backward pass; gradients are reduced in the
    parameters' own dtype. The value head, and what transformers keeps in float32 (`kept_in_float32`), are not
    cast. On one rank that casts nothing the model stays as it is (FSDP would copy all parameters and all
    gradients); one that casts does so a block at a time.
    """
    param_dtype = next(model.parameters()).dtype
    cast = compute_dtype if compute_dtype != param_dtype else None
    # Of what learns: adapters are in float32 beside a model in half precision.
    learned = next((p.dtype for p in model.parameters() if p.requires_grad), param_dtype)
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=learned)
    blocks = _blocks(model)
    tile_mlps(blocks, backend.mlp_chunk, exchanging=bool(experts))
    if isinstance(engine, EngineConfig):
        checkpoint_blocks(blocks, engine.gradient_checkpointing)
    if views.size == 1 and cast is None:
        return []
    mesh = views.shards
    for module in _precise_modules(model, {param_dtype, compute_dtype}):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for module in experts:
        fully_shard(module, mesh=views.expert_shards, mp_policy=policy, reshard_after_forward=backend.reshard)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=backend.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)
        if views.size > 1:  # on one rank torch divides even by 1: one more copy of all gradients
            unit.set_gradient_divide_factor(1.0)
    return units


def _precise_modules(model: TokenModel, dtypes: Iterable[torch.dtype]) -> list[torch.nn.Module]:
    """Returns the modules whose parameters compute in their own dtype, inner ones first, as FSDP must wrap
    them. dtypes: of the others, at rest and in the forward pass (a unit of FSDP has parameters of one dtype).
    """
    kept = frozenset().union(*(kept_in_float32(model.lm, dtype) for dtype in dtypes))
    owners = {name.rpartition(".")[0] for name in kept}
    inner_first = sorted(owners, key=lambda name: -name.count("."))
    modules = [model.lm.get_submodule(name) for name in inner_first]
    return modules if model.value_head is None else [*modules, model.value_head]


def _blocks(model: TokenModel) -> list[torch.nn.Module]:
    """Returns the transformer blocks, by the class names that transformers says must not be split: of some
    towers it names the attention, and the block is what is around it.
    """
    names, blocks = set(getattr(model.lm, "_no_split_modules", None) or ()), []
    for name, module in model.lm.named_modules():
        if type(module).__name__ in names:
            around = model.lm.get_submodule(name.rpartition(".")[0])
            blocks.append(around if isinstance(around, GradientCheckpointingLayer) else module)
    return list(dict.fromkeys(blocks))
