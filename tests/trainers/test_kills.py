"""A run that is killed (kill -9) at each point of a checkpoint's write, and goes on to the bits of a run that
nobody disturbed. `python -m tests.trainers.test_kills RECIPE PLACE POINT …` is the program of the test: it
starts the same run once for each point, and each start kills itself there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rondo.checkpoint import CheckpointStore, Grown, store
from rondo.checkpoint.checked import CheckedFile, faults_in
from rondo.config import load
from rondo.system.storage import REMOVING, WRITING
from rondo.system.urls import Far
from rondo.trainers.commands.train import train
from tests import begun
from tests.trainers.conftest import PYTHONPATH, REPOSITORY, inline, metrics, weights
from tests.trainers.killers import KILL
from tests.waiting import wait_until_gone

STEPS = (
    "trainer.total_steps=4",
    "trainer.evaluation={before: false, every: 2}",
    "checkpoint.every=1",
    "checkpoint.keep=1",
)
# Where a start is killed in its first write of a checkpoint, and the steps that have one then. The first two
# are in the write of step 1, the others of step 2 until one is whole, and so on.
HERE = {
    "in its first bytes": [],
    "behind the rename": [1],
    "before the folder": [1],
    "in the middle of the tensors": [1],
    "between two files": [1],
    "in controller.json": [1],
    "before the manifest": [1],
    "in manifest.json": [1],
    "behind the manifest": [1],
    "before the rename": [1],
    "in the removal of what was left": [1],
    "in the removal of the last one": [2],
    "before the removal of the last one": [2, 3],
}
# At a URL nothing is renamed, and the metrics lie beside the checkpoints in parts.
FAR = {
    "in its first bytes": [],
    "between two files": [],
    "behind the manifest": [1],
    "in the middle of the tensors": [1],
    "before the part of the metrics": [1],
    "behind the part of the metrics": [1],
    "in manifest.json": [1],
    "in the removal of the last one": [2],
    "before the removal of the last one": [2, 3],
}


@pytest.mark.slow
@pytest.mark.parametrize(("points", "far"), [(HERE, False), (FAR, True)], ids=["folder", "URL"])
def test_a_run_killed_at_each_point_of_a_checkpoints_write_ends_with_the_same_bits(
    points: dict[str, list[int]], far: bool, recipe: Path, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    place = f"file://{tmp_path}/far" if far else str(run / "checkpoints")
    command = ["-m", "tests.trainers.test_kills", str(recipe), str(run), place, *points]
    done = begun.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert seen == [[point, -signal.SIGKILL, steps] for point, steps in points.items()] + [["", 0, [4]]]
    inline("train", str(recipe), *STEPS, f"trainer.run_dir={whole}")
    assert metrics(run) == metrics(whole)
    assert weights(run) == weights(whole)
    folder = Path(place.removeprefix("file://"))
    assert not [path for path in folder.iterdir() if path.name.startswith((WRITING, REMOVING))]


# ---- processes beside a run


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "ray"])
def test_an_engine_killed_on_another_backend_costs_no_bit(
    backend: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others of the same step's answers are on their way (tests/trainers/test_engine_process.py has it
    on the local one).
    """
    if backend == "ray":
        pytest.importorskip("ray")
    monkeypatch.setenv(KILL, str(tmp_path / "killed"))
    own = ("rollout.engine.process=own", "rollout.replicas=2", f"cluster.backend={backend}")
    short = ("trainer.evaluation={before: false, every: null}",)
    inline("train", str(recipe), *short, f"trainer.run_dir={tmp_path / 'whole'}")
    assert not (tmp_path / "killed").exists()
    kills = "reward.functions=[tests/trainers/killers.py:kills_an_engine]"
    inline("train", str(recipe), *short, *own, kills, f"trainer.run_dir={tmp_path / 'hurt'}")
    assert (tmp_path / "killed").exists()
    assert [line.get("rollout/engine_restarts", 0) for line in metrics(tmp_path / "hurt")] == [0, 1, 0]
    assert weights(tmp_path / "hurt") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_server_of_tools_costs_no_bit(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a call on its way, which is made once more."""
    pytest.importorskip("mcp")
    alive = tmp_path / "alive"
    monkeypatch.setenv("ALIVE", str(alive))
    monkeypatch.setenv(KILL, str(tmp_path / "killed"))
    server = f"{sys.executable} {REPOSITORY / 'tests/agents/served_tools.py'} stubborn"
    settings = (
        f"rollout.tools=[{{name: mcp, command: {server}, env: [ALIVE], tools: [add]}}]",
        "rollout.agent=tests/trainers/killers.py:kills_a_server",
        "trainer.evaluation={before: false, every: null}",
        *("data.max_prompt_tokens=400", "rollout.max_tokens=100", "actor.token_budget=2048"),
        *("model.config.max_position_embeddings=1024", "trainer.total_steps=2"),
    )
    inline("train", str(recipe), *settings, f"trainer.run_dir={tmp_path / 'hurt'}")
    assert (tmp_path / "killed").exists()
    hurt = alive.read_text().split()
    inline("train", str(recipe), *settings, f"trainer.run_dir={tmp_path / 'whole'}")
    whole = alive.read_text().split()[len(hurt) :]
    assert len(hurt) > len(whole) == 2  # each server writes its id and that of its child
    assert metrics(tmp_path / "hurt") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "hurt") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "whole")[-1]["agent/tool_calls/add"] == 16
    wait_until_gone(map(int, hurt + whole))


# ---- the program


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, when: Callable[..., bool], *, behind: bool = False) -> None:
    """Has a call of a function die, before it does anything or behind it."""
    call = getattr(owner, name)

    def dying(*args: Any, **named: Any) -> Any:
        if not when(*args):
            return call(*args, **named)
        if behind:
            call(*args, **named)
        die()

    setattr(owner, name, dying)


def torn(when: Callable[[Path, int], bool]) -> None:
    """Has a piece of a file die when half of it is on its way. when: is given the file and the number of
    pieces so far, in all files.
    """
    make, append = CheckedFile.__init__, CheckedFile.append
    paths: dict[int, Path] = {}
    pieces = 0

    def opened(self: CheckedFile, path: Path) -> None:
        make(self, path)
        paths[id(self)] = path

    def appended(self: CheckedFile, name: str, data: Any) -> int:
        nonlocal pieces
        if when(paths[id(self)], pieces):
            append(self, name, memoryview(data)[: len(data) // 2])
            if isinstance(paths[id(self)], Path):
                self._file.flush()
            die()
        pieces += 1
        return append(self, name, data)

    CheckedFile.__init__, CheckedFile.append = opened, appended  # type: ignore[method-assign]


def always(*args: Any) -> bool:
    return True


def is_draft(path: Path, *args: Any) -> bool:
    return path.name.startswith(WRITING)


def half_removed(prefix: str) -> None:
    """Has the removal of a folder with such a name die behind one of its files."""
    rmtree = shutil.rmtree

    def removed(path: Path, *args: Any, **named: Any) -> None:
        if not path.name.startswith(prefix):
            return rmtree(path, *args, **named)
        next(one for one in path.rglob("*") if one.is_file()).unlink()
        die()

    shutil.rmtree = removed  # type: ignore[assignment]


def prepare(point: str, far: bool) -> None:
    """Has this process die at a point."""
    if point == "before the folder":
        around(Path, "mkdir", is_draft)
    elif point == "in its first bytes":
        torn(lambda path, pieces: pieces == 0)
    elif point == "in the middle of the tensors":
        torn(lambda path, pieces: path.name == "rank-0.bin" and pieces == 10)
    elif point == "between two files":
        around(CheckedFile, "__exit__", always, behind=True)
    elif point == "in controller.json":
        torn(lambda path, pieces: path.name == "controller.json")
    elif point == "before the manifest":
        around(store, "write_manifest", always)
    elif point == "in manifest.json":
        torn(lambda path, pieces: path.name == "manifest.json")
    elif point == "behind the manifest":
        around(store, "write_manifest", always, behind=True)
    elif point in ("before the rename", "behind the rename"):
        around(Path, "rename", is_draft, behind=point.startswith("behind"))
    elif point in ("before the part of the metrics", "behind the part of the metrics"):
        around(Grown, "with_part", always, behind=point.startswith("behind"))
    elif point == "before the removal of the last one":
        around(CheckpointStore, "_prune", always)
    elif point == "in the removal of the last one" and far:
        around(Far, "remove", lambda place: place.name == "manifest.json", behind=True)
    elif point == "in the removal of the last one":
        half_removed(REMOVING)
    elif point == "in the removal of what was left":
        half_removed(WRITING)
    else:
        assert point == "", point


def main(recipe: str, run: str, place: str, *points: str) -> None:
    far = "://" in place
    settings = [*STEPS, f"trainer.run_dir={run}", *([f"checkpoint.path={place}"] if far else [])]
    for point in (*points, ""):
        pid = os.fork()  # of a process without threads, which has the imports already
        if pid == 0:
            prepare(point, far)
            os.dup2(2, 1)
            train(load([recipe], settings))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        saved = CheckpointStore(place)
        for step in saved.steps():
            assert not faults_in(saved.open(step).path, saved.open(step).files), (point, step)
        print(json.dumps([point, code, saved.steps()]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
