"""Stands in for ProcessGroupNCCL: it is none. What `OwnGroup` calls of one, carried out by gloo, with the two
habits of NCCL that matter: a batch is one work, and an abort has whoever waits for it return as if all had
arrived.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist


class StandIn:
    """calls: what was asked of it, in order. watchdog: whether ProcessGroupNCCL would have made one. notices:
    the end of a peer, as over a network; not, as over NVLink.
    """

    notices = True
    made: ClassVar[list[StandIn]] = []
    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.ranks = options.global_ranks_in_group
        self.watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        self.calls: list[str] = []
        self.aborted = False
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._batch: list[dist.Work] | None = None
        StandIn.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connect {device}")

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None, "one by one"
        self._batch.append(self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None, "one by one"
        self._batch.append(self._gloo.recv(tensors, peer, tag))

    def _end_coalescing(self) -> _Batch:
        assert self._batch is not None
        works, self._batch = self._batch, None
        self.calls.append(f"batch of {len(works)}")
        return _Batch(self, works)

    def abort(self) -> None:
        self.calls.append("abort")
        self.aborted = True
        self._gloo = None  # which closes its connections


class _Batch:
    def __init__(self, owner: StandIn, works: list[dist.Work]) -> None:
        self._owner = owner
        self._works = works
        self._error = ""  # not the exception itself, which would keep the connections

    def wait(self, timeout: timedelta) -> bool:
        thread = threading.Thread(target=self._wait, args=(timeout,), daemon=True)
        thread.start()
        end = time.monotonic() + timeout.total_seconds()
        while thread.is_alive() and not self._owner.aborted:
            time.sleep(0.001)
        while self._error and not StandIn.notices and not self._owner.aborted and time.monotonic() < end:
            time.sleep(0.001)
        if self._owner.aborted:
            return True
        if self._error:
            raise RuntimeError(self._error)
        return True

    def _wait(self, timeout: timedelta) -> None:
        try:
            for work in self._works:
                work.wait(timeout)
        except RuntimeError as error:
            self._error = str(error)
        self._works = []
