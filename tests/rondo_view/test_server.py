"""What the page's server answers: what the run's files say, to who has the address, of this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import rondo
import viewing
from rondo.core.errors import ConfigError, DataError
from rondo.core.images import ImageRef
from rondo.tracking.metrics import metrics_line, read_metrics, series
from rondo.tracking.pictures import looked_at
from rondo.tracking.runs import read_run, settings_of
from rondo.tracking.trajectories import read_trajectories
from rondo_view.followed import Followed, _thinned
from rondo_view.server import Server
from tests.messages import full_text
from tests.rondo_view.conftest import STEPS, ask
from tests.trainers.conftest import PYTHONPATH

ROOT = Path(__file__).resolve().parents[2]
OLDER = ROOT / "tests" / "api" / "run_of_9bbdfff" / "run"


@pytest.fixture(scope="module")
def server(trained: Path, made: Path) -> Iterator[Server]:
    server = Server([str(trained.parent), str(made)])
    while ask(server, "rollouts", run=str(made))["state"]["read"] < STEPS:
        pass
    yield server
    server.close()


# ---- who is answered


def answered(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    place = urllib.parse.urlsplit(server.address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body, response.headers


def test_only_who_has_the_whole_address_is_answered(server: Server) -> None:
    secret = urllib.parse.urlsplit(server.address).path
    assert len(secret) > 30
    assert answered(server, f"{secret}runs")[0] == 200
    for path in (
        "/",
        "/runs",
        "/x/runs",
        f"{secret[:-2]}/runs",
        "/%00/runs",
        "/%C3%A9/runs",
    ):
        status, body, _ = answered(server, path)
        assert (status, json.loads(body)) == (
            403,
            {"error": "open the address that `rondo view` printed, all of it"},
        )


def test_a_page_that_reaches_it_by_another_name_is_refused(server: Server) -> None:
    path = urllib.parse.urlsplit(server.address).path + "runs"
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        status, body, _ = answered(server, path, Host=host)
        assert status == 403
        assert "no name of this server" in body
    for host in ("localhost:8000", "127.0.0.1"):
        assert answered(server, path, Host=host)[0] == 200


def test_it_only_reads(server: Server) -> None:
    path = urllib.parse.urlsplit(server.address).path
    for method in ("POST", "PUT", "DELETE"):
        assert answered(server, f"{path}runs", method)[0] == 501
    for name in ("../server.py", "%2e%2e/server.py", "page/view.js", "nothing", "static/../../index.py"):
        assert answered(server, f"{path}{name}")[0] == 404


def test_nothing_is_loaded_from_elsewhere_or_kept(server: Server) -> None:
    path = urllib.parse.urlsplit(server.address).path
    for name, kind in (
        ("", "text/html"),
        ("view.js", "text/javascript"),
        ("view.css", "text/css"),
        ("plotly.js", "text/javascript"),
    ):
        status, body, headers = answered(server, f"{path}{name}")
        assert status == 200
        assert headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        if name != "plotly.js":
            assert "http:" not in body.replace("http://www.w3.org", "")
            assert "https:" not in body
            assert "innerHTML" not in body


# ---- what is answered


def test_runs_are_what_rondo_runs_says(server: Server, trained: Path, made: Path) -> None:
    found = {one.pop("run"): one for one in ask(server, "runs")}
    assert found.keys() == {str(trained), str(made)}
    for run, said in found.items():
        checks = said.pop("checks")
        wanted = dataclasses.asdict(read_run(run))
        del wanted["run"]
        assert said == json.loads(json.dumps(wanted))
        assert all(isinstance(text, str) for text in checks)


def test_curves_are_the_metrics(server: Server, trained: Path, made: Path) -> None:
    found = ask(
        server,
        "curves",
        run=[str(trained), str(made)],
        metric=["reward/mean", "made/3", "eval/greedy/reward"],
    )
    assert found["curves"].keys() == {"reward/mean", "made/3", "eval/greedy/reward"}
    for name, of_runs in found["curves"].items():
        for run in (trained, made):
            steps, values = series(read_metrics(run), (name,))
            assert of_runs.get(str(run), {"steps": [], "values": []}) == {"steps": steps, "values": values}
    usual = ask(server, "curves", run=str(trained))
    assert list(usual["curves"])[:3] == ["reward/mean", "eval/greedy/reward", "eval/sampled/reward"]
    assert "buffer/staleness_mean" not in usual["curves"]  # it is 0
    assert "buffer/staleness_mean" in usual["names"]


def test_long_curves_keep_their_peaks() -> None:
    from array import array

    rng = np.random.default_rng(0)
    values = array("d", rng.normal(size=50_000))
    values[12_345], values[40_001] = 99.0, -99.0
    places = _thinned(values)
    assert len(places) <= 2002
    assert places == sorted(set(places))
    assert {0, 12_345, 40_001, 49_999} <= set(places)
    assert _thinned(values[:2000]) == list(range(2000))


def test_settings_are_those_that_differ(server: Server, trained: Path, made: Path) -> None:
    of_trained, of_made = settings_of(trained), settings_of(made)
    assert ask(server, "settings", run=str(made)) == {key: [value] for key, value in of_made.items()}
    found = ask(server, "settings", run=[str(trained), str(made)])
    wanted = {key: [of_trained.get(key, "-"), of_made.get(key, "-")] for key in of_trained | of_made}
    assert found == {key: row for key, row in wanted.items() if row[0] != row[1]}
    assert found["trainer.total_steps"] == [3, STEPS]


def test_a_trajectory_has_its_tokens(server: Server, trained: Path) -> None:
    file = trained / "rollouts" / "step-000002.parquet"
    kept = {row["row_id"]: row for row in pq.read_table(file.with_suffix(".tokens.parquet")).to_pylist()}
    for row in pq.read_table(file).to_pylist():
        found = ask(server, "trajectory", run=str(trained), step=2, id=row["trajectory_id"])
        (shown,) = read_trajectories(trained, step=2, prompt=row["prompt_id"], number=9)[
            row["sample_index"] :
        ][:1]
        assert (found["prompt"], found["said"], found["reward"]) == (shown.prompt, shown.said, shown.reward)
        (page,) = found["of_rows"]
        tokens, also = page["tokens"], kept[row["row_id"]]
        assert page["kept"]
        assert tokens["id"] == row["response_ids"]
        assert tokens["log_prob"] == row["rollout_log_probs"]
        assert tokens["version"] == row["policy_versions"]
        assert tokens["old_log_probs"] == also["old_log_probs"]
        pairs = zip(also["old_log_probs"], row["rollout_log_probs"], strict=True)
        assert tokens["gap"] == [new - old for new, old in pairs]
        assert tokens["advantages"] == [also["advantages"]] * len(row["response_ids"])
        assert len(tokens["text"]) == len(row["response_ids"])
        assert row["text"].strip() in "".join(tokens["text"])
        assert page["about"]["row_id"] == row["row_id"]


def test_texts_of_another_tokenizer_are_not_shown(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    path = run / "export" / "tokenizer.json"
    named = json.loads(path.read_text())
    vocabulary = named["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    named["model"]["vocab"] = {word: number for number, word in enumerate([*words[40:], *words[:40]])}
    named["model"]["merges"] = []
    path.write_text(json.dumps(named))
    server = Server([str(run)])
    name = read_trajectories(run, step=1, number=1)[0].trajectory_id
    (row,) = ask(server, "trajectory", run=str(run), step=1, id=name)["of_rows"]
    assert row["tokens"]["text"] is None
    assert row["no_texts"] == f"{path} reads these tokens differently than the run did"
    server.close()


def test_a_group_is_its_answers_the_best_first(server: Server, made: Path) -> None:
    prompt = read_trajectories(made, step=5, number=1)[0].prompt_id
    answers = read_trajectories(made, step=5, prompt=prompt, order="best", number=99)
    found = ask(server, "group", run=str(made), step=5, prompt=prompt)
    assert found["total"] == len(answers) == 8
    assert [one["sample_index"] for one in found["answers"]] == [one.sample_index for one in answers]
    assert [one["said"] for one in found["answers"]] == [one.said for one in answers]


def test_the_timeline_is_that_of_the_step(server: Server, trained: Path) -> None:
    from rondo.tracking.timeline import read_timeline

    events = read_timeline(trained / "timeline" / "attempt-1")
    begun = {e["id"]: e for e in events if e["ph"] == "b" and e["args"]["step"] == 2}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    first = min(e["ts"] for e in begun.values())
    found = ask(server, "timeline", run=str(trained), step=2)["spans"]
    assert [(one["name"], one["start"], one["end"]) for one in found] == [
        (e["name"], (e["ts"] - first) / 1e6, (ends[number] - first) / 1e6) for number, e in begun.items()
    ]
    assert {"controller", "device 0: actor", "device 0: rollout"} <= {one["process"] for one in found}
    assert "has no timeline of step 200" in ask(server, "timeline", run=str(trained), step=200)


def test_evaluations_beside_each_other(server: Server, trained: Path) -> None:
    before, after = (
        {
            (one.prompt_id, one.sample_index): one
            for one in read_trajectories(trained, step=step, evaluation=True, number=99)
        }
        for step in (0, 3)
    )
    found = ask(server, "evaluations", run=str(trained))
    assert (found["other_step"], found["step"]) == (0, 3)
    assert found["total"] == len(before) == len(after)
    for left, right in found["pairs"]:
        key = left["prompt_id"], left["sample_index"]
        assert (left["said"], right["said"]) == (before[key].said, after[key].said)
    changed = sum(before[key].reward != after[key].reward for key in before)
    assert found["changed"] == ask(server, "evaluations", run=str(trained), changed=1)["total"] == changed
    assert "no evaluation of step 9; there are 0, 2, 3" in ask(
        server, "evaluations", run=str(trained), step=9
    )


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_exported_are_the_rows(server: Server, made: Path, tmp_path: Path, kind: str) -> None:
    query = urllib.parse.urlencode({"run": made, "format": kind, "source": "geometry", "least": "0.5"})
    with urllib.request.urlopen(f"{server.address}export?{query}") as answer:
        body = answer.read()
        assert answer.headers["Content-Disposition"] == f'attachment; filename="rollouts.{kind}"'
    whole = pa.concat_tables(
        pq.read_table(file) for file in sorted((made / "rollouts").glob("step-??????.parquet"))
    )
    wanted = [row for row in whole.to_pylist() if row["source"] == "geometry" and row["reward"] >= 0.5]
    assert len(wanted) > 10
    if kind == "jsonl":
        assert [json.loads(line) for line in body.splitlines()] == wanted
    else:
        assert pq.read_table(pa.BufferReader(body)).to_pylist() == wanted


def test_steps_with_other_columns_are_exported_together(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    one = viewing.table(1, 8).drop_columns(["transcript"])
    pq.write_table(one, tmp_path / "rollouts" / "step-000001.parquet")
    pq.write_table(viewing.table(2, 8), tmp_path / "rollouts" / "step-000002.parquet")
    server = Server([str(tmp_path)])
    ask(server, "rollouts", run=str(tmp_path))
    with urllib.request.urlopen(
        f"{server.address}export?{urllib.parse.urlencode({'run': tmp_path, 'format': 'parquet'})}"
    ) as answer:
        found = pq.read_table(pa.BufferReader(answer.read()))
    assert found.num_rows == 16
    assert found["transcript"].null_count == 8
    server.close()


def test_images_are_those_of_the_row(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    picture = tmp_path / "picture.png"
    Image.new("RGB", (8, 8), (200, 30, 30)).save(picture)
    right = ImageRef(f"path:{picture}", hashlib.sha256(picture.read_bytes()).hexdigest(), (1, 2, 2), 4)
    other = dataclasses.replace(right, ref=f"path:{ROOT / 'README.md'}")
    column = json.dumps([dataclasses.asdict(one) for one in (right, other)])
    table = viewing.table(1, 1).append_column("images", [[column]])
    pq.write_table(table, run / "rollouts" / "step-000001.parquet")
    server = Server([str(run)])
    name = table["trajectory_id"][0].as_py()
    query = {"run": str(run), "step": 1, "id": name}
    assert [one["path"] for one in ask(server, "trajectory", **query)["images"]] == [
        str(picture),
        str(ROOT / "README.md"),
    ]
    with urllib.request.urlopen(
        f"{server.address}image?{urllib.parse.urlencode(query | {'number': 0})}"
    ) as answer:
        assert answer.read() == looked_at([right])[0].png
        assert answer.headers["Content-Type"] == "image/png"
    assert ask(server, "image", **query, number=1) == "the file is not the one that it was"
    assert "there is no image 2" in ask(server, "image", **query, number=2)
    server.close()


# ---- what is asked for wrongly, half written, or gone


def test_what_is_not_there_is_named(server: Server, made: Path) -> None:
    run = str(made)
    assert ask(server, "rollouts", run="/etc").startswith("/etc: not one of the runs here (")
    assert ask(server, "rollouts") == "the address has 0 values of run; it needs one"
    assert ask(server, "rollouts", run=run, least="x") == "least=x: must be a number"
    assert (
        ask(server, "trajectory", run=run, step=99, id="a")
        == f"{run}: has no rollouts of step 99; they are gone, or were never kept"
    )
    assert ask(server, "trajectory", run=run, step="two", id="a") == "step=two: must be a whole number"
    assert ask(server, "trajectory", run=run, step=2, id="a").endswith(
        "step-000002.parquet: has no trajectory a"
    )
    assert ask(server, "evaluations", run=run) == f"{run}: has no evaluations (trainer.evaluation)"
    assert ask(server, "export", run=run, format="csv") == "format=csv: there are jsonl and parquet"


def test_a_run_that_goes_on_is_followed(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    followed, path = Followed(run, "run"), run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)

    def same(text: str) -> None:
        """What was followed is what a new one reads, which is the file's whole lines."""
        path.write_text(text) if not text.startswith("".join(lines[:3])) else _append(path, text)
        anew = Followed(run, "run")
        assert followed.state() == anew.state()
        assert followed.names() == anew.names()
        steps, values = series(read_metrics(run), ("made/1",))
        assert followed.curve("made/1") == anew.curve("made/1") == {"steps": steps, "values": values}

    path.write_text("".join(lines[:3]))
    same("".join(lines[:3]))
    same("".join(lines[:5]))
    same("".join(lines[:5]) + lines[5][:20])  # it is being written
    same("".join(lines[:7]))
    again = metrics_line(7, {"made/1": 5.0, "reward/mean": float("nan")}) + "\n"
    same("".join(lines[:7]) + again)  # two lines of a step: the last one counts
    same(lines[0] + lines[1])  # it went back
    path.unlink()
    assert followed.state()["step"] == 0


