"""Checkpoints that are whole or absent: written beside their place, synced, renamed.

checkpoints/step-00000012/            complete: manifest.json lists every file with its size and checksums
checkpoints/.writing-step-00000016/   under way, or left by a kill; removed by the next writer

metrics/step-00000012.jsonl           of a file that only grows: what it got since the checkpoint before
step-00000012/metrics.json            how long its parts up to there are together, and their checksum

Nothing can be renamed at a URL. There the manifest is what makes a folder a checkpoint: it is written last,
when all files are there in their sizes, and removed first.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rondo.checkpoint.checked import (
    MANIFEST,
    Files,
    Pieces,
    check_sizes,
    faults_in,
    num_bytes,
    read_checked,
    read_manifest,
    sizes_in,
    write_checked,
    write_manifest,
)
from rondo.core.errors import (
    CheckpointError,
    ConfigError,
    OtherRunError,
    RondoError,
    StorageError,
    WorkerError,
)
from rondo.system.storage import (
    DISK_FULL,
    WRITING,
    entries_of,
    fault_in,
    make_folder,
    make_private,
    missing_folders,
    refused,
    remove_leftovers,
    remove_whole,
    storing,
    sync_path,
)
from rondo.system.urls import Far, Place, place_of

_NAME = re.compile(r"step-(\d{8})")
_GROWN, _PART = "metrics.json", ".jsonl"
# Libraries that hide the errno (torch.save) are believed when less than this is free.
_NEARLY_FULL = 16 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: every file that its manifest lists is there, in its size. What they hold is
    checked as it is read.
    """

    step: int
    """The step after which it was saved."""
    path: Place
    """The folder it is in."""
    files: Files
    """What its manifest lists, by path below the folder."""

    @property
    def num_bytes(self) -> int:
        return sum(map(num_bytes, self.files.values()))

    def read(self, name: str) -> bytes:
        """Returns the content of a file of one piece. Raises CheckpointError where it has changed."""
        return read_checked(self.path / name, self.files[name])

    def files_in(self, folder: str) -> Files:
        """Returns the checksums of the files below one of its folders, by their paths in that folder."""
        prefix = f"{folder}/"
        return {
            name.removeprefix(prefix): pieces
            for name, pieces in self.files.items()
            if name.startswith(prefix)
        }


class Draft:
    """A checkpoint under way: the folder to write into, and the checksums of the files that are in it."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.files: dict[str, Pieces] = {}

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Adds a file of one piece. private: nobody else may read it. Raises OSError, StorageError."""
        path = self.folder / name
        if isinstance(path, Path):
            path.parent.mkdir(exist_ok=True)
        self.files[name] = write_checked(path, data)
        if private and isinstance(path, Path):
            make_private(path)

    def note(self, folder: str, files: Files) -> None:
        """Adds the checksums of files that others wrote, as `CheckedFile`s, below a folder of this draft."""
        self.files |= {f"{folder}/{name}": pieces for name, pieces in files.items()}


