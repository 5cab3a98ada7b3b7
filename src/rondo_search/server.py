"""Search-R1's HTTP API in front of an index of this machine. Python's own server: a thread for each request.

    POST /retrieve   {"queries": ["…"], "topk": 3, "return_scores": true}
                     ─▶ {"result": [[{"document": {"id", "contents"}, "score"}, …], …]}, a list for each query
    GET  /health

Without return_scores the lists have the documents themselves, as Search-R1's server has them.
"""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from rondo.core.errors import ConfigError, ToolError
from rondo.system.access import Access, AccessError, check_json
from rondo_search.index import MOST_RESULTS, Hit, Index

_BODY_BYTES = 1 << 20
_PASSED_OVER_BYTES = 1 << 26  # of a body that is too large
_MOST_FAULTS = 10  # that a refusal lists
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """The body of /retrieve."""

    queries: Annotated[list[str], Field(max_length=1024)]
    """The questions, each answered by itself."""
    topk: Annotated[int, Field(ge=1, le=MOST_RESULTS)] | None = None
    """The most passages per question; None: the server's own number."""
    return_scores: bool = False
    """Whether each passage comes with its score."""


_ASKED = TypeAdapter(Asked)


class RetrieverServer:
    """An index on a port, in threads. access: of every request but for /health. default_k: passages for a
    query where a request says nothing.
    """

    def __init__(self, index: Index, host: str, port: int, access: Access, *, default_k: int = 3) -> None:
        """Listens. port 0: a free one. Raises ConfigError."""
        handler = type("Handler", (_Handler,), {"index": index, "access": access, "default_k": default_k})
        try:
            self._server = _Server((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another port") from error
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._serving = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._serving.start()

    def close(self) -> None:
        """Stops listening; what has been asked is answered."""
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for them
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs why a request has no answer: its client has gone, or the index fails."""
        _log.warning("a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request. HTTP/1.0: its connection ends with the answer."""

    index: Index
    access: Access
    default_k: int
    timeout = 10.0  # of a client that says nothing, or takes nothing

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        else:
            self._unknown()

    def do_POST(self) -> None:
        said = self.headers.get("Content-Length", "")
        if not said.isdecimal() or len(said) > 15:
            self._answer(411, {"error": "the length of the body is missing (Content-Length)"})
            return
        length = int(said)
        try:
            self.access.check_host(self.headers.get("Host", ""))
            self.access.key_of(self.headers.get("Authorization", ""))
            check_json(self.headers.get("Content-Type", ""))
        except AccessError as error:
            self._pass_over(length)
            self._answer(error.status, {"error": str(error)})
            return
        if length > _BODY_BYTES:
            self._pass_over(length)
            self._answer(413, {"error": f"the body has more than {_BODY_BYTES} bytes"})
        elif self.path.rstrip("/") != "/retrieve":
            self._pass_over(length)
            self._unknown()
        else:
            self._retrieve(self.rfile.read(length))

    def _unknown(self) -> None:
        said = f"{self.command} {self.path:.100}: there are POST /retrieve and GET /health"
        self._answer(404, {"error": said})

    def _pass_over(self, length: int) -> None:
        """Reads a body, as far as is decent: a client that cannot send all of it sees no answer."""
        left = min(length, _PASSED_OVER_BYTES)
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 16))):
            left -= len(piece)

    def _retrieve(self, body: bytes) -> None:
        try:
            asked = _ASKED.validate_json(body)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False, include_context=False)
            self._answer(422, {"error": wrong[:_MOST_FAULTS]})
            return
        found = [self._search(query, asked.topk or self.default_k) for query in asked.queries]
        if asked.return_scores:
            result: Any = [
                [{"document": _document(hit), "score": hit.score} for hit in hits] for hits in found
            ]
        else:
            result = [[_document(hit) for hit in hits] for hits in found]
        self._answer(200, {"result": result})

    def _search(self, query: str, k: int) -> list[Hit]:
        try:
            return self.index.search(query, k)
        except ToolError:  # nothing can be found; the other queries are none of its business
            return []

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Logs nothing: a policy makes thousands of requests in a step."""


def _document(hit: Hit) -> dict[str, str]:
    return {"id": hit.passage.id, "contents": hit.passage.contents}
