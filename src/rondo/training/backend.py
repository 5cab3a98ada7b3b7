"""What a framework has to bring so that an `Engine` trains with it: one model, and its optimizer, on this
rank. The unit is all micro-batches of a verb, because pipelines own that loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rondo.config.schema import BackendConfig, FrozenEngineConfig, OptimizerConfig, TorchBackendConfig
from rondo.core.types import RouteShape, StepStats
from rondo.models.names import Parts
from rondo.models.source import ModelSource
from rondo.platform import Residency
from rondo.training.checkpoint import State
from rondo.training.offload import HostMemory
from rondo.training.packed import PackedLayout, PackedRows
from rondo.training.passes import Passes, RecordedRoutes
from rondo.weights.sync import Sent, WeightSource

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class ModelSpec:
    """How to build a role's engine, the same on all of its ranks; picklable."""

    source: ModelSource
    """Where the model comes from."""
    config: FrozenEngineConfig
    """The engine's section of the configuration."""
    optimizer: OptimizerConfig | None = None
    """None: a frozen model."""
    backend: BackendConfig = field(default_factory=TorchBackendConfig)
    """What computes."""
    head: Head = "lm"
    """What is behind the last block; a value head gives a number per token."""
    temperature: float = 1.0
    """Divides the logits; above 0."""
    total_optimizer_steps: int | None = None
    """For schedules that fall."""
    yields_memory: bool = False
    """After each phase, memory that is not in use goes back to the device: an engine that sleeps and wakes
    shares it (rollout.sleep)."""


# Is handed each micro-batch, dummies too, with its outputs, [M] or wide [M, K], in at least float32. Returns
# what is minimised, a sum: None only where there is no backward pass.
Use = Callable[[PackedRows, Mapping[str, torch.Tensor]], torch.Tensor | None]


@dataclass(frozen=True)
class ExpertLoad:
    """How one optimizer step's tokens were spread over experts, on all ranks; means over the layers."""

    largest: float
    """Tokens of the busiest expert, over what each would have at equal shares."""
    idle: float
    """The share of experts that got no token."""
    balance: float | None
    """The balancing loss, without its weight; None: there is none."""
    replayed: float | None
    """The share of assignments (of a token to experts) that were known and replayed; None: no replay."""
    rerouted: float | None
    """The share of these that would have been others now; None: there are none."""

    def metrics(self, prefix: str) -> StepStats:
        """Returns the numbers as metrics of a role."""
        stats = StepStats()
        stats.add_mean(f"{prefix}/expert_load_max", self.largest)
        stats.add_mean(f"{prefix}/experts_idle", self.idle)
        if self.balance is not None:
            stats.add_mean(f"{prefix}/balance_loss", self.balance)
        if self.replayed is not None:
            stats.add_mean(f"{prefix}/replayed", self.replayed)
        if self.rerouted is not None:
            stats.add_mean(f"{prefix}/rerouted", self.rerouted)
        return stats


@dataclass(frozen=True)
class OptimizerStats:
    """What one step did."""

    grad_norm: float
    """Of all ranks together, before clipping; not finite exactly when the step was skipped."""

    skipped: bool
    """Nothing was updated, because the gradient was not finite."""

    lr: float
    """The learning rate of this step."""

    experts: ExpertLoad | None = None
    """How a mixture's tokens were spread."""


class Backend(Protocol):
    """Everything an engine knows of a framework."""

    hf_config: PreTrainedConfig
    """The model's, as transformers has it."""
    group: dist.ProcessGroup
    """All ranks of the role."""
    packing: PackedLayout
    """How rows are laid out for the model, and on which device."""
    routes: RouteShape | None
    """How many experts a token chooses in how many layers; None: the model is no mixture."""
    residency: Residency
    """What the model has on its device, and when: every verb is in a phase of it."""
    parts: Parts
    """Of which tensors of a checkpoint the model's parameters are made."""

    def run(
        self,
        passes: Passes,
        outputs: tuple[str, ...],
        use: Use,
        *,
        backward: bool = False,
        recorded: RecordedRoutes | None = None,
    ) -> None:
        """Computes `outputs` of every micro-batch, with the parameters where the model computes. Only with
        `backward` there are gradients: they are summed over micro-batches and ranks, and added to what is
        there. The passes may be gone through more than once. recorded: gets the routes of a mixture.
        Collective.

        Raises TrainError for outputs that the model's head does not have, or a backward pass of a frozen
        model.
        """
        ...

    def step(self) -> OptimizerStats:
        """Clips by the global norm, updates, and drops the gradients; a non-finite norm skips the update and
        leaves weights and moments. Collective. Raises TrainError for a frozen model.
        """
        ...

    def retune(self, lr: float | None, temperature: float) -> None:
        """Takes another learning rate, which the schedule multiplies (None: the model is frozen), and another
        temperature of the logits, from here on.
        """
        ...

    def num_parameters(self) -> int:
        """Returns the number of the whole model's parameters (adapters too); tied tensors count once."""
        ...

    def parameters(self, what: Sent) -> WeightSource:
        """Returns what syncs and exports read. Raises TrainError for adapters of a model that has none."""
        ...

    def take(self, source: WeightSource) -> None:
        """Takes over the parameters of a model that is spread alike, in this one's dtype. Raises TrainError
        where this one has adapters.
        """
        ...

    def parameters_in_place(self) -> dict[str, torch.Tensor]:
        """Returns the storage of the weights itself, by a checkpoint's names. Raises TrainError where it is
        not whole and plain.
        """
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the model is the one without its adapters. Raises TrainError where there are none."""
        ...

    def export_adapters(self, path: str) -> None:
        """Writes a folder that peft loads; nothing of a model without adapters. Collective. Raises
        CheckpointError.
        """
        ...

    def state(self) -> State:
        """Returns all that a checkpoint holds, as tensors that share storage, so that reading into them loads
        it (not counters), or that are in host memory for this alone. Collective.
        """
        ...

    def snapshot(self, memory: HostMemory) -> State:
        """Returns copies of all in `state`, in host memory. Collective."""
        ...

    def adopt(self, state: State, path: str) -> None:
        """Takes over what shares no storage from a `state` that was read from `path`. Raises CheckpointError
        where it does not belong to this model.
        """
        ...
