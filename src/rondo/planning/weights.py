"""How the trainer's weights reach the generation engines: decided once, for all who make the engines, move
the weights, count their memory or describe the run.

same process, same dtype, one rank       shared       nothing moves
same host processes                      gathered     all-gather in buckets, then each rank's engines
other host processes                     collective   point to point, along a transfer plan
rollout.weight_transport=disk            disk         safetensors in the run folder

From there to an engine in a process of its own there is one more step: `plan_hop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rondo.config.schema import Config, RolloutConfig
from rondo.core.errors import ConfigError
from rondo.core.types import Hop

Adapters = Literal["none", "merged", "alone"]
_OWN = ("native", "transformers")  # engines of this environment, which keep adapters as they come


@dataclass(frozen=True)
class WeightPlan:
    """What `plan_weights` decides."""

    route: Literal["shared", "gathered", "collective", "disk"]
    """The way that weights take from the trainer to the engines."""
    shares_base: bool
    """Engines use the trainer's weights without adapters in place; these never change."""

    @property
    def shares_storage(self) -> bool:
        """Says whether engines are made of the trainer's tensors."""
        return self.route == "shared" or self.shares_base


def plan_weights(
    config: Config, actor: Sequence[int], rollout: Sequence[int], *, trains: bool = True
) -> WeightPlan:
    """Plans how weights reach the engines, from the devices of actor and rollout; the configuration has no
    `auto` left. trains: False where engines get weights only once: nothing between two versions matters then.

    Raises ConfigError where the two share some of their devices but not all.
    """
    lora, transport = config.actor.lora, config.rollout.weight_transport if trains else "auto"
    mine, theirs = set(actor), set(rollout)
    # One storage wants whole parameters that stay where they are, in the dtype of both.
    in_one_place = (
        len(mine) == 1
        and mine == theirs
        and not runs_in_own_process(config.rollout)
        and config.actor.backend.name == "torch"  # whose tensors are a checkpoint's
        and rollout_dtype(config) == config.actor.param_dtype
        and not config.actor.offload_params
        and transport == "auto"
    )
    # Engines that go on during an update need the old weights.
    synchronous = config.trainer.max_staleness == 0 or not trains
    route: Literal["shared", "gathered", "collective", "disk"] = "gathered"
    if transport == "disk":
        route = "disk"
    elif mine.isdisjoint(theirs):
        route = "collective"
    elif not theirs <= mine:
        raise ConfigError(
            f"the actor is on devices {sorted(mine)} and the rollout engines on {sorted(theirs)}: give both "
            "one pool, or two that have no device in common; or use rollout.weight_transport=disk"
        )
    elif in_one_place and lora is None and synchronous:
        route = "shared"
    whole_base = lora is not None and lora.base_dtype is None
    return WeightPlan(route, in_one_place and adapters_of(config) == "alone" and whole_base)


def plan_hop(config: Config, *, ipc: bool, trains: bool = True) -> Hop:
    """Plans the last step of weights, from the host's process to an engine's own. ipc: the platform lets one
    process open another's memory. trains: see `plan_weights`.

    Raises ConfigError where rollout.weight_transport=ipc is not possible.
    """
    engine, transport = config.rollout.engine, config.rollout.weight_transport if trains else "auto"
    why = ""
    if not runs_in_own_process(config.rollout):
        why = "the engine is in the host's process (rollout.engine.process=own gives it one of its own)"
    elif not ipc:
        why = "devices of this kind have no memory that another process can open"
    elif engine.tensor_parallel > 1:
        why = (
            f"rollout.engine.tensor_parallel={engine.tensor_parallel}: only the first of these devices has a "
            "bucket, and the others' workers would open it from theirs"
        )
    elif adapters_of(config) == "alone" and engine.name not in _OWN:
        why = f"actor.lora.send=adapters: {engine.name} reads adapters from a file (merged would do)"
    if transport == "ipc" and why:
        raise ConfigError(f"ipc: {why}; set rollout.weight_transport=auto", key="rollout.weight_transport")
    if transport == "ipc":
        return "ipc"
    return "host" if why or transport in ("host", "disk") else "auto"


def adapters_of(config: Config) -> Adapters:
    """Says how the actor's adapters reach the engines: in the weights, or alone after the first time."""
    lora = config.actor.lora
    if lora is None:
        return "none"
    return "alone" if lora.send == "adapters" else "merged"


def carried(config: Config) -> str:
    """Says how adapters travel, as the end of a route's description."""
    written = {"none": "", "merged": ", adapters merged", "alone": ", adapters alone after the first time"}
    return written[adapters_of(config)]


def runs_in_own_process(rollout: RolloutConfig) -> bool:
    """Says whether engines have processes of their own; rollout.engine.process=auto: one engine shares the
    host's process.
    """
    process = rollout.engine.process
    return rollout.replicas > 1 if process == "auto" else process == "own"


def rollout_dtype(config: Config) -> str:
    """Returns the dtype of the generation engines, and of the weights on their way to them, so that no byte
    is sent to be thrown away. The configuration is `settled`.
    """
    dtype = config.rollout.dtype or config.actor.compute_dtype
    assert dtype != "auto"
    return dtype
