"""A run whose host process dies begins again by itself from its newest checkpoint, to the bits of an
undisturbed one; what is not to be repeated ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.config import load
from rondo.controller import Worker, WorkerGroup
from rondo.core.errors import ConfigError, DataError, RolloutError, WorkerError, outage
from rondo.system import forkserver
from rondo.tracking import Console
from rondo.tracking.timeline import read_timeline
from rondo.trainers.commands.restarts import Restarts
from rondo.trainers.commands.supervised import sft
from rondo.trainers.commands.train import train
from rondo.trainers.sessions.opening import check_session
from tests.messages import full_text
from tests.trainers.conftest import RECIPE, SFT_RECIPE, inline, metrics, weights
from tests.waiting import wait_until_gone

TWO = ("cluster.backend=process", "cluster.devices=2", "cluster.device=cpu")
FOUR_STEPS = (
    "trainer.total_steps=4",
    "checkpoint.every=2",
    "trainer.evaluation={before: false, every: null}",
)


@dataclass
class Kill:
    """Of rank 1 of a role, in the middle of a call: the `number`th of this method since the last kill.

    under_way: says that the other rank has begun it; None: it waits for this one, somewhere. stopped: and not
    killed: it hangs.
    """

    method: str
    number: int
    under_way: Callable[[], object] | None = None
    stopped: bool = False
    role: str = "actor"


class Killer:
    """Rank 1 is stopped before such a call, so that its peer is in the middle of it when it is killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *kills: Kill) -> None:
        self.left = list(kills)
        self.pids: list[int] = []
        """Of all host processes that there were when one was killed."""
        self._number = 0
        self._call = WorkerGroup.call
        monkeypatch.setattr(
            WorkerGroup, "call", lambda group, *args, **kwargs: self.call(group, *args, **kwargs)
        )

    async def call(self, group: WorkerGroup, method: Any, *args: Any, **kwargs: Any) -> Any:
        kill = self.left[0] if self.left else None
        if kill is not None and (group.role, method.__name__) == (kill.role, kill.method):
            self._number += 1
            if self._number == kill.number:
                return await self._kill(self.left.pop(0), group, method, *args, **kwargs)
        return await self._call(group, method, *args, **kwargs)

    async def _kill(self, kill: Kill, group: WorkerGroup, method: Any, *args: Any, **kwargs: Any) -> Any:
        self._number = 0
        pids = await self._call(group, Worker.process_id)
        self.pids += pids
        os.kill(pids[1], signal.SIGSTOP)
        call = asyncio.ensure_future(self._call(group, method, *args, **kwargs))
        if kill.stopped:
            return await call
        await asyncio.sleep(0.2)
        while kill.under_way is not None and not kill.under_way():
            assert not call.done()
            await asyncio.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        return await call


