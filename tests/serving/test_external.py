"""Agents of the user's: their episodes as trajectories, and training on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rondo.agents.external import ExternalAgent, load_agent
from rondo.agents.runner import single_turn
from rondo.chat import decode, encode_piece, encode_prompt
from rondo.config import load
from rondo.config.schema import FunctionConfig
from rondo.core.errors import ConfigError, RolloutError, RondoError
from rondo.core.types import Completion, GenerateRequest, Prompt, Row, SamplingParams, Trajectory, Turn
from rondo.rollout import NativeEngine
from rondo.trainers.commands.train import train
from tests.serving.conftest import CONTEXT, STOPS, TOKENIZER
from tests.trainers.conftest import metrics, recipe, weights  # noqa: F401

AGENTS = "tests/serving/agents.py"
ASK = ({"role": "user", "content": "Tom has 3 apples, buys 4. How many?"},)
PROMPT = Prompt(5, "train/0/5", "train", encode_prompt(TOKENIZER, ASK), {"answer": "7"}, ASK)
SAMPLING = SamplingParams(24, temperature=0.9, stop_token_ids=STOPS)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def episode(
    generate: Any,
    name: str,
    seconds: float | None = None,
    sampling: SamplingParams = SAMPLING,
    **options: Any,
) -> Trajectory:
    """One episode of an agent in agents.py."""

    async def main() -> Trajectory:
        agent = ExternalAgent(FunctionConfig(f"{AGENTS}:{name}", options), TOKENIZER, max_context=CONTEXT)
        try:
            return await agent(
                PROMPT, generate, sampling=sampling, sample_index=2, run_seed=11, deadline_seconds=seconds
            )
        finally:
            await asyncio.to_thread(agent.close)

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["one_answer", "plain_http"])
def test_one_call_is_single_turn(engine: NativeEngine, name: str) -> None:
    """A coroutine with OpenAI's client, a blocking function with nothing but HTTP."""

    async def built_in() -> Trajectory:
        return await single_turn(PROMPT, engine.generate, sampling=SAMPLING, sample_index=2, run_seed=11)

    mine, theirs = episode(engine.generate, name), asyncio.run(built_in())
    for field in ("response_ids", "response_mask", "rollout_log_probs", "policy_versions"):
        assert np.array_equal(getattr(mine, field), getattr(theirs, field))
        assert getattr(mine, field).dtype == getattr(theirs, field).dtype
    assert np.array_equal(mine.rows[0].prompt_ids, theirs.rows[0].prompt_ids)
    for field in ("trajectory_id", "sample_index", "turns", "finish_reason", "outcome", "text", "failure"):
        assert getattr(mine, field) == getattr(theirs, field)


def test_two_turns_are_one_trajectory(engine: NativeEngine) -> None:
    trajectory = episode(engine.generate, "two_turns", first_tokens=4)
    first, between, second = trajectory.turns
    assert (first.kind, first.start) == ("policy", 0)
    assert [turn.kind for turn in trajectory.turns] == ["policy", "user", "policy"]
    assert [first.stop, between.stop, second.stop] == [
        between.start,
        second.start,
        len(trajectory.response_ids),
    ]
    text = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    inserted = trajectory.response_ids[between.start : between.stop]
    ended = trajectory.response_ids[first.stop - 1] == END
    assert inserted.tolist() == encode_piece(TOKENIZER, text).tolist()[int(ended) :]
    ours = np.zeros(len(trajectory.response_ids), bool)
    ours[between.start : between.stop] = True
    assert np.array_equal(trajectory.response_mask, ~ours)
    assert set(trajectory.policy_versions[ours]) == {-1}
    assert set(trajectory.policy_versions[~ours]) == {3}
    assert set(trajectory.rollout_log_probs[ours]) == {0.0}
    assert (trajectory.rollout_log_probs[~ours] < 0).all()
    assert len(trajectory.response_ids) <= SAMPLING.max_tokens
    assert trajectory.text.startswith("final: ")
    assert trajectory.outcome == "scored"


