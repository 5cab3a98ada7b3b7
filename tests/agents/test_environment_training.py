"""Training in environments: a tiny model, real worlds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rondo.algorithms.advantages.agentic import alike
from rondo.core.errors import DataError, RewardError, WorkerError
from rondo.tracking.trajectories import read_trajectories, written
from rondo.trainers.program.advantages import AdvantageStage
from tests.agents.test_environment_episodes import WORLDS
from tests.trainers.conftest import metrics, weights
from tests.trainers.test_journal import assert_equal, broken_off

LAKES = "{type: function, task: rondo.environments.episodes, options: {environment: frozen_lake, size: 8%s}}"
IN_LAKES = (
    f"data.train=[{LAKES % ''}]",
    f"data.eval=[{LAKES % ', held_out: true'}]",
    "rollout.environments=[{name: frozen_lake, size: 2, holes: 0.4}]",
    "reward.functions=[environment, {name: success, weight: 0.0}]",
    "reward.accuracy=success",
    "data.max_prompt_tokens=400",
    "trainer.evaluation.every=2",
)


BY_STEPS = (
    *IN_LAKES,
    f"rollout.agent={{name: steps, max_steps: 4, history: 0, action: '{WORLDS}:by_length', "
    "invalid_penalty: 0.5}",
    "algorithm.advantage={name: gigpo, gamma: 0.9, normalize_std: false}",
)


def by_hand(rows: dict[str, list[Any]], gamma: float) -> np.ndarray:
    """GiGPO's advantages of a step's rows without division by deviations, from the definition."""
    out = np.zeros(len(rows["reward"]))
    returns = np.zeros(len(out))
    groups = list(zip(rows["group_id"], rows["anchor_id"], strict=True))
    for i, (name, step) in enumerate(zip(rows["trajectory_id"], rows["step_index"], strict=True)):
        returns[i] = sum(
            gamma ** (later - step) * reward
            for other, later, reward in zip(
                rows["trajectory_id"], rows["step_index"], rows["step_reward"], strict=True
            )
            if other == name and later >= step
        )
    for i, (group, anchor) in enumerate(groups):
        episodes = {
            name: reward
            for name, reward, one in zip(rows["trajectory_id"], rows["reward"], rows["group_id"], strict=True)
            if one == group
        }
        alike = [returns[j] for j, other in enumerate(groups) if other == (group, anchor)]
        out[i] = rows["reward"][i] - np.mean(list(episodes.values())) + returns[i] - np.mean(alike)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("similarity", [1.0, 0.6])
def test_gigpo_on_steps_of_real_episodes(
    run: Any, monkeypatch: pytest.MonkeyPatch, similarity: float
) -> None:
    """Its groups are the steps of one prompt's samples that saw the same, or what is like it; its advantages
    those of its definition.
    """
    seen: list[np.ndarray] = []
    original = AdvantageStage.__call__

    async def spy(self: AdvantageStage, batch: Any, step: Any) -> Any:
        made = await original(self, batch, step)
        names = ("group_id", "anchor_id", "trajectory_id", "step_index", "step_reward", "reward")
        rows = {name: made.index.scalars(name).tolist() for name in names}
        texts = (await made.fetch(["anchor"])).scalars("anchor").tolist()
        if similarity < 1:  # two lakes of 2 × 2 and a line's end between: 2 · 3 / 10 where two cells differ
            ids = np.array(rows["anchor_id"]), made.index.scalars("row_id")
            other = alike(ids[0], texts, np.array(rows["group_id"]), ids[1], similarity)
            assert len(set(other.tolist())) < len(set(rows["anchor_id"]))
            rows["anchor_id"] = other.tolist()
        else:
            pairs = set(zip(rows["anchor_id"], texts, strict=True))
            assert len(pairs) == len(set(texts)) == len(set(rows["anchor_id"]))
        assert len(set(zip(rows["group_id"], rows["anchor_id"], strict=True))) < len(rows["reward"])
        np.testing.assert_allclose(made.index.scalars("advantages"), by_hand(rows, 0.9), atol=1e-5)
        seen.append(made.index.scalars("advantages"))
        return made

    monkeypatch.setattr(AdvantageStage, "__call__", spy)
    folder = run("whole", *BY_STEPS, f"algorithm.advantage.similarity={similarity}")
    assert len(seen) == 2
    assert any(np.abs(advantages).max() > 0.1 for advantages in seen)
    for line in metrics(folder)[1:]:
        assert line["rollout/log_prob_gap"] < 1e-5
        assert 0 < line["environment/invalid_share/frozen_lake"] < 1
        assert line["environment/steps/frozen_lake"] == line["rollout/rows_per_trajectory"]
        assert line["reward/mean"] == pytest.approx(line["environment/return/frozen_lake"])
        assert line["reward/score/success"] == line["environment/success/frozen_lake"]
    shown = read_trajectories(folder)[0]
    assert shown.said.count("[context] ") == shown.rows > 1
    assert "[action] " in written(shown)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["recent", "{name: summary, every: 1}"])
def test_a_run_that_was_broken_off_begins_its_episodes_anew(run: Any, memory: str) -> None:
    """With the weights of one that went through; so does one that follows its journal."""
    settings = (
        *BY_STEPS,
        f"rollout.agent.memory={memory}",
        "rollout.max_tokens=24",
        "trainer.max_staleness=1",
        "trainer.on_update=finish",
        "checkpoint.every=1",
    )
    whole = run("whole", *settings)
    with broken_off(2), pytest.raises(WorkerError, match="broken off"):
        run("parts", *settings)
    assert weights(run("parts", *settings)) == weights(whole)
    moving = (*settings, "trainer.on_update=resume", "rollout.max_concurrent=5")
    first = run("moving", *moving)
    assert_equal(first, run("again", *moving, f"trainer.replay={first}"))


@pytest.mark.slow
def test_grpo_in_one_context(run: Any) -> None:
    """All rows are what the engine got: the trainer's log-probs are its own."""
    loop = "rollout.agent={name: concatenated, max_steps: 3}"
    folder = run("grpo", *IN_LAKES, loop, "rollout.max_tokens=150")
    lines = metrics(folder)[1:]
    assert all(line["rollout/log_prob_gap"] < 1e-5 for line in lines)
    assert all(line["rollout/rows_per_trajectory"] == 1 for line in lines)
    assert {"eval/greedy/score/success", "eval/sampled/score/success"} <= set(lines[-1])
    rows = pq.read_table(folder / "rollouts/step-000002.parquet").to_pydict()
    assert all(kinds[:3] == [0, 2, 0] for kinds in rows["turn_kinds"] if len(kinds) > 2)
    assert [len(flags) for flags in rows["turn_flags"]] == [len(stops) for stops in rows["turn_stops"]]


