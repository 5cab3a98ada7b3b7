"""What an engine does with adapters (LoRA): which of its tensors learn, and the weights with the adapters
merged, as generation engines and exports get them: under the model's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rondo.config.schema import LoraConfig
from rondo.core.errors import CheckpointError, ConfigError
from rondo.models.lora import (
    Adapter,
    adapter_name,
    adapters_off,
    add_adapters,
    base_checksum_of,
    base_name,
    check_for_peft,
    config_for_peft,
    is_adapter,
    quantise_base,
    read_adapter,
    shapes_of,
    write_adapter,
)
from rondo.models.nf4 import QuantisedLinear
from rondo.models.source import ModelSource
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.training.gathering import checksums_of, gather_buckets
from rondo.training.torch_backend.parameters import LocalRows, layout_of, wire_dtypes
from rondo.training.views import Views
from rondo.weights.checksum import checksum, combine, signed
from rondo.weights.layout import Box

BASE = "base.checksum"  # in the state: of the model that the adapters belong to
_BUCKET_BYTES = 256 << 20  # of A and B, gathered at one time
Tensor = TypeVar("Tensor", bound=torch.Tensor)
Held = tuple[str, torch.Tensor, Box, tuple[int, ...]]  # as of `boxes_here`


class Adapters:
    """The adapters of one engine's model, which alone learn (with a value head)."""

    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, source: ModelSource, device: torch.device
    ) -> None:
        """Puts them into the model. Raises ConfigError, DataError (`models.lora`)."""
        self.config = config
        self._model = model
        self._source = source
        self.quantised = quantise_base(model, config, device)
        self._adapters = add_adapters(model, config, source.seed, device)
        self._base_checksum: torch.Tensor | None = None

    @staticmethod
    def learns(name: str) -> bool:
        """Says whether this parameter of a `TokenModel` learns."""
        return is_adapter(name) or name.startswith(VALUE_HEAD)

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

    def rows(self, shards: Mapping[str, DTensor]) -> BaseRows:
        """Returns this rank's rows of the weights without adapters."""
        return BaseRows(shards, self.quantised)

    def off(self) -> AbstractContextManager[None]:
        """Inside, the model is the one without them."""
        return adapters_off(self._model)

    def merged(
        self,
        shards: Mapping[str, DTensor],
        factors: Mapping[str, DTensor],
        views: Views,
    ) -> MergedRows:
        """Returns this rank's rows of the weights with the adapters in them. Collective: A and B, which are
        small, are gathered.
        """
        whole = self._whole(factors, views)
        return MergedRows(shards, self.quantised, self._adapters, whole, views)

    def _whole(self, factors: Mapping[str, DTensor], views: Views) -> dict[str, torch.Tensor]:
        layout = layout_of(factors, views, wire_dtypes(self._model, factors, None))
        return dict(gather_buckets(layout, LocalRows(factors), views.everyone, _BUCKET_BYTES))

    def base_checksum(self, shards: Mapping[str, DTensor], views: Views) -> torch.Tensor:
        """Returns a number of the model's weights, int64 [1], the same for every dtype that they may rest in:
        taken in bfloat16. Collective the first time.
        """
        if self._base_checksum is None:
            base = {name: shard for name, shard in shards.items() if not self.learns(name)}
            layout = layout_of(base, views, wire_dtypes(self._model, base, "bfloat16"))
            sums = checksums_of(layout, self.rows(base), views.everyone)
            self._base_checksum = torch.tensor([signed(combine(sums.values()))])
        return self._base_checksum

    def check_path(self, shards: Mapping[str, DTensor], views: Views) -> None:
        """Raises ConfigError where lora.path was trained by rondo on another model. Collective."""
        if self.config.path is None:
            return
        theirs, ours = base_checksum_of(self.config.path), int(self.base_checksum(shards, views))
        if theirs not in (None, ours):
            raise ConfigError(
                f"lora.path: the adapter in {self.config.path} was trained on a model with other weights: "
                "set model.path to that one",
                key="lora.path",
            )

    def check_loaded(self, state: Mapping[str, torch.Tensor], path: str) -> None:
        """Raises CheckpointError where a checkpoint's adapters belong to a model with other weights."""
        if self._base_checksum is not None and not torch.equal(state[BASE], self._base_checksum):
            raise CheckpointError(
                f"checkpoint {path} holds adapters of a model with other weights than those that are loaded: "
                "have the model as it was when the run began"
            )

    def check_export(self) -> None:
        """Raises ConfigError for adapters that peft would read as others."""
        config_for_peft(self._source, self.config, shapes_of(self._model))

    def export(
        self,
        path: str,
        factors: Mapping[str, DTensor],
        shards: Mapping[str, DTensor],
        views: Views,
    ) -> None:
        """Writes a folder that peft loads, and reads it again to compare. Collective; the first rank writes.
        Raises CheckpointError.
        """
        tensors, base_checksum = self._whole(factors, views), int(self.base_checksum(shards, views))
        if dist.get_rank(views.everyone) != 0:
            return
        write_adapter(Path(path), tensors, self.config, self._source, base_checksum)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, read in read_adapter(path, self.config, shapes).items():
            if checksum(read) != checksum(tensors[name]):
                raise CheckpointError(f"{path}: {name!r} of the exported adapter is not the trained one")
        check_for_peft(path, self._source)


class BaseRows(LocalRows):
    """This rank's rows of the model without adapters. What rests quantised is made when it is read, and
    forgotten with the next one.
    """

    def __init__(self, shards: Mapping[str, DTensor], quantised: Mapping[str, QuantisedLinear]) -> None:
        super().__init__(shards)
        self._quantised = quantised
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if not self._is_made(name):
            return super().__getitem__(name)
        if self._last is None or self._last[0] != name:  # it may be sent in pieces
            self._last = None  # before the next one is made
            self._last = name, self._made(name)
        return self._last[1]

    def _is_made(self, name: str) -> bool:
        return name in self._quantised

    def _made(self, name: str) -> torch.Tensor:
        module = self._quantised.get(name)
        return super().__getitem__(name) if module is None else module.dequantised()


class MergedRows(BaseRows):
    """This rank's rows of W + alpha / r · B · A, each made when it is read: there is no second model. Of
    other tensors they are the model's own.
    """

    def __init__(
        self,
        shards: Mapping[str, DTensor],
        quantised: Mapping[str, QuantisedLinear],
        adapters: Mapping[str, Adapter],
        # A and B by their names in peft's files, whole.
        factors: Mapping[str, torch.Tensor],
        views: Views,
    ) -> None:
        super().__init__(shards, quantised)
        self._adapters = adapters
        self._factors = factors
        self._views = views

    def _is_made(self, name: str) -> bool:
        return name in self._adapters or super()._is_made(name)

    def _made(self, name: str) -> torch.Tensor:
        own, adapter = super()._made(name), self._adapters.get(name)
        if adapter is None:
            return own
        a, b = (self._factors[one].to(own.device) for one in (adapter.a, adapter.b))
        shard = self._shards[name]
        shape = tuple(shard.shape)
        rows, columns = self._views.spec_of(shard).box(shape, dist.get_rank()).slices(Box.whole(shape))
        # In float32: rounded once, to what is sent.
        return own.to(a.dtype) + adapter.delta(a, b, rows, columns)