def context_of(row: Row, turn: Turn) -> list[int]:
    return [*row.prompt_ids.tolist(), *row.response_ids[: turn.start].tolist()]


@pytest.mark.parametrize(
    ("name", "rows"),
    [("planner_and_solver", 3), ("best_of_two", 2), ("rewrites", 2), ("two_turns", 1)],
)
def test_every_call_is_in_the_row_of_its_context(engine: NativeEngine, name: str, rows: int) -> None:
    """What the engine was sent and what it sampled, call by call, against the rows."""
    calls: list[Completion] = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        made = await engine.generate(request, on_tokens)
        calls.append(made)
        return made

    options = {"first_tokens": 4} if name == "two_turns" else {}
    room = replace(SAMPLING, max_tokens=CONTEXT - 40)
    trajectory = episode(generate, name, sampling=room, **options)
    assert (trajectory.outcome, len(trajectory.rows)) == ("scored", rows)
    found = [
        (context_of(row, turn), row.response_ids[turn.start : turn.stop].tolist())
        for row in trajectory.rows
        for turn in row.turns
        if turn.kind == "policy"
    ]
    assert sorted(found) == sorted((made.prompt_ids.tolist(), made.token_ids.tolist()) for made in calls)
    last = trajectory.rows[-1]
    assert (context_of(last, last.turns[-1]), last.response_ids[last.turns[-1].start :].tolist()) == (
        calls[-1].prompt_ids.tolist(),
        calls[-1].token_ids.tolist(),
    )
    assert trajectory.num_tokens == sum(len(row.response_ids) for row in trajectory.rows)


def test_an_episode_without_room_for_another_answer_is_cut_off(engine: NativeEngine) -> None:
    """The agent raises what it was told (400); its episode is scored as far as it went."""
    trajectory = episode(engine.generate, "two_turns", first_tokens=20)
    assert (trajectory.outcome, trajectory.failure, trajectory.finish_reason) == ("scored", "", "length")
    assert [turn.kind for turn in trajectory.turns] == ["policy"]
    assert len(trajectory.response_ids) <= 20
    assert trajectory.text == ""  # the runner decodes the response


@pytest.mark.parametrize(
    ("name", "failure", "tokens"),
    [
        ("never_calls", "the agent never called the model", 0),
        ("raises", "the agent raised LookupError: no such tool (agents.py, line ", None),
        ("exits", "the agent raised EscapeError: SystemExit(0) would end or cancel the run", 0),
        ("exits_later", "the agent raised EscapeError: SystemExit(0) would end or cancel the run", 0),
        ("cancels_itself", "the agent raised EscapeError: CancelledError() would end or cancel", 0),
        ("leaves_a_task_that_exits", "the agent never called the model", 0),
        ("asks_too_much", "(data.max_prompt_tokens + rollout.max_tokens)", 0),
        ("hangs", "the agent took longer than rollout.deadline_seconds = 0.5", 0),
        ("returns_a_number", "the agent returned int; it must return None or its final text", 0),
    ],
)
def test_what_is_no_trajectory_is_a_typed_failure(
    engine: NativeEngine, name: str, failure: str, tokens: int | None
) -> None:
    trajectory = episode(engine.generate, name, seconds=0.5 if name == "hangs" else None)
    assert trajectory.outcome == "rollout_error"
    assert failure in trajectory.failure
    if tokens is not None:
        assert len(trajectory.response_ids) == tokens


def test_the_deadline_cancels_what_the_agent_waits_for() -> None:
    """With more time where it had not asked yet when the deadline came."""
    told: list[str] = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        told.append("asked")
        try:
            await asyncio.Event().wait()
        finally:
            told.append("cancelled")
        raise AssertionError

    for seconds in (0.5, 4.0, 32.0, 128.0):
        assert "took longer" in episode(generate, "one_answer", seconds=seconds).failure
        if told:
            break
    assert told == ["asked", "cancelled"]


