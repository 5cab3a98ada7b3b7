"""What a weight sync to an engine in a process of its own asks of a card and of the host, on both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rondo.core.types import Hop
from rondo.rollout import start_engine
from rondo.rollout.fanout import WeightFanout
from rondo.rollout.server import EngineProcess, child, client
from rondo.weights.checksum import checksums
from tests.gpu.test_ipc import CARD, SPEC
from tests.host_card import card, on_the_host_card
from tests.rollout.conftest import build, weights

pytestmark = on_the_host_card
BUCKET = 51_200  # a multiple of what the allocator rounds to


class CountedServer(child.EngineServer):
    """An engine's own process that counts what it asks of the card."""

    _counting: Any = None

    def count(self) -> None:
        """Begins to count."""
        torch.cuda.reset_peak_memory_stats()
        self._counting = (card().counted(), torch.cuda.memory_allocated())
        self._counts = self._counting[0].__enter__()

    def counted(self) -> Side:
        """Ends, and returns what there was."""
        manager, before = self._counting
        manager.__exit__(None, None, None)
        return Side.of(self._counts, before)


@dataclass(frozen=True)
class Side:
    """What one process asked of the card during a sync."""

    reads: dict[str, int]
    """Where it waited for the card, by line."""
    host_copies: int
    """Copies to or from the host's memory, whether they waited or not."""
    extra_bytes: int
    """The most that it had on the card beside what it had before."""

    @staticmethod
    def of(counts: Any, before: int) -> Side:
        out = sum(n for line, n in counts.reads.items() if line.startswith("copy out"))
        copies = counts.copies_in.total() + counts.copies.total() + out
        return Side(dict(counts.reads), copies, torch.cuda.max_memory_allocated() - before)

    def waits(self, file: str) -> int:
        """Returns how often lines of a file waited."""
        return sum(n for line, n in self.reads.items() if file in line)


@contextlib.contextmanager
def engine_of(hop: Hop) -> Iterator[EngineProcess]:
    engine = start_engine(replace(SPEC, dtype="bfloat16"), name=hop, bucket_bytes=BUCKET, hop=hop)
    try:
        yield engine
    finally:
        engine.close()


def sync(engine: EngineProcess) -> tuple[Side, Side, WeightFanout, int]:
    """Returns what sender and receiver asked for, the sender's end, and the bytes that were sent. The second
    of two: the first makes what stays.
    """
    tensors = {name: one.to(CARD, torch.bfloat16) for name, one in weights(build("qwen3")).items()}
    sums = checksums(tensors)
    for version in range(2):
        sink = WeightFanout({"0": engine}, BUCKET, lambda *_: None)
        sink.begin(version)
        if version:
            engine._wait(engine._call("count"))
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with card().counted() as counts:
                for name, tensor in tensors.items():
                    sink.receive(name, tensor)
                sink._writer.finish()
            sent = Side.of(counts, before)
            received: Side = engine._wait(engine._call("counted"))
        else:
            for name, tensor in tensors.items():
                sink.receive(name, tensor)
        sink.commit(version, sums)
    return sent, received, sink, sum(tensor.nbytes for tensor in tensors.values())


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "EngineServer", CountedServer)


def test_nothing_goes_through_the_host() -> None:
    """No copy on either side; two buckets beside the two models, the sender's; one wait per bucket on each
    side, for what was copied, and none for a number.
    """
    with engine_of("ipc") as engine:
        sent, received, sink, num_bytes = sync(engine)
    assert (sent.host_copies, received.host_copies) == (0, 0)
    largest = max(BUCKET, SPEC.source.config["vocab_size"] * SPEC.source.config["hidden_size"] * 2)  # type: ignore[index, operator]
    assert sent.extra_bytes == sink.peak_bytes <= BUCKET + largest
    assert received.extra_bytes == 0
    least = -(-num_bytes // BUCKET)
    for side in (sent, received):
        waits = side.waits("rondo/platform/cuda.py")
        assert least <= waits <= 2 * least
        assert sum(side.reads.values()) == waits, side.reads


def test_through_the_host_all_bytes_are_copied_twice() -> None:
    """What the other test would see if no memory of a card were opened: a copy per tensor on each side."""
    with engine_of("host") as engine:
        sent, received, sink, _ = sync(engine)
    count = len(weights(build("qwen3")))
    assert sink.peak_bytes > 0
    assert (sent.host_copies, received.host_copies) == (count, count)
    assert (sent.extra_bytes, received.extra_bytes) == (0, 0)
