"""Data files at a URL: the same rows as of a file here, and errors that name the URL."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rondo.config.schema import FileSourceConfig
from rondo.core.errors import ConfigError, DataError
from rondo.data.sources import check_source, open_source

ROWS = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(5)]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    pq.write_table(pa.Table.from_pylist(ROWS), path / "rows.parquet")
    (path / "rows.jsonl").write_text("".join(f'{{"prompt": "{r["prompt"]}"}}\n' for r in ROWS))
    (path / "broken.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n')
    return path


@pytest.fixture(scope="module", params=["http", "memory", "file"])
def base(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Where the files of `folder` are: behind a real server, in fsspec's own memory, or here."""
    if request.param == "file":
        yield f"file://{folder}"
    elif request.param == "memory":
        fsspec.filesystem("memory").put(f"{folder}/", "/shelf/", recursive=True)
        yield "memory://shelf"
    else:
        pytest.importorskip("aiohttp")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("size", [None, 3])
def test_the_same_rows_as_of_a_file_here(base: str, folder: Path, kind: str, size: int | None) -> None:
    here = open_source(FileSourceConfig(type=kind, path=str(folder / f"rows.{kind}"), size=size))
    there = FileSourceConfig(type=kind, path=f"{base}/rows.{kind}", size=size)
    check_source(there)
    found = open_source(there)
    assert list(found.rows) == list(here.rows)
    assert found.name == here.name == "rows"
    assert found.where(1) == here.where(1).replace(str(folder), base)


def test_a_broken_line_is_told_with_its_url(base: str) -> None:
    with pytest.raises(DataError, match=rf"{base}/broken\.jsonl, line 3: broken JSON"):
        open_source(FileSourceConfig(type="jsonl", path=f"{base}/broken.jsonl"))


def test_a_file_that_is_not_there(base: str) -> None:
    for find in (check_source, open_source):
        with pytest.raises(ConfigError, match=rf"'nothing': {base}/nothing\.jsonl: there is no such file"):
            find(FileSourceConfig(type="jsonl", path=f"{base}/nothing.jsonl"))


def test_what_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("fsspec.registry")  # the package has a mapping of that name
    monkeypatch.setitem(registry.known_implementations, "s3", {"class": "no_such_package.S3", "err": "x"})
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(registry, "registry", {})
    for url, said in (
        (
            "s3://bucket/rows.jsonl",
            r"s3:// needs a package that is not installed: pip install 'rondo-rl\[s3\]'",
        ),
        (
            "nowhere://bucket/rows.jsonl",
            r"nowhere://bucket/rows\.jsonl cannot be used: fsspec knows no nowhere://",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            check_source(FileSourceConfig(type="jsonl", path=url))
