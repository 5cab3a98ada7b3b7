"""What this process computed in a step, operator by operator, and what its device's memory held: for
`trainer.profile`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rondo.platform.choose import platform_of
from rondo.system.storage import replacing


@dataclass(frozen=True)
class ProfileTurn:
    """What becomes of profiles where a step ends, and the next one begins."""

    ended: str | None = None
    """The folder of the step that ended, where what was recorded of it goes; None: nowhere."""
    begins: bool = False
    """Whether the next step is recorded."""
    memory: bool = False
    """With the history of the device's memory."""


class Profiler:
    """Records what all threads of this process do; at most one records at a time in a process."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._running: Any = None
        self._memory = False

    def turn(self, change: ProfileTurn, name: str) -> None:
        """Ends what is recorded and writes it as `name`, and begins anew. On one thread, always."""
        if self._running is not None:
            self._running.stop()
            if change.ended is not None:
                self._write(Path(change.ended), name)
            if self._memory:
                platform_of(self._device).remember_memory(False)
            self._running = None
        if change.begins:
            self._memory = change.memory
            if self._memory:
                platform_of(self._device).remember_memory(True)
            self._running = self._started()

    def _started(self) -> Any:
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it writes lines of its own into the console
        # An engine in this process decodes on a thread of its own.
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = torch.profiler.supported_activities()
        profiler = torch.profiler.profile(activities=activities, experimental_config=every)
        profiler.start()
        return profiler

    def _write(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{name}.json.gz") as temporary:
            part = temporary.with_name(f".{name}.json.gz")  # compressed, for its name ends so
            self._running.export_chrome_trace(str(part))
            part.replace(temporary)
        if self._memory:
            with replacing(folder / f"{name}.memory.pickle") as temporary:
                platform_of(self._device).write_memory(str(temporary))
