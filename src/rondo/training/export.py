"""A Hugging Face folder of an engine's parameters. All ranks write: each the files whose turn is its own,
tensor by tensor as they are gathered, so that none holds the whole model. What was written is read again and
compared.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rondo.checkpoint.checked import MANIFEST, CheckedFile, Pieces, write_manifest
from rondo.core.errors import CheckpointError, RondoError
from rondo.models.carried import carry
from rondo.models.family import auto_class, record_of
from rondo.models.loading import build_empty, build_model, load_model_config
from rondo.models.names import Parts, parts_of, weights_of, whole_part
from rondo.models.pixels import write_settings
from rondo.models.source import ModelSource
from rondo.models.value_head import FILE as VALUE_HEAD_FILE
from rondo.models.value_head import PREFIX as VALUE_HEAD
from rondo.models.value_head import replace_lm_head
from rondo.system.storage import fault_in, refused
from rondo.training.checkpoint import bytes_of
from rondo.training.telling import told_failures, told_files
from rondo.weights.checksum import checksum
from rondo.weights.layout import Box, Parameter

_log = logging.getLogger(__name__)

FILE_BYTES = 5_000_000_000  # of a file's tensors at most, but for a larger tensor: what hubs take
WHOLE_BYTES = 8 << 30  # a model of up to this size is also compared as transformers loads it, on one rank
_INDEX = "model.safetensors.index.json"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# As safetensors calls them.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


def export_folder(
    tensors: Iterable[tuple[str, torch.Tensor]],
    parameters: Sequence[Parameter],
    parts: Parts,
    source: ModelSource,
    path: str,
    group: dist.ProcessGroup,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder that transformers loads (of a critic: its trunk; the value head in a file of
    its own), and a manifest of its tensor files. Collective.

    tensors: whole ones, as checkpoints call and cut them (`names.separate`), the same on every rank.
    parameters, parts: what they will be, in that order. Raises StorageError, on every rank.
    """
    folder, rank, world = Path(path), dist.get_rank(group), dist.get_world_size(group)
    plan, arriving = _planned(parameters, parts, file_bytes), iter(tensors)
    files: dict[str, Pieces] = {}
    failure: Exception | None = None
    if rank == 0:
        _, failure = _tried(_begin, folder, source, plan)
    dist.barrier(group)  # the folder is there
    for number, (name, entries) in enumerate(plan.items()):
        arrived = itertools.islice(arriving, len(entries))
        if number % world == rank and failure is None:
            written, failure = _tried(_write_file, folder / name, entries, arrived)
            files[name] = written or ()
        for _ in arrived:  # on every rank, also when writing fails: all gather all tensors
            pass
    _raise_first(path, failure, group)
    listed = told_files(files, group)
    if rank == 0:
        _, failure = _tried(write_manifest, folder, listed)
    _raise_first(path, failure, group)  # when any rank returns, the folder is whole


def check_export(
    path: str,
    source: ModelSource,
    dtype: torch.dtype,
    held: Iterable[tuple[str, torch.Tensor, Box, tuple[int, ...]]],
    checksums: Mapping[str, int],
    group: dist.ProcessGroup,
) -> None:
    """Reads an exported folder as training would, each rank its own rows, and compares them with `held`: (the
    module's name, tensor, its box, the shape of the whole) each. One rank also has transformers load a folder
    of up to WHOLE_BYTES.

    dtype: of the exported ones; checksums: of the whole tensors, by the module's names. Collective. Raises
    CheckpointError naming the first tensor that differs, on every rank.
    """

    critic = any(name.startswith(VALUE_HEAD) for name in checksums)
    exported = ModelSource(path=path, trust_remote_code=source.trust_remote_code)
    _, failure = _tried(_check_boxes, exported, dtype, held, critic)
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if dist.get_rank(group) == 0 and size <= WHOLE_BYTES and failure is None:
        _, failure = _tried(_check_whole, exported, dtype, checksums, critic)
    _raise_first(path, failure, group)


