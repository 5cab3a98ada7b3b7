"""Trackers with the real libraries, offline; what was logged is read back from their own files."""

from __future__ import annotations

import io
import json
import socket
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.config.schema import FunctionConfig, TrackingConfig
from rondo.core.errors import ConfigError, TrainError
from rondo.tracking import (
    RunFolder,
    Sample,
    TrackerContext,
    check_trackers,
    make_trackers,
    metric_names,
)
from rondo.tracking.pictures import Picture
from rondo.tracking.trackers import _without_hub
from tests.messages import full_text
from tests.prometheus import samples_of
from tests.waiting import wait_for

CONFIG = {"data": {"batch_size": 16}, "model": {"path": None}}
SAMPLES = [Sample("1+1=", "**2** <b>", 1.0, "stop"), Sample("2+2=", "5", 0.0)]


def with_images() -> list[Sample]:
    """SAMPLES, and one that has a picture, and one that is gone."""
    file = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (3, 2), (220, 40, 60)).save(file, "PNG")
    pictures = [Picture("/a.png", 4, 0, file.getvalue()), Picture("/b.png", 5, 1, missing="gone")]
    return [*SAMPLES, Sample("What?", "red", 1.0, "stop", pictures)]


def log_run(
    folder: RunFolder,
    name: str,
    options: dict[str, Any],
    resume_step: int | None = None,
    samples: Sequence[Sample] = SAMPLES,
) -> list[str]:
    warnings: list[str] = []
    folder.resume_step = resume_step
    context = TrackerContext(folder, "rondo-test", "run-a", CONFIG, warnings.append)
    (tracker,) = make_trackers([FunctionConfig(name, options)], context)
    first = 1 if resume_step is None else resume_step + 1
    for step in range(first, first + 3):
        tracker.log(step, {"reward/mean": step / 10, "eval/best@4": 1.0})
    tracker.log_samples(first, samples)
    assert str(folder.path) in tracker.where
    tracker.finish("finished")
    return warnings