@pytest.mark.slow
def test_two_environments_in_one_run(run: Any) -> None:
    """Prompts by the weights of their sources; metrics of each environment, and an evaluation of each set,
    one of sizes that no training has; the samples of a prompt begin alike.
    """
    lakes = LAKES.removesuffix("}")
    bandits = lakes.replace("frozen_lake", "bandit") % ""
    held_out = lakes.replace("8%s", "2, held_out: true")  # there are no more
    larger = lakes.replace("8%s", "4, held_out: true, task: {size: 3}")
    folder = run(
        "both",
        *IN_LAKES,
        f"data.train=[{lakes % ''}, name: lakes, weight: 3}}, {bandits}, name: bandits, weight: 1}}]",
        f"data.eval=[{held_out}, name: held_out}}, {larger}, name: larger}}, {bandits}, name: bandits}}]",
        "rollout.environments=[{name: frozen_lake, size: 2, holes: 0.4}, {name: bandit, pulls: 2}]",
        f"rollout.agent={{name: steps, max_steps: 4, history: 0, action: '{WORLDS}:by_length'}}",
    )
    names = {"lakes": "frozen_lake", "bandits": "bandit"}
    for step, line in enumerate(metrics(folder)[1:], 1):
        rows = pq.read_table(folder / f"rollouts/step-{step:06d}.parquet").to_pylist()
        first = [row for row in rows if row["step_index"] == 0]
        prompts = {row["prompt_id"]: row["source"] for row in first}
        assert sorted(prompts.values()) == ["bandits", "lakes", "lakes", "lakes"]
        for source, name in names.items():
            own = [row for row in first if row["source"] == source]
            assert line[f"environment/return/{name}"] == np.mean([row["reward"] for row in own])
            steps = sum(row["source"] == source for row in rows) / len(own)
            assert line[f"environment/steps/{name}"] == steps
            assert line[f"environment/success/{name}"] == np.mean([row["score/success"] for row in own])
        for prompt_id in prompts:
            begun = [row["prompt_ids"] for row in first if row["prompt_id"] == prompt_id]
            assert len(begun) == 4
            assert all(ids == begun[0] for ids in begun)
    answers = (folder / "evaluations/step-000002.jsonl").read_text().splitlines()
    records = [json.loads(answer) for answer in answers]
    last = metrics(folder)[-1]
    for source, size in (("held_out", 2), ("larger", 4), ("bandits", 8)):
        own = [record for record in records if record["source"] == source]
        assert len(own) == size
        assert last[f"eval/greedy/reward/{source}"] == pytest.approx(np.mean([one["reward"] for one in own]))
        scores = [one["scores"]["success"] for one in own]
        assert last[f"eval/greedy/score/success/{source}"] == pytest.approx(np.mean(scores))
        wide = {"held_out": 2, "larger": 3, "bandits": 0}[source]
        lines = [re.findall(r"(?m)^[PO_GX]{2,}$", one["transcript"]) for one in own]
        assert {len(cells) for found in lines for cells in found} == ({wide} if wide else set())