def test_an_engines_error_is_the_runs() -> None:
    """Whatever the agent makes of the 500 that it got."""

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        raise RolloutError("the logits are NaN")

    with pytest.raises(RolloutError, match="the logits are NaN"):
        episode(generate, "swallows_errors")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("one_anser", {}, "did you mean 'one_answer'"),
        ("two_turns", {}, "needs the option 'first_tokens'"),
        ("two_turns", {"first_tokens": "many"}, "must be int"),
        ("two_turns", {"first_tokens": 2, "sy": "x"}, "did you mean 'say'"),
        ("misspelt", {}, "did you mean 'messages'"),
    ],
)
def test_the_function_and_its_options_are_checked(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_agent(FunctionConfig(f"{AGENTS}:{name}", options))


# ---- training


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Iterator[Any]:  # noqa: F811
    """run(name, *overrides) -> the run folder."""

    def start(name: str, *overrides: str) -> Path:
        settings = [f"trainer.run_dir={tmp_path / name}", "cluster.threads=1", "trainer.total_steps=2"]
        train(load([str(recipe)], [*settings, *overrides]))
        return tmp_path / name

    return start


def rollouts(folder: Path) -> list[dict[str, Any]]:
    files = [folder / f"rollouts/step-00000{step}.parquet" for step in (1, 2)]
    tables = [pq.read_table(file).to_pydict() for file in files]
    for table in tables:  # nothing gives a turn a reward here, and NaN is not equal to itself
        assert np.isnan(np.concatenate(table.pop("turn_rewards", [[np.nan]]))).all()
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_training_an_agent_of_one_call_is_training_without(run: Any, staleness: int) -> None:
    """The same tokens, the same rewards, the same weights, bit for bit."""
    key = f"trainer.max_staleness={staleness}"
    mine = run("mine", key, f"rollout.agent={AGENTS}:one_answer")
    built_in = run("built_in", key)
    for a, b in zip(rollouts(mine), rollouts(built_in), strict=True):
        for column in (
            "prompt_ids",
            "response_ids",
            "rollout_log_probs",
            "policy_versions",
            "reward",
            "text",
        ):
            assert a[column] == b[column]
    assert weights(mine) == weights(built_in)


def test_training_on_two_turns(run: Any) -> None:
    """Only what the policy wrote is trained on; its log-probs are the trainer's."""
    folder = run(
        "two",
        f"rollout.agent={{name: '{AGENTS}:two_turns', first_tokens: 3, say: '?'}}",
        "rollout.max_tokens=24",
    )
    for rows in rollouts(folder):
        for ids, mask, versions in zip(
            rows["response_ids"], rows["response_mask"], rows["policy_versions"], strict=True
        ):
            assert len(ids) == len(mask) == len(versions)
            assert [version == -1 for version in versions] == [bit == 0 for bit in mask]
            assert 0 < sum(mask) < len(mask)
    assert all(line["rollout/log_prob_gap"] < 1e-5 for line in metrics(folder)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "gigpo", "reinforce_pp"])
def test_training_on_several_contexts(run: Any, advantage: str) -> None:
    """Planner and solver: rows of one trajectory share reward and, where it is of the whole, advantage; what
    counts trajectories counts them; the log-probs are the trainer's; and the run can be repeated.
    """
    settings = (
        f"rollout.agent={AGENTS}:planner_and_solver",
        f"algorithm.advantage={advantage}",
        "rollout.max_tokens=64",
        "data.max_prompt_tokens=128",
        "actor.token_budget=1024",
    )
    folder = run("several", *settings)
    lines = metrics(folder)[1:]
    for rows, line in zip(rollouts(folder), lines, strict=True):
        steps = np.array(rows["step_index"])
        number = int((steps == 0).sum())
        assert number == 16  # rollout.n of each of 4 prompts
        assert steps.tolist() == [0, 1, 2] * number
        rewards = np.array(rows["reward"], np.float32).reshape(number, 3)
        assert (rewards == rewards[:, :1]).all()
        assert line["reward/mean"] == pytest.approx(rewards[:, 0].mean())
        lengths = np.array(rows["response_length"]).reshape(number, 3).sum(1)
        assert line["rollout/response_length"] == lengths.mean()
        assert line["rollout/rows_per_trajectory"] == 3
        credit = np.array(rows["step_reward"], np.float32).reshape(number, 3)
        assert (credit == rewards * [0, 0, 1]).all()
        assert line["rollout/log_prob_gap"] < 1e-5
        for ids, mask, stops, kinds in zip(
            *(rows[name] for name in ("response_ids", "response_mask", "turn_stops", "turn_kinds")),
            strict=True,
        ):
            assert stops[-1] == len(ids)
            bits = [int(kind == 0) for kind in kinds]
            assert np.repeat(bits, np.diff([0, *stops])).tolist() == mask
    assert weights(run("again", *settings)) == weights(folder)