def test_tensorboard_event_file_read_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunFolder(tmp_path / "run") as folder:
        log_run(folder, "tensorboard", {})
        log_run(folder, "tensorboard", {"flush_seconds": 5}, resume_step=2)
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard"))
    events.Reload()
    scalars = [(e.step, round(e.value, 6)) for e in events.Scalars("reward/mean")]
    assert scalars == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
        (5, 0.5),
    ]  # step 3 of the first attempt is purged
    assert sorted(events.Tags()["scalars"]) == ["eval/best@4", "reward/mean"]
    text = events.Tensors("samples/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '    "response": "**2** <b>"' in text  # a code block: the model's text is no markup


def test_tensorboard_has_the_images_of_samples(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with RunFolder(tmp_path / "run") as folder:
        log_run(folder, "tensorboard", {}, samples=with_images())
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "trackers" / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["samples/2/image 1"]
    (shown,) = events.Images("samples/2/image 1")
    image = np.asarray(pytest.importorskip("PIL.Image").open(io.BytesIO(shown.encoded_image_string)))
    assert (shown.step, image.tolist()) == (1, [[[220, 40, 60]] * 3] * 2)
    texts = [
        events.Tensors(f"samples/{n}/text_summary")[0].tensor_proto.string_val[0].decode() for n in (1, 2)
    ]
    assert "images" not in texts[0]
    assert '"image 1 · 4 tokens · message 0 · /a.png"' in texts[1]
    assert '"image 2 · 5 tokens · message 1 · /b.png · not shown: gone"' in texts[1]


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: a LevelDB log in blocks of 32 KiB, after a header of 7 bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # it is still being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "of-wandb"))
    with RunFolder(tmp_path / "run") as folder:
        log_run(folder, "wandb", {"mode": "offline", "tags": ["t1"]}, samples=with_images())
    files = list((tmp_path / "run" / "trackers" / "wandb" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1

    def whole() -> list[Any]:
        """wandb's own process may still write when finish() has returned."""
        found = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(files[0])]
        return found if any(r.WhichOneof("record_type") == "exit" for r in found) else []

    records = wait_for("wandb's last record", whole)
    history: list[dict[str, Any]] = []
    run = None
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif record.WhichOneof("record_type") == "run":
            run = record.run
    assert run is not None
    assert (run.project, run.display_name, list(run.tags)) == ("rondo-test", "run-a", ["t1"])
    assert run.run_id == (tmp_path / "run" / "trackers" / "wandb" / "run_id").read_text().strip()
    scalars = [(h["step"], h["reward/mean"], h["eval/best@4"]) for h in history if "reward/mean" in h]
    assert scalars == [(1, 0.1, 1.0), (2, 0.2, 1.0), (3, 0.3, 1.0)]
    assert not any("actor/kl" in h or "note" in h for h in history)
    assert any(any(key.startswith("samples") for key in h) for h in history)
    media = files[0].parent / "files"
    (table,) = (json.loads(path.read_text()) for path in media.rglob("samples*.table.json"))
    assert table["columns"] == ["step", "prompt", "response", "reward", "note", "images", "image 1"]
    assert table["data"][1] == [1, "2+2=", "5", 0.0, "", None, None]
    assert table["data"][2][5].splitlines()[0] == "image 1 · 4 tokens · message 0 · /a.png"
    # What a table holds besides goes the way of artifacts, by wandb's own folder.
    sent = [path.read_bytes() for path in (tmp_path / "of-wandb" / "artifacts" / "staging").iterdir()]
    cell = next(json.loads(content)["data"][2][6] for content in sent if b"image-file" in content)
    assert (cell["_type"], cell["format"], cell["width"], cell["height"]) == ("image-file", "png", 3, 2)
    (picture,) = (io.BytesIO(content) for content in sent if content.startswith(b"\x89PNG"))
    image = np.asarray(pytest.importorskip("PIL.Image").open(picture).convert("RGB"))
    assert image.tolist() == [[[220, 40, 60]] * 3] * 2


def test_mlflow_in_a_local_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with RunFolder(tmp_path / "run") as folder:
        assert log_run(folder, "mlflow", {"tags": {"who": "test"}}, samples=with_images()) == []
        assert log_run(folder, "mlflow", {}, resume_step=3) == []
        run_id = (folder.path / "trackers" / "mlflow" / "run_id").read_text().strip()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/trackers/mlflow/mlflow.db")
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name, run.data.tags["who"]) == ("FINISHED", "run-a", "test")
    history = [(m.step, m.value) for m in client.get_metric_history(run_id, "reward/mean")]
    assert history == [(step, step / 10) for step in range(1, 7)]
    assert [m.value for m in client.get_metric_history(run_id, "eval/best_4")] == [1.0] * 6
    tables = [f"samples/step-00000{step}.json" for step in (1, 4)]
    assert [a.path for a in client.list_artifacts(run_id, "samples")] == tables
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": table, "type": "table"} for table in tables
    ]
    path = client.download_artifacts(run_id, tables[0], str(tmp_path))
    table = json.loads(Path(path).read_text())
    assert table["columns"] == ["step", "prompt", "response", "reward", "note", "images", "image 1"]
    assert table["data"][1][:6] == [1, "2+2=", "5", 0.0, "", None]
    assert table["data"][2][5].splitlines()[1].endswith("/b.png · not shown: gone")
    images = []
    for row in table["data"]:
        kept = client.download_artifacts(run_id, row[6]["filepath"], str(tmp_path))
        images.append(np.asarray(pytest.importorskip("PIL.Image").open(kept).convert("RGB")).tolist())
    assert images == [[[[255] * 3]]] * 2 + [[[[220, 40, 60]] * 3] * 2]  # a white point: there is none


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_swanlab_without_a_network(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("swanlab")
    with RunFolder(tmp_path / "run") as folder:
        log_run(folder, "swanlab", {"mode": mode, "tags": ["t1"]}, samples=with_images())
    files = list((tmp_path / "run" / "trackers" / "swanlab").glob("run-*/run-*.swanlab"))
    if mode == "disabled":
        assert files == []
        return
    assert len(files) == 1
    content = files[0].read_bytes()
    assert b"reward/mean" in content
    assert b"eval/best@4" in content
    (kept,) = files[0].parent.glob("media/**/*.json")
    table = json.loads(kept.read_text())
    assert [column["field"] for column in table["colDefs"]] == ["step", *vars(SAMPLES[0])]
    assert table["rowData"][0] == {"step": 1, **vars(SAMPLES[0]), "images": None}
    assert table["rowData"][2]["images"].splitlines()[0] == "image 1 · 4 tokens · message 0 · /a.png"
    (picture,) = files[0].parent.glob("media/**/*.png")
    image = np.asarray(pytest.importorskip("PIL.Image").open(picture).convert("RGB"))
    assert image.tolist() == [[[220, 40, 60]] * 3] * 2


def trackio_rows(folder: Path) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Run id, run, step and metrics of what trackio keeps of the project, in the order of logging."""
    with sqlite3.connect(folder / "rondo-test.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    return [(run_id, name, step, json.loads(metrics)) for run_id, name, step, metrics in rows]


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """trackio's own folder, which it looks for when it is imported, where nobody may look up a host; with a
    token of Hugging Face, by which trackio would ask who its owner is."""
    if find_spec("trackio") is None:
        pytest.skip("could not import 'trackio'")
    looked_up: list[object] = []

    def no_network(host: object, *rest: object, **more: object) -> None:
        looked_up.append(host)
        raise OSError("no network in this test")

    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "run" / "of-trackio"))
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield tmp_path / "run" / "of-trackio"
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        del sys.modules[name]
    assert looked_up == []


def test_trackio_on_this_machine(
    tmp_path: Path, trackio_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder(tmp_path / "run") as folder:
        log_run(folder, "trackio", {"group": "g"}, samples=with_images())
        folder.attempt += 1
        log_run(folder, "trackio", {}, resume_step=2)
    assert capsys.readouterr().out == ""
    rows = trackio_rows(trackio_folder)
    assert {name for _, name, _, _ in rows} == {"run-a"}
    assert len({run_id for run_id, _, _, _ in rows}) == 1  # a resumed run goes on
    scalars = [(step, m["reward/mean"]) for _, _, step, m in rows if "reward/mean" in m]
    assert scalars == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 0.3), (4, 0.4), (5, 0.5)]
    tables = [m["samples"] for _, _, _, m in rows if "samples" in m]
    assert [table["_type"] for table in tables] == ["trackio.table"] * 2
    first, _, third = tables[0]["_value"]
    assert (first["step"], first["prompt"], first["response"]) == (1, "1+1=", "**2** <b>")
    assert (first["reward"], first["note"], first["image 1"]) == (1.0, "stop", None)
    assert third["images"].splitlines()[1] == "image 2 · 5 tokens · message 1 · /b.png · not shown: gone"
    kept = trackio_folder / "media" / third["image 1"]["file_path"]
    image = np.asarray(pytest.importorskip("PIL.Image").open(kept).convert("RGB"))
    assert image.tolist() == [[[220, 40, 60]] * 3] * 2


def test_trackio_leaves_a_run_of_the_user_alone(tmp_path: Path, trackio_folder: Path) -> None:
    import trackio

    with _without_hub():
        trackio.init(project="rondo-test", name="theirs", embed=False)
    with RunFolder(tmp_path / "run") as folder:
        log_run(folder, "trackio", {})
    trackio.log({"x": 1.0})
    trackio.finish()
    rows = [(name, m) for _, name, _, m in trackio_rows(trackio_folder) if "x" in m]
    assert rows == [("theirs", {"x": 1.0})]


def test_prometheus_has_the_newest_number_of_each_metric(tmp_path: Path) -> None:
    collected, warnings = tmp_path / "collected", []
    collected.mkdir()
    config = FunctionConfig("prometheus", {"directory": str(collected)})
    file = collected / "rondo-run_a__1_.prom"

    def now() -> dict[str, float]:
        """All of it, by name; of states, the one that it is in."""
        about = frozenset({"run": r"run a \"1\"", "algorithm": "grpo"}.items())
        found = samples_of(file.read_text())
        states = [(dict(key)["status"], x) for (name, key), x in found.items() if name == "rondo_run_status"]
        assert sorted(states, key=lambda x: -x[1])[1:] == [pair for pair in states if not pair[1]]
        plain = {name: x for (name, key), x in found.items() if key == about}
        return plain | {state: x for state, x in states if x}

    with RunFolder(tmp_path / "run") as folder:
        context = TrackerContext(folder, "p", 'run a "1"', CONFIG, warnings.append, "grpo")
        (tracker,) = make_trackers([config], context)
        assert tracker.where == str(file)
        assert now() == {"running": 1}
        before = time.time()
        numbers = {"reward/mean": 0.25, "timing/step_s": 2.0, "perf/generated_tokens_per_s": 7.5}
        tracker.log(1, {**numbers, "eval/best@4": 0.5, "eval/best_4": 9.0, "perf/device_bytes_in_use": 2e9})
        tracker.log(2, {"reward/mean": -1e-30, "eval/best_4": 9.0, "run/status": 9.0})
        tracker.log_samples(2, with_images())
        found = now()
        assert before <= found.pop("rondo_step_timestamp_seconds") <= time.time()
        assert found == {
            "running": 1,
            "rondo_step": 2,
            "rondo_reward_mean": -1e-30,
            "rondo_timing_step_seconds": 2.0,
            "rondo_perf_generated_tokens_per_second": 7.5,
            "rondo_eval_best_4": 0.5,
            "rondo_perf_device_bytes_in_use": 2e9,
        }
        tracker.finish("failed")
    assert "failed" in now()
    assert [path.name for path in collected.iterdir()] == [file.name]  # written beside, and renamed
    assert file.stat().st_mode & 0o444 == 0o444  # the collector is another user
    assert warnings == [
        "prometheus: eval/best_4 is left out: it would be rondo_eval_best_4, as eval/best@4 is",
        "prometheus: run/status is left out: it would be rondo_run_status, as the state is",
    ]


def test_a_folder_that_no_collector_reads(tmp_path: Path) -> None:
    wrong = FunctionConfig("prometheus", {"directory": str(tmp_path / "colected")})
    with RunFolder(tmp_path / "run") as folder, pytest.raises(ConfigError) as caught:
        make_trackers([wrong], TrackerContext(folder, "p", "r", {}, pytest.fail))
    assert str(caught.value).startswith(
        f"tracking.trackers: prometheus: there is no folder {tmp_path}/colected. Name the one that"
    )


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_a_missing_package_names_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with RunFolder(tmp_path / "run") as folder, pytest.raises(ConfigError) as caught:
        make_trackers([FunctionConfig(name)], TrackerContext(folder, "p", "r", {}, pytest.fail))
    assert f'pip install "rondo-rl[{name}]"' in str(caught.value)


def test_names_and_options_are_checked_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_trackers(TrackingConfig((FunctionConfig("wandb", {"mode": "offline"}),)))
    with pytest.raises(ConfigError, match=full_text("tracking.trackers.1: Wandb has no option")):
        check_trackers(
            TrackingConfig((FunctionConfig("tensorboard"), FunctionConfig("wandb", {"entitty": "x"})))
        )
    with pytest.raises(ConfigError, match="wandb"):
        check_trackers(TrackingConfig((FunctionConfig("wandbb"),)))


def test_a_library_that_is_missing_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.setattr("rondo.tracking.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=full_text('rondo-rl[mlflow]", or leave it out')):
        check_trackers(TrackingConfig((FunctionConfig("mlflow"),)))


def doubled(metrics: Mapping[str, float], *, only: str = "reward/mean") -> dict[str, object]:
    return {"mine/" + name: 2 * value for name, value in metrics.items() if name == only}


def wrong(metrics: Mapping[str, float]) -> dict[str, object]:
    return {"mine": "high"}


def test_metrics_by_other_names() -> None:
    """A function of one's own gets all numbers of a step, and trackers what it returns."""
    metrics = {"reward/mean": 0.5, "actor/loss": 1.5}
    assert metric_names(None)(metrics) == metrics
    assert metric_names(FunctionConfig(f"{__name__}.doubled"))(metrics) == {"mine/reward/mean": 1.0}
    options = {"only": "actor/loss"}
    assert metric_names(FunctionConfig(f"{__name__}.doubled", options))(metrics) == {"mine/actor/loss": 3.0}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("verll", {}, "unknown name 'verll'; did you mean 'verl'? Built in: verl."),
        (f"{__name__}.doubled", {"onli": "x"}, "tracking.metric_names: doubled has no option 'onli'"),
    ],
)
def test_names_of_metrics_are_checked_before_the_start(name: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trackers(TrackingConfig(metric_names=FunctionConfig(name, options)))
    assert str(caught.value).startswith(said)
    assert str(caught.value.key).startswith("tracking.metric_names")


def test_a_function_of_names_that_returns_no_numbers() -> None:
    with pytest.raises(TrainError) as caught:
        metric_names(FunctionConfig(f"{__name__}.wrong"))({"reward/mean": 0.5})
    returned = f"tracking.metric_names: {__name__}.wrong returned 'mine': 'high'"
    assert str(caught.value) == f"{returned}; it is to return a finite number for each name"
