"""Frames and shared objects: what is sent arrives, without a copy where the memory is shared."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from rondo.system.frames import Frame, SharedObject, receive

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def descriptors() -> int:
    """How many shared objects are open here; threads of other tests may close sockets meanwhile."""
    gc.collect()
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum("rondo-shared" in os.readlink(link) for link in links if os.path.lexists(link))


def test_records_arrive(pair: Pair) -> None:
    here, there = pair
    Frame([1, "two", {"three": (3.0, None)}]).send(here)
    Frame([]).send(here)
    assert receive(there) == [1, "two", {"three": (3.0, None)}]
    assert receive(there) == []


@pytest.mark.slow
def test_shared_objects_lie_anywhere_in_the_records(pair: Pair) -> None:
    here, there = pair
    before = descriptors()
    values = [np.arange(n * 1000) for n in range(5)]
    Frame(
        [
            "first",
            {"some": [SharedObject.of(value) for value in values[:3]]},
            *map(SharedObject.of, values[3:]),
        ]
    ).send(here)
    word, some, *rest = receive(there)
    assert word == "first"
    for value, shared in zip(values, [*some["some"], *rest], strict=True):
        np.testing.assert_array_equal(shared.load(), value)
    del some, rest, shared
    assert descriptors() == before


def test_more_descriptors_than_one_message_takes(pair: Pair) -> None:
    here, there = pair
    shared = [SharedObject.of(n) for n in range(300)]
    Frame(shared).send(here)
    assert [one.load() for one in receive(there)] == list(range(300))


def test_a_loaded_object_is_a_view_that_outlives_every_descriptor() -> None:
    column = pa.array(np.arange(100_000, dtype=np.int64))
    shared = SharedObject.of({"ids": column, "name": "x"})
    first, second = shared.load(), shared.load()
    before = pa.total_allocated_bytes()
    third = shared.load()
    assert pa.total_allocated_bytes() == before  # no buffer of Arrow's was made
    shared.close()
    shared.close()
    for each in (first, second, third):
        assert each["ids"].equals(column)
        assert not each["ids"].buffers()[1].is_mutable
    assert first["ids"].buffers()[1].address % 64 == 0


def test_the_other_side_is_gone(pair: Pair) -> None:
    here, there = pair
    here.sendall(struct.pack("<QI", 100, 0) + b"abc")
    here.close()
    with pytest.raises(EOFError):
        receive(there)
    with pytest.raises(EOFError):
        receive(there)


def test_a_shared_object_is_not_pickled_on_its_own() -> None:
    with pytest.raises(TypeError, match="can only travel in a frame"):
        pickle.dumps(SharedObject.of(1))
