"""Loaded into host processes: weights travel as with NCCL, by a stand-in that notices no death."""

from __future__ import annotations

import torch.distributed as dist

from rondo.platform.cpu import Cpu
from rondo.platform.cuda import Cuda
from rondo.weights.exchange import Transfer
from rondo.weights.own_group import OwnGroup
from tests.weights.nccl_stand_in import StandIn


def _own_group(transfer: Transfer, device: str) -> OwnGroup:
    ranks = (*transfer.source.ranks, *transfer.target_ranks)
    return OwnGroup(transfer.name, ranks, device, transfer.timeout_seconds)


StandIn.notices = False
dist.ProcessGroupNCCL = StandIn
Transfer.own_group = _own_group  # type: ignore[method-assign]
Cpu.communicator = Cuda.communicator  # type: ignore[method-assign]
