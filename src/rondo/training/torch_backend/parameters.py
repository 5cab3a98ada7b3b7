"""What this rank holds of a model of the torch backend, under a checkpoint's names, and how it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rondo.models.names import persistent_buffers
from rondo.models.precision import kept_in_float32
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.training.views import Views
from rondo.weights.layout import Layout, Parameter, Spec


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
    alike: dict[Any, Spec] = {}  # a model's tensors lie in few ways, and a way is asked of torch at a cost
    specs = {}
    for name, shard in shards.items():
        way = id(shard.device_mesh), shard.placements, shard.ndim
        if way not in alike:
            alike[way] = views.spec_of(shard)
        specs[name] = alike[way]
    return Layout(parameters, specs)


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
