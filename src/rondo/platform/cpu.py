"""The CPU."""

from __future__ import annotations

import os

import torch

from rondo.core.errors import ConfigError
from rondo.platform.base import Numbers, Platform
from rondo.system.usage import give_back_free_memory, memory_bytes, process_usage


class Cpu(Platform):
    """The host's own processors and memory, as one device."""

    kind = "cpu"
    title = "CPU"
    host = True
    collectives = "gloo"
    half = "float32"
    recomputes = False
    engines = frozenset({"vllm", "sglang"})
    numbers = Numbers(
        scores=1 << 20,
        cached_scores=1 << 17,
        gathered_bytes=1 << 20,
        checksum_words=1 << 19,  # 4 MiB of 8 bytes each
        moments=1 << 20,
    )

    def count(self) -> int:
        """See Platform.count."""
        return 1

    def device(self, index: int = 0) -> str:
        """See Platform.device; a CPU has no number."""
        if index:
            raise ConfigError(f"cpu:{index}: the CPU is one device")
        return self.kind

    def memory(self, device: torch.device | str) -> tuple[int, int]:
        """See Platform.memory; of this machine, or of what it may use of it. Where the system does not say,
        more than anything needs: then only what is asked for sets a bound.
        """
        total, free = memory_bytes()
        return free or 1 << 62, total or 1 << 62

    def total(self, index: int) -> int:
        """See Platform.total."""
        return self.memory(self.kind)[1]

    def peak(self, device: torch.device | str) -> int:
        """See Platform.peak; of all that this process has ever had in memory, tensors or not."""
        return process_usage().peak_memory_bytes

    def release(self, device: torch.device | str) -> None:
        """See Platform.release; of what the C library keeps."""
        give_back_free_memory()

    def describe(self, index: int) -> str:
        """See Platform.describe."""
        return f"{os.cpu_count()} cores"
