"""`on_step`, `on_evaluation` and `on_checkpoint`: what they hear and when, how they end a run, and what
becomes of their errors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rondo
from rondo.checkpoint import CheckpointStore
from rondo.core.errors import ConfigError, TrainError
from tests.api.test_training import ROWS, SETTINGS, even
from tests.trainers.conftest import weights

SOLVED = [{"prompt": row["prompt"], "response": f"#### {row['answer']}"} for row in ROWS]
PAIRS = [{"prompt": row["prompt"], "chosen": f"#### {row['answer']}", "rejected": "no"} for row in ROWS]


class Heard:
    """Three callbacks that write down what they hear; any may end the run at a step."""

    def __init__(self, **ends: int) -> None:
        self.ends = ends
        self.events: list[tuple[str, int]] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.samples: dict[int, list[Any]] = {}
        self.folders: dict[int, Path] = {}

    def _add(self, name: str, step: int) -> bool:
        self.events.append((name, step))
        return self.ends.get(name) == step

    def on_step(self, metrics: Any) -> bool:
        return self._add("on_step", metrics["step"])

    def on_evaluation(self, step: int, result: Any) -> bool:
        self.metrics[step], self.samples[step] = dict(result.metrics), list(result.samples)
        return self._add("on_evaluation", step)

    def on_checkpoint(self, step: int, folder: Path) -> bool:
        store = CheckpointStore(folder.parent, keep=2)
        assert store.has(step)  # it is whole: all that it lists is there
        store.open(step)
        self.folders[step] = folder
        return self._add("on_checkpoint", step)

    @property
    def all(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("on_step", "on_evaluation", "on_checkpoint")}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Any]:
    def run(name: str, **given: Any) -> Any:
        settings = {"trainer.run_dir": tmp_path / name, "checkpoint.every": 2, "checkpoint.keep": 9}
        return rondo.train(data=ROWS, reward=even, config=SETTINGS, **{**settings, **given})

    return run


def test_what_a_run_says_and_in_which_order(train: Callable[..., Any]) -> None:
    """Evaluations before, every 2 steps and after; checkpoints every 2 and at the end."""
    heard = Heard()
    run = train("run", steps=3, **heard.all)
    assert heard.events == [
        ("on_evaluation", 0),
        ("on_step", 1),
        ("on_evaluation", 2),
        ("on_step", 2),
        ("on_checkpoint", 2),
        ("on_evaluation", 3),
        ("on_step", 3),
        ("on_checkpoint", 3),
    ]
    logged = run.metrics["eval/greedy/reward"].dropna()
    assert {step: one["eval/greedy/reward"] for step, one in heard.metrics.items()} == logged.to_dict()
    assert all(name.startswith("eval/") for one in heard.metrics.values() for name in one)
    for step, samples in heard.samples.items():
        lines = (run.path / "evaluations" / f"step-{step:06d}.jsonl").read_text().splitlines()
        assert [sample.text for sample in samples] == [json.loads(line)["text"] for line in lines]
        assert [sample.reward for sample in samples] == [json.loads(line)["reward"] for line in lines]
    assert {step: folder.name for step, folder in heard.folders.items()} == {
        step: f"step-{step:08d}" for step in (2, 3)
    }
    quiet = train("quiet", steps=3)
    assert weights(run.path) == weights(quiet.path)


@pytest.mark.parametrize(
    ("ends", "steps"), [({"on_evaluation": 2}, 2), ({"on_checkpoint": 2}, 2), ({"on_evaluation": 0}, 0)]
)
def test_each_may_end_the_run(train: Callable[..., Any], ends: dict[str, int], steps: int) -> None:
    heard = Heard(**ends)
    run = train("run", steps=6, **heard.all)
    assert run.summary["steps"] == steps
    assert [step for name, step in heard.events if name == "on_step"] == list(range(1, steps + 1))
    assert (run.model / "config.json").is_file()


@pytest.mark.parametrize("name", ["on_step", "on_evaluation", "on_checkpoint"])
def test_what_one_raises_is_the_error_of_the_run(train: Callable[..., Any], name: str) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        train("run", steps=3, **{name: broken})
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("all up to step 2 is saved" in notes) == (name == "on_checkpoint")

    def leaves(*arguments: Any) -> None:
        sys.exit(0)

    with pytest.raises(TrainError, match=rf"^{name}: EscapeError: SystemExit\(0\) would"):
        train("other", steps=3, **{name: leaves})


@pytest.mark.parametrize("name", ["on_step", "on_evaluation", "on_checkpoint"])
def test_what_is_no_function_is_said_before_anything_starts(
    train: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a function, got int 5$"):
        train("run", steps=3, **{name: 5})
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_tells_the_rest(train: Callable[..., Any], tmp_path: Path) -> None:
    train("run", steps=2)
    heard = Heard()
    rondo.load(tmp_path / "run").resume(steps=4, **heard.all)
    assert heard.events == [
        ("on_step", 3),
        ("on_evaluation", 4),
        ("on_step", 4),
        ("on_checkpoint", 4),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_evaluations_beside_episodes_are_told_too(train: Callable[..., Any], staleness: int) -> None:
    heard = Heard()
    train("run", steps=4, **{"trainer.max_staleness": staleness}, **heard.all)
    assert sorted(heard.events) == sorted(
        [("on_evaluation", step) for step in (0, 2, 4)]
        + [("on_step", step) for step in (1, 2, 3, 4)]
        + [("on_checkpoint", step) for step in (2, 4)]
    )


@pytest.mark.parametrize("kind", ["sft", "preference", "reward_model"])
def test_supervised_runs_tell_losses_without_answers(tmp_path: Path, kind: str) -> None:
    rows = SOLVED if kind == "sft" else PAIRS
    config = {key: SETTINGS[key] for key in ("model", "cluster", "tracking")}
    config |= {"data.batch_size": 4, "data.max_prompt_tokens": 64, "trainer.evaluation.every": 2}
    heard = Heard()
    run = getattr(rondo, kind)(
        data=rows, eval_data=rows[:4], config=config, steps=3,
        **{"trainer.run_dir": tmp_path / "run", "checkpoint.every": 2, "checkpoint.keep": 9}, **heard.all,
    )  # fmt: skip
    assert heard.events == [
        ("on_step", 1),
        ("on_evaluation", 2),
        ("on_step", 2),
        ("on_checkpoint", 2),
        ("on_evaluation", 3),
        ("on_step", 3),
        ("on_checkpoint", 3),
    ]
    (loss,) = (key for key in heard.metrics[3] if key.endswith("/loss"))
    assert [heard.metrics[step][loss] for step in (2, 3)] == run.metrics[loss].dropna().tolist()
    assert heard.samples == {2: [], 3: []}