class CheckpointStore:
    """The checkpoints of one run, in a folder or at a URL. Reading touches nothing, so it may look at a run
    that is going on; one writer only.

    keep: number of newest checkpoints kept (at least 1; ConfigError otherwise). `spared` is kept besides.
    """

    def __init__(self, directory: str | Place, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(
                f"checkpoint.keep={keep}: keep at least one; for no checkpoints set checkpoint.every=null"
            )
        self.directory = place_of(directory) if isinstance(directory, str) else directory
        self.keep = keep
        self.spared: int | None = None
        """The step of one that is kept however old it gets."""

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, ascending, damaged ones included."""
        if isinstance(self.directory, Far):
            files = self.directory.files()
            names = [name.removesuffix(f"/{MANIFEST}") for name in files if name.endswith(f"/{MANIFEST}")]
        else:
            names = [path.name for path in entries_of(self.directory)]
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def has(self, step: int) -> bool:
        return step in self.steps()

    def check_place(self) -> None:
        """Raises StorageError where nothing can be written, read and removed at a URL, or a folder cannot be
        made; of that nothing is left.
        """
        if isinstance(self.directory, Far):
            self.directory.check_writable()
            return
        missing = missing_folders(self.directory)
        make_folder(self.directory)
        for folder in missing:
            with storing(folder, "removed"):
                folder.rmdir()

    @property
    def metrics(self) -> Place:
        """Where the parts of the metrics lie of a run whose checkpoints are elsewhere: see `Grown`."""
        return self.directory / "metrics"

    def path_of(self, step: int) -> Place:
        return self.directory / f"step-{step:08d}"

    def latest(self) -> Checkpoint | None:
        """Returns the newest checkpoint; None when there is none. Raises CheckpointError as `open`."""
        steps = self.steps()
        return self.open(steps[-1]) if steps else None

    def open(self, step: int) -> Checkpoint:
        """Returns the checkpoint of `step`; of its files only the manifest is read.

        Raises CheckpointError naming a file that is missing or has another size, with the way out.
        """
        path = self.path_of(step)
        if not self.has(step):
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{path}: there is no checkpoint of step {step}; there are: {have}")
        with self.way_out_named(step):
            checkpoint = self.listed(step)
            check_sizes(checkpoint.path, checkpoint.files)
        return checkpoint

    def listed(self, step: int) -> Checkpoint:
        """Returns what the manifest of `step` lists, whether those files are there or not. Raises
        CheckpointError where the manifest is damaged or missing.
        """
        path = self.path_of(step)
        manifest, files = read_manifest(path)
        if manifest["step"] != step:
            raise CheckpointError(
                f"{path / MANIFEST}: it says step {manifest['step']}; the folder was renamed by hand"
            )
        return Checkpoint(step, path, files)

    @contextmanager
    def way_out_named(self, step: int) -> Iterator[None]:
        """Adds to an error of reading a checkpoint inside, also by workers, how to go on without that
        checkpoint. Nothing helps that is older where it is of another run: that error is raised as it is.

        The newest older checkpoint without a fault is looked for, which reads it.
        """
        try:
            yield
        except (CheckpointError, WorkerError) as error:
            fault = error.cause_error if isinstance(error, WorkerError) else error
            if isinstance(fault, OtherRunError):
                raise fault from error.__cause__
            if not isinstance(fault, CheckpointError):
                raise
            older = (one for one in reversed(self.steps()) if one < step and self._is_valid(one))
            raise CheckpointError(f"{fault}. {self.way_out(step, next(older, None))}") from error

    def _is_valid(self, step: int) -> bool:
        """Reads all of a checkpoint."""
        try:
            checkpoint = self.listed(step)
        except CheckpointError:
            return False
        return not faults_in(checkpoint.path, checkpoint.files)

    def way_out(self, step: int, older: int | None) -> str:
        """Says what to do about a damaged checkpoint. older: the newest valid one before it, if any."""
        path = self.path_of(step)
        if isinstance(path, Path):
            aside = f"`mv {path} {path.with_name('damaged-' + path.name)}`"
        else:
            aside = f"remove {path / MANIFEST}, without which it is no checkpoint"
        if older is not None:
            return f"The checkpoint of step {older} is valid. To go on from it: {aside}, and start again"
        return f"No older checkpoint is valid. To begin anew: {aside}, and start again"

    @contextmanager
    def writing(self, step: int) -> Iterator[Draft]:
        """`with store.writing(12) as draft:` write into the draft; at the end it becomes the newest
        checkpoint.

        Whatever interrupts it, earlier checkpoints stay as they are. Afterwards all but the newest `keep`
        and the spared one are removed. Raises CheckpointError when `step` has a checkpoint already,
        StorageError where the file system refuses (a full disk: with needed and free bytes); other exceptions
        pass through.
        """
        target = self.path_of(step)
        if self.has(step):
            raise CheckpointError(f"{target} exists already; ask `has({step})` before writing")
        if isinstance(target, Far):
            with self._sent(target, step) as draft:
                yield draft
        else:
            with self._renamed(target, step) as draft:
                yield draft
        self._prune(step)

    @contextmanager
    def _renamed(self, target: Path, step: int) -> Iterator[Draft]:
        folder = target.with_name(f"{WRITING}{target.name}")
        make_folder(target.parent)
        remove_leftovers(target.parent)
        try:
            folder.mkdir()
            draft = Draft(folder)
            yield draft
            _seal(draft, step)
            # Files are on the disk already; then their names, and last the new name of the folder: after a
            # power cut a checkpoint is there with all of its files, or not at all.
            for path in [folder, *(entry for entry in folder.rglob("*") if entry.is_dir())]:
                sync_path(path)
            folder.rename(target)
            sync_path(target.parent)
        except BaseException as error:
            # Ctrl-C, too, leaves nothing behind. How much was written counts for the message, so before it
            # goes.
            needed = self._needed(folder)
            shutil.rmtree(folder, ignore_errors=True)
            refusal = self._refusal(step, needed, error)
            if refusal is not None:
                raise refusal from error
            raise

    @contextmanager
    def _sent(self, target: Far, step: int) -> Iterator[Draft]:
        """Writes a checkpoint at a URL, after removing folders without a manifest (of killed writers)."""
        assert isinstance(self.directory, Far)
        steps = self.steps()
        for name in {name.partition("/")[0] for name in self.directory.files()}:
            match = _NAME.fullmatch(name)
            if match and int(match[1]) not in steps:
                (self.directory / name).remove()
        try:
            draft = Draft(target)
            yield draft
            _seal(draft, step)
        except (StorageError, WorkerError) as error:
            told = error.cause_error if isinstance(error, WorkerError) else error
            if not isinstance(told, StorageError):
                raise
            raise StorageError(f"{told}. Nothing was lost: {_kept(steps)}", told.fault) from error

    def _prune(self, written: int) -> None:
        """Removes all but the newest `keep`, never `written` or the spared one. Renames first, or removes the
        manifest: a kill leaves nothing half.
        """
        for step in self.steps()[: -self.keep]:
            if step not in (written, self.spared):
                path = self.path_of(step)
                if isinstance(path, Far):
                    # An object store removes one file at a time: without its manifest the rest is no
                    # checkpoint.
                    (path / MANIFEST).remove()
                    path.remove()
                    continue
                remove_whole(path)

    def _refusal(self, step: int, needed: int, error: BaseException) -> StorageError | None:
        """Returns what the user can do when the file system refused the checkpoint of `step`; None when it is
        not the reason.
        """
        told = error.cause_error if isinstance(error, WorkerError) else error
        if isinstance(told, RondoError) or not isinstance(error, Exception):
            return told if isinstance(told, StorageError) else None
        fault = fault_in(error)
        assert isinstance(self.directory, Path)
        if fault is None and shutil.disk_usage(self.directory).free < _NEARLY_FULL:
            fault = errno.ENOSPC
        if fault is None:
            return None
        refusal = refused(str(self.path_of(step)), "written", fault, needed)
        room = f", or lower checkpoint.keep (now {self.keep})" if fault in DISK_FULL else ""
        return StorageError(
            f"{refusal}{room}. Nothing was lost: {_kept(self.steps())}, and the training state is unaffected",
            fault,
        )

    def _needed(self, folder: Path) -> int:
        """Returns how many bytes a checkpoint has, by what is written of one and by the newest."""
        return max(sum(sizes_in(one).values()) for one in [folder, *map(self.path_of, self.steps()[-1:])])


def _kept(steps: Sequence[int]) -> str:
    return f"the checkpoint of step {steps[-1]} is intact" if steps else "there was no earlier checkpoint"


def _seal(draft: Draft, step: int) -> None:
    """Writes the manifest, after checking that every written file is there in its full size."""
    found = sizes_in(draft.folder)
    written = {name: num_bytes(pieces) for name, pieces in draft.files.items()}
    if found != written:
        name = min(name for name in found.keys() | written.keys() if found.get(name) != written.get(name))
        raise CheckpointError(
            f"{draft.folder / name}: {found.get(name, 'none')} of its bytes are there, and "
            f"{written.get(name, 'none')} were written. Does another run write there?"
        )
    write_manifest(draft.folder, draft.files, step=step)
    if read_manifest(draft.folder)[1] != draft.files:
        raise CheckpointError(f"{draft.folder / MANIFEST}: does not come back as it was written")


# ---- a file that only grows: its parts lie beside the checkpoints, which would else each hold all of it ----


@dataclass(frozen=True)
class Grown:
    """A file that only grows, as a checkpoint knows it: how long it was, and its checksum."""

    step: int = 0
    """The checkpoint's; 0: there is none yet."""
    num_bytes: int = 0
    """The length of all parts up to it together."""
    crc32: int = 0
    """Their checksum."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Grown | None:
        """Returns what a checkpoint says; None where it says nothing. Raises as its `read`."""
        return cls(**json.loads(checkpoint.read(_GROWN))) if _GROWN in checkpoint.files else None

    def note(self, draft: Draft) -> None:
        """Lets a checkpoint under way say this."""
        draft.write(_GROWN, json.dumps(asdict(self)).encode())

    def remove_later(self, folder: Place) -> None:
        """Removes parts behind this one's: of checkpoints that were not finished, or from which nobody goes
        on. To be done once, before a process writes the first one.
        """
        for at, part in _parts_in(folder).items():
            if at > self.step:
                part.remove() if isinstance(part, Far) else remove_whole(part)

    def with_part(self, folder: Place, step: int, data: bytes) -> Grown:
        """Writes what the file got since, for the checkpoint of `step`. Raises CheckpointError where the part
        does not arrive whole, StorageError.
        """
        path = folder / f"step-{step:08d}{_PART}"
        if data:
            folder.mkdir(parents=True, exist_ok=True)
            write_checked(path, data)
            size = path.stat().st_size
            if size != len(data):
                raise CheckpointError(f"{path}: {size} of its bytes are there, and {len(data)} were written")
            if isinstance(folder, Path):
                sync_path(folder)
        return Grown(step, self.num_bytes + len(data), zlib.crc32(data, self.crc32))

    def parts(self, folder: Place) -> Iterator[bytes]:
        """Reads the parts, one after the other. Raises CheckpointError, at the end, where they are not those
        that were written.
        """
        size = crc = 0
        for at, part in sorted(_parts_in(folder).items()):
            if at <= self.step:
                with storing(str(part), "read"):
                    data = part.read_bytes()
                size, crc = size + len(data), zlib.crc32(data, crc)
                yield data
        if (size, crc) != (self.num_bytes, self.crc32):
            raise CheckpointError(
                f"{folder}: the parts up to step {self.step} have {size} bytes, and {self.num_bytes} were "
                "written, or others: one is missing or damaged"
            )


def _parts_in(folder: Place) -> dict[int, Place]:
    """Returns the parts by step, in no order."""
    found = {name: _NAME.fullmatch(name.removesuffix(_PART)) for name in sizes_in(folder)}
    return {int(match[1]): folder / name for name, match in found.items() if match}
