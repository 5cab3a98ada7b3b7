"""A run whose responses end at strings of several tokens."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.trainers.conftest import inline, metrics, weights
from tests.trainers.test_resume import SIX_STEPS, start, tokens, wait_for_line

# A random model says some of them.
STOPS = ["".join(pair) for pair in itertools.product("abdefino", repeat=2)]


@pytest.mark.slow
def test_a_run_with_stop_strings_is_resumed_to_the_bit(recipe: Path, tmp_path: Path) -> None:
    settings = (f"rollout.stop={json.dumps(STOPS)}", "rollout.max_tokens=24", "tracking.save_rollouts=true")
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    inline("train", str(recipe), *SIX_STEPS, *settings, f"trainer.run_dir={undisturbed}")
    process = start(recipe, run, *settings, hold="16:20")
    wait_for_line(run, process, 4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    inline("train", str(recipe), *SIX_STEPS, *settings, f"trainer.run_dir={run}")
    assert tokens(run) == tokens(undisturbed)
    assert metrics(run) == metrics(undisturbed)
    assert weights(run) == weights(undisturbed)

    files = sorted((run / "rollouts").glob("step-??????.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert len(stopped) > len(rows) / 4
    ends = [row for row in rows if any(stop in row["text"] for stop in STOPS)]  # what rewards read
    assert ends
    assert all(row["finish_reason"] == "stop" for row in ends)
