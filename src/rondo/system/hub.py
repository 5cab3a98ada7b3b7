"""From the name of a model to a folder on this machine: the only place that asks a hub, or a URL for a model.

Commands do so before they import torch, which takes seconds: a mistyped name is said at once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from rondo.core.errors import ConfigError, DataError, did_you_mean
from rondo.system.storage import cache_folder, storing
from rondo.system.streams import drawing
from rondo.system.urls import Far, is_url

_log = logging.getLogger(__name__)
Hub = Literal["huggingface", "modelscope", "local"]
_TITLES = {"huggingface": "Hugging Face", "modelscope": "ModelScope"}
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_WEIGHTS = ("*.safetensors",)
_OLD_WEIGHTS = ("pytorch_model*.bin",)  # of repositories without the others
_TWICE = ("*/*.safetensors", "*/*.bin", "consolidated*")  # the same weights again, for other programs


def local_folder(name: str, hub: Hub = "huggingface", *, weights: bool = True) -> str:
    """Returns the folder that `name` means: itself where it is one, else the hub's snapshot on this machine,
    downloaded once per process, which is said, or a copy of what is at a URL, once per machine. weights: a
    tokenizer needs none.

    Raises DataError where there is no such folder (at once: a name that only a folder can have, one below a
    folder that is there, or model.hub=local, is not looked up) and no such model on the hub, ConfigError
    where modelscope, or a URL's package, is not installed, StorageError where a URL cannot be read.
    """
    if is_url(name):
        return _copy(name.rstrip("/"), weights)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder) if name.startswith("~") else name
    if folder.exists():
        raise DataError(f"{name} is a file, and a model is a folder (config.json, *.safetensors, …)")
    why = "model.hub=local" if hub == "local" else _why_a_place(name, folder)
    if why:
        said = f"{why}, so it is not looked up on a hub"
        raise DataError(f"there is no folder {name}{_where(folder)} ({said}){_near(folder)}")
    _say(name, hub, os.getcwd())
    return _modelscope(name, weights) if hub == "modelscope" else _huggingface(name, weights)


def copy_of(path: str) -> Path:
    """Returns a folder's path, or of a URL where the copy on this machine is. Raises as `local_folder`."""
    return Path(_copy(path.rstrip("/"), True) if is_url(path) else path)


def _why_a_place(name: str, folder: Path) -> str:
    """Says why a name can only be that of a folder; empty: a hub id may be called so, as `gpt2` and
    `Qwen/Qwen3-0.6B` are.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    no_id = "no hub id looks like that"
    if name.startswith(("/", "./", "../", "~")):
        return no_id
    if folder.parent.name and folder.parent.is_dir():
        return f"there is a folder {folder.parent}"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return no_id
    return ""


@functools.cache
def _say(name: str, hub: str, directory: str) -> None:
    """Warns that a name is looked up on a hub: if a folder was meant, somebody else's model may have that
    name there.
    """
    _log.warning("there is no folder %s in %s: it is looked up on %s", name, directory, _TITLES[hub])


@functools.cache
def _copy(url: str, weights: bool) -> str:
    """Copies a model's files into the cache of this machine, under a name that says which: when the files at
    the URL change, that is another copy. The first process copies, and others wait for it.
    """
    place = Far(url)
    files = place.files()
    wanted = _wanted(files, [*_TEXTS, *_WEIGHTS[:weights]])
    if weights and not any(fnmatch(name, _WEIGHTS[0]) for name in wanted):
        wanted = _wanted(files, [*_TEXTS, *_OLD_WEIGHTS])
    if not wanted or (weights and not {"config.json", "adapter_config.json"} & set(wanted)):
        found = ", ".join(sorted(files)[:8]) or "nothing"
        raise DataError(
            f"{url} has no config.json (is it a model folder, and written to its end?); it holds {found}"
        )
    said = repr(
        [(name, sorted((str(key), str(value)) for key, value in files[name].items())) for name in wanted]
    )
    folder = (
        cache_folder() / "models" / f"{place.name}-{hashlib.sha256((url + said).encode()).hexdigest()[:16]}"
    )
    with storing(folder):
        folder.parent.mkdir(exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # falls with its process
            if folder.is_dir():
                return str(folder)
            part = folder.with_name(f".writing-{folder.name}")
            shutil.rmtree(part, ignore_errors=True)
            try:
                for name in wanted:
                    (part / name).parent.mkdir(parents=True, exist_ok=True)
                    (place / name).download(part / name)
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return str(folder)


def _wanted(files: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [
        name
        for name in sorted(files)
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in _TWICE)
    ]


@functools.cache
def _huggingface(name: str, weights: bool) -> str:
    from huggingface_hub import constants, snapshot_download

    try:
        with drawing():
            found = snapshot_download(
                name, allow_patterns=[*_TEXTS, *_WEIGHTS[:weights]], ignore_patterns=list(_TWICE)
            )
            if weights and next(Path(found).glob(_WEIGHTS[0]), None) is None:
                found = snapshot_download(
                    name, allow_patterns=[*_TEXTS, *_OLD_WEIGHTS], ignore_patterns=list(_TWICE)
                )
    except Exception as error:  # of HTTP libraries, which change with the version
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise DataError(_not_found(name, f"{_TITLES['huggingface']}{offline}", error)) from error
    return str(found)


@functools.cache
def _modelscope(name: str, weights: bool) -> str:
    try:
        from modelscope import snapshot_download as download
    except ImportError as error:
        raise ConfigError(
            'model.hub=modelscope, but ModelScope is not installed: pip install "rondo-rl[modelscope]"',
            key="model.hub",
        ) from error
    patterns = [*_TEXTS, *_WEIGHTS, *_OLD_WEIGHTS] if weights else list(_TEXTS)
    try:
        with drawing():
            return str(download(name, allow_patterns=patterns, ignore_patterns=list(_TWICE)))
    except Exception as error:
        raise DataError(_not_found(name, _TITLES["modelscope"], error)) from error


def _not_found(name: str, hub: str, error: Exception) -> str:
    folder = Path(name)
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"there is no folder {name}{_where(folder)}, and as a hub id it cannot be had from {hub}: {said}"
        f"; check the spelling and the network, or set model.hub=local to have folders only{_near(folder)}"
    )


def _where(folder: Path) -> str:
    return "" if folder.is_absolute() else f" in {os.getcwd()}"


def _near(folder: Path) -> str:
    beside = folder.parent
    names = [item.name for item in beside.iterdir() if item.is_dir()] if beside.is_dir() else []
    return did_you_mean(folder.name, names)
