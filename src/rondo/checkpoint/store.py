"""Checkpoints that are whole or absent: written beside their place, hashed, synced, renamed.

checkpoints/step-00000012/            complete: manifest.json lists every file with its size and SHA-256
checkpoints/.writing-step-00000016/   under way, or left by a kill; removed by the next writer
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo import __version__
from rondo.checkpoint.durable import sync_path
from rondo.errors import CheckpointError, ConfigError

MANIFEST = "manifest.json"
FORMAT = 1

_NAME = re.compile(r"step-(\d{8})")
_WRITING, _REMOVING = ".writing-", ".removing-"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
# Libraries that hide the errno (torch.save) are believed when less than this is free.
_NEARLY_FULL = 16 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint."""

    step: int
    path: Path
    manifest: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.manifest["files"].values())


class CheckpointStore:
    """The checkpoints of one run. Reading touches nothing, so it may look at a run that is going on; one
    writer only.

    keep: number of newest checkpoints kept (at least 1; ConfigError otherwise).
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(
                f"checkpoint.keep={keep}: keep at least one; for no checkpoints set checkpoint.every=null"
            )
        self.directory = Path(directory)
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first, damaged ones included."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def has(self, step: int) -> bool:
        return self.path_of(step).is_dir()

    def path_of(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None when there is none.

        Raises CheckpointError when it is damaged.
        """
        steps = self.steps()
        return self.open(steps[-1]) if steps else None

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, every file's size and hash compared with the manifest.

        Raises CheckpointError naming the damaged file, and the newest older checkpoint that is valid with
        the way to it.
        """
        path = self.path_of(step)
        if not path.is_dir():
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: there is no checkpoint of step {step}; there are: {have}")
        fault = _fault(path, step)
        if fault:
            raise CheckpointError(f"{fault}. {self._way_out(step)}")
        return Checkpoint(step, path, _read_manifest(path))

    def _way_out(self, step: int) -> str:
        path = self.path_of(step)
        aside = f"mv {path} {path.with_name('damaged-' + path.name)}"
        for older in reversed([s for s in self.steps() if s < step]):
            if not _fault(self.path_of(older), older):
                return (
                    f"The checkpoint of step {older} is valid. To go on from it: `{aside}`, and start again"
                )
        return f"No older checkpoint is valid. To begin anew: `{aside}`, and start again"

    @contextmanager
    def writing(self, step: int, expected_bytes: int | None = None) -> Iterator[Path]:
        """`with store.writing(12) as folder:` write into `folder`; at the end it becomes the newest
        checkpoint.

        Whatever interrupts it, earlier checkpoints stay as they are. Afterwards all but the newest `keep`
        are removed. expected_bytes: refuse at once when less than that is free. Raises CheckpointError when
        `step` has a checkpoint already, and when the disk is full (needed and free bytes in the message);
        other exceptions pass through.
        """
        target = self.path_of(step)
        folder = self.directory / f"{_WRITING}{target.name}"
        if target.exists():
            raise CheckpointError(f"{target} exists already; ask `has({step})` before writing")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.clean()
        free = shutil.disk_usage(self.directory).free
        if expected_bytes is not None and free < expected_bytes:
            raise CheckpointError(self._full_message(step, expected_bytes, free))
        try:
            folder.mkdir()
            yield folder
            _seal(folder, step)
            folder.rename(target)
            sync_path(self.directory)
        except BaseException as error:
            message = self._disk_full_message(step, folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            if message:
                raise CheckpointError(message) from error
            raise
        self._prune(step)

    def clean(self) -> None:
        """Remove what a killed writer left. For the writer only: it must hold the run folder's lock."""
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            if path.name.startswith((_WRITING, _REMOVING)):
                shutil.rmtree(path)

    def _prune(self, written: int) -> None:
        """All but the newest `keep` go; `written` never. Renamed first: a kill leaves no half checkpoint."""
        for step in self.steps()[: -self.keep]:
            if step != written:
                path = self.path_of(step)
                aside = path.with_name(_REMOVING + path.name)
                path.rename(aside)
                shutil.rmtree(aside)

    def _full_message(self, step: int, needed: int, free: int) -> str:
        """What to tell the user when the checkpoint of `step` does not fit (bytes)."""
        older = self.steps()
        kept = f"the checkpoint of step {older[-1]} is intact" if older else "there was no earlier checkpoint"
        return (
            f"{self.directory}: no space left for the checkpoint of step {step}: it needs at least "
            f"{_size(needed)}, {_size(free)} are free. Nothing was lost: {kept} and the training state is "
            f"unaffected. Free some space, or lower checkpoint.keep (now {self.keep})"
        )

    def _disk_full_message(self, step: int, folder: Path, error: BaseException) -> str:
        """Empty when the disk is not the reason. Looks while the partial files are still there."""
        free, written = shutil.disk_usage(self.directory).free, _folder_bytes(folder)
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError)
        if interrupted or not (_says_full(error) or free < _NEARLY_FULL):
            return ""
        needed = max([written, *(_manifest_bytes(self.path_of(s)) for s in self.steps()[-1:])])
        return self._full_message(step, needed, free + written)


