"""The wire: limits of time, size and number, health and metrics, and a log without a client's words."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from rondo import __version__
from rondo.core.types import Completion, GenerateRequest
from rondo.rollout import NativeEngine
from rondo.serving.http import ClientLimits
from tests.prometheus import samples_of
from tests.serving.conftest import CONTEXT, MODEL, TOKEN, post, served

CHAT, TEXT = "/chat/completions", "/completions"
ASK = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3, "seed": 1}
SECRET = "what nobody else may read"
AUTHORIZED = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n"
POST = f"POST /v1/completions HTTP/1.1\r\n{AUTHORIZED}"


async def refuses(request: GenerateRequest, on_tokens: Any = None) -> Completion:
    raise AssertionError(SECRET)


@asynccontextmanager
async def connection(base_url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = urllib.parse.urlsplit(base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def said(base_url: str, sent: str | bytes) -> bytes:
    """All that comes until the server closes the connection."""
    async with connection(base_url) as (reader, writer):
        writer.write(sent.encode() if isinstance(sent, str) else sent)
        return await asyncio.wait_for(reader.read(), 60)


# ---- time ----


@pytest.mark.parametrize("sent", ["", "POST /v1/chat", "GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_head_that_does_not_come_ends_the_connection(sent: str) -> None:
    async def main() -> bytes:
        async with served(refuses, limits=ClientLimits(idle_seconds=0.2)) as (_, base_url):
            return await said(base_url, sent)

    assert asyncio.run(main()) == b""


def test_a_connection_that_is_not_used_any_more_is_closed() -> None:
    async def main() -> bytes:
        async with served(refuses, limits=ClientLimits(idle_seconds=0.2)) as (_, base_url):
            return await said(base_url, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")

    assert asyncio.run(main()).endswith(b'{"status": "ok"}')


@pytest.mark.parametrize(
    "body", ["Content-Length: 9\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
def test_a_body_that_does_not_come_is_a_408(body: str) -> None:
    async def main() -> bytes:
        async with served(refuses, limits=ClientLimits(body_seconds=0.2)) as (_, base_url):
            return await said(base_url, POST + body)

    head, _, answer = asyncio.run(main()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer)["error"]["code"] == "request_timeout"


def test_connections_beyond_the_bound_are_told_so() -> None:
    """And one that closes makes room."""

    async def main() -> list[bytes]:
        health = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        async with served(refuses, limits=ClientLimits(connections=2)) as (_, base_url):
            async with connection(base_url), connection(base_url) as (reader, writer):
                full = await said(base_url, b"")
                writer.write(health)
                held = await reader.read()
            while not (after := await said(base_url, health)).startswith(b"HTTP/1.1 200"):
                assert after.startswith(b"HTTP/1.1 503 ")
        return [full, held]

    full, held = asyncio.run(main())
    assert full.startswith(b"HTTP/1.1 503 ")
    assert held.startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_its_answer_loses_its_place() -> None:
    """12 MB of a stream are more than sockets hold."""

    async def main() -> None:
        left = asyncio.Event()

        async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
            parts = (np.full(500, 5, np.int32), np.zeros(500, np.float32), np.zeros(500, np.int32))
            new = Completion(request.request_id, request.token_ids, *parts, finish_reason="length")
            for _ in range(800):
                on_tokens(new)
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
            raise AssertionError

        async with served(generate, limits=ClientLimits(reading_seconds=0.5)) as (endpoint, base_url):
            body = json.dumps({**ASK, "stream": True})
            async with connection(base_url) as (_, writer):
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(f"{POST}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                await left.wait()
                while endpoint.pending:
                    await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 120))


# ---- bodies ----


@pytest.mark.parametrize(
    ("head", "body", "status", "code"),
    [
        ("Content-Encoding: gzip", b"no gzip", 415, "unsupported_encoding"),
        ("Content-Encoding: gzip", gzip.compress(b"0" * (1 << 26)), 415, "unsupported_encoding"),
        ("Content-Encoding: br", b"{}", 415, "unsupported_encoding"),
        ("Content-Type: multipart/form-data; boundary=a", b"--a\r\n\r\n1\r\n--a--", 400, "invalid_json"),
        ("Content-Type: application/json; charset=utf-16", '{"a": 1}'.encode("utf-16"), 400, "invalid_json"),
        ("X: y", '{"model": "\xe9"}'.encode("latin-1"), 400, "invalid_json"),
        ("X: y", b'{"model": "\xed\xa0\x80"}', 400, "invalid_json"),
        ("X: y", b"\xef\xbb\xbf{}", 400, "invalid_json"),
        ("X: y", b"", 400, "invalid_json"),
        ("X: y", b"\x00" * 9000, 400, "invalid_json"),
    ],
)
def test_bodies_that_are_no_json(head: str, body: bytes, status: int, code: str) -> None:
    name, _, value = head.partition(": ")

    async def main() -> tuple[int, dict[str, Any]]:
        async with served(refuses) as (_, base_url):
            return await post(base_url, CHAT, body, **{name: value})

    answered, answer = asyncio.run(main())
    assert (answered, answer["error"]["code"]) == (status, code)


@pytest.mark.parametrize("begun", [False, True])
def test_a_body_that_its_headers_contradict_is_a_400(begun: bool) -> None:
    """Where it is being read, aiohttp's compiled parser says nothing: a body that does not come."""

    async def main() -> bytes:
        async with (
            served(refuses, limits=ClientLimits(body_seconds=0.2)) as (endpoint, base_url),
            connection(base_url) as (reader, writer),
        ):
            writer.write(f"{POST}Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n".encode())
            while begun and not endpoint.metrics.requests_in_flight:
                await asyncio.sleep(0)
            writer.write(b"no number\r\n{}\r\n0\r\n\r\n")
            return await asyncio.wait_for(reader.read(), 60)

    assert re.match(rb"HTTP/1\.[01] 40[08] ", asyncio.run(main()))


