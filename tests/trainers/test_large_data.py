"""Runs over a source that is read as it is needed: exact resume; a broken row told ahead, or meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rondo.data import sources, stream
from rondo.data.content import HELD
from tests.trainers.conftest import SFT_RECIPE, inline, metrics, weights

WHOLE, FIRST = 1 << 13, 1 << 10  # a quarter of what they are: a look at all rows takes a second, not four
ROWS, BROKEN = WHOLE + 232, WHOLE - 1000


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts with their answers, of which one line is no JSON."""
    monkeypatch.setenv("RONDO_CACHE", str(tmp_path / "cache"))
    for module in (sources, stream):
        monkeypatch.setattr(module, "WHOLE", WHOLE)
        monkeypatch.setattr(module, "FIRST", FIRST)
    row = {"prompt": "1 2", "answer": "3", "response": "3", "pad": "x" * (HELD // ROWS)}
    lines = [json.dumps({**row, "prompt": f"{i % 10} {i % 7} {i % 3}"}) for i in range(ROWS)]
    lines[BROKEN] = "{"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def mend(rows: Path) -> None:
    lines = rows.read_text().split("\n")
    rows.write_text("\n".join([*lines[:BROKEN], lines[0], *lines[BROKEN + 1 :]]))


def of(rows: Path) -> str:
    return f"data.train={json.dumps([{'type': 'jsonl', 'path': str(rows)}])}"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_broken_row_is_told_and_a_mended_file_is_resumed_exactly(
    recipe: Path, tmp_path: Path, rows: Path, command: str
) -> None:
    base = recipe
    if command == "sft":
        base = tmp_path / "sft.yaml"
        base.write_text(yaml.safe_dump(SFT_RECIPE))
    told = f"rows.jsonl, line {BROKEN + 1}: broken JSON"
    own = (str(base), of(rows), "checkpoint={export: true, every: 2}", "trainer.evaluation.every=null")

    ahead = inline("check", str(base), of(rows), "--data", "--for", command, check=False)
    assert (ahead.returncode, told in ahead.stderr) == (2, True)
    found = inline(
        command, *own, "trainer.total_steps=100000", f"trainer.run_dir={tmp_path / 'a'}", check=False
    )
    assert (found.returncode, told in found.stderr) == (2, True)
    assert metrics(tmp_path / "a")  # it has trained until then

    mend(rows)
    for name, steps in (("cut", 2), ("cut", 4), ("whole", 4)):
        inline(command, *own, f"trainer.total_steps={steps}", f"trainer.run_dir={tmp_path / name}")
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert metrics(tmp_path / "cut")[-1] == metrics(tmp_path / "whole")[-1]

    said = inline("check", str(base), of(rows), "--data", "--for", command).stdout
    assert f"rows: {ROWS} rows, 0 of them too long" in said
