"""What benchmarks/controller.py measures, on sizes that a hand can check, and the program itself."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

import controller
from controller import Rows, measure, slope


def options(**others: object) -> argparse.Namespace:
    made = controller.parse(["--repeat", "1", "--tokens", "8", "--n", "4"])
    vars(made).update(others)
    return made


def test_the_slope_is_the_exponent() -> None:
    assert slope([(8, 3 * 8**1.5), (64, 3 * 64**1.5), (512, 3 * 512**1.5)]) == pytest.approx(1.5)
    assert slope([(8, 0.25), (512, 0.25)]) == pytest.approx(0.0)
    assert math.isnan(slope([(8, 1.0)]))


@pytest.mark.parametrize("program", ["grpo", "ppo"])
def test_a_step_on_simulated_ranks_has_every_part(program: str) -> None:
    one = measure(program, 32, 3, options())
    assert one["rows"] == 32
    assert 0 < one["plan"] < one["step"]
    parts = ["generate", "take", "rollouts", "Production", "AdvantageStage", "CorrectionStage", "update"]
    assert sum(one[name] for name in parts) <= one["step"]
    assert one["bytes"] > 32 * 8  # the row ids at least


@pytest.mark.slow
def test_what_the_ranks_compute_is_not_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that works for a tenth of a second in each of its calls costs the driver nothing."""
    plain, answer = measure("grpo", 16, 2, options()), Rows.answer

    def busy(self: Rows, call: object, places: object) -> object:
        end = controller.time.thread_time() + 0.1
        while controller.time.thread_time() < end:
            pass
        return answer(self, call, places)

    monkeypatch.setattr(Rows, "answer", busy)
    slow = measure("grpo", 16, 2, options())
    calls = 4 + 3 * 2  # four groups, and two ranks in three calls
    assert slow["step"] - plain["step"] < calls * 0.1 / 2
    assert slow["bytes"] == pytest.approx(plain["bytes"], rel=0.05)


def test_the_program_prints_its_tables_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "controller.json"
    sizes = "--rows 16,32 --ranks 2,4 --at-rows 32 --at-ranks 2 --n 4 --tokens 8 --repeat 1 --program grpo"
    controller.main([*sizes.split(), "--json", str(target)])
    made = json.loads(target.read_text())["grpo"]
    assert [(one["rows"], one["ranks"]) for one in made["points"]] == [(16, 2), (32, 2), (32, 4)]
    rows = [(one["rows"], one["bytes"]) for one in made["points"][:2]]
    assert made["slopes"]["rows"]["bytes"] == pytest.approx(slope(rows))
    printed = capsys.readouterr().out
    assert printed.count("\n| 32 |") == 2
    assert "slope in ranks, at 32 rows: step" in printed
