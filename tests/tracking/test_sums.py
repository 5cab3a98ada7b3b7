"""The sums of steps in their file, and where two runs begin to differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rondo.core.errors import DataError
from rondo.tracking.run_folder import RunFolder
from rondo.tracking.sums import SUMS, Compared, SumsWriter, compared, each_sums

LARGE = (1 << 64) - 1
STEP = {"row_id": 1, "prompt_ids": 2, "loss_weight": 3, "reward": 4, "advantages": LARGE, "old_log_probs": 0}
STEP |= {"actor:b": 7, "actor:a": 8, "critic:a": 9, "response_ids": 10, "score/right": 11, "mine": 12}


def write(run: Path, steps: Sequence[Mapping[str, int]], first: int = 1) -> Path:
    with RunFolder(run) as folder:
        folder.begin("")
        writer = SumsWriter()
        for step, sums in enumerate(steps, first):
            folder.append_sums(writer.line(step, sums))
    return run


def test_names_are_written_where_they_change(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [STEP, STEP, STEP | {"new": 13}])
    lines = (run / SUMS).read_text().splitlines()
    assert ['"names"' in line for line in lines] == [True, False, True]
    assert len(lines[1]) == len('{"step": 2, "sums": ""}') + 4 * 8 * len(STEP) // 3
    assert list(each_sums(run)) == [(1, STEP), (2, STEP), (3, STEP | {"new": 13})]
    with (run / SUMS).open("a") as file:
        file.write('{"step": 4, "su')  # killed
    assert [step for step, _ in each_sums(run)] == [1, 2, 3]
    with (run / SUMS).open("a") as file:
        file.write("\n" + lines[1] + "\n")
    with pytest.raises(DataError, match=r"sums.jsonl:4: not a line of sums"):
        list(each_sums(run))


def test_the_cause_stands_before_what_follows_from_it(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [STEP] * 3)
    assert compared(run, write(tmp_path / "same", [STEP] * 5)) == Compared(1, 3, (), ())
    other = STEP | {name: 100 for name in STEP}
    found = compared(run, write(tmp_path / "other", [STEP, other, STEP]))
    assert (found.first, found.last) == (1, 2)
    assert found.differ == (
        *("row_id", "prompt_ids", "response_ids", "score/right", "reward", "old_log_probs", "advantages"),
        *("loss_weight", "mine", "critic:a", "actor:b", "actor:a"),
    )
    assert found.line() == (
        "equal in steps 1 to 1; in step 2 the first difference is column row_id; then column prompt_ids, "
        "column response_ids, column score/right and 8 more"
    )
    last = compared(run, write(tmp_path / "last", [STEP | {"actor:a": 1}]))
    assert last.line() == "in step 1 the first difference is the weight a of actor (after the step)"


def test_steps_and_columns_that_one_run_has_are_said(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [STEP] * 4)
    later = compared(run, write(tmp_path / "later", [STEP | {"token_rewards": 5}] * 2, first=3))
    assert later == Compared(3, 4, (), ("token_rewards",))
    assert later.line() == (
        "equal, bit for bit, in steps 3 to 4: all columns and weights (only one has token_rewards)"
    )
    with pytest.raises(DataError, match=r"have no step in common in sums\.jsonl"):
        compared(run, write(tmp_path / "much_later", [STEP], first=9))
    with pytest.raises(DataError, match=r"nowhere/sums\.jsonl: no such file"):
        compared(run, tmp_path / "nowhere")


def test_a_resumed_run_names_its_sums_anew(tmp_path: Path) -> None:
    """Lines beyond the checkpoint move away, with what they named."""
    run = write(tmp_path / "run", [STEP, STEP, STEP | {"new": 13}])
    with RunFolder(run) as folder:
        folder.discard_beyond(1)
        folder.append_sums(SumsWriter().line(2, STEP))
    assert list(each_sums(run)) == [(1, STEP), (2, STEP)]
    assert [len(path.read_text().splitlines()) for path in (run / "discarded").rglob(SUMS)] == [2]
