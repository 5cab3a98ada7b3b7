"""The endpoint's wire: HTTP, bearer tokens, server-sent events. The one module that knows aiohttp.

The bearer is one of the server's keys, or `<key>:<session>`; a session may also be named by X-Session-Id.
Each key has sessions of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import resource
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from rondo.core.errors import ConfigError, RolloutError
from rondo.serving.endpoint import Endpoint, Prepared
from rondo.serving.problems import ApiError, unknown_model, unknown_path
from rondo.serving.requests import Kind
from rondo.serving.sessions import Sessions, describe_call
from rondo.system.access import Access, AccessError, bearer_of, check_keys
from rondo.system.prometheus import CONTENT_TYPE

try:
    from aiohttp import web
    from aiohttp.http import HttpProcessingError
except ImportError:
    web = None  # type: ignore[assignment]

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_HEALTH = "/health"
# Where a client has gone before its answer was there, in the counts of answers.
_CLIENT_LEFT = 499
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_log = logging.getLogger(__name__)


def check_installed() -> None:
    """Raises ConfigError when aiohttp is not there."""
    if web is None:
        raise ConfigError('the OpenAI-compatible endpoint needs aiohttp: pip install "rondo-rl[serve]"')


@dataclass(frozen=True)
class ClientLimits:
    """What clients may take."""

    body_bytes: int = 16 << 20
    """Of one request's body; a longer one is answered with 413."""
    body_seconds: float = 60.0
    """Until a body is there."""
    idle_seconds: float = 75.0
    """Until the head of a request is there, from when the connection opened or the last answer was sent."""
    reading_seconds: float = 60.0
    """Until some of an answer is taken, where nothing more of it can be sent."""
    connections: int | None = None
    """Open ones at one time; None: three quarters of the files that this process may open."""


