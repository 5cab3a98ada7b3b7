"""What a step had for each of its tokens, beside its rollouts; the sums of its columns and weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch

from rondo.data.rollout_files import open_recording
from rondo.tracking.sums import compared, each_sums
from rondo.trainers.sessions import Session
from rondo.weights.checksum import checksum
from tests.documented import python_blocks
from tests.trainers.conftest import in_a_session, inline, weights
from tests.trainers.scorers import even_share

QUIET = ("trainer.evaluation={before: false, after: false}", "trainer.total_steps=2", "tracking.samples=0")
CRITIC = ("algorithm.advantage={name: gae, lam: 0.95}", "critic.token_budget=512", "critic.mini_batch_size=4")
KL = "algorithm.kl={name: k1, coef: 0.1, where: reward}"
LAKES = (
    "data.train=[{type: function, task: rondo.environments.episodes, "
    "options: {environment: frozen_lake, size: 8}}]",
    "rollout.environments=[{name: frozen_lake, size: 3, holes: 0.3}]",
    "rollout.agent={name: steps, max_steps: 4, history: 0, action: 'tests/agents/own_worlds.py:by_length', "
    "invalid_penalty: 0.5}",
    "reward.functions=[environment]",
    "data.max_prompt_tokens=200",
    "algorithm.advantage=gigpo",
)
EACH = "tracking.token_columns=1"
EVERYTHING = {"grpo": ("algorithm.advantage=grpo",), "gae": (*CRITIC, KL), "gigpo": LAKES}


def tokens_of(run: Path, step: int, which: str = "") -> dict[str, list[Any]]:
    return pq.read_table(run / "rollouts" / f"step-{step:06d}{which}.tokens.parquet").to_pydict()


def rows_of(run: Path, step: int) -> dict[int, dict[str, Any]]:
    rows = pq.read_table(run / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
    return {row["row_id"]: row for row in rows}


def assert_joins(run: Path, step: int) -> dict[str, list[Any]]:
    """Returns the columns of a step, whose rows are those of its rollouts."""
    tokens, rows = tokens_of(run, step), rows_of(run, step)
    for name in ("response_ids", "rollout_log_probs", "policy_versions", "response_mask", "group_id"):
        assert tokens[name] == [rows[row][name] for row in tokens["row_id"]], name
    assert not {"text", "prompt_text", "prompt_ids"} & tokens.keys()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYTHING)
def test_the_page_makes_the_advantages_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each block of docs/credit.md, as it stands there, on a run of its own."""
    (block,) = (one for one in python_blocks() if one.page == "docs/credit.md" and one.first == f"# {name}")
    inline("train", str(recipe), *QUIET, *EVERYTHING[name], EACH, f"trainer.run_dir={tmp_path}/runs/{name}")
    tokens = assert_joins(tmp_path / "runs" / name, 2)
    assert np.abs(np.concatenate([np.atleast_1d(one) for one in tokens["advantages"]])).max() > 0.1
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, name, "exec"), {})
    # And it would say so: of the file with another advantage.
    path = tmp_path / "runs" / name / "rollouts" / "step-000002.tokens.parquet"
    table = pq.read_table(path)
    changed = table.to_pylist()
    row = next(row for row in changed if np.any(row["advantages"]))
    row["advantages"] = (np.array(row["advantages"]) * 1.01).tolist()
    pq.write_table(table.from_pylist(changed, table.schema), path)
    with pytest.raises(AssertionError):
        exec(compile(block.text, name, "exec"), {})


@pytest.mark.slow
def test_rewards_of_tokens_are_the_outcome_and_the_kl(run: Callable[..., Path]) -> None:
    """Of an estimator that reads rows, whose workers charge the KL; and the run is what it is without."""
    settings = (*QUIET, KL, "actor.epochs=2")
    kept, plain = run("kept", *settings, EACH), run("plain", *settings)
    tokens = assert_joins(kept, 2)
    for row, rewards in enumerate(tokens["token_rewards"]):
        old, ref = (np.array(tokens[name][row]) for name in ("old_log_probs", "ref_log_probs"))
        by_hand = -0.1 * (old - ref)
        by_hand[-1] += tokens["reward"][row]
        np.testing.assert_allclose(rewards, by_hand, atol=1e-6)
    assert np.abs(np.array(tokens["old_log_probs"][0]) - tokens["ref_log_probs"][0]).max() > 0
    assert weights(kept) == weights(plain)
    same = compared(kept, plain)
    assert (same.first, same.last, same.differ, same.only_one) == (1, 2, (), ("token_rewards",))
    assert not list((plain / "rollouts").glob("*.tokens.parquet"))
    # A folder of files is a recording without them.
    assert len(open_recording(str(kept / "rollouts")).files) == 2
    assert len(open_recording(str(kept / "rollouts" / "*.parquet")).files) == 2


def sums_of(run: Path) -> dict[int, dict[str, int]]:
    return dict(each_sums(run))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["trainer.max_staleness=0", "trainer.max_staleness=2"])