def _tried(
    action: Callable[Arguments, Result], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> tuple[Result | None, Exception | None]:
    """Returns what an action returns, and what it raises: other ranks are told before it is raised."""
    try:
        return action(*arguments, **keywords), None
    except (OSError, RondoError) as error:
        return None, error


def _raise_first(path: str, failure: Exception | None, group: dist.ProcessGroup) -> None:
    """Raises the first of the ranks' failures on all of them; what a file system refused as a StorageError.
    Collective.
    """
    first = next(iter(told_failures(failure, group)), None)
    fault = fault_in(first) if isinstance(first, OSError) else None
    if fault is not None:
        raise refused(path, "written", fault) from first
    if first is not None:
        raise first


def _planned(
    parameters: Sequence[Parameter], parts: Parts, file_bytes: int
) -> dict[str, dict[str, Parameter]]:
    """Returns the tensors of each file, by the file's name, in the order in which they come."""
    trunk: list[dict[str, Parameter]] = []
    head: dict[str, Parameter] = {}
    size = 0
    for parameter in parameters:
        for part in parts.get(parameter.name, (whole_part(parameter.name, parameter.shape),)):
            tensor = Parameter(part.name, part.shape, parameter.dtype)
            if part.name.startswith(VALUE_HEAD):
                head[part.name.removeprefix(VALUE_HEAD)] = tensor
                continue
            if not trunk or size + tensor.num_bytes > file_bytes:
                trunk.append({})
                size = 0
            trunk[-1][part.name] = tensor
            size += tensor.num_bytes
    if len(trunk) == 1:
        files = {"model.safetensors": trunk[0]}
    else:
        of = len(trunk)
        files = {f"model-{number:05}-of-{of:05}.safetensors": one for number, one in enumerate(trunk, 1)}
    return files | ({VALUE_HEAD_FILE: head} if head else {})


def _begin(folder: Path, source: ModelSource, plan: Mapping[str, Mapping[str, Parameter]]) -> None:
    """Makes the folder, without files of an earlier export, and writes what says how to read the new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.safetensors"), folder / _INDEX, folder / MANIFEST):
        old.unlink(missing_ok=True)
    trunk = {file: tensors for file, tensors in plan.items() if file != VALUE_HEAD_FILE}
    config = load_model_config(source)
    config.dtype = getattr(torch, next(iter(next(iter(trunk.values())).values())).dtype)
    config.architectures = [_architecture(config)]
    config.save_pretrained(folder)
    if source.path is not None and VALUE_HEAD_FILE not in plan:
        carried = carry(source, folder)
        if carried:
            _log.info("the export has files of %s: %s", source.path, ", ".join(carried))
    if record_of(str(config.model_type)).images is not None:
        write_settings(source, config, folder)
    if len(trunk) > 1:
        size = sum(tensor.num_bytes for tensors in trunk.values() for tensor in tensors.values())
        where = {name: file for file, tensors in trunk.items() for name in tensors}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _write_file(
    path: Path, entries: Mapping[str, Parameter], arrived: Iterable[tuple[str, torch.Tensor]]
) -> Pieces:
    """Writes a safetensors file while its tensors come; returns its pieces: the header, and each tensor."""
    with CheckedFile(path) as file:
        file.append("", _header(entries))
        for (name, tensor), (own_name, entry) in zip(arrived, entries.items(), strict=True):
            found = (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert found == (entry.name, entry.shape, entry.dtype), (found, entry)
            file.append(own_name, bytes_of(tensor))
    return file.pieces


def _header(entries: Mapping[str, Parameter]) -> bytes:
    """Returns what stands before the tensors of a safetensors file: its length, and where each of them is."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.num_bytes
        described[name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers begin at whole words
    return len(text).to_bytes(8, "little") + text


def _check_boxes(
    exported: ModelSource,
    dtype: torch.dtype,
    held: Iterable[tuple[str, torch.Tensor, Box, tuple[int, ...]]],
    critic: bool,
) -> None:
    model, stored = build_empty(exported, dtype, output_head=not critic)
    if stored is None:
        raise _not_the_same(exported, "the folder", "does not hold just the model's tensors")
    parts = parts_of(model)
    for name, tensor, box, shape in held:
        if not name.startswith(VALUE_HEAD):
            read = torch.empty_like(tensor, device="cpu")
            stored.fill([(name, read, box, shape)], parts)
            if bytes_of(read) != bytes_of(tensor):
                raise _not_the_same(exported, repr(name))


def _check_whole(
    exported: ModelSource, dtype: torch.dtype, checksums: Mapping[str, int], critic: bool
) -> None:
    model = build_model(exported, dtype, output_head=not critic)
    loaded = dict(weights_of(model))
    if critic:
        head = replace_lm_head(model, exported.path, torch.promote_types(dtype, torch.float32))
        loaded |= {f"{VALUE_HEAD}{name}": tensor for name, tensor in head.named_parameters()}
    for name, expected in checksums.items():
        if name not in loaded or checksum(loaded[name].detach()) != expected:
            raise _not_the_same(exported, repr(name))


def _not_the_same(
    exported: ModelSource, what: str, how: str = "comes back as another tensor"
) -> CheckpointError:
    return CheckpointError(
        f"{exported.path}: the exported model is not the trained one: {what} {how}. The run's checkpoints "
        "are whole; this is a fault of rondo or of transformers' loading"
    )


def _architecture(config: PreTrainedConfig) -> str:
    return str(auto_class(config)._model_mapping[type(config)].__name__)
