"""The log files of a run: one of each process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainers.conftest import inline


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "ray"])
def test_every_process_has_its_log(recipe: Path, tmp_path: Path, backend: str) -> None:
    """What functions print, and what engines in their own processes write; a second attempt goes behind."""
    run = tmp_path / "run"
    command = [
        "train",
        str(recipe),
        f"cluster.backend={backend}",
        "rollout.engine.process=own",
        "reward.functions=[tests/trainers/scorers.py:speaks]",
        "checkpoint.every=1",
        "checkpoint.export=false",
        f"trainer.run_dir={run}",
    ]
    for steps in (1, 2):
        inline(*command, f"trainer.total_steps={steps}")
    host = (run / "logs" / "host-0.log").read_text().splitlines()
    where = r" \(pid \d+ on [\d.]+\)" if backend == "ray" else ""
    header = re.compile(f"=== host process 0{where}, started ")
    starts = [number for number, line in enumerate(host) if header.match(line)]
    assert len(starts) == 2
    for start, end in ((starts[0], starts[1]), (starts[1], len(host))):
        attempt = "\n".join(host[start:end])
        assert "scoring " in attempt
        assert "the rollout engine's process 0 (native): " in attempt
    # The controller had nothing to say: its log is made with the first line.
    assert [path.name for path in (run / "logs").iterdir()] == ["host-0.log"]