def test_what_stands_before_a_damaged_line_is_counted_once(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    followed, path = Followed(run, "run"), run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "no metrics\n", *lines[2:]]))
    for _ in range(3):
        with pytest.raises(DataError, match="not a line of metrics: b'no metrics'"):
            followed.state()
    path.write_text("".join(lines))
    assert followed.state()["seconds"] == Followed(run, "run").state()["seconds"] == 3.0 * STEPS


def _append(path: Path, text: str) -> None:
    """Makes a file longer, in place, as a run does."""
    there = path.stat().st_size
    if len(text) >= there:
        with path.open("a") as file:
            file.write(text[there:])
    else:
        path.write_text(text)


def test_a_run_that_disappears_and_one_that_comes(made: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(made, runs / "a")
    (runs / "notes").mkdir()
    server = Server([str(runs)])
    shutil.copytree(made, runs / "b")
    (runs / "b" / "metrics.jsonl").write_text("no metrics\n")
    found = {one["run"]: one for one in ask(server, "runs")}
    assert found.keys() == {f"{runs}/a", f"{runs}/b"}
    assert found[f"{runs}/b"]["wrong"].startswith(f"{runs}/b/metrics.jsonl: not a line of metrics")
    shutil.rmtree(runs / "b")
    assert [one["run"] for one in ask(server, "runs")] == [f"{runs}/a"]
    assert ask(server, "rollouts", run=f"{runs}/b").startswith(f"{runs}/b: not one of the runs here")
    shutil.rmtree(runs)
    assert ask(server, "runs").startswith(f"{runs}: there is no such folder")
    assert ask(server, "trajectory", run=f"{runs}/a", step=1, id="x").endswith("never kept")
    server.close()


def test_a_run_of_an_older_rondo(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(OLDER, run)
    server = Server([str(run)])
    (said,) = ask(server, "runs")
    assert said["step"] == read_run(run).step
    assert len(ask(server, "settings", run=str(run))) == len(settings_of(run))
    assert (
        ask(server, "curves", run=str(run))["curves"]["reward/mean"][str(run)]["steps"]
        == series(read_metrics(run), ("reward/mean",))[0]
    )
    server.close()


def test_what_cannot_be_shown_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path
) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}: there is no run in it"):
        Server([str(tmp_path)])
    with pytest.raises(DataError, match="there is no such folder"):
        Server([str(tmp_path / "none")])
    with pytest.raises(DataError, match=r"folders of this machine\. Copy it"):
        Server(["s3://bucket/run"])
    with pytest.raises(ConfigError, match=r"^--port 99999: cannot listen there"):
        Server([str(made)], port=99999)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=full_text("rondo view draws with plotly")):
        Server([str(made)])


# ---- from Python, and from the command line


def test_a_notebook_shows_the_page(trained: Path) -> None:
    page = rondo.load(trained).view()
    assert [one["run"] for one in ask(page, "runs")] == [str(trained)]
    shown = page._repr_html_()
    assert f'src="{page.address}"' in shown
    page.close()
    with pytest.raises(OSError, match="refused"):
        ask(page, "runs")


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(trained: Path) -> None:
    environ = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-m", "rondo", "view", str(trained.parent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{address}runs") as answer:
            assert [one["run"] for one in json.loads(answer.read())] == [str(trained)]
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "rondo view: interrupted\n")
