"""Who holds what of a device's memory in each phase of a step, and the one place that moves it and gives it
back. Everybody else asks here; a test holds that (tests/test_layers.py).

    phase      of                 on the device
    rest       a model            weights and moments, but for what rests in host memory
    forward    a model            the same with all weights; activations
    update     a model            beside these gradients, and the moments, or two blocks of those that rest
    gather     a model            all weights; a few buckets of what other ranks have
    generate   an engine          its weights, its cache; asleep: what its package keeps

Who is done gives back before anybody takes: what torch's allocator keeps of one phase, no other process can
have. So a phase of a model ends with what rests gone and, where an engine waits for the memory (`yields`),
the rest given back; all ranks give back before an engine over several of them wakes (`make_room`); and an
engine in a process of its own gives back when it goes to sleep. An engine that is built beside a trainer
takes a share of what is free (`cache_share`), not all of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Protocol, get_args

import torch
import torch.distributed as dist

from rondo.planning.engine_memory import shared_cache
from rondo.planning.memory import Owner, Phase, ResidencyPlan
from rondo.platform.choose import platform_of
from rondo.system.usage import give_back_large_blocks


def cache_share(device: torch.device | str) -> tuple[int, int]:
    """Returns the bytes that an engine's cache may have on a device, and those that are free there now."""
    free = platform_of(device).memory(device)[0]
    return shared_cache(free), free


def give_back(device: torch.device | str, *, is_waited_for: bool = False) -> None:
    """Gives what nobody uses back to a device, before another process takes it. A host's memory goes back by
    itself where nobody waits for it (is_waited_for).
    """
    platform = platform_of(device)
    if is_waited_for or not platform.host:
        platform.release(device)


class Resting(Protocol):
    """What of a model is in host memory between its phases."""

    def bring(self) -> None:
        """Has all of it on the device; where there is no room for that, none of it."""
        ...

    def rest(self, *, changed: bool) -> None:
        """Has it in host memory again, and nothing of it on the device. changed: since it came."""
        ...


class Residency:
    """What one role, a model or an engine, has on a device of this process.

    yields: another one waits for the memory that a phase leaves. resting: None: all stays on the device.
    plan: what a model will have there. held: what it has there now; None: nothing is measured. leaves_holes:
    it computes so that what it frees on a host would fit nothing that comes (`planning.memory`).
    """

    # By device: the most of all phases, each of which has a peak of its own.
    _highest: ClassVar[Counter[str]] = Counter()

    def __init__(
        self,
        device: torch.device | str,
        *,
        yields: bool = False,
        resting: Resting | None = None,
        plan: ResidencyPlan | None = None,
        held: Callable[[], Mapping[Owner, int]] | None = None,
        leaves_holes: bool = False,
    ) -> None:
        self.plan = plan
        self._held = held
        self._measured: Counter[str] = Counter()
        self._device = device
        self._platform = platform_of(device)
        self._yields = yields
        self._leaves_holes = leaves_holes
        self._resting = resting
        self._phase: Phase | None = None
        self._changes = False

    def built(self) -> None:
        """Ends the building of a model, which takes more than a phase does."""
        if self._resting is not None:
            self._resting.rest(changed=True)
        if not self._platform.host:
            self.give_back()
        elif self._yields or self._leaves_holes:
            give_back_large_blocks()

    @contextlib.contextmanager
    def during(self, phase: Phase, *, changes: bool = False) -> Iterator[None]:
        """Has all of a model on the device inside; phases within it are parts of it. changes: the model is
        another one afterwards, as behind every update.
        """
        self._changes |= changes or phase == "update"
        if self._phase is not None:
            # Gradients are there when a step begins; what else there is, the phase's own end sees.
            self._measure(self._phase)
            yield
            return
        if self._held is None and self._resting is None and not self._yields:
            yield
            return
        try:
            self._begin_peak()
            if self._resting is not None:
                self._resting.bring()
            self._phase = phase
            self._measure(phase)
            yield
        finally:
            if self._phase is not None:
                self._end(self._phase)
            self._changes = False
            if self._yields:
                self.give_back()
            self._measure("rest")

    def _end(self, phase: Phase) -> None:
        self._measure(phase)
        self._end_peak(phase)
        self._phase = None
        if self._resting is not None:
            self._resting.rest(changed=self._changes)

    def give_back(self) -> None:
        """See the function of that name."""
        give_back(self._device, is_waited_for=self._yields)

    def make_room(self, group: dist.ProcessGroup) -> None:
        """Gives back on every rank before it returns on any: an engine over several devices is about to wake
        on all of them. Collective.
        """
        self.give_back()
        if not self._platform.host:
            dist.barrier(group)

    # ---- what is measured

    def peak(self) -> int:
        """Returns the most bytes that tensors of this process ever had on the device at one time."""
        return max(self._highest[str(self._device)], self._platform.peak(self._device))

    def measured(self) -> dict[str, int]:
        """Returns, by names like `update_weights_bytes`, the most that each owner had on the device in each
        phase since the last call, what it should have had (`…_planned_bytes`), and the most that all of this
        process had there in a phase (`update_peak_bytes`).
        """
        planned = {
            f"{phase}_{owner}": size
            for phase in get_args(Phase)
            for owner, size in ({} if self.plan is None else self.plan.of(phase)).items()
        }
        found = {f"{name}_bytes": n for name, n in self._measured.items() if n or name in planned}
        found |= {f"{name}_planned_bytes": n for name, n in planned.items() if name in self._measured}
        self._measured.clear()
        return found

    def _measure(self, phase: Phase) -> None:
        for owner, size in {} if self._held is None else self._held().items():
            self._note(f"{phase}_{owner}", size)

    def _begin_peak(self) -> None:
        if self._held is not None:
            self._highest[str(self._device)] = self.peak()
            self._platform.reset_peak(self._device)

    def _end_peak(self, phase: Phase) -> None:
        if self._held is not None:
            self._note(f"{phase}_peak", self._platform.peak(self._device))

    def _note(self, name: str, size: int) -> None:
        self._measured[name] = max(self._measured[name], size)
