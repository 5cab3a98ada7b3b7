"""What the two sides of a sync look like, its report, and the two ways without a plan: shared storage, which
moves nothing, and full tensors gathered in bounded buckets.

Both ends are seen through small protocols, so that this package knows neither training nor rollout engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from rondo.core.errors import WeightSyncError
from rondo.system.activity import Activity, progress
from rondo.weights.layout import Layout

# What of a model with adapters is sent: the weights with the adapters merged into them (of a model without
# adapters: its weights); the model's own and A and B beside them; A and B alone.
Sent = Literal["merged", "all", "adapters"]


class WeightSource(Protocol):
    """A trainer's side: its parameters under Hugging Face names, tied ones once, frozen ones too. dtype: of
    the wire, as torch names it; None: as the parameters are.
    """

    def layout(self, dtype: str | None = None) -> Layout:
        """Says which rank of the world holds which box of which parameter."""
        ...

    def local(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Inside, this rank's part of each parameter, as `layout` says, on the device: the storage itself;
        what is merged, or rests quantised, is made at each reading. Collective where adapters are merged.
        """
        ...

    def gathered(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full tensors. Collective: every rank must run through all of it.

        At most `bucket_bytes` (or one tensor) exist beside the shards; on one rank, in their own dtype, the
        tensors are the storage itself, and are empty once that rests. Afterwards all memory that is not in
        use goes back to the device: beside a trainer that gathers there is a generation engine, which may be
        about to wake.
        """
        ...

    def release_memory(self) -> None:
        """Gives memory that is not in use back to the device, on every rank before it returns on any: an
        engine over several devices is about to wake on all of them. Collective.
        """
        ...

    def checksums(self, dtype: str | None = None) -> Mapping[str, int]:
        """Returns the checksums (`rondo.weights.checksum`) of the full tensors, without gathering them.
        Collective. Raises TrainError where ranks that should hold the same do not.
        """
        ...


class WeightSink(Protocol):
    """A sampler's side: all tensors of one version arrive between `begin` and `commit`."""

    def begin(self, version: int) -> None: ...

    def receive(self, name: str, tensor: torch.Tensor) -> None: ...

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None: ...


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved, over all ranks."""

    version: int
    """The policy version that is served now."""
    num_tensors: int
    """How many parameters."""
    bytes_moved: int
    """Between processes (0 when storage is shared)."""
    bytes_needed: int = 0
    """The least that would do: what the processes that serve the weights did not have."""
    peak_bytes: int = 0
    """Most that one process held in transit beside the models, as planned (a checksum needs another 8
    MiB)."""
    rounds: int = 0
    """Buckets, or rounds of the plan."""
    lost: Mapping[int, str] | None = None
    """Ranks of the rollout group that went away meanwhile, with the reason."""
    checksums: Mapping[str, int] | None = None
    """Those of all parameters that were taken for it, where these are sent in the type that they are trained
    in."""


def assert_shared(source: Mapping[str, torch.Tensor], sink: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightSyncError naming the first parameter whose storage the sampler does not share with the
    trainer.
    """
    for name, tensor in source.items():
        other = sink.get(name)
        if other is None:
            raise WeightSyncError(
                f"the sampler has no parameter {name!r}; it cannot share the trainer's storage"
            )
        if (
            other.data_ptr() != tensor.data_ptr()
            or other.shape != tensor.shape
            or other.dtype != tensor.dtype
        ):
            raise WeightSyncError(
                f"parameter {name!r} is not shared: trainer {tuple(tensor.shape)} {tensor.dtype} at "
                f"{tensor.data_ptr():#x}, sampler {tuple(other.shape)} {other.dtype} at {other.data_ptr():#x}"
            )


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
    """Streams the full parameters into the sampler's own copy, and has it confirm their checksums. Collective
    over the trainer's ranks.

    Beside the two models there is what `peak_bytes` of the report says: a few buckets (or largest tensors,
    where those are larger), never a second copy. dtype: to send them in, cast on each rank before anything
    moves. processes: how many engines behind the sink have processes of their own.
    """
    checksums = source.checksums(dtype)
    layout = source.layout(dtype)
    source.release_memory()  # the sink may make room for its weights when it begins
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
        checksums=checksums if layout.parameters == source.layout().parameters else None,
    )


def gather_along(source: WeightSource, bucket_bytes: int, dtype: str | None) -> None:
    """The part of a trainer's rank that has no engine beside it in the others' `gather_into`."""
    source.checksums(dtype)
    source.release_memory()
    with Activity("gathering weights", in_bytes=True):
        for _, tensor in source.gathered(bucket_bytes, dtype):
            progress(tensor.nbytes)


def gathering_bytes(layout: Layout, bucket_bytes: int) -> int:
    """Returns the bytes that gathering needs on a rank beside its shards: its part of a bucket, everyone's,
    the copy of that which gloo makes, and one full tensor; nothing where each rank has all of every
    parameter.
    """
    cut = [one.num_bytes for one in layout.parameters if layout.specs[one.name].is_cut]
    bucket = min(max(bucket_bytes, max(cut, default=0)), sum(cut))
    return 2 * bucket + bucket // len(layout.ranks) + max(cut, default=0)


def _missing_bytes(layout: Layout) -> int:
    """Returns the bytes of the whole parameters that each rank does not hold, added up over the ranks."""
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