@pytest.mark.parametrize("which", ["train", "eval"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            "{prompt: Go, seed: 1}",
            "column 'environment' is None, and rollout.environments has frozen_lake, bandit",
        ),
        ("{prompt: Go, environment: sokoban}", "column 'environment' is 'sokoban'"),
        ("{prompt: Go, environment: bandit, seed: x}", "column 'seed' is 'x', no integer"),
    ],
)
def test_rows_of_no_environment_are_found_at_the_start(run: Any, which: str, row: str, said: str) -> None:
    rows = f"{{type: function, name: mine, task: '{WORLDS}:one_row', options: {{row: {row}}}}}"
    two = "rollout.environments=[frozen_lake, bandit]"
    with pytest.raises(DataError, match=f"mine.*{said}"):
        run("none", *IN_LAKES, two, f"data.{which}=[{rows}]", "trainer.evaluation={before: false}")


def test_episodes_whose_failure_stops_the_run_are_kept(run: Any, tmp_path: Path) -> None:
    """Though not one of their groups can be trained on: as those of the step that never was."""
    rows = f"{{environment: '{WORLDS}:Breaks', prompt: Go, size: 8}}"
    settings = (
        f"data.train=[{{type: function, task: rondo.environments.episodes, options: {rows}}}]",
        f"rollout.environments=[{{name: '{WORLDS}:Breaks', what: starts}}]",
        "trainer.evaluation.before=false",
    )
    with pytest.raises(RewardError, match="environment_error"):
        run("down", *settings)
    kept = read_trajectories(tmp_path / "down", step=1, failed=True, number=100)
    assert len(kept) > 4
    assert {one.outcome for one in kept} == {"environment_error"}
    assert all("reset raised OSError: no such machine" in written(one) for one in kept)