# ---- the log ----

MALFORMED = [
    f"GET /v1/models HTTP/1.1\r\n{AUTHORIZED}no colon {SECRET}\r\n\r\n",
    f"GET /{SECRET} HTTP/9\r\n{AUTHORIZED}\r\n",
    f"{SECRET}\r\n{AUTHORIZED}\r\n",
    f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\x00\r\n\r\n",
    f"{POST}Content-Length: {SECRET}\r\n\r\n",
    f"{POST}Transfer-Encoding: chunked\r\n\r\n{SECRET}\r\n",
    f"GET /v1/models HTTP/1.1\r\n{AUTHORIZED}X: {TOKEN * 9000}\r\n\r\n",
    f"{POST}Connection: close\r\nContent-Length: {len(SECRET) + 2}\r\n\r\n[{SECRET}]",
    f"POST /v1/{SECRET.replace(' ', '%0A')} HTTP/1.1\r\n{AUTHORIZED}Connection: close\r\n\r\n",
]


@pytest.mark.parametrize("sent", MALFORMED)
def test_the_log_has_no_word_of_a_clients(sent: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> bytes:
        async with served(refuses) as (_, base_url):
            return await said(base_url, sent)

    assert re.match(rb"HTTP/1\.[01] 4", asyncio.run(main()))
    for word in (TOKEN, SECRET, SECRET.replace(" ", "\n")):
        assert word not in caplog.text


def test_an_error_of_ours_is_in_the_log_with_its_place_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> tuple[int, dict[str, Any]]:
        async with served(refuses) as (_, base_url):
            return await post(base_url, TEXT, ASK)

    status, answer = asyncio.run(main())
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "POST /v1/completions failed: AssertionError" in caplog.text
    assert "in refuses" in caplog.text
    assert SECRET not in caplog.text.replace("raise AssertionError(SECRET)", "")


# ---- health and metrics ----


def test_health_needs_no_key_and_says_nothing() -> None:
    async def main() -> tuple[int, Any]:
        async with served(refuses) as (_, base_url), aiohttp.ClientSession() as http:
            async with http.get(base_url.removesuffix("/v1") + "/health") as answer:
                return answer.status, await answer.json()

    assert asyncio.run(main()) == (200, {"status": "ok"})


def test_metrics_count_what_was_done(engine: NativeEngine) -> None:
    async def main() -> tuple[str, str, int]:
        load = {"about": {"engine": 'a "b"\\'}, "load": lambda: (4, 2)}
        async with served(engine.generate, **load) as (_, base_url):
            made = 0
            for body in (ASK, {**ASK, "n": 2}):
                _, answer = await post(base_url, TEXT, body)
                made += answer["usage"]["completion_tokens"]
            await post(base_url, TEXT, {**ASK, "n": 0})
            await post(base_url, "/nothing/of/this/name", {})
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(base_url + TEXT, json={**ASK, "stream": True}) as stream:
                    made += (await stream.text()).count('"text": "') and 3
                async with http.get(base_url.removesuffix("/v1") + "/metrics") as answer:
                    return answer.headers["Content-Type"], await answer.text(), made

    kind, text, made = asyncio.run(main())
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    found = samples_of(text)

    def value(name: str, **labels: str) -> float:
        return found[f"rondo_{name}", frozenset(labels.items())]

    assert value("info", version=__version__, model=MODEL, engine=r"a \"b\"\\") == 1
    assert value("http_requests_total", route="/v1/completions", status="200") == 3
    assert value("http_requests_total", route="/v1/completions", status="400") == 1
    assert value("http_requests_total", route="other", status="404") == 1
    assert value("http_requests_in_flight") == 1  # this one
    assert value("prompt_tokens_total") == 9
    assert value("generated_tokens_total") == made
    assert value("policy_version") == 3
    assert (value("sequences_pending"), value("sequences_running"), value("sequences_waiting")) == (0, 4, 2)
    assert value("sequence_seconds_count") == value("sequence_seconds_bucket", le="+Inf") == 4
    assert 0 < value("sequence_seconds_sum") < 4 * CONTEXT
    buckets = [x for (name, _), x in found.items() if name == "rondo_sequence_seconds_bucket"]
    assert buckets == sorted(buckets)
