"""What travels on a socket pair: frames of pickled records, and objects in shared memory.

    frame = bytes of the pickle (8, little endian) · number of shared objects (4) · their descriptors · pickle

A `SharedObject` may lie anywhere in the records: its descriptor travels beside them, its bytes do not travel.

Both ends are ours and the socket has no name, so nobody else can speak here.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

_HEADER = struct.Struct("<QI")
_DESCRIPTORS_AT_ONCE = 250  # the kernel takes 253 a message
_ALIGNMENT = 64  # of each part: a cache line, and what Arrow recommends for its buffers


class Frame:
    """Some records, pickled: header, pickle, and the shared objects that occur in them."""

    def __init__(self, records: Sequence[Any]) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(list(records))
        self.data = buffer.getbuffer()
        self.shared = tuple(pickler.shared)

    def send(self, connection: socket.socket) -> None:
        """Blocks until the socket has taken all of it; raises OSError when the other side is gone."""
        connection.sendall(_HEADER.pack(len(self.data), len(self.shared)))
        descriptors = [one.descriptor for one in self.shared]
        for start in range(0, len(descriptors), _DESCRIPTORS_AT_ONCE):
            socket.send_fds(connection, [b"\0"], descriptors[start : start + _DESCRIPTORS_AT_ONCE])
        connection.sendall(self.data)


def _at_once() -> None:
    """Waits for nothing: the read itself does."""


def receive(connection: socket.socket, wait: Callable[[], object] = _at_once) -> list[Any]:
    """Returns the next frame's records; blocks. wait: is called before each read, and returns when there is
    something to read: who sends may stop in the middle of a frame. Raises EOFError when the other side is
    gone.
    """
    length, num_shared = _HEADER.unpack(_exactly(connection, _HEADER.size, wait))
    shared: list[SharedObject] = []
    while len(shared) < num_shared:
        wanted = min(num_shared - len(shared), _DESCRIPTORS_AT_ONCE)
        wait()
        try:
            byte, descriptors, _, _ = socket.recv_fds(connection, 1, wanted)
        except OSError as error:
            raise EOFError from error
        if not byte:
            raise EOFError
        shared += map(SharedObject, descriptors)
    records: list[Any] = _Unpickler(io.BytesIO(_exactly(connection, length, wait)), shared).load()
    return records


class _Pickler(pickle.Pickler):
    """Writes a shared object as its index among those of the frame."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.shared: list[SharedObject] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, SharedObject):
            self.shared.append(value)
            return _received, (len(self.shared) - 1,)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[SharedObject]) -> None:
        super().__init__(file)
        self._shared = shared

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _received.__name__):
            return self._shared.__getitem__
        return super().find_class(module, name)


def _received(place: int) -> SharedObject:
    raise TypeError(f"shared object {place} of a frame can only be read by `receive`")


def _exactly(connection: socket.socket, length: int, wait: Callable[[], object]) -> bytearray:
    data = bytearray(length)
    view, start = memoryview(data), 0
    while start < length:
        wait()
        try:
            count = connection.recv_into(view[start:])
        except OSError as error:
            raise EOFError from error
        if count == 0:
            raise EOFError
        start += count
    return data


class SharedObject:
    """A pickled object in anonymous memory that any process with the descriptor reads without a copy.

    The object's large buffers (Arrow arrays, numpy arrays) lie behind its pickle and are mapped, read-only.
    The memory has no name in the file system: it is gone with the last descriptor and the last object read
    from it, whatever ended its holders. Linux only.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def of(cls, value: Any) -> SharedObject:
        """Writes a value. Raises what pickle raises where it cannot be written."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        sizes = [len(data), *(view.nbytes for view in raw)]
        head = struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes)
        total, starts = _layout(len(head), sizes)
        descriptor = os.memfd_create("rondo-shared", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(total, 1))
        with mmap.mmap(descriptor, max(total, 1)) as memory:
            memory[: len(head)] = head
            for start, part in zip(starts, [memoryview(data), *raw], strict=True):
                memory[start : start + part.nbytes] = part
        return cls(descriptor)

    def load(self) -> Any:
        """Returns the object; its buffers are views of the shared pages and must not be written."""
        size = os.fstat(self.descriptor).st_size
        memory = memoryview(mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ))
        (count,) = struct.unpack_from("<Q", memory)
        sizes = struct.unpack_from(f"<{count}Q", memory, 8)
        _, starts = _layout(8 + 8 * count, sizes)
        data, *buffers = [memory[start : start + n] for start, n in zip(starts, sizes, strict=True)]
        return pickle.loads(data, buffers=buffers)

    def close(self) -> None:
        """Gives the descriptor back; objects that were loaded stay valid. A second call does nothing."""
        descriptor = self.descriptor
        self.descriptor = -1  # no descriptor has that number: it is closed
        if descriptor >= 0:
            os.close(descriptor)

    def __reduce__(self) -> Any:
        raise TypeError("a shared object is a descriptor: it can only travel in a frame")

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # the interpreter is ending, or __init__ failed
            self.close()


def _layout(start: int, sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Says where parts of these sizes lie behind `start` bytes: the last one's end, and each one's start."""
    starts = []
    for size in sizes:
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        start += size
    return start, starts
