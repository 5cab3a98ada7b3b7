"""Questions of reasoning_gym, answered more than once."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from rondo.core.arithmetic import reads_literals
from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo_worlds.reasoning_gym_adapter import ReasoningGym
from tests.messages import full_text


def test_the_right_answer_ends_it() -> None:
    for dataset in ("chain_sum", "tower_of_hanoi", "mini_sudoku", "countdown"):
        world = ReasoningGym(dataset=dataset)
        for seed in range(4):
            seen = world.reset(seed)
            assert seen.text == world.state()["question"]
            result = world.step(world.state()["answer"])
            assert (result.reward, result.done, result.success) == (1.0, True, True)


def test_rewards_of_tries_add_up_to_the_best_score(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ReasoningGym(dataset="chain_sum", tries=4, discount=0.5)
    question = world.reset(0).text
    scores = {"a": 0.25, "b": 0.0, "c": 0.75, "d": 1.0, "e": 0.5}
    monkeypatch.setattr(world._scorer, "score_answer", lambda answer, entry: scores[answer])
    results = [world.step(answer) for answer in "abcd"]
    assert [result.reward for result in results] == [0.25, 0.0, 0.5**2 * 0.5, 0.5**3 * 0.25]
    assert [result.done for result in results] == [False, False, False, True]
    assert [result.success for result in results] == [False, False, False, True]
    assert results[1].observation.text == (
        f"{question}\n\nAnswer: a\nScore: 0.25\nAnswer: b\nScore: 0\nTries left: 2"
    )
    world.reset(0)
    monkeypatch.setattr(world._scorer, "score_answer", lambda answer, entry: scores[answer])
    last = [world.step(answer) for answer in "aebe"][-1]
    assert (last.reward, last.done, last.success) == (0.0, True, False)


def test_a_task_has_its_own_options_and_questions_of_odd_seeds_are_held_out() -> None:
    world = ReasoningGym(dataset="chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    questions: dict[int, set[str]] = {0: set(), 1: set()}
    for seed in range(200):
        questions[seed % 2].add(world.reset(seed).text)
    assert 40 < len(questions[0]) < 100  # some come again
    assert len(questions[1]) == 100  # all of the half, each once
    with pytest.raises(EnvironmentFailedError, match="differs from the 100 of the held-out"):
        world.reset(201)
    assert not questions[0] & questions[1]
    longer = world.reset(0, {"min_terms": 7, "max_terms": 7}).text
    assert longer.count("+") + longer.count("-") == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "min_terms": -1}, full_text("chain_sum cannot be made")),
        ({"dataset": "chain_sum", "terms": 3}, "chain_sum cannot be made with .*terms"),
        ({"dataset": "chain_sum", "tries": 0}, "needs tries from 1"),
        ({"dataset": "chain_sum", "discount": 0.0}, "a discount above 0"),
    ],
)
def test_what_it_cannot_be_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReasoningGym(**options)


def test_an_answer_is_read_and_never_run(tmp_path: Path) -> None:
    """Some of the package's tasks call `eval` on an answer. A list is still read as one."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    source = inspect.getsource
    tasks = sorted(name for name, (kind, _) in DATASETS.items() if "eval(" in source(kind.score_answer))
    assert {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"} <= set(tasks)
    marker = tmp_path / "marker"
    attack = f"[open({str(marker)!r}, 'w')]"
    for task in tasks:
        dataset = reads_literals(reasoning_gym.create_dataset(task, seed=0, size=1))
        for answer in (attack, "exit(3)", "__import__('os')._exit(3)"):
            assert dataset.score_answer(answer, dataset[0]) == 0.0, task
        world = ReasoningGym(dataset=task)
        world.reset(0)
        world.step(attack)
    assert not marker.exists()
    spiral = reads_literals(reasoning_gym.create_dataset("spiral_matrix", seed=0, size=1))
    numbers = spiral[0]["answer"].split()
    assert spiral.score_answer(str(list(map(int, numbers))), spiral[0]) > 0
