"""Checkpoints under kills, damage and a full disk: earlier ones stay valid, and messages say what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections import namedtuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import rondo
from rondo.checkpoint import CheckpointStore
from rondo.checkpoint import store as store_module
from rondo.checkpoint.checked import CheckedFile, placed, read_piece
from rondo.core.errors import CheckpointError, ConfigError, StorageError, WorkerError
from tests.messages import full_text
from tests.tracking.processes import running

GIB = 2**30


def write(store: CheckpointStore, step: int, size: int = 1000) -> None:
    with store.writing(step) as draft:
        draft.write("model/.metadata", b"123456789")
        with CheckedFile(draft.folder / "model" / "weights.bin") as file:  # as a worker writes
            file.append("first", bytes([step % 256]) * (size // 4))
            file.append("second", bytes([step % 256]) * (size - size // 4))
        draft.note("model", {"weights.bin": file.pieces})
        draft.write("controller.json", json.dumps({"step": step}).encode())


def write_slowly(connection: Connection, directory: str, when: str) -> None:
    """Write step 2 and stop for ever: in the middle of the files, before the rename, or during pruning."""
    store = CheckpointStore(directory, keep=1)

    def stop(*args: Any) -> None:
        connection.send("here")
        connection.recv()

    if when == "manifest":
        store_module._seal = stop
    elif when == "prune":
        shutil.rmtree = stop  # type: ignore[assignment]
    with store.writing(2) as draft:
        draft.write("weights.bin", b"x" * 10_000)
        if when == "files":
            stop()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_checkpoint_is_listed_checksummed_and_read_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    write(store, 12)
    found = store.latest()
    assert found is not None
    assert (found.step, found.path.name, found.num_bytes) == (12, "step-00000012", 9 + 1000 + 12)
    assert sorted(found.files) == ["controller.json", "model/.metadata", "model/weights.bin"]
    manifest = json.loads((found.path / "manifest.json").read_text())
    published = 0xCBF43926  # the check value of CRC-32
    assert manifest["files"]["model/.metadata"] == {"bytes": 9, "pieces": [["", 9, published]]}
    assert manifest["files"]["model/weights.bin"] == {
        "bytes": 1000,
        "pieces": [["first", 250, zlib.crc32(b"\x0c" * 250)], ["second", 750, zlib.crc32(b"\x0c" * 750)]],
    }
    assert manifest["rondo"] == rondo.__version__
    assert str(tmp_path) not in (found.path / "manifest.json").read_text()
    assert found.read("controller.json") == b'{"step": 12}'
    assert found.files_in("model").keys() == {".metadata", "weights.bin"}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        write(store, step)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]
    assert store.steps() == [3, 10]
    assert store.has(10)
    assert not store.has(2)
    with pytest.raises(CheckpointError, match="exists already"):
        write(store, 10)
    with pytest.raises(CheckpointError, match=full_text("no checkpoint of step 4; there are: 3")):
        store.open(4)
    with pytest.raises(ConfigError, match=r"checkpoint\.keep=0"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize("when", ["files", "manifest", "prune"])
def test_kill_9_during_a_write_leaves_a_valid_checkpoint(tmp_path: Path, when: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    with running(write_slowly, str(tmp_path), when) as (process, connection):
        assert connection.recv() == "here"
        process.kill()
        process.join()
    latest = store.latest()
    assert latest is not None
    assert latest.step == (2 if when == "prune" else 1)
    left = [name for name in names(tmp_path) if name.startswith(".")]
    assert left == [".removing-step-00000001" if when == "prune" else ".writing-step-00000002"]
    write(store, 3)  # the next writer removes what was left
    assert names(tmp_path) == ["step-00000003"]


def fill(store: CheckpointStore, error: BaseException | None) -> None:
    """Write a part of step 2 (1 MiB), then raise."""
    with store.writing(2) as draft:
        draft.write("part", b"x" * 2**20)
        if error is not None:
            raise error


def test_an_exception_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    for error in (KeyError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            fill(store, error)
    assert names(tmp_path) == ["step-00000001"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def read_all(store: CheckpointStore) -> None:
    """Every piece of the newest checkpoint, each once, as the ranks of a run read them."""
    newest = store.latest()
    assert newest is not None
    for name, pieces in newest.files.items():
        with (newest.path / name).open("rb", buffering=0) as file:
            for start, piece in placed(pieces):
                read_piece(file, newest.path / name, start, piece, bytearray(piece.num_bytes))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model/weights.bin", truncate, "999 bytes, the manifest says 1000"),
        ("model/weights.bin", flip, "bytes 250 to 1000 (tensor second) do not have the checksum"),
        ("controller.json", flip, "bytes 0 to 12 do not have the checksum"),
        ("manifest.json", flip, "damaged or missing"),
        ("model/.metadata", Path.unlink, "missing"),
        ("manifest.json", truncate, "damaged or missing"),
        ("manifest.json", Path.unlink, "damaged or missing"),
    ],
)
def test_damage_is_named_with_the_way_out(tmp_path: Path, file: str, damage: Any, words: str) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (4, 8, 12):
        write(store, step)
    flip(tmp_path / "step-00000008" / "controller.json")
    damage(tmp_path / "step-00000012" / file)
    with pytest.raises(CheckpointError) as caught, store.way_out_named(12):
        read_all(store)
    message = str(caught.value)
    assert f"{tmp_path}/step-00000012/{file}: " in message
    assert words in message
    command = f"mv {tmp_path}/step-00000012 {tmp_path}/damaged-step-00000012"
    assert f"The checkpoint of step 4 is valid. To go on from it: `{command}`, and start again" in message
    Path(tmp_path / "step-00000012").rename(tmp_path / "damaged-step-00000012")
    Path(tmp_path / "step-00000008").rename(tmp_path / "damaged-step-00000008")
    assert store.latest().step == 4  # type: ignore[union-attr]


def test_damage_of_the_only_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 4)
    truncate(tmp_path / "step-00000004" / "controller.json")
    with pytest.raises(CheckpointError, match="No older checkpoint is valid"):
        store.latest()


def test_a_renamed_folder_and_another_format(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 4)
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000005")
    with pytest.raises(CheckpointError, match="it says step 4"):
        store.latest()
    manifest = tmp_path / "step-00000005" / "manifest.json"
    record = json.loads(manifest.read_text()) | {"step": 5, "format": 1, "rondo": "0.0"}
    manifest.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=full_text("rondo 0.0 wrote it in format 1")):
        store.latest()


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


Usage = namedtuple("Usage", "total used free")


FULL_DISK: dict[str, BaseException | None] = {
    "body": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "worker": WorkerError("actor", 1, "save", "[Errno 28] No space left on device"),
    "library": RuntimeError(
        "PytorchStreamWriter failed writing file data/0: file write failed"
    ),  # torch.save
    "manifest": None,
    "sync": None,
}


@pytest.mark.parametrize("where", FULL_DISK)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1, size=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, GIB, 3 * 2**20))
    if where == "manifest":
        monkeypatch.setattr(store_module, "write_manifest", full)
    elif where == "sync":
        monkeypatch.setattr(store_module, "sync_path", full)
    with pytest.raises(StorageError) as caught:
        fill(store, FULL_DISK[where])
    assert caught.value.fault == errno.ENOSPC
    message = str(caught.value)
    assert "needs at least 5.0 MiB, 3.0 MiB are free" in message
    assert "the checkpoint of step 1 is intact, and the training state is unaffected" in message
    assert "checkpoint.keep (now 2)" in message
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert store.latest().step == 1  # type: ignore[union-attr]
    write(store, 2)  # and when there is space again, it goes on
    assert store.latest().step == 2  # type: ignore[union-attr]


def test_other_refusals_are_told_apart_from_a_full_disk_and_other_errors_pass(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(StorageError) as caught, store.writing(1):
        raise PermissionError(errno.EACCES, "no")
    assert caught.value.fault == errno.EACCES
    with pytest.raises(ValueError, match="something else"), store.writing(1):
        raise ValueError("something else")
    assert names(tmp_path) == []
