"""What rondo asks of a kind of device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from rondo.core.errors import ConfigError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Numbers:
    """How much a kind of device does at one time: more costs memory, less leaves it waiting in between."""

    scores: int
    """Attention scores of all heads that blocks of queries have."""
    cached_scores: int | None
    """Scores of a bucket of documents, so that they stay in a core's own cache; None: any number."""
    gathered_bytes: int
    """Keys or values of a decode step that are copied together."""
    checksum_words: int
    """Words that a checksum reads."""
    moments: int
    """Elements of 8-bit moments that are unpacked."""


class SideStream:
    """Copies between a device and host memory. These wait, each for itself; where a platform has queues of
    calls, they run beside what the device computes, in the order in which they are asked for.
    """

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Copies, in each pair, the second tensor into the first one, behind what the device was asked
        before. Returns a mark, for `wait`.
        """
        for target, source in pairs:
            target.copy_(source)

    def wait(self, mark: Any) -> None:
        """Has the device wait, before what it is asked from now on, until the copies up to a mark are
        done.
        """

    def finish(self) -> None:
        """Waits for all copies: from then on the host may read them, and what they read be freed."""


@dataclass(frozen=True)
class Shared:
    """Memory of a device as another process opens it: numbers and bytes, which nothing has to be unpickled
    for.
    """

    kind: str
    """The platform's kind."""
    uuid: str
    """The device, by the name that every process knows it by (`Platform.uuid`)."""
    parts: tuple[int | bytes, ...]
    """What its platform opens it by, in the platform's own order."""


