"""The memory of one device, which a generation engine in another process may need too."""

from __future__ import annotations

import torch


def release_memory(device: torch.device) -> None:
    """Gives what torch's allocator keeps for later back to the device (nothing to do on a CPU): no other
    process could use it.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def memory_in_use(device: torch.device) -> int | None:
    """Bytes of the device that all processes together use; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
