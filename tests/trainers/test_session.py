"""A hand-written program's session: the verbs' columns, what is refused, and what each error says. That the
verbs compute what the built-in loop computes is in test_examples.py."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rondo.core.errors import ConfigError, DataError, TrainError, WorkerError
from rondo.core.types import Prompt, Trajectory
from rondo.trainers.loop.report import Reporter
from rondo.trainers.sessions import Session, per_group
from rondo.trainers.sessions.opening import check_session
from rondo.workers.models import ActorWorker
from tests.messages import full_text
from tests.trainers.conftest import in_a_session, inline, metrics, said_at_once, weights
from tests.waiting import engine_processes

QUIET = ("trainer.evaluation={before: false, after: false, every: null}", "checkpoint.export=false")
KL = ("algorithm.kl={name: k3, where: loss, coef: 0.1}", "actor.mini_batch_size=2")
FIRST = "reward.functions=[{name: 'tests/trainers/scorers.py:first_is_even'}]"
RESAMPLED = (
    "algorithm.advantage={name: reinforce_pp}",
    "algorithm.resample={name: pf_ppo, strategy: best}",
    "actor.mini_batch_size=2",
)
TWO_SCORES = (
    "reward.functions=[{name: 'tests/trainers/scorers.py:even_share'}, "
    "{name: rondo.recipes.quickstart.longer_than, tokens: 7, weight: 0}]",
    "reward.accuracy=even_share",
    "algorithm.constraint.cost=longer_than",
)


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Callable[..., None]:
    """run(program, *overrides): the program in a session of the tiny recipe."""

    def start(program: Callable[[Session], Awaitable[None]], *overrides: str, **options: Any) -> None:
        in_a_session(recipe, tmp_path / "run", program, *QUIET, *overrides, **options)

    return start


def first(session: Session, number: int = 4) -> list[Prompt]:
    return [session.data.train.prompt(seq) for seq in range(number)]


def short(prompt: Prompt, trajectory: Trajectory) -> float:
    return -float(len(trajectory.response_ids))


def test_all_that_does_not_fit_is_said_at_once(recipe: Path) -> None:
    wrong = {
        "trainer.replay": "trainer.replay=other",
        "trainer.stages": "trainer.stages=[{step: 2}]",
        "algorithm.rollout_correction.mode": "algorithm.rollout_correction={mode: bypass}",
        "data.train": "data.train=[]",
        "model.chat_template": "model.chat_template=nowhere.jinja",
        "reward.models.0": "reward.models=[{name: judge}]",
    }
    said_at_once(wrong, recipe, check_session)


def test_the_greedy_baseline(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        prompts = first(session)
        batch = await reward.compute_reward(await actor.generate_sequences(prompts, n=3))
        greedy = await reward.compute_reward(await actor.generate_sequences(prompts, do_sample=False))
        again = await actor.generate_sequences(prompts[::-1], do_sample=False)
        assert batch.index.scalars("group_id").tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert greedy.index.scalars("group_id").tolist() == [0, 1, 2, 3]
        responses = (await greedy.fetch(["response_ids"])).rows("response_ids")
        for one, other in zip(responses, (await again.fetch()).rows("response_ids")[::-1], strict=True):
            assert one.tolist() == other.tolist()
        shares = [float((ids % 2 == 0).mean()) for ids in responses]
        np.testing.assert_allclose(greedy.index.scalars("reward"), shares, rtol=1e-6)
        np.testing.assert_allclose(per_group(batch, greedy, "reward"), np.repeat(shares, 3), rtol=1e-6)
        with pytest.raises(DataError, match="prompt group 3 has no row"):
            per_group(batch, greedy.take([0, 1, 2]), "reward")

    run(program)


def test_reward_and_cost_are_columns_of_their_own(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, reward, cost = await session.actor(), await session.reward(), await session.cost()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session)))
        np.testing.assert_array_equal(batch.index.scalars("reward"), batch.index.scalars("accuracy"))
        judged = await cost.compute_cost(batch)
        lengths = judged.index.scalars("response_length")
        np.testing.assert_array_equal(judged.index.scalars("score/longer_than"), lengths > 7)
        np.testing.assert_array_equal(judged.index.scalars("reward"), batch.index.scalars("reward"))

    run(program, *TWO_SCORES)


def test_rows_whose_scoring_failed_are_gone(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session)))
        assert batch.index.scalars("sample_index").tolist() == [0, 2, 3] * 4
        assert session._program.step.stats.values()["reward/failed_share"] == 0.25

    run(program, "reward.functions=[tests/trainers/scorers.py:raises]", "reward.on_error=drop")


def test_functions_from_python(run: Any) -> None:
    def twice(reward: Tensor, *, factor: float = 2.0) -> Tensor:
        return factor * reward

    def plain(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return -log_probs * advantages, {"actor/tokens": (log_probs.new_ones(()), log_probs.new_ones(()))}

    async def program(session: Session) -> None:
        actor, reward = await session.actor(policy_loss=plain), await session.reward()
        async for prompts in session.prompts():
            batch = await reward.compute_reward(await actor.generate_sequences(prompts))
            lengths = batch.index.scalars("response_length")
            np.testing.assert_array_equal(batch.index.scalars("score/short"), -lengths)
            batch = await actor.compute_log_prob(batch)
            with pytest.raises(ConfigError, match=full_text("twice has no option 'facto'; did you")):
                await session.compute_advantages(batch, twice, facto=3.0)
            batch = await session.compute_advantages(batch, twice, factor=3.0)
            np.testing.assert_allclose(batch.index.scalars("advantages"), -3.0 * lengths)
            metrics = await actor.update_actor(batch)
            assert metrics.values()["actor/tokens"] == 1
            await session.log(batch, metrics)
        assert session.step == 2

    run(program, "trainer.total_steps=2", reward=short)


def test_old_log_probs_are_asked_for_where_they_are_needed(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session)))
        with pytest.raises(DataError, match="values"):
            await session.compute_advantages(batch, "gae")
        batch = await session.compute_advantages(batch, "grpo")
        before = session.step
        await actor.update_actor(batch)  # one optimizer step on fresh rows: old = current
        assert session.step == before + 1
        with pytest.raises(TrainError, match=full_text("batch has no old_log_probs, and an older")):
            await actor.update_actor(batch)
        fresh = await actor.generate_sequences(first(session))
        assert set(fresh.index.scalars("oldest_version")) == {1}

    run(program, "actor.mini_batch_size=null")


def test_more_groups_than_one_step_takes_need_old_log_probs(run: Any) -> None:
    """By the batch's own mini-batches: the recipe's batch size is 4 groups."""

    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session, 9)))
        batch = await session.compute_advantages(batch, "grpo")
        with pytest.raises(TrainError, match=full_text("its 9 prompt groups make 3")):
            await actor.update_actor(batch)
        metrics = await actor.update_actor(await actor.compute_log_prob(batch))
        assert metrics.values()["actor/ratio_max"] > 1  # of the second step and the third

    run(program, "actor.mini_batch_size=4")


@pytest.mark.parametrize(
    ("size", "number", "steps"), [("null", None, 1), ("2", None, 5), ("2", 1, 1), ("null", 3, 3)]
)
def test_how_many_optimizer_steps_a_large_batch_takes(
    run: Any, size: str, number: int | None, steps: int
) -> None:
    """Nine groups, where the recipe has four; the rate, which falls linearly to 0 over all optimizer steps
    that the recipe plans, tells how many were taken."""

    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session, 9)))
        batch = await session.compute_advantages(await actor.compute_log_prob(batch), "grpo")
        with pytest.raises(TrainError, match=full_text("prompt groups cannot make 10")):
            await actor.update_actor(batch, mini_batches=10)
        await actor.update_actor(batch, mini_batches=number)
        found = (await actor.update_actor(batch, mini_batches=1)).values()
        planned = 200 * (1 if size == "null" else 2)
        assert found["actor/lr"] == pytest.approx(1e-3 * (1 - steps / planned))

    settings = ("trainer.total_steps=200", "actor.optimizer.schedule=linear", "actor.optimizer.lr=0.001")
    run(program, f"actor.mini_batch_size={size}", *settings)


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip"])
def test_the_gap_is_not_what_was_learnt_meanwhile(run: Any, loss: str) -> None:
    """Of four optimizer steps only the first tells of the sampler, where nobody reads old_log_probs."""

    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        async for prompts in session.prompts():
            batch = await reward.compute_reward(await actor.generate_sequences(prompts))
            batch = await session.compute_advantages(await actor.compute_log_prob(batch), "grpo")
            found = await actor.update_actor(batch)
            tokens = found.means["rollout/log_prob_gap"][1], found.means["actor/entropy_sampled"][1]
            assert (tokens[0] <= tokens[1] / 2) == (loss == "reinforce")
            assert found.values()["rollout/log_prob_gap_max"] < 1e-5
            await session.log(batch, found)

    settings = ("actor.mini_batch_size=1", "actor.optimizer.lr=0.01", "trainer.total_steps=2")
    run(program, *settings, f"algorithm.policy_loss={loss}")


def test_a_program_that_logs_nothing_ends(run: Any, tmp_path: Path) -> None:
    async def program(session: Session) -> None:
        await session.actor()
        async for _ in session.steps():
            pass

    run(program, "trainer.total_steps=2", "tracking.plot=true")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 2
    assert not (tmp_path / "run" / "curves.png").exists()


def test_a_question_has_prompts_and_answers(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        prompts = first(session)
        cases: list[list[Any]] = [[[], 2], [prompts[:1], 0], [prompts[1:2], -1]]
        for asked, n in cases:
            with pytest.raises(DataError, match=f"asked for {n} answers to each of"):
                await actor.generate_sequences(asked, n=n)
        with pytest.raises(DataError, match="asked for 0 answers to each of 2"):
            actor.ask(prompts[2:4], n=0)
        with pytest.raises(DataError, match="is no prompt; session"):
            await actor.generate_sequences(["2+2?"])  # type: ignore[list-item]

    run(program)


def test_a_prompt_that_is_asked_again_would_get_the_same_samples(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        prompts = first(session)
        before = await actor.generate_sequences(prompts[:2])
        await actor.generate_sequences(prompts[:2], do_sample=False)  # another question
        await actor.generate_sequences(prompts[2:], n=1)
        for again in (prompts[1:3], [prompts[3]]):
            with pytest.raises(TrainError, match=rf"{again[0].prompt_id}' was sampled under these weights"):
                await actor.generate_sequences(again, n=3)
        renamed = dataclasses.replace(prompts[0], prompt_id="train/again/0", seq=1 << 20)
        with pytest.raises(TrainError, match="train/again/0"):
            await actor.generate_sequences([renamed, renamed])
        after = await actor.generate_sequences([renamed])  # what was refused was not sampled
        for same in ({"prompt_id": "train/again/1"}, {"seq": 2 << 20}):
            with pytest.raises(TrainError, match="was sampled under these weights"):
                await actor.generate_sequences([dataclasses.replace(renamed, **same)])  # type: ignore[arg-type]
        tokens = [await rows.take(np.arange(4)).fetch(("response_ids",)) for rows in (before, after)]
        assert tokens[0].ragged("response_ids")[0].tolist() != tokens[1].ragged("response_ids")[0].tolist()

    run(program)


def test_a_prompt_of_the_programs_own_is_read_only_from_the_call_on(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        fields = {"answer": ["7"]}
        own = dataclasses.replace(first(session)[0], prompt_id="train/own/0", seq=1 << 20, fields=fields)
        asked = asyncio.create_task(actor.generate_sequences([own], n=1))
        await asyncio.sleep(0)
        fields["answer"].append("8")
        with pytest.raises(ValueError, match="read-only"):
            own.fields["answer"].append("9")
        assert own.fields == {"answer": ["7"]}
        assert len((await asked).index) == 1

    run(program)


def test_a_session_has_one_actor(run: Any) -> None:
    async def program(session: Session) -> None:
        await session.actor()
        with pytest.raises(ConfigError, match=full_text("has made actor already")):
            await session.actor(devices=[0])

    run(program)


def test_advantages_that_are_not_finite_name_the_estimator(run: Any) -> None:
    def per_row(reward: Any) -> Any:
        return reward / (reward - reward[:1])  # of the first row at least

    def per_token(response_mask: Any) -> Any:
        """Of padding, which does not matter, and of a token that does."""
        made = response_mask / response_mask  # NaN where the mask is 0
        made[1, 0] = float("inf")
        return made

    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session)))
        for function, made in (
            (per_row, r"(nan|inf) in row 0"),
            (per_token, r"in 1 of 16 rows, the first inf in row 1"),
        ):
            with pytest.raises(TrainError, match=rf"estimator .*{function.__name__}.* not finite .*{made}"):
                await session.compute_advantages(batch, function)

    run(program)


def test_samples_of_another_policy_are_corrected_for(run: Any) -> None:
    """With max_staleness=1 (as with an engine that is not ours) algorithm.rollout_correction: auto is on."""

    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session)))
        with pytest.raises(TrainError, match=full_text("call actor.compute_log_prob(batch) first")):
            await session.compute_advantages(batch)
        batch = await actor.compute_log_prob(batch)
        own = batch.with_index({"advantages": batch.index.scalars("reward")})
        with pytest.raises(TrainError, match=r"call session.compute_correction\(batch\)"):
            await actor.update_actor(own)
        batch = await session.compute_advantages(batch)
        names = ["rollout_weights", "old_log_probs", "rollout_log_probs"]
        tokens = await batch.fetch(names)
        weights, old, sampled = (tokens.ragged(name)[0] for name in names)
        torch.testing.assert_close(weights, (old - sampled).exp().clamp(max=2.0))
        assert session._program.step.stats.values()["rollout_correction/clipped_share"] == 0
        await actor.update_actor(await session.compute_correction(own))

    run(program, "trainer.max_staleness=1")


def test_the_reference_follows_the_actor(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, reference, reward = await session.actor(), await session.reference(), await session.reward()
        batch = await reward.compute_reward(await actor.generate_sequences(first(session)))
        batch = await actor.compute_log_prob(batch)
        await actor.update_actor(await session.compute_advantages(batch))
        rows = await actor.generate_sequences(first(session))
        old = await (await reference.compute_log_prob(rows)).fetch(["ref_log_probs"])
        await reference.follow(actor)
        rows = await reference.compute_log_prob(await actor.compute_log_prob(rows))
        new = await rows.fetch(["ref_log_probs", "old_log_probs"])
        assert not torch.equal(old.ragged("ref_log_probs")[0], new.ragged("ref_log_probs")[0])
        assert torch.equal(new.ragged("old_log_probs")[0], new.ragged("ref_log_probs")[0])

    run(program)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.rollout_correction={mode: bypass}", full_text("mode=bypass is for the built-in loop")),
        ("reference.refresh_every=1", r"await reference.follow\(actor\)"),
    ],
)
def test_what_a_program_does_itself_is_refused_in_the_recipe(run: Any, override: str, said: str) -> None:
    async def program(session: Session) -> None:
        raise AssertionError("not reached")

    with pytest.raises(ConfigError, match=said):
        run(program, override)


@pytest.mark.parametrize(
    ("schedule", "calls", "said"),
    [
        ("linear, min_ratio: 0.1", 1, []),
        ("linear, min_ratio: 0.1", 2, ["has taken 6 optimizer steps, and the recipe plans 4"]),
        ("constant", 2, []),
    ],
)
def test_a_program_that_goes_on_where_the_learning_rate_has_ended_is_told(
    run: Any, monkeypatch: pytest.MonkeyPatch, schedule: str, calls: int, said: list[str]
) -> None:
    """Once. Two steps of two mini-batches are planned."""
    warned: list[str] = []
    monkeypatch.setattr(Reporter, "warn", lambda self, message: warned.append(message))

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for prompts in session.prompts():
            batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))
            batch = await session.compute_advantages(batch, "dr_grpo")
            told = [await actor.update_actor(batch, mini_batches=2) for _ in range(calls)]
            await session.log(batch, *told)

    run(
        program,
        f"actor.optimizer.schedule={{name: {schedule}}}",
        "trainer.total_steps=2",
        "algorithm.policy_loss=ppo_clip",
        "algorithm.entropy_coef=0.01",  # no mini-batch is idle
    )
    found = [message for message in warned if "optimizer steps" in message]
    assert [words in message for words, message in zip(said, found, strict=True)] == [True] * len(said)


@pytest.mark.slow
def test_an_engine_that_is_killed_gets_its_weights_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests would wait for ever: nobody else loads weights in a program of one's own."""
    warned: list[str] = []
    monkeypatch.setattr(Reporter, "warn", lambda self, message: warned.append(message))
    others = [engine.pid for engine in engine_processes()]

    async def program(session: Session) -> None:
        actor = await session.actor()
        prompts = first(session, 2)
        greedy = functools.partial(actor.generate_sequences, prompts, do_sample=False)
        before = (await (await greedy()).fetch()).rows("response_ids")
        (engine,) = engine_processes(but=others)
        engine.kill()
        async with session._program.run.weights.mender:  # as inside of the loop
            again = await asyncio.wait_for(greedy(), 120)
        for one, other in zip(before, (await again.fetch()).rows("response_ids"), strict=True):
            assert one.tolist() == other.tolist()
        assert len(warned) == 1
        assert "it was started again and wants weights" in warned[0]

    run(program, "rollout.engine.process=own")


