"""Whether the files of a model folder are what their names say, and whether they are those of before. A
download that broke off, a web page or a pointer of git LFS is told by its name, and not by what some library
makes of it. No weights are read for that; `tensors_in` says where they are, and each is read when it is asked
for.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rondo.core.errors import DataError
from rondo.system.hub import RANK_FILES
from rondo.system.urls import check_inner

if TYPE_CHECKING:
    import torch

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt")
BESIDE_TOKENIZER = (
    "config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "merges.txt",
)
_BESIDE_CONFIG = ("preprocessor_config.json", "processor_config.json", "adapter_config.json")
TEMPLATE = "chat template"
"""What `digests_in` calls it, whichever file has it."""
# What programs note of themselves when they write a model, and nobody reads.
_NOTES = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "_from_model_config")
_WEIGHTS = "*.safetensors"
_INDEX = "*.safetensors.index.json"
_WEIGHT_FILES = (_WEIGHTS, "pytorch_model*.bin", _INDEX)
_PIECE = 4096  # bytes of a tensor that are compared, from its middle
_POINTER = b"version https://git-lfs.github.com/"
_PAGES = (b"<!doctype", b"<html", b"<?xml")


def check_model_folder(path: str) -> None:
    """Raises DataError for a folder that holds no model, or whose files are damaged."""
    check_config(path)
    check_weights(path)


def check_config(path: str) -> None:
    """Raises DataError for a folder without config.json, or with a damaged one."""
    _check_folder(path, ("config.json",), "config.json (is it a model folder?)")
    _check_texts(Path(path), CONFIG_FILES)


def check_tokenizer(path: str) -> None:
    """Raises DataError for a folder without tokenizer, or with damaged files of it."""
    remedy = "tokenizer (tokenizer.json, …); set model.tokenizer to a folder, hub id or function that has one"
    _check_folder(path, TOKENIZER_FILES, remedy)
    _check_texts(Path(path), (*TOKENIZER_FILES, *BESIDE_TOKENIZER))


def has_tokenizer(path: str) -> bool:
    """Says whether a folder holds a tokenizer."""
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def check_weights(path: str) -> None:
    """Raises DataError for a folder without weights, a shard that is not there, or a file that is damaged as
    far as its header and its size say: the first tensor that is cut off is named.
    """
    folder = Path(path)
    if folder.name == "huggingface" and any(folder.parent.glob(RANK_FILES)):
        return  # beside it: `models/shards.py` looks at them
    _check_folder(path, _WEIGHT_FILES, "weights (*.safetensors)")
    for index in sorted(folder.glob(_INDEX)):
        shards = json_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise DataError(f"{index} has no weight_map, which says where each tensor is; download it again")
        for tensor, shard in shards.items():
            try:
                check_inner(str(shard))
            except ValueError as error:
                raise DataError(f"{index} says that tensor {tensor!r} is in a file that {error}") from error
            if not (folder / str(shard)).is_file():
                raise DataError(
                    f"{index} says that tensor {tensor!r} is in {shard}, which is not there; download it"
                )
    for file in (found for pattern in _WEIGHT_FILES[:2] for found in sorted(folder.glob(pattern))):
        _check_head(file)
        if file.match(_WEIGHTS):
            _check_safetensors(file)


def tensor_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that transformers reads: those of the index, or model.safetensors; []
    where there is neither. (Folders may hold others: another format's, an adapter's, a critic's value head.)
    """
    index = next(iter(sorted(folder.glob(_INDEX))), None)
    if index is not None:
        return sorted({folder / str(name) for name in json_object(index)["weight_map"].values()})
    return sorted(folder.glob("model.safetensors"))


def file_of(folder: Path, tensor: str) -> str:
    """Returns the name of the file that holds a tensor; the folder's where no safetensors file does."""
    for file in sorted(folder.glob(_WEIGHTS)):
        if tensor in names_in(file):
            return file.name
    return folder.name