class HttpServer:
    """An Endpoint on a port. keys: of which every request but that for /health must bear one; the first
    opens the endpoint's sessions, another one its own.

    Raises ConfigError without aiohttp.
    """

    def __init__(self, endpoint: Endpoint, *keys: str, limits: ClientLimits | None = None) -> None:
        check_installed()
        check_keys(keys, "the endpoint's key")
        assert keys
        self._endpoint = endpoint
        self._access = Access(keys)
        self._sessions = {key: endpoint.sessions.another() for key in keys[1:]}
        self._sessions[keys[0]] = endpoint.sessions
        self._limits = limits or ClientLimits()
        self._max_connections = self._limits.connections or _most_connections()
        self._listening: asyncio.Server | None = None

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(client_max_size=self._limits.body_bytes, middlewares=[guard])
        app.router.add_post("/v1/chat/completions", functools.partial(self._complete, "chat"))
        app.router.add_post("/v1/completions", functools.partial(self._complete, "text"))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/v1/sessions/{name:.+}", self._session)
        app.router.add_delete("/v1/sessions/{name:.+}", self._forget)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(_HEALTH, self._health)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=self._limits.idle_seconds,
            lingering_time=min(
                10.0, self._limits.body_seconds
            ),  # to hear an answer that came before the body
            auto_decompress=False,
            logger=_wire_log(),
        )

    async def start(self, host: str = LOOPBACK, port: int = 0) -> str:
        """Listens; returns the base URL (`http://host:port/v1`). port 0: a free one. Raises ConfigError."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(self._connected, host, port, backlog=_BACKLOG)
        except (OSError, OverflowError) as error:
            await self.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another port") from error
        for listening in self._listening.sockets:  # the kernel hands it on to every connection
            milliseconds = round(1000 * self._limits.reading_seconds)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        host, port = self._listening.sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def close(self) -> None:
        """Stops listening; requests that are being answered are cancelled."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()
        self._endpoint.close()

    def _connected(self) -> asyncio.Protocol:
        """Makes the protocol of a new connection."""
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= self._max_connections:
            return _Full()
        protocol: asyncio.Protocol = server()
        return protocol

    # ---- routes ----

    async def _complete(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        session = self._sessions_of(request).get(self._session_name(request))
        prepared = await self._endpoint.prepare(kind, body, session)
        with self._endpoint.admitted(prepared):
            if prepared.asked.stream:
                return await self._stream(request, prepared)
            return web.json_response(text=await self._endpoint.answer(prepared))

    async def _body(self, request: web.Request) -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":  # some bytes could stand for gigabytes
            text = f"Content-Encoding: {encoding!r:.40} is not supported; send the body as it is"
            raise ApiError(text, code="unsupported_encoding", status=415)
        seconds = self._limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await request.read()
        except TimeoutError as error:
            text = f"the body was not there after {seconds:g} s"
            raise ApiError(text, code="request_timeout", status=408) from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise ApiError("the body is not what its headers say", code="invalid_body") from error

    async def _stream(self, request: web.Request, prepared: Prepared) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        async with contextlib.aclosing(self._endpoint.stream(prepared)) as chunks:
            try:
                async for chunk in chunks:
                    await response.write(_event(json.dumps(chunk)))
                await response.write(_event("[DONE]"))
            except (ApiError, RolloutError) as error:  # the status line has gone out
                await response.write(_event(json.dumps(_problem(error).body())))
            except ConnectionError:  # nobody reads any more
                _log.debug("a client left its stream")
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self._endpoint.models())

    async def _model(self, request: web.Request) -> web.Response:
        (model,) = self._endpoint.models()["data"]
        if request.match_info["model"] != model["id"]:
            raise unknown_model(request.match_info["model"], model["id"])
        return web.json_response(model)

    async def _session(self, request: web.Request) -> web.Response:
        session = self._sessions_of(request).peek(request.match_info["name"])
        calls = list(session.calls)

        def write() -> str:
            return json.dumps({"id": session.name, "calls": [describe_call(call) for call in calls]})

        size = sum(call.num_tokens for call in calls)
        return web.json_response(text=await self._endpoint.aside(size, write))

    async def _forget(self, request: web.Request) -> web.Response:
        sessions, name = self._sessions_of(request), request.match_info["name"]
        sessions.peek(name)
        sessions.close(name)
        return web.json_response({"id": name, "deleted": True})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._endpoint.metrics_text().encode(), headers={"Content-Type": CONTENT_TYPE}
        )

    # ---- around every route ----

    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answers a request, and counts it in every case."""
        metrics, status = self._endpoint.metrics, _CLIENT_LEFT
        metrics.requests_in_flight += 1
        try:
            response = await self._answered(request, handler)
            status = response.status
            return response
        finally:
            metrics.requests_in_flight -= 1
            metrics.requests[_route(request), status] += 1

    async def _answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if request.path != _HEALTH:
                self._key(request)
            response: web.StreamResponse = await handler(request)
            return response
        except (ApiError, RolloutError, AccessError) as error:
            problem = _problem(error)
        except web.HTTPRequestEntityTooLarge as error:
            problem = ApiError(f"the body is too large: {error.text}", code="body_too_large", status=413)
        except web.HTTPNotFound:
            served = {resource.canonical for resource in self._runner.app.router.resources()}
            problem = unknown_path(request.path, sorted(served))
        except web.HTTPException as error:
            problem = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary: a bug of ours is a 500 with its kind, and in the log
            # without the error's own words, which may be a client's
            place = "".join(traceback.format_tb(error.__traceback__))
            _log.error("%s %s failed: %s\n%s", request.method, _route(request), type(error).__name__, place)
            problem = ApiError(f"{type(error).__name__}: {error}", code="internal_error", status=500)
        headers = {"Retry-After": "1"} if problem.status == 429 else {}
        answer = web.json_response(problem.body(), status=problem.status, headers=headers)
        if problem.status == 408:
            answer.force_close()
        return answer

    def _key(self, request: web.Request) -> str:
        key = self._access.key_of(request.headers.get("Authorization", ""))
        assert key is not None
        return key

    def _sessions_of(self, request: web.Request) -> Sessions:
        return self._sessions[self._key(request)]

    def _session_name(self, request: web.Request) -> str | None:
        bearer = bearer_of(request.headers.get("Authorization", ""))
        by_key = bearer[len(self._key(request)) + 1 :]
        by_header = request.headers.get("X-Session-Id", "")
        if by_key and by_header and by_key != by_header:
            raise ApiError("X-Session-Id and the API key name different sessions", code="invalid_session")
        return by_key or by_header or None


def _problem(error: ApiError | RolloutError | AccessError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, AccessError):
        return ApiError(str(error), code=error.code, status=error.status)
    return ApiError(str(error), code="engine_failed", status=500)


def _route(request: web.Request) -> str:
    """Returns the route of a request as it was registered: a client cannot make new ones."""
    registered = request.match_info.route.resource
    return registered.canonical if registered is not None else "other"


def _most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(1, 3 * soft // 4)


class _Full(asyncio.Protocol):
    """A connection too many: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answers without having read anything."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


def _wire_log() -> logging.Logger:
    """Returns the log of what aiohttp refuses before it is a request, such as a malformed head."""
    log = logging.getLogger(f"{__name__}.wire")
    log.addFilter(_without_words)  # once, however often it is added
    return log


def _without_words(record: logging.LogRecord) -> bool:
    """Leaves only the type of an error in a log record: its text quotes the client, with its key."""
    if record.exc_info:
        kind = record.exc_info[0]
        record.msg = f"{record.msg}: {kind.__name__ if kind else 'unknown'}"
        record.exc_info = None
    return True


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()
