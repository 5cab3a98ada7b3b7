"""The two ways of the first version: shared storage (nothing moves) and gathered full tensors in bounded
buckets.

Both ends are seen through small protocols, so that this module knows neither training nor rollout engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from rondo.errors import WeightSyncError

DEFAULT_BUCKET_BYTES = 256 << 20


class WeightSource(Protocol):
    """A trainer's side."""

    def parameters_in_place(self) -> Mapping[str, torch.Tensor]: ...

    def gathered_parameters(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]: ...


class WeightSink(Protocol):
    """A sampler's side: all tensors of one version arrive between `begin` and `commit`."""

    def begin(self, version: int) -> None: ...

    def receive(self, name: str, tensor: torch.Tensor) -> None: ...

    def commit(self, version: int) -> None: ...


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved. bytes_moved is 0 when storage is shared."""

    version: int
    num_tensors: int
    bytes_moved: int


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
    source: WeightSource, sink: WeightSink, version: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> SyncReport:
    """Stream the full parameters into the sampler's own copy. Collective over the trainer's ranks.

    Never holds more than one bucket beside the two models.
    """
    sink.begin(version)
    num_tensors = bytes_moved = 0
    for name, tensor in source.gathered_parameters(bucket_bytes):
        sink.receive(name, tensor)
        num_tensors += 1
        bytes_moved += tensor.numel() * tensor.element_size()
    sink.commit(version)
    return SyncReport(version, num_tensors, bytes_moved)
