"""Who is told of the worker calls: when each was sent, and when it ran on its host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class CallRecorder(Protocol):
    """Is told of every call of a worker group's ranks, on the controller's event loop.

    device: the device (= host process) that the rank stands on. Each `submitted` is followed by one `record`.
    """

    def submitted(self, role: str, rank: int, device: int, method: str) -> None:
        """The call leaves the controller. Sync calls may wait for others on the host."""

    def record(self, role: str, rank: int, device: int, method: str, start: float, end: float) -> None:
        """The call ran from `start` to `end`: seconds since the epoch on the host's clock.

        Of a call that was cancelled, or whose host died, they are the controller's: sent, and given up.
        """


class CallRecorders:
    """The recorders of a cluster; nobody is told until one is added. lost: devices whose host was found dead,
    before the recorders are told of the call that found it.
    """

    def __init__(self) -> None:
        self.recorders: list[CallRecorder] = []
        self.lost: set[int] = set()

    def submitted(self, role: str, devices: Mapping[int, int], method: str) -> None:
        """A call was sent to these ranks (rank → device)."""
        for recorder in self.recorders:
            for rank, device in devices.items():
                recorder.submitted(role, rank, device, method)

    def record(
        self, role: str, devices: Mapping[int, int], method: str, spans: Mapping[int, tuple[float, float]]
    ) -> None:
        """The call is over on these ranks; spans: rank → (start, end)."""
        for recorder in self.recorders:
            for rank, device in devices.items():
                recorder.record(role, rank, device, method, *spans[rank])