async def grpo(session: Session) -> None:
    """GRPO with a KL to the reference, spelled out."""
    actor, reference, reward = await session.actor(), await session.reference(), await session.reward()
    async for prompts in session.prompts():
        batch = await reward.compute_reward(await actor.generate_sequences(prompts))
        batch = await reference.compute_log_prob(await actor.compute_log_prob(batch))
        batch = await session.compute_advantages(batch)
        await session.log(batch, await actor.update_actor(batch))


ADAPTIVE = (
    "algorithm.kl={name: k3, where: loss, coef: 0.1, "
    "controller: {name: adaptive, target: 0.001, horizon: 100}}"
)
POWERS = {
    "filter": (
        "reward.accuracy=first_is_even",
        FIRST,
        "algorithm.filter=mixed_accuracy",
        "algorithm.filter.max_refills=50",
    ),
    "adaptive": (ADAPTIVE,),
    "stale": ("trainer.max_staleness=2", "trainer.on_update=finish"),
}


@pytest.mark.slow
@pytest.mark.parametrize("power", POWERS)
def test_a_program_has_the_powers_of_the_loop(run: Any, recipe: Path, tmp_path: Path, power: str) -> None:
    """Filters, adaptive coefficients, staleness: the same bits as `rondo train` with the same settings."""
    settings = (*KL, *POWERS[power], "trainer.total_steps=3", "checkpoint.export=true")
    run(grpo, *settings)
    inline("train", str(recipe), *QUIET, *settings, f"trainer.run_dir={tmp_path / 'built-in'}")
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "built-in")
    kept = ("actor/", "reward/mean", "buffer/staleness", "buffer/filtered", "rollout_correction/")
    for mine, its in zip(ours, theirs, strict=True):
        same = [key for key in its if key.startswith(kept)]
        assert {key: mine.get(key) for key in same} == {key: its[key] for key in same}
    if power == "filter":
        assert sum(line["buffer/filtered"] for line in ours) > 0
    if power == "stale":
        assert max(line["buffer/staleness_max"] for line in ours) == 2
    assert weights(tmp_path / "run") == weights(tmp_path / "built-in")


