"""Runs whose prompts a sampler chooses: what it is asked and told, and that they are repeated to the bit."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import rondo
from rondo.core.errors import RewardError, WorkerError
from rondo.trainers.sessions import open_session
from tests.data.test_samplers import Own, chosen
from tests.trainers.conftest import REPOSITORY, SFT_RECIPE, hold_an_answer, inline, metrics, weights
from tests.trainers.samplers import Curious
from tests.trainers.test_buffer import buffer, group
from tests.trainers.test_journal import ASYNCHRONOUS, assert_equal, broken_off, entries
from tests.trainers.test_resume import start, tokens, wait_for_line
from tests.trainers.test_session import KL, QUIET, grpo

CURIOUS = "data.sampler=tests/trainers/samplers.py:Curious"
BINARY = "reward.functions=['tests/trainers/scorers.py:first_is_even']"


def groups(run: Path) -> list[list[tuple[str, int]]]:
    """Of each step: the prompt id and number of answers of each group, in the order of their numbers."""
    steps = []
    for file in sorted((run / "rollouts").glob("step-??????.parquet")):
        table = pq.read_table(file, columns=["group_id", "prompt_id"]).to_pydict()
        ids = dict(zip(table["group_id"], table["prompt_id"], strict=True))
        steps.append([(ids[seq], table["group_id"].count(seq)) for seq in sorted(ids)])
    return steps


def told(run: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds of the sampler."""
    state = json.loads((run / "checkpoints" / f"step-{step:08d}" / "controller.json").read_text())
    found = dict(state["extra"]["sampler"])
    return {**found, "own": json.loads(found["own"])}


def test_one_stage_with_every_source_is_the_order_without_a_sampler(run: Any) -> None:
    plain = run("plain", BINARY)
    staged = run("staged", BINARY, "data.sampler={name: stages, stages: [{step: 1, sources: [train]}]}")
    assert weights(staged) == weights(plain)
    lines = [{k: v for k, v in line.items() if not k.startswith("sampler/")} for line in metrics(staged)]
    assert lines == metrics(plain)
    rows = [[[one.split("/")[2] for one, _ in step] for step in groups(run)] for run in (plain, staged)]
    assert rows[0] == rows[1]


def test_it_chooses_rows_and_sizes_and_hears_every_group_that_is_trained_on(run: Any) -> None:
    done = run("run", CURIOUS, "checkpoint.every=3")
    steps = groups(done)
    assert [len(step) for step in steps] == [4, 4, 4]
    assert len({n for step in steps for _, n in step}) > 2
    state = told(done, 3)
    assert state["chosen"] == state["queue"] == state["heard"] == []
    want = [
        ["train", int(prompt.split("/")[2]), n, step] for step, of in enumerate(steps) for prompt, n in of
    ]
    assert state["own"]["told"] == want
    for line, step in zip(metrics(done)[1:], steps, strict=True):
        assert line["sampler/chosen/train"] == 4
        assert line["sampler/n_mean"] == sum(n for _, n in step) / 4
        assert line["sampler/n_max"] == max(n for _, n in step)


def test_a_function_chooses_by_the_step(run: Any) -> None:
    done = run("run", "data.sampler=tests/trainers/samplers.py:backwards", "rollout.n=5")
    assert groups(done) == [
        [(f"train/{4 * step + i}/{63 - i}", 5 + (step + 1) % 2) for i in range(4)] for step in range(3)
    ]


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_killed_and_resumed_equals_undisturbed(recipe: Path, tmp_path: Path, signum: int) -> None:
    """With SIGINT it saves what was chosen for the fifth step, which is under way."""
    arguments = ("trainer.total_steps=6", "checkpoint.every=3", "trainer.evaluation.every=3", CURIOUS)
    scorer = "reward={functions: ['tests/trainers/scorers.py:held'], timeout_seconds: 3600}"
    inline("train", str(recipe), *arguments, scorer, f"trainer.run_dir={tmp_path / 'undisturbed'}")
    process = start(recipe, tmp_path / "run", CURIOUS, hold="16:20")
    wait_for_line(tmp_path / "run", process, 4)
    process.send_signal(signum)
    process.wait()
    inline("train", str(recipe), *arguments, scorer, f"trainer.run_dir={tmp_path / 'run'}")
    assert tokens(tmp_path / "run") == tokens(tmp_path / "undisturbed")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "undisturbed")
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed")
    assert groups(tmp_path / "run") == groups(tmp_path / "undisturbed")


