"""The weights of a checkpoint that verl writes under FSDP: a file for each rank, with the rank's shards, and
beside them the folder `huggingface` with config and tokenizer. A tensor is joined when it is read.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor  # has torch.load know the classes of DTensor, and no others
from torch.distributed.tensor import DTensor, Replicate, Shard

from rondo.core.errors import DataError
from rondo.models.files import tensor_files, tensors_in
from rondo.models.quantised import Computed
from rondo.system.hub import RANK_FILES

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def rank_files(folder: Path) -> list[Path]:
    """Returns the files of the ranks, in their order, that lie in a model's folder, or beside `huggingface`;
    [] where none do. Raises DataError where one is missing.
    """
    folder = folder.parent if folder.name == "huggingface" else folder
    found = {
        (int(match[1]), int(match[2])): file
        for file in folder.glob(RANK_FILES)
        if (match := _NAME.fullmatch(file.name))
    }
    if not found:
        return []
    worlds = {world for world, _ in found}
    world = max(worlds)
    missing = [rank for rank in range(world) if (world, rank) not in found]
    if missing or len(worlds) > 1:
        why = f"rank {missing[0]} of {world} is missing" if missing else f"they are of {len(worlds)} runs"
        raise DataError(f"{folder}: {RANK_FILES}: {why}; copy all files of one checkpoint")
    return [found[world, rank] for rank in range(world)]


def stored_tensors(folder: Path) -> dict[str, Any]:
    """Returns name → what gives a tensor when it is read: of a folder's safetensors files, or its shards."""
    files = tensor_files(folder)
    ranks = [] if files else rank_files(folder)
    return joined_tensors(ranks) if ranks else dict(tensors_in(files))


def joined_tensors(files: Sequence[Path]) -> dict[str, Any]:
    """Returns name → what gives the whole tensor when it is read. Files are mapped, and not read. Raises
    DataError for a file that holds anything but tensors, and for shards that do not make one.
    """
    ranks = [_read(file) for file in files]
    names = ranks[0].keys()
    for file, state in zip(files, ranks, strict=True):
        if odd := sorted(names ^ state.keys()):
            raise DataError(f"{file}: not every rank has {odd[0]!r}; copy all files of one checkpoint")
    return {name: _joined(name, [state[name] for state in ranks], files) for name in names}


def _read(file: Path) -> Mapping[str, torch.Tensor]:
    meshes = logging.getLogger("torch.distributed.device_mesh")
    level = meshes.level
    meshes.setLevel(logging.ERROR)  # it warns of a mesh without processes, which nobody will use
    try:
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError) as error:
        raise DataError(f"{file} is no checkpoint of tensors: {_foreign(file) or error}") from error
    finally:
        meshes.setLevel(level)
    if not isinstance(state, Mapping) or not state:
        raise DataError(f"{file} holds no tensors by name, but {type(state).__name__}")
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise DataError(f"{file}: {name!r} is {type(tensor).__name__}, and no tensor")
    return state


def _foreign(file: Path) -> str:
    """Names what a file would have run."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError):
        return ""
    return f"it holds {', '.join(sorted(found))}, which are not read" if found else ""


def _joined(name: str, shards: Sequence[torch.Tensor], files: Sequence[Path]) -> Computed:
    """Says how the shards of one tensor make it: those along the one mesh axis that shards it."""
    first = shards[0]
    if not isinstance(first, DTensor):  # one rank, or held whole by each
        return Computed(lambda: first, tuple(first.shape))
    placements, ranks = first.placements, first.device_mesh.mesh
    alike = all(isinstance(one, DTensor) and one.placements == placements for one in shards)
    sharding = [axis for axis, one in enumerate(placements) if not isinstance(one, Replicate)]
    if not alike or len(sharding) > 1 or ranks.numel() != len(files):
        raise _not_read(name, first, files)
    if not sharding:  # each rank has all of it
        return Computed(first.to_local, tuple(first.shape))
    (axis,) = sharding
    placed = placements[axis]
    if type(placed) is not Shard:
        raise _not_read(name, first, files)
    along = ranks.movedim(axis, 0).reshape(ranks.shape[axis], -1)[:, 0]  # of the first replica
    parts = [shards[int(rank)].to_local() for rank in along]  # type: ignore[attr-defined]
    kept, dim = [size for at, size in enumerate(first.shape) if at != placed.dim], placed.dim
    wrong = [part for part in parts if [*part.shape[:dim], *part.shape[dim + 1 :]] != kept]
    if wrong or sum(part.shape[dim] for part in parts) != first.shape[dim]:
        raise DataError(f"{files[0]}: the shards of {name!r} do not make {tuple(first.shape)}")
    return Computed(partial(torch.cat, parts, dim), tuple(first.shape))


def _not_read(name: str, tensor: DTensor, files: Sequence[Path]) -> DataError:
    return DataError(
        f"{files[0]}: {name!r} is placed as {tensor.placements} on ranks {tensor.device_mesh.mesh.tolist()}, "
        f"and of {len(files)} files one shard along one axis is read; merge them (verl.model_merger)"
    )
