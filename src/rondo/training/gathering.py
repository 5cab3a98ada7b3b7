"""Full tensors, and their checksums, out of the parts that ranks hold of them, as a layout says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist

from rondo.core.errors import TrainError
from rondo.weights.checksum import box_sum, combine, read, whole_sum
from rondo.weights.layout import Box, Layout, Parameter


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


def checksums_of(
    layout: Layout, rows: Mapping[str, torch.Tensor], group: dist.ProcessGroup
) -> dict[str, int]:
    """Returns the checksums of the whole tensors, at the layout's dtypes; every rank reads only its own
    `rows`. Collective over the group, which has all ranks of the layout.

    Raises TrainError where ranks that should hold the same do not.
    """
    if len(layout.ranks) == 1:
        # One by one: together, what is cast or merged for it would be a second copy of the model.
        kinds = {one.name: getattr(torch, one.dtype) for one in layout.parameters}
        return read({name: whole_sum(rows[name].to(kind)) for name, kind in kinds.items()})
    rank, own = dist.get_rank(), {}
    for parameter in layout.parameters:
        box = layout.held(rank, parameter.name)
        if box is not None:
            local = rows[parameter.name].to(getattr(torch, parameter.dtype))
            own[parameter.name] = box_sum(local, box.offset, parameter.shape)
    zero = next(iter(own.values())).new_zeros(())
    every = [own.get(one.name, zero) for one in layout.parameters]
    firsts = [
        mine if layout.specs[one.name].first(rank) else zero
        for one, mine in zip(layout.parameters, every, strict=True)
    ]
    # Of the first rank that holds the same, and of all: read at one time.
    totals = torch.stack([*firsts, *every]).view(2, -1)
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
    ranks = dist.get_world_size(group)  # of which a pipeline's stages have different tensors
    here = {name for name, spec in layout.specs.items() if not spec.is_cut and len(spec.ranks) == ranks}
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
        device = rows[next(iter(rows))].device
        scratch[dtype] = (
            torch.zeros(largest, dtype=dtype, device=device),
            torch.empty(largest * len(ranks), dtype=dtype, device=device),
        )
    mine, everyone = scratch[dtype][0][: sum(sizes)], scratch[dtype][1][: sum(sizes) * len(ranks)]
    for parameter, piece in zip(bucket, mine.split(sizes), strict=True):
        if layout.specs[parameter.name].has(dist.get_rank()):
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
        if spec.first(rank):
            box = spec.box(shape, rank)
            full[box.slices(Box.whole(shape))] = flat[: box.size].view(box.shape)
    return full
