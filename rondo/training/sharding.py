"""FSDP2 around a model, and full tensors out of its shards."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rondo.training.head import TokenModel


def shard_model(
    model: TokenModel, mesh: DeviceMesh, compute_dtype: torch.dtype, *, gradient_checkpointing: bool
) -> None:
    """Shard over the mesh's one axis, block by block; gradients are summed over ranks, not averaged.

    Parameters are cast to compute_dtype for the forward and backward pass; gradients are reduced in the
    parameters' own dtype. The value head keeps its own dtype. On one rank there is nothing to gather, so the
    whole model is one unit.
    """
    param_dtype = next(model.parameters()).dtype
    cast = compute_dtype if compute_dtype != param_dtype else None
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=param_dtype)
    blocks = _blocks(model)
    if gradient_checkpointing:
        for block in blocks:
            # Around `forward`, inside of FSDP's hooks: what is computed again finds its parameters gathered.
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )
    if model.value_head is not None:
        fully_shard(model.value_head, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    if mesh.size() > 1:
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _blocks(model: TokenModel) -> list[torch.nn.Module]:
    """The transformer blocks, by the class names that transformers must not split."""
    names = set(getattr(model.lm, "_no_split_modules", None) or ())
    return [module for module in model.lm.modules() if type(module).__name__ in names]


def gather_buckets(
    shards: Mapping[str, DTensor], group: dist.ProcessGroup, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of every shard, gathered in buckets of at most `bucket_bytes`. Collective."""
    world = dist.get_world_size(group)
    if world == 1:
        yield from ((name, shard.to_local().detach()) for name, shard in shards.items())
        return
    bucket: list[str] = []
    size = 0
    for name, shard in shards.items():
        num_bytes = shard.numel() * shard.element_size()
        fits = size + num_bytes <= bucket_bytes and (not bucket or shards[bucket[0]].dtype == shard.dtype)
        if bucket and not fits:
            yield from _gather(bucket, shards, group, world)
            bucket, size = [], 0
        bucket.append(name)
        size += num_bytes
    if bucket:
        yield from _gather(bucket, shards, group, world)


def _gather(
    bucket: list[str], shards: Mapping[str, DTensor], group: dist.ProcessGroup, world: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """One all-gather for a bucket. Every rank holds ceil(rows / world) rows of a parameter, the last ones
    fewer.
    """
    pieces, sizes = [], []
    for name in bucket:
        local = shards[name].to_local().detach()
        padded = local.new_zeros(-(-shards[name].shape[0] // world), *shards[name].shape[1:])
        padded[: local.shape[0]] = local
        pieces.append(padded.flatten())
        sizes.append(padded.numel())
    mine = torch.cat(pieces)
    everyone = mine.new_empty(world * mine.numel())
    dist.all_gather_into_tensor(everyone, mine, group=group)
    columns = everyone.view(world, -1).split(sizes, dim=1)
    for name, column in zip(bucket, columns, strict=True):
        shape = shards[name].shape
        yield name, column.reshape(-1, *shape[1:])[: shape[0]]
