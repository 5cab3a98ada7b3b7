"""What a policy is shown of the steps before."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rondo.agents.environment_loops import Steps
from rondo.agents.memory import Acted, Memory, Recent, Retrieval, Summary, View, similarities
from rondo.algorithms.advantages.agentic import gigpo
from rondo.core.errors import ConfigError
from rondo.core.types import Trajectory
from rondo.data.rows import rows_from_trajectories
from rondo.environments import Observation
from rondo.rewards.builtin import environment
from tests.agents.own_worlds import ROOMS
from tests.agents.test_environment_episodes import IN_ROOMS, WORLDS, act, play


def acted(number: int) -> Acted:
    return Acted(Observation(ROOMS[number % 4]), "<action>go</action>", ("go",), 0.0)


async def nobody(text: str) -> str:
    raise AssertionError("the policy is not to be asked")


def view(memory: Memory, budget: int, seen: str = ROOMS[3], ask: Any = nobody) -> View:
    return asyncio.run(memory.view(budget, Observation(seen), ask))


def test_the_words_that_texts_share() -> None:
    """BM25 with k1 = 1.5 and b = 0.75, by hand: `kettle` is in one of three texts, `a` in all of them."""
    texts = ["a kettle a", "a cellar", "a old old tree"]  # 3, 2 and 4 words: 3 in the mean
    alone, shared = math.log(1 + 2.5 / 1.5), math.log(1 + 0.5 / 3.5)
    lengths = (1.0, 0.25 + 0.75 * 2 / 3, 0.25 + 0.75 * 4 / 3)
    expected = [
        alone * 2.5 / 2.5 + shared * 2 * 2.5 / (2 + 1.5),
        shared * 2.5 / (1 + 1.5 * lengths[1]),
        shared * 2.5 / (1 + 1.5 * lengths[2]),
    ]
    assert similarities(texts, "A Kettle, a kettle!") == pytest.approx(expected)
    assert similarities(texts, "nothing of the kind") == [0.0] * 3
    assert similarities(["###_", "____"], "###_")[0] > 0


@pytest.mark.parametrize(
    ("memory", "budget", "shown"),
    [
        (Recent, 2, [3, 4]),
        (Recent, 0, []),
        (Retrieval, 1, [3]),  # the very same room
        (Retrieval, 2, [3, 4]),
        (Retrieval, 3, [0, 3, 4]),
        (Retrieval, 0, []),
    ],
)
def test_which_steps_are_shown(memory: type[Memory], budget: int, shown: list[int]) -> None:
    """Of rooms 0 to 4 (4 is 0 again), where room 3 is seen: in their order, and no other after a pickle."""
    made = memory()
    steps = [dataclasses.replace(acted(number), answer=str(number)) for number in range(5)]
    for step in steps:
        made.append(step)
    for each in (made, pickle.loads(pickle.dumps(made))):
        assert view(each, budget) == View(tuple(steps[number] for number in shown))


def test_a_summary_is_written_when_there_are_so_many_more() -> None:
    """The last steps stay as they are, and the notes of before are summed up with the new ones."""
    asked: list[str] = []

    async def ask(text: str) -> str:
        asked.append(text)
        return f" note {len(asked)}\n"

    memory: Memory = Summary(every=2)
    seen = []
    for number in range(6):
        memory = pickle.loads(pickle.dumps(memory))
        memory.append(acted(number))
        shown = view(memory, 1, ask=ask)
        seen.append((shown.notes, [step.seen.text for step in shown.steps]))
    rooms = [*ROOMS, *ROOMS]
    assert seen == [
        ("", rooms[0:1]),
        ("", rooms[0:2]),
        ("note 1", rooms[2:3]),
        ("note 1", rooms[2:4]),
        ("note 2", rooms[4:5]),
        ("note 2", rooms[4:6]),
    ]
    end = "\n\nWrite down in a few sentences what is worth remembering of all this."
    assert asked == [
        f"{rooms[0]}\n> go\n\n{rooms[1]}\n> go{end}",
        f"Notes: note 1\n\n{rooms[2]}\n> go\n\n{rooms[3]}\n> go{end}",
    ]


def remembers(
    memory: Any, answers: list[str], **options: Any
) -> tuple[Trajectory, dict[str, float], list[str]]:
    return play("steps", answers, IN_ROOMS, memory=memory, **options)


def test_the_policys_notes_are_calls_of_the_record() -> None:
    """With no reward of their own; what they lead to is that of the step that they served."""
    answers = [*act("go", "go"), "Kettles!", *act("go")]
    trajectory, values, asked = remembers({"name": "summary", "every": 2}, answers, history=0, max_steps=3)
    assert values["agent/calls"] == len(trajectory.calls) == len(trajectory.rows) == 4
    assert asked[2].count("Go!") == 1
    assert f"Go!\n\n{ROOMS[0]}\n> go\n\n{ROOMS[1]}\n> go\n\nWrite down" in asked[2]
    assert f"Go!\n\nNotes: Kettles!\n\n{ROOMS[2]}\n\nActions: go" in asked[3]
    assert [call.reward for call in trajectory.calls] == [1.0, 2.0, None, 4.0]
    assert [call.anchor for call in trajectory.calls] == [ROOMS[0], ROOMS[1], f"memory: {ROOMS[2]}", ROOMS[2]]
    assert environment(trajectory.prompt, trajectory) == 7.0
    assert values["environment/steps/Rooms"] == 3
    other, _, _ = remembers({"name": "summary", "every": 2}, answers, history=0, max_steps=3)
    pair = [
        dataclasses.replace(trajectory, reward=1.0),
        dataclasses.replace(other, reward=0.0, trajectory_id="other", sample_index=3),
    ]
    batch = rows_from_trajectories(pair, of_agents=True)
    names = ("reward", "step_reward", "step_index", "group_id", "anchor_id")
    columns = {name: torch.from_numpy(batch.scalars(name).copy()) for name in names}
    numbers = np.unique(batch.scalars("trajectory_id").astype(str), return_inverse=True)[1]
    columns["trajectory_id"] = torch.from_numpy(numbers)
    columns["step_reward"][4:] *= 0.0
    assert columns["step_reward"].isnan().tolist() == 2 * [False, False, True, False]
    made = gigpo(**columns, gamma=0.5, normalize_std=False)
    # The returns of the first: 1 + (2 + 4/2)/2, 2 + 4/2, the note's as the next step's, and 4; half of
    # them is above the mean of both. The outcome is half above the mean, too.
    assert made[:4].tolist() == [0.5 + 1.5, 0.5 + 2.0, 0.5 + 2.0, 0.5 + 2.0]
    assert [flags.tolist() for flags in batch.rows("turn_flags")][:4] == [[0], [0], [8], [4]]


def test_a_note_that_no_step_follows_is_credited_with_nothing() -> None:
    """Not with the outcome, though it is the last row: the context was full behind it."""
    answers = [*act("go", "go"), "Kettles!"]
    trajectory, _, _ = remembers({"name": "summary", "every": 2}, answers, history=0, max_steps=3)
    cut = dataclasses.replace(trajectory, calls=trajectory.calls[:3], rows=trajectory.rows[:3], reward=3.0)
    batch = rows_from_trajectories([cut])
    assert batch.scalars("step_reward").tolist()[:2] == [1.0, 2.0]
    assert np.isnan(batch.scalars("step_reward")[2])


def test_a_step_that_is_retrieved() -> None:
    _, _, asked = remembers("retrieval", act("go", "go", "go", "go"), history=1, max_steps=4)
    assert f"Go!\n\n{ROOMS[0]}\n> go\n\n{ROOMS[3]}\n\nActions" in asked[3]


def test_a_memory_of_ones_own() -> None:
    own = {"name": f"{WORLDS}:Newest", "times": 2}
    _, _, asked = remembers(own, act("go", "go"), max_steps=2)
    assert f"Go!\n\nNotes: mine\n\n{ROOMS[0]}\n> go\n\n{ROOMS[0]}\n> go\n\n{ROOMS[1]}" in asked[1]


def test_a_memory_that_asks_for_more_than_fits() -> None:
    """Ends the episode with what it has earned."""
    trajectory, values, _ = remembers(f"{WORLDS}:Rambles", act("go"))
    assert (trajectory.outcome, trajectory.finish_reason) == ("scored", "length")
    assert (values["agent/full_share"], environment(trajectory.prompt, trajectory)) == (1, 1.0)


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("recnt", "did you mean 'recent'"),
        ({"name": "summary", "evry": 2}, "did you mean 'every'"),
        ({"name": "summary", "every": 0}, "every must be at least 1, got 0"),
        ({"every": 2}, "needs a name"),
        (f"{WORLDS}:Newest", "needs the option 'times'"),
        (f"{WORLDS}:Rooms", "has no method append"),
    ],
)
def test_a_memory_that_there_is_not(memory: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Steps(memory=memory)
