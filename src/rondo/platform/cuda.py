"""CUDA, and what torch calls so: a build for ROCm has the same names (docs/hardware.md: where it differs)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rondo.platform.base import Made, Numbers, Platform, Shared, SideStream

_GIB = 1 << 30
_VARLEN = (8, 0)  # the oldest compute capability that torch's own FlashAttention runs on


class _Copies(SideStream):
    """A stream of CUDA's. Memory that it copies from or to is freed only behind a `wait` or `finish`: torch's
    allocator knows it as memory of the stream that computes.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """See SideStream.copy."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """See SideStream.wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """See SideStream.finish."""
        self._stream.synchronize()


class Cuda(Platform):
    """GPUs that torch reaches by `torch.cuda`."""

    kind = "cuda"
    title = "GPU"
    collectives = "nccl"
    own_groups = True
    visible = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"
    half = "bfloat16"
    recomputes = True
    engines = frozenset({"vllm", "sglang"})
    ipc = True
    remembers = True
    pins = True
    graphs = True
    wide_products = True
    triton = True
    numbers = Numbers(
        scores=1 << 26,
        cached_scores=None,
        gathered_bytes=256 << 20,
        checksum_words=1 << 24,  # 128 MiB of 8 bytes each
        moments=1 << 23,
    )

    def available(self) -> bool:
        """See Platform.available."""
        return torch.cuda.is_available()

    def count(self) -> int:
        """See Platform.count."""
        return torch.cuda.device_count()

    def why_none(self) -> tuple[str, str]:
        """See Platform.why_none."""
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch is built without CUDA: rondo runs on the CPU", ""
        built = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
        remedy = f"check nvidia-smi, the driver, and {self.visible}"
        return f"torch is built for {built}, but sees no device", remedy

    def describe(self, index: int) -> str:
        """See Platform.describe."""
        found = torch.cuda.get_device_properties(index)
        memory = f"{found.total_memory / _GIB:.1f} GiB"
        return f"{found.name}, {memory}, compute capability {found.major}.{found.minor}"

    def ray_options(self) -> dict[str, Any]:
        """See Platform.ray_options; Ray has a word of its own for these."""
        return {"num_gpus": 1}

    def use(self, device: torch.device | str) -> None:
        """See Platform.use."""
        torch.cuda.set_device(device)

    def current(self) -> int:
        """See Platform.current."""
        return torch.cuda.current_device()

    def memory(self, device: torch.device | str) -> tuple[int, int]:
        """See Platform.memory. A context takes some hundred MiB."""
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)

    def total(self, index: int) -> int:
        """See Platform.total."""
        return int(torch.cuda.get_device_properties(index).total_memory)

    def peak(self, device: torch.device | str) -> int:
        """See Platform.peak."""
        return int(torch.cuda.max_memory_allocated(device))

    def reset_peak(self, device: torch.device | str) -> None:
        """See Platform.reset_peak."""
        torch.cuda.reset_peak_memory_stats(device)

    def release(self, device: torch.device | str) -> None:
        """See Platform.release."""
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def remember_memory(self, on: bool) -> None:
        """See Platform.remember_memory."""
        torch.cuda.memory._record_memory_history("all" if on else None)

    def write_memory(self, path: str) -> None:
        """See Platform.write_memory."""
        torch.cuda.memory._dump_snapshot(path)

    def stream(self, device: torch.device | str) -> SideStream:
        """See Platform.stream."""
        return _Copies(device)

    def uuid(self, index: int) -> str:
        """See Platform.uuid; of a slice of a card (MIG) its own."""
        return str(torch.cuda.get_device_properties(index).uuid)

    def share(self, memory: torch.Tensor) -> Shared:
        """See Platform.share.

        By what torch.multiprocessing does for a tensor (`reduce_tensor`), without its pickle. torch counts
        the readers of a handle, in a file in shared memory, and keeps freed memory until all have counted
        themselves off (torch/csrc/CudaIPCTypes.cpp: while the count is above 0). A reader that is killed
        never does, so the one that it expects is counted off here: the caller keeps the memory by itself.
        What others count off afterwards makes the count negative, which torch does not mind.
        """
        index, *parts = memory.untyped_storage()._share_cuda_()
        handle, size, offset, counter, counter_offset, event, awaits_event = parts
        torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
        return Shared(
            self.kind,
            self.uuid(index),
            (handle, size, offset, counter, counter_offset, event, bool(awaits_event)),
        )

    def opened(self, shared: Shared) -> torch.Tensor:
        """See Platform.opened. Opening waits, on the stream, for what had been asked of the device when the
        handle was made (torch's event), and takes a millisecond or so.
        """
        here = {self.uuid(index): index for index in range(self.count())}
        if shared.uuid not in here:
            raise RuntimeError(
                f"it is on {self.title} {shared.uuid}, and this process sees {', '.join(here)}"
            )
        device = torch.device(self.kind, here[shared.uuid])
        with torch.cuda.device(device):  # and CUDA begins, where nothing has used it yet
            memory = torch.empty(0, dtype=torch.uint8, device=device)
            return memory.set_(torch.UntypedStorage._new_shared_cuda(device.index, *shared.parts))

    def wait(self, device: torch.device | str) -> None:
        """See Platform.wait."""
        torch.cuda.current_stream(device).synchronize()

    def capture(self, step: Callable[[], Made], pool: Any) -> tuple[Any, Made]:
        """See Platform.capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # warm-up: handles and workspaces must exist before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = step()
        return graph, out

    def communicator(
        self, store: dist.Store, rank: int, ranks: list[int], name: str, seconds: float, device: torch.device
    ) -> Any:
        """See Platform.communicator."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        options.group_name = name
        options.global_ranks_in_group = ranks
        return dist.ProcessGroupNCCL(store, rank, len(ranks), options)

    def flash(self) -> tuple[str, ...]:
        """See Platform.flash."""
        return ("flash-attn", "torch") if torch.cuda.get_device_capability() >= _VARLEN else ("flash-attn",)
