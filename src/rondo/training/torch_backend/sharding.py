"""FSDP2 around a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rondo.config.schema import EngineConfig, FrozenEngineConfig, TorchBackendConfig
from rondo.models.precision import kept_in_float32
from rondo.training.torch_backend.activations import checkpoint_blocks, tile_mlps
from rondo.training.torch_backend.head import TokenModel
from rondo.training.views import Views


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
    """Returns the transformer blocks, by the class names that transformers says must not be split."""
    names = set(getattr(model.lm, "_no_split_modules", None) or ())
    return [module for module in model.lm.modules() if type(module).__name__ in names]
