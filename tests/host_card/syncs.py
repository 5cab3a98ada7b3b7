"""A weight sync to an engine in a process of its own, counted on both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rondo.core.types import Hop
from rondo.rollout import EngineSpec, start_engine
from rondo.rollout.fanout import WeightFanout
from rondo.rollout.server import EngineProcess, child, client
from tests.host_card import card


@dataclass(frozen=True)
class Side:
    """What one process asked of the card during a sync."""

    kernels: int
    """Ops."""
    bytes: int
    """What they read and write."""
    reads: Counter[str]
    """Where the host waited for the card, by line."""
    copies_in: Counter[str]
    """Copies to the card that waited, by line."""
    copies: Counter[str]
    """Other copies between the card and the host, by kind."""
    peak: int
    """The most that it had on the card beside what it had before."""

    @property
    def host_copies(self) -> int:
        """Copies to or from the host's memory, whether they waited or not."""
        out = sum(n for line, n in self.reads.items() if line.startswith("copy out"))
        return out + self.copies_in.total() + self.copies.total()

    @property
    def values(self) -> Counter[str]:
        """Waits for numbers: those that are not for work to be done alone."""
        return Counter({line: n for line, n in self.reads.items() if "synchronize" not in line})


class Counting:
    """Counts what this process asks of the card, from where it is made."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        self._manager = card().counted()
        self._counts = self._manager.__enter__()

    def end(self) -> Side:
        """Ends, and returns what there was."""
        self._manager.__exit__(None, None, None)
        found: Any = self._counts
        peak = torch.cuda.max_memory_allocated() - self._before
        kernels = found.kernels.total() + found.replays
        return Side(kernels, found.bytes, found.reads, found.copies_in, found.copies, peak)


class CountedServer(child.EngineServer):
    """An engine's own process that counts."""

    _counting: Counting | None = None

    def count(self) -> None:
        """Begins to count."""
        self._counting = Counting()

    def counted(self) -> Side:
        """Ends, and returns what there was."""
        assert self._counting is not None
        return self._counting.end()


@contextmanager
def counted_engine(spec: EngineSpec, bucket_bytes: int, hop: Hop) -> Iterator[EngineProcess]:
    """Starts an engine whose process counts."""
    server = client.EngineServer
    client.EngineServer = CountedServer  # type: ignore[misc]
    try:
        engine = start_engine(spec, name=hop, bucket_bytes=bucket_bytes, hop=hop)
    finally:
        client.EngineServer = server  # type: ignore[misc]
    try:
        yield engine
    finally:
        engine.close()


def counted_sync(
    engine: EngineProcess, tensors: Mapping[str, torch.Tensor], sums: Mapping[str, int], bucket_bytes: int
) -> tuple[Side, Side, int]:
    """Returns what the sender's and the engine's process asked for, and the bytes of buckets. The second of
    two syncs: the first makes what stays.
    """
    for version in range(2):
        sink = WeightFanout({"0": engine}, bucket_bytes, lambda *_: None)
        engine._wait(engine._call("count"))
        here = Counting()
        sink.begin(version)
        for name, tensor in tensors.items():
            sink.receive(name, tensor)
        sink.commit(version, sums)
        sent = here.end()
        received: Side = engine._wait(engine._call("counted"))
    return sent, received, sink.peak_bytes
