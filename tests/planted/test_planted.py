"""What rondo says of each planted fault, and in which step; and that the page says the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from rondo.rollout.server import client
from rondo.tracking.checks import AHEAD, CHECKS
from tests.house import ROOT
from tests.planted.__main__ import with_tables
from tests.planted.elsewhere import ENGINES
from tests.planted.engines import MIXTURE, OWN_WEIGHTS
from tests.planted.fault import Fault
from tests.planted.faults import FAULTS, HELD
from tests.trainers.conftest import RECIPE, inline

QUIET = ("tracking.console=plain", "checkpoint.export=false")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(dict(fault.recipe)))
    is_told(fault, tmp_path, fault.plant(monkeypatch, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_it_is_told_of_an_engine_in_another_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same step, with the same words; nothing is planted in this process."""
    monkeypatch.setattr(client, "EngineServer", ENGINES[name])
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(dict(RECIPE)))
    is_told(FAULTS[name], tmp_path, ["rollout.engine.process=own"])


def is_told(fault: Fault, folder: Path, settings: Sequence[str]) -> None:
    run = folder / "run"
    done = inline(
        fault.command, str(folder / "tiny.yaml"), *QUIET, *settings, f"trainer.run_dir={run}", check=False
    )
    if fault.ends == "stops":
        assert done.returncode == 2
        assert fault.says in " ".join(done.stderr.split())
        lines = run / "metrics.jsonl"
        steps = (
            [json.loads(line)["step"] for line in lines.read_text().splitlines()] if lines.exists() else []
        )
        assert max(steps, default=-1) == fault.step
    else:
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if f"WARNING {fault.by}:" in line]
        assert fault.says in line
        assert f"tracking.checks.{fault.by}=off says nothing" in line
        (found,) = [
            one
            for one in json.loads((run / "summary.json").read_text())["checks"]
            if one["check"] == fault.by
        ]
        assert found["began"] == fault.step


def test_a_fault_that_is_warned_of_has_a_check() -> None:
    assert {fault.by for fault in FAULTS.values() if fault.ends == "warns"} <= {*CHECKS, *AHEAD}


def test_what_others_met_is_held_by_tests_that_there_are() -> None:
    for held in HELD:
        for test in held.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), test


def test_the_page_has_the_tables() -> None:
    page = ROOT / "docs/trust.md"
    assert page.read_text() == with_tables(page.read_text()), "run `python -m tests.planted`"


@pytest.mark.parametrize(
    "settings",
    [
        (),
        (*MIXTURE, OWN_WEIGHTS, "actor.router.replay=sampler"),
        (
            "rollout.dtype=bfloat16",
            "actor.lora={rank: 4, alpha: 8, send: adapters}",
            "algorithm.advantage=gae",
        ),
    ],
    ids=["plain", "mixture", "adapters and a critic"],
)
def test_a_run_without_a_fault_is_told_nothing(settings: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(dict(RECIPE)))
    run = tmp_path / "run"
    quiet = (
        *QUIET,
        "tracking.checks.truncated=off",
    )  # this model does not end its answers, as is said rightly
    done = inline("train", str(tmp_path / "tiny.yaml"), *quiet, *settings, f"trainer.run_dir={run}")
    assert "WARNING" not in done.stdout
    assert json.loads((run / "summary.json").read_text())["checks"] == []