SAMPLERS = (
    CURIOUS,
    "data.sampler={name: success_rate, low: 0.3, high: 0.9, revisit: 1}",
    "data.sampler={name: knapsack, high: 7}",
)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupted_with_a_filter_equals_undisturbed(
    recipe: Path, tmp_path: Path, sampler: str, staleness: int
) -> None:
    """Every epoch has 8 prompts, so that what was heard decides; the filter's replacements are asked for one
    by one.
    """
    arguments = (
        *("train", str(recipe), "trainer.total_steps=6", "checkpoint.every=2", BINARY, sampler),
        *("data.train.0.options={size: 8}", "algorithm.filter=mixed_accuracy"),
        f"trainer.max_staleness={staleness}",
        "trainer.evaluation={before: false, after: false, every: null}",
    )
    runs = [tmp_path / name for name in ("undisturbed", "run")]
    inline(*arguments, f"trainer.run_dir={runs[0]}")
    with broken_off(4):
        assert inline(*arguments, f"trainer.run_dir={runs[1]}", check=False).returncode == 2
    inline(*arguments, f"trainer.run_dir={runs[1]}")
    assert sum(line["buffer/filtered"] for line in metrics(runs[0])) > 0
    assert metrics(runs[1]) == metrics(runs[0])
    assert weights(runs[1]) == weights(runs[0])
    assert groups(runs[1]) == groups(runs[0])
    assert told(runs[1], 6) == told(runs[0], 6)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["prompt", "completion"])
def test_a_replay_asks_and_tells_in_the_journals_order(recipe: Path, tmp_path: Path, order: str) -> None:
    """Answers are in flight when weights come; the replay is faster, and broken off once."""
    run, again = tmp_path / "run", tmp_path / "again"
    arguments = ("train", str(recipe), *ASYNCHRONOUS, CURIOUS, BINARY, f"trainer.order={order}")
    arguments = (*arguments, "algorithm.filter={name: mixed_accuracy, max_refills: 50}", "checkpoint.every=1")
    with pytest.MonkeyPatch.context() as patch:
        hold_an_answer(patch)
        inline(*arguments, f"trainer.run_dir={run}")
    assert any(len(entry["spans"]) > 1 for entry in entries(run))
    admitted = [line for line in journal(run) if line["kind"] == "admit"]
    assert {"source", "row", "n"} <= admitted[0].keys()
    follow = (*arguments, f"trainer.replay={run}", f"trainer.run_dir={again}", "rollout.max_concurrent=5")
    with broken_off(3):
        assert inline(*follow, check=False).returncode == 2
    inline(*follow)
    assert_equal(run, again)
    assert told(again, 5)["own"] == told(run, 5)["own"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["resume", "{name: abort, max_aborts: 2}"])
def test_what_begins_again_is_what_was_chosen(recipe: Path, tmp_path: Path, how: str) -> None:
    """Broken off with answers in flight, and aborted: each number stands for one row and one size, is trained
    on once, and is heard of once.
    """
    run = tmp_path / "run"
    arguments = ("train", str(recipe), *ASYNCHRONOUS, CURIOUS, BINARY, f"trainer.on_update={how}")
    arguments = (*arguments, "checkpoint.every=1", f"trainer.run_dir={run}")
    with pytest.MonkeyPatch.context() as patch, broken_off(2):
        hold_an_answer(patch)
        assert inline(*arguments, check=False).returncode == 2
    inline(*arguments)
    admitted: dict[int, set[tuple[int, int]]] = {}
    lines = journal(run)
    for line in lines:
        if line["kind"] == "admit":
            admitted.setdefault(line["seq"], set()).add((line["row"], line["n"]))
    assert len([line for line in lines if line["kind"] == "admit"]) > len(admitted)
    assert all(len(choices) == 1 for choices in admitted.values())
    trained = [seq for line in lines if line["kind"] == "take" for seq in line["seqs"]]
    steps = groups(run)
    assert len(trained) == len(set(trained)) == sum(map(len, steps))
    for prompt, n in (one for step in steps for one in step):
        _, seq, row = prompt.split("/")
        assert admitted[int(seq)] == {(int(row), n)}
    heard = [(row, n) for _, row, n, _ in told(run, 5)["own"]["told"]]
    assert heard == [(int(prompt.split("/")[2]), n) for step in steps for prompt, n in step]


