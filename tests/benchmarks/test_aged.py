"""A run that was made older than it is goes on as one that is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import aged
from rondo.checkpoint import CheckpointStore
from rondo.checkpoint.checked import num_bytes
from tests.trainers.conftest import inline

GROUPS, STEPS = 2, 250


def state_after(run: Path, step: int) -> dict[str, int]:
    """Returns the sizes of the files of the controller's part of a checkpoint."""
    files = CheckpointStore(run / "checkpoints").open(step).files
    return {name: num_bytes(files[name]) for name in files if "actor/" not in name}


@pytest.mark.slow
def test_a_checkpoint_after_many_steps_is_that_after_one_with_longer_numbers(tmp_path: Path) -> None:
    young, old = tmp_path / "young", tmp_path / "old"
    inline(*aged.command(tmp_path, young, GROUPS, aged.WAITING))
    aged.cut(young, 1)
    shutil.copytree(young, old)
    aged.age(old, STEPS, GROUPS)
    for run, step in ((young, 1), (old, STEPS)):
        inline(*aged.command(tmp_path, run, GROUPS, step + 1))
    sizes = state_after(young, 2), state_after(old, STEPS + 1)
    assert sizes[0].keys() == sizes[1].keys()
    assert all(abs(sizes[1][name] - size) < 100 for name, size in sizes[0].items()), sizes

    lines = [json.loads(line) for line in (old / "journal.jsonl").read_text().splitlines()]
    taken = [seq for line in lines if line["kind"] == "take" for seq in line["seqs"]]
    assert taken[: (STEPS + 1) * GROUPS] == list(range((STEPS + 1) * GROUPS))
    metrics = [json.loads(line)["step"] for line in (old / "metrics.jsonl").read_text().splitlines()]
    assert metrics == list(range(1, STEPS + 2))
