"""The way that needs no plan: full tensors, gathered in bounded buckets."""

from __future__ import annotations

from rondo.system.activity import Activity, progress
from rondo.weights.layout import Layout
from rondo.weights.sync import SyncReport, WeightSink, WeightSource

DEFAULT_BUCKET_BYTES = 256 << 20  # beside the shards on a device: little, and enough for few collectives


def gather_into(
    source: WeightSource,
    sink: WeightSink,
    version: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    *,
    dtype: str | None = None,
    processes: int = 0,
) -> SyncReport:
    """Stream the full parameters into the sampler's own copy, and have it confirm their checksums. Collective
    over the trainer's ranks.

    Beside the two models there is what `peak_bytes` of the report says: a few buckets (or largest tensors,
    where those are larger), never a second copy. dtype: to send them in, cast on each rank before anything
    moves. processes: how many engines behind the sink have processes of their own.
    """
    checksums = source.checksums(dtype)
    layout = source.layout(dtype)
    with Activity("gathering weights", in_bytes=True):
        sink.begin(version)
        for name, tensor in source.gathered(bucket_bytes, dtype):
            sink.receive(name, tensor)
            progress(tensor.nbytes, of=layout.num_bytes)
            del tensor  # or it would be held while the next one is gathered
        sink.commit(version, checksums)
    ranks = len(layout.ranks)
    largest = max((parameter.num_bytes for parameter in layout.parameters), default=0)
    bucket = min(max(bucket_bytes, largest), layout.num_bytes)
    own = ranks * processes * layout.num_bytes
    return SyncReport(
        version,
        num_tensors=len(layout.parameters),
        bytes_moved=_gathered_bytes(layout) + own,
        bytes_needed=own or _missing_bytes(layout),
        peak_bytes=gathering_bytes(layout, bucket_bytes) + (2 * bucket if processes else 0),
        rounds=-(-layout.num_bytes // bucket_bytes),
    )


def gather_along(source: WeightSource, bucket_bytes: int, dtype: str | None) -> None:
    """The part of a trainer's rank that has no engine beside it in the others' `gather_into`."""
    source.checksums(dtype)
    with Activity("gathering weights", in_bytes=True):
        for _, tensor in source.gathered(bucket_bytes, dtype):
            progress(tensor.nbytes)


def gathering_bytes(layout: Layout, bucket_bytes: int) -> int:
    """What gathering needs on a rank beside its shards: its part of a bucket, everyone's, the copy of that
    which gloo makes, and one full tensor; nothing where each rank has all of every parameter.
    """
    cut = [one.num_bytes for one in layout.parameters if layout.specs[one.name].is_cut]
    bucket = min(max(bucket_bytes, max(cut, default=0)), sum(cut))
    return 2 * bucket + bucket // len(layout.ranks) + max(cut, default=0)


def _missing_bytes(layout: Layout) -> int:
    """What all ranks together do not hold of the whole parameters."""
    ranks, specs = len(layout.ranks), layout.specs
    return sum((ranks - specs[one.name].num_copies) * one.num_bytes for one in layout.parameters)


def _gathered_bytes(layout: Layout) -> int:
    """An all-gather gives every rank the other ranks' parts, padded to equal numbers; of what all have,
    nothing.
    """
    ranks, total = len(layout.ranks), 0
    for parameter in layout.parameters:
        spec = layout.specs[parameter.name]
        if spec.is_cut:
            total += (ranks - 1) * ranks * spec.largest(parameter.shape) * parameter.item_bytes
    return total
