"""The rows of a step, written by the ranks: the very rows that the controller would have written, in its
order, in one file or in several, which every reader takes for one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rondo.api.run import Run
from rondo.controller.worker import dispatch
from rondo.core.batch import Batch, BatchRef
from rondo.core.errors import DataError, StorageError
from rondo.data.rollout_files import open_recording
from rondo.tracking.trajectories import read_trajectories
from rondo.trainers.loop import records, report
from rondo.workers import ActorWorker
from rondo.workers.models import WritesRows

STEPS = (
    "trainer.total_steps=2",
    "trainer.evaluation={before: false, after: false}",
    "checkpoint.export=false",
)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """What the controller would have written, step by step."""
    rows: list[Batch] = []
    write = report.Reporter.rollouts

    async def fetching(self: Any, step: int, ref: BatchRef) -> None:
        rows.append(await ref.fetch())
        await write(self, step, ref)

    monkeypatch.setattr(report.Reporter, "rollouts", fetching)
    return rows


def place(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step-{step:06d}.parquet"


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "rows_of_a_part"), [("process", 5), ("process", 1024), ("ray", 5)])
def test_ranks_write_what_the_controller_would(
    run: Callable[..., Path],
    fetched: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    rows_of_a_part: int,
) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    monkeypatch.setattr(records, "PART_ROWS", rows_of_a_part)
    made = run("run", *STEPS, f"cluster.backend={backend}", "cluster.devices=2")
    assert len(fetched) == 2
    for step, rows in enumerate(fetched, 1):
        file = place(made, step)
        assert file.is_dir() == (rows_of_a_part == 5)
        if file.is_dir():
            assert [part.name for part in sorted(file.iterdir())] == [
                "part-00000.parquet",
                "part-00001.parquet",
            ]
            assert [pq.ParquetFile(part).metadata.num_rows for part in sorted(file.iterdir())] == [8, 8]
        found = pq.read_table(file)
        assert found.column_names == rows.columns
        assert Batch.read_parquet(file) == rows
        assert found.to_pylist() == rows.table.to_pylist()
        assert Run(made).samples(step).to_dict("list").keys() == set(rows.columns)
        assert (
            list(Run(made).samples(step)["trajectory_id"]) == rows.table.column("trajectory_id").to_pylist()
        )
    shown = read_trajectories(made, number=99)
    assert [one.said for one in shown] == rows.table.column("text").to_pylist()
    whole, alone = open_recording(str(made)), open_recording(str(place(made, 2)))
    assert [len(groups) for groups in whole.groups] == [4, 4]
    assert alone.groups == whole.groups[1:]
    assert sorted(os.listdir(made / "rollouts")) == ["step-000001.parquet", "step-000002.parquet"]


def test_one_process_writes_the_same_file_as_before(run: Callable[..., Path], fetched: list[Batch]) -> None:
    made = run("run", *STEPS)
    assert [Batch.read_parquet(place(made, step)) for step in (1, 2)] == fetched


def test_where_no_rank_sees_the_folder_the_controller_writes(
    run: Callable[..., Path], fetched: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActorWorker, "sees", dispatch("per_rank")(_sees_nothing))
    made = run("run", *STEPS)
    assert [Batch.read_parquet(place(made, step)) for step in (1, 2)] == fetched


def _sees_nothing(self: Any, path: str, content: bytes) -> bool:
    return False


_sees_nothing.__name__ = "sees"


@pytest.mark.parametrize("what", ["elsewhere", "full"])
def test_what_does_not_arrive_is_an_error_and_nothing_is_left(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def write_rows(self: Any, batch: Batch, path: str) -> int:
        if what == "elsewhere":  # a folder of that name on another machine
            return 4711
        Path(path).write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ActorWorker, "write_rows", write_rows)
    said = "has written 4711 bytes" if what == "elsewhere" else "No space left on device"
    with pytest.raises(StorageError, match=said):
        run("run", *STEPS)
    assert os.listdir(tmp_path / "run" / "rollouts") == []


def test_a_file_of_the_same_name_on_another_machine_is_not_it(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("of another run")
    path = str(tmp_path / "run.lock")
    said = [WritesRows().sees(path, text) for text in (b"of another run", b"of this run")]
    assert [*said, WritesRows().sees(f"{path}-2", b"")] == [True, False, False]


def test_a_step_without_parts_is_named(tmp_path: Path) -> None:
    place(tmp_path, 1).mkdir(parents=True)
    with pytest.raises(DataError, match=r"step-000001\.parquet: is an empty folder"):
        open_recording(str(tmp_path))
