"""Ctrl-C or SIGTERM at any moment of a run of a tiny model: it saves, and goes on where it was."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.system import signals
from rondo.trainers.loop.evaluation import evaluate
from rondo.workers.models import ActorWorker
from rondo.workers.rollout import RolloutWorker
from tests.trainers.conftest import SFT_RECIPE, inline, metrics, weights
from tests.trainers.test_partial import RESUME, groups_by_step
from tests.waiting import wait_for

WITHOUT_MODEL = ("model.config=null", "model.tokenizer=null")


@pytest.mark.parametrize("moment", ["update", "publish", "evaluation"])
@pytest.mark.parametrize("mode", ["finish", "resume"])
def test_ctrl_c_at_any_moment_saves_and_goes_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, mode: str
) -> None:
    interrupted: list[bool] = []

    def interrupt() -> None:
        if not interrupted:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    def wrapped(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if when(*args):
                interrupt()
            return original(self, *args, **kwargs)

        return functools.wraps(original)(call)  # with its name and dispatch

    if moment == "update":
        update = ActorWorker.update_actor
        monkeypatch.setattr(ActorWorker, "update_actor", wrapped(update, lambda *_: True))
    elif moment == "publish":
        load = RolloutWorker.load_weights
        monkeypatch.setattr(RolloutWorker, "load_weights", wrapped(load, lambda version, *_: version == 2))
    else:

        async def evaluating(*args: Any) -> Any:
            interrupt()
            return await evaluate(*args)

        monkeypatch.setattr("rondo.trainers.loop.engine_side.evaluate", evaluating)
    run = tmp_path / "run"
    arguments = (
        *RESUME[:1],
        "rollout.max_tokens=24",
        f"trainer.on_update={mode}",
        "trainer.evaluation={before: false, every: 2, after: true}",
        "trainer.total_steps=4",
        f"trainer.run_dir={run}",
    )
    assert inline("train", str(recipe), *arguments, check=False).returncode == 130
    assert interrupted
    assert list((run / "checkpoints").glob("step-*"))
    assert inline("train", str(recipe), *arguments).returncode == 0
    assert sorted(seq for step in groups_by_step(run) for seq in step) == list(range(16))
    lines = metrics(run)
    evaluated = [line["step"] for line in lines if "eval/greedy/reward" in line]
    assert evaluated == [2, 4]
    assert [line["step"] for line in lines if "actor/loss" in line] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("stage", ["sft", "warm start", "rl"])
def test_what_a_scheduler_sends_saves_too(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    number: signal.Signals,
    code: int,
) -> None:
    """At the second update; the same command goes on, to the weights of a run that nobody disturbed."""
    sft = tmp_path / "sft.yaml"
    sft.write_text(yaml.safe_dump(SFT_RECIPE | {"trainer": {"total_steps": 3}}))
    commands = {
        "sft": ["sft", str(sft), "checkpoint.export=true"],
        "warm start": ["train", str(recipe), *WITHOUT_MODEL, f"trainer.warm_start={sft}"],
        "rl": ["train", str(recipe), "trainer.evaluation.every=null"],
    }
    command = commands[stage]
    updates: list[int] = []
    update = ActorWorker.update_actor

    @functools.wraps(update)
    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        updates.append(1)
        if len(updates) == 2:
            os.kill(os.getpid(), number)
        return update(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ActorWorker, "update_actor", interrupted)
        done = inline(*command, f"trainer.run_dir={tmp_path / 'cut'}", check=False)
    assert done.returncode == code, done.stderr
    folder = tmp_path / "cut" / "warm_start" if stage == "warm start" else tmp_path / "cut"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    for name in ("cut", "whole"):
        inline(*command, f"trainer.run_dir={tmp_path / name}")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    cut, whole = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("cut", "whole"))
    for key in ("generated_tokens", "trained_tokens", "steps", "reward_first", "reward_last"):
        assert cut[key] == whole[key]


ENDLESS = """
import itertools
import os

def rows(number: int):
    for row in itertools.count():
        if row == 1000:
            os.kill(os.getpid(), number)
        yield {"prompt": "1 2", "answer": "3", "completion": "3"}
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_reading_ends_when_it_is_told_to(
    recipe: Path, tmp_path: Path, command: str, number: signal.Signals, code: int
) -> None:
    """Of data without end; nobody reads on, and nothing is left in the place of the run."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    source = {"type": "function", "task": f"{tmp_path}/endless.py:rows", "options": {"number": int(number)}}
    base = tmp_path / "recipe.yaml"
    if command == "sft":
        base.write_text(yaml.safe_dump(SFT_RECIPE | {"trainer": {"total_steps": 3}}))
    data = f"data.{'eval' if command == 'eval' else 'train'}={json.dumps([source])}"
    run = tmp_path / "run"
    own = () if command == "eval" else (f"trainer.run_dir={run}",)
    done = inline(command, str(base if command == "sft" else recipe), data, *own, check=False)
    assert done.returncode == code, done.stderr
    wait_for("the end of reading", lambda: not any(t.name == "rondo-data" for t in threading.enumerate()))
    assert "Traceback" not in done.stderr
    assert not list(run.glob("*.jsonl"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_evaluation_that_is_ended_leaves_nothing(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    async def ended(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        return await evaluate(*args)

    monkeypatch.setattr("rondo.trainers.commands.evaluate.evaluate", ended)
    done = inline("eval", str(recipe), "--output", str(tmp_path / "answers.jsonl"), check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("arguments", "computing"),
    [
        (("eval", "RECIPE"), "rondo.trainers.commands.evaluate.start_cluster"),  # in an event loop
        (("generate", "FOLDER", "a"), "rondo.trainers.commands.evaluate.generate"),
        (("export", "FOLDER", "out"), "rondo.trainers.commands.export.export_checkpoint"),
        (("show", "FOLDER"), "rondo.tracking.trajectories.read_trajectories"),
        (("doctor", "FOLDER"), "rondo.cli.doctor_run.examine"),
        (("migrate", "FOLDER"), "rondo.cli.migrate_command._files"),
    ],
)
def test_a_command_that_only_computes_ends_at_the_first(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    computing: str,
    number: signal.Signals,
) -> None:
    def compute(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), number)
        while True:
            pass

    monkeypatch.setattr(computing, compute)
    monkeypatch.setattr(signals, "HELD_SECONDS", 0.01)
    places = {"RECIPE": str(recipe), "FOLDER": str(tmp_path)}
    done = inline(*(places.get(one, one) for one in arguments), check=False)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"rondo {arguments[0]}: interrupted\n"
