"""A run whose recipe has secrets of every kind: none of them is in what it leaves, says, sends or starts."""

from __future__ import annotations

import base64
import json
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from rondo.core.masking import digest
from tests.trainers.conftest import RECIPE, cli, inline
from tests.trainers.planted import MARK

HERE = "tests/trainers/planted.py"
URL = f"https://{MARK}user:{MARK}word@h/x?k={MARK}query"
PRIVATE = ("config.yaml", "journal.jsonl", "settings.json", "compatibility.json")


@pytest.fixture
def rows() -> Iterator[str]:
    """The URL of rows behind a real server, which wants what is in it."""
    pytest.importorskip("aiohttp")
    data = "".join(
        json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(16)
    ).encode()
    wanted = "Basic " + base64.b64encode(f"{MARK}reader:{MARK}basic".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.headers["Authorization"] == wanted and self.path == f"/rows.jsonl?sig={MARK}url"
            self.send_response(200 if right else 401)
            self.send_header("Content-Length", str(len(data) if right else 0))
            self.end_headers()
            self.wfile.write(data if right else b"")

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{MARK}reader:{MARK}basic@127.0.0.1:{server.server_port}/rows.jsonl?sig={MARK}url"
    server.shutdown()
    server.server_close()


def everything(path: Path) -> str:
    """The text of a file; of Parquet, its rows."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return f"{table.schema.metadata} {table.to_pylist()}"
    return path.read_bytes().decode("latin-1")


@pytest.mark.slow
def test_nothing_of_a_secret_is_in_what_a_run_leaves(
    tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", f"{MARK}env")
    monkeypatch.setenv("RONDO_CACHE", "")
    run, seen, far = tmp_path / "run", tmp_path / "seen.json", tmp_path / "checkpoints"
    function = {
        "name": f"{HERE}:judge",
        "api_key": f"{MARK}option",
        "judge_token": {"env": "PLANTED_TOKEN"},
        "url": URL,
        "seen": str(seen),
        "deep": [{"password": f"{MARK}deep"}],
    }
    own = {"name": f"{HERE}:Tracks", "token": f"{MARK}tracker", "url": URL}
    recipe = {
        **RECIPE,
        "data": {**RECIPE["data"], "train": [{"type": "jsonl", "path": rows}]},
        "reward": {"functions": [function], "isolation": "process"},
        "cluster": {"threads": 1, "backend": "process", "env": {"OWN_API_KEY": f"{MARK}variable"}},
        "trainer": {"total_steps": 1, "run_dir": str(run), "evaluation": {"before": False, "after": False}},
        "tracking": {"console": "plain", "trackers": ["tensorboard", own], "plot": False},
        "checkpoint": {"every": 1, "path": str(far), "export": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    done = cli("train", str(path))

    told = json.loads(seen.read_text())
    assert told == {"given": [f"{MARK}option", f"{MARK}env", URL], "processes": []}
    assert [line for line in (done.stdout + done.stderr).splitlines() if MARK in line] == []
    files = [file for folder in (run, far) for file in folder.rglob("*") if file.is_file()]
    names = {file.name for file in files}
    assert {
        *PRIVATE,
        "controller.log",
        "host-0.log",
        "config.json",
        "step-000000.json",
        "step-00000001.jsonl",
        "metrics.jsonl",
    } <= names
    assert any("tfevents" in name for name in names)
    assert [str(file) for file in files if MARK in everything(file) or MARK in str(file)] == []
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in files if file.name in PRIVATE} == (
        dict.fromkeys(PRIVATE, 0o600)
    )
    assert stat.S_IMODE((run / "trackers").stat().st_mode) == 0o700
    # It is said at the start, once for each, where it stands.
    notes = [
        line for line in done.stderr.splitlines() if line.startswith("note: ") and "keeps a digest" in line
    ]
    assert sorted(note.split(": ")[2].split()[0] for note in notes) == [
        "cluster.env.OWN_API_KEY",
        "data.train.0.path",
        "reward.functions.0.api_key",
        "reward.functions.0.deep.0.password",
        "reward.functions.0.url",
        "tracking.trackers.1.token",
        "tracking.trackers.1.url",
    ]

    # Another secret is another setting; what was masked is not taken for one.
    other = inline("train", str(path), "reward.functions.0.api_key=sk-2", check=False)
    assert other.returncode == 2
    old, new = digest(f"{MARK}option"), digest("sk-2")
    assert f'reward.functions.0.api_key: "{old}" before, "{new}" now' in other.stderr
    again = inline("train", str(run / "config.yaml"), f"trainer.run_dir={tmp_path / 'again'}", check=False)
    assert again.returncode == 2
    assert f"reward.functions.0.api_key is {old}, which stands for a secret" in again.stderr
    assert "reward.functions.0.judge_token" not in again.stderr
    shown = inline("config", "show", str(path))
    assert MARK not in shown.stdout + shown.stderr
    assert "judge_token.env: PLANTED_TOKEN" in shown.stdout
