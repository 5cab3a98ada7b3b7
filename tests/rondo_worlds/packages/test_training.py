"""A tiny model acts in environments of other packages, as a run has them."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.tracking.trajectories import read_trajectories
from tests.agents.conftest import run as run
from tests.agents.test_environment_episodes import WORLDS
from tests.installed import needs
from tests.trainers.conftest import metrics
from tests.trainers.conftest import recipe as recipe

needs("alfworld", "textworld")
ROWS = "{type: function, task: rondo.environments.episodes, options: {environment: %s, size: 4}}"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("alfworld", "others: 0", "Your task is to: "),
        ("textworld", "challenge: tw-coin_collector, level: 2", "Goal: "),
    ],
)
def test_gigpo_takes_a_step(run: Any, name: str, options: str, says: str) -> None:
    """No episode fails, and every one says what is to be done."""
    folder = run(
        name,
        f"data.train=[{ROWS % name}]",
        "data.eval=[]",
        "data.batch_size=2",
        f"rollout.environments=[{{name: {name}, {options}, timeout_seconds: 300}}]",
        f"rollout.agent={{name: steps, max_steps: 3, history: 0, action: '{WORLDS}:by_length'}}",
        "reward.functions=[environment]",
        "algorithm.advantage={name: gigpo, gamma: 0.9, normalize_std: false}",
        "data.max_prompt_tokens=900",
        "trainer.total_steps=1",
        "trainer.evaluation={before: false, after: false, every: null}",
    )
    (step,) = metrics(folder)
    assert step[f"environment/failures/{name}"] == 0
    assert step[f"environment/steps/{name}"] > 1
    trajectories = list(read_trajectories(folder))
    assert trajectories
    assert all(says in str(trajectory) for trajectory in trajectories)
