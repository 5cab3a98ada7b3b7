"""One stream of weights to several replicas: buckets in memory that all processes read, and a copy for an
engine in this one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from rondo.core.errors import ReplicaLostError, RolloutError, WeightSyncError
from rondo.rollout.protocol import RolloutEngine
from rondo.rollout.server.client import EngineProcess
from rondo.weights.bucket import BucketWriter, Confirmation, SharedBucket

_log = logging.getLogger(__name__)


class WeightFanout:
    """The receiving side of a weight sync (begin, receive, commit) for all of `engines`, by name.

    lost(name, why, engine): told of a replica that dies meanwhile; the others go on. WeightSyncError as the
    engines raise it.
    """

    def __init__(
        self,
        engines: Mapping[str, RolloutEngine],
        bucket_bytes: int,
        lost: Callable[[str, str, RolloutEngine], None],
    ) -> None:
        self._engines = dict(engines)
        self._lost = lost
        self._lock = threading.Lock()
        shares = {engine.shares for engine in self._processes()}
        # One that cannot open the device's memory has all read the host's: each bucket is filled once.
        device = shares.pop() if len(shares) == 1 else None
        self._writer = BucketWriter(bucket_bytes, self._send, device, self._close_buckets)

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes of buckets that existed at one time."""
        return self._writer.peak_bytes

    def begin(self, version: int) -> None:
        self._each(lambda engine: engine.begin(version))

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Gives a tensor to all engines. An engine process may report its error at a later call, because
        tensors travel in buckets.
        """
        for engine in self._engines.values():
            if not isinstance(engine, EngineProcess):
                engine.receive(name, tensor)
        if self._processes():
            self._writer.add(name, tensor)

    def commit(self, version: int, checksums: Mapping[str, int] | None = None) -> None:
        try:
            self._writer.finish()
            self._each(lambda engine: engine.commit(version, checksums))
        finally:
            self.close()

    def close(self) -> None:
        """Has everybody give up the memory of buckets, where an error has cut the stream short. May be called
        twice.
        """
        self._writer.close()

    def _processes(self) -> list[EngineProcess]:
        return [engine for engine in self._engines.values() if isinstance(engine, EngineProcess)]

    def _close_buckets(self) -> None:
        for engine in self._processes():
            try:
                engine.close_buckets()
            except (RolloutError, WeightSyncError) as error:  # an error of its own is known already
                _log.warning("engine %s: %s", engine.name, error)

    def _send(self, bucket: SharedBucket) -> Confirmation:
        waiting: dict[str, Confirmation] = {}
        for name, engine in list(self._engines.items()):
            if isinstance(engine, EngineProcess):
                try:
                    waiting[name] = engine.send_bucket(bucket)
                except ReplicaLostError as error:
                    self._drop(name, error)

        def confirm() -> None:
            failure = None
            for name, answered in waiting.items():
                try:
                    answered()
                except ReplicaLostError as error:
                    self._drop(name, error)
                except (RolloutError, WeightSyncError) as error:
                    failure = error
            if failure is not None:
                raise failure

        return confirm

    def _each(self, act: Callable[[RolloutEngine], None]) -> None:
        """Acts on all engines at once; returns when all are done."""

        def one(name: str, engine: RolloutEngine) -> None:
            try:
                act(engine)
            except ReplicaLostError as error:
                self._drop(name, error)

        engines = list(self._engines.items())
        if len(engines) < 2:  # on this thread
            for name, engine in engines:
                one(name, engine)
            return
        with ThreadPoolExecutor(len(engines), "rondo-fanout") as threads:
            for done in [threads.submit(one, name, engine) for name, engine in engines]:
                done.result()

    def _drop(self, name: str, error: ReplicaLostError) -> None:
        with self._lock:
            engine = self._engines.pop(name, None)
        if engine is not None:
            self._lost(name, str(error), engine)
