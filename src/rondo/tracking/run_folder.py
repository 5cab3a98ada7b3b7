"""The folder of one run: what it holds, who may write into it, and what survives a kill.

config.yaml      the resolved configuration
metrics.jsonl    one JSON object per logged step, only ever appended to
journal.jsonl    what time decided (rondo.trainers.loop.journal), only ever appended to
timeline/        attempt-1/step-000100.json: what ran when in each process of it (rondo.tracking.timeline)
summary.json     written at the end
curves.png       written at the end
notes.txt        what the console could not show
rollouts/        step-000012.parquet: the rows of each step; a folder of such files where many write it;
                 step-000012.tokens.parquet: what the step had for each of their tokens (token_columns)
sums.jsonl       a number for each column and weight of each step (rondo.tracking.sums), only appended to
evaluations/     step-000012.jsonl: evaluated answers
checkpoints/     step-00000012/ (rondo.checkpoint), unless checkpoint.path is another place
warm_start/      the run that made the model to begin with
export/          the trained model as a Hugging Face folder
recipe.yaml      what the CLI repeats a run of `rondo.train` with, and inputs/ its rows and functions
discarded/<k>/   what attempt k wrote beyond the checkpoint from which a later attempt went on
logs/            controller.log, host-0.log, …: what each process printed and logged, only ever appended to
run.lock         who is writing here, what it is and how it ended (rondo.tracking.runs)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, Literal, cast

from rondo.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RondoError,
    StorageError,
    WorkerError,
    about,
)
from rondo.system.storage import (
    AppendedFile,
    entries_of,
    free_name,
    make_folder,
    make_private,
    missing_folders,
    move,
    remove_leftovers,
    remove_whole,
    replacing,
    replacing_folder,
    storing,
    sync_path,
    write_atomic,
)
from rondo.system.streams import LogFormatter, lasting
from rondo.system.urls import Place, place_of
from rondo.tracking.lock import RunLock
from rondo.tracking.metrics import each_metrics, metrics_line, parse_metrics

Resume = Literal["auto", "never", "must"]

SUMS = "sums.jsonl"  # see `rondo.tracking.sums`
OURS = (
    "config.yaml",
    "metrics.jsonl",
    SUMS,
    "timeline",
    "journal.jsonl",
    "summary.json",
    "curves.png",
    "rollouts",
    "evaluations",
    "profile",
    "export",
    "exports",
    "trackers",
    "notes.txt",
)
# What holds the configuration, which nobody but the owner of the run may read; so does `trackers`.
PRIVATE = ("config.yaml", "journal.jsonl", "recipe.yaml")
TOKENS = ".tokens.parquet"
"""How the names of a step's columns of tokens end."""
# Where this module and `checkpoint` write under temporary names.
_WRITTEN = ("rollouts", "evaluations", "checkpoints")
# What a run is made from lies there before it begins.
GIVEN = ("recipe.yaml", "inputs")
_STRIDE = 1 << 20  # bytes of a file that are read at a time
_STEP_FILE = re.compile(r"step-(\d{6,})((\..+)?\.(parquet|jsonl))?")


