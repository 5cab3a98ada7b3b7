"""Places at a URL for tests: a real S3 server (moto, where it and s3fs are installed), files of this machine,
and a shelf, whose files appear when they are closed, as those of object stores do, and which fails when it is
told to.

Processes that a test starts have the shelf, too: it is installed beside them as fsspec's own plugins are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from tests.installed import needs

FAULT = (
    "RONDO_TEST_SHELF"  # in the environment: a file that says what is to go wrong ("hang actor/rank-0.bin")
)
PLUGIN = Path(__file__).parent / "far_plugin"


class Shelf(LocalFileSystem):
    """Files below a folder of this machine: shelf:///tmp/x."""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("shelf://")))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        return (
            super()._open(path, mode, **kwargs) if "r" in mode else _Shelved(self, path, mode, block_size=5)
        )

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        _go_wrong("keep", str(path))
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def get_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        _go_wrong("get", str(path1))
        super().get_file(path1, path2, **kwargs)
        if _is_to("shorten", str(path1)):
            os.truncate(path2, os.path.getsize(path2) - 1)


class _Shelved(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self._part = tempfile.NamedTemporaryFile(delete=False)

    def _upload_chunk(self, final: bool = False) -> bool:
        _go_wrong("hang", self.path)
        _go_wrong("fail", self.path)
        self._part.write(self.buffer.getvalue())
        if final:
            if _is_to("cut", self.path):
                self._part.truncate(self._part.tell() - 1)
            self._part.close()
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            shutil.move(self._part.name, self.path)
        return True

    def discard(self) -> None:
        if hasattr(self, "_part"):
            os.unlink(self._part.name)


def _is_to(what: str, path: str) -> bool:
    file = Path(os.environ.get(FAULT, "/nowhere"))
    said, _, pattern = file.read_text().partition(" ") if file.exists() else ("", "", "")
    return said == what and pattern in path


def _go_wrong(what: str, path: str) -> None:
    if _is_to(what, path):
        if what == "hang":
            Path(os.environ[FAULT]).with_suffix(".hangs").touch()
            time.sleep(3600)
        raise OSError(f"the shelf would not {what} it")


class Fault:
    """What goes wrong on the shelf from now on."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def set(self, what: str) -> None:
        """what: `hang`, `fail`, `cut` (of what is written), `keep` (of what is removed) or `shorten` (of what
        is fetched), and a part of the path."""
        self._file.write_text(what)

    def clear(self) -> None:
        self._file.unlink()

    @property
    def hangs(self) -> bool:
        return self._file.with_suffix(".hangs").exists()


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a shelf."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    monkeypatch.setenv(FAULT, str(tmp_path / "fault"))
    return f"shelf://{tmp_path / 'shelf'}"


@pytest.fixture
def fault(tmp_path: Path) -> Fault:
    return Fault(tmp_path / "fault")


@contextmanager
def s3(environment: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a real server in a thread of this process, which others reach, too."""
    needs("s3fs", "moto", "flask_cors")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()  # servers share buckets
    environment.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.setenv(name, "test")
    environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir("bucket")
    try:
        yield "s3://bucket"
    finally:
        fsspec.filesystem("s3").clear_instance_cache()
        server.stop()


@pytest.fixture(params=["file", "shelf", "s3"])
def far(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty folder."""
    if request.param == "s3":
        with s3(monkeypatch) as url:
            yield f"{url}/x"
    elif request.param == "shelf":
        yield request.getfixturevalue("shelf")
    else:
        yield f"file://{tmp_path / 'far'}"
