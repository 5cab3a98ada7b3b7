"""`rondo show`: which trajectories, and what is printed of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.agents.record import rows_of
from rondo.core.errors import DataError
from rondo.core.types import Completion, PolicyCall, Prompt, Trajectory
from rondo.data.rows import rows_from_trajectories
from rondo.tracking.trajectories import read_trajectories, written
from tests.messages import full_text
from tests.trainers.conftest import inline


def trajectory(number: int, prompt: str, tokens: tuple[int, ...] = (3,), **changes: Any) -> Trajectory:
    asked = Prompt(number, f"train/0/{number}", "train", np.array([1], np.int32), {"prompt": prompt})
    calls = [
        PolicyCall(
            Completion(
                "r",
                np.array([10 * step], np.int32),
                np.arange(count, dtype=np.int32),
                np.zeros(count, np.float32),
                np.zeros(count, np.int32),
                "length",
            )
        )
        for step, count in enumerate(tokens)
    ]
    made = Trajectory(asked, f"train/{asked.prompt_id}/0", 0, tuple(rows_of(calls)), text=f"answer {number}")
    return Trajectory(**{**vars(made), **changes})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    made = [
        trajectory(0, "How many apples?", reward=0.5, scores={"right": 0.0, "short": 0.5}),
        trajectory(1, "How many pears?", (2, 4), reward=1.0, scores={"right": 1.0, "short": 0.0},
                   transcripts=("[policy] a\n[tool] 7", "[context] Sure?\n[policy] answer \x1b[31m1")),
        trajectory(2, "How many plums?", outcome="tool_error", failure="the tool x raised OSError: gone"),
    ]  # fmt: skip
    scores = {"score/right": "right", "score/short": "short"}
    rows = rows_from_trajectories(made, scores, of_agents=True)
    for step, batch in ((1, rows.take([0])), (2, rows)):
        batch.write_parquet(tmp_path / "rollouts" / f"step-{step:06d}.parquet")
    return tmp_path


def numbers(run: Path, **options: Any) -> list[str]:
    return [one.prompt_id[-1] for one in read_trajectories(run, **options)]


def test_which_are_shown(run: Path) -> None:
    assert numbers(run) == ["0", "1", "2"]
    assert numbers(run, order="best") == ["1", "0", "2"]
    assert numbers(run, order="worst", number=1) == ["0"]
    assert numbers(run, failed=True) == ["2"]
    assert numbers(run, failed=False) == ["0", "1"]
    assert numbers(run, prompt="pears") == numbers(run, prompt="0/1") == ["1"]
    assert numbers(run, step=1) == ["0"]


def test_what_is_written(run: Path) -> None:
    plain, agent, failed = (written(one, 60).split("\n") for one in read_trajectories(run))
    assert plain == [
        "── step 2 · train/0/0 · sample 0 · reward 0.5 (right 0, short 0.5) · cut off (length) · 3 tokens ",
        "  How many apples?",
        "",
        "  answer 0",
        "",
    ]
    assert agent[0].endswith("reward 1 (right 1, short 0) · cut off (length) · 6 tokens in 2 contexts ")
    assert agent[3:7] == ["  [policy] a", "  [tool] 7", "  [context] Sure?", "  [policy] answer \\x1b[31m1"]
    assert failed[0].startswith(
        "── step 2 · train/0/2 · sample 0 · tool_error: the tool x raised OSError: gone"
    )


def test_long_lines_are_wrapped_at_words(run: Path) -> None:
    (shown,) = read_trajectories(run, step=1)
    long = Trajectory.__name__  # any word
    lines = written(type(shown)(**{**vars(shown), "said": f"{long} " * 20}), 40).split("\n")[3:-1]
    assert all(len(line) <= 40 for line in lines)
    assert " ".join(line.strip() for line in lines).split() == [long] * 20


def test_the_command(run: Path) -> None:
    done = inline("show", str(run), "--best", "-n", "1")
    assert "train/0/1" in done.stdout
    assert "train/0/0" not in done.stdout
    assert inline("show", str(run), "--prompt", "nuts").stdout == "no trajectory of that step is like that\n"
    for arguments, said in (
        (["--step", "7"], "has no rollouts of step 7; there are 1 to 2"),
        (["-n", "0"], "at least one trajectory"),
    ):
        assert said in inline("show", str(run), *arguments, check=False).stderr
    assert "has no rollouts" in inline("show", str(run / "rollouts"), check=False).stderr


def test_a_step_between_those_that_were_kept_is_named(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "rollouts"
    kept.mkdir(parents=True)
    for step in (2, 3, 9):
        shutil.copy(run / "rollouts" / "step-000002.parquet", kept / f"step-{step:06d}.parquet")
    with pytest.raises(DataError, match=full_text("2 to 9, 3 steps of these")):
        read_trajectories(tmp_path / "kept", step=5)
    assert [shown.step for shown in read_trajectories(tmp_path / "kept", number=1)] == [9]


def test_a_broken_file_is_named(run: Path) -> None:
    (run / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=full_text("step-000002.parquet: cannot be read")):
        read_trajectories(run)