def test_resampling_is_a_line_of_the_program(run: Any, recipe: Path, tmp_path: Path) -> None:
    async def program(session: Session) -> None:
        actor, reward = await session.actor(), await session.reward()
        async for prompts in session.prompts():
            batch = await reward.compute_reward(await actor.generate_sequences(prompts))
            batch = await actor.compute_log_prob(batch)
            with pytest.raises(ConfigError, match=full_text("call session.resample(batch) after")):
                await session.compute_advantages(batch)
            batch = await session.compute_advantages(await session.resample(batch))
            await session.log(batch, await actor.update_actor(batch))

    settings = (*RESAMPLED, "trainer.total_steps=2", "checkpoint.export=true")
    run(program, *settings)
    inline("train", str(recipe), *QUIET, *settings, f"trainer.run_dir={tmp_path / 'built-in'}")
    assert weights(tmp_path / "run") == weights(tmp_path / "built-in")


def test_a_coefficient_that_adapts_asks_for_what_it_follows(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, reference = await session.actor(), await session.reference()
        async for prompts in session.prompts():
            batch = await actor.compute_log_prob(await actor.generate_sequences(prompts))
            batch = await reference.compute_log_prob(batch)
            await actor.update_actor(await session.compute_advantages(batch))
            with pytest.raises(TrainError, match=full_text("generate_sequences after update_actor")):
                await actor.generate_sequences(prompts, do_sample=False)

    with pytest.raises(TrainError, match=r"call session.log\(batch, metrics\)"):
        run(program, *KL, ADAPTIVE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ended", "said"),
    [
        (signal.SIGINT, KeyboardInterrupt, full_text("same command again to go on from there")),
        (signal.SIGTERM, SystemExit, "143"),
    ],
)
def test_a_program_that_is_stopped_saves_and_goes_on(
    run: Any, tmp_path: Path, number: signal.Signals, ended: type[BaseException], said: str
) -> None:
    settings = (*KL, "trainer.total_steps=3", "checkpoint.every=3", "checkpoint.export=true")

    async def stopped(session: Session) -> None:
        async def interrupt() -> None:
            while session.step < 1:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), number)

        interrupting = asyncio.create_task(interrupt())
        await grpo(session)
        await interrupting

    with pytest.raises(ended, match=said):
        run(stopped, *settings)
    assert 1 <= len(metrics(tmp_path / "run")) < 3
    run(grpo, *settings)
    run(grpo, *settings, f"trainer.run_dir={tmp_path / 'undisturbed'}")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")
    with pytest.raises(ConfigError, match=full_text("this run is finished, and these settings")):
        run(grpo, *settings, "actor.optimizer.lr=2e-3")


class BrokenError(Exception):
    """In the program, at a step of the test's choice."""


@pytest.mark.slow
@pytest.mark.parametrize("power", ["adaptive", "stale"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_program_that_breaks_off_goes_on_where_it_was(
    run: Any, tmp_path: Path, power: str, at: int
) -> None:
    """In the middle of any step; the same bits as undisturbed."""
    settings = (*KL, *POWERS[power], "trainer.total_steps=4", "checkpoint.every=1", "checkpoint.export=true")

    async def breaks(session: Session) -> None:
        update = ActorWorker.update_actor

        def broken(self: ActorWorker, *arguments: Any, **options: Any) -> Any:
            if session.step == at:
                raise BrokenError
            return update(self, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ActorWorker, "update_actor", functools.wraps(update)(broken))
            await grpo(session)

    with pytest.raises(WorkerError, match="BrokenError"):
        run(breaks, *settings)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, at + 1))
    run(grpo, *settings)
    run(grpo, *settings, f"trainer.run_dir={tmp_path / 'undisturbed'}")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "undisturbed")
