"""FsdpEngine: a Hugging Face causal LM under FSDP2, driven by a few verbs.

    forward            per-token columns, no gradient (forward_topk, forward_scores)
    forward_backward   micro-batches of one mini-batch; gradients are *summed* over micro-batches and ranks
    optimizer_step     clip, skip or update

Every rank runs the same number of passes; a rank without rows runs a dummy token with weight 0. One rank is
the same code. The engine is handed its mesh and always names the group.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rondo.activity import Activity, progress
from rondo.batch import ROW_ID, Batch
from rondo.checkpoint import Files
from rondo.columns import TOPK_IDS
from rondo.config.auto import engine_for
from rondo.config.schema import EngineConfig, FrozenEngineConfig, OptimizerConfig, TorchBackendConfig
from rondo.errors import ConfigError, TrainError
from rondo.models.names import persistent_buffers, separate
from rondo.models.source import ModelSource
from rondo.training import checkpoint
from rondo.training.adapters import BASE, Adapters
from rondo.training.build import build_sharded
from rondo.training.export import VALUE_HEAD, check_export, export_folder
from rondo.training.loss import Loss, Numbers, numbers_of, step_stats
from rondo.training.optimizer import OptimizerStats, ShardedAdamW
from rondo.training.packed import (
    PackedRows,
    dummy,
    expand_columns,
    in_row_order,
    pack,
    plan_passes,
    sequences_of,
)
from rondo.training.routing import Routing
from rondo.training.sharding import (
    LocalRows,
    as_shard,
    boxes_here,
    checksums_of,
    copied,
    gather_buckets,
    layout_of,
    local_of,
    wire_dtypes,
)
from rondo.training.views import Views
from rondo.types import StepStats
from rondo.usage import process_usage
from rondo.weights.layout import Layout


class FsdpEngine:
    """Holds one role's model and optimizer on this rank, and does the verbs. Raises ConfigError or DataError
    for a source or setting that cannot work.
    """

    def __init__(
        self,
        source: ModelSource,
        engine: FrozenEngineConfig,
        # None: a frozen model (reference).
        optimizer: OptimizerConfig | None,
        *,
        # The ranks; a mesh of one axis shards over it.
        mesh: DeviceMesh | Views,
        backend: TorchBackendConfig | None = None,
        head: Literal["lm", "value"] = "lm",
        # Divides the logits.
        temperature: float = 1.0,
        # For schedules that fall.
        total_optimizer_steps: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"temperature={temperature}: log-probs need a temperature above 0")
        self.device = torch.device(device)
        engine, backend = engine_for(engine, self.device.type), backend or TorchBackendConfig()
        self.source = source
        self.config = engine
        self.views = mesh if isinstance(mesh, Views) else Views.of(mesh)
        self._group, self._world = self.views.everyone, self.views.size
        built = build_sharded(
            source,
            engine,
            backend,
            self.views,
            self.device,
            head=head,
            temperature=temperature,
            trained=optimizer is not None,
        )
        self._model = built.model
        self._units = built.units
        self._parts = built.parts
        self._packing = built.packing
        self.adapters = built.adapters
        self._routing = built.routing
        self._held = False  # on the device, by `on_device`
        self.hf_config = built.model.lm.config
        self._parameters = {
            name.removeprefix("lm."): parameter for name, parameter in self._model.named_parameters()
        }
        self._bind()
        if built.stored is not None:
            with Activity(f"reading {source.path}", bound=False):
                held = boxes_here(self.layout(), LocalRows(self._shards))
                boxes = (one for one in held if not one[0].startswith(VALUE_HEAD))
                filled = boxes if self.adapters is None else self.adapters.filling(boxes)
                built.stored.fill(filled, self._parts)
        self._output_dtype = torch.promote_types(getattr(torch, engine.compute_dtype), torch.float32)
        self.optimizer: ShardedAdamW | None = None
        if optimizer is not None:
            elsewhere = isinstance(engine, EngineConfig) and engine.offload_optimizer
            resting = torch.device("cpu") if elsewhere and self.device.type != "cpu" else None
            own, factors = Adapters.split(self._parameters)
            learned = {name: one for name, one in (own | factors).items() if one.requires_grad}
            self.optimizer = ShardedAdamW(learned, optimizer, total_optimizer_steps, self.views, resting)
        if self.adapters is not None:
            self.adapters.check_path(self._shards, self.views)
        if self.device.type != "cpu":
            self._rest()
            self._release_memory()

    # ---- verbs

    def forward(self, batch: Batch, outputs: Mapping[str, str], *, routes: bool = False) -> Batch:
        """Returns new per-token columns, without gradient. outputs: what to compute -> column name.

        E.g. {"log_probs": "old_log_probs"} reads prompt_ids and response_ids and returns Batch(row_id,
        old_log_probs). topk_log_probs also reads teacher_topk_ids, and is wide [N, K]. routes: those of a
        mixture too, routed_experts and prompt_routed_experts. What a batch has of these is replayed, here and
        in `forward_backward`.
        """
        return self._columns(batch, outputs, None, routes=routes)

    def forward_topk(self, batch: Batch, k: int, prefix: str = "teacher") -> Batch:
        """Returns, for distillation, <prefix>_log_probs (of the response tokens), and of the k likeliest
        tokens, in descending order, <prefix>_topk_ids (int32 [N, k]) and <prefix>_topk_log_probs (float32
        [N, k]).

        Raises TrainError when the vocabulary has fewer than k tokens.
        """
        if not 0 < k <= self.hf_config.vocab_size:
            raise TrainError(f"the {k} likeliest tokens of a vocabulary of {self.hf_config.vocab_size}")
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
        from_column = k is None and "topk_log_probs" in outputs
        recorded = self._routing.recorded(batch) if routes and self._routing is not None else None
        with torch.no_grad(), self.on_device(), Activity("forward"):
            for packed in self._passes(batch, outputs):
                topk = self._topk_ids(batch, packed) if from_column else k
                with self._routed(packed, recorded=recorded):
                    results = self._model(packed, tuple(outputs), topk)
                if len(packed.rows):
                    order.append(packed.rows)
                    for name in outputs:
                        flat[name].append(results[name])
            for unit in self._units:  # without a backward pass FSDP leaves units gathered
                unit.reshard()
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

    def _topk_ids(self, batch: Batch, packed: PackedRows) -> torch.Tensor | int:
        """Returns where the wide outputs are: ids [M, K] of column teacher_topk_ids; 1 (any) in a dummy."""
        if not len(packed.rows):
            return 1
        return expand_columns(batch, [TOPK_IDS], packed, self._output_dtype)[TOPK_IDS]

    def forward_backward(self, batch: Batch, loss: Loss) -> StepStats:
        """Adds the gradient of Σ loss over all rows of all ranks to what is there. Returns this rank's
        metrics.
        """
        if self.optimizer is None:
            raise TrainError("forward_backward on a frozen model: it was built without an optimizer")
        return self._run_loss(batch, loss, backward=True)

    def evaluate(self, batch: Batch, loss: Loss) -> StepStats:
        """Returns the loss's metrics, without gradient."""
        with torch.no_grad():
            return self._run_loss(batch, loss, backward=False)

    def optimizer_step(self) -> OptimizerStats:
        """Clips by the global norm and updates; a non-finite norm skips the update and leaves weights and
        moments.
        """
        if self.optimizer is None:
            raise TrainError("optimizer_step on a frozen model: it was built without an optimizer")
        with self.on_device(), Activity("optimizer step"):
            stats = self.optimizer.step()
            if self._routing is None:
                return stats
            return dataclasses.replace(stats, experts=self._routing.finish(skipped=stats.skipped))

    def _run_loss(self, batch: Batch, loss: Loss, *, backward: bool) -> StepStats:
        seen: Numbers = []
        wide = "topk_log_probs" in loss.outputs
        with self.on_device(), Activity("forward and backward" if backward else "forward"):
            if backward and self._routing is not None:
                self._count_experts(batch, loss.outputs, self._routing)
            for packed in self._passes(batch, loss.outputs):
                topk = self._topk_ids(batch, packed) if wide else None
                with self._routed(packed, counts=backward):
                    outputs = self._model(packed, loss.outputs, topk)
                    if len(packed.rows):
                        columns = expand_columns(batch, loss.columns, packed, self._output_dtype)
                        total, metrics = loss(outputs, columns, packed.cu_seqlens)
                        seen += numbers_of(metrics)
                    else:  # a dummy: a gradient of 0, for the collectives of the backward pass
                        total = sum(output.sum() for output in outputs.values()) * 0.0
                    if backward:
                        total.backward()
            for unit in self._units:  # gives back what the last pass left gathered
                unit.reshard()
        return step_stats(seen)

    def _routed(self, packed: PackedRows, **what: Any) -> contextlib.AbstractContextManager[None]:
        """Has a mixture's routers know of the pass inside: see `Routing.during`."""
        return contextlib.nullcontext() if self._routing is None else self._routing.during(packed, **what)

    def _count_experts(self, batch: Batch, outputs: Collection[str], routing: Routing) -> None:
        """Tells a mixture's routers of a mini-batch, in a forward pass of its own where they have to know all
        of it.
        """
        routing.begin(int(np.count_nonzero(batch.lengths("response_ids"))))
        if routing.counts_first:
            with torch.no_grad():
                for packed in self._passes(batch, outputs):
                    with routing.during(packed, counts=True):
                        self._model(packed, ())
            routing.counted()

    def _passes(self, batch: Batch, outputs: Collection[str] = ()) -> Iterator[PackedRows]:
        """Yields this rank's micro-batches, then dummies up to the number of passes of the busiest rank."""
        full = "scores" in outputs
        plan = plan_passes(batch, self._packing.family, self.config.token_budget, full)
        passes = len(plan)
        if self._world > 1:
            most = torch.tensor(passes, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
            passes = int(most)
        prompts, responses = sequences_of(batch)
        for rows in plan:
            progress(of=passes)
            yield pack(
                rows, [prompts[row] for row in rows], [responses[row] for row in rows], self._packing, full
            )
        for _ in range(len(plan), passes):
            progress(of=passes)
            yield dummy(self._packing, full)

    # ---- parameters

    def num_parameters(self) -> int:
        """Returns the number of the whole model's parameters (adapters too); tied tensors count once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def parameters_in_place(self) -> dict[str, torch.Tensor]:
        """Returns Hugging Face name -> tensor that shares the trainer's storage (without adapters); tied
        tensors once. Raises TrainError where there is more than one rank, or they rest quantised.
        """
        if self._world > 1 or (self.adapters is not None and self.adapters.quantised):
            raise TrainError("parameters_in_place needs one rank, and plain weights: use gathered_parameters")
        return {name: shard.to_local().detach() for name, shard in self._shards.items()}

    def copy_parameters_from(self, other: FsdpEngine) -> None:
        """Takes over the parameters (with adapters merged) of another engine of this process that is sharded
        alike, in this one's dtype. This one has no adapters.

        Raises TrainError naming the parameters that differ in shape, or in how they are spread over ranks.
        """
        mine, theirs = self.layout(), other.layout()
        names = {*mine.shapes, *theirs.shapes}
        different = sorted(name for name in names if mine.boxes(name) != theirs.boxes(name))
        if different:
            name = different[0]
            raise TrainError(
                f"parameters cannot be copied, {len(different)} differ in shape or in how ranks share them: "
                f"{name} is {mine.shapes.get(name)} here, {theirs.shapes.get(name)} there; models that are "
                "copied have one shape, and the same `parallel`"
            )
        with torch.no_grad(), self.on_device(), other._weights() as weights:
            for name, shard in self._shards.items():
                shard.to_local().copy_(weights[name])

    def gathered_parameters(
        self, bucket_bytes: int, dtype: str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields full tensors under Hugging Face names, tied ones once, in `dtype` (default: their own).
        Collective: every rank must run through all of it.

        At most `bucket_bytes` (or one tensor) exist beside the shards; on one rank, in their own dtype, the
        tensors are the storage itself. Afterwards all memory that is not in use goes back to the device:
        beside a trainer that gathers there is a generation engine, which may be about to wake.
        """
        with self._weights() as weights:
            yield from gather_buckets(self.layout(dtype), weights, self._group, bucket_bytes)
        self._release_memory()

    def layout(self, dtype: str | None = None) -> Layout:
        """Says which rank of the world holds which box of which parameter (frozen ones too, tied ones once).

        dtype: in which they are sent; None: their own.
        """
        return layout_of(self._shards, self.views, wire_dtypes(self._model.lm, self._shards, dtype))

    @contextlib.contextmanager
    def named_shards(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yields Hugging Face name -> this rank's part: the storage itself, on the device while inside.
        `layout` says where in the whole they are.
        """
        with self._weights() as weights:
            yield weights

    def parameter_checksums(self, dtype: str | None = None) -> dict[str, int]:
        """Returns the checksums (`rondo.weights.checksum`) of the full tensors in `dtype`, without gathering
        them. Collective.
        """
        with self._weights() as weights:
            return checksums_of(self.layout(dtype), weights, self._group)

    @contextlib.contextmanager
    def _weights(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yields this rank's part of what engines and exports get, on the device while inside. Collective
        with adapters, which are merged.
        """
        with self.on_device():
            if self.adapters is None:
                yield LocalRows(self._shards)
            else:
                yield self.adapters.merged(self._shards, self._factors, self.views)

    def _bind(self) -> None:
        """Sees parameters, and buffers that are weights (every rank has them whole), as they lie now."""
        mesh = self.views.dense
        shards = {name: as_shard(one, local_of(one), mesh) for name, one in self._parameters.items()}
        self._shards, self._factors = Adapters.split(shards)
        for name, buffer in persistent_buffers(self._model.lm):
            self._shards[name] = as_shard(buffer, buffer, mesh)

    # ---- state

    def state(self) -> checkpoint.State:
        """Returns all state (parameters, moments, counters) as tensors that share storage; for
        torch.distributed.checkpoint. With adapters: of the parameters only those that learn.
        """
        shards, state = self._shards, checkpoint.State()
        if self.adapters is not None:
            own = {name: shard for name, shard in shards.items() if self.adapters.learns(name)}
            shards = own | self._factors
            with self.on_device():
                state[BASE] = self.adapters.base_checksum(self._shards, self.views).clone()
        state |= {
            f"model.{name}": as_shard(one, local_of(one), self.views.dense) for name, one in shards.items()
        }
        if self.optimizer is not None:
            state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
            state["optimizer.steps"] = self._common(state["optimizer.steps"])
        return state

    def _common(self, steps: torch.Tensor) -> torch.Tensor:
        """Returns the counters as the ranks that have rows have them: a rank without rows of a parameter
        never advances its counter.
        """
        steps = steps.to(self.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX, self._group)
        return steps.cpu()

    def load_state(self, state: checkpoint.State) -> None:
        """Takes over a state of the same sharding, e.g. a snapshot. Raises TrainError for other entries."""
        own = self.state()
        if own.keys() != state.keys():
            raise TrainError(f"the state to load has other entries: {sorted(own.keys() ^ state.keys())[:4]}")
        with torch.no_grad():
            for name, tensor in own.items():
                local_of(tensor).copy_(local_of(state[name]))
        if self.optimizer is not None:
            self.optimizer.load_steps(state["optimizer.steps"])

    def snapshot(self) -> checkpoint.State:
        """Returns a copy of `state` in host memory, that `save` can write later while training goes on."""
        return {name: copied(tensor) for name, tensor in self.state().items()}

    def save(self, path: str, state: checkpoint.State | None = None) -> Files:
        """Writes `state` (a snapshot; default: as it is now). Collective. Returns the checksums of the files
        of all ranks.
        """
        return checkpoint.save(self.state() if state is None else state, path, self._group)

    def load(self, path: str, files: Files) -> None:
        """Reads what `save` wrote, on any number of ranks. files: what it returned. Collective.

        Raises CheckpointError.
        """
        state = self.state()  # shares storage, except the counters: reading into it loads all but these
        checkpoint.load(state, path, files, self._group)
        if self.adapters is not None:
            self.adapters.check_loaded(state, path)
        if self.optimizer is not None:
            self.optimizer.load_steps(state["optimizer.steps"])

    def export(self, path: str) -> None:
        """Writes a Hugging Face folder (config, safetensors; a critic's value head beside), and reads it
        again to compare. Collective, and all ranks write. Raises CheckpointError naming a tensor that comes
        back as another.
        """
        checksums, layout = self.parameter_checksums(), self.layout()
        tensors = separate(self.gathered_parameters(256 << 20), self._parts)
        with Activity(f"writing {path}", bound=False):
            export_folder(tensors, layout.parameters, self._parts, self.source, path, self._group)
            with self._weights() as weights:
                dtype, held = getattr(torch, self.config.param_dtype), boxes_here(layout, weights)
                check_export(path, self.source, dtype, held, checksums, self._group)
            if self.adapters is not None:
                folder, base = f"{path}/adapter", self.source.path
                with self.on_device():
                    self.adapters.export(folder, self._factors, self._shards, base, self.views)
        dist.barrier(self._group)  # when any rank returns, the folder is whole

    # ---- memory

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes ever in use: of the device's allocator, or of this process on a CPU."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return process_usage().peak_memory_bytes

    def _release_memory(self) -> None:
        """Gives what torch's allocator keeps for later back to the device: a generation engine in another
        process may need it.
        """
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Keeps parameters on the device inside, all verbs; afterwards they rest where the config says."""
        if self.device.type == "cpu" or self._held:  # nothing ever moves; or nothing has to
            yield
            return
        self._held = True
        try:
            self._move(self.device)
            yield
        finally:
            self._held = False
            self._rest()

    def _rest(self) -> None:
        if self.config.offload_params:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if next(iter(self._shards.values())).to_local().device != device:
            self._model.to(device)
            self._bind()
            if self.optimizer is not None:  # its tensors share the storage that has just moved
                self.optimizer.rebind()
