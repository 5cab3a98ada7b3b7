"""`rondo runs` and `rondo compare` on runs that were trained, and on what other folders look like."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.cli.main import main
from rondo.config import load
from rondo.core.errors import WorkerError
from rondo.tracking.run_folder import RunFolder
from rondo.tracking.sums import compared
from rondo.tracking.text import format_duration, format_number
from rondo.trainers.commands.supervised import sft
from rondo.trainers.commands.train import train
from tests.trainers.conftest import RECIPE, SFT_RECIPE

ROOT = Path(__file__).resolve().parents[2]
OLDER = ROOT / "tests" / "api" / "run_of_9bbdfff" / "run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: a, and b of another seed and length; one by SFT; one that a scorer has ended."""
    folder = tmp_path_factory.mktemp("runs")
    recipes = {"train": RECIPE, "sft": SFT_RECIPE}
    for name, recipe in recipes.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    few = ("trainer.evaluation={before: false, every: null, after: false}", "checkpoint.export=false")
    rl = str(folder / "train.yaml")
    train(load([rl], [f"trainer.run_dir={folder}/a", *few]))
    train(load([rl], [f"trainer.run_dir={folder}/b", *few, "trainer.seed=7", "trainer.total_steps=2"]))
    sft(load([str(folder / "sft.yaml")], [f"trainer.run_dir={folder}/sft"]))
    broken = "reward.functions=[tests/trainers/scorers.py:raises]"
    with pytest.raises(WorkerError):
        train(load([rl], [f"trainer.run_dir={folder}/failed", *few, broken]))
    for age, name in enumerate(("sft", "failed", "b", "a")):  # they began in the same second, perhaps
        lock = folder / name / "run.lock"
        lock.write_text(json.dumps(json.loads(lock.read_text()) | {"started": 1_790_000_000 - 3600 * age}))
    return folder


def last_of(run: Path) -> Mapping[str, Any]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])  # type: ignore[no-any-return]


def numbers(run: Path, **names: str) -> str:
    """The text of a run's last metrics."""
    line = last_of(run)
    return "  ".join(f"{short} {format_number(line[name])}" for short, name in names.items())


def rows(text: str) -> list[list[str]]:
    """The cells of a table, which two spaces or more divide, apart from those of the metrics."""
    return [[cell for cell in line.replace("  ", "\t").split("\t") if cell] for line in text.splitlines()]


@pytest.mark.slow
def test_a_line_for_each_run_the_newest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "notes").mkdir(exist_ok=True)
    assert main(["runs", str(runs)]) == 0
    out, err = capsys.readouterr()
    assert err == f"note: {runs}: not the folders of runs: notes\n"
    walls = {
        name: json.loads((runs / name / "summary.json").read_text())["wall_seconds"]
        for name in ("sft", "a", "b")
    }
    began = [time.strftime("%Y-%m-%d %H:%M", time.localtime(1_790_000_000 - 3600 * age)) for age in range(4)]
    of_sft = numbers(runs / "sft", loss="sft/loss", grad="actor/grad_norm", lr="actor/lr")
    names = {"reward": "reward/mean", "len": "rollout/response_length", "KL(old)": "actor/ppo_kl"}
    of_a, of_b = (numbers(runs / name, **names) for name in "ab")
    assert [[cell.strip() for cell in line] for line in rows(out)] == [
        ["run", "command", "state", "steps", "last metrics", "time", "began"],
        [f"{runs}/sft", "sft", "ended", "2/2", *of_sft.split("  "), format_duration(walls["sft"]), began[0]],
        [f"{runs}/failed", "train", "failed (RewardError)", "0/3", "-", "0:00", began[1]],
        [f"{runs}/b", "train", "ended", "2/2", *of_b.split("  "), format_duration(walls["b"]), began[2]],
        [f"{runs}/a", "train", "ended", "3/3", *of_a.split("  "), format_duration(walls["a"]), began[3]],
    ]
    assert main(["runs", str(runs / "a"), str(runs / "b"), "--json"]) == 0
    b, a = map(json.loads, capsys.readouterr().out.splitlines())
    line = dict(last_of(runs / "a"))
    del line["step"]
    assert (a["run"], b["run"]) == (f"{runs}/a", f"{runs}/b")
    assert {name: a["metrics"][name] for name in line} == line
    del a["metrics"]
    assert a == {
        **{"command": "train", "run": f"{runs}/a", "kind": "rl", "state": "ended"},
        **{"step": 3, "total_steps": 3, "seconds": walls["a"], "began": 1_790_000_000 - 3 * 3600},
    }


