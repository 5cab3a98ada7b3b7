"""A process group of a transfer's own, for NCCL: one communicator for all its messages, which may break.

    the world's groups                         this one
    made by all ranks of the world, by         made by its members alone, which meet in the store first: the
    splitting its communicator                 next sync makes another one without those gone
    watched by a thread of torch, which ends   watched here, where one waits: what breaks is told, and
    this process when a peer is gone           this process goes on

Not run: no test has had a GPU. Written against ProcessGroupNCCL.cpp of about torch 2.10, and against what the
wheel of 2.13 has of it (headers, Python).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rondo.platform import platform_of

# A group that is made while this is set has no watchdog thread: errors are raised where a work is waited for.
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
_POLL_SECONDS = 0.05


class OwnGroup:
    """Carries messages between `ranks` (of the world), made when it is first used.

    name: the same on all members, and of no other group. device: of this rank. seconds: for how long members
    are waited for. broken: why nothing more can be sent; empty while all is well.
    """

    def __init__(self, name: str, ranks: Iterable[int], device: str, seconds: float) -> None:
        self.broken = ""
        self._name = f"rondo_weights/{name}"
        self._ranks = sorted(ranks)
        self._device = torch.device(device)
        self._seconds = seconds
        self._backend: Any = None
        self._lock = threading.Lock()

    def exchange(
        self,
        verb: Literal["send", "recv"],
        messages: Sequence[tuple[int, torch.Tensor]],
        timeout: timedelta,
    ) -> str:
        """Sends all messages (to whom, what), or receives them (from whom, into what), at once. Returns
        `broken`.

        The first time, every member calls this, also one without messages: it takes all of them to connect.
        """
        try:
            self._connect()
            if messages and not self.broken:
                self._start(verb, messages).wait(timeout)
        except RuntimeError as error:
            self.abort((str(error).strip().splitlines() or [type(error).__name__])[0])
        # A wait that `abort` has ended looks like one for messages that have arrived.
        return self.broken

    def abort(self, why: str) -> None:
        """Ends what is under way, and all that may come; from any thread. The peers may not notice it."""
        with self._lock:
            if self.broken:
                return
            self.broken = why
            backend = self._backend
        if backend is not None:
            backend.abort()

    def _start(self, verb: str, messages: Sequence[tuple[int, torch.Tensor]]) -> dist.Work:
        # Those of a batch are under way together; one by one each would wait for the one before.
        self._backend._start_coalescing()
        try:
            for peer, tensor in messages:
                getattr(self._backend, verb)([tensor], self._ranks.index(peer), 0)
        finally:  # or all that this thread asks of NCCL from now on would be part of the batch
            work = self._backend._end_coalescing()
        return work

    def _connect(self) -> None:
        if self._backend is not None or self.broken:
            return
        store = dist.PrefixStore(self._name, _get_default_store())
        self._meet(store)
        rank, connect = self._ranks.index(dist.get_rank()), platform_of(self._device).communicator
        with _set(_NO_WATCHDOG, "1"):
            backend = connect(store, rank, self._ranks, self._name, self._seconds, self._device)
        with self._lock:
            self._backend = backend
        # One that dies from here on, and before all are connected, is not noticed by anybody here.
        backend.eager_connect_single_device(self._device)
        if self.broken:  # meanwhile
            backend.abort()

    def _meet(self, store: dist.Store) -> None:
        """Waits until all members are here: making a communicator would wait for a missing one without end.
        Raises RuntimeError.
        """
        store.set(f"here/{dist.get_rank()}", "yes")
        end = time.monotonic() + self._seconds
        while missing := [rank for rank in self._ranks if not store.check([f"here/{rank}"])]:
            if self.broken:
                raise RuntimeError(self.broken)
            if time.monotonic() > end:
                raise RuntimeError(f"ranks {missing} did not come within {self._seconds:g} s")
            time.sleep(_POLL_SECONDS)


@contextmanager
def _set(variable: str, value: str) -> Iterator[None]:
    """Sets an environment variable for a while."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