class RunFolder:
    """A run's folder, held exclusively until `close` (also a context manager). Until `begin` nothing in it
    changes, but for what a kill left half-written, and what is made for it is removed by `close`.

    checkpoints: where they lie; None: in this folder.
    resume says what to do with a folder that has content:
      auto   go on from its newest checkpoint; without one, move the old files to discarded/<attempt>/
             (`begin` does) and start anew
      never  refuse: ConfigError
      must   go on from its newest checkpoint; without one CheckpointError
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resume: Resume = "auto", checkpoints: str | None = None
    ) -> None:
        self.path = Path(path)
        own = self.path / "checkpoints"
        self.checkpoints_dir: Place = own if checkpoints is None else place_of(checkpoints)
        self.export_dir = self.path / "export"
        self.exports_dir = self.path / "exports"
        """Has a folder for each policy beside the run's."""
        self.logs_dir = self.path / "logs"
        self.checkpoint_steps: Sequence[int] = ()
        """Of the checkpoints from which this run can be gone on with, whose rollouts stay."""
        self._unsynced: set[Path] = set()
        self._metrics = AppendedFile(self.path / "metrics.jsonl")
        self._sums = AppendedFile(self.path / SUMS)
        self._begun = False
        self._made = missing_folders(self.path)
        self._earlier: list[str] = []  # what is there of a run without a checkpoint
        _refuse_foreign(self.path)
        make_folder(self.path)
        discarded = self.path / "discarded"
        self._lock = RunLock(self.path / "run.lock")
        try:
            previous = self._lock.acquire()
            written = [self.path / name for name in _WRITTEN]
            for folder in (self.path, *written, *entries_of(discarded)):
                remove_leftovers(folder)
            # 1 for the first process that ran here, then 2, …
            self.attempt = 1 + max(_attempt(previous), _attempts_discarded(discarded))
            # The place for what the attempt before this has left.
            self._discards = discarded / str(max(self.attempt - 1, 1))
            # The step of the newest checkpoint where there is one to go on from; not verified.
            self.resume_step = self._prepare(resume)
            # A name of its own, so that nothing is ever appended to what a killed process left.
            self.timeline_dir = free_name(self.path / "timeline" / f"attempt-{self.attempt}")
            self._lock.write_holder(self.attempt)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *where: object) -> None:
        if self._begun and error is not None:
            stopped = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
            cause = getattr(error, "cause_error", None)  # what a worker has raised
            name = type(cause if isinstance(cause, RondoError) else error).__name__
            with contextlib.suppress(StorageError):  # the error is what counts
                self.tell(state="stopped" if stopped else f"failed ({name})")
        # What an error that says all leaves before anything began: logs that nobody needs. Of a worker's
        # death, or a hang, they may say more than it does.
        says_all = isinstance(error, RondoError) and not isinstance(error, WorkerError)
        if says_all and not self._begun and self._made:
            with contextlib.suppress(OSError):  # a process that ends late writes on
                shutil.rmtree(self.logs_dir)
        self.close()

    def _prepare(self, resume: Resume) -> int | None:
        present = [name for name in OURS if _has_content(self.path / name)]
        from rondo.checkpoint import CheckpointStore  # with torch; `rondo show` reads a run without

        with about("checkpoint.path"):  # its package may not be installed
            checkpoints = self.checkpoint_steps = CheckpointStore(self.checkpoints_dir).steps()
        if checkpoints and resume != "never":
            return checkpoints[-1]
        if resume == "must":
            raise CheckpointError(
                f"checkpoint.resume=must, but {self.checkpoints_dir} has no checkpoint to go on from. "
                "Check trainer.run_dir and checkpoint.path, or set checkpoint.resume=auto to start anew"
            )
        if (present or checkpoints) and resume == "never":
            found, where = ", ".join(present), f"{self.path}: this folder"
            if checkpoints:
                found, where = f"a checkpoint of step {checkpoints[-1]}", str(self.checkpoints_dir)
            raise ConfigError(
                f"{where} holds an earlier run ({found}) and checkpoint.resume=never. "
                "Set checkpoint.resume=auto to go on with it, or choose another trainer.run_dir"
            )
        self._earlier = present
        return None

    def begin(self, config: str) -> Path | None:
        """Takes the folder for this run, and writes config.yaml. Returns the folder to which an earlier run
        without a checkpoint was moved; None: there was none.
        """
        self._begun = True
        moved_to = self._discards if self._earlier else None
        for name in self._earlier:
            self._discard(self.path / name)
        make_folder(self.path / "rollouts")
        if isinstance(self.checkpoints_dir, Path):
            make_folder(self.checkpoints_dir)
        self._write_config(config)
        return moved_to

    def _discard(self, path: Path) -> None:
        move(path, self._discarded(path))

    def _discarded(self, path: Path) -> Path:
        """Returns the free place in discarded/<the attempt before this>/ for what is, or was, at `path`."""
        target = self._discards / path.relative_to(self.path)
        make_folder(target.parent)
        return free_name(target)

    def discard_rest(self, name: str, end: int) -> None:
        """Moves what the file `name` has from byte `end` on to discarded/<the attempt before this>/. Nothing
        happens where it ends there, or is not there.
        """
        path = self.path / name
        with storing(path, "read"):
            if not path.exists() or path.stat().st_size <= end:
                return
            with open(path, "rb") as file:
                file.seek(end)
                late = file.read()
        write_atomic(self._discarded(path), late, private=name in PRIVATE)
        with storing(path, "cut"):
            if not end:
                path.unlink()
                return
            os.truncate(path, end)
            if name in PRIVATE:  # an older rondo may have left it open to others
                make_private(path)

    @property
    def resuming(self) -> bool:
        """Says whether there is a checkpoint to go on from."""
        return self.resume_step is not None

    def trackers_dir(self, name: str) -> Path:
        """Makes and returns the place of a tracker's local files: trackers/<name>, closed to others."""
        path = self.path / "trackers" / name
        make_folder(path)
        with storing(path.parent, "closed to others"):
            make_private(path.parent, 0o700)
        return path

    def _write_config(self, text: str) -> None:
        """Writes config.yaml. One that differs moves to discarded/: the run goes on with other settings. So
        does the summary of a run that is made longer: it is not finished now.
        """
        path = self.path / "config.yaml"
        if path.exists():
            with storing(path, "read"):
                same = path.read_bytes() == text.encode()
                make_private(path)  # an older rondo's was not
            if same:
                return
            for old in (path, self.path / "summary.json"):
                if old.exists():
                    self._discard(old)
        write_atomic(path, text, private=True)

    def tell(self, **of_the_run: Any) -> None:
        """Writes what the run is, or how it ended, beside who holds the folder: for `rondo runs`."""
        self._lock.tell(**of_the_run)

    def note(self, message: str) -> None:
        """Appends a line to notes.txt: what could be said nowhere else. If it cannot be written there either,
        nothing is said.
        """
        with (
            contextlib.suppress(StorageError),
            contextlib.closing(AppendedFile(self.path / "notes.txt")) as file,
        ):
            file.append(message.encode() + b"\n")

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl. It survives the end of this process at once, a power cut after
        `sync`.
        """
        self._metrics.append(metrics_line(step, metrics).encode() + b"\n")
        self._unsynced.add(self._metrics.path)

    def append_sums(self, line: str) -> None:
        """Appends a line to sums.jsonl, as `append_metrics` does."""
        self._sums.append(line.encode() + b"\n")
        self._unsynced.add(self._sums.path)

    @contextmanager
    def new_rollouts(self, step: int, parts: int, also: str = "") -> Iterator[list[Path]]:
        """Gives the files that become rollouts/step-000012.parquet at the end: one, or several, which are a
        folder then, with the rows in the order of their names. It is whole or absent, whatever happens.
        also: what stands behind the step in the name, as `.tokens`.
        """
        folder = self.path / "rollouts"
        make_folder(folder)
        path = folder / f"step-{step:06d}{also}.parquet"
        if parts == 1:
            with replacing(path) as temporary:
                yield [temporary]
            self._unsynced |= {path, folder}
            return
        names = [f"part-{number:05d}.parquet" for number in range(parts)]
        with replacing_folder(path) as temporary:
            yield [temporary / name for name in names]
        self._unsynced |= {folder, path, *(path / name for name in names)}

    def remove_rollouts(self, keep: int | None, of_tokens: int | None = None, *, ended: bool = False) -> None:
        """Removes rollouts but those of the newest `keep` steps, which are on disk before (None: none are
        removed). Unless the run has ended, those of the newest `keep` up to each checkpoint stay too: a run
        that goes on from there makes only what comes after. of_tokens: the same for columns of tokens, which
        go with the rollouts of their step.
        """
        if keep is None and of_tokens is None:
            return
        rollouts = self.path / "rollouts"
        steps = {path: step for path in entries_of(rollouts) if (step := _step_of(path)) >= 0}
        tokens = {path: step for path, step in steps.items() if path.name.endswith(TOKENS)}
        kept = self._kept(steps.keys() - tokens.keys(), steps, keep, ended)
        for_tokens = self._kept(tokens, steps, of_tokens, ended)
        for_tokens = for_tokens if keep is None else for_tokens & kept
        old = [path for path, step in steps.items() if step not in (for_tokens if path in tokens else kept)]
        if old:
            self._sync({path for path in list(self._unsynced) if path.is_relative_to(rollouts)})
        for path in sorted(old):  # a kill leaves the newer ones
            remove_whole(path)

    def _kept(
        self, files: Iterable[Path], step_of: Mapping[Path, int], keep: int | None, ended: bool
    ) -> set[int]:
        """Returns those of the steps whose files stay."""
        steps = sorted({step_of[path] for path in files})
        if keep is None:
            return set(steps)
        kept = set(steps[-keep:])
        for checkpoint in () if ended else self.checkpoint_steps:
            kept.update(steps[: bisect_right(steps, checkpoint)][-keep:])
        return kept

    def _sync(self, paths: set[Path]) -> None:
        for path in sorted(paths):
            sync_path(path)
        self._unsynced -= paths

    def wrote_timeline(self, path: Path) -> None:
        """Notes that a file of this attempt's timeline is to be on disk with the next `sync`."""
        self._unsynced |= {path, path.parent, path.parent.parent}

    def sync(self) -> None:
        """Forces everything written so far to disk, before a checkpoint is renamed into place."""
        journal = self.path / "journal.jsonl"
        also = {self.path} if self._unsynced else set()
        self._sync(self._unsynced | also | ({journal} if journal.exists() else set()))

    def discard_beyond(self, step: int) -> int:
        """Moves metrics lines, sums, rollouts, evaluations and profiles of steps > `step` to discarded/<the
        attempt before this>/; returns the number of metrics lines. The timeline stays: it says what each
        process did, whatever became of it.

        Lines that a kill cut off move too. A summary, curves and export of the earlier attempt move when
        anything else does. Call on resume, before anything is logged.
        """
        moved = self._discard_lines(self._metrics, step)
        self._discard_lines(self._sums, step)
        folders = [self.path / name for name in ("rollouts", "evaluations", "profile")]
        late = [path for folder in folders for path in entries_of(folder) if _step_of(path) > step]
        for path in late:
            self._discard(path)
        if moved or late:
            for name in ("summary.json", "curves.png", "export", "exports"):
                if (self.path / name).exists():
                    self._discard(self.path / name)
        return moved

    def _discard_lines(self, of: AppendedFile, step: int) -> int:
        assert not of.is_open, "discard_beyond comes before the first append of this process"
        path = of.path
        if not path.exists():
            return 0
        late = [line for line, record in parse_metrics(path) if record is None or record["step"] > step]
        if late:
            write_atomic(self._discarded(path), "".join(late))
            self._write_lines(
                path,
                (
                    line.encode()
                    for line, record in parse_metrics(path)
                    if record is not None and record["step"] <= step
                ),
            )
        return len(late)

    def _write_lines(self, path: Path, parts: Iterable[bytes], *, keeps_old: bool = False) -> None:
        """Makes a file of lines anew; without a line there is none. keeps_old: in discarded/."""
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
            is_empty = not file.tell()
            if keeps_old and path.exists():
                self._discard(path)
        if is_empty:
            with storing(path, "removed"):
                path.unlink()
        sync_path(self.path)

    @property
    def has_run(self) -> bool:
        """Says whether an earlier attempt has begun here."""
        return (self.path / "config.yaml").exists()

    def metrics_from(self, start: int) -> bytes:
        """Returns what metrics.jsonl has from byte `start` on."""
        path = self._metrics.path
        with storing(path, "read"), open(path, "rb") if path.exists() else BytesIO() as file:
            file.seek(start)
            return file.read()

    def metrics_begin_with(self, num_bytes: int, crc32: int) -> bool:
        """Says whether metrics.jsonl has so many bytes, and these have this checksum."""
        path, crc = self._metrics.path, 0
        with storing(path, "read"), open(path, "rb") if path.exists() else BytesIO() as file:
            while num_bytes and (data := file.read(min(num_bytes, _STRIDE))):
                num_bytes, crc = num_bytes - len(data), zlib.crc32(data, crc)
        return num_bytes == 0 and crc == crc32

    def take_over_metrics(self, parts: Iterable[bytes]) -> None:
        """Takes the lines that checkpoints have carried: the run goes on elsewhere than it was. This folder's
        own move to discarded/, and so do its sums, which are of other steps. Call before `discard_beyond`.
        """
        self._write_lines(self._metrics.path, parts, keeps_old=True)
        if self._sums.path.exists():
            self._discard(self._sums.path)

    def each_metrics(self) -> Iterator[dict[str, Any]]:
        """Reads as the module's `each_metrics`; yields nothing when nothing was logged yet."""
        return each_metrics(self.path) if self._metrics.path.exists() else iter(())

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """Writes summary.json atomically. Raises DataError on a NaN or a value that JSON does not have."""
        path = self.path / "summary.json"
        try:
            text = json.dumps(summary, indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{path}: the summary holds a value that JSON does not have: {error}") from error
        write_atomic(path, text + "\n")
        return path

    def close(self) -> None:
        """Closes the files and releases the lock. Idempotent."""
        self._metrics.close()
        self._sums.close()
        if not self._begun:
            self._lock.remove()
        self._lock.close()
        if not self._begun:
            for folder in self._made:
                with contextlib.suppress(OSError):  # somebody has put something there
                    folder.rmdir()


def _has_content(path: Path) -> bool:
    return bool(entries_of(path)) if path.is_dir() else path.exists()


def _refuse_foreign(path: Path) -> None:
    """Raises for a folder that holds other things: it is a mistyped path, not a run."""
    present = {entry.name for entry in entries_of(path) if not entry.name.startswith(".")} - {*GIVEN, "logs"}
    if present and not present & {*OURS, "checkpoints", "run.lock", "discarded", "warm_start"}:
        some = ", ".join(sorted(present)[:3]) + (", …" if len(present) > 3 else "")
        raise ConfigError(
            f"trainer.run_dir: {path} is not empty and holds no run ({some}). "
            "Choose a folder that does not exist yet"
        )


def _attempt(holder: Mapping[str, Any]) -> int:
    attempt = holder.get("attempt", 0)
    return attempt if isinstance(attempt, int) and attempt > 0 else 0


def _attempts_discarded(folder: Path) -> int:
    names = [path.name for path in entries_of(folder)]
    return max((int(name) for name in names if name.isdigit()), default=0)


def _step_of(path: Path) -> int:
    match = _STEP_FILE.fullmatch(path.name)
    return int(match[1]) if match else -1


# ---- what the controller logs, in a file of the folder, too ----


# Output of engines and scorers, which the processes that started them log.
_PROCESSES = logging.getLogger("rondo.system.process")
_OURS = logging.getLogger("rondo")


class _RunLog(logging.FileHandler):
    """Makes its file, and the folder, when there is something to write: behind a line for the attempt. What
    cannot be written is dropped: logging does not end a run.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._attempt = attempt

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = super()._open()
        except OSError:
            return open(os.devnull, "w", encoding="utf-8")
        stream.write(f"=== attempt {self._attempt}, started {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n")
        return cast(TextIOWrapper, lasting(stream, str(path)))


@contextmanager
def logged_to(path: Path, attempt: int) -> Iterator[None]:
    """Appends what is logged inside to a file, besides where it went before. Where the program has set up no
    logging, messages that are no warnings go to the file alone.
    """
    root = logging.getLogger()
    levels = {logger: logger.level for logger in (_OURS, _PROCESSES)}
    file = _RunLog(path, attempt)
    file.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file]
    shown = logging.lastResort  # Python's way to show warnings while nobody else does
    layout = shown.formatter if shown is not None else None
    if not root.handlers:
        _OURS.setLevel(logging.INFO)
        _PROCESSES.setLevel(logging.DEBUG)
        if shown is not None:
            shown.setFormatter(LogFormatter())
            handlers.append(shown)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
        file.close()
        if shown is not None:
            shown.setFormatter(layout)
        for logger, level in levels.items():
            logger.setLevel(level)
