"""How fast a step was, beside what its devices can do; and, once, beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rondo.config import Config
from rondo.planning.devices import DeviceRow
from rondo.planning.memory import GIB, total_of
from rondo.planning.placement import Placement
from rondo.planning.plan import MemoryPlan
from rondo.planning.runs import Lengths, Runs
from rondo.planning.shapes import ModelShape
from rondo.planning.step_time import TimePlan, plan_time
from rondo.planning.time import model_flops
from rondo.system.usage import process_usage

# Of the lengths of a step's answers, so many stand for all.
_KEPT = 256
# Which measured seconds belong to a planned phase.
_MEASURED = {
    "generate": ("generate",),
    "score": ("prepare", "reference"),
    "update": ("update_actor", "update_critic", "update_cost_critic", "update_prm"),
    "sync": ("weight_sync",),
}


@dataclass(frozen=True)
class PlannedRun:
    """What is known of a run before it starts."""

    runs: Runs
    """Its models and engines."""
    memory: MemoryPlan
    """What they will hold."""
    warning: str = ""
    """Of what will probably not fit; "": nothing."""


class Speed:
    """Measures the steps of a run by its model's size and its devices."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape | None,
        placement: Placement,
        device: DeviceRow | None,
        planned: PlannedRun | None = None,
    ) -> None:
        self._config = config
        self._shape = shape
        self._learning = len(placement.devices("actor"))
        self._device = device
        self._planned = planned  # until the first step was compared with it
        self._lengths: tuple[float, list[int]] | None = None
        self._before = process_usage().peak_memory_bytes  # any model is made

    def expected(self) -> str:
        """Says in a line what is planned, with rows as long as they may be; "": nothing, or of a device that
        nobody knows.
        """
        planned, device = self._planned, self._device
        if planned is None or device is None:
            return ""
        pools = [pool for pool in planned.memory.pools if pool.phases]
        pool = max(pools, key=lambda one: one.total(one.highest).expected)
        time = plan_time(planned.runs, device)
        phases = ", ".join(f"{phase} {time.seconds(phase):.1f}" for phase in time.phases)
        size = pool.total(pool.highest).expected / GIB
        return (
            f"planned: {size:.1f} GiB of each device in {pool.highest}, its fullest phase; steps of at most "
            f"{time.step:.1f} s ({phases}); `rondo plan` has the rest"
        )

    def take_lengths(self, prompts: npt.NDArray[np.int64], responses: npt.NDArray[np.int64]) -> None:
        """Takes the lengths of a step's rows."""
        if not len(responses):
            return
        shares = (np.arange(_KEPT) + 0.5) / _KEPT
        self._lengths = float(prompts.mean()), [round(x) for x in np.quantile(responses, shares)]

    def of_step(self, metrics: Mapping[str, float], tokens: float, pairs: float) -> dict[str, float]:
        """Returns what a step says of speed. metrics: its own. tokens, pairs: of the rows that were learnt
        from (`count_rows`).

        perf/tokens_per_s_per_device: those tokens, over the whole step and all devices.
        perf/model_flops_per_s: of a device of the actor's, in its update (`planning.time.model_flops`).
        perf/mfu: that, as a share of what the device can do (cluster.card).
        """
        found, step = dict[str, float](), metrics.get("timing/step_s", 0.0)
        if step > 0:
            found["perf/tokens_per_s_per_device"] = tokens / step / self._config.cluster.devices
        seconds = metrics.get("timing/update_actor_s", 0.0)
        if seconds > 0 and self._shape is not None:
            rate = model_flops(self._shape, tokens, pairs) / seconds / self._learning
            found["perf/model_flops_per_s"] = rate
            if self._device is not None:
                itemsize = 2 if "16" in self._config.actor.compute_dtype else 4
                found["perf/mfu"] = rate / self._device.flops_of(itemsize)
        return found

    def beside_plan(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Returns the planned numbers of the first step, how far off they are (planned / measured − 1), and a
        line that says so; nothing where nothing was planned. Seconds are of the lengths that were.
        """
        planned, self._planned = self._planned, None
        if planned is None:
            return {}, ""
        found, told = dict[str, float](), list[str]()
        measured = metrics.get("perf/peak_memory_bytes", 0.0)
        if planned.runs.on_host:
            measured -= self._before
        expected = _in_process(planned)
        if expected and measured > 0:
            found["plan/memory_bytes"], found["plan/error_memory"] = expected, expected / measured - 1
            told.append(f"memory {expected / GIB:.2f} GiB, {expected / measured - 1:+.0%}{_owner(metrics)}")
        if self._device is not None:
            found |= self._seconds(
                planned, plan_time(self._of_rows(planned.runs), self._device), metrics, told
            )
        return found, f"planned beside measured: {'; '.join(told)}" if told else ""

    def _of_rows(self, runs: Runs) -> Runs:
        if self._lengths is None:
            return runs
        prompt, responses = self._lengths
        lengths = Lengths(round(prompt), max(responses), "the first step's", tuple(responses))
        return replace(runs, lengths=lengths)

    def _seconds(
        self, planned: PlannedRun, time: TimePlan, metrics: Mapping[str, float], told: list[str]
    ) -> dict[str, float]:
        found, of_all = dict[str, float](), 0.0
        worst, furthest = "", 0.0
        for phase in time.phases:
            if phase == "generate" and time.overlaps:  # what is measured is the wait for the rest
                continue
            took = sum(metrics.get(f"timing/{name}_s", 0.0) for name in _MEASURED[phase])
            found[f"plan/{phase}_s"] = time.seconds(phase)
            of_all += took
            off = abs(time.seconds(phase) - took)
            worst, furthest = (phase, off) if off > furthest else (worst, furthest)
        if time.overlaps:
            of_all = metrics.get("timing/step_s", 0.0)
        if of_all > 0:
            found["plan/step_s"], found["plan/error_time"] = time.step, time.step / of_all - 1
            said = f", {worst} the furthest" if worst else ""
            told.append(f"a step of {time.step:.2f} s, {time.step / of_all - 1:+.0%}{said}")
        return found


def _in_process(planned: PlannedRun) -> float:
    """Returns the bytes that tensors of a trainer's process will have at most: without contexts, and without
    engines of other processes. On a host that is of one process for all devices; 0 of several ones, whose own
    libraries nobody measures, and of models so small that these are most of it.
    """
    engine = planned.runs.engine
    if planned.runs.on_host:
        local = planned.runs.config.cluster.backend.name == "local"
        size = total_of(planned.memory.of_machine(lambda pool: pool.highest, copies=False)).expected
        return float(size) if local and size >= GIB else 0.0
    apart = engine is not None and (engine.own_process or engine.foreign)
    most = 0
    for pool in planned.memory.pools:
        for held in pool.phases.values():
            mine = {
                owner: size
                for owner, size in held.items()
                if not owner.startswith("host ") and not (apart and owner.startswith("rollout "))
            }
            most = max(most, total_of(mine).expected)
    return float(most)


def _owner(metrics: Mapping[str, float]) -> str:
    """Names the owner whose planned bytes are furthest from those that were there, of those that are told."""
    ends = "_planned_bytes"
    off = {
        name.removeprefix("perf/").removesuffix(ends): abs(size - metrics[f"{name.removesuffix(ends)}_bytes"])
        for name, size in _planned_sizes(metrics, ends)
    }
    name = max(off, key=lambda one: off[one], default="")
    return f" ({name.replace('_', ' ')} the furthest)" if off.get(name) else ""


def _planned_sizes(metrics: Mapping[str, float], ends: str) -> Iterator[tuple[str, float]]:
    for name, size in metrics.items():
        if name.endswith(ends) and f"{name.removesuffix(ends)}_bytes" in metrics:
            yield name, size
