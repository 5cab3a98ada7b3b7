"""trainer.profile, in real processes: whose traces there are, of which steps; nothing else differs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rondo.config import load
from rondo.core.errors import ConfigError
from rondo.trainers.commands.supervised import sft
from rondo.trainers.loop.rl import RLTrainer
from tests.trainers.conftest import SFT_RECIPE, weights


def files_of(run: Path) -> list[str]:
    folder = run / "profile"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def names_in(trace: Path) -> set[str]:
    """The names of a trace's events."""
    with gzip.open(trace, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


# Of the model: forward, backward, the optimizer; and the span of the call that they are in.
LEARNT = "Optimizer.step#AdamW.step"
LEARNS = {"aten::mm", "aten::embedding", "MmBackward0", "_RmsNormBackward", LEARNT}
TWO = ("cluster.backend=process", "cluster.devices=2", "trainer.evaluation.every=null")


@pytest.mark.slow
def test_processes_of_two_ranks_are_recorded_in_exactly_these_steps(run: Any) -> None:
    own = ("rollout.engine={name: native, process: own}", "trainer.total_steps=3", *TWO)
    plain = run("plain", *own)
    recorded = run("recorded", *own, "trainer.profile={steps: [3, 1]}")
    assert not (plain / "profile").exists()
    of_a_step = [name for rank in (0, 1) for name in (f"actor-{rank}", f"rollout-{rank}-engine-0")]
    assert files_of(recorded) == sorted(
        f"step-00000{step}/{name}.json.gz" for step in (1, 3) for name in of_a_step
    )
    for step in ("step-000001", "step-000003"):
        for rank in (0, 1):
            trainer = names_in(recorded / "profile" / step / f"actor-{rank}.json.gz")
            assert {*LEARNS, f"actor[{rank}].update_actor"} <= trainer
            engine = names_in(recorded / "profile" / step / f"rollout-{rank}-engine-0.json.gz")
            assert "aten::as_strided" in engine  # its kernels for a CPU are no operators of torch
            assert not any("Backward" in name for name in engine)
    assert weights(plain) == weights(recorded)


@pytest.mark.slow
def test_one_process_has_all_in_one_trace_and_an_unfinished_step_has_none(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine in the host, on a thread of its own. The run is stopped in its second step."""
    take = RLTrainer.take

    async def stopping(self: RLTrainer) -> Any:
        if self.step == 1:
            self.request_stop()
        return await take(self)

    monkeypatch.setattr(RLTrainer, "take", stopping)
    settings = (
        "rollout.engine=transformers",
        "trainer.total_steps=2",
        "trainer.profile.steps=[1, 2]",
        "trainer.evaluation.every=null",
    )
    recorded = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run("run", *settings)
    assert files_of(recorded) == ["step-000001/actor-0.json.gz"]
    trace = recorded / "profile" / "step-000001" / "actor-0.json.gz"
    assert {*LEARNS, "actor[0].update_actor", "actor[0].compute_log_prob"} <= names_in(trace)
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    update = next(event["tid"] for event in events if event.get("name") == LEARNT)
    decoding = {event["tid"] for event in events if event.get("name") == "aten::embedding"} - {update}
    assert decoding
    assert not torch.autograd._profiler_enabled()
    # It goes on, and that step is recorded.
    monkeypatch.setattr(RLTrainer, "take", take)
    before = trace.read_bytes()
    run("run", *settings)
    assert files_of(recorded) == [f"step-00000{step}/actor-0.json.gz" for step in (1, 2)]
    assert trace.read_bytes() == before


@pytest.mark.slow
def test_supervised_runs_are_recorded(tmp_path: Path) -> None:
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(yaml.safe_dump(SFT_RECIPE))
    sft(load([str(recipe)], [f"trainer.run_dir={tmp_path / 'run'}", "trainer.profile={steps: [2]}"]))
    assert files_of(tmp_path / "run") == ["step-000002/actor-0.json.gz"]
    assert LEARNS <= names_in(tmp_path / "run" / "profile" / "step-000002" / "actor-0.json.gz")


@pytest.mark.parametrize(
    ("asked", "key", "said"),
    [
        ("{steps: [3, 4]}", "steps", "has 4, and the run has 3 steps: name some of these"),
        (
            "{steps: [3], memory: true}",
            "memory",
            "=true needs a GPU, and this run is on the CPU: leave it out",
        ),
    ],
)
def test_what_a_run_does_not_have_is_refused_before_it_begins(
    run: Any, tmp_path: Path, asked: str, key: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run("run", f"trainer.profile={asked}")
    assert caught.value.key == f"trainer.profile.{key}"
    assert said in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