class Platform:
    """A kind of device. One object serves all devices of the kind in a process, and holds nothing.

    `cpu.py` is the shortest one there is. docs/hardware.md says what one of your own needs, and
    tests/platform what each is asked.
    """

    kind: ClassVar[str]
    """Torch's device type: what stands before the colon of "cuda:0"."""
    title: ClassVar[str]
    """What messages call one of its devices: "GPU"."""
    host: ClassVar[bool] = False
    """Its memory is the host's, so that nothing is ever moved or pinned, and no call is queued."""
    collectives: ClassVar[str]
    """Torch's name of the back end for collectives between its tensors: "nccl"."""
    own_groups: ClassVar[bool] = False
    """Weights travel between pools in a group of their own, that can be aborted (`communicator`)."""
    visible: ClassVar[str] = ""
    """The environment variable that says which devices a process sees; "" where there is none."""
    ray_resource: ClassVar[str] = ""
    """What Ray calls one of its devices; "" where Ray does not count them."""
    half: ClassVar[str]
    """What `compute_dtype: auto` is."""
    recomputes: ClassVar[bool]
    """What `gradient_checkpointing: auto` is: its memory is scarcer than its time."""
    engines: ClassVar[frozenset[str]] = frozenset()
    """Engines of other projects that have a build for it, and have been tried with it."""
    ipc: ClassVar[bool] = False
    """Processes of one machine open each other's memory there (`uuid`, `share`, `opened`, `wait`)."""
    remembers: ClassVar[bool] = False
    """It has `remember_memory` and `write_memory` (trainer.profile.memory)."""
    pins: ClassVar[bool] = False
    """Copies from and to pinned memory of the host (`Tensor.pin_memory`) do not wait for what the device was
    asked before."""
    graphs: ClassVar[bool] = False
    """It captures graphs (`capture`)."""
    triton: ClassVar[bool] = False
    """Kernels in triton run there."""
    wide_products: ClassVar[bool] = False
    """torch.mm takes `out_dtype` there."""
    numbers: ClassVar[Numbers]
    """See `Numbers`."""
    path: str = ""
    """How a recipe names it (`path.py:Class`, a dotted name), if it is none of rondo's own."""

    @property
    def name(self) -> str:
        """What cluster.device says."""
        return self.path or self.kind

    # ---- which there are

    def available(self) -> bool:
        """Says whether this process sees a device."""
        return self.count() > 0

    def count(self) -> int:
        """Returns how many devices this process sees."""
        raise NotImplementedError

    def why_none(self) -> tuple[str, str]:
        """Returns why it sees none, and what to do; "" for the second where nothing is wrong."""
        return f"torch sees no {self.kind} device", ""

    def describe(self, index: int) -> str:
        """Writes what `rondo doctor` says of a device: its name, memory, and what else is worth a word."""
        raise NotImplementedError

    def device(self, index: int = 0) -> str:
        """Returns torch's name of a device: "cuda:1"."""
        return f"{self.kind}:{index}"

    def ray_options(self) -> dict[str, Any]:
        """Returns what asks Ray for one device, for a process of Ray's."""
        return {"resources": {self.ray_resource: 1}} if self.ray_resource else {}

    def visible_ids(self) -> list[str]:
        """Returns the ids of the devices that this process sees, as `visible` has them, in torch's order."""
        said = os.environ.get(self.visible) if self.visible else None
        if said is None:
            return [str(index) for index in range(self.count())]
        return [one.strip() for one in said.split(",") if one.strip()]

    def check_here(self) -> None:
        """Raises ConfigError where this process sees no device."""
        if not self.available():
            raise ConfigError(
                f"cluster.device={self.name}, but torch sees no {self.kind.upper()} device here: set "
                "cluster.device=cpu or auto"
            )

    # ---- one of them

    def use(self, device: torch.device | str) -> None:
        """Makes it the calling thread's current device."""

    def current(self) -> int | None:
        """Returns the number of the calling thread's current device; None where devices have none."""
        return None

    def memory(self, device: torch.device | str) -> tuple[int, int]:
        """Returns the bytes that are free on a device, of all processes together, and those that it has. May
        take memory there until this process ends.
        """
        raise NotImplementedError

    def total(self, index: int) -> int:
        """Returns the bytes that a device has. Takes no memory there."""
        raise NotImplementedError

    def peak(self, device: torch.device | str) -> int:
        """Returns the most bytes that this process's tensors had on a device at one time."""
        raise NotImplementedError

    def reset_peak(self, device: torch.device | str) -> None:
        """Has `peak` begin anew, if it can. Only `residency.py` asks for it."""

    def release(self, device: torch.device | str) -> None:
        """Gives what the allocator keeps for later back to a device. Only `residency.py` asks for it."""

    def remember_memory(self, on: bool) -> None:
        """Has the allocator of this process remember, from here on or no more, what it gave and took, and for
        whom. Only where it `remembers`.
        """
        raise NotImplementedError

    def write_memory(self, path: str) -> None:
        """Writes what it remembers, for https://pytorch.org/memory_viz."""
        raise NotImplementedError

    def stream(self, device: torch.device | str) -> SideStream:
        """Returns copies beside what the calling thread asks of a device, if it `pins`."""
        return SideStream()

    # ---- its memory in other processes; only where `ipc`

    def uuid(self, index: int) -> str:
        """Returns what a device is called in every process, whatever number each of them gives it."""
        raise NotImplementedError

    def share(self, memory: torch.Tensor) -> Shared:
        """Returns what another process opens a tensor's memory by. The bytes may change after that, and the
        memory is the caller's to keep until nobody has it open. Raises RuntimeError where this machine does
        not let processes do that.
        """
        raise NotImplementedError

    def opened(self, shared: Shared) -> torch.Tensor:
        """Opens memory of another process, once: uint8 [bytes], on the device that it is on. It is closed
        when the last tensor in it has gone. Raises RuntimeError where that process has gone, the device is
        none of this process's, or the machine does not let it.
        """
        raise NotImplementedError

    def wait(self, device: torch.device | str) -> None:
        """Returns when all that the calling thread has asked of a device is done."""
        raise NotImplementedError

    # ---- what runs there

    def capture(self, step: Callable[[], Made], pool: Any) -> tuple[Any, Made]:
        """Runs a step twice, the second time into a graph; returns the graph, which has `replay()` and
        `pool()`, and what the step has returned. pool: of another graph, to share its memory; None: a new
        one. Only where `graphs`.
        """
        raise NotImplementedError

    def communicator(
        self, store: dist.Store, rank: int, ranks: list[int], name: str, seconds: float, device: torch.device
    ) -> Any:
        """Makes a process group of torch's for `ranks` of the world, that nothing else uses, and returns
        before its members are connected; `eager_connect_single_device` connects them. rank: this one's place
        in `ranks`. seconds: of an operation. Only where `own_groups`.
        """
        raise NotImplementedError

    def flash(self) -> tuple[str, ...]:
        """Returns which kernels of FlashAttention run on the current device, best first: "flash-attn" (the
        package), "torch" (`torch.nn.attention.varlen`).
        """
        return ()

    def why_no_triton(self, dtype: torch.dtype) -> str:
        """Returns why kernels in triton do not compute in a dtype there; "" if they do."""
        if not self.triton:
            return f"kernels in triton run on CUDA devices, and this model is on {self.kind}"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"kernels in triton do not compute in {dtype}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed, which torch's builds for CUDA bring: pip install triton"
        return ""
