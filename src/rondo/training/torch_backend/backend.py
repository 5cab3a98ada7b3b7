"""TorchBackend: a Hugging Face causal LM under FSDP2, along tensor, expert and context too, its adapters, and
AdamW on what learns. One rank is the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rondo.config.schema import EngineConfig, FrozenEngineConfig, TorchBackendConfig
from rondo.core.errors import TrainError
from rondo.models.names import persistent_buffers
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.planning.memory import Owner, ResidencyPlan, leaves_holes
from rondo.platform import Residency, on_host
from rondo.system.activity import Activity
from rondo.training.adapters import BASE, learns_with_adapters
from rondo.training.backend import ModelSpec, OptimizerStats, Use
from rondo.training.checkpoint import State
from rondo.training.gathering import boxes_here, checksums_of, gather_buckets
from rondo.training.offload import HostMemory, is_there
from rondo.training.passes import Passes, RecordedRoutes
from rondo.training.torch_backend.adapters import Adapters
from rondo.training.torch_backend.build import build_sharded, shares_of
from rondo.training.torch_backend.optimizer import ShardedAdamW
from rondo.training.torch_backend.parameters import LocalRows, layout_of, wire_dtypes
from rondo.training.torch_backend.resting import PlainModel, StreamedModel
from rondo.training.torch_backend.routing import Around, Routing, around_passes
from rondo.training.views import Views, as_shard, in_place_of, local_of
from rondo.weights.layout import Layout
from rondo.weights.sync import Sent, WeightSource


class TorchBackend:
    """See `training.backend.Backend`."""

    def __init__(
        self,
        # Its config without `auto`.
        spec: ModelSpec,
        views: Views,
        device: torch.device,
    ) -> None:
        config, optimizer, backend = spec.config, spec.optimizer, spec.backend
        assert isinstance(backend, TorchBackendConfig)
        self.device = device
        self.views = views
        self.group = views.everyone
        built = build_sharded(spec, views, device)
        self.model = built.model
        self._units = built.units
        self.parts = built.parts
        self.packing = built.packing
        self.adapters = built.adapters
        self.routing = built.routing
        self.routes = None if built.routing is None else built.routing.routes
        self._text_learns = spec.head == "value" or _language_learns(config)
        self.hf_config = built.model.lm.config
        self.by_name = {name.removeprefix("lm."): one for name, one in self.model.named_parameters()}
        self.optimizer: ShardedAdamW | None = None
        self._bind()
        if built.stored is not None:
            with Activity(f"reading {spec.source.path}", bound=False):
                held = boxes_here(self.parameters().layout(), LocalRows(self.shards))
                boxes = (one for one in held if not one[0].startswith(VALUE_HEAD))
                filled = boxes if self.adapters is None else self.adapters.filling(boxes)
                built.stored.fill(filled, self.parts)
        if optimizer is not None:
            elsewhere = isinstance(config, EngineConfig) and config.offload_optimizer
            offload = backend.offload if elsewhere and not on_host(device) else None
            own, factors = Adapters.split(self.by_name)
            learned = {name: one for name, one in (own | factors).items() if one.requires_grad}
            shares = shares_of(learned, optimizer.lr_of_parts, self.packing.images)
            self.optimizer = ShardedAdamW(
                learned, optimizer, spec.total_optimizer_steps, views, offload, shares
            )
        if self.adapters is not None:
            self.adapters.check_path(self.shards, views)
        self.residency = self._reside(spec, backend)
        self.residency.built()

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
        """See `Backend.run`."""
        if backward and self.optimizer is None:
            raise TrainError("forward_backward on a frozen model: it was built without an optimizer")
        with self.residency.during("update" if backward else "forward"), torch.set_grad_enabled(backward):
            if backward and self.routing is not None:
                self._count_experts(passes, self.routing)
            around = around_passes(self.routing, counts=backward, recorded=recorded)
            for packed in passes:
                with around(packed):
                    total = use(packed, self.model(packed, outputs))
                    # Where only the parts for images learn, rows of text have no gradient.
                    if backward and (self._text_learns or packed.images is not None):
                        assert total is not None
                        total.backward()
            for unit in self._units:  # gives back what the last pass left gathered
                unit.reshard()

    def step(self) -> OptimizerStats:
        """See `Backend.step`."""
        if self.optimizer is None:
            raise TrainError("optimizer_step on a frozen model: it was built without an optimizer")
        with self.residency.during("update"):
            stats = self.optimizer.step()
            if self.routing is None:
                return stats
            return dataclasses.replace(stats, experts=self.routing.finish(skipped=stats.skipped))

    def retune(self, lr: float | None, temperature: float) -> None:
        """See `Backend.retune`."""
        self.model.temperature = temperature
        if lr is not None and self.optimizer is not None:
            self.optimizer.lr = lr

    def _count_experts(self, passes: Passes, routing: Routing) -> None:
        """Begins a mini-batch: see `Routing.begin`."""

        def ahead(around: Around) -> None:
            for packed in passes.without_topk():
                with around(packed):
                    self.model(packed, ())

        routing.begin(passes.num_rows, ahead)

    # ---- parameters

    def num_parameters(self) -> int:
        """See `Backend.num_parameters`."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def parameters(self, what: Sent = "merged") -> TorchParameters:
        """See `Backend.parameters`."""
        return TorchParameters(self, what)

    def take(self, source: WeightSource) -> None:
        """See `Backend.take`."""
        if self.adapters is not None:
            raise TrainError("parameters are copied to a model without adapters")
        # Into what rests where it rests: of a frozen model a phase brings nothing back.
        with torch.no_grad(), source.local() as weights:
            for name, shard in self.shards.items():
                shard.to_local().copy_(weights[name])

    def parameters_in_place(self) -> dict[str, torch.Tensor]:
        """See `Backend.parameters_in_place`."""
        if self.views.size > 1 or (self.adapters is not None and self.adapters.quantised):
            raise TrainError("parameters_in_place needs one rank, and plain weights: gather them")
        return {name: shard.to_local().detach() for name, shard in self.shards.items()}

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """See `Backend.without_adapters`."""
        if self.adapters is None:
            raise TrainError("there are no adapters to take off: without actor.lora its start is gone")
        return self.adapters.off()

    def export_adapters(self, path: str) -> None:
        """See `Backend.export_adapters`."""
        if self.adapters is not None:
            with self.residency.during("gather"):
                self.adapters.export(path, self.factors, self.shards, self.views)

    def _bind(
        self, seen: Callable[[torch.Tensor], torch.Tensor] = lambda local: local, moved: bool = False
    ) -> None:
        """Sees parameters, and buffers that are weights (every rank has them whole), as they lie now. seen:
        of what the model holds; what a tensor is while it rests. moved: the model's own tensors lie at other
        places.
        """
        mesh = self.views.dense
        shards = {name: as_shard(one, seen(local_of(one)), mesh) for name, one in self.by_name.items()}
        self.shards, self.factors = Adapters.split(shards)
        for name, buffer in persistent_buffers(self.model.lm):
            self.shards[name] = as_shard(buffer, seen(buffer), mesh)
        if moved and self.optimizer is not None:  # its tensors share the storage
            self.optimizer.rebind()

    # ---- state

    def state(self) -> State:
        """See `Backend.state`. With adapters: of the parameters only those that learn."""
        adapters, state = self.adapters, State()
        if adapters is not None:
            with self.residency.during("gather"):
                state[BASE] = adapters.base_checksum(self.shards, self.views).clone()
        # Looked up behind the phase, which may have moved them.
        own = {
            name: one for name, one in self.shards.items() if adapters is None or learns_with_adapters(name)
        }
        mesh, shards = self.views.dense, own | self.factors
        state |= {f"model.{name}": as_shard(one, local_of(one), mesh) for name, one in shards.items()}
        if self.optimizer is not None:
            state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
            state["optimizer.steps"] = self._common(state["optimizer.steps"])
        return state

    def snapshot(self, memory: HostMemory) -> State:
        """See `Backend.snapshot`."""
        state = self.state()
        copies = memory.copies([local_of(one) for one in state.values()])
        return {name: in_place_of(one, copy) for (name, one), copy in zip(state.items(), copies, strict=True)}

    def _common(self, steps: torch.Tensor) -> torch.Tensor:
        """Returns the counters as the ranks that have rows have them: a rank without rows of a parameter
        never advances its counter.
        """
        steps = steps.to(self.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX, self.views.everyone)
        return steps.cpu()

    def adopt(self, state: State, path: str) -> None:
        """See `Backend.adopt`."""
        if self.adapters is not None:
            self.adapters.files.check_loaded(state, path)
        if self.optimizer is not None:
            self.optimizer.load_steps(state["optimizer.steps"])

    # ---- memory

    def _reside(self, spec: ModelSpec, backend: TorchBackendConfig) -> Residency:
        """Says what rests where, and what will be on the device."""
        offloads, on_card = spec.config.offload_params, not on_host(self.device)
        yields = offloads or spec.yields_memory
        learns = [local_of(one).nbytes for one in self.by_name.values() if one.requires_grad]
        moments, passing = (0, None) if self.optimizer is None else self.optimizer.moments_planned()
        weights = sum(local_of(one).nbytes for one in self.by_name.values())
        plan = ResidencyPlan(weights, sum(learns), moments, offloads, passing)
        if not on_card:
            tiled = backend.mlp_chunk is not None
            holes = leaves_holes(plan, len(self._units) > 0, self.adapters is not None, tiled)
            return Residency(self.device, yields=yields, leaves_holes=self.optimizer is not None and holes)
        resting = None
        if offloads:
            # What is quantised is no parameter: only `Module.to` knows where it is.
            streamed = backend.offload == "streamed" and not (self.adapters and self.adapters.quantised)
            resting = (StreamedModel if streamed else PlainModel)(self.model, self.device, self._bind)
        return Residency(self.device, yields=yields, resting=resting, plan=plan, held=self._on_device)

    def _on_device(self) -> dict[Owner, int]:
        """Measures what is there now."""
        parameters = self.by_name.values()
        gradients = [one.grad for one in parameters if one.grad is not None]
        return {
            "weights": sum(map(_bytes_there, parameters)),
            "gradients": sum(map(_bytes_there, gradients)),
            "moments": 0 if self.optimizer is None else self.optimizer.moments_there(),
        }


def _bytes_there(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return local.nbytes if is_there(local) and not on_host(local.device) else 0


def _language_learns(config: FrozenEngineConfig) -> bool:
    """Says whether something of the language model learns; of a model without images that is all."""
    if not isinstance(config, EngineConfig):
        return True
    return "language" not in config.freeze and (config.lora is None or "language" in config.lora.parts)


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

    @contextlib.contextmanager
    def local(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """See `WeightSource.local`."""
        adapters, views = self._backend.adapters, self._backend.views
        with self._backend.residency.during("gather"):
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
        self._backend.residency.give_back()

    def release_memory(self) -> None:
        """See `WeightSource.release_memory`."""
        self._backend.residency.make_room(self._backend.views.everyone)

    def checksums(self, dtype: str | None = None) -> dict[str, int]:
        """See `WeightSource.checksums`."""
        with self.local() as rows:
            return checksums_of(self.layout(dtype), rows, self._backend.views.everyone)

    def _shards(self) -> dict[str, DTensor]:
        """Returns what is read, as it lies now."""
        own = {} if self._what == "adapters" else self._backend.shards
        return own if self._what == "merged" else own | self._backend.factors