def _seal(path: Path, step: int) -> None:
    """Hash and sync every file, then write and sync the manifest and the folders."""
    found = [file for file in sorted(path.rglob("*")) if file.is_file()]
    digests = _in_threads(_sha256, found)
    files = {
        file.relative_to(path).as_posix(): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(found, digests, strict=True)
    }
    for file in found:
        sync_path(file)
    manifest = {"format": FORMAT, "rondo": __version__, "step": step, "files": files}
    with (path / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    for folder in [path, *(entry for entry in path.rglob("*") if entry.is_dir())]:
        sync_path(folder)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises OSError, ValueError or KeyError when it is not one."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or not isinstance(manifest["files"], dict):
        raise ValueError("no list of files in it")
    return manifest


def _fault(path: Path, step: int) -> str:
    """What is wrong with a checkpoint folder, naming the file; empty when it is valid."""
    try:
        manifest = _read_manifest(path)
        if manifest["format"] > FORMAT:
            newer = f"rondo {manifest['rondo']} wrote it in format {manifest['format']}"
            return f"{path}: {newer}; this is rondo {__version__}, which reads up to format {FORMAT}"
        if manifest["step"] != step:
            return f"{path / MANIFEST}: it says step {manifest['step']}; the folder was renamed by hand"
        listed = [
            (path / name, int(entry["bytes"]), entry["sha256"]) for name, entry in manifest["files"].items()
        ]
        for file, size, _ in listed:
            if wrong := _size_fault(file, size):
                return wrong
        for (file, _, digest), actual in zip(
            listed, _in_threads(_sha256, [f for f, _, _ in listed]), strict=True
        ):
            if actual != digest:
                return f"{file}: damaged: its content does not have the SHA-256 that the manifest lists"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path / MANIFEST}: damaged or missing ({type(error).__name__}: {error})"
    return ""


def _size_fault(file: Path, size: int) -> str:
    if not file.is_file():
        return f"{file}: missing"
    actual = file.stat().st_size
    return f"{file}: damaged: {actual} bytes, the manifest says {size}" if actual != size else ""


def _in_threads(function: Callable[[Path], str], files: Sequence[Path]) -> list[str]:
    """`function` of each file, several at a time (hashing lets go of the interpreter's lock)."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, files))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _manifest_bytes(path: Path) -> int:
    try:
        return sum(int(entry["bytes"]) for entry in _read_manifest(path)["files"].values())
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _folder_bytes(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else 0


def _says_full(error: BaseException | None) -> bool:
    """The error, or one that it came from, is a full disk; workers' errors arrive as text."""
    seen: set[int] = set()
    words = [os.strerror(code) for code in _DISK_FULL]
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        if any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
