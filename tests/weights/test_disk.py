"""Weights by way of files: whole and bit for bit; torn, changed, missing or unwritable ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rondo.core.errors import WeightSyncError
from rondo.training import Engine
from rondo.weights.disk import read_weights, remove_weights, version_folder, write_weights
from rondo.weights.sync import SyncReport
from rondo.workers.transfer import ReceivesWeights
from tests.messages import full_text
from tests.ranks import run_ranks
from tests.training.helpers import one_rank_mesh, tiny_engine
from tests.weights.sinks import Keeping

BUCKET = 6000
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(one_rank_mesh())


def _write(rank: int, world: int, folder: str) -> tuple[SyncReport, dict[str, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh

    engine = tiny_engine(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    report = write_weights(engine.parameters(), Path(folder), 7, BUCKET, dtype="bfloat16", leader=rank == 0)
    return report, dict(engine.parameters().gathered(1 << 20, "bfloat16"))


def test_two_ranks_write_what_a_replica_reads(tmp_path: Path) -> None:
    (version_folder(tmp_path, 7)).mkdir()  # of an attempt before
    (report, expected), _ = run_ranks(2, _write, str(tmp_path))
    sink = Keeping()
    read = read_weights(tmp_path, 7, sink)
    assert sink.version == 7
    assert sink.tensors.keys() == expected.keys()
    assert all(torch.equal(sink.tensors[name], tensor) for name, tensor in expected.items())
    size = sum(tensor.numel() * 2 for tensor in expected.values())
    assert (report.bytes_moved, read.bytes_moved) == (size, size)
    files = sorted((tmp_path / "version-7").glob("part-*"))
    assert len(files) == report.rounds > 3
    assert all(file.stat().st_size < BUCKET + 2000 for file in files)  # with the header of names
    assert read.peak_bytes == max(tensor.numel() * 2 for tensor in expected.values())
    assert [path.name for path in tmp_path.iterdir()] == ["version-7"]


def test_versions_before_and_what_was_left_half_written_are_removed(engine: Engine, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_weights(engine.parameters(), tmp_path, version, BUCKET)
    (tmp_path / ".version-3.77.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    remove_weights(tmp_path, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "version-3"]
    remove_weights(tmp_path / "nowhere")


def test_torn_changed_and_missing_files_are_refused(engine: Engine, tmp_path: Path) -> None:
    def written() -> tuple[Path, Path]:
        write_weights(engine.parameters(), tmp_path, 1, BUCKET)
        index = json.loads((tmp_path / "version-1/index.json").read_text())
        return tmp_path / "version-1", tmp_path / "version-1" / index["tensors"][NAME]["file"]

    folder, part = written()
    part.write_bytes(part.read_bytes()[:-100])
    _refused(tmp_path, 1, rf"{part}: this part of version 1 is torn or unreadable")
    folder, part = written()
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    _refused(tmp_path, 1, r"commit\(1\): '.*' is not what was sent")
    folder, part = written()
    part.unlink()
    _refused(tmp_path, 1, rf"{part}: this part of version 1 is torn or unreadable")
    folder, part = written()
    index = folder / "index.json"
    index.write_text(index.read_text().replace("[48, 32]", "[48, 33]", 1))
    _refused(tmp_path, 1, r"is \(48, 32\) float32, the index says \(48, 33\)")
    index.write_text("{")
    _refused(tmp_path, 1, "index.json cannot be read")
    folder.rename(tmp_path / "version-2")
    _refused(tmp_path, 1, "version 1 of the weights is not there; is the run folder on a file system that")
    write_weights(engine.parameters(), tmp_path, 2, BUCKET)
    (tmp_path / "version-2").rename(tmp_path / "version-3")
    _refused(tmp_path, 3, "holds version 2, not 3")


def _refused(folder: Path, version: int, message: str) -> None:
    sink = Keeping()
    with pytest.raises(WeightSyncError, match=message):
        read_weights(folder, version, sink)
    assert sink.version == -1


def test_a_disk_that_refuses_is_named_and_nothing_is_left(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(WeightSyncError, match=full_text("version 4 of the weights (70016 bytes)")):
        write_weights(engine.parameters(), tmp_path / "file", 4, BUCKET)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_way_to_engines_in_their_own_processes_is_counted(engine: Engine, tmp_path: Path) -> None:
    class Replicas:
        """Two engine processes behind one sink, and buckets of 5000 bytes to them."""

        num_processes = 2
        version = -1

        def sink(self, what: str = "merged") -> Keeping:
            sink = Keeping()
            sink.peak_bytes = 10_000  # type: ignore[attr-defined]
            return sink

        def loaded(self, version: int) -> None:
            self.version = version

    write_weights(engine.parameters(), tmp_path, 4, BUCKET)
    size = engine.parameters().layout().num_bytes
    receiver: Any = ReceivesWeights()
    receiver.context = SimpleNamespace(device="cpu")
    receiver.replicas = Replicas()
    report = receiver.read_weights(str(tmp_path), 4)
    assert receiver.replicas.version == 4
    assert (report.bytes_moved, report.bytes_needed) == (3 * size, 2 * size)
    largest = max(parameter.num_bytes for parameter in engine.parameters().layout().parameters)
    assert report.peak_bytes == largest + 10_000
