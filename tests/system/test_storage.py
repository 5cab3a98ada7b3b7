"""What file systems refuse, for real: names too long, files in the way of folders, limits, a full device."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rondo.core.batch import Batch
from rondo.core.errors import CheckpointError, StorageError, WorkerError
from rondo.system.storage import (
    DISK_FULL,
    AppendedFile,
    cache_folder,
    fault_in,
    is_ours,
    make_folder,
    replacing,
    replacing_folder,
    storing,
    write_atomic,
)
from rondo.tracking import RunFolder
from tests.messages import full_text


@contextmanager
def files_no_larger_than(number: int) -> Iterator[None]:
    """What is written beyond is refused with EFBIG (Python ignores the signal that comes with it)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_text_that_does_not_fit_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomic(path, "old")
    with files_no_larger_than(1000), pytest.raises(StorageError) as caught:
        write_atomic(path, "new" * 1000)
    assert caught.value.fault == errno.EFBIG
    assert str(path) in str(caught.value)
    assert names(tmp_path) == ["config.yaml"]
    assert path.read_text() == "old"


def test_an_entry_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    with closing(AppendedFile(tmp_path / "metrics.jsonl")) as file:
        file.append(b"first\n")
        with files_no_larger_than(10), pytest.raises(StorageError):
            file.append(b"second\n")
        assert file.path.read_bytes() == b"first\n"
        file.append(b"third\n")
    assert file.path.read_bytes() == b"first\nthird\n"


def test_rollouts_that_do_not_fit_are_absent(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder, files_no_larger_than(200):
        with pytest.raises(StorageError) as caught:
            with folder.new_rollouts(3, 1) as (path,):
                Batch.of({"reward": [0.5, 1.0]}).write_parquet(path)
    assert caught.value.fault == errno.EFBIG
    assert "rollouts/step-000003.parquet" in str(caught.value)
    assert names(tmp_path / "run" / "rollouts") == []


def test_a_full_device_says_what_is_needed_and_free() -> None:
    with pytest.raises(StorageError) as caught, storing("/dev/full", needs=lambda: 3 * 2**20):
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")
    assert caught.value.fault == errno.ENOSPC
    assert "it needs at least 3.0 MiB" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).fault == errno.ENOSPC  # workers raise it too


def test_what_is_in_the_way_and_what_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, fault in {
        tmp_path / "file": errno.EEXIST,
        tmp_path / "file" / "run": errno.ENOTDIR,
        tmp_path / ("x" * 300): errno.ENAMETOOLONG,
    }.items():
        with pytest.raises(StorageError) as caught:
            make_folder(path)
        assert caught.value.fault == fault
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(StorageError) as caught:
        write_atomic(tmp_path / "folder", "text")
    assert caught.value.fault == errno.EISDIR
    assert names(tmp_path) == ["file", "folder"]


def test_what_another_process_or_library_tells_of_is_understood_and_other_errors_pass(tmp_path: Path) -> None:
    told = WorkerError(
        "actor", 1, "export", "SafetensorError: I/O error: No space left on device (os error 28)"
    )
    with pytest.raises(StorageError) as caught, storing(tmp_path):
        raise told
    assert caught.value.fault in DISK_FULL
    for error in (
        ValueError("something else"),
        CheckpointError("No space left on device"),
        ConnectionError(111),
    ):
        with pytest.raises(type(error)), storing(tmp_path):
            raise error
    assert fault_in(OSError(errno.EIO, os.strerror(errno.EIO))) == errno.EIO


def test_what_was_to_replace_a_file_is_removed_when_it_is_not_whole(tmp_path: Path) -> None:
    def interrupted() -> None:
        with replacing(tmp_path / "curves.png") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


def test_an_empty_folder_is_filled_and_stays(tmp_path: Path) -> None:
    """It may be a mount point, which cannot be renamed or removed, with nothing writable beside it; or a link
    to one.
    """
    (tmp_path / "mount").mkdir()
    (tmp_path / "link").symlink_to("mount")
    before = (tmp_path / "mount").stat().st_ino
    with pytest.raises(IsADirectoryError), replacing_folder(tmp_path / "link") as part:
        part.write_text("no file", encoding="utf-8")
    assert names(tmp_path / "mount") == []
    with replacing_folder(tmp_path / "link") as part:
        (part / "folder").mkdir()
        (part / "folder" / "a").write_text("whole", encoding="utf-8")
    assert names(tmp_path) == ["link", "mount"]
    assert names(tmp_path / "link") == ["folder"]
    assert (tmp_path / "mount" / "folder" / "a").read_text() == "whole"
    assert (tmp_path / "link").stat().st_ino == before
    with replacing_folder(tmp_path / "mount") as part:
        (part / "b").write_text("", encoding="utf-8")
    assert names(tmp_path / "mount") == ["b"]


def test_what_can_be_made_again_is_kept_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache/rondo"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # it cannot be made there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"rondo-{os.getuid()}"
    (tmp_path / f"rondo-{os.getuid()}").chmod(0o770)
    with pytest.raises(StorageError, match=full_text("others may write there; set")):
        cache_folder()
    other = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other)
    with pytest.raises(StorageError, match="belongs to somebody else, or others"):
        cache_folder()


def test_no_cache_is_where_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled code is loaded from there. Ours that others may write to is closed to them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, private = tmp_path / "cache/rondo", tmp_path / f"rondo-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert cache_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o755
    theirs, found = os.getuid() + 1, os.stat

    def somebody_elses(path: Any, **options: Any) -> os.stat_result:
        result = found(path, **options)
        values = list(result)
        if str(path) == str(folder):
            values[4] = theirs
        return os.stat_result(values)

    monkeypatch.setattr("os.stat", somebody_elses)
    assert cache_folder() == cache_folder() == private
    assert private.stat().st_mode & 0o777 == 0o700
    assert (
        caplog.text.count(f"{folder} cannot be written, or others may write there: the cache is {private}")
        == 1
    )
    private.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="belongs to somebody else, or others"):
        cache_folder()


def test_whose_a_file_is(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    assert not is_ours(file)
    file.touch(0o644)
    link.symlink_to(file)
    assert is_ours(file)
    assert is_ours(link)
    for mode in (0o664, 0o646):
        file.chmod(mode)
        assert not is_ours(file)
        assert not is_ours(link)
