"""What the torch backend does with adapters (LoRA): which of its tensors learn, and the weights with the
adapters merged, as generation engines and exports get them: under the model's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rondo.config.schema import LoraConfig
from rondo.models.lora import (
    adapter_name,
    adapters_off,
    add_adapters,
    base_name,
    is_adapter,
    quantise_base,
    shapes_of,
)
from rondo.models.nf4 import QuantisedLinear
from rondo.models.source import ModelSource
from rondo.training.adapters import AdapterFiles, MergedRows, RowsMadeOnce, learns_with_adapters
from rondo.training.gathering import checksums_of, gather_buckets
from rondo.training.torch_backend.parameters import LocalRows, layout_of, wire_dtypes
from rondo.training.views import Views
from rondo.weights.layout import Box

_BUCKET_BYTES = 256 << 20  # of A and B, gathered at one time
Tensor = TypeVar("Tensor", bound=torch.Tensor)
Held = tuple[str, torch.Tensor, Box, tuple[int, ...]]  # as of `boxes_here`


class Adapters:
    """The adapters of one engine's model, which alone learn (with a value head)."""

    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, source: ModelSource, device: torch.device
    ) -> None:
        """Puts them into the model. Raises ConfigError, DataError (`models.lora`)."""
        self.files = AdapterFiles(config, source)
        self._model = model
        self.quantised = quantise_base(model, config, device)
        self._adapters = add_adapters(model, config, source.seed, device)

    @staticmethod
    def split(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Takes a module's parameters apart: those of the model by a checkpoint's names, and A and B by those
        of peft's files.
        """
        own = {base_name(name): one for name, one in parameters.items() if not is_adapter(name)}
        factors = {adapter_name(name): one for name, one in parameters.items() if is_adapter(name)}
        return own, factors

    def filling(self, boxes: Iterable[Held]) -> Iterator[Held]:
        """Yields what the model's weights are to be read into, the next one when it was: those that rest
        quantised are read into a tensor of their own, one at a time.
        """
        for name, tensor, box, shape in boxes:
            if name not in self.quantised:
                yield name, tensor, box, shape
                continue
            whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            yield name, whole, box, shape
            self.quantised[name].quantise(whole)

    def rows(self, shards: Mapping[str, DTensor]) -> Mapping[str, torch.Tensor]:
        """Returns this rank's rows of the weights without adapters."""
        return RowsMadeOnce(_BaseRows(shards, self.quantised))

    def off(self) -> AbstractContextManager[None]:
        """Inside, the model is the one without them."""
        return adapters_off(self._model)

    def merged(
        self, shards: Mapping[str, DTensor], factors: Mapping[str, DTensor], views: Views
    ) -> Mapping[str, torch.Tensor]:
        """Returns this rank's rows of the weights with the adapters in them. Collective: A and B, which are
        small, are gathered.
        """
        layout = layout_of(shards, views, wire_dtypes(self._model, shards, None))
        base, whole = _BaseRows(shards, self.quantised), self._whole(factors, views)
        return RowsMadeOnce(MergedRows(base, layout, self._adapters, whole))

    def _whole(self, factors: Mapping[str, DTensor], views: Views) -> dict[str, torch.Tensor]:
        layout = layout_of(factors, views, wire_dtypes(self._model, factors, None))
        return dict(gather_buckets(layout, LocalRows(factors), views.everyone, _BUCKET_BYTES))

    def base_checksum(self, shards: Mapping[str, DTensor], views: Views) -> torch.Tensor:
        """See `AdapterFiles.base_checksum`. Collective the first time."""
        return self.files.base_checksum(lambda: self._sums(shards, views))

    def _sums(self, shards: Mapping[str, DTensor], views: Views) -> dict[str, int]:
        base = {name: shard for name, shard in shards.items() if not learns_with_adapters(name)}
        layout = layout_of(base, views, wire_dtypes(self._model, base, "bfloat16"))
        return checksums_of(layout, self.rows(base), views.everyone)

    def check_path(self, shards: Mapping[str, DTensor], views: Views) -> None:
        """See `AdapterFiles.check_path`. Collective."""
        self.files.check_path(lambda: self._sums(shards, views))

    def check_export(self) -> None:
        """See `AdapterFiles.check_export`."""
        self.files.check_export(shapes_of(self._model))

    def export(
        self, path: str, factors: Mapping[str, DTensor], shards: Mapping[str, DTensor], views: Views
    ) -> None:
        """See `AdapterFiles.export`. Collective."""
        tensors, base_checksum = self._whole(factors, views), int(self.base_checksum(shards, views))
        self.files.export(path, tensors, base_checksum, views.everyone)


class _BaseRows(LocalRows):
    """This rank's rows of the model without adapters. What rests quantised is made when it is read."""

    def __init__(self, shards: Mapping[str, DTensor], quantised: Mapping[str, QuantisedLinear]) -> None:
        super().__init__(shards)
        self._quantised = quantised

    def __getitem__(self, name: str) -> torch.Tensor:
        module = self._quantised.get(name)
        return super().__getitem__(name) if module is None else module.dequantised()
