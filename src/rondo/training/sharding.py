"""FSDP2 around a model, and full tensors out of its shards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from rondo.config.schema import TorchBackendConfig
from rondo.errors import ConfigError
from rondo.models.precision import kept_in_float32
from rondo.training.activations import checkpoint_blocks, tile_mlps
from rondo.training.head import TokenModel
from rondo.weights.checksum import box_checksum, combine, signed
from rondo.weights.layout import Box, Layout, Parameter


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh's one axis of size above 1. Raises ConfigError where it is not dp."""
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names or ()
    other = [name for i, name in enumerate(names) if name != "dp" and mesh.size(i) > 1]
    if "dp" not in names or other:
        raise ConfigError(
            f"FSDP splits over axis dp only; the mesh is {dict(zip(names, mesh.shape, strict=False))}"
        )
    return mesh["dp"]


def shard_model(
    model: TokenModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    gradient_checkpointing: bool | str,
    backend: TorchBackendConfig,
) -> list[FSDPModule]:
    """Shards over the mesh's one axis, block by block; gradients are summed over ranks, not averaged. Returns
    the units that are gathered each for itself.

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
    tile_mlps(blocks, backend.mlp_chunk)
    checkpoint_blocks(blocks, gradient_checkpointing)
    if mesh.size() == 1 and cast is None:
        return []
    for module in _precise_modules(model, {param_dtype, compute_dtype}):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=backend.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:  # on one rank torch divides even by 1: one more copy of all gradients
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


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, or the tensor where it is not sharded; shares its storage."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def moved(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Returns a tensor on a device; itself where it is there already, or device is None. What comes from a
    CUDA device to host memory is pinned there, which makes copies between the two fast.
    """
    if device is None or tensor.device == device:
        return tensor
    if tensor.device.type == "cuda" and device.type == "cpu":
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)
    return tensor.to(device)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in host memory, sharded as the tensor is."""
    local = local_of(tensor)
    copy = local.clone() if local.device.type == "cpu" else moved(local, torch.device("cpu"))
    return as_shard(tensor, copy, tensor.device_mesh) if isinstance(tensor, DTensor) else copy


def as_shard(
    like: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...] | None = None
) -> DTensor:
    """Returns `local`, wherever it rests, as this rank's part of a tensor that is sharded as `like` is (one
    that is not is whole on the mesh's one rank). The result shares the storage of `local`.

    shape: of the whole, where it has rows of another length than `like`.
    """
    placements = like.placements if isinstance(like, DTensor) else [Shard(0)]
    where = _mesh_at(local, mesh)
    strides = like.stride() if shape is None else local.stride()  # rows are shared out: they are alike
    tensor = DTensor.from_local(
        local, where, placements, run_check=False, shape=shape or like.shape, stride=strides
    )
    assert tensor.to_local().data_ptr() == local.data_ptr()
    return tensor


def _mesh_at(local: torch.Tensor, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh where the tensor rests: from_local would copy it to the device of another one."""
    if mesh.device_type == local.device.type:
        return mesh
    return DeviceMesh.from_group(mesh.get_group(), local.device.type, mesh_dim_names=mesh.mesh_dim_names)


def replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns a tensor that every rank has, as one of the mesh; shares its storage."""
    return DTensor.from_local(tensor, _mesh_at(tensor, mesh), [Replicate()], run_check=False)


def is_replicated(shard: DTensor) -> bool:
    return shard.placements[0].is_replicate()


def wire_dtypes(model: PreTrainedModel, shards: Mapping[str, DTensor], dtype: str | None) -> dict[str, str]:
    """Returns in which dtype each tensor is sent where the others are in `dtype`: some stay precise. None
    means their own.
    """
    own = {name: str(shard.dtype).removeprefix("torch.") for name, shard in shards.items()}
    if dtype is None:
        return own
    kept = kept_in_float32(model, getattr(torch, dtype))
    return {
        name: own[name] if name in kept or is_replicated(shard) else dtype for name, shard in shards.items()
    }


def layout_of(shards: Mapping[str, DTensor], group: dist.ProcessGroup, wire: Mapping[str, str]) -> Layout:
    """Says which rank of the world holds what. wire: the dtype in which each tensor is sent."""
    parameters = [Parameter(name, tuple(shard.shape), wire[name]) for name, shard in shards.items()]
    everywhere = {name for name, shard in shards.items() if is_replicated(shard)}
    return Layout.sharded(parameters, dist.get_process_group_ranks(group), everywhere)


def boxes_here(
    layout: Layout, rows: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, Box, tuple[int, ...]]]:
    """Yields what this rank holds: (name, rows, their box, the shape of the whole) each, in the layout's
    dtype: the storage itself where that is its own.
    """
    for one in layout.parameters:
        for box in layout.held(dist.get_rank(), one.name):
            yield one.name, rows[one.name].to(getattr(torch, one.dtype)), box, one.shape


class LocalRows(Mapping[str, torch.Tensor]):
    """This rank's rows of shards: the storage itself."""

    def __init__(self, shards: Mapping[str, DTensor]) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._shards[name].to_local().detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def checksums_of(
    shards: Mapping[str, DTensor],
    group: dist.ProcessGroup,
    wire: Mapping[str, str],
    rows: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, int]:
    """Returns the checksums of the whole tensors, at wire dtype; every rank reads only its own rows, and the
    first what all have. Collective. rows: this rank's, where they are not those of the shards.
    """
    rows = LocalRows(shards) if rows is None else rows
    layout, rank, partial = layout_of(shards, group, wire), dist.get_rank(), []
    for parameter in layout.parameters:
        local = rows[parameter.name].to(getattr(torch, parameter.dtype))
        boxes = layout.held(rank, parameter.name)
        if is_replicated(shards[parameter.name]) and rank != layout.ranks[0]:
            boxes = ()
        partial.append(box_checksum(local, boxes[0].offset, parameter.shape) if boxes else 0)
    device = next(iter(shards.values())).to_local().device
    sums = torch.tensor([signed(value) for value in partial], dtype=torch.int64, device=device)
    dist.all_reduce(sums, group=group)
    return {
        parameter.name: combine([value])
        for parameter, value in zip(layout.parameters, sums.tolist(), strict=True)
    }