@pytest.mark.slow
def test_a_run_with_several_contexts_goes_on(run: Any) -> None:
    """From its checkpoint to the weights of one that was never stopped."""
    settings = (
        f"rollout.agent={AGENTS}:planner_and_solver",
        "rollout.max_tokens=64",
        "data.max_prompt_tokens=128",
        "actor.token_budget=1024",
        "checkpoint.every=1",
    )
    whole = run("whole", *settings)
    parts = run("parts", *settings, "trainer.total_steps=1")
    train(
        load(
            [str(parts.parent / "tiny.yaml")],
            [f"trainer.run_dir={parts}", "cluster.threads=1", "trainer.total_steps=2", *settings],
        )
    )
    assert weights(parts) == weights(whole)


@pytest.mark.slow
def test_the_turns_of_an_agent_are_shown(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only what it returned: in the rollouts, in the answers to an evaluation, and on the console."""
    folder = run(
        "shown",
        f"rollout.agent={{name: '{AGENTS}:two_turns', first_tokens: 3, say: 'Sure?'}}",
        "rollout.max_tokens=24",
        "tracking={console: plain, samples: 1}",
    )
    step = rollouts(folder)[0]
    for text, shown, ids, mask in zip(
        step["text"], step["transcript"], step["response_ids"], step["response_mask"], strict=True
    ):
        first = mask.index(0)
        second = len(mask) - mask[::-1].index(0)
        parts = [ids[:first], ids[first:second], ids[second:]]
        said, asked, final = (decode(TOKENIZER, part).strip() for part in parts)
        assert shown == f"[policy] {said}\n[user] {asked}\n[policy] {final}"
        assert "Sure?" in asked
        assert text.removeprefix("final: ").strip() == final
    (answers,) = (folder / "evaluations").glob("*-000002.jsonl")
    assert all("\n[user] " in json.loads(line)["transcript"] for line in answers.read_text().splitlines())
    assert "[user]" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_trains_and_a_run_can_be_repeated(run: Any) -> None:
    """Episodes of several turns: the order in which calls arrive does not matter."""
    agent = "rollout.agent={name: 'examples/openai_agent.py:solve', attempts: 2}"
    first, second = (run(name, agent, "rollout.max_tokens=40") for name in ("first", "second"))
    assert any(0 in mask for rows in rollouts(first) for mask in rows["response_mask"])
    assert rollouts(first) == rollouts(second)
    assert weights(first) == weights(second)


@pytest.mark.slow
def test_failed_episodes_are_dropped_with_their_reason(run: Any) -> None:
    folder = run("failing", f"rollout.agent={AGENTS}:fails_on_some_samples", "reward.max_dropped_share=0.9")
    for rows in rollouts(folder):
        assert set(rows["outcome"]) == {"scored", "rollout_error"}
    with pytest.raises(RondoError, match="Fix the agent"):
        run("stopped", f"rollout.agent={AGENTS}:fails_on_some_samples", "reward.max_dropped_share=0.1")


def test_a_run_with_an_agent_that_is_not_there_does_not_start(run: Any) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        run("none", "rollout.agent=agents_of_mine.py:solve")
