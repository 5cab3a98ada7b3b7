"""MegatronBackend: megatron-core's layers and pipelines over tensor, pipeline and context parallel ranks, and
AdamW whose moments the ranks with the same parameters share out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rondo.config.schema import EngineConfig, MegatronBackendConfig, OptimizerConfig
from rondo.core.errors import ConfigError, TrainError
from rondo.models.attention import fitting
from rondo.models.family import family_of
from rondo.models.loading import build_empty
from rondo.models.names import parts_of, persistent_buffers
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.models.value_head import replace_lm_head
from rondo.planning.memory import Owner, ResidencyPlan
from rondo.platform import Residency
from rondo.system.activity import Activity
from rondo.training.backend import ModelSpec, OptimizerStats, Use
from rondo.training.checkpoint import State
from rondo.training.megatron.adapters import StageAdapters
from rondo.training.megatron.families import (
    TensorPiece,
    check_layout,
    check_settings,
    check_targets,
    chunks_of,
    layers_of_stages,
    pieces_of,
)
from rondo.training.megatron.routes import StageRoutes, count_ahead, routing_of
from rondo.training.megatron.shards import (
    FlatRun,
    StageRows,
    StageWeights,
    Turns,
    as_part,
    assembled,
    filling,
    layout_of,
    places_left,
    read,
    runs_of,
)
from rondo.training.megatron.stage import Grid, ModelStage, check_version, transformer_config
from rondo.training.offload import HostMemory
from rondo.training.packed import PackedLayout, PackedRows
from rondo.training.passes import Passes, RecordedRoutes
from rondo.training.torch_backend.head import check_outputs
from rondo.training.torch_backend.optimizer import MOMENTS, ShardedAdamW
from rondo.training.views import EXPERT, EXPERT_SHARD, PIPELINE, SHARD, Views, local_of, names_of
from rondo.weights.sync import Sent, WeightSource


class MegatronBackend:
    """See `training.backend.Backend`."""

    def __init__(self, spec: ModelSpec, views: Views, device: torch.device) -> None:
        backend, engine = spec.backend, spec.config
        assert isinstance(backend, MegatronBackendConfig)
        check_version()
        check_settings(engine, spec.optimizer, device)
        self.device = device
        self.group = views.everyone
        self._views = views
        self._head = spec.head
        trains = spec.optimizer is not None
        compute: torch.dtype = getattr(torch, engine.compute_dtype)
        lm, stored = build_empty(
            spec.source, torch.float32, "cpu", "transformers", output_head=spec.head == "lm"
        )
        check_layout(lm.config, views.sizes, backend)
        self.hf_config, self.parts = lm.config, parts_of(lm)
        lora = engine.lora if isinstance(engine, EngineConfig) else None
        self._adapters = None if lora is None else StageAdapters(spec.source, lora)
        adapters, factors = None, dict[str, torch.Tensor]()
        if self._adapters is not None:
            adapters, factors = self._adapters.set, self._adapters.first
        value_head = None
        if spec.head == "value":
            value_head = replace_lm_head(lm, spec.source.path, torch.float32)
        self._grid = _grid_of(views)
        layers = layers_of_stages(int(lm.config.num_hidden_layers), views.sizes, backend)
        if self._adapters is not None:
            chunks = [chunks_of(layers, backend.virtual, stage) for stage in range(self._grid.stages)]
            check_targets(self._adapters.set.by_weight, chunks[:-1] if spec.head == "value" else chunks)
        again = isinstance(engine, EngineConfig) and bool(engine.gradient_checkpointing)
        recompute = backend.recompute if again else None
        config = transformer_config(
            lm, layers, backend.virtual, self._grid, compute, recompute, backend.options
        )
        self.stage = ModelStage(lm, layers, self._grid, config, device, adapters, trains=trains)
        self.stage.attach(
            None if value_head is None else value_head.to(device).requires_grad_(trains),
            temperature=spec.temperature,
            logits_bytes=engine.logits_bytes,
            vocabulary=views.vocabulary(lm.config.vocab_size),
        )
        self.routing = None
        if trains and isinstance(engine, EngineConfig):
            self.routing = routing_of(lm, engine.router, views, device, self.stage, lora=lora is not None)
        self.routes = None if self.routing is None else self.routing.routes
        self._wide = torch.promote_types(compute, torch.float32)
        family, attention = family_of(lm.config), fitting(spec.source.attention, lm.config)
        tensor, at_once = views.sizes.tensor, self._grid.stages if backend.virtual > 1 else 1
        self.packing = PackedLayout(
            family, device, compute, attention, views.context, multiple=tensor, multiple_of_passes=at_once
        )
        buffers = dict(persistent_buffers(lm))
        there = dict(lm.named_parameters()) | buffers
        # Of one that learns: what it is trained in, though what is read is rounded to what computes.
        dtypes: dict[str, str] = dict.fromkeys(there, engine.param_dtype if trains else engine.compute_dtype)
        dtypes |= {name: str(one.dtype).removeprefix("torch.") for name, one in buffers.items()}
        of_head = dict(() if value_head is None else value_head.named_parameters(VALUE_HEAD.rstrip(".")))
        there |= of_head
        there |= factors
        dtypes |= dict.fromkeys(of_head.keys() | factors.keys(), "float32")
        self._buffers = frozenset(buffers)
        learning = there.keys() - buffers.keys() if lora is None else of_head.keys() | factors.keys()
        self._num_learning = len(learning)
        shapes = {name: tuple(one.shape) for name, one in there.items()}
        self.own = self.stage.tensors()
        self.pieces = {
            name: pieces_of(*self.stage.place_of(name), lm.config)
            for name, one in self.own.items()
            if one is not self.stage.own_copy
        }
        unknown = sorted(name for name, pieces in self.pieces.items() if not pieces)
        if unknown:
            raise ConfigError(
                f"actor.backend=megatron: what {unknown[0]} is in a checkpoint is in no table (is it of "
                "a layer that actor.backend.options asks for?)",
                key="actor.backend",
            )
        self.layout = layout_of(self.pieces, shapes, dtypes, self.group, views.sizes)
        for name in (name for name, one in self.own.items() if one is self.stage.own_copy):
            self.pieces[name] = pieces_of("embedding.word_embeddings.weight", 0, lm.config)
        self._turns = Turns(self.stage, {name: self.own[name] for name in self.pieces})
        self._runs: dict[str, FlatRun] = {}
        self.optimizer: ShardedAdamW | None = None
        if spec.optimizer is not None:
            rests = isinstance(engine, EngineConfig) and engine.offload_optimizer
            self._start_optimizer(spec.optimizer, spec.total_optimizer_steps, rests=rests)
        with Activity(f"reading {spec.source.path or 'the model'}", bound=False):
            places = filling(self.own, self.pieces, self.layout, self._put)
            rest = places_left(places, there if stored is None else of_head | factors)
            if stored is None:
                assert not list(rest)
            else:
                stored.fill(rest, self.parts)
        self.exact = self._buffers | of_head.keys() | factors.keys()
        """Names of tensors that are sent as they are, whatever the others are rounded to."""
        self.residency = self._reside(spec)
        self.residency.built()
        if self._adapters is not None:
            self._adapters.check_path(self._computing())

    def _start_optimizer(self, config: OptimizerConfig, total_steps: int | None, *, rests: bool) -> None:
        """Makes weights in float32, and moments, of what this rank updates. rests: in host memory."""
        self.stage.make_buffers()
        self._runs = runs_of(self.stage)
        self.stage.drop_gradients()
        # In float32 they are what computes.
        weights = {name: torch.nn.Parameter(run.weights.float()) for name, run in self._runs.items()}
        computing = {
            name: run.weights for name, run in self._runs.items() if run.weights.dtype != torch.float32
        }
        first_of_tensor = dist.get_rank(self._grid.tensor) == 0
        counted = [
            name
            for name in self._runs
            if self.own[name] is not self.stage.own_copy
            and (first_of_tensor or self.pieces[name][0].cut is not None)
        ]
        self.optimizer = ShardedAdamW(
            weights,
            config,
            total_steps,
            self._views,
            "streamed" if rests else None,
            counted=counted,
            computing=computing,
        )

    # ---- passes and steps

    def run(
        self,
        passes: Passes,
        outputs: tuple[str, ...],
        use: Use,
        *,
        backward: bool = False,
        recorded: RecordedRoutes | None = None,
    ) -> None:
        """See `Backend.run`. Ranks of other stages than the last get its outputs, too, and use them for all
        but the gradient.
        """
        if backward and self.optimizer is None:
            raise TrainError("forward_backward on a frozen model: it was built without an optimizer")
        check_outputs(outputs, values=self._head == "value")  # on all stages, of which one has the head
        last: list[dict[str, torch.Tensor]] = []

        def at_the_end(hidden: torch.Tensor, packed: PackedRows) -> torch.Tensor:
            found = self.stage.chunks[-1].outputs_of(hidden, packed, outputs)
            total = use(packed, found)
            last.append({name: one.detach() for name, one in found.items()})
            return hidden.sum() * 0.0 if total is None else total

        routes = StageRoutes(self.routing, recorded, counts=backward)
        with self.residency.during("update" if backward else "forward"):
            if backward:
                self.stage.have_gradients()
            if backward and self.routing is not None:
                count_ahead(self.routing, passes, self.stage)
            with torch.set_grad_enabled(backward):
                self.stage.run(passes, len(passes), at_the_end, routes.around, backward=backward)
            if self._grid.stages > 1 and outputs:
                self._tell_outputs(passes, outputs, use, last)
            routes.tell(self._grid.pipeline)

    def _tell_outputs(
        self, passes: Passes, outputs: tuple[str, ...], use: Use, last: list[dict[str, torch.Tensor]]
    ) -> None:
        """Sends the last stage's outputs to the others, which use them. Collective over the stages."""
        source = dist.get_global_rank(self._grid.pipeline, self._grid.stages - 1)
        for found in last:  # of the last stage, which need not lay out the passes again
            for name in outputs:
                dist.broadcast(found[name].contiguous(), source, group=self._grid.pipeline)
        for packed in passes if not self.stage.is_last else ():
            told = {}
            for name in outputs:
                shape: tuple[int, ...] = (len(packed.targets),)
                if name.startswith("topk"):
                    assert packed.topk is not None
                    shape += (packed.topk if isinstance(packed.topk, int) else packed.topk.shape[1],)
                dtype = torch.int32 if name == "topk_ids" else self._wide
                told[name] = torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(told[name], source, group=self._grid.pipeline)
            with torch.no_grad():
                use(packed, told)

    def step(self) -> OptimizerStats:
        """See `Backend.step`."""
        if self.optimizer is None:
            raise TrainError("optimizer_step on a frozen model: it was built without an optimizer")
        with self.residency.during("update"):
            self.stage.have_gradients()  # of a step without a pass before it
            self.stage.finish_gradients()
            stats = self.optimizer.step({name: run.gradients for name, run in self._runs.items()})
            if not stats.skipped:
                self.stage.gather_parameters()
            self.stage.drop_gradients()
            if self.routing is None:
                return stats
            return dataclasses.replace(stats, experts=self.routing.finish(skipped=stats.skipped))

    def retune(self, lr: float | None, temperature: float) -> None:
        """See `Backend.retune`."""
        head = self.stage.chunks[-1].head
        if head is not None:
            head.temperature = temperature
        if lr is not None and self.optimizer is not None:
            self.optimizer.lr = lr

    # ---- parameters

    def num_parameters(self) -> int:
        """See `Backend.num_parameters`."""
        return sum(
            math.prod(shape) for name, shape in self.layout.shapes.items() if name not in self._buffers
        )

    def parameters(self, what: Sent = "merged") -> WeightSource:
        """See `Backend.parameters`: as they compute, not the weights in float32 that steps add to; but A and
        B, and what these are merged into, of those in float32.
        """
        if self._adapters is not None:
            return self._adapters.source(what, self._computing(), self._exactly())
        if what != "merged":
            raise TrainError(f"there are no adapters to send ({what}): the model has none")
        return self._computing()

    def _computing(self) -> StageWeights:
        """Returns all as it computes."""
        return StageWeights(
            lambda: StageRows(self.own, self.pieces), self.layout, self.exact, self.residency, self.group
        )

    def _exactly(self) -> StageWeights:
        """Returns what learns in float32."""

        def rows() -> StageRows:
            wide = {}
            for name, own in self.own.items():
                if self._learns(name):
                    run, part = self._runs.get(name), self._parts_of(name).get("model")
                    wide[name] = self._turns.told(name, self._turns.joined(name, own, run, part))
            return StageRows(self.own | wide, self.pieces)

        return self._computing().part(lambda name: True, rows)

    def take(self, source: WeightSource) -> None:
        """See `Backend.take`."""
        if self._adapters is not None:
            raise TrainError("parameters are copied to a model without adapters")
        with self.residency.during("gather", changes=True), source.local() as weights:
            for name, own in self.pieces.items():
                self._put(name, assembled(own, self.own[name], weights))

    def parameters_in_place(self) -> dict[str, torch.Tensor]:
        """See `Backend.parameters_in_place`. Raises TrainError always."""
        raise TrainError("megatron's parameters are no checkpoint's, and are not read in place: gather them")

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """See `Backend.without_adapters`."""
        if self._adapters is None:
            raise TrainError("there are no adapters to take off: without actor.lora its start is gone")
        return self.stage.adapters.off()

    def export_adapters(self, path: str) -> None:
        """See `Backend.export_adapters`."""
        if self._adapters is not None:
            base_checksum = int(self._adapters.base_checksum(self._computing()))
            self._adapters.files.export(
                path, self._adapters.whole(self._exactly()), base_checksum, self.group
            )

    def _put(self, name: str, whole: torch.Tensor) -> None:
        """Sets a parameter. whole: all of this tensor rank's, in float32."""
        with torch.no_grad():
            self.own[name].copy_(whole)
            if name in self._runs:
                assert self.optimizer is not None
                self.optimizer.weights_of(name).copy_(self._runs[name].of(whole))

    # ---- state

    def state(self) -> State:
        """See `Backend.state`: the entries, and their names, are the torch backend's. A rank has those of the
        parameters whose turn is its own, and in host memory: weights and moments in float32, of which others
        update parts, have no room on the device beside what trains.
        """
        return self.snapshot(HostMemory(self.device))

    def snapshot(self, memory: HostMemory) -> State:
        """See `Backend.snapshot`: one parameter after another is put together on the device."""
        saved = self._saved()
        turns = {name: own for name, own in saved.items() if self._turns.mine(name)}
        entries = [
            (f"{prefix}.{one.name}", one, read(one, self._whole_on_meta(name)))
            for name, own in turns.items()
            for prefix in self._prefixes_of(name)
            for one in own
        ]
        places = memory.views([part for _, _, part in entries])
        state = {
            name: as_part(one, place, self._sharing(one))
            for (name, one, _), place in zip(entries, places, strict=True)
        }
        with self.residency.during("gather"), torch.no_grad():
            for name in saved:
                parts, run = self._parts_of(name), self._runs.get(name)
                for prefix in self._prefixes_of(name):
                    whole = self.own[name].detach()
                    if self._learns(name):
                        whole = self._turns.joined(name, whole, run, parts.get(prefix))
                    for one in turns.get(name, ()):
                        local_of(state[f"{prefix}.{one.name}"]).copy_(read(one, whole))
        if self.optimizer is not None:
            state["optimizer.steps"] = self._steps()
        if self._adapters is not None:
            state |= self._adapters.entry(self._computing())
        return state

    def _saved(self) -> dict[str, tuple[TensorPiece, ...]]:
        """Returns what a checkpoint has of the stage: with adapters that which learns."""
        return {
            name: own
            for name, own in self.pieces.items()
            if self._adapters is None or self.own[name].requires_grad
        }

    def _whole_on_meta(self, name: str) -> torch.Tensor:
        """Returns what a checkpoint has of a parameter, without its numbers."""
        dtype = torch.float32 if self._learns(name) else None
        return torch.empty_like(self.own[name], dtype=dtype, device="meta")

    def _learns(self, name: str) -> bool:
        """Says whether steps move a tensor of the stage by its gradient."""
        return self.optimizer is not None and self.own[name].requires_grad

    def _prefixes_of(self, name: str) -> tuple[str, ...]:
        """Returns the first words of names in a checkpoint: of a parameter, and of its moments."""
        return ("model", *(f"optimizer.{one}" for one in MOMENTS)) if self._learns(name) else ("model",)

    def _parts_of(self, name: str) -> dict[str, torch.Tensor]:
        """Returns what this rank updates of a parameter, and the moments of that, by these words; nothing
        where all of it is in others' runs.
        """
        if self.optimizer is None or name not in self._runs:
            return {}
        moments = self.optimizer.moments_of(name)
        return {
            "model": self.optimizer.weights_of(name),
            **{f"optimizer.{one}": moments[one] for one in MOMENTS},
        }

    def _steps(self) -> torch.Tensor:
        """Returns the counters as the torch backend has them: each of the model's tensors has been updated as
        often as any of this rank's.
        """
        assert self.optimizer is not None
        schedule, *updates = self.optimizer.steps().tolist()
        most = torch.tensor(max(updates, default=0.0), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return torch.tensor([schedule, *[float(most)] * self._num_learning])

    def adopt(self, state: State, path: str) -> None:
        """See `Backend.adopt`. Collective."""
        if self._adapters is not None:
            self._adapters.files.check_loaded(state, path)
        with self.residency.during("gather", changes=True), torch.no_grad():
            for name, own in self._saved().items():
                like, parts = self.own[name], self._parts_of(name)
                for prefix in self._prefixes_of(name):
                    whole = torch.empty_like(like, dtype=torch.float32)
                    if self._turns.mine(name):
                        mine = {one.name: local_of(state[f"{prefix}.{one.name}"]) for one in own}
                        whole = assembled(own, like, mine)
                    self._turns.told(name, whole)
                    if prefix == "model":
                        self._put(name, whole)
                    elif prefix in parts:
                        parts[prefix].copy_(self._runs[name].of(whole))
        if self.optimizer is not None:
            steps = state["optimizer.steps"]
            own_updates = steps[1:2].expand(len(self._runs))
            self.optimizer.load_steps(torch.cat([steps[:1], own_updates]))

    def _sharing(self, piece: TensorPiece) -> DeviceMesh:
        """Returns the ranks that share a tensor of a checkpoint out, this one among them, with their parts in
        host memory.
        """
        group = self._grid.alone
        if piece.along == "tensor" and self._views.tensor is not None:
            group = self._views.tensor.get_group()
        if piece.along == "expert" and self._views.expert is not None:
            group = self._views.expert[EXPERT].get_group()
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(piece.along,))

    # ---- memory

    def _reside(self, spec: ModelSpec) -> Residency:
        """Says what rests where, and what will be on the device."""
        rests, stage = spec.config.offload_params, self.stage
        moments, passing = (0, None) if self.optimizer is None else self.optimizer.moments_planned()
        weights, gradients = (
            sum(one.nbytes for one in part) for part in (stage.parameters(), stage.gradients())
        )
        return Residency(
            self.device,
            yields=rests or spec.yields_memory,
            resting=stage.resting() if rests else None,
            plan=ResidencyPlan(weights, gradients, moments, rests, passing),
            held=self._on_device,
        )

    def _on_device(self) -> dict[Owner, int]:
        """Measures what is there now."""
        moments = 0 if self.optimizer is None else self.optimizer.moments_there()
        return {**self.stage.held(), "moments": moments}


def _grid_of(views: Views) -> Grid:
    """Returns the groups that Megatron wants, out of the role's."""
    if views.alone is not None:
        alone = views.alone.get_group()
    else:
        assert views.size == 1, "ranks that see no grid of their own"
        alone = views.everyone
    names, expert = names_of(views.dense), views.expert
    same = views.dense[SHARD].get_group() if len(names) > 1 else views.dense.get_group()
    return Grid(
        pipeline=views.dense[PIPELINE].get_group() if PIPELINE in names else alone,
        tensor=alone if views.tensor is None else views.tensor.get_group(),
        same=same,
        expert=alone if expert is None else expert[EXPERT].get_group(),
        same_experts=same if expert is None else expert[EXPERT_SHARD].get_group(),
        alone=alone,
    )
