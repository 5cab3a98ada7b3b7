"""Engine: one role's model on this rank, driven by a few verbs.

    forward            per-token columns, no gradient (forward_topk, forward_scores)
    forward_backward   micro-batches of one mini-batch; gradients are *summed* over micro-batches and ranks
    optimizer_step     clip, skip or update

Here rows become micro-batches, and what comes of them columns and metrics; checkpoints and exports are
written. What computes, and holds the parameters, is a `Backend`: this module names no framework.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rondo.checkpoint import Files
from rondo.config.schema import FrozenEngineConfig
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.columns import TOPK_IDS
from rondo.core.errors import TrainError
from rondo.core.types import StepStats
from rondo.models.names import separate
from rondo.models.precision import LARGEST_GAP
from rondo.models.source import ModelSource
from rondo.system.activity import Activity
from rondo.training import checkpoint
from rondo.training.backend import Backend, OptimizerStats
from rondo.training.export import check_export, export_folder
from rondo.training.gathering import boxes_here
from rondo.training.loss import Loss, Numbers, numbers_of, step_stats
from rondo.training.offload import HostMemory
from rondo.training.packed import PackedRows, expand_columns, in_row_order
from rondo.training.passes import Passes, RecordedRoutes
from rondo.weights.sync import Sent, WeightSource

_CAUSAL = 16  # tokens of a prompt and of an answer
_BUCKET_BYTES = 256 << 20  # of an export, gathered at one time


class Engine:
    """What a role does with its model, whatever computes it."""

    # config: without `auto`.
    def __init__(self, backend: Backend, source: ModelSource, config: FrozenEngineConfig) -> None:
        self.backend = backend
        self.source = source
        self.config = config
        self._group = backend.group
        self._output_dtype = torch.promote_types(backend.packing.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        """Returns where the model computes."""
        return self.backend.packing.device

    @property
    def hf_config(self) -> PreTrainedConfig:
        """Returns the model's config, as transformers has it."""
        return self.backend.hf_config

    # ---- verbs

    def forward(self, batch: Batch, outputs: Mapping[str, str], *, routes: bool = False) -> Batch:
        """Returns new per-token columns, without gradient. outputs: what to compute -> column name.

        E.g. {"log_probs": "old_log_probs"} reads prompt_ids and response_ids and returns Batch(row_id,
        old_log_probs). topk_log_probs also reads teacher_topk_ids, and is wide [N, K]. routes: those of a
        mixture too, routed_experts and prompt_routed_experts. What a batch has of these is replayed, here and
        in `forward_backward`.
        """
        return self._columns(batch, outputs, None, routes=routes)

    def check_causal(self) -> None:
        """Raises TrainError where a token more behind changes the log-probs before it: an engine that makes
        token after token computes another model than training does then. And where log-probs are no numbers:
        then weights are none. Collective.
        """
        images = self.backend.packing.images
        vocabulary = np.arange(self.hf_config.get_text_config().vocab_size)
        spoken = vocabulary if images is None else np.delete(vocabulary, images.token)
        tokens = np.resize(spoken, 2 * _CAUSAL + 1)
        rows = [tokens[_CAUSAL : 2 * _CAUSAL], tokens[_CAUSAL:]]
        batch = Batch.of(
            {
                ROW_ID: np.arange(2),
                "prompt_ids": ragged_rows([tokens[:_CAUSAL]] * 2, np.int32),
                "response_ids": ragged_rows(rows, np.int32),
            }
        )
        alone, before = self._columns(batch, {"log_probs": "log_probs"}, None).rows("log_probs")
        gap, most = float(np.abs(before[:_CAUSAL] - alone).max()), LARGEST_GAP[self.config.compute_dtype]
        model = f"model {self.source.path or 'from scratch'} ({self.hf_config.model_type})"
        if not np.isfinite(alone).all():
            raise TrainError(
                f"{model} gives log-probs that are not finite: look for NaN and infinity in its weights, and "
                f"for numbers beyond {self.config.compute_dtype}"
            )
        if not gap <= most:
            raise TrainError(
                f"{model} is not causal: a token more behind changes the "
                f"log-probs of those before it by {gap:.3g} (at most {most:g} is rounding in "
                f"{self.config.compute_dtype}), so what is sampled token by token would not be what is "
                "trained; take a causal model"
            )

    def forward_topk(self, batch: Batch, k: int, prefix: str = "teacher") -> Batch:
        """Returns, for distillation, <prefix>_log_probs (of the response tokens), and of the k likeliest
        tokens, in descending order, <prefix>_topk_ids (int32 [N, k]) and <prefix>_topk_log_probs (float32
        [N, k]).

        Raises TrainError when the vocabulary has fewer than k tokens.
        """
        vocab_size = self.hf_config.get_text_config().vocab_size
        if not 0 < k <= vocab_size:
            raise TrainError(f"the {k} likeliest tokens of a vocabulary of {vocab_size}")
        names = ("log_probs", "topk_ids", "topk_log_probs")
        return self._columns(batch, {name: f"{prefix}_{name}" for name in names}, k)

    def forward_scores(self, batch: Batch, column: str) -> Batch:
        """Returns one float32 per row, the value head's after its last response token; NaN for a row
        without.
        """
        flat, bounds = self.forward(batch, {"scores": column}).ragged(column)
        scores = np.full(len(batch), np.nan, np.float32)
        answered = np.diff(bounds.numpy()) > 0
        scores[answered] = flat.numpy()[bounds.numpy()[1:][answered] - 1]
        return batch.select([ROW_ID]).with_columns({column: scores})

    def _columns(
        self, batch: Batch, outputs: Mapping[str, str], k: int | None, *, routes: bool = False
    ) -> Batch:
        """Computes columns; the wide ones are at the k likeliest tokens, or at those of column
        teacher_topk_ids where k is None.
        """
        flat = {name: [self._no_output(batch, name, k)] for name in outputs}
        order: list[np.ndarray] = []

        def keep(packed: PackedRows, results: Mapping[str, torch.Tensor]) -> None:
            if len(packed.rows):
                order.append(packed.rows)
                for name in outputs:
                    flat[name].append(results[name])

        shape = self.backend.routes if routes else None
        recorded = None if shape is None else RecordedRoutes(batch, shape)
        with Activity("forward"):
            passes = self._passes(batch, tuple(outputs), k)
            self.backend.run(passes, tuple(outputs), keep, recorded=recorded)
        columns = {column: in_row_order(batch, order, flat[name]) for name, column in outputs.items()}
        columns |= {} if recorded is None else recorded.columns()
        return batch.select([ROW_ID]).with_columns(columns)

    def _no_output(self, batch: Batch, name: str, k: int | None) -> torch.Tensor:
        """Returns an empty output, so that a batch without response tokens has its type and width."""
        shape: tuple[int, ...] = (0,)
        if name.startswith("topk"):
            shape += (k or batch.array(TOPK_IDS).type.value_type.list_size,)
        dtype = torch.int32 if name == "topk_ids" else self._output_dtype
        return torch.empty(shape, dtype=dtype, device=self.device)

    def forward_backward(self, batch: Batch, loss: Loss) -> StepStats:
        """Adds the gradient of Σ loss over all rows of all ranks to what is there. Returns this rank's
        metrics. Raises TrainError for a frozen model.
        """
        return self._run_loss(batch, loss, backward=True)

    def evaluate(self, batch: Batch, loss: Loss) -> StepStats:
        """Returns the loss's metrics, without gradient."""
        return self._run_loss(batch, loss, backward=False)

    def optimizer_step(self) -> OptimizerStats:
        """Clips by the global norm and updates; a non-finite norm skips the update and leaves weights and
        moments. Raises TrainError for a frozen model.
        """
        with Activity("optimizer step"):
            return self.backend.step()

    def _run_loss(self, batch: Batch, loss: Loss, *, backward: bool) -> StepStats:
        seen: Numbers = []

        def measure(packed: PackedRows, outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            if not len(packed.rows):  # a dummy: a gradient of 0, for the collectives of the backward pass
                nothing = torch.zeros((), device=self.device)
                return sum((output.sum() for output in outputs.values()), nothing) * 0.0
            columns = expand_columns(batch, loss.columns, packed, self._output_dtype)
            total, metrics = loss(outputs, columns, packed.cu_seqlens)
            seen.extend(numbers_of(metrics, self.device))
            return total

        with Activity("forward and backward" if backward else "forward"):
            self.backend.run(self._passes(batch, loss.outputs), loss.outputs, measure, backward=backward)
        return step_stats(seen)

    def _passes(self, batch: Batch, outputs: tuple[str, ...], k: int | None = None) -> Passes:
        return Passes(batch, outputs, self.backend.packing, self.config.token_budget, self._group, k)

    # ---- parameters

    def num_parameters(self) -> int:
        """Returns the number of the whole model's parameters (adapters too); tied tensors count once."""
        return self.backend.num_parameters()

    def parameters(self, what: Sent = "merged") -> WeightSource:
        """Returns what syncs and exports read, under Hugging Face names. Raises TrainError for adapters of a
        model that has none.
        """
        return self.backend.parameters(what)

    def parameters_in_place(self) -> dict[str, torch.Tensor]:
        """Returns Hugging Face name -> tensor that shares the trainer's storage (without adapters); tied
        tensors once. Raises TrainError where there is more than one rank, or they rest quantised.
        """
        return self.backend.parameters_in_place()

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model is the one without its adapters: the reference of a model that trains with them.
        Raises TrainError where there are none.
        """
        return self.backend.without_adapters()

    def copy_parameters_from(self, other: Engine) -> None:
        """Takes over the parameters (with adapters merged) of another engine of this process that is sharded
        alike, in this one's dtype.

        Raises TrainError naming the parameters that differ in shape, or in how they are spread over ranks,
        and where this one has adapters.
        """
        mine, theirs = self.parameters().layout(), other.parameters().layout()
        names = {*mine.shapes, *theirs.shapes}
        different = sorted(name for name in names if mine.boxes(name) != theirs.boxes(name))
        if different:
            name = different[0]
            raise TrainError(
                f"parameters cannot be copied, {len(different)} differ in shape or in how ranks share them: "
                f"{name} is {mine.shapes.get(name)} here, {theirs.shapes.get(name)} there; models that are "
                "copied have one shape, and the same `parallel`"
            )
        self.backend.take(other.parameters())

    # ---- state

    def snapshot(self, memory: HostMemory | None = None) -> checkpoint.State:
        """Returns a copy of all state (parameters, moments, counters) in host memory, that `save` can write
        later while training goes on. With adapters: of the parameters only those that learn. Collective.

        memory: for the copy, of an earlier one that nobody reads any more; None: new memory. A model on a CPU
        always takes new memory.
        """
        return self.backend.snapshot(HostMemory(self.device) if memory is None else memory)

    def save(self, path: str, state: checkpoint.State | None = None) -> Files:
        """Writes a snapshot (default: the state as it is now). Collective. Returns the checksums of the files
        of all ranks.
        """
        return checkpoint.save(self.backend.state() if state is None else state, path, self._group)

    def load(self, path: str, files: Files) -> None:
        """Reads what `save` wrote, on any number of ranks. files: what it returned. Collective.

        Raises CheckpointError.
        """
        state = self.backend.state()
        checkpoint.load(state, path, files, self._group)
        self.backend.adopt(state, path)

    def export(self, path: str, dtype: str | None = None) -> None:
        """Writes a Hugging Face folder (config, safetensors; a critic's value head beside, adapters in a
        folder of their own), and reads it again to compare. dtype: to which the weights are rounded, but for
        those that stay precise (`kept_in_float32`, the value head, adapters). Collective, and all ranks
        write. Raises CheckpointError naming a tensor that comes back as another.
        """
        weights, dtype = self.parameters(), dtype or self.config.param_dtype
        checksums, layout, parts = weights.checksums(dtype), weights.layout(dtype), self.backend.parts
        with Activity(f"writing {path}", bound=False):
            tensors = separate(weights.gathered(_BUCKET_BYTES, dtype), parts)
            export_folder(tensors, layout.parameters, parts, self.source, path, self._group)
            with weights.local() as local:
                held = boxes_here(layout, local)
                check_export(path, self.source, getattr(torch, dtype), held, checksums, self._group)
            self.backend.export_adapters(f"{path}/adapter")
        dist.barrier(self._group)  # when any rank returns, the folder is whole

    # ---- memory

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Keeps parameters on the device inside, for all verbs of an update; afterwards they rest where the
        config says.
        """
        return self.backend.residency.during("update")

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes ever in use: of the device's allocator, or of this process on a CPU."""
        return self.backend.residency.peak()