@pytest.mark.slow
def test_what_two_runs_differ_in(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(runs / "a"), str(runs / "b")
    assert main(["compare", a, b]) == 0
    settings, metrics, sums = capsys.readouterr().out.split("\n\n")
    assert rows(settings)[0] == ["setting", a, b]
    assert [[cell.strip() for cell in row] for row in rows(settings)[1:]] == [
        ["trainer.total_steps", "3", "2"],
        ["trainer.seed", "0", "7"],
        ["trainer.run_dir", json.dumps(a), json.dumps(b)],
    ]
    one, other = last_of(runs / "a")["reward/mean"], last_of(runs / "b")["reward/mean"]
    assert [cell.strip() for cell in rows(metrics)[0]] == ["metric", f"{a}, step 3", f"{b}, step 2"]
    assert [cell.strip() for cell in rows(metrics)[1]] == [
        "reward/mean",
        format_number(one),
        f"{format_number(other)} ({other - one:+.3g})",
    ]
    assert sums == f"{a} against {b}: {compared(a, b).line()}\n"
    assert "in step 1 the first difference is column prompt_id" in sums


@pytest.mark.slow
def test_metrics_of_a_step_and_for_programs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, sft = str(runs / "a"), str(runs / "sft")
    assert main(["compare", a, a, sft, "--step", "1", "--metrics", "*/loss", "actor/lr", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = [json.loads((runs / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("a", "sft")]
    assert found["runs"] == [a, a, sft]
    assert found["steps"] == [1, 1, 1]
    assert found["metrics"] == {
        "actor/loss": [first[0]["actor/loss"]] * 2 + [first[1].get("actor/loss")],
        "actor/lr": [first[0]["actor/lr"]] * 2 + [first[1]["actor/lr"]],
        "sft/loss": [None, None, first[1]["sft/loss"]],
    }
    assert found["settings"]["actor.optimizer.lr"] == [1e-3, 1e-3, 1e-2]
    assert found["settings"]["actor.mini_batch_size"] == [2, 2, None]
    assert found["sums"][a] == {"first": 1, "last": 3, "differ": [], "only_one": []}
    assert found["sums"][sft]["none"].startswith(f"{sft}/sums.jsonl: no such file")
    assert main(["compare", a, a]) == 0
    same = capsys.readouterr().out
    assert same.startswith("their settings are equal\n")
    assert same.endswith(f"{a} against {a}: equal, bit for bit, in steps 1 to 3: all columns and weights\n")
    assert main(["compare", a, a, "--step", "9"]) == 2
    assert f"{a}: metrics.jsonl has no step 9" in capsys.readouterr().err
    assert main(["compare", a, a, "--metrics", "evil/*"]) == 2
    assert "--metrics evil/*: the runs have none like that." in capsys.readouterr().err


def lines(*records: Mapping[str, Any]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def test_runs_that_are_half_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As kills, copies and older versions leave them."""
    for number, name in enumerate(("killed", "bare", "lost", "torn", "odd", "live", "diverged")):
        (tmp_path / name).mkdir()
        lock = {"pid": 1, "host": "h", "started": 1_790_000_000 - number, "attempt": 1}
        (tmp_path / name / "run.lock").write_text(json.dumps(lock))
    step = {"step": 1, "reward/mean": 0.25, "timing/step_s": 61.0}
    (tmp_path / "killed" / "metrics.jsonl").write_text(lines(step, step | {"step": 2}) + '{"step": 3, "rew')
    (tmp_path / "killed" / "config.yaml").write_text("trainer:\n  total_steps: 8\n  gone: 1\n")
    (tmp_path / "lost" / "metrics.jsonl").write_text("torn\n" + lines(step))
    (tmp_path / "torn" / "summary.json").write_text('{"steps": ')
    (tmp_path / "odd" / "config.yaml").write_text("- a list\n")
    pairs = {"step": 4, "pair/loss": 0.5, "pair/accuracy": 0.75, "timing/step_s": 1.0}
    (tmp_path / "live" / "metrics.jsonl").write_text(lines(pairs))
    odd = {"step": 2, "reward/mean": None, "not_finite": {"reward/mean": "nan"}}
    (tmp_path / "diverged" / "metrics.jsonl").write_text(lines(step, odd))
    (tmp_path / "file").write_text("")
    with (tmp_path / "live" / "run.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["runs", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    told = [[cell.strip() for cell in row][:-1] for row in rows(out.replace(f"{tmp_path}/", ""))[1:]]
    assert told == [
        ["killed", "train", "broken off", "2/8", "reward 0.250", "2:02"],
        ["bare", "-", "broken off", "0/?", "-", "0:00"],
        ["live", "preference", "running", "4/?", "loss 0.500", "right 0.750", "0:01"],
        ["diverged", "train", "broken off", "2/?", "reward -", "1:01"],
    ]
    notes = err.splitlines()
    assert len(notes) == 3
    assert f"note: {tmp_path}/lost/metrics.jsonl:1: not a metrics line" in notes[0]
    assert f"note: {tmp_path}/odd/config.yaml:1: a recipe is a mapping of sections" in notes[1]
    assert f"note: {tmp_path}/torn/summary.json: damaged (" in notes[2]


def test_a_run_of_an_older_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(OLDER, tmp_path / "runs" / "old")
    os.utime(tmp_path / "runs" / "old" / "config.yaml", (1_700_000_000, 1_700_000_000))
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_000_000))
    assert capsys.readouterr().out.splitlines() == [
        "run       command  state  steps  last metrics                               time  began",
        f"runs/old  train    ended  2/2    reward 0.523  len 8.000  KL(old) -8.0e-05  0:01  {began}",
    ]
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_text((OLDER / "config.yaml").read_text() + "younger: 3\n")
    assert main(["compare", "runs/old", "new"]) == 0
    settings, metrics, sums = capsys.readouterr().out.split("\n\n")
    assert settings.splitlines() == ["setting  runs/old  new", "younger  not set   3"]
    assert metrics.splitlines()[1].split() == ["reward/mean", "0.523", "-"]
    assert sums.startswith("runs/old against new: new/sums.jsonl: no such file")


def test_what_is_no_run_and_what_is_far_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert "runs: there is no such folder; a run's is what" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert main(["runs"]) == 0
    assert capsys.readouterr() == ("", "note: runs: there is no run in it\n")
    assert main(["compare", "runs", "runs"]) == 2
    assert "runs: not the folder of a run: it has none of config.yaml" in capsys.readouterr().err
    (tmp_path / "there" / "mine").mkdir(parents=True)
    (tmp_path / "there" / "mine" / "metrics.jsonl").write_text(lines({"step": 5, "sft/loss": 2.0}))
    for command in (["runs"], ["compare", "runs"]):
        assert main([*command, f"file://{tmp_path}/there/mine/"]) == 2
    said = capsys.readouterr().err
    assert f"file://{tmp_path}/there/mine/: runs are read from folders of this machine" in said
    (line,) = {line.strip() for line in said.splitlines() if "fsspec" in line}
    copy = line.replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", copy], check=True, cwd=tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("runs/mine  sft      broken off  5/?    loss")


def test_how_a_run_ended_is_kept_and_it_is_running_until_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def states(*ends: BaseException | None) -> list[str]:
        found = []
        for end in ends:
            try:
                with RunFolder(tmp_path / "run") as folder:
                    folder.begin("trainer: {total_steps: 3}\n")
                    main(["runs", "--json", str(tmp_path)])
                    found.append(json.loads(capsys.readouterr().out)["state"])
                    if end is not None:
                        raise end
                    folder.write_summary({"wall_seconds": 3.0})
            except (KeyboardInterrupt, ValueError):
                pass
            main(["runs", "--json", str(tmp_path)])
            found.append(json.loads(capsys.readouterr().out)["state"])
        return found

    assert states(ValueError("x"), KeyboardInterrupt(), None) == [
        *("running", "failed (ValueError)", "running", "stopped", "running", "ended"),
    ]


def test_neither_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer: {total_steps: 3}\n")
    code = (
        "import sys; from rondo.cli.main import main; "
        f"print(main(['runs', '{tmp_path}']), main(['compare', '{tmp_path}/run', '{tmp_path}/run']), "
        "[name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.splitlines()[-1] == "0 0 []"
