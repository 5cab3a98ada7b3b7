"""Tensors between two processes of one machine: buckets in shared memory, two at most in flight.

    sender                                             receiver
    BucketWriter.add ─ copy ─▶ buffer A ─ SharedBucket (a name) ─▶ tensors(): views of the same pages
                               buffer B ◀── filled while A is read; used again when A is confirmed

The memory has no name in the file system (`memfd`), but is opened through its owner's /proc entry: it is gone
when the last of the two processes is, whatever ended them, and Docker's small /dev/shm does not limit it.
Tensors of a GPU pass through the host's memory here.
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

ALIGNMENT = 64  # bytes
Confirmation = Callable[[], None]


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
    """A handle that can be pickled, opened in any process of the same machine and user."""

    path: str
    """The path of the memory."""
    key: str
    """The bucket's own name, by which a process knows it again."""
    num_bytes: int
    """Bytes in use."""
    entries: tuple[BucketEntry, ...]
    """The tensors in it."""

    @contextmanager
    def tensors(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Gives (name, tensor) in the order in which they were added: views of the sender's pages, to be read
        only, and before the bucket is confirmed; copy what you keep. Raises WeightSyncError when the sender
        is gone.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise WeightSyncError(
                f"a bucket with {len(self.entries)} tensors ({self._first()}) cannot be opened at "
                f"{self.path}: {error.strerror}; its sender is gone, or on "
                "another machine, or another user"
            ) from error
        try:
            if self.key not in os.path.realpath(f"/proc/self/fd/{descriptor}"):
                raise WeightSyncError(
                    f"a bucket with {len(self.entries)} tensors ({self._first()}) is no longer at "
                    f"{self.path}: its sender gave it up before it was read"
                )
            memory = mmap.mmap(descriptor, self.num_bytes)  # lives as long as the last view
        finally:
            os.close(descriptor)
        yield [(entry.name, _view(memory, entry)) for entry in self.entries]

    def _first(self) -> str:
        return self.entries[0].name if self.entries else "none"


class BucketWriter:
    """Fills buckets of at most `bucket_bytes` (a larger tensor gets one of its own) and hands them to `send`.

    send(bucket): ships it and returns a function that waits until the receiver has read it (or raises). At
    most two buckets exist; one is filled while the other is read. Not for several threads at once.
    """

    def __init__(self, bucket_bytes: int, send: Callable[[SharedBucket], Confirmation]) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: at least 1")
        self.bucket_bytes = bucket_bytes
        self.peak_bytes = 0
        self._send = send
        self._free: list[_Buffer] = []
        self._filling: _Buffer | None = None
        self._entries: list[BucketEntry] = []
        self._used = 0
        self._in_flight: tuple[_Buffer, Confirmation] | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor into the bucket that is being filled; sends that first where it is too full."""
        num_bytes = tensor.numel() * tensor.element_size()
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._entries and start + num_bytes > self.bucket_bytes:
            self.flush()
            start = 0
        if self._filling is None:
            self._filling = self._buffer(num_bytes)
        entry = BucketEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)
        _view(self._filling.memory, entry).copy_(tensor.detach())
        self._entries.append(entry)
        self._used = start + num_bytes
        if self._used >= self.bucket_bytes:
            self.flush()

    def flush(self) -> None:
        """Sends what is there, and returns when the bucket before it is confirmed."""
        buffer = self._filling
        if buffer is None:
            return
        # At least 1: mmap refuses 0.
        bucket = SharedBucket(buffer.path, buffer.key, max(self._used, 1), tuple(self._entries))
        self._filling = None
        self._entries = []
        self._used = 0
        try:
            confirm = self._send(bucket)
        except BaseException:
            buffer.free()
            raise
        before = self._in_flight
        self._in_flight = buffer, confirm
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
        for buffer in (*self._free, self._filling, self._in_flight and self._in_flight[0]):
            if buffer is not None:
                buffer.free()
        self._free = []
        self._filling = None
        self._in_flight = None
        self._entries = []
        self._used = 0

    def _settle(self, sent: tuple[_Buffer, Confirmation] | None) -> None:
        if sent is None:
            return
        buffer, confirm = sent
        try:
            confirm()
        except BaseException:
            buffer.free()
            raise
        if buffer.num_bytes > self.bucket_bytes:
            buffer.free()
        else:
            self._free.append(buffer)

    def _buffer(self, num_bytes: int) -> _Buffer:
        if num_bytes <= self.bucket_bytes and self._free:
            return self._free.pop()
        while num_bytes > self.bucket_bytes and self._free:
            self._free.pop().free()
        buffer = _Buffer(max(num_bytes, self.bucket_bytes))
        held = [*self._free, buffer, *([self._in_flight[0]] if self._in_flight else [])]
        self.peak_bytes = max(self.peak_bytes, sum(one.num_bytes for one in held))
        return buffer


class _Buffer:
    """Anonymous memory that another process can open by `path` while this object lives."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._descriptor = -1  # for `free`, should there be no memory
        self.key = f"rondo-bucket-{secrets.token_hex(8)}"
        self._descriptor = os.memfd_create(self.key, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = mmap.mmap(self._descriptor, num_bytes)

    def free(self) -> None:
        """Gives the memory up; a second call does nothing. The pages go when the receiver's views have gone,
        too.
        """
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        with suppress(BufferError, AttributeError):  # a view is alive: the memory goes with it; or none yet
            self.memory.close()

    def __del__(self) -> None:
        self.free()  # of a sync that an error cut short, whose writer nobody closed


def _num_bytes(entry: BucketEntry) -> int:
    size = int(getattr(torch, entry.dtype).itemsize)
    for dim in entry.shape:
        size *= dim
    return size


def _view(memory: mmap.mmap, entry: BucketEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if _num_bytes(entry) == 0:
        return torch.empty(entry.shape, dtype=dtype)
    count = _num_bytes(entry) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
