"""Models by name: a policy beside the run's learns as it would by itself, a frozen one says what its weights
say, and teachers by source are each asked for their own rows."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from rondo.checkpoint import CheckpointStore
from rondo.config.rules import _LOG_PROBS
from rondo.core.batch import BatchRef
from rondo.core.columns import TABLE, ColumnFamily
from rondo.core.errors import CheckpointError, ConfigError, TrainError
from rondo.tracking.sums import each_sums
from rondo.trainers.program.producers import PRODUCERS
from rondo.trainers.program.stages import Production
from rondo.trainers.sessions import Session, open_session
from tests.trainers.conftest import (
    RECIPE,
    in_a_session,
    inline,
    killed_and_undisturbed,
    metrics,
    weights,
)
from tests.trainers.test_own_prompts import QUIET, first

PLAIN = {
    column.name
    for column in TABLE
    if column.name.endswith("_log_probs") and not isinstance(column, ColumnFamily)
}
JUDGE = "models={judge: {like: actor}}"
SAVED = ("trainer.total_steps=4", "checkpoint.every=2", "checkpoint.export=true", JUDGE)


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(name, program, *overrides) -> the run folder."""

    def start(name: str, program: Callable[[Session], Awaitable[None]], *overrides: str) -> Path:
        return in_a_session(recipe, tmp_path / name, program, *QUIET, *overrides)

    return start


def policies(run: Path) -> list[bytes]:
    """The exported parameters of the policy and of the judge."""
    return [(run / part / "model.safetensors").read_bytes() for part in ("export", "exports/judge")]


async def update(session: Session, actor: Any, batch: BatchRef) -> Any:
    batch = await session.compute_advantages(await actor.compute_log_prob(batch), "grpo")
    return batch, await actor.update_actor(batch)


def alone(start: int) -> Callable[[Session], Awaitable[None]]:
    """A policy by itself, asked the prompts from `start` on."""

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for number in session.steps():
            rows = await actor.generate_sequences(first(session, start=start + 4 * number))
            await session.log(*await update(session, actor, rows))

    return program


async def together(session: Session) -> None:
    actor, judge = await session.actor(), await session.actor("judge")
    async for number in session.steps():
        ours = first(session, start=4 * number)
        theirs = first(session, start=32 + 4 * number)
        rows, told = await update(session, actor, await actor.generate_sequences(ours))
        _, its = await update(session, judge, await judge.generate_sequences(theirs))
        await session.log(rows, told, its)


async def ahead(session: Session) -> None:
    """Both are asked as far ahead as the recipe allows."""
    actor, judge = await session.actor(), await session.actor("judge")
    allowed = session.config.trainer.max_staleness
    async for number in session.steps():
        for policy in (actor, judge):
            while policy.asked <= allowed and number + policy.asked < session.total_steps:
                policy.ask([session.prompt(f"How many? {number} {place}") for place in range(2)], n=2)
        rows, told = await update(session, actor, await actor.answers())
        _, its = await update(session, judge, await judge.answers())
        await session.log(rows, told, its)