def names_in(file: Path) -> list[str]:
    """Returns the names of the tensors in a safetensors file."""
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file. `tensor[index]` reads a part of it, `tensor[...]` all."""

    file: Path
    """Of the model's folder."""
    name: str
    """The tensor's, as the file has it."""
    shape: tuple[int, ...]
    """Of all of it."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        # Opened for each tensor: pages of a mapped file count as this process's memory as long as it is open.
        with safe_open(self.file, framework="pt") as file:
            whole = index is ... or index == ()
            tensor: torch.Tensor = file.get_tensor(self.name) if whole else file.get_slice(self.name)[index]
            return tensor


def tensors_in(files: Iterable[Path]) -> dict[str, FileTensor]:
    """Returns the tensors of safetensors files by their names; of the files only the headers are read."""
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                found[name] = FileTensor(file, name, tuple(opened.get_slice(name).get_shape()))
    return found


def is_of_weights(name: str) -> bool:
    """Says whether a file of a model folder holds weights, by its name."""
    return any(Path(name).match(pattern) for pattern in _WEIGHT_FILES[:2])


def digests_in(folder: Path) -> dict[str, str]:
    """Returns what tells two contents of a model folder apart, by the names of its files: settings, tokenizer
    and code by what they say, weights by shapes and a piece of each tensor, which takes no time to speak of
    also where they are large. Raises DataError for what is damaged.
    """
    names = {*CONFIG_FILES, *_BESIDE_CONFIG, *TOKENIZER_FILES, *BESIDE_TOKENIZER}
    texts = [file for name in sorted(names) if (file := folder / name).is_file()]
    said = {file.name: json_object(file) for file in texts if file.suffix == ".json"}
    raw = [file for file in texts if file.suffix in (".txt", ".model")] + [
        file for pattern in ("*.py", "*.tiktoken") for file in sorted(folder.glob(pattern))
    ]
    found: dict[str, Any] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in raw}
    # transformers keeps a template in one of three places, and looks for it in this order.
    places = [said.get("tokenizer_config.json", {}), said.pop("chat_template.json", {})]
    template = next((one for place in places if (one := place.pop("chat_template", None))), None)
    if (alone := folder / "chat_template.jinja").is_file():
        template = alone.read_text(encoding="utf-8", errors="replace")
    if template is not None:
        found[TEMPLATE] = template
    for name, entries in said.items():
        found[name] = {key: value for key, value in entries.items() if key not in _NOTES}
    for pattern in _WEIGHT_FILES[:2]:
        found |= {file.name: _weights_told(file) for file in sorted(folder.glob(pattern))}
    return {name: digest_of(json.dumps(one, sort_keys=True).encode()) for name, one in found.items()}


def digest_of(content: bytes) -> str:
    """Returns what tells a content from every other."""
    return hashlib.sha256(content).hexdigest()[:16]


def _weights_told(file: Path) -> Any:
    """Returns what tells the weights of a file from others, but for those that differ in few numbers."""
    if not file.match(_WEIGHTS):
        if not zipfile.is_zipfile(file):  # as torch wrote them before 1.6
            return file.stat().st_size
        with zipfile.ZipFile(file) as archive:  # its directory has a checksum of each tensor
            return [(one.filename, one.file_size, one.CRC) for one in archive.infolist()]
    _check_safetensors(file)
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        header: Mapping[str, Any] = json.loads(opened.read(start - 8))
        told = []
        for name, entry in sorted(header.items()):
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            middle = max(first, (first + end - _PIECE) // 2)
            opened.seek(start + middle)
            piece = opened.read(min(_PIECE, end - middle))
            told.append((name, entry["dtype"], entry["shape"], digest_of(piece)))
    return told


def json_object(file: Path) -> dict[str, Any]:
    """Returns what a JSON file says. Raises DataError naming it for anything but an object."""
    _check_head(file)
    with _readable(file):
        text = file.read_text(encoding="utf-8-sig")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # digits without end are a ValueError
        raise DataError(f"{file} is no JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} must hold a JSON object ({{…}}), and holds a {type(found).__name__}")
    return found


def _check_folder(path: str, patterns: tuple[str, ...], what: str) -> None:
    folder = Path(path)
    if not any(next(folder.glob(pattern), None) for pattern in patterns):
        found = ", ".join(sorted(item.name for item in folder.iterdir())[:8]) or "nothing"
        raise DataError(f"model folder {path} has no {what}; it holds {found}")


def _check_texts(folder: Path, names: Iterable[str]) -> None:
    for file in (folder / name for name in names):
        if not file.exists():
            continue
        if file.suffix == ".json":
            json_object(file)
        else:
            _check_head(file)


def _check_head(file: Path) -> None:
    """Raises DataError for what downloads leave in place of a file."""
    with _readable(file), file.open("rb") as opened:
        head = opened.read(256)
    if not head:
        raise DataError(f"{file} is empty; download it again")
    if head.startswith(_POINTER):
        raise DataError(f"{file} is a pointer of git LFS, not the file: run `git lfs pull` in {file.parent}")
    if head.lstrip().lower().startswith(_PAGES):
        raise DataError(f"{file} is a web page, not the file (a login or an error?); download it again")


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        header = opened.read(header_size) if header_size <= size - 8 else b""
    if not header:
        raise DataError(
            f"{file} ({size} bytes) is cut off within its header, or no safetensors file; download it again"
        )
    try:
        entries = json.loads(header)
        ends = {name: one["data_offsets"][1] for name, one in entries.items() if name != "__metadata__"}
        cut_off = {end: name for name, end in ends.items() if end > size - 8 - header_size}
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: its header cannot be read ({error}); download it again") from error
    if cut_off:
        raise DataError(
            f"{file} is cut off: {max(cut_off) + 8 + header_size - size} of its bytes are missing, from "
            f"tensor {cut_off[min(cut_off)]!r} on; download it again"
        )
    try:
        names_in(file)
    except SafetensorError as error:
        raise DataError(f"{file} is damaged: {error}; download it again") from error


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no text (byte {error.start}); download it again") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
