"""AdamW on the local shards: clipping by the global norm, skipping of non-finite gradients, schedules of the
learning rate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rondo.config.schema import OptimizerConfig, ScheduleConfig
from rondo.core.errors import ConfigError
from rondo.training.backend import OptimizerStats
from rondo.training.torch_backend.adamw_8bit import AdamW8bit, moments_8bit, shape_of
from rondo.training.torch_backend.resting import Moments, Way, resting_moments
from rondo.training.views import Views, as_shard, local_of

STEP = "step"  # what torch's optimizers call the counter that each parameter has beside its moments
MOMENTS = ("exp_avg", "exp_avg_sq")  # what it calls these
_SHARE = "share"  # of the learning rate, in a group of parameters
_WIDE = "weights"  # beside the moments, of a parameter that rests with them


class ShardedAdamW:
    """Runs AdamW, torch's or that of 8 bits, on plain tensors that share the shards' storage (DTensor
    dispatch costs more than the step). Every call of `step` counts for the schedule, also a skipped one.
    """

    def __init__(
        self,
        # Name -> parameter: sharded over the ranks, or plain where there is one.
        parameters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        total_steps: int | None,
        # The ranks that the parameters are spread over.
        views: Views,
        # How the moments come from host memory and go there; None: they stay with the parameters.
        offload: Way | None = None,
        # What lr is multiplied with, by name of a parameter; others: 1.
        shares: Mapping[str, float] = MappingProxyType({}),
        # Those whose gradients are in the norm; None: of several ranks that hold the same the first one's.
        counted: Collection[str] | None = None,
        # Of parameters that only steps read, what computes in their place: it gets them, rounded, behind each
        # step. They rest where the moments do.
        computing: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._parameters = parameters
        self._config = config
        self._total_steps = total_steps
        self._views = views
        self.num_steps = 0
        self.lr = config.lr
        """What the schedule multiplies."""
        if counted is None:
            counted = [
                name
                for name, one in parameters.items()
                if not isinstance(one, DTensor) or views.spec_of(one).first(dist.get_rank())
            ]
        self._counted = set(counted)
        self._computing = computing
        self._locals = {name: torch.nn.Parameter(local_of(one)) for name, one in parameters.items()}
        # Called for its error: a schedule that cannot work fails now, not after the warm-up.
        lr_ratio(warmup_steps(config.schedule, total_steps), config.schedule, total_steps)
        in_8_bits = config.moments == "8bit"
        kind = AdamW8bit if in_8_bits else functools.partial(torch.optim.AdamW, fused=True)
        groups: dict[float, list[torch.nn.Parameter]] = {}
        for name, local in self._locals.items():
            if local.numel():  # a rank may have no row of one
                groups.setdefault(shares.get(name, 1.0), []).append(local)
        self._adamw = kind(
            [{"params": locals_, _SHARE: share} for share, locals_ in groups.items()],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        # Made now, of empty shards too: a checkpoint is loaded in place, into the same entries on every rank.
        fresh: dict[str, dict[str, torch.Tensor]] = {}
        for name, local in self._locals.items():
            of = local.data if offload is None else torch.empty_like(local.data, device="meta")
            fresh[name] = moments_8bit(parameters[name], of) if in_8_bits else _moments(of)
            if offload is not None and name in computing:
                fresh[name][_WIDE] = torch.empty_like(of)
        self._device = next(iter(self._locals.values())).device
        self._resting = None if offload is None else resting_moments(offload, fresh, self._device)
        moments = fresh if self._resting is None else self._resting.at_rest
        for name, local in self._locals.items():
            step = torch.zeros((), dtype=torch.float32, device=local.device)
            self._adamw.state[local] = {STEP: step}
            if _WIDE in moments[name]:
                moments[name][_WIDE].copy_(local.detach())
                parameters[name].data = moments[name][_WIDE]  # what was on the device is free
        self._move(moments)

    def moments_of(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the tensors of a parameter's moments, by the name of each; a parameter that rests with them
        is one.
        """
        state = self._adamw.state[self._locals[name]]
        return {entry: tensor for entry, tensor in state.items() if entry != STEP}

    def weights_of(self, name: str) -> torch.Tensor:
        """Returns what steps add to, where it is."""
        return self._locals[name].detach()

    def rebind(self) -> None:
        """Points at the parameters' storage again after it moved."""
        for name, local in self._locals.items():
            local.data = local_of(self._parameters[name])

    def step(self, gradients: Mapping[str, torch.Tensor] | None = None) -> OptimizerStats:
        """Clips, updates and drops the gradients (None: those that the parameters have). Synchronises with
        the host once: the norm decides whether the update is skipped.
        """
        lr = self.lr * lr_ratio(self.num_steps, self._config.schedule, self._total_steps)
        self.num_steps += 1
        if gradients is None:
            gradients = {
                name: local_of(parameter.grad)
                for name, parameter in self._parameters.items()
                if parameter.grad is not None and self._locals[name].numel()
            }
        every = list(gradients.values())
        counted = [gradient for name, gradient in gradients.items() if name in self._counted]
        norm = global_norm(counted, self._views.everyone, self._device)
        grad_norm = float(norm)  # the one read of the device
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            if self._config.grad_clip is not None and every:
                scale = torch.clamp(self._config.grad_clip / (norm + 1e-6), max=1.0)  # as clip_grad_norm_
                torch._foreach_mul_(every, scale.to(every[0].dtype))
            for parameter_group in self._adamw.param_groups:
                parameter_group["lr"] = lr * parameter_group[_SHARE]
            if self._resting is None:
                self._update(gradients)
            else:
                for there in self._resting.passing(gradients):
                    names = list(there)
                    self._move(there)
                    del there  # their owner frees them
                    self._update({name: gradients[name] for name in names if name in gradients})
                    self._move({name: self._resting.at_rest[name] for name in names})
        for parameter in self._parameters.values():
            parameter.grad = None
        return OptimizerStats(grad_norm, skipped, lr)

    def _update(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Updates some parameters: AdamW passes over those without a gradient."""
        for name, gradient in gradients.items():
            self._locals[name].grad = gradient
        self._adamw.step()
        for name in gradients:
            self._locals[name].grad = None
            if name in self._computing:
                self._computing[name].copy_(self._locals[name].detach())

    def _move(self, moments: Moments) -> None:
        """Has AdamW take some parameters' moments for its own, and parameters that rest with them."""
        for name, own in moments.items():
            local = self._locals[name]
            self._adamw.state[local].update(own)
            if _WIDE in own:
                local.data = own[_WIDE]

    def moments_planned(self) -> tuple[int, int | None]:
        """Returns the bytes of all moments, and of those that pass over the device at one time; None: they
        stay there. With them those of parameters that do not compute.
        """
        moments = [one for name in self._locals for one in self.moments_of(name).values()]
        if self._resting is None:
            moments += [self._locals[name] for name in self._computing]
            return sum(one.nbytes for one in moments), None
        return sum(one.nbytes for one in moments), self._resting.passes

    def moments_there(self) -> int:
        """Returns the bytes of moments on the device; of those that rest, the most since the last call."""
        if self._resting is None:
            return self.moments_planned()[0]
        return self._resting.passed()

    def state(self) -> dict[str, DTensor | torch.Tensor]:
        """Returns the moments as sharded tensors that share storage, and the step counters (of the schedule,
        then one per parameter).
        """
        out: dict[str, DTensor | torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            for moment, local in self.moments_of(name).items():
                shape = shape_of(moment, parameter)
                out[f"{moment}.{name}"] = as_shard(parameter, local, self._views.dense, shape)
        out["steps"] = self.steps()
        return out

    def steps(self) -> torch.Tensor:
        """Returns the counters: of the schedule, then one per parameter."""
        steps = torch.stack([self._adamw.state[local][STEP] for local in self._locals.values()]).cpu()
        return torch.cat([torch.tensor([float(self.num_steps)]), steps])

    def load_steps(self, steps: torch.Tensor) -> None:
        """Takes over the counters; moments are loaded in place."""
        self.num_steps = int(steps[0])
        for local, step in zip(self._locals.values(), steps[1:], strict=True):
            self._adamw.state[local][STEP].fill_(float(step))


def _moments(local: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the moments, at 0, of torch's AdamW."""
    return {name: torch.zeros_like(local) for name in MOMENTS}


def global_norm(
    gradients: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Returns the Euclidean norm of all ranks' local gradients together, float64 []. Those of half precision
    are summed in float32: in their own dtype a norm has 8 bits.
    """
    if gradients:
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        squares = torch.stack(torch._foreach_norm(gradients, dtype=wide)).double().square().sum()
    else:
        squares = torch.zeros((), dtype=torch.float64, device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def warmup_steps(schedule: ScheduleConfig, total_steps: int | None) -> int:
    """Returns the optimizer steps of the warm-up. Raises ConfigError for a share of an unknown number."""
    if schedule.warmup_ratio and total_steps is None:
        raise ConfigError("optimizer.schedule.warmup_ratio needs the number of optimizer steps in advance")
    return schedule.warmup_steps or int(schedule.warmup_ratio * (total_steps or 0))


def lr_ratio(step: int, schedule: ScheduleConfig, total_steps: int | None) -> float:
    """Returns the learning rate of optimizer step `step` (from 0) as a share of `lr`.

    Warm-up is linear: step s of w gives (s + 1) / w. Then `constant` is 1; `linear` and `cosine` fall from 1
    towards min_ratio, which they reach after total_steps; `wsd` stays at 1 and falls linearly to min_ratio
    over the last decay_steps (default: a tenth of the run). Raises ConfigError when a falling schedule has no
    total_steps.
    """
    warmup = warmup_steps(schedule, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if total_steps is None:
        raise ConfigError(
            f"optimizer.schedule.name={schedule.name} needs the number of optimizer steps in advance"
        )
    start = warmup
    if schedule.name == "wsd":
        decay = max(1, total_steps // 10) if schedule.decay_steps is None else schedule.decay_steps
        start = max(warmup, total_steps - decay)
    done = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    fall = 0.5 * (1 - math.cos(math.pi * done)) if schedule.name == "cosine" else done
    return 1.0 - (1.0 - schedule.min_ratio) * fall
