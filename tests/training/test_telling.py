"""What ranks tell each other: what arrives is what was told."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch.distributed as dist

from rondo.checkpoint.checked import Piece
from rondo.core.errors import CheckpointError, ConfigError, StorageError
from rondo.training.telling import told_by_all, told_by_first, told_failures, told_files
from tests.training.helpers import one_rank_mesh

FAILURES: dict[str, tuple[Exception | None, list[Any]]] = {
    "none": (None, []),
    "of rondo": (CheckpointError("a file"), [CheckpointError, "a file", {}]),
    "with its key": (ConfigError("no", key="model.path"), [ConfigError, "no", {"key": "model.path"}]),
    "with its errno": (StorageError("full", errno.ENOSPC), [StorageError, "full", {"fault": errno.ENOSPC}]),
    "of the system": (
        OSError(errno.EACCES, "no", "f"),
        [PermissionError, "[Errno 13] no: 'f'", {"errno": 13}],
    ),
}


@pytest.mark.parametrize("which", FAILURES)
def test_failures_arrive_as_they_were(which: str) -> None:
    one_rank_mesh()
    assert dist.group.WORLD is not None
    failure, expected = FAILURES[which]
    told = told_failures(failure, dist.group.WORLD)
    assert len(told) == bool(expected)
    for each in told:
        kind, text, beside = expected
        assert (type(each), str(each)) == (kind, text)
        assert {name: getattr(each, name) for name in beside} == beside


def test_values_bytes_and_files_arrive_as_they_were() -> None:
    one_rank_mesh()
    group = dist.group.WORLD
    assert group is not None
    assert told_by_all({"a": [1, None, "é"]}, group) == [{"a": [1, None, "é"]}]
    assert told_by_first(bytes(range(256)), group) == bytes(range(256))
    files = {"a/b": (Piece("w", 3, 7), Piece("", 0, 0))}
    assert told_files(files, group) == files