@pytest.mark.slow
def test_each_of_two_policies_learns_as_it_would_alone(run: Any, tmp_path: Path) -> None:
    both = run("both", together, *SAVED)
    ours, theirs = run("ours", alone(0), *SAVED), run("theirs", alone(32), *SAVED)
    assert weights(both) == weights(ours)
    assert (both / "exports" / "judge" / "model.safetensors").read_bytes() == (
        theirs / "export" / "model.safetensors"
    ).read_bytes()
    assert weights(ours) != weights(theirs)
    for line, mine, its in zip(metrics(both), metrics(ours), metrics(theirs), strict=True):
        assert {key: line[key] for key in mine if key.startswith("actor/")} == {
            key: value for key, value in mine.items() if key.startswith("actor/")
        }
        for name in ("policy_loss", "grad_norm", "lr", "ppo_kl", "entropy_sampled"):
            assert line[f"judge/{name}"] == its[f"actor/{name}"]
        assert line["judge/rollout/generated_tokens"] == its["rollout/generated_tokens"]
        assert line["judge/advantage_abs"] == its["actor/advantage_abs"]
    sums = [dict(each_sums(folder)) for folder in (both, ours, theirs)]
    for step, found in sums[0].items():
        of_judge = {name: value for name, value in found.items() if name.startswith("judge")}
        assert {name: value for name, value in found.items() if name not in of_judge} == sums[1][step]
        alone_in_it = {f"judge/{name}": value for name, value in sums[2][step].items() if ":" not in name}
        alone_in_it |= {
            name.replace("actor:", "judge:"): value for name, value in sums[2][step].items() if ":" in name
        }
        assert of_judge == alone_in_it
    checkpoint = CheckpointStore(both / "checkpoints").latest()
    assert checkpoint is not None
    assert {name.partition("/")[0] for name in checkpoint.files} >= {"actor", "judge"}
    out = tmp_path / "written"
    inline("export", str(both), str(out), "--model", "judge")
    assert (out / "model.safetensors").read_bytes() == (
        both / "exports" / "judge" / "model.safetensors"
    ).read_bytes()
    assert "exports/judge" in inline("doctor", str(both)).stdout


