"""What engines of any framework do with adapters (LoRA) beside training them: they know of which model these
are, merge them into the weights that are sent, and write peft's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from rondo.config.schema import LoraConfig
from rondo.core.errors import CheckpointError, ConfigError, OtherRunError
from rondo.models.loading import model_on_meta
from rondo.models.lora import (
    Adapter,
    add_adapters,
    base_checksum_of,
    check_for_peft,
    config_for_peft,
    is_adapter,
    read_adapter,
    shapes_of,
    write_adapter,
)
from rondo.models.source import ModelSource
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.training.checkpoint import State
from rondo.weights.checksum import checksum, combine, signed
from rondo.weights.layout import Box, Layout

BASE = "base.checksum"  # in the state: of the model that the adapters belong to


def learns_with_adapters(name: str) -> bool:
    """Says whether this parameter of a model with adapters learns."""
    return is_adapter(name) or name.startswith(VALUE_HEAD)


def check_adapters(config: LoraConfig, source: ModelSource) -> None:
    """Raises ConfigError or DataError for adapters that a model cannot have, or that peft would read as
    others. Nothing of its weights is made or read.
    """
    model = model_on_meta(source)
    add_adapters(model, config, source.seed)
    AdapterFiles(config, source).check_export(shapes_of(model))


class AdapterFiles:
    """The adapters of one engine's model, as checkpoints and peft's files have them."""

    def __init__(self, config: LoraConfig, source: ModelSource) -> None:
        self.config = config
        self.source = source
        self._base_checksum: torch.Tensor | None = None

    def base_checksum(self, sums: Callable[[], Mapping[str, int]]) -> torch.Tensor:
        """Returns a number of the model's weights, int64 [1], the same for every dtype that they may rest in.
        sums: those of its tensors in bfloat16, asked for once.
        """
        if self._base_checksum is None:
            self._base_checksum = torch.tensor([signed(combine(sums().values()))])
        return self._base_checksum

    def check_path(self, sums: Callable[[], Mapping[str, int]]) -> None:
        """Raises ConfigError where lora.path was trained by rondo on another model. sums: see above."""
        if self.config.path is None:
            return
        theirs, ours = base_checksum_of(self.config.path), int(self.base_checksum(sums))
        if theirs not in (None, ours):
            raise ConfigError(
                f"lora.path: the adapter in {self.config.path} was trained on a model with other weights: "
                "set model.path to that one",
                key="lora.path",
            )

    def check_loaded(self, state: State, path: str) -> None:
        """Raises OtherRunError where a checkpoint's adapters belong to a model with other weights."""
        if self._base_checksum is not None and not torch.equal(state[BASE], self._base_checksum):
            raise OtherRunError(
                f"checkpoint {path} holds adapters of a model with other weights than "
                f"{self.source.path or 'the one that is made'} has now. Put those back that were there when "
                "the run began, or begin another run in a folder of its own: trainer.run_dir=…"
            )

    def check_export(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ConfigError for adapters that peft would read as others. shapes: of all A and B, by their
        names in peft's files.
        """
        config_for_peft(self.source, self.config, shapes)

    def export(
        self, path: str, tensors: Mapping[str, torch.Tensor], base_checksum: int, group: dist.ProcessGroup
    ) -> None:
        """Writes a folder that peft loads, and reads it again to compare; the group's first rank does.
        tensors: all A and B, whole, by their names in peft's files. Raises CheckpointError.
        """
        if dist.get_rank(group) != 0:
            return
        write_adapter(Path(path), tensors, self.config, self.source, base_checksum)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, read in read_adapter(path, self.config, shapes).items():
            if checksum(read) != checksum(tensors[name]):
                raise CheckpointError(f"{path}: {name!r} of the exported adapter is not the trained one")
        check_for_peft(path, self.source)


class RowsMadeOnce(Mapping[str, torch.Tensor]):
    """Parts of tensors, some of which are made when they are read: each is kept until another one is read,
    since it may be sent in pieces.
    """

    def __init__(self, rows: Mapping[str, torch.Tensor]) -> None:
        self._rows = rows
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._rows[name]
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class MergedRows(Mapping[str, torch.Tensor]):
    """This rank's parts of W + alpha / r · B · A, each made when it is read: there is no second model. Of
    other tensors they are the model's own.
    """

    def __init__(
        self,
        rows: Mapping[str, torch.Tensor],
        layout: Layout,
        # By the names of the weights that they change.
        adapters: Mapping[str, Adapter],
        # A and B by their names in peft's files, whole.
        factors: Mapping[str, torch.Tensor],
    ) -> None:
        self._rows, self._layout, self._adapters, self._factors = rows, layout, adapters, factors

    def __getitem__(self, name: str) -> torch.Tensor:
        own, adapter = self._rows[name], self._adapters.get(name)
        if adapter is None:
            return own
        a, b = (self._factors[one].to(own.device) for one in (adapter.a, adapter.b))
        shape = self._layout.shapes[name]
        box = self._layout.specs[name].box(shape, dist.get_rank())
        rows, columns = box.slices(Box.whole(shape))
        # In float32: rounded once, to what is sent.
        return own.to(a.dtype) + adapter.delta(a, b, rows, columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
