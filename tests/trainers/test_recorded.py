"""Training on recorded rollouts ends with the bits of the run that recorded them, and starts no engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rondo.config import load
from rondo.core.columns import column
from rondo.core.errors import ConfigError, DataError
from rondo.data.rollout_files import NEEDED, Recording, RowLimits, open_recording
from rondo.data.rows import rows_from_trajectories
from rondo.trainers.loop.rl import RLTrainer
from rondo.trainers.program.inputs import Recorded, settled
from rondo.trainers.program.plan import plan_program
from rondo.trainers.program.stages import CorrectionStage
from rondo.trainers.replay.offline import RecordedBuffer, recorded_rollouts
from rondo.trainers.sessions import open_session
from rondo.workers.rollout import RolloutWorker
from tests.messages import full_text
from tests.trainers.conftest import RECIPE, inline, metrics, weights

# A critic, a reference, and one failure in each prompt group.
RICH = (
    "algorithm.advantage=gae",
    "algorithm.kl={name: k3, where: loss, coef: 0.1}",
    "reward.functions=[tests/trainers/scorers.py:raises]",
    "reward.on_error=drop",
)
ASYNC = (
    "trainer.max_staleness=2",
    "trainer.total_steps=4",
    "rollout.max_tokens=24",
    "rollout.max_concurrent=2",
    "trainer.evaluation={before: false, after: false, every: null}",
)
# Of generating, scoring, publishing and evaluating, of which there is nothing here.
ELSEWHERE = ("eval/", "weights/", "rollout/", "buffer/", "reward/errors", "reward/timeouts", "reward/retries")
KEPT = ("rollout/log_prob_gap", "rollout/kl", "rollout/response", "rollout/truncated", "buffer/staleness")
LIMITS = RowLimits(vocab_size=10_000, tokens=512, tokens_key="actor.token_budget", accuracy=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def live(tiny: Path) -> Path:
    """The folder of a synchronous run."""
    inline("train", str(tiny), *RICH, f"trainer.run_dir={tiny.parent / 'live'}")
    return tiny.parent / "live"


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RolloutWorker, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("an engine starts")

    monkeypatch.setattr(RolloutWorker, "__init__", refuse)


def trained_on(run: Path) -> list[dict[str, Any]]:
    """Metrics that do not depend on engines."""
    steps = [line for line in metrics(run) if line["step"] > 0]
    return [
        {k: v for k, v in step.items() if k.startswith(KEPT) or not k.startswith(ELSEWHERE)} for step in steps
    ]


def rollouts(run: Path) -> list[list[Mapping[str, Any]]]:
    """All rows by step, as text (NaN is NaN)."""
    files = sorted((run / "rollouts").glob("step-??????.parquet"))
    return [[repr(row) for row in pq.read_table(file).to_pylist()] for file in files]


@pytest.mark.slow
@pytest.mark.usefixtures("no_engine")
def test_the_same_bits_as_the_run_that_was_recorded(live: Path, tiny: Path, tmp_path: Path) -> None:
    """Prompts and scorers are not needed; neither is the number of steps."""
    unread = ("data.train=[]", "data.eval=[]", "reward.functions=[]", "trainer.total_steps=null")
    said = inline(
        *("train", str(tiny), *RICH, *unread, f"rollout.recorded={live}", "tracking.console=plain"),
        f"trainer.run_dir={tmp_path / 'run'}",
    )
    assert "3 steps of 4 prompt groups" in said.stdout
    assert "no engine runs" in said.stdout
    assert "the samples are this policy's own" in said.stdout
    assert weights(tmp_path / "run") == weights(live)
    assert trained_on(tmp_path / "run") == trained_on(live)
    assert trained_on(live)[0]["reward/failed_share"] == 0.25
    assert rollouts(tmp_path / "run") == rollouts(live)
    assert not [name for line in metrics(tmp_path / "run") for name in line if name.startswith("eval/")]


@pytest.mark.slow
def test_the_same_bits_as_an_asynchronous_run(tiny: Path, tmp_path: Path) -> None:
    inline("train", str(tiny), *ASYNC, f"trainer.run_dir={tmp_path / 'live'}")
    rest = (f"rollout.recorded={tmp_path / 'live' / 'rollouts'}", f"trainer.run_dir={tmp_path / 'run'}")
    inline("train", str(tiny), *ASYNC, *rest)
    assert weights(tmp_path / "run") == weights(tmp_path / "live")
    assert trained_on(tmp_path / "run") == trained_on(tmp_path / "live")
    assert {"buffer/staleness_2", "rollout_correction/kl"} <= set(trained_on(tmp_path / "run")[0])


def test_interrupted_and_resumed_equals_undisturbed(
    live: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("train", str(tiny), *RICH, f"rollout.recorded={live}", f"trainer.run_dir={tmp_path / 'run'}")
    report = RLTrainer.report

    async def stop_after_two(self: RLTrainer, *args: Any) -> None:
        await report(self, *args)
        if self.step == 2:
            self.request_stop()

    with monkeypatch.context() as patched:
        patched.setattr(RLTrainer, "report", stop_after_two)
        assert inline(*arguments, check=False).returncode == 130
    assert len(rollouts(tmp_path / "run")) == 2
    elsewhere = inline(*arguments, f"rollout.recorded={live / 'rollouts'}", check=False)
    assert "rollout.recorded" in elsewhere.stderr  # another recording is no way to go on
    inline(*arguments)
    assert weights(tmp_path / "run") == weights(live)
    assert trained_on(tmp_path / "run") == trained_on(live)


def test_another_recipe_is_off_policy_and_says_so(live: Path, tiny: Path, tmp_path: Path) -> None:
    """In steps of another size, too."""
    changed = ("data.batch_size=6", "trainer.total_steps=null", "actor.optimizer.lr=2.0e-3")
    arguments = (str(tiny), *RICH, *changed, f"rollout.recorded={live}")
    shown = inline("check", *arguments).stdout
    assert "2 steps of 6 prompt groups" in shown
    assert "another policy's: data.batch_size: 4 before, 6 now; actor.optimizer.lr: 0.001 before" in shown
    assert "importance weights per token, up to 2.0" in shown
    assert "publish" not in shown.partition("One step:")[2].replace("published", "")
    assert "actor, critic, reference\n" in shown.replace("critic, actor", "actor, critic")
    inline("train", *arguments, f"trainer.run_dir={tmp_path / 'run'}")
    lines = trained_on(tmp_path / "run")
    assert [line["buffer/staleness_max"] for line in lines] == [0, 0]  # when it was recorded
    assert lines[1]["rollout_correction/kl"] > 1e-5
    assert sum(map(len, rollouts(tmp_path / "run"))) == 48


def planned(live: Path, tiny: Path, *overrides: str) -> Any:
    """rollout.recorded: `live`, or another in `overrides`."""
    config = settled(load([str(tiny)], [*RICH, f"rollout.recorded={live}", *overrides]).config)
    return recorded_rollouts(config), config


def test_whose_samples_they_are(live: Path, tiny: Path, tmp_path: Path) -> None:
    own = (
        "cluster.threads=2",
        "trainer.run_dir=x",
        "data.eval=[]",
        "tracking.samples=0",
        "reward.functions=[]",
    )
    assert planned(live, tiny, *own)[0].changed == ()
    assert planned(live, tiny, "trainer.total_steps=2")[0].changed == ()
    cosine = "actor.optimizer.schedule.name=cosine"
    schedule = [why.split(":")[0] for why in planned(live, tiny, cosine)[0].changed]
    assert schedule == ["actor.optimizer.schedule.name", "actor.optimizer.schedule.min_ratio"]
    assert len(planned(live, tiny, cosine, "trainer.total_steps=2")[0].changed) == 3
    (why,) = planned(live, tiny, f"rollout.recorded={live}/rollouts/*.parquet")[0].changed
    assert "no config.yaml" in why
    one = (f"rollout.recorded={live}/rollouts/step-000002.parquet", "trainer.total_steps=null")
    recorded, config = planned(live, tiny, *one)
    assert recorded.sizes == (4,)
    assert recorded.recording.version(0) == 1
    program = plan_program(config, recorded)
    assert any(isinstance(stage, CorrectionStage) for stage in program.stages)
    assert "rollout" not in program.all_roles


def test_scores_that_are_recorded_are_not_added_twice(live: Path, tiny: Path) -> None:
    models = (
        "reward.models=[{name: raises, path: a, token_budget: 512}, {name: new, path: b, token_budget: 512}]"
    )
    only = (f"rollout.recorded={live}/rollouts/step-000001.parquet", "trainer.total_steps=1")
    recorded, config = planned(live, tiny, *only, models)
    assert recorded.recording.scores == ("raises",)
    assert plan_program(config, recorded).reward_models == ("new",)
    with pytest.raises(ConfigError, match=full_text("reward.models: raises is another one")):
        planned(live, tiny, models)


def test_a_short_step_in_the_middle_stays_short() -> None:
    def of(sizes: list[int], version: int, trained: int) -> tuple[int, int]:
        recorded = Recorded(cast(Recording, None), tuple(sizes), ())
        buffer = RecordedBuffer(recorded, batch_size=4, total_steps=len(sizes), total_groups=sum(sizes))
        buffer.ledger.next_seq = buffer.ledger.num_trained = trained
        buffer.advance(version)
        return buffer.credits(), buffer.step_size

    assert [of([4, 3, 4, 2], *at) for at in ((0, 0), (1, 4), (2, 7), (3, 11))] == [
        (4, 4),
        (3, 3),
        (4, 4),
        (2, 2),
    ]


def test_the_types_are_those_that_episodes_write() -> None:
    written = rows_from_trajectories([]).table.schema
    numbers = [name for name in written.names if not pa.types.is_null(written.field(name).type)]
    assert set(written.names) == set(NEEDED)
    assert {name: written.field(name).type for name in numbers} == {
        name: column(name).type for name in numbers
    }


SPLIT = (
    "cluster.backend=process",
    "cluster.devices=2",
    "cluster.pools={a: 1, b: 1}",
    "cluster.placement.rollout=b",
)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trainer.total_steps=4",), r"steps=4, but .* 12 prompt groups, enough for 3 of data.batch_size=4"),
        (("reward.functions=[gsm8k]",), r"reward.functions are others .* as they are; set reward.functions="),
        (("rollout.recorded=nowhere",), r"recorded=nowhere: there is no such file or folder \(relative to /"),
        (("rollout.recorded=tests",), "tests: there are no recorded rollouts; .*tracking.save_rollouts=true"),
        (SPLIT, "placement.rollout gives devices to engines, .* none run"),
        (("algorithm.advantage=remax", "algorithm.kl=null"), "remax reads greedy_reward, which .* not have"),
        (("trainer.run_dir={live}",), "is in this run's own folder .* choose another trainer.run_dir"),
    ],
)
def test_what_cannot_be_asked_for(live: Path, tiny: Path, overrides: tuple[str, ...], said: str) -> None:
    given = [text.replace("{live}", str(live)) for text in overrides]
    with pytest.raises(AssertionError, match=f"(?s)exited 2.*{said}"):
        inline("train", str(tiny), *RICH, f"rollout.recorded={live}", "trainer.run_dir=/nowhere/x", *given)


@pytest.mark.parametrize("of_rollouts", ["", "/rollouts", "/rollouts/step-00000[23].parquet"])
def test_a_run_that_still_removes_its_rollouts_is_refused(
    live: Path, tiny: Path, tmp_path: Path, of_rollouts: str
) -> None:
    run = tmp_path / "going"
    shutil.copytree(live, run)
    written = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(written.replace("keep_rollouts: null", "keep_rollouts: 2"))
    command = ("train", str(tiny), *RICH, f"rollout.recorded={run}{of_rollouts}", "trainer.total_steps=2")
    inline(*command, f"trainer.run_dir={tmp_path / 'whole'}")  # it has ended
    (run / "summary.json").unlink()
    done = inline(*command, f"trainer.run_dir={tmp_path / 'other'}", check=False)
    assert done.returncode == 2
    assert f"{run} has not ended, and removes its oldest rollouts (tracking.keep_rollouts=2)" in done.stderr


def test_a_recording_that_lost_its_first_step_is_not_gone_on_with(
    live: Path, tiny: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    shutil.copytree(live / "rollouts", rows)
    command = ("train", str(tiny), *RICH, f"rollout.recorded={rows}", "checkpoint.every=1")
    command = (*command, f"trainer.run_dir={tmp_path / 'run'}")
    inline(*command, "trainer.total_steps=1")
    (rows / "step-000001.parquet").rename(tmp_path / "step-000001.parquet")
    done = inline(*command, "trainer.total_steps=2", check=False)
    assert done.returncode == 2
    assert f"{rows} began with step-000001.parquet and begins with step-000002.parquet now" in done.stderr
    (tmp_path / "step-000001.parquet").rename(rows / "step-000001.parquet")
    inline(*command, "trainer.total_steps=2")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_commands_that_generate_refuse_it(live: Path, tiny: Path) -> None:
    done = inline("eval", str(tiny), f"rollout.recorded={live}", check=False)
    assert "rollout.recorded is for `rondo train`" in done.stderr

    async def program() -> None:
        async with open_session([tiny], [f"rollout.recorded={live}"]):
            pass

    with pytest.raises(ConfigError, match=full_text("rollout.recorded is for the built-in")):
        asyncio.run(program())


Spoil = Callable[[dict[str, list[Any]]], Any]


def spoiled(live: Path, folder: Path, spoil: Spoil, step: int = 2) -> Path:
    """The rollouts with one file changed."""
    folder.mkdir()
    for file in sorted((live / "rollouts").iterdir()):
        table = pq.read_table(file)
        if file.name == f"step-{step:06d}.parquet":
            columns = table.to_pydict()
            spoil(columns)
            text = {name for name, values in columns.items() if values and isinstance(values[0], str)}
            kinds = [(n, pa.string() if n in text else table.schema.field(n).type) for n in columns]
            table = pa.table({n: pa.array(columns[n], kind) for n, kind in kinds})
        pq.write_table(table, folder / file.name)
    return folder


def changing(name: str, row: int, value: Any) -> Spoil:
    def spoil(columns: dict[str, list[Any]]) -> None:
        old = columns[name][row]
        columns[name][row] = value(old) if callable(value) else value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (changing("response_ids", 2, lambda ids: [*ids[:-1], 10_000]), "row 2: response_ids .* id 10000, "),
        (changing("prompt_ids", 3, lambda ids: [-1, *ids[1:]]), "row 3: .* token id -1, .*tokenizer"),
        (changing("reward", 4, float("nan")), "row 4: its outcome is scored, and its reward is nan"),
        (changing("reward", 4, None), "row 4: its outcome is scored, and its reward is nan"),
        (changing("response_mask", 0, [1]), "row 0: response_mask has 1 entries for 8 response tokens"),
        (changing("prompt_length", 7, 3), r"row 7: prompt_length is 3, and there are \d+"),
        (changing("num_trained_tokens", 6, 3), "row 6: num_trained_tokens is 3, and there are 8"),
        (changing("outcome", 6, None), "row 6: outcome is null"),
        (changing("rollout_log_probs", 8, lambda p: [None, *p[1:]]), "column .* has a null among"),
        (changing("rollout_log_probs", 8, lambda p: [float("nan"), *p[1:]]), "row 8: .* has nan"),
        (lambda columns: columns.update(row_id=[5] * 16), "row 1: its row_id 5 is another row's too"),
        (lambda columns: columns.update(seq=["x"] * 16), "column seq is string, not int64"),
    ],
)
def test_a_broken_row_is_named(live: Path, tmp_path: Path, spoil: Spoil, said: str) -> None:
    recording = open_recording(str(spoiled(live, tmp_path / "rows", spoil)))
    recording.read(0, LIMITS)
    with pytest.raises(DataError, match=rf"step-000002.parquet: {said}"):
        recording.read(1, LIMITS)


def test_rows_that_are_longer_than_the_budget_are_named(live: Path) -> None:
    recording = open_recording(str(live))
    short = RowLimits(10_000, tokens=9, tokens_key="critic.token_budget", accuracy=False)
    with pytest.raises(DataError, match=full_text("prompt and 8 response tokens are more")):
        recording.read(0, short)
    judged = RowLimits(10_000, tokens=512, tokens_key="actor.token_budget", accuracy=True)
    recording.read(0, judged)  # the only score is the accuracy
    with pytest.raises(DataError, match="there is none after them"):
        recording.place(12)


def without(name: str) -> Spoil:
    return lambda columns: columns.pop(name)


def test_scores_of_limits_that_came_with_a_newer_rondo_are_left_out(live: Path, tmp_path: Path) -> None:
    rows = spoiled(live, tmp_path / "rows", lambda columns: None)
    table = pq.read_table(rows / "step-000003.parquet")
    zeros = pa.array([0.0] * len(table), pa.float32())
    pq.write_table(table.append_column("score/raises/timeout", zeros), rows / "step-000003.parquet")
    recording = open_recording(str(rows))
    assert recording.scores == open_recording(str(live)).scores == ("raises",)
    assert "score/raises/timeout" not in recording.read(2, LIMITS).columns


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            without("response_mask"),
            full_text("step-000002.parquet: lacks the column"),
        ),
        (
            without("score/raises"),
            full_text("step-000001.parquet has the column"),
        ),
        (lambda columns: [values.clear() for values in columns.values()], "step-000002.parquet: has no rows"),
        (changing("group_id", 0, 1), full_text("step-000001.parquet too; a recording")),
    ],
)
def test_a_file_that_is_no_recording_is_named(live: Path, tmp_path: Path, spoil: Spoil, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_recording(str(spoiled(live, tmp_path / "rows", spoil)))


def test_files_that_are_missing_or_cut_off_are_named(live: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    rows = spoiled(live, run / "rollouts", lambda columns: None)
    assert open_recording(str(run)).groups == tuple(tuple(range(i, i + 4)) for i in (0, 4, 8))
    (rows / ".step-000004.parquet.tmp").write_bytes(b"being written")
    assert open_recording(str(run)).num_groups == 12
    whole = (rows / "step-000003.parquet").read_bytes()
    (rows / "step-000003.parquet").write_bytes(whole[:-10])
    with pytest.raises(DataError, match=full_text("step-000003.parquet: cannot be read")):
        open_recording(str(run))
    (rows / "step-000003.parquet").write_bytes(whole)
    (rows / "step-000002.parquet").unlink()
    with pytest.raises(DataError, match=full_text("step-000002.parquet is missing")):
        open_recording(str(run))
    assert open_recording(f"{rows}/step-00000[13].parquet").num_groups == 8  # by name it may be
    np.testing.assert_array_equal(open_recording(str(rows)).step_sizes(3), [3, 3, 2])
