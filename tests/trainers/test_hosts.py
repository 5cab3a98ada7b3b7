"""Whose CPU time is in which number, with hosts and children that say what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rondo.config.schema import ClusterConfig
from rondo.tracking import Timers
from rondo.trainers.loop import report
from rondo.trainers.loop.report import HostClock


class Group:
    """Ranks on `devices`, those in `alive` live; each answers with what `used` says of its device."""

    def __init__(self, devices: tuple[int, ...], used: dict[int, float]) -> None:
        self.devices, self.used, self.alive = devices, used, tuple(range(len(devices)))

    async def call_each(self, method: Callable[..., Any]) -> dict[int, float]:
        return {rank: self.used[self.devices[rank]] for rank in self.alive}


def test_children_of_this_process_count_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    children = [10.0]
    monkeypatch.setattr(report, "children_cpu_seconds", lambda: children[0])
    timers = Timers(lambda: 0.0, lambda: 0.0)
    clock = HostClock(ClusterConfig())

    def used(seconds: float) -> None:
        children[0] = seconds

    async def main() -> None:
        used(13.0)  # a first evaluation
        await clock.start([], timers)
        timers.start_step()
        assert timers.cpu_seconds == 3.0
        used(15.0)
        await clock.count([], timers)
        assert timers.end_step()["timing/cpu_s"] == 2.0
        used(14.5)  # an engine has just ended, and its time is not in its parent's yet
        await clock.count([], timers)
        assert timers.end_step()["timing/cpu_s"] == 0.0
        used(19.0)
        await clock.count([], timers)
        assert timers.end_step()["timing/cpu_s"] == 4.0
        assert timers.cpu_seconds == 9.0  # of the 19, those after the first 10

    asyncio.run(main())


def test_each_host_counts_once_and_a_dead_one_no_more() -> None:
    used = {0: 5.0, 1: 7.0, 2: 1.0}
    groups = [Group((0, 1), used), Group((1, 2), used), Group((0,), used)]
    timers = Timers(lambda: 0.0, lambda: 0.0)
    clock = HostClock(ClusterConfig(backend="ray"))

    async def main() -> None:
        await clock.start(groups, timers)  # type: ignore[arg-type]
        assert timers.cpu_seconds == 0.0
        used.update({0: 6.0, 1: 9.0, 2: 5.0})
        await clock.count(groups, timers)  # type: ignore[arg-type]
        assert timers.cpu_seconds == 1 + 2 + 4
        groups[1].alive = ()
        used.update({0: 6.5, 1: 9.5, 2: 50.0})
        await clock.count(groups, timers)  # type: ignore[arg-type]
        assert timers.cpu_seconds == 7 + 0.5 + 0.5

    asyncio.run(main())
