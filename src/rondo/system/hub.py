"""From the name of a model to a folder on this machine, and from a folder to a hub: the only place that asks
a hub, or a URL for a model.

Commands do so before they import torch, which takes seconds: a mistyped name is said at once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rondo.core.errors import ConfigError, DataError, StorageError, did_you_mean
from rondo.system.storage import cache_folder, storing
from rondo.system.streams import drawing
from rondo.system.urls import Far, is_url

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_log = logging.getLogger(__name__)
Hub = Literal["huggingface", "modelscope", "local"]
_TITLES = {"huggingface": "Hugging Face", "modelscope": "ModelScope"}
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_WEIGHTS = ("*.safetensors",)
_OLD_WEIGHTS = ("pytorch_model*.bin",)  # of repositories without the others
_ATTRIBUTES = ".gitattributes"  # which a hub makes and keeps
RANK_FILES = "model_world_size_*_rank_*.pt"
"""Of a checkpoint that verl writes: a model's folder is `huggingface` beside them."""
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
        if any(folder.glob(RANK_FILES)) and (folder / "huggingface").is_dir():
            return str(folder / "huggingface")
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


# ---- to a hub


def is_from_hub(name: str) -> bool:
    """Says whether `name` was had from Hugging Face on this machine, and is no folder here."""
    from huggingface_hub import try_to_load_from_cache

    if is_url(name) or Path(name).expanduser().exists() or _why_a_place(name, Path(name)):
        return False
    return isinstance(try_to_load_from_cache(name, "config.json"), str)


class Repository:
    """A repository of models on Hugging Face (HF_ENDPOINT: another server of that API), which takes a folder.

    Making one asks the hub, and changes nothing there. Raises ConfigError for a name that is none, without a
    token that may write, and where a push would remove or show something: for a repository that has files
    (unless replace), or is public (if private); StorageError where the hub cannot be reached, or refuses.
    """

    def __init__(self, name: str, *, private: bool, replace: bool) -> None:
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.errors import RepositoryNotFoundError
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"{name!r}: a repository is called OWNER/NAME: {error}") from error
        if "/" not in name:
            raise ConfigError(f"{name!r}: a repository is called OWNER/NAME")
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{name}: HF_HUB_OFFLINE is set: nothing is sent; unset it")
        token = get_token()
        if token is None:
            raise ConfigError(
                f"{name}: there is no token of Hugging Face: `hf auth login` keeps one, or set HF_TOKEN; it "
                "needs the right to write"
            )
        self.name = name
        self._private = private
        self._api: HfApi = HfApi(token=token)
        with self._asked("asked"):
            who = self._api.whoami()
            role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
            if role == "read":
                raise ConfigError(
                    f"{name}: the token of {who.get('name')} may only read; make one that may write "
                    f"({constants.ENDPOINT}/settings/tokens)"
                )
            try:
                there = self._api.model_info(name)
            except RepositoryNotFoundError:
                self._head: str | None = None
                self._listed: Mapping[str, tuple[int, str]] = {}
                return
            self._head = there.sha
            self._listed = self._files(there.sha)
        if private and not there.private:
            raise ConfigError(
                f"{name}: is public, and a private one is asked for; --public (private=False) sends it "
                "there all the same"
            )
        if self._listed and not replace:
            raise ConfigError(
                f"{name}: has files already ({', '.join(sorted(self._listed)[:4])}, …): choose another "
                "name, or have it hold these alone (--replace, replace=True); its history keeps the others"
            )

    def take(self, folder: Path, message: str, besides: Mapping[str, bytes] = {}) -> str:
        """Makes the repository hold the files of a folder, and of `besides` by their names, in one commit,
        and no others; returns its URL. Names, sizes and hashes that the hub lists have been compared then.

        Raises StorageError where the hub cannot be reached, refuses, or lists something else. A repository
        that was made for this and got no commit is removed.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        files: dict[str, Path | bytes] = {
            str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()
        }
        files |= besides
        work: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(name, str(file) if isinstance(file, Path) else file)
            for name, file in files.items()
        ]
        work += [CommitOperationDelete(name) for name in sorted(self._listed.keys() - files.keys())]
        is_new = self._head is None
        with self._asked("made"):
            if is_new:
                self._api.create_repo(self.name, private=self._private)
        try:
            with self._asked("written"), drawing():
                commit = self._api.create_commit(
                    self.name, work, commit_message=message, parent_commit=self._head
                )
        except BaseException as error:
            if is_new:
                with self._asked(f"removed again, which is empty ({error}),"):
                    self._api.delete_repo(self.name, missing_ok=True)
            raise
        with self._asked("compared"):
            listed = self._files(commit.oid)
        wanted = {name: _git_and_sha256(file) for name, file in files.items()}
        wrong = [
            name
            for name in sorted(listed.keys() | wanted.keys())
            if name not in listed or name not in wanted or listed[name] not in wanted[name]
        ]
        if wrong:
            raise StorageError(
                f"{self.name}: the hub lists other files than were sent: {', '.join(wrong[:8])}. Look at "
                f"what is there ({commit.commit_url}), and send it again with --replace (replace=True)"
            )
        return f"{self._api.endpoint}/{self.name}"

    def _files(self, revision: str | None) -> dict[str, tuple[int, str]]:
        """Returns size and hash of every file; of large ones the content's SHA-256, of others git's."""
        from huggingface_hub.hf_api import RepoFile

        found = self._api.list_repo_tree(self.name, recursive=True, revision=revision)
        return {
            one.path: (one.size, one.lfs.sha256 if one.lfs else one.blob_id)
            for one in found
            if isinstance(one, RepoFile) and one.path != _ATTRIBUTES
        }

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        """Turns errors of HTTP libraries, which change with the version, into a StorageError."""
        try:
            yield
        except (ConfigError, StorageError):
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise StorageError(
                f"{self.name}: cannot be {what} on {_TITLES['huggingface']}: {said}"
            ) from error


def _git_and_sha256(file: Path | bytes) -> tuple[tuple[int, str], tuple[int, str]]:
    """Returns size and hash of a file, as git has it for its content, and the content's SHA-256."""
    with file.open("rb") if isinstance(file, Path) else io.BytesIO(file) as content:
        size = content.seek(0, os.SEEK_END)
        blob, plain = hashlib.sha1(b"blob %d\0" % size), hashlib.sha256()
        content.seek(0)
        while data := content.read(1 << 24):
            blob.update(data)
            plain.update(data)
    return (size, blob.hexdigest()), (size, plain.hexdigest())
