"""What ranks tell each other in collectives, as JSON: what arrives is no pickle, which could run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rondo.checkpoint.checked import Files, Piece
from rondo.core import errors
from rondo.core.errors import RondoError


def told_by_all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns what each rank of the group has told, in the ranks' order: anything that JSON has, of which
    tuples come as lists. Collective.
    """
    text = json.dumps(value).encode()
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(text)]), group=group)
    longest = max(int(size) for size in sizes)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.zeros_like(own) for _ in range(world)]
    dist.all_gather(texts, own, group=group)
    return [json.loads(bytes(each.numpy())[: int(size)]) for each, size in zip(texts, sizes, strict=True)]


def told_by_first(data: bytes, group: dist.ProcessGroup) -> bytes:
    """Returns the bytes that the first rank of the group has. Collective."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    whole = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank(group) == 0:
        whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(whole, group=group, group_src=0)
    return whole.numpy().tobytes()


def told_files(files: Files, group: dist.ProcessGroup) -> Files:
    """Returns the files that all ranks have written, each its own. Collective."""
    return {
        name: tuple(Piece(*piece) for piece in pieces)
        for ranks_own in told_by_all(files, group)
        for name, pieces in ranks_own.items()
    }


def told_failures(failure: Exception | None, group: dist.ProcessGroup) -> list[Exception]:
    """Returns the failures of all ranks: errors of rondo's, and what a file system refused. Collective."""
    own: Any = None
    if isinstance(failure, OSError):
        own = "OSError", [failure.errno, failure.strerror, str(failure.filename)], {}
    elif failure is not None:
        beside = {name: getattr(failure, name) for name in ("key", "fault") if hasattr(failure, name)}
        own = type(failure).__name__, [str(failure)], beside
    return [_failure(*told) for told in told_by_all(own, group) if told is not None]


def _failure(kind: str, arguments: Sequence[Any], beside: Mapping[str, Any]) -> Exception:
    known = getattr(errors, kind, OSError if kind == "OSError" else RondoError)
    return known(*arguments, **beside)  # type: ignore[no-any-return]
