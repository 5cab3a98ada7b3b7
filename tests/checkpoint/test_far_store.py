"""Checkpoints at a URL: whole or none, whatever interrupts; what the far side refuses is told with it."""

from __future__ import annotations

import os
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rondo.checkpoint import CheckpointStore, Grown
from rondo.checkpoint import store as store_module
from rondo.checkpoint.checked import CheckedFile, faults_in, placed, read_piece, sizes_in
from rondo.core.errors import CheckpointError, ConfigError, StorageError
from rondo.system.urls import Far
from tests.far import Fault, far, fault, shelf  # noqa: F401
from tests.messages import full_text
from tests.tracking.processes import running


def write(store: CheckpointStore, step: int) -> None:
    with store.writing(step) as draft:
        draft.write("model/.metadata", b"123456789")
        with CheckedFile(draft.folder / "model" / "weights.bin") as file:  # as a worker writes
            file.append("first", bytes([step]) * 250)
            file.append("second", memoryview(bytes([step]) * 750))
        draft.note("model", {"weights.bin": file.pieces})


def folders(url: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in Far(url).files()})


def test_what_is_written_is_read_back(far: str) -> None:  # noqa: F811
    store = CheckpointStore(far, keep=2)
    assert store.latest() is None
    store.check_place()
    assert folders(far) == []
    for step in (1, 2, 3):
        write(store, step)
    found = store.latest()
    assert found is not None
    assert (found.step, found.num_bytes, str(found.path)) == (3, 1009, f"{far}/step-00000003")
    assert sizes_in(found.path).keys() == {"manifest.json", "model/.metadata", "model/weights.bin"}
    assert found.read("model/.metadata") == b"123456789"
    first, second = placed(found.files["model/weights.bin"])
    into = bytearray(750)
    with (found.path / "model" / "weights.bin").open("rb") as file:
        read_piece(file, found.path, second[0], second[1], into)
        assert into == b"\3" * 750
        with pytest.raises(CheckpointError, match=full_text("bytes 0 to 250 (tensor first)")):
            read_piece(file, found.path, 0, first[1]._replace(crc32=1), bytearray(250))
    assert faults_in(found.path, found.files) == []
    assert (store.steps(), folders(far)) == ([2, 3], ["step-00000002", "step-00000003"])
    store.spared = 2
    write(store, 4)
    write(store, 5)
    assert store.steps() == [2, 4, 5]
    with pytest.raises(CheckpointError, match="exists already"):
        write(store, 5)
    with pytest.raises(CheckpointError, match=full_text("no checkpoint of step 1; there are: 2, 4")):
        store.open(1)


def test_damage_is_named_with_the_way_out(far: str) -> None:  # noqa: F811
    store = CheckpointStore(far, keep=3)
    for step in (1, 2):
        write(store, step)
    files, path = fsspec.core.url_to_fs(f"{far}/step-00000002/model/weights.bin")
    files.pipe_file(path, b"\2" * 999)
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    assert f"{far}/step-00000002/model/weights.bin: damaged: 999 bytes, the manifest says 1000" in str(
        caught.value
    )
    way_out = f"step 1 is valid. To go on from it: remove {far}/step-00000002/manifest.json"
    assert way_out in str(caught.value)
    files.rm(path)
    with pytest.raises(CheckpointError, match=r"weights\.bin: missing"):
        store.latest()
    (Far(far) / "step-00000002" / "manifest.json").remove()  # as it says
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    write(store, 3)  # and the next writer removes the rest
    assert folders(far) == ["step-00000001", "step-00000003"]


def _write_slowly(connection: Connection, url: str, when: str) -> None:
    """Writes step 2 and stops for ever: between the files, before the manifest, or during pruning."""
    store = CheckpointStore(url, keep=1)

    def stop(*args: Any, **kwargs: Any) -> None:
        connection.send("here")
        connection.recv()

    if when == "manifest":
        store_module.write_manifest = stop
    remove = Far.remove
    if when == "prune":
        Far.remove = lambda self: remove(self) if self.name == "manifest.json" else stop()  # type: ignore
    with store.writing(2) as draft:
        draft.write("weights.bin", b"x" * 10_000)
        if when == "files":
            stop()


