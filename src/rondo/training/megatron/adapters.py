"""The adapters (LoRA) of a stage: what of them is sent, merged and written. `layers` computes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rondo.config.schema import LoraConfig
from rondo.models.loading import model_on_meta
from rondo.models.lora import AdapterSet, adapter_name, add_adapters, is_adapter
from rondo.models.source import ModelSource
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.training.adapters import BASE, AdapterFiles, MergedRows, RowsMadeOnce
from rondo.training.checkpoint import State
from rondo.training.megatron.shards import StageWeights
from rondo.weights.sync import Sent

_BUCKET_BYTES = 256 << 20  # of A and B, gathered at one time


class StageAdapters:
    """The adapters of a model, of which this rank has some of its stage's; they alone learn, and a value
    head.
    """

    def __init__(self, source: ModelSource, config: LoraConfig) -> None:
        """Raises ConfigError, DataError (`models.lora`)."""
        self.files = AdapterFiles(config, source)
        model = model_on_meta(source)
        self.set = AdapterSet(config.rank, config.alpha, add_adapters(model, config, source.seed))
        self.first = {
            adapter_name(name): one.detach() for name, one in model.named_parameters() if is_adapter(name)
        }
        """A and B as they start, in float32, by their names in peft's files."""

    def source(self, what: Sent, computing: StageWeights, exact: StageWeights) -> StageWeights:
        """Returns what syncs and exports read. computing: all of the stage, A and B as they compute; exact:
        these in float32.
        """
        if what != "merged":
            return exact.part(lambda name: what == "all" or name in self.first)
        base = computing.part(lambda name: name not in self.first)

        def merged() -> Mapping[str, torch.Tensor]:
            return RowsMadeOnce(MergedRows(base.rows(), base.layout(), self.set.by_weight, self.whole(exact)))

        return base.part(lambda name: True, merged)

    def whole(self, exact: StageWeights) -> dict[str, torch.Tensor]:
        """Returns A and B of the whole model. Collective, in a phase."""
        return dict(exact.part(self.first.__contains__).gathered(_BUCKET_BYTES))

    def base_checksum(self, computing: StageWeights) -> torch.Tensor:
        """See `AdapterFiles.base_checksum`. Collective the first time."""
        return self.files.base_checksum(lambda: self._sums(computing))

    def check_path(self, computing: StageWeights) -> None:
        """See `AdapterFiles.check_path`. Collective."""
        self.files.check_path(lambda: self._sums(computing))

    def _sums(self, computing: StageWeights) -> dict[str, int]:
        base = computing.part(lambda name: name not in self.first and not name.startswith(VALUE_HEAD))
        return base.checksums("bfloat16")

    def entry(self, computing: StageWeights) -> State:
        """Returns what a checkpoint says of the model that they belong to. Collective the first time."""
        return State({BASE: self.base_checksum(computing).clone()})
