"""What the two sides of a sync look like, and the two ways that need no plan: shared storage (nothing moves)
and gathered full tensors in bounded buckets.

Both ends are seen through small protocols, so that this package knows neither training nor rollout engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from rondo.errors import WeightSyncError
from rondo.types import StepStats
from rondo.weights.layout import Layout

DEFAULT_BUCKET_BYTES = 256 << 20


class WeightSource(Protocol):
    """A trainer's side. dtype: of the wire, as torch names it; None: as the parameters are."""

    def parameters_in_place(self) -> Mapping[str, torch.Tensor]: ...

    def layout(self, dtype: str | None = None) -> Layout: ...

    def gathered_parameters(
        self, bucket_bytes: int, dtype: str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]: ...

    def parameter_checksums(self, dtype: str | None = None) -> Mapping[str, int]: ...


class WeightSink(Protocol):
    """A sampler's side: all tensors of one version arrive between `begin` and `commit`."""

    def begin(self, version: int) -> None: ...

    def receive(self, name: str, tensor: torch.Tensor) -> None: ...

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None: ...


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved, over all ranks.

    bytes_moved: between processes (0 when storage is shared). bytes_needed: the least that would do: what the
    processes that serve the weights did not have. peak_bytes: most that one process held in transit beside
    the models, as planned (a checksum needs another 8 MiB). rounds: buckets, or rounds of the plan. lost:
    ranks of the rollout group that went away meanwhile, with the reason.
    """

    version: int
    num_tensors: int
    bytes_moved: int
    bytes_needed: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    rounds: int = 0
    lost: Mapping[int, str] | None = None

    def count(self, stats: StepStats) -> None:
        """Into a step's metrics: weights/…, and the clock under timing/."""
        stats.add_sum("weights/bytes_moved", float(self.bytes_moved))
        stats.add_sum("weights/bytes_needed", float(self.bytes_needed))
        stats.add_max("weights/peak_bytes", float(self.peak_bytes))
        stats.add_sum("weights/rounds", float(self.rounds))
        stats.add_sum("timing/weight_sync_s", self.seconds)


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
    started = time.perf_counter()
    checksums = source.parameter_checksums(dtype)
    layout = source.layout(dtype)
    sink.begin(version)
    for name, tensor in source.gathered_parameters(bucket_bytes, dtype):
        sink.receive(name, tensor)
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
        bytes_needed=own or (ranks - 1) * layout.num_bytes,
        seconds=time.perf_counter() - started,
        peak_bytes=gathering_bytes(layout, bucket_bytes) + (2 * bucket if processes else 0),
        rounds=-(-layout.num_bytes // bucket_bytes),
    )


def gather_along(source: WeightSource, bucket_bytes: int, dtype: str | None) -> None:
    """The part of a trainer's rank that has no engine beside it in the others' `gather_into`."""
    source.parameter_checksums(dtype)
    for _ in source.gathered_parameters(bucket_bytes, dtype):
        pass


def gathering_bytes(layout: Layout, bucket_bytes: int) -> int:
    """What gathering needs on a rank beside its shards: its part of a bucket, everyone's, the copy of that
    which gloo makes, and one full tensor; nothing on one rank.
    """
    ranks, largest = len(layout.ranks), max((p.num_bytes for p in layout.parameters), default=0)
    bucket = min(max(bucket_bytes, largest), layout.num_bytes)
    return 2 * bucket + bucket // ranks + largest if ranks > 1 else 0


def _gathered_bytes(layout: Layout) -> int:
    """An all-gather gives every rank the other ranks' rows, padded to equal numbers."""
    ranks, total = len(layout.ranks), 0
    for parameter in layout.parameters:
        rows = parameter.shape[0]
        total += (ranks - 1) * -(-rows // ranks) * ranks * (parameter.num_bytes // max(rows, 1))
    return total
