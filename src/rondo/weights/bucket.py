"""Tensors between two processes of one machine: buckets in memory that both see, two at most in flight.

    sender                                             receiver
    BucketWriter.add ─ copy ─▶ memory A ─ SharedBucket (a name) ─▶ tensors(): views of the same bytes
                               memory B ◀── filled while A is read; used again when A is confirmed

The host's memory has no name in the file system (`memfd`), but is opened through its owner's /proc entry: it
is gone when the last of the two processes is, whatever ended them, and Docker's small /dev/shm does not limit
it.
Memory of a device is opened by a handle (`Platform.share`), once for many buckets because that is slow, and
belongs to the sender alone: it frees it when all receivers have closed it (`close_opened`) or are gone.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from rondo.core.errors import WeightSyncError
from rondo.platform import Shared, give_back, on_host, platform_of

ALIGNMENT = 64  # bytes
Confirmation = Callable[[], None]
_opened: dict[str, torch.Tensor] = {}  # memory of devices that this process has open, by its key


@dataclass(frozen=True)
class BucketEntry:
    """One tensor in a bucket."""

    name: str
    """The parameter's name."""
    dtype: str
    """The dtype as torch names it ("bfloat16")."""
    shape: tuple[int, ...]
    """The tensor's shape."""
    offset: int
    """Where it begins, in bytes from the bucket's start."""


