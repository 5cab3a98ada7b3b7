"""Weights by way of files: for replicas that are remote, or that come late. Any file system that both see.

    <folder>/version-12/part-0.safetensors, part-1.safetensors, …   at most a bucket each, or one tensor
                        index.json                                  version, and of every tensor: file, shape,
                                                                    dtype, checksum

A version appears by a rename when it is complete, and is never written to afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rondo.core.errors import WeightSyncError
from rondo.system.activity import Activity, progress
from rondo.weights.sync import SyncReport, WeightSink, WeightSource, gathering_bytes

INDEX = "index.json"


def version_folder(folder: Path, version: int) -> Path:
    """Returns where a version lies."""
    return folder / f"version-{version}"


def write_weights(
    source: WeightSource,
    folder: Path,
    version: int,
    bucket_bytes: int,
    *,
    dtype: str | None = None,
    leader: bool = True,
) -> SyncReport:
    """Writes `version` below `folder`, gathered bucket by bucket. Collective over the trainer's ranks; the
    leader alone writes.

    Replaces the same version of an earlier attempt. Raises WeightSyncError where the disk refuses.
    """
    checksums, layout = source.checksums(dtype), source.layout(dtype)
    final = version_folder(folder, version)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    error: OSError | None = None
    if leader:
        error = _tried(lambda: _empty(temporary))
    writer = _PartWriter(temporary, bucket_bytes, checksums)
    with Activity("writing weights", bound=False, in_bytes=True):
        for name, tensor in source.gathered(bucket_bytes, dtype):  # all ranks to the end
            if leader and error is None:
                error = _tried(partial(writer.add, name, tensor))
            progress(tensor.nbytes, of=layout.num_bytes)
        if leader and error is None:
            error = _tried(lambda: writer.finish(version, final))
    if error is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        raise WeightSyncError(
            f"version {version} of the weights ({layout.num_bytes} bytes) cannot be written to {final}: "
            f"{error}; make room, or use rollout.weight_transport=collective"
        ) from error
    return SyncReport(
        version,
        num_tensors=len(layout.parameters),
        bytes_moved=layout.num_bytes,
        bytes_needed=layout.num_bytes,
        peak_bytes=gathering_bytes(layout, bucket_bytes) + writer.peak_bytes,
        rounds=writer.num_parts,
        checksums=checksums if layout.parameters == source.layout().parameters else None,
    )


def read_weights(folder: Path, version: int, sink: WeightSink) -> SyncReport:
    """Loads `version` into the sink, tensor by tensor, and has it confirm the checksums.

    Raises WeightSyncError: no such version, a file that is torn or missing, a tensor of another shape, or one
    whose bytes have changed.
    """
    path = version_folder(folder, version)
    tensors = _read_index(path, version)
    sink.begin(version)
    num_bytes = largest = 0
    for file in dict.fromkeys(entry["file"] for entry in tensors.values()):
        names = [name for name, entry in tensors.items() if entry["file"] == file]
        try:
            with safe_open(path / file, framework="pt") as part, Activity(f"reading {file}", bound=False):
                for name in names:
                    tensor = part.get_tensor(name)
                    _check(path / file, name, tensor, tensors[name])
                    sink.receive(name, tensor)
                    progress(of=len(names))
                    num_bytes += tensor.numel() * tensor.element_size()
                    largest = max(largest, tensor.numel() * tensor.element_size())
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"{path / file}: this part of version {version} is torn or unreadable: {error}; the engine "
                "serves nothing until a complete version is there"
            ) from error
    sink.commit(version, {name: entry["checksum"] for name, entry in tensors.items()})
    return SyncReport(version, len(tensors), num_bytes, num_bytes, largest)


def remove_weights(folder: Path, *, keep: int | None = None) -> None:
    """Removes all versions but one; what an interrupted writer left, too."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if "version-" in entry.name and (keep is None or entry != version_folder(folder, keep)):
            shutil.rmtree(entry, ignore_errors=True)


class _PartWriter:
    """Collects tensors up to a bucket, then writes a file."""

    def __init__(self, folder: Path, bucket_bytes: int, checksums: Mapping[str, int]) -> None:
        self.num_parts = 0
        self.peak_bytes = 0
        self._folder = folder
        self._bucket_bytes = bucket_bytes
        self._checksums = checksums
        self._part: dict[str, torch.Tensor] = {}
        self._used = 0
        self._index: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if self._part and self._used + num_bytes > self._bucket_bytes:
            self._write()
        self._part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._used += num_bytes
        self._index[name] = {
            "file": f"part-{self.num_parts}.safetensors",
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "checksum": self._checksums[name],
        }

    def _write(self) -> None:
        self.peak_bytes = max(self.peak_bytes, 2 * self._used)  # safetensors makes one copy
        save_file(self._part, self._folder / f"part-{self.num_parts}.safetensors")
        self.num_parts += 1
        self._part = {}
        self._used = 0

    def finish(self, version: int, final: Path) -> None:
        if self._part:
            self._write()
        index = {"version": version, "tensors": self._index}
        (self._folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        self._folder.rename(final)


def _read_index(path: Path, version: int) -> dict[str, dict[str, Any]]:
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        found, tensors = int(index["version"]), dict(index["tensors"])
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"{path}: version {version} of the weights is not there; is the run folder on a file system that "
            "the trainer and the rollout engines share?"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(f"{path / INDEX} cannot be read: {error!r}") from error
    if found != version:
        raise WeightSyncError(f"{path} holds version {found}, not {version}")
    return tensors


def _check(file: Path, name: str, tensor: torch.Tensor, entry: Mapping[str, Any]) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if list(tensor.shape) != entry["shape"] or dtype != entry["dtype"]:
        raise WeightSyncError(
            f"{file}: {name!r} is {tuple(tensor.shape)} {dtype}, the index says {tuple(entry['shape'])} "
            f"{entry['dtype']}"
        )


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _tried(action: Callable[[], None]) -> OSError | None:
    """Keeps the leader's error until all ranks have run through the gathering."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        return error if isinstance(error, OSError) else OSError(str(error))
    return None
