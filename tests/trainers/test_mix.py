"""Rows of another sampler in the groups of a step (algorithm.mix): what joins, what is measured, and that
runs with them are repeated to the bit."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rondo.config import FunctionConfig
from rondo.core.batch import BatchRef
from rondo.core.errors import ConfigError, DataError, TrainError
from rondo.core.types import Prompt
from rondo.data import FIRST_GIVEN, Mixer
from rondo.data.mixes import Replay
from rondo.trainers.sessions import open_session
from tests.trainers.conftest import inline, metrics, weights
from tests.trainers.test_journal import ASYNCHRONOUS, broken_off
from tests.trainers.test_resume import start, tokens, wait_for_line
from tests.waiting import wait_for

OURS = "algorithm.mix=tests/trainers/mixes.py"
BINARY = "reward.functions=['tests/trainers/scorers.py:first_is_even']"
REPLAY = (
    BINARY,
    "algorithm.mix={name: replay, share: 0.5}",
    "algorithm.coefficients={replaying: {name: once_above, metric: accuracy, level: 0.0}}",
    "algorithm.policy_loss=exgrpo",
    "algorithm.advantage=dr_grpo",
    "data.train.0.options={size: 8}",
)
NO_EVALUATION = "trainer.evaluation={before: false, after: false, every: null}"
WHOLE = ("rollout.max_tokens=28", "algorithm.mix={name: demonstrations, column: solution}")


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    table = pq.read_table(run / "rollouts" / f"step-{step:06d}.parquet")
    names = (
        "group_id",
        "sample_index",
        "text",
        "reward",
        "rollout_log_probs",
        "finish_reason",
        "response_ids",
    )
    rows: list[dict[str, Any]] = table.select([*names, "response_mask"]).to_pylist()
    return rows


def test_a_mix_that_gives_nothing_is_a_run_without_one(run: Any) -> None:
    plain, mixed = run("plain"), run("mixed", f"{OURS}:nothing")
    assert weights(mixed) == weights(plain)
    lines = [{k: v for k, v in line.items() if not k.startswith("mix/")} for line in metrics(mixed)]
    assert lines == metrics(plain)
    assert [line["mix/rows"] for line in metrics(mixed) if line["step"]] == [0, 0, 0]


def test_demonstrations_join_their_groups_with_the_runs_own_reward(run: Any) -> None:
    done = run("run", *WHOLE, "algorithm.policy_loss=luffy", "trainer.total_steps=1")
    rows = rollouts(done, 1)
    given = [row for row in rows if row["sample_index"] >= FIRST_GIVEN]
    sampled = [row for row in rows if row["sample_index"] < FIRST_GIVEN]
    assert [row["group_id"] for row in given] == [0, 1, 2, 3]
    assert len(sampled) == 16
    for row in given:
        assert row["text"].splitlines()[-1].startswith("#### ")
        assert row["finish_reason"] == "stop"  # it ends with EOS
        assert np.isnan(row["rollout_log_probs"]).all()
        assert row["reward"] == pytest.approx(np.mean(np.array(row["response_ids"]) % 2 == 0))
    (line,) = (line for line in metrics(done) if line["step"] == 1)
    assert line["reward/mean"] == pytest.approx(np.mean([row["reward"] for row in sampled]))
    assert line["mix/reward"] == pytest.approx(np.mean([row["reward"] for row in given]))
    assert (line["mix/rows"], line["mix/too_long"]) == (4, 0)
    count = [sum(map(len, (row["response_ids"] for row in part))) for part in (given, rows)]
    assert line["actor/given_share"] == pytest.approx(count[0] / count[1])


def test_what_is_too_long_stays_away(run: Any) -> None:
    done = run("run", WHOLE[1], "trainer.total_steps=1")
    (line,) = (line for line in metrics(done) if line["step"] == 1)
    assert (line["mix/rows"], line["mix/too_long"]) == (0, 4)


def test_a_program_with_the_same_rows_is_the_recipe(recipe: Path, run: Any, tmp_path: Path) -> None:
    settings = ("rollout.max_tokens=28", "algorithm.policy_loss=rl_plus", NO_EVALUATION)
    of_recipe = run("recipe", *settings, f"{OURS}:solution")

    async def main() -> None:
        overrides = [*settings, f"trainer.run_dir={tmp_path / 'program'}"]
        async with open_session([recipe], overrides) as session:
            actor = await session.actor()
            async for prompts in session.prompts():
                sampled = await actor.generate_sequences(prompts)
                experts = await session.rows(prompts, [prompt.fields["solution"] for prompt in prompts])
                batch = BatchRef.concat([sampled, experts])
                batch = await session.compute_advantages(await actor.compute_log_prob(batch))
                await session.log(sampled, await actor.update_actor(batch))

    asyncio.run(main())
    assert weights(tmp_path / "program") == weights(of_recipe)
    for ours, theirs in zip(metrics(tmp_path / "program"), metrics(of_recipe), strict=True):
        for name in ("actor/policy_loss", "actor/given_probability", "reward/mean", "rollout/log_prob_gap"):
            assert ours[name] == theirs[name], name


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mix", [(f"{OURS}:Remembers",), REPLAY], ids=["own", "replay"])
def test_broken_off_and_resumed_equals_undisturbed(
    recipe: Path, tmp_path: Path, mix: tuple[str, ...], staleness: int
) -> None:
    arguments = ("train", str(recipe), "trainer.total_steps=6", "checkpoint.every=2", *mix, NO_EVALUATION)
    arguments += (f"trainer.max_staleness={staleness}", "trainer.on_update=finish" if staleness else BINARY)
    runs = [tmp_path / name for name in ("undisturbed", "run")]
    inline(*arguments, f"trainer.run_dir={runs[0]}")
    with broken_off(4):
        assert inline(*arguments, f"trainer.run_dir={runs[1]}", check=False).returncode == 2
    inline(*arguments, f"trainer.run_dir={runs[1]}")
    assert sum(line["mix/rows"] for line in metrics(runs[0])) > 0
    assert metrics(runs[1]) == metrics(runs[0])
    assert weights(runs[1]) == weights(runs[0])
    states = [json.loads((run / "checkpoints/step-00000006/controller.json").read_text()) for run in runs]
    assert states[0]["extra"]["mix"] == states[1]["extra"]["mix"] is not None


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mix", [(f"{OURS}:Remembers",), REPLAY], ids=["own", "replay"])
def test_killed_and_resumed_equals_undisturbed(
    recipe: Path, tmp_path: Path, mix: tuple[str, ...], staleness: int
) -> None:
    scorer = "reward={functions: ['tests/trainers/scorers.py:held_first'], timeout_seconds: 3600}"
    settings = (*mix, scorer, f"trainer.max_staleness={staleness}")
    settings += ("trainer.on_update=finish",) if staleness else ()
    arguments = ("trainer.total_steps=6", "checkpoint.every=3", "trainer.evaluation.every=3", *settings)
    inline("train", str(recipe), *arguments, f"trainer.run_dir={tmp_path / 'undisturbed'}")
    # A publish waits for all that is in flight: what is held here was started behind the checkpoint.
    process = start(recipe, tmp_path / "run", *settings, hold="20:24" if staleness else "16:20")
    wait_for_line(tmp_path / "run", process, 3 if staleness else 4)
    wait_for("a checkpoint", (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir)
    process.send_signal(signal.SIGKILL)
    process.wait()
    inline("train", str(recipe), *arguments, f"trainer.run_dir={tmp_path / 'run'}")
    assert tokens(tmp_path / "run") == tokens(tmp_path / "undisturbed")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "undisturbed")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_two_processes_are_resumed_to_the_bit(recipe: Path, tmp_path: Path, staleness: int) -> None:
    two = ("cluster.backend=process", "cluster.devices=2")
    test_killed_and_resumed_equals_undisturbed(recipe, tmp_path, (*REPLAY, *two), staleness)


@pytest.mark.slow
@pytest.mark.parametrize("mix", [(*WHOLE, "algorithm.policy_loss=luffy"), REPLAY], ids=["luffy", "exgrpo"])
def test_two_processes_give_the_same_rows(run: Any, mix: tuple[str, ...]) -> None:
    settings = (*mix, NO_EVALUATION, "actor.optimizer.lr=1e-9")  # so that rounding moves no sample
    one = run("one", *settings)
    two = run("two", *settings, "cluster.backend=process", "cluster.devices=2")
    for step in (1, 2, 3):
        of_one, of_two = (
            sorted(
                map(
                    str,
                    (
                        (row["group_id"], row["sample_index"], row["response_ids"], row["reward"])
                        for row in rollouts(folder, step)
                    ),
                )
            )
            for folder in (one, two)
        )
        assert of_one == of_two
    for ours, theirs in zip(metrics(one), metrics(two), strict=True):
        for name in ("actor/policy_loss", "actor/given_share", "mix/reward", "mix/rows"):
            assert theirs.get(name, 0) == pytest.approx(ours.get(name, 0), rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_a_replay_of_a_run_mixes_the_same(recipe: Path, tmp_path: Path) -> None:
    arguments = ("train", str(recipe), *ASYNCHRONOUS, *REPLAY, "checkpoint.every=1", NO_EVALUATION)
    inline(*arguments, f"trainer.run_dir={tmp_path / 'run'}")
    inline(*arguments, f"trainer.replay={tmp_path / 'run'}", f"trainer.run_dir={tmp_path / 'again'}")
    assert weights(tmp_path / "again") == weights(tmp_path / "run")
    assert [line.get("mix/rows") for line in metrics(tmp_path / "again")] == [
        line.get("mix/rows") for line in metrics(tmp_path / "run")
    ]


def test_what_was_recorded_with_demonstrations_is_trained_on(run: Any) -> None:
    done = run("run", *WHOLE, "algorithm.policy_loss=luffy", NO_EVALUATION, "trainer.total_steps=1")
    again = run(
        "again",
        *("rollout.max_tokens=28", "algorithm.policy_loss=luffy", NO_EVALUATION, "trainer.total_steps=1"),
        *(f"rollout.recorded={done}", "trainer.evaluation.every=null"),
    )
    ours, theirs = metrics(again)[-1], metrics(done)[-1]
    assert ours["actor/given_share"] == theirs["actor/given_share"]
    # Rows come back group by group, and floats are added in their order.
    assert ours["actor/policy_loss"] == pytest.approx(theirs["actor/policy_loss"], rel=1e-6)


def test_log_probs_that_came_with_a_response_reach_the_loss(run: Any) -> None:
    """Given back as they were sampled a moment ago: the ratio is 1, and f(1) = 1/1.1 of each token."""
    settings = ("algorithm.policy_loss=exgrpo", "trainer.total_steps=1", "actor.mini_batch_size=4")
    settings += ("algorithm.advantage=dr_grpo", NO_EVALUATION)
    switch = (
        "algorithm.coefficients={replaying: {name: once_above, metric: reward/mean, level: 2.0, start: 1}}"
    )
    done = run("run", *settings, switch, f"{OURS}:first_again", "algorithm.aggregation=token-sum")
    (line,) = (line for line in metrics(done) if line["step"] == 1)
    rows = rollouts(done, 1)
    expected = 0.0
    for group in range(4):
        of_group = [row for row in rows if row["group_id"] == group]
        rewards = np.array([row["reward"] for row in of_group])
        assert of_group[-1]["response_ids"] == of_group[0]["response_ids"]
        weights_of = np.array([1.0] * 4 + [1 / 1.1])
        lengths = np.array([len(row["response_ids"]) for row in of_group])
        expected -= float(((rewards - rewards.mean()) * weights_of * lengths).sum())
    numbers = sum(len(row["response_ids"]) for row in rows)
    assert line["actor/policy_loss"] == pytest.approx(expected / numbers, rel=1e-4)
    with pytest.raises(TrainError, match="without log-probs"):
        run("unsaid", *settings, switch, f"{OURS}:without_log_probs")


def test_a_preparation_reads_what_came_with_a_response(run: Any) -> None:
    switch = (
        "algorithm.coefficients={replaying: {name: once_above, metric: reward/mean, level: 2.0, start: 3}}"
    )
    loss = "algorithm.policy_loss=tests/trainers/mixes.py:told_before"
    done = run("run", loss, switch, f"{OURS}:first_again", NO_EVALUATION, "trainer.total_steps=1")
    (line,) = metrics(done)
    said = np.concatenate([row["rollout_log_probs"] for row in rollouts(done, 1) if row["sample_index"] == 0])
    assert line["actor/twice"] == pytest.approx(2 * said.mean(), rel=1e-5)
    assert line["actor/switch"] == line["actor/coefficient/replaying"] == 3


def test_the_least_entropy_is_picked(run: Any) -> None:
    done = run("run", f"{OURS}:Picks", "trainer.total_steps=1", NO_EVALUATION)
    rows = rollouts(done, 1)
    for group in range(4):
        answers = [tuple(row["response_ids"]) for row in rows if row["group_id"] == group]
        *sampled, picked = answers
        assert len(sampled) == 4
        assert picked in sampled


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("algorithm.mix=demonstration",), "did you mean 'demonstrations'"),
        (("algorithm.mix=demonstrations",), "needs the option 'column'"),
        (("algorithm.mix={name: replay, share: 0}",), "0 < share <= 1"),
        ((f"{OURS}:Hears",), "no method choose"),
        (("algorithm.policy_loss=luffy",), "reads given, which is of rows of another sampler"),
        (("algorithm.policy_loss=exgrpo", f"{OURS}:solution"), "replaying"),
        ((f"{OURS}:solution", "algorithm.rollout_correction.mode=bypass"), "mode=decoupled"),
        ((f"{OURS}:solution", "algorithm.advantage=remax"), "greedy answer"),
        ((*REPLAY, "data.sampler=success_rate"), "chooses the prompts, too"),
        ((*REPLAY, "rollout.n=2"), "rollout.n=2 leaves 1"),
        (
            (f"{OURS}:solution", "algorithm.policy_loss=tests/trainers/mixes.py:of_the_sampler"),
            "reads rollout_log_probs, which rows of algorithm.mix are without",
        ),
        ((f"{OURS}:solution", "rollout.tools=[calculator]"), "an agent's episodes"),
        ((f"{OURS}:solution", "algorithm.filter=mixed_accuracy"), "judges groups before"),
        ((f"{OURS}:solution", "algorithm.advantage=otb_is"), "reads rollout_log_probs"),
    ],
)
def test_what_cannot_be(recipe: Path, settings: tuple[str, ...], says: str) -> None:
    done = inline("check", str(recipe), *settings, check=False)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_a_column_that_is_not_there_is_said_before_models_load(run: Any) -> None:
    with pytest.raises(DataError, match="'worked', which train does not have"):
        run("run", "algorithm.mix={name: demonstrations, column: worked}")


# ---- the border, and the pool


def mixer(name: str, **options: Any) -> Mixer:
    return Mixer(FunctionConfig(name, options), ["replaying"])


@pytest.mark.parametrize("wrong", [None, [3], [[1, 2]], "text", [(np.zeros(1), np.zeros(1), 1)]])
def test_a_mix_gives_responses(wrong: Any) -> None:
    def gives(prompt: Any) -> Any:
        return wrong

    with pytest.raises(DataError, match=r"algorithm\.mix: gives"):
        Mixer(FunctionConfig(gives)).rows(prompt=None)  # type: ignore[arg-type]


def test_a_parameter_that_nothing_fills_is_said() -> None:
    def gives(promt: Any) -> Any: ...

    with pytest.raises(ConfigError, match="needs the option 'promt'"):
        Mixer(FunctionConfig(gives))  # type: ignore[arg-type]


def prompt(row: int) -> Prompt:
    return Prompt(row, f"train/{row}/{row}", "train", np.zeros(1, np.int32))


def visit(pool: Replay, row: int, right: int, *, n: int = 8, asked: int = 8, start: int = 0) -> list[Any]:
    """A group of the row with so many right answers, each of two tokens; and what joins it."""
    answers = [np.array([start + i, 1], np.int32) for i in range(asked)]
    accuracy = (np.arange(asked) < right).astype(np.float32)
    said = [np.full(2, -1.0 - i, np.float32) for i in range(asked)]
    joins = pool.rows(prompt(row), answers, said, accuracy, asked, n, 1.0)
    pool.heard("train", row, accuracy)
    return joins


def test_the_pool_has_what_was_partly_right_and_retires_what_is_always() -> None:
    pool = Replay()
    for row, right in enumerate([0, 3, 8, 7]):
        assert visit(pool, row, right) == []
    assert pool.metrics() == {"pool": 2, "kept": 10, "retired": 1}
    assert pool.state()["pool"] == [["train", 1, 3, 3], ["train", 3, 7, 7]]
    joins = visit(pool, 1, 2, asked=7)  # replayed: of 3 right answers one joins, which counts as right
    assert [ids.tolist() for ids, _ in joins] == [[0, 1], [1, 1], [2, 1]]
    assert [said.tolist() for _, said in joins] == [[-1, -1], [-2, -2], [-3, -3]]
    assert pool.state()["pool"][0] == ["train", 1, 3, 3]  # the same answers are kept once
    visit(pool, 1, 7, asked=7)
    assert pool.metrics() == {"pool": 1, "kept": 7, "retired": 2}
    visit(pool, 1, 4)  # for good
    assert pool.metrics()["pool"] == 1


def test_the_pool_is_filled_from_the_switch_on() -> None:
    pool = Replay()
    answers, accuracy = [np.zeros(1, np.int32)] * 8, np.array([1.0] * 4 + [0.0] * 4)
    assert pool.rows(prompt(0), answers, [np.zeros(1)] * 8, accuracy, 8, 8, 0.0) == []
    pool.heard("train", 0, accuracy)
    assert pool.metrics()["pool"] == 0


def test_prompts_are_drawn_by_buckets_and_once() -> None:
    """Weights exp(-(k - 4)²/2) for each bucket that has prompts, however many they are."""
    pool = Replay(share=0.5)
    for row in range(70):
        visit(pool, row, 1 + row % 7 if row < 7 or row % 7 == 3 else 4)
    order = lambda place: ("train", 100 + place)  # noqa: E731
    counts = np.zeros(8)
    for seed in range(4000):
        (first, *_), *_ = [pool.choose(2, 8, seed, order)]
        counts[pool._bucket["train", first[1]]] += 1
    weight = np.exp(-((np.arange(1, 8) - 4.0) ** 2) / 2)
    np.testing.assert_allclose(counts[1:] / 4000, weight / weight.sum(), atol=0.02)
    chosen = pool.choose(100, 8, 0, order)
    again = [entry for entry in chosen if entry[2] == 7]
    assert len(again) == len({row for _, row, _ in again}) == 50
    assert [n for _, _, n in chosen[50:]] == [8] * 50
    assert pool.choose(1, 8, 0, order)[0][2] == 8  # in the place of one that was dropped
    every = Replay(share=1.0)
    every.load(pool.state())
    assert {row for _, row, n in every.choose(99, 8, 1, order) if n == 7} == set(range(70))


def test_the_pool_comes_back_as_it_was() -> None:
    pool, other = Replay(most=4), Replay(most=4)
    for row, right in ((5, 3), (2, 7), (9, 8), (5, 2)):
        visit(pool, row, right, start=10 * right)
    other.load(pool.state())
    order = lambda place: ("train", place)  # noqa: E731
    for seed in range(20):
        assert pool.choose(6, 8, seed, order) == other.choose(6, 8, seed, order)
    for row in (5, 2):
        ours, theirs = (visit(one, row, 1, asked=7) for one in (pool, other))
        assert len(ours) <= 4
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a[0], b[0])
            np.testing.assert_array_equal(a[1], b[1])
    empty = Replay()
    empty.load(Replay().state())
    assert empty.metrics() == {"pool": 0, "kept": 0, "retired": 0}