def test_sums_are_those_of_the_weights_and_the_cause_comes_first(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Where trainer and engines share their storage, and where weights are gathered, whose checksums are
    taken for the sums. An asynchronous run is done again bit for bit; a reward that changes is told.
    """
    three = (*QUIET, setting, "trainer.total_steps=3", "checkpoint.export_dtype=float32", EACH)
    first = run("first", *three)
    exported = safetensors.torch.load_file(first / "export" / "model.safetensors")
    last = {name: value for name, value in sums_of(first)[3].items() if ":" in name}
    assert last == {f"actor:{name}": checksum(tensor) for name, tensor in exported.items()}
    again = run("again", *three, f"trainer.replay={first}")
    assert compared(first, again).differ == ()
    assert sums_of(first) == sums_of(again)
    for step in (1, 2, 3):
        assert assert_joins(first, step) == tokens_of(again, step)

    def other(prompt: Any, trajectory: Any) -> float:
        return even_share(prompt, trajectory) + 0.25 * (prompt.seq == 5 and trajectory.sample_index == 1)

    monkeypatch.setattr("tests.trainers.scorers.even_share", other)
    changed = run("changed", *three, "reward.functions=[{name: tests.trainers.scorers.even_share}]")
    found = compared(first, changed)
    assert (found.first, found.last) == (1, 2)  # prompt 5 is one of the second step's
    assert found.differ[0] == "score/even_share"
    assert found.differ[1] == "reward"
    assert "advantages" in found.differ
    assert found.differ[-1].startswith("actor:")
    rate = compared(first, run("rate", *three, "actor.optimizer.lr=0.002"))
    assert rate.last == 1
    assert all(name.startswith("actor:") for name in rate.differ)
    assert compared(first, run("seed", *three, "trainer.seed=1")).differ[0] == "prompt_id"


@pytest.mark.slow
def test_two_ranks_write_what_one_does(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows in the same order, in parts; what was sampled and made of rewards to the same bits, and
    so to the same sums.
    """
    monkeypatch.setattr("rondo.trainers.loop.records.PART_ROWS", 5)
    settings = (*QUIET, *CRITIC, KL, EACH)
    one, two = run("one", *settings), run("two", *settings, "cluster.backend=process", "cluster.devices=2")
    assert (two / "rollouts" / "step-000001.tokens.parquet" / "part-00001.parquet").is_file()
    mine, theirs = assert_joins(one, 1), assert_joins(two, 1)
    assert list(mine) == list(theirs)
    same = 0
    for name, column in mine.items():
        if name in ("old_log_probs", "ref_log_probs", "values", "advantages", "returns", "token_rewards"):
            for a, b in zip(column, theirs[name], strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)
        else:
            assert column == theirs[name], name
            assert sums_of(one)[1][name] == sums_of(two)[1][name], name
            same += 1
    assert same > 20
    assert sums_of(one)[1].keys() == sums_of(two)[1].keys()
    assert {name.partition(":")[0] for name in sums_of(one)[1] if ":" in name} == {"actor", "critic"}


def test_a_program_writes_what_it_trains_on(recipe: Path, tmp_path: Path) -> None:
    """In every second step; a second update of a step has a file of its own, and is in the sums."""

    async def program(session: Session) -> None:
        actor = await session.actor()
        async for prompts in session.prompts():
            batch = await actor.generate_sequences(prompts)
            batch = await session.compute_advantages(await actor.compute_log_prob(batch))
            lengths = batch.index.scalars("response_length")
            batch = session.with_tokens(batch, {"own": [np.arange(length) / 2 for length in lengths]})
            metrics = await actor.update_actor(batch)
            if session.step == 1:
                await actor.update_actor(batch.take(np.arange(4)))
            await session.log(batch, metrics)

    settings = (*QUIET, "trainer.total_steps=4", "tracking.token_columns=2")
    folder = in_a_session(recipe, tmp_path / "run", program, *settings)
    written = sorted(path.name for path in (folder / "rollouts").glob("*.tokens.parquet"))
    assert written == [f"step-00000{step}.tokens.parquet" for step in ("2.actor-2", "2", "4")]
    whole, part = assert_joins(folder, 2), tokens_of(folder, 2, ".actor-2")
    assert (
        part["own"] == whole["own"][:4] == [[i / 2 for i in range(len(ids))] for ids in part["response_ids"]]
    )
    assert part["old_log_probs"] == whole["old_log_probs"][:4]
    assert list(sums_of(folder)) == [1, 2, 3, 4]
    again = in_a_session(recipe, tmp_path / "again", program, *settings)
    assert sums_of(folder) == sums_of(again)
    assert {"own", "advantages", "loss_weight", "prompt_ids"} <= sums_of(folder)[1].keys()


def test_doctor_says_where_two_runs_differ(run: Callable[..., Path], tmp_path: Path) -> None:
    one, two = run("one", *QUIET, "checkpoint.export=false"), run("two", *QUIET, "actor.optimizer.lr=0.002")
    done = inline("doctor", str(one), "--against", str(two))
    assert f"{one} against {two}: in step 1 the first difference is the weight " in done.stdout
    told = json.loads(inline("doctor", str(one), "--against", str(one), "--json").stdout)
    assert told["against"] == {"first": 1, "last": 2, "differ": [], "only_one": []}
    line = f"{one} against {one}: equal, bit for bit, in steps 1 to 2"
    assert line in inline("doctor", str(one), "--against", str(one)).stdout
    for arguments, message in {
        ("--against", str(one)): "name both, RUN first",
        (str(one), "--against", str(tmp_path)): "sums.jsonl: no such file",
    }.items():
        done = inline("doctor", *arguments, check=False)
        assert done.returncode == 2
        assert message in done.stderr
