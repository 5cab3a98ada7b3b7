"""What syncs and exports read of a model of the torch backend, under a checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rondo.errors import TrainError
from rondo.models.names import persistent_buffers
from rondo.models.precision import kept_in_float32
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.training.gathering import checksums_of, gather_buckets
from rondo.training.views import Views
from rondo.weights.layout import Layout, Parameter
from rondo.weights.sync import Sent

if TYPE_CHECKING:
    from rondo.training.torch_backend.backend import TorchBackend


class TorchParameters:
    """A `weights.sync.WeightSource`: of a model with adapters the weights with these merged, or A and B as
    they are, in their own dtype, after the model's own weights or alone.
    """

    def __init__(self, backend: TorchBackend, what: Sent) -> None:
        """Raises TrainError for A and B of a model without adapters."""
        if what != "merged" and backend.adapters is None:
            raise TrainError(f"there are no adapters to send ({what}): the model has none")
        self._backend = backend
        self._what = what

    def layout(self, dtype: str | None = None) -> Layout:
        """See `WeightSource.layout`."""
        lm, shards = self._backend.model.lm, self._shards()
        wire = wire_dtypes(lm, shards, dtype)
        if self._what != "merged":
            wire |= wire_dtypes(lm, self._backend.factors, None)
        return layout_of(shards, self._backend.views, wire)

    @contextmanager
    def local(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """See `WeightSource.local`."""
        adapters, views = self._backend.adapters, self._backend.views
        with self._backend.on_device():
            shards = self._shards()
            if adapters is None:
                yield LocalRows(shards)
            elif self._what == "merged":
                yield adapters.merged(shards, self._backend.factors, views)
            else:
                yield adapters.rows(shards)

    def gathered(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource.gathered`."""
        with self.local() as rows:
            yield from gather_buckets(self.layout(dtype), rows, self._backend.views.everyone, bucket_bytes)
        self._backend.release_memory()

    def checksums(self, dtype: str | None = None) -> dict[str, int]:
        """See `WeightSource.checksums`."""
        with self.local() as rows:
            return checksums_of(self.layout(dtype), rows, self._backend.views.everyone)

    def _shards(self) -> dict[str, DTensor]:
        """Returns what is read, as it lies now."""
        own = {} if self._what == "adapters" else self._backend.shards
        return own if self._what == "merged" else own | self._backend.factors


def wire_dtypes(model: PreTrainedModel, shards: Mapping[str, DTensor], dtype: str | None) -> dict[str, str]:
    """Returns in which dtype each tensor is sent where the others are in `dtype`: some stay precise, and
    buffers as they are. None means their own.
    """
    own = {name: str(shard.dtype).removeprefix("torch.") for name, shard in shards.items()}
    if dtype is None:
        return own
    kept = {*kept_in_float32(model, getattr(torch, dtype)), *dict(persistent_buffers(model))}
    kept |= {name for name in shards if name.startswith(VALUE_HEAD)}
    return {name: own[name] if name in kept else dtype for name in shards}


def layout_of(shards: Mapping[str, DTensor], views: Views, wire: Mapping[str, str]) -> Layout:
    """Says which rank of the world holds what. wire: the dtype in which each tensor is sent."""
    parameters = tuple(Parameter(name, tuple(shard.shape), wire[name]) for name, shard in shards.items())
    return Layout(parameters, {name: views.spec_of(shard) for name, shard in shards.items()})


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
