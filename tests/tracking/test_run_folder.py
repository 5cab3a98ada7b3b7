"""The run folder: exact lines, what a kill leaves, what a resume discards, and who may write."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from rondo.core.batch import Batch, ragged_rows
from rondo.core.errors import CheckpointError, ConfigError, DataError
from rondo.tracking import RunFolder, read_metrics, run_folder
from rondo.tracking.lock import RunLock
from tests.tracking.processes import running


def write_rollouts(folder: RunFolder, step: int, batch: Batch, parts: int = 1) -> None:
    with folder.new_rollouts(step, parts) as paths:
        for path in paths:
            batch.write_parquet(path)


def rollouts(reward: float) -> Batch:
    return Batch.of({"reward": np.array([reward, 1.0]), "response_ids": ragged_rows([[1, 2], [3]], np.int32)})


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def hold(connection: Connection, path: str) -> None:
    with RunFolder(path) as folder:
        connection.send(folder.attempt)
        connection.recv()


def log_without_end(connection: Connection, path: str) -> None:
    folder = RunFolder(path)
    step = 0
    while True:
        step += 1
        folder.append_metrics(step, {"reward/mean": step / 7})
        write_rollouts(folder, step, rollouts(step / 7))
        connection.send(step)


def test_a_line_keeps_numbers_exactly_and_names_what_is_not_finite(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        metrics = {
            "a": 0.1 + 0.2,
            "b": np.float32(0.1),
            "c": np.int64(7),
            "d": float("nan"),
            "e": -np.inf,
            "f": None,
            "g": "text",
        }
        folder.append_metrics(12, metrics)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert json.loads(text) == {
        "step": 12,
        "a": 0.30000000000000004,
        "b": float(np.float32(0.1)),
        "c": 7,
        "d": None,
        "e": None,
        "f": None,
        "g": "text",
        "not_finite": {"d": "nan", "e": "-inf"},
    }


def test_a_metric_that_is_no_number_is_an_error_that_names_it(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder, pytest.raises(DataError, match="'rollout/ids' is a list"):
        folder.append_metrics(1, {"rollout/ids": [1, 2]})


def test_rollouts_are_written_whole_under_their_step(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        write_rollouts(folder, 12, rollouts(0.5))
        path = folder.path / "rollouts" / "step-000012.parquet"
        folder.sync()
    assert path == tmp_path / "run" / "rollouts" / "step-000012.parquet"
    assert [entry.name for entry in path.parent.iterdir()] == ["step-000012.parquet"]
    assert Batch.read_parquet(path) == rollouts(0.5)


def test_two_processes_cannot_write_into_one_folder(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    with running(hold, path) as (process, connection):
        assert connection.recv() == 1
        with pytest.raises(ConfigError) as caught:
            RunFolder(path)
        message = str(caught.value)
        assert f"pid {process.pid} on {os.uname().nodename}" in message
        assert f"kill -INT {process.pid}" in message
        assert "trainer.run_dir" in message
        process.kill()
        process.join()
        with RunFolder(path) as folder:  # the lock of a dead process is no obstacle
            assert folder.attempt == 2


def test_one_process_cannot_open_a_folder_twice(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"), pytest.raises(ConfigError, match=f"pid {os.getpid()} "):
        RunFolder(tmp_path / "run")


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    read, write = os.pipe()
    ready, forked = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.write(forked, b"x")
        os.read(read, 1)  # until the parent closes its end
        os._exit(0)
    try:
        os.read(ready, 1)
        with pytest.raises(ConfigError):
            RunFolder(tmp_path / "run")  # the fork did not release it either
        folder.close()
        RunFolder(tmp_path / "run").close()
    finally:
        for end in (write, read, ready, forked):
            os.close(end)
        os.waitpid(child, 0)


def test_resume_discards_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path) as folder:
        folder.begin("a: 1\n")
        for step in range(6):
            folder.append_metrics(step, {"x": step})
            write_rollouts(folder, step, rollouts(step), parts=1 + step % 2)
        (path / "evaluations").mkdir()
        for step in (0, 5):
            (path / "evaluations" / f"step-{step:06d}.jsonl").write_text("{}\n")
        for step in (3, 4):
            (path / "profile" / f"step-{step:06d}").mkdir(parents=True)
        folder.write_summary({"steps": 5})
        (path / "checkpoints" / "step-00000003").mkdir()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # cut off by a kill
    with RunFolder(path) as folder:
        assert (folder.attempt, folder.resuming, folder.resume_step) == (2, True, 3)
        assert folder.discard_beyond(3) == 3
        folder.begin("a: 2\n")
        folder.append_metrics(4, {"x": 40})
    assert [line["x"] for line in read_metrics(path)] == [0, 1, 2, 3, 40]
    gone = path / "discarded" / "1"
    assert [entry.name for entry in (path / "profile").iterdir()] == ["step-000003"]
    assert (gone / "profile" / "step-000004").is_dir()
    assert (gone / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 4, "x": 4}',
        '{"step": 5, "x": 5}',
        '{"step": 6, "x"',
    ]
    assert sorted(p.name for p in (gone / "rollouts").iterdir()) == [
        "step-000004.parquet",
        "step-000005.parquet",
    ]
    assert [p.name for p in (gone / "evaluations").iterdir()] == ["step-000005.jsonl"]
    assert (gone / "config.yaml").read_text() == "a: 1\n"
    assert (gone / "summary.json").exists()
    assert not (path / "summary.json").exists()
    assert sorted(p.name for p in (path / "rollouts").iterdir()) == [
        f"step-{k:06d}.parquet" for k in range(4)
    ]


@pytest.mark.parametrize(
    ("keep", "of_tokens", "rows", "tokens"),
    [
        (None, None, [1, 2, 3, 4, 5, 6, 7, 8], [2, 4, 6, 8]),
        (None, 1, [1, 2, 3, 4, 5, 6, 7, 8], [4, 8]),
        (3, None, [2, 3, 4, 6, 7, 8], [2, 4, 6, 8]),
        (2, 2, [3, 4, 7, 8], [4, 8]),
        (5, 1, [1, 2, 3, 4, 5, 6, 7, 8], [4, 8]),
    ],
)
def test_columns_of_tokens_go_with_their_rollouts_or_before(
    tmp_path: Path, keep: int | None, of_tokens: int | None, rows: list[int], tokens: list[int]
) -> None:
    """Those of every second step, with a checkpoint of step 4; a step may have several."""
    with RunFolder(tmp_path / "run") as folder:
        folder.begin("")
        for step in range(1, 9):
            write_rollouts(folder, step, rollouts(step))
            for also in (".tokens", ".judge-1.tokens") if step % 2 == 0 else ():
                with folder.new_rollouts(step, 1, also) as (path,):
                    rollouts(step).write_parquet(path)
        folder.checkpoint_steps = [4]
        folder.remove_rollouts(keep, of_tokens)
        left = names(folder.path / "rollouts")
        assert [step for step in range(1, 9) if f"step-{step:06d}.parquet" in left] == rows
        for also in (".tokens", ".judge-1.tokens"):
            assert [step for step in range(1, 9) if f"step-{step:06d}{also}.parquet" in left] == tokens
        assert folder.discard_beyond(2) == 0
        last = sorted(path for path in names(folder.path / "rollouts"))
        assert all(int(name[5:11]) <= 2 for name in last)


def test_the_newest_rollouts_stay_and_those_before_a_checkpoint(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.begin("")

        def kept() -> list[int]:
            found = [re.fullmatch(r"step-(\d+).parquet", name) for name in names(folder.path / "rollouts")]
            return [int(match[1]) for match in found if match]

        (folder.path / "rollouts" / "notes.txt").write_text("of the user")
        for step in range(1, 10):
            write_rollouts(folder, step, rollouts(step), parts=1 + step % 2)
            folder.remove_rollouts(2)
            assert kept() == {6: [2, 3, 5, 6], 7: [2, 3, 6, 7]}.get(step, kept())
            if step == 3:
                folder.checkpoint_steps = [3]
            if step == 8:
                folder.checkpoint_steps = [3, 8]
                folder.sync()
        assert kept() == [2, 3, 7, 8, 9]
        assert Batch.read_parquet(folder.path / "rollouts" / "step-000003.parquet" / "part-00000.parquet")
        folder.remove_rollouts(2, ended=True)
        assert kept() == [8, 9]
        folder.remove_rollouts(5)
        assert kept() == [8, 9]
        assert (folder.path / "rollouts" / "notes.txt").exists()
        folder.sync()


def test_rollouts_are_on_disk_before_older_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(run_folder, "sync_path", lambda path: done.append(f"sync {path.name}"))
    monkeypatch.setattr(run_folder, "remove_whole", lambda path: done.append(f"remove {path.name}"))
    with RunFolder(tmp_path / "run") as folder:
        folder.begin("")
        for step, parts in ((1, 1), (2, 2)):
            write_rollouts(folder, step, rollouts(step), parts)
        folder.remove_rollouts(2)
        assert done == []
        folder.remove_rollouts(1)
    parts_of_2 = ["step-000002.parquet", "part-00000.parquet", "part-00001.parquet"]
    synced = [f"sync {name}" for name in ("rollouts", "step-000001.parquet", *parts_of_2)]
    assert done == [*synced, "remove step-000001.parquet"]


def test_a_folder_that_a_kill_left_half_removed_is_gone_with_the_next_start(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.begin("")
        write_rollouts(folder, 1, rollouts(1), parts=2)
        path = folder.path / "rollouts" / "step-000001.parquet"
        path.rename(path.with_name(".removing-step-000001.parquet"))
    with RunFolder(tmp_path / "run") as folder:
        assert names(folder.path / "rollouts") == []


def test_a_kill_loses_no_line_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with running(log_without_end, str(path)) as (process, connection):
        while connection.recv() < 20:
            pass
        process.kill()
        process.join()
    last = 20
    while connection_has_more(connection):
        last = connection.recv()
    lines = read_metrics(path)
    assert len(lines) >= last
    assert [line["reward/mean"] for line in lines] == [line["step"] / 7 for line in lines]
    for file in (path / "rollouts").glob("*.parquet"):
        step = int(re.findall(r"\d+", file.name)[0])
        assert Batch.read_parquet(file) == rollouts(step / 7)


def connection_has_more(connection: Connection) -> bool:
    return not connection.closed and connection.poll()


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
def test_a_new_folder(tmp_path: Path, resume: str) -> None:
    if resume == "must":
        with pytest.raises(CheckpointError, match=r"checkpoint\.resume=auto"):
            RunFolder(tmp_path / "run", resume="must")
        return
    with RunFolder(tmp_path / "run", resume=resume) as folder:  # type: ignore[arg-type]
        assert (folder.attempt, folder.resuming) == (1, False)


def test_content_without_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for number in range(2):
        with RunFolder(path) as folder:
            assert folder.resuming is False
            moved_to = folder.begin("")
            folder.append_metrics(1, {"x": number})
    assert [line["x"] for line in read_metrics(path)] == [1]
    assert moved_to == path / "discarded" / "1"
    assert (path / "discarded" / "1" / "metrics.jsonl").read_text() == '{"step": 1, "x": 0}\n'
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=never"):
        RunFolder(path, resume="never")
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        RunFolder(path, resume="must")
    RunFolder(path).close()  # the refusals released the lock


def test_content_with_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder(path) as folder:
        folder.begin("")
        folder.append_metrics(1, {"x": 1})
        (folder.checkpoints_dir / "step-00000001").mkdir()
    with pytest.raises(ConfigError, match="a checkpoint of step 1"):
        RunFolder(path, resume="never")
    for resume in ("auto", "must"):
        with RunFolder(path, resume=resume) as folder:  # type: ignore[arg-type]
            assert folder.resuming
    assert len(read_metrics(path)) == 1


def test_a_folder_that_never_began_is_as_it_was(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new" / "run").close()
    assert names(tmp_path) == []
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").close()
    assert names(tmp_path) == ["empty"]
    with RunFolder(tmp_path / "run") as folder:
        folder.begin("a: 1\n")
        folder.append_metrics(1, {"x": 1})
    before = names(tmp_path)
    with RunFolder(tmp_path / "run") as folder:
        assert folder.attempt == 2
    assert names(tmp_path) == before
    assert read_metrics(tmp_path / "run") == [{"step": 1, "x": 1}]


def test_a_folder_that_ended_in_its_warm_start_is_a_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run" / "warm_start") as first:
        first.begin("a: 1\n")
    with RunFolder(tmp_path / "run") as folder:
        assert not folder.resuming


def test_who_only_looks_is_no_obstacle_and_who_writes_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = os.open(tmp_path / "run.lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looks, fcntl.LOCK_SH)
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(looks)

    monkeypatch.setattr(time, "sleep", wait)
    lock = RunLock(tmp_path / "run.lock")
    lock.acquire()
    assert len(waits) == 3
    with pytest.raises(ConfigError, match="another run is writing"):
        RunLock(tmp_path / "run.lock").acquire()
    assert len(waits) == 13
    lock.close()


def test_a_lock_that_its_holder_removed_is_no_lock(tmp_path: Path) -> None:
    """Who had opened the file before waits no longer than for its end, and does not hold what has no name."""
    first = RunLock(tmp_path / "run.lock")
    first.acquire()
    stale = os.open(tmp_path / "run.lock", os.O_RDWR)
    first.remove()
    first.close()
    assert not (tmp_path / "run.lock").exists()
    second = RunLock(tmp_path / "run.lock")
    second.acquire()
    assert not second._is_ours(stale)
    os.close(stale)
    second.close()


LEFTOVERS = (
    "checkpoints/.removing-step-00000002/actor/rank-0.bin",
    "checkpoints/.writing-step-00000004/actor/rank-0.bin",
    "rollouts/.step-000003.parquet.tmp",
    "evaluations/.step-000003.jsonl.tmp",
    "discarded/1/.metrics.jsonl.tmp",
    ".summary.json.tmp",
    ".writing-export/model.safetensors",
)


def test_what_a_kill_left_under_way_is_removed_when_the_folder_is_opened(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        folder.begin("a: 1\n")
        folder.write_summary({"steps": 3})
        (folder.checkpoints_dir / "step-00000003").mkdir()
        (run / "discarded" / "1").mkdir(parents=True)
        (run / "evaluations").mkdir()
    (run / ".gitignore").write_text("*")  # the user's
    before = names(run)
    for name in LEFTOVERS:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("half")
    RunFolder(run).close()  # of a run that is finished, too
    assert names(run) == before


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"holds no run \(thesis.tex\)"):
        RunFolder(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_reading_a_broken_line_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_metrics(tmp_path) == [{"step": 1}]
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path / "absent")


def test_a_summary_with_nan_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        path = folder.write_summary({"steps": 1})
        with pytest.raises(DataError, match=r"summary.json.*JSON does not have"):
            folder.write_summary({"reward": float("nan")})
    assert json.loads(path.read_text()) == {"steps": 1}
