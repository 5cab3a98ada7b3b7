"""An engine's state on disk, sharded: torch.distributed.checkpoint plans who writes and reads what.

rank-0.bin, rank-1.bin, …   the tensors of a rank, byte for byte, one after another
.metadata                   where each is, of which type and shape, and of which tensor which part
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rondo.checkpoint.checked import (
    CheckedFile,
    Files,
    Pieces,
    placed,
    read_checked,
    read_piece,
    write_checked,
)
from rondo.core.errors import CheckpointError, RondoError
from rondo.system.activity import Activity, progress
from rondo.system.storage import fault_in, refused
from rondo.system.urls import Place, place_of
from rondo.training.telling import told_by_first, told_failures, told_files

State = dict[str, torch.Tensor]  # flat; sharded entries are DTensors

_METADATA = ".metadata"


def save(state: State, path: str, group: dist.ProcessGroup) -> Files:
    """Writes every rank's shards; returns the checksums of all files, on every rank. Collective.

    path: a folder, which all ranks see, or a URL, to which each rank sends its own as it reads them from
    memory. Raises StorageError (disk full, not writable), CheckpointError.
    """
    writer = _Writer(place_of(path))
    try:
        with Activity(f"writing {path}", bound=False):
            dcp.save(state, storage_writer=writer, process_group=group)
    except (CheckpointException, OSError, RuntimeError) as error:
        _raise_told(path, "written", error)
        raise CheckpointError(f"checkpoint {path} could not be written: {_cause(error)}") from error
    return told_files(writer.files, group)


def load(state: State, path: str, files: Files, group: dist.ProcessGroup) -> None:
    """Reads into the tensors of `state`, in place, whatever the number of ranks that saved. Collective.

    files: what `save` returned. Each rank reads the tensors of which it has a part, each once, and checks
    them. Raises CheckpointError naming a file, and the tensor, that has changed.
    """
    reader = _Reader(place_of(path), files, _read_metadata(place_of(path), files, group))
    try:
        with Activity(f"reading {path}", bound=False):
            dcp.load(state, storage_reader=reader, process_group=group)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        _raise_told(path, "read", error)
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded into this model: {_cause(error)}. Was it made with another "
            "model?"
        ) from error


class TensorPlace(NamedTuple):
    """Where a rank's part of a tensor lies, and what it is."""

    file: str
    """The file's name."""
    start: int
    """Where it begins, in bytes from the file's start."""
    dtype: torch.dtype
    """The tensor's dtype."""
    shape: tuple[int, ...]
    """The shape of the rank's part."""


class _Writer(StorageWriter):
    """Writes this rank's tensors into a file, and on the rank that coordinates the metadata of all."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self.files: dict[str, Pieces] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"rank-{rank}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, results = plan.storage_data, []
        with CheckedFile(self._folder / name) as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                start = file.append(item.index.fqn, bytes_of(tensor))
                place = TensorPlace(name, start, tensor.dtype, tuple(tensor.shape))
                progress(of=len(plan.items))
                results.append(WriteResult(item.index, tensor.nbytes, place))
        self.files[name] = file.pieces
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {one.index: one.storage_data for ranks_own in results for one in ranks_own}
        self.files[_METADATA] = write_checked(self._folder / _METADATA, pickle.dumps(metadata))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Reader(StorageReader):
    """Reads what the plan asks for, file after file, each tensor whole."""

    def __init__(self, folder: Place, files: Files, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata
        self._pieces = {(name, start): piece for name in files for start, piece in placed(files[name])}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places: dict[Any, TensorPlace] = self._metadata.storage_data
        # By file and position in it, so that each file is read once, front to back.
        items = sorted(plan.items, key=lambda item: places[item.storage_index][:2])
        for name, wanted in groupby(items, key=lambda item: places[item.storage_index].file):
            path = self._folder / name
            with path.open("rb", buffering=0) as file:
                for item in wanted:
                    place = places[item.storage_index]
                    piece = self._pieces[name, place.start]
                    data = torch.empty(piece.num_bytes, dtype=torch.uint8)
                    read_piece(file, path, place.start, piece, memoryview(data.numpy()))
                    saved = data.view(place.dtype).view(place.shape)
                    part = zip(item.storage_offsets, item.lengths, strict=True)
                    target = planner.resolve_tensor(item)
                    target.detach().copy_(saved[tuple(slice(at, at + length) for at, length in part)])
                    planner.commit_tensor(item, target)
                    progress(of=len(items))
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _read_metadata(folder: Place, files: Files, group: dist.ProcessGroup) -> Metadata:
    """Has one rank read it, which tells the others, also what is wrong. Collective."""
    data, failure = b"", None
    if dist.get_rank(group) == 0:
        try:
            data = read_checked(folder / _METADATA, files[_METADATA])
        except RondoError as error:
            failure = error
    for first in told_failures(failure, group):
        raise first
    return _metadata_of(told_by_first(data, group), folder / _METADATA)


class _MetadataReader(pickle.Unpickler):
    """Makes what metadata consists of, and nothing else: a checkpoint of somebody else runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _IN_METADATA:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")


def _memory_format(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Stands for `getattr`, by which Python 3.11.0 to 3.11.3 write a member of an enum."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"getattr of {kind!r} is no part of a checkpoint's metadata")
    return _MEM_FORMAT_ENCODING[name]


_PLANNED = ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties")
_IN_METADATA = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (*_PLANNED, "_MEM_FORMAT_ENCODING")),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (__name__, TensorPlace.__name__),
}


def _metadata_of(data: bytes, path: Place) -> Metadata:
    """Reads what `_Writer.finish` has written. Raises CheckpointError for anything else."""
    try:
        found = _MetadataReader(io.BytesIO(data)).load()
    except Exception as error:  # a pickle of somebody else's can raise anything
        raise CheckpointError(f"{path}: is no metadata of a checkpoint: {error}; nothing was run") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path}: is no metadata of a checkpoint, but {type(found).__name__}")
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns a tensor's bytes in host memory, row by row; copies only what is elsewhere, or has holes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _raise_told(path: str, what: str, error: BaseException) -> None:
    """Raises what any rank says is wrong with a file; StorageError where the file system is what failed."""
    told = (
        [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    )
    for failure in told:
        if isinstance(failure, RondoError):
            raise failure from error
    for fault in map(fault_in, [*told, error]):
        if fault is not None:
            raise refused(path, what, fault) from error


def _cause(error: BaseException) -> str:
    """Returns the first line of the innermost failure."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, failure = next(iter(error.failures.items()))
        inner = failure[0] if isinstance(failure, tuple) else failure
        return f"rank {rank}: {type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else ''}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
