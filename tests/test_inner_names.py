"""Names that somebody else gave to files: each door takes those that are paths below a folder, no others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from rondo.checkpoint.checked import read_manifest, write_checked, write_manifest
from rondo.core.errors import CheckpointError, DataError, RondoError, StorageError
from rondo.models.files import check_weights
from rondo.system import hub
from rondo.system.hub import local_folder
from rondo.system.urls import Far, check_inner
from rondo_sandbox import open_sandbox
from rondo_sandbox.server import files_of_request
from tests.messages import full_text

GOOD = ("a.json", "actor/rank-0.bin", "..a", "a..b/c", "ä/日本", "a" * 255, "with space.json")
BAD = {
    "../climbed.json": "leads out of its folder",
    "a/../../climbed.json": "leads out of its folder",
    "/etc/climbed.json": "leads out of its folder",
    "a//climbed.json": "leads out of its folder",
    "./climbed.json": "leads out of its folder",
    "..": "leads out of its folder",
    "climbed\x1b]0;title.json": "has control characters",
    "climbed\n.json": "has control characters",
    "climbed\x9b2J.json": "has control characters",
    "climbed\u2028.json": "has control characters",
    "a" * 256: "is too long for a file",
    "/".join(["a" * 200] * 6): "is too long for a file",
}


def test_which_names_are_paths_below_a_folder() -> None:
    for name in GOOD:
        check_inner(name)
    for name, words in {**BAD, "\ud800": "has control characters"}.items():
        with pytest.raises(ValueError, match=words):
            check_inner(name)


class Listing(BaseHTTPRequestHandler):
    """A page with one link, and a text behind whatever is asked for."""

    def __init__(self, name: str, *rest: object) -> None:
        self._name = name
        super().__init__(*rest)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        page = f'<a href="config.json">config.json</a> <a href="{self._name}">{self._name}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None: ...


def test_a_listing_of_a_server_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Listing, "../../../../climbed.json"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(StorageError, match=full_text("leads out of its folder: nothing")):
            local_folder(f"http://127.0.0.1:{server.server_port}/m/")
    finally:
        server.shutdown()
        server.server_close()
    assert not list(tmp_path.rglob("climbed*"))


def of_memory(name: str, folder: Path) -> None:
    """An object store's keys are any text."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    try:
        for key in ("config.json", name):
            with files.open("/m/a", "wb") as file:
                file.write(b"{}")
            files.store[f"/m/{key}"] = files.store.pop("/m/a")
        hub._copy.cache_clear()
        local_folder("memory://m", weights=False)
    finally:
        files.store.clear()


def of_a_manifest(name: str, folder: Path) -> None:
    """With the checksum that it needs."""
    write_manifest(folder, {name: write_checked(folder / "a", b"1")})
    read_manifest(folder)


def of_an_index(name: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    check_weights(str(folder))


def of_a_program(name: str, folder: Path) -> None:
    """Files that `rondo_sandbox` writes for a program."""

    async def run() -> None:
        async with await open_sandbox("none") as sandbox:
            await sandbox.run("pass", files={name: b"1"})

    asyncio.run(run())


def of_a_request(name: str, folder: Path) -> None:
    """Of `rondo sandbox serve`, which answers it as 422."""
    files_of_request({name: ""})


DOORS: dict[Callable[[str, Path], None], type[ValueError | RondoError]] = {
    of_a_program: ValueError,
    of_a_request: ValueError,
    of_memory: StorageError,
    of_a_manifest: CheckpointError,
    of_an_index: DataError,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BAD)
def test_no_door_takes_a_name_that_leads_out(
    door: Callable[[str, Path], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DOORS[door], match=BAD[name]):
        door(name, tmp_path / "folder")
    assert not list(tmp_path.rglob("climbed*"))


def test_a_listing_of_this_machine_is_taken(tmp_path: Path) -> None:
    for name in GOOD[:3]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(Far(f"file://{tmp_path}").files()) == sorted(GOOD[:3])
