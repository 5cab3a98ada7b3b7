"""FSDP2 around a model, how its tensors are spread over the ranks, and full tensors out of their parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from rondo.config.schema import EngineConfig, FrozenEngineConfig, TorchBackendConfig
from rondo.errors import TrainError
from rondo.models.names import persistent_buffers
from rondo.models.precision import kept_in_float32
from rondo.training.activations import checkpoint_blocks, tile_mlps
from rondo.training.head import TokenModel
from rondo.training.views import Views
from rondo.weights.checksum import box_checksum, combine, signed
from rondo.weights.layout import Box, Layout, Parameter


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
    """Returns `local`, wherever it rests, as this rank's part of a tensor that is spread as `like` is; every
    rank of the mesh has all of one that is not. The result shares the storage of `local`.

    shape: of the whole, where that is another than `like` has.
    """
    if isinstance(like, DTensor):
        mesh, placements = like.device_mesh, like.placements
    else:
        placements = (Replicate(),) * mesh.ndim
    where = _mesh_at(local, mesh)
    whole = like if shape is None else torch.empty(shape, device="meta")
    tensor = DTensor.from_local(
        local, where, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    assert tensor.to_local().data_ptr() == local.data_ptr()
    return tensor


def _mesh_at(local: torch.Tensor, mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh where the tensor rests: from_local would copy it to the device of another one."""
    kind = local.device.type
    if mesh.device_type == kind:
        return mesh
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return DeviceMesh.from_group(mesh.get_group(), kind, mesh_dim_names=names)
    return DeviceMesh.from_group(mesh.get_all_groups(), kind, mesh=mesh.mesh, mesh_dim_names=names)


def wire_dtypes(model: PreTrainedModel, shards: Mapping[str, DTensor], dtype: str | None) -> dict[str, str]:
    """Returns in which dtype each tensor is sent where the others are in `dtype`: some stay precise, and
    buffers as they are. None means their own.
    """
    own = {name: str(shard.dtype).removeprefix("torch.") for name, shard in shards.items()}
    if dtype is None:
        return own
    kept = {*kept_in_float32(model, getattr(torch, dtype)), *dict(persistent_buffers(model))}
    return {name: own[name] if name in kept else dtype for name in shards}


def layout_of(shards: Mapping[str, DTensor], views: Views, wire: Mapping[str, str]) -> Layout:
    """Says which rank of the world holds what. wire: the dtype in which each tensor is sent."""
    parameters = tuple(Parameter(name, tuple(shard.shape), wire[name]) for name, shard in shards.items())
    return Layout(parameters, {name: views.spec_of(shard) for name, shard in shards.items()})


def boxes_here(
    layout: Layout, rows: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, Box, tuple[int, ...]]]:
    """Yields what this rank holds: (name, tensor, its box, the shape of the whole) each, in the layout's
    dtype: the storage itself where that is its own.
    """
    for one in layout.parameters:
        box = layout.held(dist.get_rank(), one.name)
        if box is not None:
            yield one.name, rows[one.name].to(getattr(torch, one.dtype)), box, one.shape


class LocalRows(Mapping[str, torch.Tensor]):
    """This rank's parts of tensors: the storage itself."""

    def __init__(self, shards: Mapping[str, DTensor]) -> None:
        self._shards = shards

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._shards[name].to_local().detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def checksums_of(
    layout: Layout, rows: Mapping[str, torch.Tensor], group: dist.ProcessGroup
) -> dict[str, int]:
    """Returns the checksums of the whole tensors, at the layout's dtypes; every rank reads only its own
    `rows`. Collective over the group, which has all ranks of the layout.

    Raises TrainError where ranks that should hold the same do not.
    """
    rank, device = dist.get_rank(), torch.device("cpu")
    counted, every = [], []  # of whoever is the first to hold what it holds, and of all
    for parameter in layout.parameters:
        local = rows[parameter.name].to(getattr(torch, parameter.dtype))
        device, box = local.device, layout.held(rank, parameter.name)
        every.append(0 if box is None else signed(box_checksum(local, box.offset, parameter.shape)))
        counted.append(every[-1] if layout.specs[parameter.name].first(rank) else 0)
    totals = torch.tensor([counted, every], dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=group)
    out = {}
    for parameter, first, together in zip(layout.parameters, *totals.tolist(), strict=True):
        out[parameter.name] = combine([first])
        copies = layout.specs[parameter.name].num_copies
        if combine([first] * copies) != combine([together]):
            raise TrainError(
                f"{copies} ranks should hold the same of {parameter.name!r}, and do not: they have drifted "
                "apart, and what they train is no longer one model; go on from the last checkpoint"
            )
    return out


def gather_buckets(
    layout: Layout, rows: Mapping[str, torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor) of every parameter, gathered in buckets of at most `bucket_bytes`, at the
    layout's dtypes: each rank casts its `rows`, which are read one by one, before they move. Collective over
    the group, which has all ranks of the layout in their order.
    """
    here = {name for name, spec in layout.specs.items() if not spec.is_cut}
    buckets = _buckets(layout, bucket_bytes, here)
    away = [bucket for bucket in buckets if bucket[0].name not in here]
    scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
    for bucket in buckets:
        if bucket[0].name in here:
            yield from ((one.name, rows[one.name].to(getattr(torch, one.dtype))) for one in bucket)
        else:
            yield from _gather(bucket, away, rows, layout, group, scratch)


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
    layout: Layout,
    group: dist.ProcessGroup,
    scratch: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers a bucket at once and yields its tensors. Every rank sends as much as the one that has most.
    scratch: of this rank's and of all ranks' parts, allocated once for the largest of `buckets` (memory that
    comes and goes leaves holes).
    """

    def padded(parameter: Parameter) -> int:
        return layout.specs[parameter.name].largest(parameter.shape)

    dtype, sizes = getattr(torch, bucket[0].dtype), [padded(parameter) for parameter in bucket]
    ranks = dist.get_process_group_ranks(group)
    if dtype not in scratch:
        alike = [one for one in buckets if one[0].dtype == bucket[0].dtype]
        largest = max(sum(map(padded, one)) for one in alike)
        device = rows[bucket[0].name].device
        scratch[dtype] = (
            torch.zeros(largest, dtype=dtype, device=device),
            torch.empty(largest * len(ranks), dtype=dtype, device=device),
        )
    mine, everyone = scratch[dtype][0][: sum(sizes)], scratch[dtype][1][: sum(sizes) * len(ranks)]
    for parameter, piece in zip(bucket, mine.split(sizes), strict=True):
        local = rows[parameter.name]
        piece[: local.numel()].copy_(local.flatten())
    dist.all_gather_into_tensor(everyone, mine, group=group)
    columns = everyone.view(len(ranks), -1).split(sizes, dim=1)
    for parameter, column in zip(bucket, columns, strict=True):
        yield parameter.name, _joined(parameter, layout, dict(zip(ranks, column, strict=True)))


def _joined(parameter: Parameter, layout: Layout, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Returns a tensor made of what ranks hold of it, each its own flat and padded."""
    spec, shape = layout.specs[parameter.name], parameter.shape
    some = next(iter(parts.values()))
    full = torch.empty(shape, dtype=some.dtype, device=some.device)
    for rank, flat in parts.items():
        box = spec.box(shape, rank)
        if spec.first(rank):
            full[box.slices(Box.whole(shape))] = flat[: box.size].view(box.shape)
    return full
