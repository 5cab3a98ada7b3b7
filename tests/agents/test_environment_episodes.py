"""Episodes in environments: real worlds, and a policy that says what a script says."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rondo.agents.environment_loops import (
    LOOPS,
    tagged_action,
    tagged_actions,
    thought_action,
    thought_actions,
    write_prompt,
)
from rondo.agents.external import ExternalAgent, agent_of
from rondo.agents.memory import MEMORIES, Acted
from rondo.agents.worlds import Worlds, check_reads
from rondo.chat import decode, encode_prompt
from rondo.config.schema import EnvironmentConfig, FunctionConfig, RolloutConfig, ToolConfig
from rondo.core.errors import ConfigError, DataError
from rondo.core.types import Prompt, SamplingParams, Trajectory
from rondo.data.rows import rows_from_trajectories
from rondo.environments import Observation
from rondo.environments.registry import load_environments
from rondo.rewards.builtin import environment, success
from rondo_worlds.frozen_lake import way_to_goal
from tests.agents.own_worlds import ROOMS, Counted, Meets, takes_both
from tests.agents.scripted import episode, saying
from tests.serving.conftest import STOPS, TOKENIZER

WORLDS = "tests/agents/own_worlds.py"
LAKE = EnvironmentConfig("frozen_lake", options={"size": 3})


def worlds(*configs: EnvironmentConfig) -> Worlds:
    return Worlds(configs)


def prompt(**fields: Any) -> Prompt:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go!"})
    return Prompt(5, "train/0/5", "train", encode_prompt(TOKENIZER, messages), fields, messages)


def play(
    loop: str, answers: Sequence[str], config: EnvironmentConfig = LAKE, **options: Any
) -> tuple[Trajectory, dict[str, float], list[str]]:
    """An episode of seed 0, its metrics, and what the policy was asked."""
    policy = saying(*answers)
    agent = FunctionConfig(loop, options)
    trajectory, values = episode(policy, agent, worlds=worlds(config), prompt=prompt(seed=0))
    return trajectory, values, policy.asked  # type: ignore[attr-defined]


def act(*actions: str) -> list[str]:
    return [f"<action>{action}</action>" for action in actions]


def way(seed: int = 0) -> list[str]:
    (choice,) = load_environments([LAKE])
    world = choice.make()
    world.reset(seed, None)
    found = way_to_goal(tuple(world.state()["level"]), (0, 0))
    assert found is not None
    return found


def test_the_concatenated_loop_is_one_row() -> None:
    moves = way()
    trajectory, values, asked = play("concatenated", act(*moves))
    assert trajectory.outcome == "scored"
    (row,) = trajectory.rows
    assert [turn.kind for turn in row.turns] == ["policy", "environment"] * (len(moves) - 1) + ["policy"]
    policy = [turn for turn in row.turns if turn.kind == "policy"]
    assert [turn.reward for turn in policy] == [0.0] * (len(moves) - 1) + [1.0]
    assert [turn.flags for turn in policy] == [()] * (len(moves) - 1) + [("success",)]
    assert policy[0].anchor.startswith("P")
    assert len({turn.anchor for turn in policy}) == len(moves)
    assert "system\nBe brief." in asked[0]
    assert f"user\nGo!\n\n{policy[0].anchor}\n\nActions: up, down, left, right" in asked[0]
    assert asked[1].startswith(asked[0])
    assert asked[1].count("Go!") == 1
    expected = {
        "agent/calls": len(moves),
        "environment/steps/frozen_lake": len(moves),
        "environment/invalid_share/frozen_lake": 0,
        "environment/return/frozen_lake": 1,
        "environment/success/frozen_lake": 1,
        "environment/truncated_share/frozen_lake": 0,
        "environment/failures/frozen_lake": 0,
    }
    assert {name: values[name] for name in expected} == expected
    assert 0 < values["environment/seconds/frozen_lake"]
    assert 0 < values["environment/seconds_share"] < 1
    assert (environment(trajectory.prompt, trajectory), success(trajectory.prompt, trajectory)) == (1.0, 1.0)


def test_the_step_loop_is_a_row_each() -> None:
    """With what the environment gave as rewards, and what was to be seen as anchors, of rows."""
    moves = way()
    trajectory, _, asked = play("steps", act("up", *moves), history=1)
    assert len(trajectory.rows) == len(moves) + 1
    batch = rows_from_trajectories([dataclasses.replace(trajectory, reward=1.0)], of_agents=True)
    assert batch.scalars("step_index").tolist() == list(range(len(moves) + 1))
    assert batch.scalars("step_reward").tolist() == [0.0] * len(moves) + [1.0]
    anchors = batch.scalars("anchor_id").tolist()
    assert anchors[0] == anchors[1]  # up was into the wall
    assert len(set(anchors)) == len(moves)
    assert [flags.tolist() for flags in batch.rows("turn_flags")] == [[0]] * len(moves) + [[2]]
    assert "> " not in asked[0]
    lake = trajectory.rows[0].turns[0].anchor
    assert f"Go!\n\n{lake}\n> up\n\n{lake}\n\nActions" in asked[1]
    assert all(text.count("> ") == 1 for text in asked[1:])
    assert all("Go!" in text for text in asked)
    for row, text in zip(trajectory.rows, asked, strict=True):
        assert decode(TOKENIZER, row.prompt_ids) == text


@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_an_invalid_action_is_the_policys(loop: str) -> None:
    """It is told, counted, costs what it is to cost, and nothing happens."""
    moves = way()
    answers = ["I would rather not.", *act("jump", *moves)]
    trajectory, values, asked = play(loop, answers, invalid_penalty=0.25)
    turns = [turn for row in trajectory.rows for turn in row.turns if turn.kind == "policy"]
    assert [turn.reward for turn in turns] == [-0.25, -0.25, *[0.0] * (len(moves) - 1), 1.0]
    assert [turn.flags for turn in turns[:3]] == [("invalid",), ("invalid",), ()]
    assert turns[0].anchor == turns[1].anchor == turns[2].anchor
    assert "That was no action." in asked[1]
    assert values["environment/invalid_share/frozen_lake"] == 2 / len(answers)
    assert environment(trajectory.prompt, trajectory) == 0.5
    assert "[action] invalid action · reward -0.25" in trajectory.transcript


@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_steps_are_bounded(loop: str) -> None:
    trajectory, values, asked = play(loop, [*act("up", "up"), "never asked"], max_steps=2)
    assert (trajectory.outcome, trajectory.finish_reason, len(asked)) == ("scored", "stop", 2)
    assert trajectory.turns[-1].flags == ("truncated",)
    assert values["environment/truncated_share/frozen_lake"] == 1
    assert success(trajectory.prompt, trajectory) == 0


def test_the_transcript_shows_what_was_seen_said_and_done() -> None:
    """And with what each context began, of a row what is in it."""
    trajectory, _, _ = play("steps", act("up", "stay"), max_steps=2)
    lake = trajectory.rows[0].turns[0].anchor
    begun = [decode(TOKENIZER, row.prompt_ids, special=True).strip() for row in trajectory.rows]
    assert all(f"<|im_start|>user\nGo!\n\n{lake}" in text for text in begun)
    assert trajectory.transcripts == (
        f"[context] {begun[0]}\n[policy] <action>up</action>\n[action] up · reward 0",
        f"[context] {begun[1]}\n[policy] <action>stay</action>\n[action] invalid action · reward 0\n"
        f"[environment] {lake}",
    )
    assert rows_from_trajectories([dataclasses.replace(trajectory, reward=0.0)], of_agents=True).scalars(
        "transcript"
    ).tolist() == list(trajectory.transcripts)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("starts", "reset raised OSError: no such machine"),
        ("dies", "step raised OSError: the machine is gone"),
        ("hangs", "step took longer than timeout_seconds = 0.2"),
        ("exits", "step raised EscapeError: SystemExit"),
        ("empty", "the observation is empty"),
        ("picture", "the picture of an observation is an array [2, 2] of float32, not [H, W, 3] uint8"),
        ("nothing", "step returns a StepResult, not NoneType"),
    ],
)
@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_an_environment_that_is_down_is_no_reward_of_0(loop: str, what: str, why: str) -> None:
    seconds = 0.2 if what == "hangs" else 30.0
    config = EnvironmentConfig(f"{WORLDS}:Breaks", timeout_seconds=seconds, options={"what": what})
    trajectory, values, _ = play(loop, act("go", "go", "go"), config)
    assert trajectory.outcome == "environment_error"
    assert trajectory.failure.startswith(f"the environment Breaks: {why}")
    assert np.isnan(trajectory.reward)
    assert values["environment/failures/Breaks"] == 1
    assert "environment/success/Breaks" not in values
    if what == "dies":  # what was said before is there to be read
        assert "[action] go · reward 1" in trajectory.transcript


def test_the_samples_of_a_prompt_begin_alike() -> None:
    """Else their rewards could not be compared."""
    shared = worlds(EnvironmentConfig(f"{WORLDS}:Moody"))
    for outcome in ("scored", "environment_error"):
        trajectory, _ = episode(
            saying(*act("go", "go", "go")),
            FunctionConfig("steps", {"max_steps": 1}),
            worlds=shared,
            prompt=prompt(seed=0),
        )
        assert trajectory.outcome == outcome
    assert "another first observation" in trajectory.failure


def test_seeds_follow_from_the_prompt() -> None:
    def first(asked: Prompt) -> str:
        policy = saying(*act("up"))
        episode(policy, FunctionConfig("steps", {"max_steps": 1}), worlds=worlds(LAKE), prompt=asked)
        return str(policy.asked[0])  # type: ignore[attr-defined]

    assert first(prompt(seed=1)) == first(prompt(seed=1)) != first(prompt(seed=2))
    assert first(prompt()) == first(prompt())
    assert first(prompt()) != first(dataclasses.replace(prompt(), prompt_id="train/1/5"))
    assert len(first(prompt(seed=1, task={"size": 6}))) > len(first(prompt(seed=1)))


def test_which_of_several_environments() -> None:
    both = worlds(LAKE, EnvironmentConfig("bandit"))
    agent = FunctionConfig("steps", {"max_steps": 1})
    _, values = episode(saying(*act("arm 1")), agent, worlds=both, prompt=prompt(environment="bandit"))
    assert values["environment/steps/bandit"] == 1
    assert "environment/steps/frozen_lake" not in values
    for fields in ({}, {"environment": "sokoban"}, {"environment": "bandit", "seed": "7"}):
        with pytest.raises(DataError, match=r"column '(environment|seed)'"):
            episode(saying(), agent, worlds=both, prompt=prompt(**fields))


@pytest.mark.parametrize("history", [0, 1, 3, 4])
def test_the_step_loop_shows_its_last_steps(history: int) -> None:
    _, _, asked = play("steps", act("up", *way()), history=history)
    assert [text.count("> ") for text in asked] == [min(step, history) for step in range(len(asked))]
    assert len(asked) > 4


def test_the_reward_of_several_steps_in_one_row_is_their_sum() -> None:
    pulls = worlds(EnvironmentConfig("bandit", options={"pulls": 5}))
    sure = prompt(environment="bandit", task=[1.0, 0.0, 0.0])
    answers = act(*(f"arm {number}" for number in (1, 2, 1, 1, 3)))
    trajectory, _ = episode(saying(*answers), FunctionConfig("concatenated"), worlds=pulls, prompt=sure)
    assert len(trajectory.rows) == 1
    batch = rows_from_trajectories([dataclasses.replace(trajectory, reward=3.0)], of_agents=True)
    assert batch.scalars("step_reward").tolist() == [3.0]


IN_ROOMS = EnvironmentConfig(f"{WORLDS}:Rooms")  # worth 1, 2, 4, …


@pytest.mark.parametrize("loop", ["concatenated", "steps"])
def test_several_actions_of_one_answer(loop: str) -> None:
    """Are carried out up to what is no action; the turn has the sum of their rewards, and the next one sees
    what the last one led to.
    """
    answers = [
        "".join(act("go", "GO", "go", "go")),
        "".join(act("go", "fly", "go")),
        "".join(act("go", "go")),
    ]
    trajectory, values, asked = play(
        loop, answers, IN_ROOMS, actions_per_turn=3, invalid_penalty=0.25, max_steps=6
    )
    turns = [turn for row in trajectory.rows for turn in row.turns if turn.kind == "policy"]
    assert [turn.reward for turn in turns] == [1.0 + 2.0 + 4.0, 8.0 - 0.25, 16.0]
    assert [turn.flags for turn in turns] == [(), ("invalid",), ("truncated",)]
    assert [turn.anchor for turn in turns] == [ROOMS[0], ROOMS[3], ROOMS[0]]
    assert turns[1].note == "[action] go · reward 8\n[action] invalid action · reward -0.25"
    assert (values["agent/calls"], values["environment/steps/Rooms"]) == (3, 6)
    assert environment(trajectory.prompt, trajectory) == 30.75
    if loop == "steps":
        assert f"{ROOMS[0]}\n> go, go, go\n\n{ROOMS[3]}\n> go. That was no action.\n\n{ROOMS[0]}" in asked[2]
    else:
        assert f"user\n{ROOMS[3]}" in asked[1]
        assert f"user\nThat was no action.\n{ROOMS[0]}" in asked[2]


def test_an_episode_may_end_within_an_answer() -> None:
    moves = way()
    answer = "".join(act(*moves, "up", "up"))
    trajectory, values, _ = play("steps", [answer], actions_per_turn=9)
    assert (len(trajectory.calls), values["environment/steps/frozen_lake"]) == (1, len(moves))
    assert trajectory.turns[-1].flags == ("success",)


def test_an_action_function_may_return_several() -> None:
    several = {"action": f"{WORLDS}:as_many_as_words", "max_steps": 4}
    trajectory, _, _ = play("steps", ["a b", "a b c"], IN_ROOMS, actions_per_turn=2, **several)
    assert [call.reward for call in trajectory.calls] == [1.0 + 2.0, 4.0 + 8.0]
    alone, _, _ = play("steps", ["a b", "a b c", "", "a"], IN_ROOMS, **several)
    assert [call.reward for call in alone.calls] == [1.0, 2.0, 0.0, 4.0]


def test_a_full_context_ends_the_episode_and_is_scored() -> None:
    """In one context as in prompts that grow with the memory."""
    for loop, options in (("concatenated", {}), ("steps", {"history": 60, "max_steps": 60})):
        large = worlds(EnvironmentConfig("frozen_lake", options={"size": 8}))
        agent = FunctionConfig(loop, options)
        trajectory, values = episode(
            saying(*act(*["up"] * 60)), agent, worlds=large, prompt=prompt(seed=0), max_tokens=400
        )
        assert (trajectory.outcome, trajectory.finish_reason) == ("scored", "length")
        assert 3 < values["environment/steps/frozen_lake"] < 60
        assert values["environment/truncated_share/frozen_lake"] == 1
        assert values["agent/full_share"] == 1
        assert environment(trajectory.prompt, trajectory) == 0


def test_a_loop_of_ones_own_may_ask_twice_and_act_twice() -> None:
    """All calls of a step have its anchor; the last one is credited with all that came before the next."""
    agent = FunctionConfig(f"{WORLDS}:thinks_first")
    policy = saying("Hmm.", "<action>up</action> twice", "Hmm.", "<action>left</action>")
    trajectory, _ = episode(policy, agent, worlds=worlds(LAKE), prompt=prompt(seed=0))
    assert trajectory.outcome == "scored"
    turns = [turn for row in trajectory.rows for turn in row.turns if turn.kind == "policy"]
    assert [turn.reward for turn in turns] == [None, 0.0, None, 0.0]
    assert len({turn.anchor for turn in turns}) == 1


def together(shared: Worlds, seeds: Sequence[int]) -> list[Trajectory]:
    """Episodes of one step, all at the same time."""
    policy = saying(*act(*["go"] * len(seeds)))

    async def main() -> list[Trajectory]:
        agent = ExternalAgent(
            FunctionConfig("steps", {"max_steps": 1}), TOKENIZER, max_context=2000, worlds=shared
        )
        sampling = SamplingParams(1000, stop_token_ids=STOPS)
        try:
            return await asyncio.gather(
                *(
                    agent(prompt(seed=seed), policy, sampling=sampling, sample_index=i, run_seed=0)
                    for i, seed in enumerate(seeds)
                )
            )
        finally:
            await asyncio.to_thread(agent.close)

    return asyncio.run(main())


def test_environments_run_beside_the_loop_and_not_all_at_once() -> None:
    """40 episodes whose steps wait until 32 are in one: no more ever are, and none blocks the loop."""
    Meets.begin(32)
    shared = worlds(EnvironmentConfig(Meets))  # type: ignore[arg-type]  # from Python the class itself
    made = together(shared, [0] * 40)
    assert [one.outcome for one in made] == ["scored"] * 40
    assert Meets.most == 32
    assert not [t for t in threading.enumerate() if t.name == "rondo-Meets"]


def test_no_more_episodes_are_open_than_may_be() -> None:
    """12 episodes whose steps wait until three are in one: three are, and the others before their reset."""
    Meets.begin(3)
    made = together(worlds(EnvironmentConfig(Meets, max_open=3)), [0] * 12)  # type: ignore[arg-type]
    assert [one.outcome for one in made] == ["scored"] * 12
    assert Meets.most == 3


def test_an_episode_that_does_not_begin_leaves_its_seat() -> None:
    Counted.open = Counted.most = 0
    made = together(worlds(EnvironmentConfig(Counted, max_open=1)), range(8))  # type: ignore[arg-type]
    assert [one.outcome for one in made] == ["scored", "environment_error"] * 4
    assert (Counted.open, Counted.most) == (0, 1)


# ---- prompts and actions


def test_what_is_written_by_default() -> None:
    seen = Observation("a lake", ("up", "down"))
    memory = [Acted(Observation("a shore"), "<action>up</action>", ("up",), 0.0)]
    assert write_prompt("Go!", memory, seen) == "Go!\n\na shore\n> up\n\na lake\n\nActions: up, down"
    assert write_prompt("", [], Observation("a lake")) == "a lake"


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("I go. <action> UP </action>", "up"),
        ("<action>up</action> or <action>down</action>", "down"),
        ("<action>fly</action>", None),
        ("up", None),
        ("<action>up", None),
        ("", None),
    ],
)
def test_actions_in_tags(answer: str, action: str | None) -> None:
    assert tagged_action(answer, Observation("a lake", ("up", "down"))) == action


def test_free_actions_in_tags() -> None:
    free = Observation("a lake")
    assert tagged_action("<action>Swim!</action>", free) == "Swim!"
    assert tagged_action("<action> </action>", free) is None


@pytest.mark.parametrize(
    ("answer", "action", "actions"),
    [
        ("<think>Up?</think><action>up</action>", "up", ["up"]),
        ("<think></think> <action>up</action><action>down</action>", "down", ["up", "down"]),
        ("<think><action>up</action></think><action>down</action>", "down", ["down"]),
        ("<think>a</think><think>b</think><action>up</action>", "up", ["up"]),
        ("<think>Up.</think> up", None, []),
        ("<action>up</action>", None, []),
        ("<think><action>up</action>", None, []),
        ("Up.</think><action>up</action>", None, []),
        ("<action>up</action><think>Up.</think>", None, []),
        ("</think><think><action>up</action>", None, []),
        ("", None, []),
    ],
)
def test_actions_behind_a_thought(answer: str, action: str | None, actions: list[str]) -> None:
    seen = Observation("a lake", ("up", "down"))
    assert thought_action(answer, seen) == action
    assert thought_actions(answer, seen) == actions


def test_episodes_in_which_one_has_to_think() -> None:
    """An answer without a thought is an invalid action; one with a thought does what its tags say."""
    moves = way()
    thought = [f"<think>I see.</think>{said}" for said in act(*moves)]
    trajectory, values, _ = play("steps", [act(moves[0])[0], *thought], action="think", invalid_penalty=0.5)
    assert environment(trajectory.prompt, trajectory) == 0.5
    assert values["environment/steps/frozen_lake"] == len(moves) + 1
    assert values["environment/success/frozen_lake"] == 1
    flags = [turn.flags for row in trajectory.rows for turn in row.turns if turn.kind == "policy"]
    assert flags == [("invalid",), *[()] * (len(moves) - 1), ("success",)]
    both = "<think>Twice.</think><action>no</action><action>up</action>"
    _, values, _ = play("steps", [both], action="think", actions_per_turn=2, max_steps=2)
    assert values["environment/invalid_share/frozen_lake"] == 1  # the first ends the turn


def test_a_thought_that_the_template_opens() -> None:
    """Answers have only its end then."""
    said = [f"I see.</think>{answer}" for answer in act(*way())]
    opens = copy.deepcopy(TOKENIZER)
    opens.chat_template = opens.chat_template.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    assert opens.chat_template != TOKENIZER.chat_template
    for tokenizer, invalid in ((TOKENIZER, 1.0), (opens, 0.0)):
        agent = FunctionConfig("steps", {"action": "think", "max_steps": len(said)})
        settings = {"tokenizer": tokenizer, "worlds": worlds(LAKE), "prompt": prompt(seed=0)}
        _, values = episode(saying(*said), agent, **settings)
        assert values["environment/invalid_share/frozen_lake"] == invalid
        assert values["environment/success/frozen_lake"] == 1 - invalid


def test_the_table_of_options_is_the_codes() -> None:
    """Names, defaults and loops, row by row, in their order."""
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \| `(\S+)` \| (both|`steps`) \|", page)
    both = {field.name: field.default for field in dataclasses.fields(LOOPS["concatenated"])}
    steps = {field.name: field.default for field in dataclasses.fields(LOOPS["steps"])}
    assert set(LOOPS) == {"concatenated", "steps"}
    assert [(name, yaml.safe_load(default)) for name, default, _ in rows] == list(steps.items())
    assert [name for name, _, of in rows if of == "both"] == list(both)
    shown = set(re.findall(r"(?m)^\| `(?:\{name: )?(recent|summary|retrieval)", page))
    assert shown == set(MEMORIES)


def test_own_prompts_and_actions() -> None:
    trajectory, _, asked = play(
        "steps", ["up!"], max_steps=1, prompt=f"{WORLDS}:short_prompt", action=f"{WORLDS}:first_word"
    )
    assert "user\nGo! P" in asked[0]
    assert trajectory.turns[-1].flags == ("truncated",)


def test_which_loop_a_run_has() -> None:
    here = RolloutConfig(environments=(LAKE,))
    assert agent_of(here) == FunctionConfig("concatenated")
    assert agent_of(dataclasses.replace(here, agent=FunctionConfig("steps"))) == FunctionConfig("steps")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.environments=[frozen_lakes]"], "did you mean 'frozen_lake'"),
        (["rollout.environments=[{name: frozen_lake, sise: 3}]"], "did you mean 'size'"),
        (["rollout.environments=[bandit, bandit]"], "two environments called bandit"),
        ([f"rollout.environments=['{WORLDS}:first_word']"], "is no class"),
        (["rollout.environments=[{name: gymnasium, id: Nowhere-v1, actions: [a]}]"], "knows no environment"),
        (["rollout.environments=[bandit]", "rollout.agent={name: steps, max_steps: 0}"], "max_steps must be"),
        (["rollout.environments=[bandit]", "rollout.agent={name: steps, history: -1}"], "history must be"),
        (
            ["rollout.environments=[bandit]", "rollout.agent={name: steps, actions_per_turn: 0}"],
            "actions_per_turn must be",
        ),
        (["rollout.environments=[bandit]", "rollout.agent={name: stepps}"], "did you mean 'steps'"),
        (
            ["rollout.environments=[bandit]", "rollout.agent={name: steps, memory: {name: recnt}}"],
            "did you mean 'recent'",
        ),
        (
            ["rollout.environments=[bandit]", "rollout.agent={name: steps, invalid_penalty: -1.0}"],
            "invalid_penalty must be",
        ),
        (
            ["rollout.environments=[bandit]", "rollout.agent={name: steps, prompt: no.py:f}"],
            "there is no file",
        ),
        (["algorithm.advantage={name: gigpo, similarity: 0.9}"], "texts of observations, which agents see"),
        (["rollout.environments=[bandit]", "rollout.agent=tools"], "does not take `environment`"),
        (["rollout.environments=[bandit]", "rollout.tools=[calculator]"], "remove rollout.tools"),
        (["rollout.agent=steps"], "rollout.environments, which is empty"),
    ],
)
def test_what_cannot_be_is_said_before_the_run(run: Any, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run("none", *overrides)


def test_tools_beside_environments_are_for_a_loop_that_takes_both() -> None:
    check_reads("both", takes_both, environments=(LAKE,), tools=(ToolConfig("calculator"),))


@given(st.lists(st.sampled_from(["<action>", "</action>", "up", " ", "<", "\n"]), max_size=12).map("".join))
def test_tagged_actions_are_those_of_the_pattern(answer: str) -> None:
    free = Observation("a pool")
    found = re.findall(r"<action>(.*?)</action>", answer, re.DOTALL)
    assert tagged_actions(answer, free) == [said.strip() or None for said in found]


def test_openings_that_nothing_ends_take_no_time() -> None:
    """The pattern took 7 s of a processor for 100,000 characters, and four times that for twice as many."""
    assert tagged_actions("<action>" * 100_000, Observation("a pool")) == []
