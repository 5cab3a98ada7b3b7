"""Buckets in shared memory: contents, bounds, and what is left when either side is killed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rondo.core.errors import WeightSyncError
from rondo.weights.bucket import BucketWriter, SharedBucket
from rondo.weights.checksum import checksum
from tests.messages import full_text
from tests.ranks import fork_server

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(), (3,), (5, 7), (0, 4), (2, 3, 4), (100,)]
    return {
        f"layer.{i}": (torch.randn(shape, generator=generator) * 3).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, DTYPES, strict=True))
    }


def receiver(pipe: Connection) -> None:
    """Answers every bucket with {name: (dtype, shape, checksum)}."""
    while (bucket := pipe.recv()) is not None:
        with bucket.tensors() as tensors:
            pipe.send({n: (str(t.dtype), tuple(t.shape), checksum(t)) for n, t in tensors})


def started(target: Any, *args: Any) -> tuple[Any, Connection]:
    context = fork_server()
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    return process, mine


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_another_process_reads_the_same_bytes(bucket_bytes: int) -> None:
    process, pipe = started(receiver)
    received: dict[str, Any] = {}
    buckets: list[SharedBucket] = []
    open_now = 0

    def send(bucket: SharedBucket) -> Any:
        nonlocal open_now
        open_now += 1
        assert open_now <= 2
        buckets.append(bucket)
        pipe.send(bucket)

        def confirm() -> None:
            nonlocal open_now
            open_now -= 1
            received.update(pipe.recv())

        return confirm

    writer = BucketWriter(bucket_bytes, send)
    tensors = parameters()
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    pipe.send(None)
    process.join(10)
    assert received == {n: (str(t.dtype), tuple(t.shape), checksum(t)) for n, t in tensors.items()}
    largest = max(t.numel() * t.element_size() for t in tensors.values())
    assert writer.peak_bytes <= 2 * max(bucket_bytes, largest)
    assert all(b.num_bytes <= max(bucket_bytes, largest) for b in buckets)
    assert [len(b.entries) for b in buckets] == {1: [1] * 6, 200: [3, 2, 1], 1 << 20: [6]}[bucket_bytes]


def shared_memory_bytes() -> int:
    """Of this machine, in use by files in memory that belong to this process's descriptors and maps."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss_Shmem"))


def _add_many(writer: BucketWriter) -> None:
    for i in range(8):
        writer.add(f"layer.{i}", torch.ones(1 << 18))


def open_buckets() -> int:
    """How many descriptors of shared memory this process has; others come and go with other threads."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it has just been closed
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
    return found


@pytest.mark.slow
def test_nothing_is_left_when_the_receiver_is_killed() -> None:
    process, pipe = started(receiver)
    gc.collect()
    before, descriptors = shared_memory_bytes(), open_buckets()

    def send(bucket: SharedBucket) -> Any:
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        pipe.send(bucket)
        return pipe.recv

    writer = BucketWriter(1 << 20, send)
    with pytest.raises((EOFError, BrokenPipeError, ConnectionResetError)):
        _add_many(writer)
    writer.close()
    writer.close()
    gc.collect()
    assert shared_memory_bytes() <= before
    assert open_buckets() <= descriptors  # other tests' may go meanwhile


def sender_that_waits(pipe: Connection) -> None:
    def send(bucket: SharedBucket) -> Any:
        pipe.send(bucket)
        return pipe.recv  # nobody answers

    writer = BucketWriter(1 << 16, send)
    writer.add("layer.0", torch.arange(1 << 14, dtype=torch.int32))
    writer.finish()


def test_a_killed_sender_leaves_open_views_whole_and_nothing_else() -> None:
    process, pipe = started(sender_that_waits)
    bucket = pipe.recv()
    with bucket.tensors() as tensors:
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        assert torch.equal(tensors[0][1], torch.arange(1 << 14, dtype=torch.int32))
    with pytest.raises(WeightSyncError, match=full_text("sender is gone, or on another machine")):
        with bucket.tensors():
            pass


def test_a_bucket_that_was_given_up_is_known() -> None:
    sent: list[SharedBucket] = []
    writer = BucketWriter(64, lambda bucket: sent.append(bucket) or (lambda: None))  # type: ignore[func-returns-value]
    writer.add("a", torch.ones(16))
    assert isinstance(sent[0].memory, str)
    number = int(sent[0].memory.rpartition("/")[2])
    writer.finish()
    assert os.open("/dev/null", os.O_RDWR) == number  # the lowest free one: it now means another file
    try:
        with pytest.raises(WeightSyncError, match=r"\(a\) is no longer at"):
            with sent[0].tensors():
                pass
    finally:
        os.close(number)


@pytest.mark.slow
def test_a_writer_that_an_error_leaves_open_leaves_nothing() -> None:
    """Nobody closes it: the exception goes up through the sync that owns it."""
    gc.collect()
    descriptors = open_buckets()

    def fails() -> None:
        writer = BucketWriter(1 << 20, lambda bucket: lambda: None)
        writer.add("layer.0", torch.ones(10))
        raise WeightSyncError("in the middle")

    with pytest.raises(WeightSyncError):
        fails()
    gc.collect()
    assert open_buckets() <= descriptors  # other tests' may go meanwhile
