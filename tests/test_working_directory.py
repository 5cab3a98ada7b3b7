"""No process of rondo imports what lies in the working directory under a name of Python's or a library's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.trainers.conftest import PYTHONPATH, RECIPE, REPOSITORY

SHADOWED = ("random", "secrets", "numpy", "torch", "json", "socket", "pyarrow", "usercustomize")
FEW = ("trainer.total_steps=1", "data.eval=[]", "trainer.evaluation.every=null", "checkpoint.export=false")
MATH = "reward.functions=[{name: math}]"
SCORED = f"reward.functions=[{{name: '{REPOSITORY}/tests/trainers/scorers.py:even_share'}}]"
WORLDS = f"{REPOSITORY}/tests/agents/worker_worlds.py"
ROWS = f"options: {{environment: '{WORLDS}:Counts', prompt: Go!, size: 8}}"
TRAIN = ("train", "tiny.yaml", *FEW, SCORED)
COMMANDS = {
    "the host": (*TRAIN, "cluster.backend=local"),
    "hosts": (*TRAIN, "cluster.backend=process", "cluster.devices=2"),
    "scorers": (*TRAIN, MATH),
    "engines": (*TRAIN, "rollout.engine.process=own", "rollout.replicas=2"),
    "episodes": (
        *TRAIN,
        f"data.train=[{{type: function, task: rondo.environments.episodes, {ROWS}}}]",
        f"rollout.environments=[{{name: '{WORLDS}:Counts', keep_state: true}}]",
        f"rollout.agent={{name: steps, max_steps: 2, history: 0, action: '{WORLDS}:half'}}",
        "reward.functions=[environment]",
        "rollout.episode_workers=2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", COMMANDS)
def test_files_called_as_modules_are_not_imported(what: str, tmp_path: Path) -> None:
    for name in SHADOWED:
        marks = (
            f"import sys\nopen({str(tmp_path / 'imported')!r}, 'a').write(' '.join(['{name}', *sys.argv]))\n"
        )
        (tmp_path / f"{name}.py").write_text(marks + "raise ImportError\n")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-P", "-m", "rondo", *COMMANDS[what]]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