@dataclass(frozen=True)
class SharedBucket:
    """A handle that can be pickled, opened in any process of the same machine and user; of a device's memory,
    in one that sees the device.
    """

    memory: str | Shared
    """The host's memory, by its path; a device's, by its handle."""
    key: str
    """The memory's own name, by which a process knows it again."""
    num_bytes: int
    """Bytes in use."""
    entries: tuple[BucketEntry, ...]
    """The tensors in it."""

    @contextmanager
    def tensors(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Gives (name, tensor) in the order in which they were added: views of the sender's bytes, to be read
        only, and before the bucket is confirmed; copy what you keep. At the end a device has read them.

        Raises WeightSyncError when the sender is gone, or the memory cannot be opened here.
        """
        if isinstance(self.memory, str):
            pages = torch.frombuffer(self._mapped(self.memory), dtype=torch.uint8)
            yield [(entry.name, _view(pages, entry)) for entry in self.entries]
            return
        if self.key not in _opened:
            try:
                _opened[self.key] = platform_of(self.memory.kind).opened(self.memory)
            except RuntimeError as error:  # what torch raises for every error of a device
                raise WeightSyncError(f"{self._which()} cannot be opened on the device: {error}") from error
        there = _opened[self.key]
        try:
            yield [(entry.name, _view(there, entry)) for entry in self.entries]
        finally:  # after an error, too: the sender frees it
            platform_of(there.device).wait(there.device)

    def _mapped(self, path: str) -> mmap.mmap:
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise WeightSyncError(
                f"{self._which()} cannot be opened at {path}: {error.strerror}; its sender is gone, or on "
                "another machine, or another user"
            ) from error
        try:
            if self.key not in os.path.realpath(f"/proc/self/fd/{descriptor}"):
                raise WeightSyncError(
                    f"{self._which()} is no longer at {path}: its sender gave it up before it was read"
                )
            return mmap.mmap(descriptor, self.num_bytes)  # lives as long as the last view
        finally:
            os.close(descriptor)

    def _which(self) -> str:
        first = self.entries[0].name if self.entries else "none"
        return f"a bucket with {len(self.entries)} tensors ({first})"


def close_opened() -> None:
    """Closes what this process has open of the memory of others' devices; views of it are of no use then."""
    _opened.clear()


class BucketWriter:
    """Fills buckets of at most `bucket_bytes` (a larger tensor gets one of its own) and hands them to `send`.

    send(bucket): ships it and returns a function that waits until the receiver has read it (or raises). At
    most two buckets exist; one is filled while the other is read. Not for several threads at once.
    device: where the buckets are, for receivers that see it; None: in the host's memory. release(): called
    before memory of a device is freed; all receivers that live have closed it (`close_opened`) afterwards.
    """

    def __init__(
        self,
        bucket_bytes: int,
        send: Callable[[SharedBucket], Confirmation],
        device: torch.device | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: at least 1")
        self.bucket_bytes = bucket_bytes
        self.peak_bytes = 0
        self._send = send
        self._device = None if device is None or on_host(device) else device
        self._release = release
        self._free: list[_Memory] = []
        self._filling: _Memory | None = None
        self._entries: list[BucketEntry] = []
        self._used = 0
        self._in_flight: tuple[_Memory, Confirmation] | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor into the bucket that is being filled; sends that first where it is too full."""
        num_bytes = tensor.numel() * tensor.element_size()
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._entries and start + num_bytes > self.bucket_bytes:
            self.flush()
            start = 0
        if self._filling is None:
            self._filling = self._memory(num_bytes)
        entry = BucketEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)
        _view(self._filling.content, entry).copy_(tensor.detach())
        self._entries.append(entry)
        self._used = start + num_bytes
        if self._used >= self.bucket_bytes:
            self.flush()

    def flush(self) -> None:
        """Sends what is there, and returns when the bucket before it is confirmed."""
        memory = self._filling
        if memory is None:
            return
        if self._device is not None:  # the receiver's stream knows nothing of this one's copies
            platform_of(self._device).wait(self._device)
        # At least 1: mmap refuses 0.
        bucket = SharedBucket(memory.handle, memory.key, max(self._used, 1), tuple(self._entries))
        self._filling = None
        self._entries = []
        self._used = 0
        try:
            confirm = self._send(bucket)
        except BaseException:
            self._give_up(memory)
            raise
        before = self._in_flight
        self._in_flight = memory, confirm
        self._settle(before)

    def finish(self) -> None:
        """Sends the rest, waits until all is confirmed, and frees the memory."""
        self.flush()
        before = self._in_flight
        self._in_flight = None
        self._settle(before)
        self.close()

    def close(self) -> None:
        """Frees the memory, without waiting for a confirmation: after an error, or `finish`."""
        held = [*self._free, self._filling, self._in_flight and self._in_flight[0]]
        self._free = []
        self._filling = None
        self._in_flight = None
        self._entries = []
        self._used = 0
        self._give_up(*(one for one in held if one is not None))

    def _settle(self, sent: tuple[_Memory, Confirmation] | None) -> None:
        if sent is None:
            return
        memory, confirm = sent
        try:
            confirm()
        except BaseException:
            self._give_up(memory)
            raise
        if memory.num_bytes > self.bucket_bytes:
            self._give_up(memory)
        else:
            self._free.append(memory)

    def _memory(self, num_bytes: int) -> _Memory:
        if num_bytes <= self.bucket_bytes and self._free:
            return self._free.pop()
        if num_bytes > self.bucket_bytes:
            unused, self._free = self._free, []
            self._give_up(*unused)
        size = max(num_bytes, self.bucket_bytes)
        memory = _HostMemory(size) if self._device is None else _DeviceMemory(size, self._device)
        held = [*self._free, memory, *([self._in_flight[0]] if self._in_flight else [])]
        self.peak_bytes = max(self.peak_bytes, sum(one.num_bytes for one in held))
        return memory

    def _give_up(self, *memories: _Memory) -> None:
        if not memories:
            return
        try:
            if self._device is not None:
                self._release()
        finally:
            for one in memories:
                one.free()
        if self._device is not None:  # what comes next may be another process's
            give_back(self._device)


class _HostMemory:
    """Anonymous memory that another process can open by its path while this object lives."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._descriptor = -1  # for `free`, should there be no memory
        self.key = f"rondo-bucket-{secrets.token_hex(8)}"
        self._descriptor = os.memfd_create(self.key, os.MFD_CLOEXEC)
        self.handle = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        os.ftruncate(self._descriptor, num_bytes)
        self._pages = mmap.mmap(self._descriptor, num_bytes)
        self.content = torch.frombuffer(self._pages, dtype=torch.uint8)

    def free(self) -> None:
        """Gives the memory up; a second call does nothing. The pages go when the receiver's views have gone,
        too.
        """
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        with suppress(AttributeError):  # there is none yet
            del self.content
        with suppress(BufferError, AttributeError):  # a view is alive: the memory goes with it; or none yet
            self._pages.close()

    def __del__(self) -> None:
        self.free()  # of a sync that an error cut short, whose writer nobody closed


class _DeviceMemory:
    """Memory of a device that another process can open by its handle while this object has it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.key = f"rondo-bucket-{secrets.token_hex(8)}"
        try:
            self.content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise WeightSyncError(
                f"{device} has no room for a bucket of {num_bytes} bytes of weights; lower "
                f"rollout.bucket_bytes, or set rollout.weight_transport=host: {error}"
            ) from error
        try:
            self.handle = platform_of(device).share(self.content)
        except RuntimeError as error:  # what torch raises for every error of a device
            raise WeightSyncError(
                f"memory of {device} cannot be shared with other processes: {error}"
            ) from error

    def free(self) -> None:
        """Gives the memory up; a second call does nothing."""
        self.content = torch.empty(0, dtype=torch.uint8)


_Memory = _HostMemory | _DeviceMemory


def _num_bytes(entry: BucketEntry) -> int:
    size = int(getattr(torch, entry.dtype).itemsize)
    for dim in entry.shape:
        size *= dim
    return size


def _view(memory: torch.Tensor, entry: BucketEntry) -> torch.Tensor:
    """Returns an entry's tensor in a bucket's bytes."""
    dtype = getattr(torch, entry.dtype)
    size = _num_bytes(entry)
    if size == 0:
        return torch.empty(entry.shape, dtype=dtype, device=memory.device)
    return memory[entry.offset : entry.offset + size].view(dtype).view(entry.shape)
