"""The best evaluation: which it is, that its checkpoint stays and is exported, and that a run ends by it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.checkpoint import CheckpointStore
from rondo.config import BestConfig, load
from rondo.core.errors import ConfigError
from rondo.trainers.commands.train import train
from rondo.trainers.loop.checkpoints import Best
from rondo.trainers.sessions import open_session
from tests.messages import full_text
from tests.trainers.conftest import SFT_RECIPE, inline, metrics, weights

NAME = "eval/sampled/reward"
# Ten steps, each evaluated: the reward falls and rises again, highest after 7, lowest after 3.
EVERY_STEP = ("trainer.total_steps=10", "trainer.seed=2", "trainer.evaluation.every=1", "checkpoint.keep=1")


def values(run: Path, name: str = NAME) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def best_of(config: BestConfig, *evaluations: float | None) -> Best:
    """Of evaluations from step 1 on; None: nothing could be scored."""
    best = Best(config)
    best.read(
        {"step": step, "eval/sampled/failed_share": 0.0, **({} if value is None else {NAME: value})}
        for step, value in enumerate(evaluations, 1)
    )
    return best


def test_which_is_best() -> None:
    def state(*evaluations: float | None, **options: Any) -> tuple[int | None, float | None, int, bool]:
        best = best_of(BestConfig(NAME, **options), *evaluations)
        return best.step, best.value, best.waited, best.enough

    assert state() == (None, None, 0, False)
    assert state(0.5, 0.7, 0.7, 0.6) == (2, 0.7, 2, False)  # of equals the first
    assert state(0.5, 0.7, 0.7, 0.6, patience=2) == (2, 0.7, 2, True)
    assert state(0.5, 0.7, 0.6, 0.8, patience=2) == (4, 0.8, 0, False)
    assert state(0.5, 0.7, 0.3, mode="min") == (3, 0.3, 0, False)
    assert state(0.5, 0.55, 0.62, min_delta=0.1) == (3, 0.62, 0, False)  # better than 0.5, not than 0.55
    assert state(0.5, 0.45, 0.35, mode="min", min_delta=0.1) == (3, 0.35, 0, False)
    assert state(None, float("nan"), 0.5, float("nan"), None) == (3, 0.5, 2, False)
    assert state(None, None, patience=2) == (None, None, 2, True)
    best = Best(BestConfig(NAME))
    best.add(0, {NAME: 0.9})  # of the model as it came
    best.add(1, {"reward/mean": 0.9})  # no evaluation
    assert (best.step, best.waited) == (None, 0)


def test_what_is_best_by_itself() -> None:
    highest = (
        "eval/greedy/reward",
        "eval/greedy/reward/math",
        "eval/sampled/best@4",
        "eval/sampled/majority@4",
    )
    for name in (*highest, "eval/greedy/score/right", "eval/pair/accuracy", "eval/pair/margin"):
        assert BestConfig(name).sign == 1
    assert BestConfig("eval/sft/loss").sign == -1
    assert BestConfig("eval/greedy/response_length").sign == 0
    assert BestConfig("eval/greedy/response_length", "min").sign == -1


def test_a_spared_checkpoint_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 7):
        store.spared = {1: 1, 2: 2, 3: 2, 4: 2, 5: 5, 6: 5}[step]
        with store.writing(step) as draft:
            draft.write("a.json", b"{}")
        kept = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [4, 5], 6: [5, 6]}
        assert store.steps() == kept[step]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_is_kept_and_exported(run: Callable[..., Path], tmp_path: Path, mode: str) -> None:
    made = run(mode, *EVERY_STEP, f"checkpoint.best={{metric: {NAME}, mode: {mode}}}")
    trained = {step: value for step, value in values(made).items() if step > 0}
    assert list(trained) == list(range(1, 11))
    wanted = (max if mode == "max" else min)(trained.values())
    best = next(step for step, value in trained.items() if value == wanted)
    assert summary(made)["best"] == {"metric": NAME, "step": best, "value": wanted}
    steps = CheckpointStore(made / "checkpoints").steps()
    assert steps == [best, 10]
    for step in steps:
        inline("export", str(made), str(tmp_path / f"{mode}-{step}"), "--step", str(step))
    exported = {step: model(tmp_path / f"{mode}-{step}") for step in steps}
    assert model(made / "export") == exported[best]
    assert exported[best] != exported[10]
    plain = run(f"{mode}-without", *EVERY_STEP, "checkpoint.every=10")
    assert metrics(plain) == metrics(made)  # to look for it changes nothing
    assert model(plain / "export") == exported[10]


def model(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))


@pytest.mark.slow
def test_a_run_ends_by_patience_and_goes_on_with_more(run: Callable[..., Path]) -> None:
    end = (*EVERY_STEP, "trainer.total_steps=12")

    def patient(name: str, patience: int | None) -> Path:
        best = f"{{metric: {NAME}, patience: {'null' if patience is None else patience}}}"
        return run(name, *end, f"checkpoint.best={best}")

    everything = patient("everything", None)
    of_all = values(everything)
    expected = {}
    for patience in (1, 3):
        best = Best(BestConfig(NAME, patience=patience))
        for step in range(1, 13):
            best.add(step, {NAME: of_all[step]})
            if best.enough:
                expected[patience] = step
                break
    made = patient("run", 1)
    assert summary(made)["steps"] == expected[1] < expected[3] < 12
    assert CheckpointStore(made / "checkpoints").steps()[-1] == expected[1]
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*") if file.name != "run.lock"}
    patient("run", 1)  # is finished, and shown
    assert before == {file: file.stat().st_mtime_ns for file in made.rglob("*") if file.name != "run.lock"}
    shutil.rmtree(made / "export")
    (made / "summary.json").unlink()  # as where it was killed between the last evaluation and the end
    patient("run", 1)
    assert summary(made)["steps"] == expected[1]
    assert metrics(made) == metrics(everything)[: expected[1] + 1]
    patient("run", 3)
    undisturbed = patient("undisturbed", 3)
    assert summary(undisturbed)["steps"] == expected[3]
    assert metrics(made) == metrics(undisturbed)
    assert weights(made) == weights(undisturbed)
    assert summary(made)["best"] == summary(undisturbed)["best"]


@pytest.mark.slow
def test_beside_episodes(run: Callable[..., Path]) -> None:
    """An evaluation that ends in the next step: its checkpoint is there when it is known to be the best."""
    ahead = ("trainer.max_staleness=1", "trainer.on_update=resume")
    for mode in ("max", "min"):
        made = run(mode, *EVERY_STEP, *ahead, f"checkpoint.best={{metric: {NAME}, mode: {mode}}}")
        trained = {step: value for step, value in values(made).items() if step > 0}
        wanted = (max if mode == "max" else min)(trained.values())
        best = next(step for step, value in trained.items() if value == wanted)
        assert summary(made)["best"]["step"] == best
        assert CheckpointStore(made / "checkpoints").steps() == sorted({best, 10})


@pytest.mark.slow
def test_of_a_program(recipe: Path, tmp_path: Path) -> None:
    """It ends by patience within its own loop, and again at once where it goes on."""
    run = tmp_path / "run"
    settings = [f"trainer.run_dir={run}", *EVERY_STEP, f"checkpoint.best={{metric: {NAME}, patience: 1}}"]

    async def program() -> int:
        async with open_session([recipe], settings) as session:
            actor = await session.actor()
            steps = 0
            async for prompts in session.prompts():
                batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))
                batch = await session.compute_advantages(batch)
                await session.log(batch, await actor.update_actor(batch))
                steps += 1
        return steps

    steps = asyncio.run(program())
    assert 1 < steps == summary(run)["steps"] < 10
    best = best_of(BestConfig(NAME), *(value for step, value in values(run).items() if step > 0))
    assert (best.step, best.waited) == (steps - 1, 1)
    assert summary(run)["best"] == best.told()
    exported = weights(run)
    shutil.rmtree(run / "export")
    (run / "summary.json").unlink()
    assert asyncio.run(program()) == 0
    assert weights(run) == exported


@pytest.mark.slow
def test_of_held_out_conversations(tmp_path: Path) -> None:
    """A rate that is far too high: the loss rises after the first steps."""
    recipe = {**SFT_RECIPE, "data": {**SFT_RECIPE["data"], "eval": SFT_RECIPE["data"]["train"]}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(recipe))
    run = tmp_path / "run"
    inline(
        "sft", str(tmp_path / "sft.yaml"), f"trainer.run_dir={run}", "trainer.total_steps=20",
        "trainer.evaluation.every=1", "actor.optimizer.lr=0.1", "checkpoint.keep=1",
        "checkpoint.best={metric: eval/sft/loss, patience: 2}",
    )  # fmt: skip
    losses = values(run, "eval/sft/loss")
    best = min(losses, key=lambda step: losses[step])
    assert summary(run)["best"] == {"metric": "eval/sft/loss", "step": best, "value": losses[best]}
    assert summary(run)["steps"] == best + 2 < 20
    assert CheckpointStore(run / "checkpoints").steps() == [best, best + 2]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["checkpoint.best.patience=2"], "has no meaning without checkpoint.best.metric"),
        (["checkpoint.best.metric=reward/mean"], "is no metric of an evaluation"),
        (["checkpoint.best.metric=eval/greedy/response_length"], "set checkpoint.best.mode to max or min"),
        ([f"checkpoint.best.metric={NAME}", "trainer.evaluation.every=null"], "set trainer.evaluation.every"),
        ([f"checkpoint.best.metric={NAME}", "trainer.evaluation.samples=0"], "set trainer.evaluation.s"),
        (["checkpoint.best.metric=eval/sampled/best@8"], "as many answers as trainer.evaluation.samples"),
    ],
)  # fmt: skip
def test_what_cannot_be(recipe: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([str(recipe)], overrides)
    assert said in str(caught.value)


def test_a_metric_that_no_evaluation_has(recipe: Path, tmp_path: Path) -> None:
    arguments = ["checkpoint.best.metric=eval/greedy/score/rihgt", f"trainer.run_dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=full_text("they have eval/greedy/failed_share")):
        train(load([str(recipe)], arguments))