@pytest.mark.slow
@pytest.mark.parametrize("where", ["one", "two"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_two_policies_that_are_killed_end_with_the_same_bits(
    recipe: Path, tmp_path: Path, where: str, staleness: int
) -> None:
    processes = ("cluster.backend=process", "cluster.devices=2") if where == "two" else ()
    late = (f"trainer.max_staleness={staleness}", *(["trainer.on_update=finish"] if staleness else []))
    settings = [*SAVED, *QUIET[:1], *late, *processes]
    killed, whole = killed_and_undisturbed("tests.trainers.test_named_models", tmp_path, recipe, *settings)
    assert policies(killed) == policies(whole)
    assert metrics(killed) == metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["{judge: b}", "{rollout: b}"])
def test_where_two_policies_stand_changes_nothing(run: Any, placement: str) -> None:
    """The judge by itself; and both trainers here, both policies' engines there."""
    pools = f"cluster={{backend: process, devices: 2, pools: {{a: 1, b: 1}}, placement: {placement}}}"
    apart, one = run("apart", together, *SAVED, pools), run("one", together, *SAVED)
    assert policies(apart) == policies(one)


def test_rows_of_another_policy_are_corrected_for_or_refused(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, judge = await session.actor(), await session.actor("judge")
        async for number in session.steps():
            rows = await judge.generate_sequences(first(session, start=4 * number))
            with pytest.raises(TrainError, match="sampled by judge, and trained by actor"):
                await update(session, actor, rows)
            with pytest.raises(TrainError, match="was sampled under these weights"):
                await actor.generate_sequences(first(session, start=4 * number))
            await session.log(*await update(session, judge, rows))

    run("refused", program, "trainer.total_steps=2", JUDGE)


def test_rows_that_nobody_here_sampled_are_for_every_policy(run: Any) -> None:
    """And a greedy answer is a row of its own: what is known of the samples stays."""

    async def program(session: Session) -> None:
        actor, judge = await session.actor(), await session.actor("judge")
        async for number in session.steps():
            prompts = first(session, start=4 * number)
            rows = await actor.generate_sequences(prompts)
            greedy = await judge.generate_sequences(prompts, do_sample=False)
            assert len(BatchRef.concat([rows, greedy])) == 20
            told = (await update(session, actor, rows))[1]
            answers = (await rows.fetch(["response_ids"])).rows("response_ids")
            given = await session.rows(
                [session.prompt(prompts[0]) for _ in range(2)], answers[:2], reward=[0.0, 1.0]
            )
            given = given.with_index({"group_id": np.zeros(2, np.int64)}, replace=True)
            advantages = {"advantages": np.array([-0.5, 0.5], np.float32)}
            learnt = await judge.update_actor(given.with_index(advantages), mini_batches=1)
            await session.log(rows, told, learnt)

    run("given", program, "trainer.total_steps=1", JUDGE, "algorithm.rollout_correction=null")


def test_a_policy_that_did_not_learn_before_is_named(run: Any) -> None:
    run("begun", alone(0), "trainer.total_steps=1", *SAVED[1:2], JUDGE, "checkpoint.every=1")
    with pytest.raises(CheckpointError, match="has nothing of judge"):
        run("begun", together, "trainer.total_steps=2", JUDGE, "checkpoint.every=1")


def test_branches_of_two_policies_are_rows_of_their_own(run: Any) -> None:
    async def program(session: Session) -> None:
        actor, judge = await session.actor(), await session.actor("judge")
        async for number in session.steps():
            rows = await actor.generate_sequences(first(session, start=4 * number))
            places = [0] * len(rows)
            theirs, ours = await judge.branch(rows, places), await actor.branch(rows, places)
            assert len(BatchRef.concat([theirs, ours])) == 2 * len(rows)
            with pytest.raises(TrainError, match="sampled by judge"):
                await update(session, actor, theirs)
            await session.log(*await update(session, actor, ours))

    run("branches", program, "trainer.total_steps=1", JUDGE)


def test_what_there_is_no_policy_of(run: Any) -> None:
    async def program(session: Session) -> None:
        with pytest.raises(ConfigError, match=r"session\.actor\(\) comes before"):
            await session.actor("judge")
        await session.actor()
        for name in ("jugde", "ppo_clip", "frozen"):
            with pytest.raises(ConfigError, match="no policy of `models`"):
                await session.actor(name)
        with pytest.raises(ConfigError, match="no teacher of `models`"):
            await session.scorer("judge")
        await session.actor("judge")
        with pytest.raises(ConfigError, match="has made judge already"):
            await session.actor("judge")
        with pytest.raises(ConfigError, match="has made actor already"):
            await session.actor()

    run("none", program, JUDGE)


# ---- frozen ones ----


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with other weights than the policy's."""
    recipe = tmp_path_factory.mktemp("teachers") / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    folders = [recipe.parent / str(seed) for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        settings = ("trainer.total_steps=1", f"trainer.seed={seed}", QUIET[0])
        inline("train", str(recipe), *settings, f"trainer.run_dir={folder}")
    return [folder / "export" for folder in folders]


def named(teachers: list[Path]) -> str:
    first, second = teachers
    return f"models={{math: {{like: teacher, path: {first}}}, code: {{like: teacher, path: {second}}}}}"


SAID = ("math_log_probs", "code_log_probs", "teacher_log_probs")


def by_transformers(folder: Path, row: Any, temperature: float = 1.0) -> torch.Tensor:
    """The log-probs of a response's tokens."""
    prompt, response = (torch.tensor(row[name]) for name in ("prompt_ids", "response_ids"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, response[:, None])[:, 0]


def test_frozen_models_say_what_their_weights_say(run: Any, teachers: list[Path]) -> None:
    """As columns of a program, and, of a recipe's stage, each for the rows of its sources."""

    async def program(session: Session) -> None:
        actor = await session.actor()
        math, code = await session.scorer("math"), await session.scorer("code")
        asked = [
            session.prompt(f"How many? {number}", source="sums" if number % 3 else "loops")
            for number in range(4)
        ]
        batch = await code.compute_log_prob(
            await math.compute_log_prob(await actor.generate_sequences(asked, n=2))
        )
        (one,) = (producer for producer in PRODUCERS if producer.columns == ("teacher_log_probs",))
        stage = Production(replace(one, by_source={"loops": "code", "sums": "math"}, for_others=False))
        step = session._program.step
        assert stage.describe() == "teacher_log_probs <- code|math.compute_log_prob"
        rows = await (await stage(batch, step)).fetch()
        columns = {name: rows.rows(name) for name in ("prompt_ids", "response_ids", *SAID)}
        for place, source in enumerate(rows.array("source").to_pylist()):
            row = {name: column[place] for name, column in columns.items()}
            for name, folder in zip(("math", "code"), teachers, strict=True):
                expected = by_transformers(folder, row).numpy()
                np.testing.assert_allclose(row[f"{name}_log_probs"], expected, atol=2e-5)
            of_source = row["code_log_probs" if source == "loops" else "math_log_probs"]
            np.testing.assert_array_equal(row["teacher_log_probs"], of_source)
        assert not np.array_equal(rows.rows("math_log_probs")[0], rows.rows("code_log_probs")[0])
        only = Production(replace(one, by_source={"sums": "math"}, for_others=False))
        with pytest.raises(TrainError, match="'loops' have no teacher"):
            await only(batch, step)

    run("scored", program, named(teachers))


OPD = ("algorithm.advantage=teacher_gap", "algorithm.policy_loss=reinforce", "trainer.total_steps=2")


def test_a_teacher_of_every_source_is_the_teacher(recipe: Path, tmp_path: Path, teachers: list[Path]) -> None:
    runs = []
    for number, teacher in enumerate(teachers):
        one = f"models={{math: {{like: teacher, path: {teacher}}}}}"
        for kind, own in (
            ("path", [f"teacher.path={teacher}"]),
            ("name", [one, "teacher.by_source={train: math}"]),
        ):
            folder = tmp_path / f"{kind}{number}"
            inline("train", str(recipe), *OPD, *own, f"trainer.run_dir={folder}")
            runs.append(weights(folder))
    assert runs[0] == runs[1] != runs[2] == runs[3]


def test_no_column_has_the_name_of_a_models_log_probs() -> None:
    of_others = {column.name.removesuffix("_log_probs") for column in TABLE if column.name in PLAIN}
    assert of_others == {*_LOG_PROBS, "rollout", "teacher"}  # the last two are roles


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["models={ref: {like: actor}}"], "models.ref"),
        (["models={rollout: {like: actor}}"], "a role or reward model"),
        (["models={mix: {like: actor}}"], "what other metrics begin with"),
        (["models={given: {like: actor}}"], "there is a column given_log_probs"),
        (["models={'a/b': {like: actor}}"], "letters, digits and _"),
        (["models={t: {like: teacher}}"], "a teacher needs a path"),
        (["models={t: {like: teacher, path: x, lr: 0.1}}"], "a teacher is frozen"),
        (["models={j: {like: actor, override: {a: 1}}}"], "models.j.path, which is not set"),
        (["models={j: {like: actor}}"], "nothing in this run asks for it"),
        (["models={j: {}}"], "models.j lacks the key 'like'"),
        (["teacher.by_source={train: t}"], "no teacher of `models` is called so"),
        (["MATH", "teacher.by_source={trian: math}"], "did you mean 'train'"),
        (["MATH", "teacher.by_source={}", "cluster.placement={jugde: all}"], "there is no role 'jugde'"),
    ],
)
def test_what_cannot_be_is_named(
    recipe: Path, tmp_path: Path, teachers: list[Path], settings: list[str], says: str
) -> None:
    math = f"models={{math: {{like: teacher, path: {teachers[0]}}}}}"
    own = [math if text == "MATH" else text for text in settings]
    done = inline("check", str(recipe), *OPD[:2], *own, f"trainer.run_dir={tmp_path / 'none'}", check=False)
    assert done.returncode == 2
    assert says in done.stderr


if __name__ == "__main__":

    async def _main() -> None:
        async with open_session([sys.argv[1]], sys.argv[2:]) as session:
            await ahead(session)

    asyncio.run(_main())
