"""Who may ask: every server of rondo's × every kind of request, raw, over real sockets."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from rondo.cli import main as cli
from rondo.core.errors import ConfigError
from rondo.rollout import NativeEngine
from rondo.serving import Endpoint, Sessions
from rondo.serving.http import HttpServer
from rondo.system.access import Access, access_of, add_access, check_keys
from rondo_sandbox import open_sandbox
from rondo_sandbox.server import SandboxServer
from rondo_search import index_of
from rondo_search.server import RetrieverServer
from tests.messages import full_text
from tests.serving import conftest
from tests.serving.conftest import CONTEXT, MODEL, TOKENIZER

engine = conftest.engine  # a fixture
KEYS = ("first-key", "second")
ACCESS = Access(KEYS, ("sandbox.internal",))


@asynccontextmanager
async def serving(generate: object, folder: Path) -> AsyncIterator[str]:
    """`rondo serve`. Whoever has its key may call it by any name, and send JSON under any."""
    sessions = Sessions(8)
    server = HttpServer(
        Endpoint(TOKENIZER, model=MODEL, max_context=CONTEXT, sessions=sessions, generate=generate),  # type: ignore[arg-type]
        *KEYS,
    )
    url = await server.start()
    try:
        yield url.removesuffix("/v1")
    finally:
        await server.close()


@asynccontextmanager
async def running(generate: object, folder: Path, access: Access = ACCESS) -> AsyncIterator[str]:
    async with await open_sandbox("none") as sandbox:
        server = SandboxServer(sandbox, access)
        yield await server.start("127.0.0.1", 0)
        await server.close()


@asynccontextmanager
async def searching(generate: object, folder: Path, access: Access = ACCESS) -> AsyncIterator[str]:
    (folder / "a.jsonl").write_text('{"id": "1", "contents": "\\"a\\"\\nstars"}\n')
    server = RetrieverServer(index_of(str(folder / "a.jsonl")), "127.0.0.1", 0, access)
    yield server.url
    await asyncio.to_thread(server.close)


Server = Callable[..., AbstractAsyncContextManager[str]]
# Server -> what it is asked, and what it answers without a key.
ASKED: dict[Server, tuple[str, object, str]] = {
    serving: ("/v1/completions", {"model": MODEL, "prompt": [5], "max_tokens": 1}, "/health"),
    running: ("/run_code", {"code": "print(1)", "language": "python"}, "/v1/ping"),
    searching: ("/retrieve", {"queries": ["stars"]}, "/health"),
}


@contextmanager
def started(opened: AbstractAsyncContextManager[str]) -> Iterator[int]:
    """Its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        url = asyncio.run_coroutine_threadsafe(opened.__aenter__(), loop).result(60)
        try:
            yield int(url.rpartition(":")[2])
        finally:
            asyncio.run_coroutine_threadsafe(opened.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def asked(port: int, path: str, body: bytes, *headers: bytes, method: str = "POST") -> int:
    """The status of a request that has these headers and no others."""
    lines = [f"{method} {path} HTTP/1.1".encode(), *headers, b"Content-Length: %d" % len(body)]
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return int(answer.split()[1])


HERE, JSON = b"Host: 127.0.0.1", b"Content-Type: application/json"
GOOD = b"Authorization: Bearer first-key"
# Headers -> the status from `rondo serve`, and from the other two.
REQUESTS: dict[tuple[bytes, ...], tuple[int, int]] = {
    (HERE, JSON): (401, 401),
    (HERE, JSON, b"Authorization: Bearer another"): (401, 401),
    (HERE, JSON, b"Authorization: Bearer first-ke"): (401, 401),
    (HERE, JSON, b"Authorization: Bearer first-keyy"): (401, 401),
    (HERE, JSON, b"Authorization: Bearer "): (401, 401),
    (HERE, JSON, b"Authorization: first-key"): (401, 401),
    (HERE, JSON, b"Authorization: Basic first-key"): (401, 401),
    (HERE, JSON, b"Authorization: Bearer first-key\xff"): (401, 401),
    (HERE, JSON, b"Authorization: Bearer t\xffk"): (401, 401),
    (HERE, JSON, b"Authorization: Bearer \xed\xa0\x80"): (401, 401),
    (HERE, JSON, GOOD): (200, 200),
    (HERE, JSON, b"Authorization: bearer first-key:mine"): (200, 200),
    (HERE, JSON, b"Authorization: Bearer second"): (200, 200),
    (HERE, b"Content-Type: Application/JSON; charset=utf-8", GOOD): (200, 200),
    (HERE, GOOD): (200, 415),
    (HERE, b"Content-Type: text/plain", GOOD): (200, 415),
    (HERE, b"Content-Type: text/plain; application/json", GOOD): (200, 415),
    (HERE, b"Content-Type: \xff", GOOD): (200, 415),
    (b"Host: evil.example", JSON, GOOD): (200, 403),
    (b"Host: evil.example:80", JSON, GOOD): (200, 403),
    (b"Host: 127.0.0.1.evil.example", JSON, GOOD): (200, 403),
    (b"Host: t\xffk", JSON, GOOD): (200, 403),
    (b"Host: [::1", JSON, GOOD): (200, 403),
    (b"Host: localhost:8080", JSON, GOOD): (200, 200),
    (b"Host: [::1]:8080", JSON, GOOD): (200, 200),
    (b"Host: 10.0.0.7:8080", JSON, GOOD): (200, 200),
    (b"Host: Sandbox.internal:8080", JSON, GOOD): (200, 200),
    (b"Host: " + socket.gethostname().encode(), JSON, GOOD): (200, 200),
}


@pytest.mark.parametrize("server", ASKED)
def test_every_server_and_every_request(
    server: Server,
    engine: NativeEngine,
    tmp_path: Path,
) -> None:
    path, body, free = ASKED[server]
    data = json.dumps(body).encode()
    with started(server(engine.generate, tmp_path)) as port:
        got = {headers: asked(port, path, data, *headers) for headers in REQUESTS}
        assert asked(port, free, b"", b"Host: any", method="GET") == 200
    assert got == {headers: both[server is not serving] for headers, both in REQUESTS.items()}


@pytest.mark.parametrize("server", [running, searching])
def test_without_a_key_a_page_in_a_browser_is_refused_all_the_same(server: Server, tmp_path: Path) -> None:
    path, body, _ = ASKED[server]
    data = json.dumps(body).encode()
    with started(server(None, tmp_path, Access((), ()))) as port:
        assert asked(port, path, data, HERE, JSON) == 200
        assert asked(port, path, data, HERE, JSON, b"Authorization: Bearer \xff") == 200
        assert asked(port, path, data, b"Host: evil.example", JSON) == 403
        assert (
            asked(port, path, data, HERE, b"Content-Type: text/plain", b"Origin: http://evil.example") == 415
        )


# JSON texts for every field of a body: none is an error of ours.
ODD = (
    "null",
    "-1",
    "1e999",
    "NaN",
    '"\\ud800"',
    '"\\u0000"',
    "[]",
    "{}",
    '{"\\ud800": ""}',
    '["\\ud800"]',
    "[" * 900,
)
ODD_FIELDS: dict[Server, dict[str, tuple[str, dict[str, object]]]] = {
    running: {
        **{
            name: ("/run_code", {"code": "", "language": "python"})
            for name in (
                "code",
                "language",
                "stdin",
                "files",
                "run_timeout",
                "memory_limit_MB",
                "fetch_files",
            )
        },
        **{
            name: ("/run_jupyter", {"cells": ["1"]})
            for name in ("cells", "cell_timeout", "total_timeout", "kernel", "files")
        },
    },
    searching: {name: ("/retrieve", {"queries": ["a"]}) for name in ("queries", "topk", "return_scores")},
}


@pytest.mark.parametrize("server", ODD_FIELDS)
def test_odd_values_are_no_errors_of_ours(server: Server, tmp_path: Path) -> None:
    """Those of `rondo serve`: tests/serving/test_hostile.py."""
    with started(server(None, tmp_path)) as port:
        got = {}
        for name, (path, whole) in ODD_FIELDS[server].items():
            for text in ODD:
                body = json.dumps({**whole, name: "--here--"}).replace('"--here--"', text)
                got[name, text] = asked(port, path, body.encode(), HERE, JSON, GOOD)
        for data in (b"\xff", b"", b"{", b'{"code": "\xed\xa0\x80", "language": "python"}'):
            got["", repr(data)] = asked(port, path, data, HERE, JSON, GOOD)
    assert {each: status for each, status in got.items() if status not in (200, 422)} == {}


def test_what_a_key_may_be() -> None:
    check_keys(("a", "b:c", "bc"), "it")
    for keys in (("",), ("two words",), ("ä",), ("a", ""), ("a", "a"), ("a", "a:b"), ("a:b:c", "a:b")):
        with pytest.raises(ConfigError, match=r"^it"):
            check_keys(keys, "it")


@pytest.mark.parametrize("command", [("sandbox", "serve"), ("search", "serve", "a.jsonl")])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0 can be reached from other machines: choose an API key (--token-file",
        ),
        (["--host", "0.0.0.0", "--no-key"], "--no-key --host 0.0.0.0: other machines reach it"),
        (["--no-key", "--token", "a"], "--no-key and a key are both given"),
        (["--token", "two words"], "--token must be printable ASCII"),
        (["--token", "a", "--token-file", "b"], "are both given"),
    ],
)
def test_what_the_commands_refuse(
    command: tuple[str, ...],
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "contents": "stars"}\n')
    monkeypatch.chdir(tmp_path)
    for variable in ("RONDO_SANDBOX_TOKEN", "RONDO_SEARCH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    assert cli.main([*command, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_key_is_made_and_said_where_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RONDO_SEARCH_TOKEN", raising=False)
    parser = argparse.ArgumentParser()
    add_access(parser, "RONDO_SEARCH_TOKEN")

    def access(*arguments: str) -> tuple[Access, str]:
        return access_of(parser.parse_args(arguments), "RONDO_SEARCH_TOKEN")

    (made, said), (another, _) = access(), access()
    (key,) = made.keys
    assert said == f"RONDO_SEARCH_TOKEN={key}"
    assert len(key) == 32
    assert another.keys != (key,)
    assert access("--no-key", "--allow-host", "a") == (Access((), ("127.0.0.1", "a")), "")
    assert access("--token", "a", "--host", "0.0.0.0") == (Access(("a",), ("0.0.0.0",)), "")
    monkeypatch.setenv("RONDO_SEARCH_TOKEN", "b")
    assert access() == (Access(("b",), ("127.0.0.1",)), "")
    monkeypatch.setenv("RONDO_SEARCH_TOKEN", "")
    with pytest.raises(ConfigError, match=full_text("RONDO_SEARCH_TOKEN must be printable")):
        access()