def gather_buckets(
    shards: Mapping[str, DTensor],
    group: dist.ProcessGroup,
    bucket_bytes: int,
    wire: Mapping[str, str],
    rows: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of every shard, gathered in buckets of at most `bucket_bytes`. Collective.
    wire: the dtype in which each is sent; each rank casts its rows before they move. rows: as of
    `checksums_of`; read one by one.
    """
    world, rows = dist.get_world_size(group), LocalRows(shards) if rows is None else rows
    here = {name for name, shard in shards.items() if world == 1 or is_replicated(shard)}
    buckets = _buckets(layout_of(shards, group, wire), bucket_bytes, here)
    away = [bucket for bucket in buckets if bucket[0].name not in here]
    scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
    for bucket in buckets:
        if bucket[0].name in here:
            yield from ((one.name, rows[one.name].to(getattr(torch, one.dtype))) for one in bucket)
        else:
            yield from _gather(bucket, away, rows, world, group, scratch)


def _buckets(layout: Layout, bucket_bytes: int, here: Collection[str]) -> list[list[Parameter]]:
    """Returns runs of consecutive parameters of one dtype, each of at most `bucket_bytes` (or one parameter).
    Those that are here, and need no gathering, are in runs of their own.
    """
    buckets: list[list[Parameter]] = []
    size = 0
    for parameter in layout.parameters:
        kind = parameter.dtype, parameter.name in here
        alike = bool(buckets) and (buckets[-1][0].dtype, buckets[-1][0].name in here) == kind
        if not alike or size + parameter.num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.num_bytes
    return buckets


def _gather(
    bucket: list[Parameter],
    buckets: list[list[Parameter]],
    rows: Mapping[str, torch.Tensor],
    world: int,
    group: dist.ProcessGroup,
    scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers a bucket at once and yields its tensors. Every rank holds ceil(rows / world) rows of a
    parameter, the last ones fewer. scratch: of this rank's and of all ranks' part, allocated once for the
    largest of `buckets` (memory that comes and goes leaves holes).
    """
    dtype, sizes = getattr(torch, bucket[0].dtype), [_padded(parameter, world) for parameter in bucket]
    if dtype not in scratch:
        alike = [one for one in buckets if one[0].dtype == bucket[0].dtype]
        largest = max(sum(_padded(parameter, world) for parameter in one) for one in alike)
        device = rows[bucket[0].name].device
        scratch[dtype] = (
            torch.zeros(largest, dtype=dtype, device=device),
            torch.empty(largest * world, dtype=dtype, device=device),
        )
    mine, everyone = scratch[dtype][0][: sum(sizes)], scratch[dtype][1][: sum(sizes) * world]
    for parameter, piece in zip(bucket, mine.split(sizes), strict=True):
        local = rows[parameter.name]
        piece[: local.numel()].copy_(local.flatten())
    dist.all_gather_into_tensor(everyone, mine, group=group)
    columns = everyone.view(world, -1).split(sizes, dim=1)
    for parameter, column in zip(bucket, columns, strict=True):
        shape = parameter.shape
        if column.is_contiguous():  # the scratch itself: all else is copied by reshape
            column = column.clone()
        yield parameter.name, column.reshape(-1, *shape[1:])[: shape[0]]
        del column


def _padded(parameter: Parameter, world: int) -> int:
    """Returns the elements of a rank's rows, padded to as many on every rank."""
    return -(-parameter.shape[0] // world) * math.prod(parameter.shape[1:])
