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
engine in a process of its own gives back when it goes to sleep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from rondo.platform.choose import platform_of
from rondo.system.usage import give_back_large_blocks

Phase = Literal["forward", "update", "gather"]


class Resting(Protocol):
    """What of a model is in host memory between its phases."""

    def bring(self) -> None:
        """Has all of it on the device."""
        ...

    def rest(self, *, changed: bool) -> None:
        """Has it in host memory again, and nothing of it on the device. changed: since it came."""
        ...


class Residency:
    """What one role, a model or an engine, has on a device of this process.

    yields: another one waits for the memory that a phase leaves. resting: None: all stays on the device.
    """

    def __init__(
        self, device: torch.device | str, *, yields: bool = False, resting: Resting | None = None
    ) -> None:
        self._device = device
        self._platform = platform_of(device)
        self._yields = yields
        self._resting = resting
        self._phase: Phase | None = None
        self._changes = False

    def built(self) -> None:
        """Ends the building of a model, which takes more than a phase does."""
        if self._resting is not None:
            self._resting.rest(changed=True)
        if not self._platform.host:
            self.give_back()
        elif self._yields:
            give_back_large_blocks()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Has all of a model on the device inside, which only an update changes; phases within it are parts
        of it.
        """
        self._changes |= phase == "update"
        if self._phase is not None or (self._resting is None and not self._yields):
            yield
            return
        self._phase = phase
        try:
            if self._resting is not None:
                self._resting.bring()
            yield
        finally:
            self._phase = None
            if self._resting is not None:
                self._resting.rest(changed=self._changes)
            self._changes = False
            if self._yields:
                self.give_back()

    def give_back(self) -> None:
        """Gives what nobody uses back to the device, before another process takes it. A host's memory goes
        back by itself where nobody waits for it.
        """
        if self._yields or not self._platform.host:
            self._platform.release(self._device)

    def make_room(self, group: dist.ProcessGroup) -> None:
        """Gives back on every rank before it returns on any: an engine over several devices is about to wake
        on all of them. Collective.
        """
        self.give_back()
        if not self._platform.host:
            dist.barrier(group)
