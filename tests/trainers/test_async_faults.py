"""What a SIGKILL costs an asynchronous run of a tiny model."""

from __future__ import annotations

import json
import signal
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.trainers.conftest import inline
from tests.trainers.test_partial import RESUME, groups_by_step, rows_of
from tests.trainers.test_resume import SIX_STEPS, start, wait_for_line


@pytest.mark.slow
def test_kill_nine_in_resume_mode_loses_no_prompt_and_no_buffered_group(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = (*SIX_STEPS, *RESUME)
    process = start(recipe, run, *arguments, hold="16:24")
    wait_for_line(run, process, 4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cut = run / "checkpoints" / "step-00000003" / "buffer"
    records = [json.loads(line) for line in (cut / "ledger.jsonl").read_text().splitlines()]
    again = {record["seq"] for record in records if record["kind"] == "reissue"}
    groups = [json.loads(line) for line in (cut / "groups.jsonl").read_text().splitlines()]
    waiting = iter(pq.read_table(cut / "groups-0.parquet").to_pydict()["response_ids"])
    buffered = {group["seq"]: list(islice(waiting, group["rows"])) for group in groups}
    before = {seq for step in groups_by_step(run)[:3] for seq in step}
    assert again | set(buffered) | before == set(range(records[0]["next_seq"]))
    assert again >= set(range(16, 20))
    assert not again & set(buffered)
    assert not before & {*again, *buffered}
    assert inline("train", str(recipe), *arguments, f"trainer.run_dir={run}").returncode == 0
    assert sorted(seq for step in groups_by_step(run) for seq in step) == list(range(24))
    rows = rows_of(run)
    for seq, responses in buffered.items():
        assert [
            ids for ids, group in zip(rows["response_ids"], rows["group_id"], strict=True) if group == seq
        ] == (responses)
