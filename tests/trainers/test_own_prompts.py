"""Prompts and rows that a program brings itself: what it asks is answered as the stream's is, and what it
brings is a row as a sampled one is, so far as anybody knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.core.batch import BatchRef
from rondo.core.errors import ConfigError, DataError, TrainError
from rondo.core.types import Prompt
from rondo.trainers.sessions import Actor, Session
from tests.trainers.conftest import in_a_session, metrics, weights

QUIET = ("trainer.evaluation={before: false, after: false, every: null}", "checkpoint.export=false")
CORRECTED = "algorithm.rollout_correction={mode: decoupled, importance: {level: token, upper: 2.0}}"


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Callable[..., None]:
    """run(program, *overrides): the program in a session of the tiny recipe."""

    def start(program: Callable[[Session], Awaitable[None]], *overrides: str, **options: Any) -> None:
        in_a_session(recipe, tmp_path / "run", program, *QUIET, *overrides, **options)

    return start


def first(session: Session, number: int = 4, start: int = 0) -> list[Prompt]:
    return [session.data.train.prompt(start + seq) for seq in range(number)]


async def learn(session: Session, actor: Actor, batch: BatchRef) -> None:
    batch = await session.compute_advantages(await actor.compute_log_prob(batch), "grpo")
    await session.log(batch, await actor.update_actor(batch))


async def fed(session: Session) -> None:
    actor = await session.actor()
    async for prompts in session.prompts():
        await learn(session, actor, await actor.generate_sequences(prompts))


async def unfed(session: Session) -> None:
    """The same questions as the stream has, asked by the program."""
    actor = await session.actor()
    async for number in session.steps():
        assert number == session.step
        await learn(session, actor, await actor.generate_sequences(first(session, start=4 * number)))


def test_a_sampler_of_rows_that_nobody_reads_is_refused(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.sampler chooses among the rows"):
        run(unfed, "data.sampler=success_rate")


def test_own_prompts_are_answered_as_the_stream_is(run: Any, tmp_path: Path) -> None:
    settings = ("trainer.total_steps=3", "checkpoint.export=true")
    for program in (fed, unfed):
        run(program, *settings, f"trainer.run_dir={tmp_path / program.__name__}")
    assert weights(tmp_path / "fed") == weights(tmp_path / "unfed")
    theirs, ours = metrics(tmp_path / "fed"), metrics(tmp_path / "unfed")
    assert [line["step"] for line in ours] == [1, 2, 3]
    for line, its in zip(ours, theirs, strict=True):
        # Without a stream there is none to tell of.
        assert {k: v for k, v in its.items() if "buffer/" not in k} == {
            k: v for k, v in line.items() if "buffer/" not in k
        }
        assert not any(key.startswith("buffer/staleness") for key in line)


def test_a_session_has_one_loop(run: Any) -> None:
    async def program(session: Session) -> None:
        await unfed(session)
        with pytest.raises(ConfigError, match="a session has one loop"):
            await anext(session.prompts())

    run(program, "trainer.total_steps=1")


def test_a_prompt_is_made_as_the_stream_makes_it_and_never_twice(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        theirs = first(session, 1)[0]
        ours = [session.prompt(theirs.messages, fields=theirs.fields, source="train") for _ in range(2)]
        for prompt in ours:
            for name in ("token_ids", "fields", "messages", "opening", "source"):
                np.testing.assert_equal(getattr(prompt, name), getattr(theirs, name))
        assert len({prompt.seq for prompt in ours} | {prompt.prompt_id for prompt in ours}) == 4
        rows = await actor.generate_sequences(ours)
        again = await actor.generate_sequences([session.prompt(theirs.token_ids)])
        answers = [
            row.tolist() for row in (await BatchRef.concat([rows, again]).fetch()).rows("response_ids")
        ]
        assert answers[:4] != answers[4:8] != answers[8:] != answers[:4]
        assert rows.index.scalars("source").tolist() == ["train"] * 8
        text = session.prompt("How many?")
        assert text.messages == ({"role": "user", "content": "How many?"},)
        assert session.tokenizer.decode(text.token_ids).count("How many?") == 1

    run(program)


def test_what_is_no_prompt_is_said(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        for wrong in (np.zeros(0, np.int32), np.zeros((1, 2), np.int32), np.array([0.5])):
            with pytest.raises(DataError, match="no row of one token id or more"):
                session.prompt(wrong)
        with pytest.raises(DataError, match="a list of mappings, got int: 3"):
            session.prompt(3)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="role"):
            session.prompt([{"content": "Who says this?"}])
        long = session.prompt(np.zeros(66, np.int32))
        with pytest.raises(DataError, match="66 tokens, and with a response of 8"):
            await actor.generate_sequences([long])
        assert (await actor.generate_sequences([long], max_tokens=6)).index.scalars(
            "response_length"
        ).max() <= 6

    run(program)


@pytest.mark.parametrize(
    ("response", "log_probs", "says"),
    [
        ([-1, 3], None, "the token id -1"),
        ([3, 3], [0.5, -1.0], "above 0"),
        ([3, 3], [np.nan, -1.0], "above 0"),
    ],
)
def test_rows_that_cannot_be(run: Any, response: list[int], log_probs: Any, says: str) -> None:
    async def program(session: Session) -> None:
        await session.actor()
        said = None if log_probs is None else [np.array(log_probs)]
        with pytest.raises(DataError, match=says):
            await session.rows(first(session, 1), [np.array(response)], log_probs=said, reward=[1.0])

    run(program)


def test_rewards_and_versions_that_cannot_be(run: Any) -> None:
    async def program(session: Session) -> None:
        await session.actor()
        given = first(session, 1), [np.array([3, 4])]
        for wrong, says in (
            ({"reward": 1.0}, "no list of reward"),
            ({"reward": [np.nan]}, "no finite number"),
            ({"reward": [1.0], "versions": [7]}, "not there yet; this one is version 0"),
        ):
            with pytest.raises(DataError, match=says):
                await session.rows(*given, **wrong)
        asked = session.prompt([5, 6, 7])
        assert asked.token_ids.tolist() == [5, 6, 7]
        with pytest.raises(DataError, match="no row of one token id or more"):
            session.prompt([5, -6])

    run(program)


def test_sampling_is_chosen_for_a_call(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, (prompt, *_) = await session.actor(), first(session)

        whole = await asked_elsewhere(session, actor, prompt, n=3)
        assert await asked_elsewhere(session, actor, prompt, n=2) == whole[:2]
        greedy = await asked_elsewhere(session, actor, prompt, do_sample=False)
        assert await asked_elsewhere(session, actor, prompt, temperature=1e-4, n=2) == greedy * 2
        short = await asked_elsewhere(session, actor, prompt, max_tokens=3, n=3)
        assert short == [row[:3] for row in whole]
        stop = session.tokenizer.decode([whole[0][1]])
        stopped = await asked_elsewhere(session, actor, prompt, stop=[stop], n=1)
        assert stopped[0] == whole[0][: len(stopped[0])]
        assert stop in session.tokenizer.decode(stopped[0])
        assert stop not in session.tokenizer.decode(stopped[0][:-1])
        for wrong in ({"n": 2}, {"temperature": 0.5}):
            with pytest.raises(ConfigError, match="do_sample=False"):
                await actor.generate_sequences([prompt], do_sample=False, **wrong)

    run(program)


async def asked_elsewhere(session: Session, actor: Actor, prompt: Prompt, **options: Any) -> list[list[int]]:
    """The answers to this question with the noise of number 1 << 20, as if nothing had been asked before."""
    session._program._asked = (0, frozenset())
    again = dataclasses.replace(prompt, seq=1 << 20, prompt_id="again")
    rows = await actor.generate_sequences([again], **options)
    return [row.tolist() for row in (await rows.fetch(["response_ids"])).rows("response_ids")]


def test_samples_of_another_temperature_are_corrected_for_or_refused(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        rows = await actor.generate_sequences(first(session), temperature=1.5)
        batch = await session.compute_advantages(await actor.compute_log_prob(rows), "grpo")
        if session.config.algorithm.rollout_correction.mode == "auto":  # type: ignore[union-attr]
            with pytest.raises(TrainError, match=r"sampled at temperature=1\.5, and trained"):
                await actor.update_actor(batch)
            return
        tokens = await batch.fetch(["old_log_probs", "rollout_log_probs", "rollout_weights"])
        old, sampled, weights = (tokens.ragged(name)[0] for name in tokens.columns[1:])
        assert (old - sampled).abs().max() > 0.01
        torch.testing.assert_close(weights, (old - sampled).exp().clamp(max=2.0))
        await actor.update_actor(batch)

    run(program)
    run(program, CORRECTED)


IDENTITY = ("row_id", "sample_index", "trajectory_id")


def test_rows_that_are_brought_are_those_that_were_sampled(run: Any) -> None:
    """All columns but the names, when the program gives back what the policy has said."""

    async def program(session: Session) -> None:
        actor, prompts = await session.actor(), first(session)
        sampled = await actor.generate_sequences(prompts)
        rows = await sampled.fetch()
        of = {prompt.seq: prompt for prompt in prompts}
        order = np.random.default_rng(0).permutation(len(rows))
        asked = [of[int(seq)] for seq in rows.scalars("seq")[order]]
        parts = [
            [rows.rows(name)[i] for i in order]
            for name in ("response_ids", "rollout_log_probs", "policy_versions")
        ]
        brought = await session.rows(asked, parts[0], log_probs=parts[1], versions=parts[2])
        again = await brought.fetch()
        assert again.columns == rows.columns
        for name in set(rows.columns) - set(IDENTITY):
            assert again.array(name).equals(rows.take(order).array(name)), name
        assert len({*again.scalars("row_id"), *rows.scalars("row_id")}) == 2 * len(rows)
        both = BatchRef.concat([sampled, brought])
        assert sorted(np.unique(both.index.scalars("group_id"), return_counts=True)[1]) == [8] * 4
        given = await session.rows(asked, parts[0], reward=np.arange(len(asked)))
        np.testing.assert_array_equal(given.index.scalars("reward"), np.arange(len(asked)))
        np.testing.assert_array_equal(given.index.scalars("oldest_version"), -1)

    run(program, "rollout.max_tokens=6")


def test_an_answer_as_text_is_what_the_template_writes(run: Any) -> None:
    async def program(session: Session) -> None:
        await session.actor()
        prompt = session.prompt("How many?")
        rows = await session.rows([prompt], ["#### 7"])
        (ids,) = (await rows.fetch(["response_ids"])).rows("response_ids")
        plain = session.tokenizer("#### 7", add_special_tokens=False)["input_ids"]
        assert ids.tolist() == [*plain, session.tokenizer.eos_token_id]
        assert rows.index.scalars("finish_reason").tolist() == ["stop"]
        cut = await session.rows([prompt], [ids[:-1]])
        assert cut.index.scalars("finish_reason").tolist() == ["length"]
        with pytest.raises(DataError, match="needs a prompt of messages"):
            await session.rows([session.prompt(prompt.token_ids)], ["#### 7"])
        with pytest.raises(DataError, match="2 reward for 1 responses"):
            await session.rows([prompt], [ids], reward=[1, 2])
        with pytest.raises(DataError, match=rf"has {len(ids)} tokens, and its log_probs the shape \(1,\)"):
            await session.rows([prompt], [ids], log_probs=[ids[:1].astype(float)])

    run(program)


@pytest.mark.parametrize("corrected", [True, False])
def test_an_experts_rows_weigh_one_and_are_in_no_gap(run: Any, corrected: bool) -> None:
    """What is measured of the sampler is what it is without them."""

    async def program(session: Session) -> None:
        actor, prompts = await session.actor(policy_loss="reinforce"), first(session)
        sampled = await actor.generate_sequences(prompts)
        words = [
            row[::-1].copy() for row in (await sampled.fetch(["response_ids"])).rows("response_ids")[::4]
        ]
        expert = await session.rows(prompts, words, reward=[1.0] * 4)
        found = []
        for batch in (sampled, BatchRef.concat([sampled, expert])):
            batch = await actor.compute_log_prob(batch)
            advantages = np.ones(len(batch), np.float32)
            batch = batch.with_index({"advantages": advantages})
            batch = await session.compute_correction(batch)
            step = session._program.step.stats
            correction = {k: v for k, v in step.values().items() if k.startswith("rollout_correction/")}
            session._program._outside = None
            tokens = await batch.fetch(["rollout_log_probs", "response_mask", "old_log_probs"])
            unsaid = tokens.ragged("rollout_log_probs")[0].isnan()
            assert int(unsaid.sum()) == sum(map(len, words)) * (len(batch) > 16)
            if corrected:
                weights = (await batch.fetch(["rollout_weights"])).ragged("rollout_weights")[0]
                assert (weights[unsaid] == 1).all()
                ratio = (tokens.ragged("old_log_probs")[0] - tokens.ragged("rollout_log_probs")[0]).exp()
                torch.testing.assert_close(weights[~unsaid], ratio[~unsaid])
            stats = await actor.update_actor(batch, mini_batches=1)
            assert np.isfinite([*stats.values().values()]).all()
            assert stats.values()["rollout/log_prob_gap_max"] < 1e-3
            found.append((correction, stats.means["rollout/log_prob_gap"][1], int((~unsaid).sum())))
            assert stats.means["rollout/kl_k3"][1] == found[-1][1]
        (alone, counted, tokens), (together, counted_together, tokens_together) = found
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            assert together[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert counted == counted_together == tokens == tokens_together

    settings = ("actor.optimizer.lr=1e-12", CORRECTED if corrected else "algorithm.rollout_correction=null")
    run(program, *settings)


def test_a_loss_that_reads_the_sampler_needs_to_know_it(run: Any) -> None:
    def off_policy(log_probs: Any, rollout_log_probs: Any, advantages: Any) -> Any:
        return -(log_probs - rollout_log_probs).exp() * advantages, {}

    async def program(session: Session) -> None:
        actor, prompts = await session.actor(policy_loss=off_policy), first(session)
        words = [np.array([5, 6, 7])] * 4
        for log_probs in (None, [np.full(3, -1.0)] * 4):
            rows = await session.rows(prompts, words, reward=[0.0, 1.0, 2.0, 3.0], log_probs=log_probs)
            rows = rows.with_index({"advantages": rows.index.scalars("reward")})
            if log_probs is None:
                with pytest.raises(TrainError, match="4 of 4 rows came without"):
                    await actor.update_actor(rows)
        tokens = (await (await actor.compute_log_prob(rows)).fetch(["old_log_probs"])).ragged(
            "old_log_probs"
        )[0]
        by_hand = -((tokens + 1.0).exp() * torch.arange(4.0).repeat_interleave(3)).mean()
        stats = await actor.update_actor(rows, mini_batches=1)
        assert stats.values()["actor/policy_loss"] == pytest.approx(float(by_hand), rel=1e-5)

    run(program)


def test_a_term_that_reads_the_sampler_needs_to_know_it(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, prompts = await session.actor(), first(session)
        rows = await session.rows(prompts, [np.array([5, 6, 7])] * 4, reward=[0.0] * 4)
        rows = rows.with_index({"advantages": rows.index.scalars("reward")})
        with pytest.raises(TrainError, match="and 4 of 4 rows came without"):
            await actor.update_actor(rows)

    run(program, f"algorithm.terms=[{{name: '{__file__}:of_the_sampler'}}]")


def of_the_sampler(rollout_log_probs: Any) -> Any:
    return rollout_log_probs, {}


def test_who_sampled_a_row_is_known_of_the_last_time(run: Any) -> None:
    """The same prompt has rows of the same ids in another step."""

    async def program(session: Session) -> None:
        actor, prompts = await session.actor(), first(session)
        known, words = [np.full(2, -1.0)] * 4, [np.array([5, 6])] * 4
        async for step in session.steps():
            told: dict[str, Any] = {"log_probs": known} if step == 0 else {}
            brought = await session.rows(prompts, words, reward=[0.0] * 4, **told)
            rows = await actor.generate_sequences(prompts, temperature=1.5 if step == 0 else None)
            samplers = session._program._samplers.values()
            assert sum(one.other is not None for one in samplers) == (20 if step == 0 else 0)
            assert sum(not one.is_said for one in samplers) == 4 * step
            if step == 1:
                await learn(session, actor, BatchRef.concat([rows, brought]))

    run(program, "trainer.total_steps=2")


def test_prompts_with_one_number_are_no_group(run: Any) -> None:
    """A row of the second would be one of the first."""

    async def program(session: Session) -> None:
        await session.actor()
        prompt = session.prompt("How many?")
        other = prompt.replaced(token_ids=prompt.token_ids[:-1], prompt_id="other")
        with pytest.raises(DataError, match="are different prompts with one number"):
            await session.rows([prompt, other], [np.array([5, 6])] * 2, reward=[0.0, 1.0])

    run(program)


def test_no_answer_is_no_number_of_answers(run: Any) -> None:
    async def program(session: Session) -> None:
        actor = await session.actor()
        prompts = [session.prompt("How many?")]
        with pytest.raises(DataError, match="asked for 0 answers"):
            await actor.generate_sequences(prompts, n=0)
        with pytest.raises(DataError, match="asked for -1 answers"):
            actor.ask(prompts, n=-1)

    run(program)


def test_known_log_probs_that_nothing_reads_are_refused(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, prompts = await session.actor(), first(session)
        rows = await session.rows(
            prompts, [np.array([5, 6])] * 4, reward=[0.0] * 4, log_probs=[np.full(2, -1.0)] * 4
        )
        rows = rows.with_index({"advantages": np.ones(4, np.float32)})
        with pytest.raises(TrainError, match=r"4 of 4 rows are another policy's \(ses"):
            await actor.update_actor(rows)

    run(program)
