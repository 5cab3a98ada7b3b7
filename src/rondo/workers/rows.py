"""Rows of a step on their way to disk: written by workers, from wherever their columns lie."""

from __future__ import annotations

from pathlib import Path

from rondo.controller.dispatch import dispatch
from rondo.core.batch import Batch
from rondo.system.storage import storing


class WritesRows:
    """A worker that writes rows into the run's folder, where its machine has that."""

    @dispatch("per_rank")
    def sees(self, path: str, content: bytes) -> bool:
        """Says whether a file of the controller's is here, and not another one of that name."""
        return Path(path).is_file() and Path(path).read_bytes() == content

    def write_rows(self, batch: Batch, path: str) -> int:
        """Writes a Parquet file; returns its size. Raises StorageError."""
        with storing(path, needs=lambda: batch.table.nbytes):
            batch.write_parquet(path)
            return Path(path).stat().st_size