@pytest.mark.parametrize("when", ["files", "manifest", "prune"])
def test_kill_9_during_a_write_leaves_a_valid_checkpoint(tmp_path: Path, when: str) -> None:
    url = f"file://{tmp_path / 'far'}"
    store = CheckpointStore(url, keep=1)
    write(store, 1)
    with running(_write_slowly, url, when) as (process, connection):
        assert connection.recv() == "here"
        process.kill()
        process.join()
    latest = store.latest()
    assert latest is not None
    assert latest.step == (2 if when == "prune" else 1)
    assert folders(url) == ["step-00000001", "step-00000002"]
    write(store, 3)  # the next writer removes what was left
    assert folders(url) == ["step-00000003"]


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json"])
def test_an_upload_that_fails_is_an_error_and_the_earlier_one_stays(
    shelf: str,  # noqa: F811
    fault: Fault,  # noqa: F811
    name: str,
) -> None:
    store = CheckpointStore(shelf, keep=1)
    write(store, 1)
    fault.set(f"fail {name}")
    with pytest.raises(StorageError) as caught:
        write(store, 2)
    assert f"{name}: cannot be written: OSError: the shelf would not fail it" in str(caught.value)
    assert "the checkpoint of step 1 is intact" in str(caught.value)
    fault.clear()
    assert store.steps() == [1]
    assert f"step-00000002/model/{name}" not in Far(shelf).files()  # abandoned, not cut off
    write(store, 2)
    assert folders(shelf) == ["step-00000002"]


def test_what_arrives_short_is_seen_before_the_manifest(shelf: str, fault: Fault) -> None:  # noqa: F811
    store = CheckpointStore(shelf)
    fault.set("cut weights.bin")
    with pytest.raises(CheckpointError, match=full_text("weights.bin: 999 of its bytes")):
        write(store, 2)
    assert store.steps() == []
    fault.set("cut .trial")
    with pytest.raises(StorageError, match=full_text("trial: does not come back")):
        store.check_place()
    fault.set("keep .trial")
    with pytest.raises(StorageError, match=r"\.trial: cannot be removed"):
        store.check_place()


def test_places_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = __import__("importlib").import_module("fsspec.registry")
    monkeypatch.setitem(registry.known_implementations, "gs", {"class": "no_such_package.GCS", "err": "x"})
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(registry, "registry", {})
    for find in (CheckpointStore("gs://b/run").steps, CheckpointStore("gs://b/run").check_place):
        with pytest.raises(ConfigError, match=full_text("gs:// needs a package that is not")):
            find()
    with pytest.raises(ConfigError, match=full_text("no-such://b/run cannot be used: fsspec")):
        CheckpointStore("no-such://b/run").steps()


def test_a_bucket_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.far import s3

    with s3(monkeypatch):
        with pytest.raises(StorageError, match=full_text("s3://nothing/run/.trial")):
            CheckpointStore("s3://nothing/run").check_place()
        assert "nothing" not in fsspec.filesystem("s3").ls("")  # nobody has made it
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StorageError, match=full_text("s3://bucket/run: cannot be read")):
        CheckpointStore("s3://bucket/run").steps()
    fsspec.filesystem("s3").clear_instance_cache()
    assert os.environ["AWS_ENDPOINT_URL_S3"]


@pytest.mark.parametrize("where", ["folder", "shelf"])
def test_a_file_that_grows_is_kept_in_parts(tmp_path: Path, shelf: str, where: str) -> None:  # noqa: F811
    folder = tmp_path / "metrics" if where == "folder" else Far(shelf) / "metrics"
    first = Grown().with_part(folder, 3, b"one\n")
    second = first.with_part(folder, 7, b"two\nthree\n")
    assert second == Grown(7, 14, zlib.crc32(b"one\ntwo\nthree\n"))
    assert second.with_part(folder, 9, b"") == Grown(9, 14, second.crc32)
    assert sizes_in(folder) == {"step-00000003.jsonl": 4, "step-00000007.jsonl": 10}
    assert list(second.parts(folder)) == [b"one\n", b"two\nthree\n"]
    assert list(first.parts(folder)) == [b"one\n"]
    first.remove_later(folder)  # from the checkpoint of step 3: what was behind it goes
    assert sizes_in(folder) == {"step-00000003.jsonl": 4}
    again = first.with_part(folder, 5, b"other\n")
    assert list(again.parts(folder)) == [b"one\n", b"other\n"]
    with pytest.raises(CheckpointError, match=full_text("up to step 7 have 10 bytes")):
        list(second.parts(folder))
    Grown().remove_later(folder)  # a run that begins anew
    other = Grown().with_part(folder, 4, b"two\n")
    assert sizes_in(folder) == {"step-00000004.jsonl": 4}
    with pytest.raises(CheckpointError, match="one is missing or damaged"):
        list(Grown(4, 4, other.crc32 ^ 1).parts(folder))
    assert list(Grown().parts(folder)) == []


def test_a_part_that_arrives_short_is_seen(shelf: str, fault: Fault) -> None:  # noqa: F811
    fault.set("cut metrics")
    with pytest.raises(CheckpointError, match=full_text("step-00000002.jsonl: 3 of its bytes")):
        Grown().with_part(Far(shelf) / "metrics", 2, b"one\n")
