"""A run goes on with the rows that it began with, or says that they are others: every prompt comes once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.config import load
from rondo.data.sources import FIRST, WHOLE, open_source
from rondo.recipes.quickstart import demonstrations, train_rows
from tests.trainers.conftest import RECIPE, SFT_RECIPE, inline, metrics

Rows = list[dict[str, Any]]
ROWS: Rows = [dict(row) for row in train_rows(32)]
TEACHING: Rows = [dict(row) for row in demonstrations(32)]


def write(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def begin(folder: Path, command: str) -> tuple[list[str], Path]:
    """One step on 16 rows; returns the arguments that go on with it, and the file of the rows."""
    file, recipe = folder / "rows.jsonl", SFT_RECIPE if command == "sft" else RECIPE
    write(file, (TEACHING if command == "sft" else ROWS)[:16])
    data = {**recipe["data"], "train": [{"type": "jsonl", "path": str(file)}]}
    (folder / "r.yaml").write_text(yaml.safe_dump({**recipe, "data": data}))
    settings = [command, str(folder / "r.yaml"), f"trainer.run_dir={folder / 'run'}", "checkpoint.every=1"]
    settings.append("checkpoint.export=false")
    inline(*settings, "trainer.total_steps=1")
    return [*settings, "trainer.total_steps=2"], file


@pytest.mark.parametrize("command", ["train", "sft"])
def test_other_rows_are_refused_or_said(command: str, tmp_path: Path) -> None:
    again, file = begin(tmp_path, command)
    rows = TEACHING if command == "sft" else ROWS
    changed = [{**rows[3], "extra": 1}]
    for there, how in (
        (rows[16:], "16 rows, as before, with other content"),
        ([*rows[:3], *changed, *rows[4:16]], "16 rows, as before, with other content"),
        ([rows[1], rows[0], *rows[2:16]], "16 rows, as before, with other content"),
        (rows[:20], "4 rows more, behind the 16 that there were"),
        ([*changed, *rows[:16]], "17 rows, and there were 16"),
        (rows[:15], "15 rows, and there were 16"),
    ):
        write(file, there)
        done = inline(*again, check=False)
        assert done.returncode == 2
        assert f"rows: {how}\n" in done.stderr
        assert "checkpoint.changed_data=warn" in done.stderr
        assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 1
    done = inline(*again, "checkpoint.changed_data=warn", "tracking.console=plain")
    assert (
        f"(rows: {how}): some of this pass may come again, and others not at all" in done.stdout + done.stderr
    )
    # The checkpoint of that step has the rows of now.
    write(file, rows[:16])
    assert (
        "1 rows more, behind the 15 that" in inline(*again[:-1], "trainer.total_steps=3", check=False).stderr
    )
    write(file, rows[:15])
    inline(*again[:-1], "trainer.total_steps=3")
    (tmp_path / "run/checkpoints/step-00000003/rows.json").write_text("[]")
    said = inline(*again[:-1], "trainer.total_steps=4", check=False).stderr
    assert "rows.json" in said
    assert "of step 2 is valid" in said  # how to go on without it


def test_the_same_rows_in_another_file_are_the_same(tmp_path: Path) -> None:
    """Written anew, with another time, other columns first, a blank line."""
    again, file = begin(tmp_path, "sft")
    text = "\n\n".join(json.dumps(dict(reversed(row.items()))) for row in TEACHING[:16])
    file.write_text(text + "\n")
    os.utime(file, (1, 1))
    inline(*again)
    assert [line["step"] for line in metrics(tmp_path / "run")][-1] == 2


@pytest.mark.slow
def test_of_many_rows_a_digest_reads_some(tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(2 * WHOLE)]

    def digest(number: int) -> str:
        write(tmp_path / "rows.jsonl", rows)
        arguments = [f"data.train=[{{type: jsonl, path: {tmp_path / 'rows.jsonl'}}}]", "model.path=x"]
        (config,) = load([], [*arguments, "trainer.total_steps=1"]).config.data.train
        return open_source(config).digest(number)

    before = digest(len(rows)), digest(WHOLE)
    step = len(rows) // FIRST
    for place, is_read in (
        (step * 7, (True, True)),
        (len(rows) - 1, (True, False)),
        (WHOLE + 1, (False, False)),
    ):
        kept, rows[place] = rows[place], {"prompt": "other"}
        now = digest(len(rows)), digest(WHOLE)
        assert tuple(one != was for one, was in zip(now, before, strict=True)) == is_read
        rows[place] = kept