def drafts(run: Path) -> Callable[[], object]:
    """Says whether a checkpoint of a run is being written."""
    return lambda: list(run.glob("checkpoints/.writing-*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    inline("train", str(folder / "tiny.yaml"), *FOUR_STEPS, *TWO, f"trainer.run_dir={folder / 'run'}")
    return folder / "run"


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def restarts_of(run: Path) -> list[tuple[int, int]]:
    """perf/restarts by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("perf/restarts", 0)) for line in lines]


@pytest.mark.slow
def test_a_run_that_loses_a_rank_in_an_update_and_in_a_save_equals_an_undisturbed_one(
    recipe: Path, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time there is no checkpoint yet, the second time that of step 2."""
    run, before = tmp_path / "run", shared_memory()
    killer = Killer(monkeypatch, Kill("update_actor", 2), Kill("write_snapshot", 2, drafts(run)))
    done = inline("train", str(recipe), *FOUR_STEPS, *TWO, f"trainer.run_dir={run}", "tracking.console=plain")
    assert killer.left == []
    said = done.stdout + done.stderr
    assert re.search(r"actor\[1\]\.update_actor failed: host process 1 died \(signal SIGKILL\)", said)
    assert "lost in actor.update_actor in step 2; restart 1 of 3 (trainer.max_restarts)" in said
    assert "lost in actor.write_snapshot in step 5; restart 2 of 3" in said
    assert "restart 1 of 3 (trainer.max_restarts): begins with the first step" in said
    assert "restart 2 of 3 (trainer.max_restarts): goes on behind step 2" in said
    assert restarts_of(run) == [(1, 1), (2, 1), (3, 2), (4, 2)]
    marked = [read_timeline(path) for path in sorted((run / "timeline").iterdir())]
    assert [[e["args"] for e in events if e["name"] == "restart"] for events in marked] == [
        [{"number": 1, "step": 0}],
        [{"number": 2, "step": 2}],
    ]
    assert weights(run) == weights(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    wait_until_gone(killer.pids)
    assert shared_memory() <= before


@pytest.mark.slow
def test_no_more_than_max_restarts(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(monkeypatch, Kill("update_actor", 1), Kill("update_actor", 2))
    settings = [*FOUR_STEPS, *TWO, f"trainer.run_dir={tmp_path / 'run'}", "trainer.max_restarts=1"]
    with pytest.raises(WorkerError, match=full_text("actor[1].update_actor failed: host")) as caught:
        train(load([str(recipe)], settings))
    assert killer.left == []
    assert caught.value.__notes__ == ["the run was begun again 1 times already (trainer.max_restarts)"]
    wait_until_gone(killer.pids)


@pytest.mark.slow
def test_what_dies_twice_at_one_place_is_not_begun_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch, Kill("update_actor", 1), Kill("update_actor", 1), Kill("update_actor", 1))
    settings = [*FOUR_STEPS, *TWO, f"trainer.run_dir={tmp_path / 'run'}"]
    with pytest.raises(WorkerError, match="update_actor") as caught:
        train(load([str(recipe)], settings))
    assert len(killer.left) == 1
    (note,) = caught.value.__notes__
    assert "lost in actor.update_actor in step 1 the last time, too" in note


@pytest.mark.slow
def test_supervised_training_goes_on_and_a_load_may_fail_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> Path:
        given = SFT_RECIPE | {"trainer": {"total_steps": 3, "run_dir": str(tmp_path / name)}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(given))
        sft(load([str(tmp_path / f"{name}.yaml")], [*TWO, "checkpoint.every=1", "cluster.threads=1"]))
        return tmp_path / name

    whole = run("whole")
    killer = Killer(monkeypatch, Kill("update_actor", 2), Kill("load", 1))
    hurt = run("hurt")
    assert killer.left == []
    assert restarts_of(hurt) == [(1, 0), (2, 2), (3, 2)]
    assert weights(hurt) == weights(whole)
    assert metrics(hurt) == metrics(whole)
    wait_until_gone(killer.pids)


@pytest.mark.slow
def test_an_actor_of_ray_that_dies(
    recipe: Path, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    run, before = tmp_path / "run", shared_memory()
    killer = Killer(monkeypatch, Kill("update_actor", 3), Kill("write_snapshot", 1, drafts(run)))
    settings = [*FOUR_STEPS, *TWO, "cluster.backend=ray", f"trainer.run_dir={run}"]
    train(load([str(recipe)], settings))
    assert killer.left == []
    assert weights(run) == weights(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    wait_until_gone(killer.pids)
    assert shared_memory() <= before


# ---- what is begun again, without processes ----


def lost(method: str = "update_actor") -> WorkerError:
    return outage(WorkerError("actor", 1, method, "host process 1 died (signal SIGKILL)"))


def attempts(
    *outcomes: tuple[int | None, Exception | str], most: int = 3, stop: bool = False
) -> tuple[int, Any]:
    """(how many were made, what came of them). outcomes: of each, the last step and what it ended with."""
    console = Console("off")
    restarts = Restarts(load(["grpo"], [f"trainer.max_restarts={most}"]).config, console)
    left = list(outcomes)

    def attempt() -> str:
        assert restarts.reached is None
        restarts.reached, end = left.pop(0)
        restarts.stopping = stop
        if isinstance(end, Exception):
            raise end
        return end

    try:
        result: Any = restarts.around(attempt)
    except Exception as error:
        result = error
    return len(outcomes) - len(left), result


def test_what_is_begun_again() -> None:
    assert attempts((5, lost()), (7, "done")) == (2, "done")
    assert attempts((5, lost()), (6, lost()), (6, lost("load")), (6, "done")) == (4, "done")
    assert attempts((5, outage(RolloutError("no rollout rank is left"))), (7, "done")) == (2, "done")
    assert attempts((None, lost("load")), (0, lost("load")), (7, "done")) == (3, "done")


def test_the_processes_of_an_attempt_begin_with_the_imports_of_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forkserver, "_servers", [])
    monkeypatch.setattr(forkserver, "_keepers", 0)
    servers: list[forkserver.ForkServer] = []

    def attempt() -> None:
        servers.append(forkserver.fork_server([], os.environ))
        servers[-1].give_back()
        if len(servers) == 1:
            raise lost()

    Restarts(load(["grpo"], []).config, Console("off")).around(attempt)
    first, second = servers
    assert second is first
    assert first.has_ended()  # with the command


@pytest.mark.parametrize(
    "error",
    [ConfigError("x"), DataError("x"), WorkerError("actor", 0, "update_actor", "ValueError: x")],
)
def test_an_error_of_somebodys_code_is_not(error: Exception) -> None:
    assert attempts((5, error), (7, "done")) == (1, error)
    assert not hasattr(error, "__notes__")


def test_nor_what_fails_at_one_place_too_often_or_is_to_stop() -> None:
    for made, result in (
        attempts((5, lost()), (5, lost()), (7, "done")),
        attempts((None, lost()), (None, lost()), (7, "done")),
        attempts((1, lost()), (2, lost()), (7, "done"), most=1),
    ):
        assert made == 2
        assert len(result.__notes__) == 1
    for made, result in (
        attempts((5, lost()), (7, "done"), most=0),
        attempts((5, lost()), (7, "done"), stop=True),
    ):
        assert made == 1
        assert isinstance(result, WorkerError)


def test_a_program_of_ones_own_cannot_be_begun_again() -> None:
    check_session(load(["quickstart"], ["trainer.max_restarts=0"]))
    with pytest.raises(ConfigError, match=full_text("trainer.max_restarts is for the built-in")):
        check_session(load(["quickstart"], ["trainer.max_restarts=5"]))