def journal(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]


def test_a_replay_whose_sampler_chooses_otherwise_says_so(recipe: Path, tmp_path: Path) -> None:
    arguments = ("train", str(recipe), "trainer.total_steps=2", CURIOUS)
    inline(*arguments, f"trainer.run_dir={tmp_path / 'run'}")
    file = tmp_path / "run" / "journal.jsonl"
    lines = journal(tmp_path / "run")
    number, line = next((i, line) for i, line in enumerate(lines) if line.get("seq") == 5)
    line["row"] = (line["row"] + 1) % 64
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    replay = (f"trainer.replay={tmp_path / 'run'}", f"trainer.run_dir={tmp_path / 'again'}")
    done = inline(*arguments, *replay, check=False)
    assert done.returncode == 2
    assert f"line {number + 1}" in done.stderr
    assert "row" in done.stderr


def test_the_one_in_the_docs(recipe: Path, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/data.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(# curriculum.py\n.*?)```", text, re.S)
    file = tmp_path / "curriculum.py"
    file.write_text(program)
    name = f"data.sampler={{name: '{file}:NearHalf', share: 0.25}}"
    small = (
        "data.train.0.options={size: 8}",
        "rollout.max_tokens=1",
        BINARY,
        "checkpoint={every: 1, keep: 9}",
    )
    run = tmp_path / "run"
    inline("train", str(recipe), name, *small, f"trainer.run_dir={run}")
    rates: dict[int, float] = {}
    for number, step in enumerate(groups(run), start=1):
        rows = [int(prompt.split("/")[2]) for prompt, _ in step]
        far = [abs(rates.get(row, 0.25) - 0.25) for row in range(8)]
        assert sorted(far[row] for row in rows) == sorted(far)[:4]
        rates = dict(told(run, number)["own"])
        assert set(rows) <= set(rates)


# ---- in the buffer ----


class Follows(Own):
    """Chooses by all that it has heard."""

    def choose(self, k: int, seed: int, step: int) -> Any:  # type: ignore[override]
        self.calls.append((k, step))
        draw = random.Random(f"{self.calls} {seed}")
        return [("hard", draw.randrange(2), draw.randint(2, 9)) for _ in range(k)]

    def heard(self, row: int, rewards: Any, version: int) -> None:  # type: ignore[override]
        self.calls.append((row, rewards.tolist(), version))


async def in_time(seed: int, max_staleness: int) -> tuple[list[Any], list[Any]]:
    """Returns what a sampler was asked and told where every third group is dropped, and the choices of each
    step. seed: of how long groups take. A step ends, as with `finish`, when all that is in flight is there.
    """
    clock = random.Random(seed)
    prompts = chosen(Follows)
    buf = buffer(2, max_staleness, 6, n=8, chosen=prompts)
    tasks: list[asyncio.Task[None]] = []
    names: dict[int, Any] = {}

    async def episode(seq: int, version: int) -> None:
        names[seq] = prompts[seq]
        await asyncio.sleep(clock.random() * 0.002)
        if seq % 3 == 1:
            buf.drop(seq, "failed", ["a"])
        else:
            buf.put(group(seq, version))

    async def feed() -> None:
        while True:
            seq = await buf.ticket()
            tasks.append(asyncio.create_task(episode(seq, buf.version)))

    feeder = asyncio.create_task(feed())
    steps = []
    while taken := await asyncio.wait_for(buf.take(), 240):
        steps.append([names[one.seq] for one in taken])
        await asyncio.sleep(clock.random() * 0.002)
        await buf.settled()
        buf.end_step()
        buf.advance(buf.version + 1)
    feeder.cancel()
    await asyncio.gather(feeder, *tasks, return_exceptions=True)
    return prompts.sampler.call("state")[0], steps


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_it_is_asked_and_told_does_not_depend_on_time(max_staleness: int) -> None:
    runs = [asyncio.run(in_time(seed, max_staleness)) for seed in range(8)]
    assert all(one == runs[0] for one in runs)
    calls, steps = runs[0]
    asked = [call for call in calls if len(call) == 2]
    assert [step for k, step in asked if k == 2] == [1, 2, 3, 4, 5, 6]
    assert len(steps) == 6
    dropped = [call for call in calls if len(call) == 3 and call[1] == []]
    assert len(asked) == 6 + len(dropped)
    assert len(dropped) > 3


def test_the_share_of_failures_is_of_the_answers_that_were_chosen() -> None:
    """Two groups of 6 answers each, where rollout.n is 8: 4 of 12 may fail, and not 5."""

    async def main(failures: int) -> None:
        buf = buffer(2, 0, 2, n=8, max_dropped_share=4.5 / 12, chosen=chosen(lambda k: [("easy", 0, 6)] * k))
        seqs = [await buf.ticket() for _ in range(2)]
        assert [buf.samples(seq) for seq in seqs] == [6, 6]
        buf.drop(seqs[0], "failed", ["a"] * failures)
        buf.put(group(seqs[1], 0))  # one of its answers fails, too
        buf.put(group(await buf.ticket(), 0))
        await buf.take()

    asyncio.run(main(2))
    with pytest.raises(RewardError, match="of 12"):
        asyncio.run(main(3))


# ---- where it is read, and where it is refused ----


def test_a_program_has_it_too_and_goes_on(recipe: Path, tmp_path: Path) -> None:
    """The bits of `rondo train` with the same settings; broken off in step 3, and begun again."""
    arguments = (*QUIET, *KL, CURIOUS, "trainer.total_steps=4", "checkpoint={every: 2, export: true}")
    inline("train", str(recipe), *arguments, f"trainer.run_dir={tmp_path / 'built-in'}")

    async def program() -> None:
        async with open_session([recipe], [*arguments, f"trainer.run_dir={tmp_path / 'run'}"]) as session:
            await grpo(session)

    with broken_off(3), pytest.raises(WorkerError, match="broken off"):
        asyncio.run(program())
    asyncio.run(program())
    assert weights(tmp_path / "run") == weights(tmp_path / "built-in")
    assert told(tmp_path / "run", 4) == told(tmp_path / "built-in", 4)


def test_from_python_it_is_a_class_that_other_processes_find(tmp_path: Path, recipe: Path) -> None:
    class Mine(Curious):
        """Of this function, and so written down."""

    inline("train", str(recipe), CURIOUS, f"trainer.run_dir={tmp_path / 'a'}")
    run = rondo.train(recipe, sampler=Mine, **{"trainer.run_dir": tmp_path / "b"})
    assert weights(run.path) == weights(tmp_path / "a")
    inline("train", str(run.path / "recipe.yaml"), f"trainer.run_dir={tmp_path / 'c'}")
    assert weights(tmp_path / "c") == weights(tmp_path / "a")


def test_an_epoch_is_as_many_prompts_as_there_are_rows(recipe: Path, tmp_path: Path) -> None:
    epoch = ("data.train.0.options={size: 10}", "trainer={total_steps: null, epochs: 1}")
    said = inline("check", str(recipe), CURIOUS, *epoch).stdout
    assert "samplers.py:Curious (data.sampler) chooses their prompts" in said
    assert "an epoch is as many as the sources have rows" in said
    inline("train", str(recipe), CURIOUS, *epoch, f"trainer.run_dir={tmp_path / 'run'}")
    assert [len(step) for step in groups(tmp_path / "run")] == [4, 4, 2]


def test_rows_that_are_too_long_are_told_back(recipe: Path, tmp_path: Path) -> None:
    """Of rows that were read before the start, and of those that are read when they are chosen."""
    rows = [{"prompt": "apples " * (80 if i % 4 == 3 else 1) + str(i), "answer": "1"} for i in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"data.train=[{{type: jsonl, name: train, path: {file}}}]"
    runs = [tmp_path / "held", tmp_path / "large"]
    for run in runs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RONDO_CACHE", str(tmp_path / "cache"))
            if run.name == "large":
                patch.setattr("rondo.data.stream.WHOLE", 8)
            inline("train", str(recipe), CURIOUS, source, f"trainer.run_dir={run}")
        chosen = [int(prompt.split("/")[2]) for step in groups(run) for prompt, _ in step]
        assert all(row % 4 != 3 for row in chosen)
        assert metrics(run)[-1]["sampler/too_long"] > 0
    assert groups(runs[0]) == groups(runs[1])
    assert weights(runs[0]) == weights(runs[1])


REFUSED = [
    ((CURIOUS, "data.shuffle=false"), "data.shuffle is set, and nothing reads it"),
    ((CURIOUS, "data.train.0.weight=2"), "data.train.0.weight is set, and nothing reads it"),
    (("data.sampler=tests/trainers/samplers.py:Curius",), "did you mean 'Curious'?"),
    ((f"{CURIOUS}", "rollout.recorded=x"), "were chosen when they were recorded"),
    (("data.sampler={name: knapsack, high: 3}",), "low <= rollout.n <= high, got low=2, rollout.n=4, high=3"),
    (
        ("data.sampler={name: knapsack, high: 8, low: 1}",),
        "knapsack needs low >= 2, got 1: the algorithm compares",
    ),
    (("data.sampler={name: stages, stages: [{step: 1, sources: [a]}]}",), "'a' is no source of data.train"),
    ((CURIOUS, "reward.models=[{name: judge, path: x}]"), "without the scores of reward.models"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_what_cannot_be_is_said_before_the_start(
    recipe: Path, tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    done = inline("train", str(recipe), *overrides, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


def test_commands_without_rl_have_no_meaning_for_it(tmp_path: Path) -> None:
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(yaml.safe_dump(SFT_RECIPE))
    for command in ("sft", "preference", "reward-model"):
        done = inline(command, str(recipe), CURIOUS, f"trainer.run_dir={tmp_path / 'run'}", check=False)
        assert done.returncode == 2
        assert "data.sampler.name has no meaning for" in done.stderr


def test_an_evaluation_asks_every_held_out_row_of_a_recipe_that_has_one(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    inline("train", str(recipe), CURIOUS, f"trainer.run_dir={run}")
    with_it, without = (
        inline("eval", str(recipe), "--model", str(run / "export"), *more).stdout for more in ((CURIOUS,), ())
    )
    assert with_it == without


def test_another_sampler_is_another_run(recipe: Path, tmp_path: Path) -> None:
    arguments = ("train", str(recipe), "checkpoint.every=1", f"trainer.run_dir={tmp_path / 'run'}")
    inline(*arguments, CURIOUS)
    more = (*arguments, "trainer.total_steps=4")
    for other in ((), ("data.sampler={name: 'tests/trainers/samplers.py:Curious', most: 5}",)):
        done = inline(*more, *other, check=False)
        assert done.returncode == 2
        assert "data.sampler" in done.stderr
    inline(*more, CURIOUS)


@pytest.mark.parametrize(
    ("sampler", "said"),
    [("one", "n is int 1, and must be 2 to 65536"), ("outside", "no row of train, which has rows 0 to 63")],
)
def test_an_answer_that_is_none_ends_the_run(recipe: Path, tmp_path: Path, sampler: str, said: str) -> None:
    name = f"data.sampler=tests/trainers/samplers.py:{sampler}"
    done = inline("train", str(recipe), name, f"trainer.run_dir={tmp_path / 'run'}", check=False)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_groups_of_one_are_fine_where_nobody_compares(recipe: Path, tmp_path: Path) -> None:
    arguments = ("data.sampler=tests/trainers/samplers.py:one", "algorithm.advantage=reinforce_pp")
    inline("train", str(recipe), *arguments, f"trainer.run_dir={tmp_path / 'run'}")
    assert [[n for _, n in step] for step in groups(tmp_path / "run")] == [[1, 1, 1, 1]] * 3
