"""The page's server: Python's own, a thread for each request, on this machine's loopback only. It answers
GET, and only below a path that begins with a secret: any page of the same browser can reach a local port.
"""

from __future__ import annotations

import hmac
import importlib.util
import json
import logging
import secrets
import tempfile
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rondo.core.errors import ConfigError, RondoError
from rondo.system.access import Access, AccessError
from rondo_view.views import Views, finite

_PAGE = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # Nothing from elsewhere, and nothing that a text brings along: plotly sets styles, images are blobs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",  # the address has the secret
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


def charts() -> Path:
    """Returns plotly's script, from its wheel. Raises ConfigError where it is not installed."""
    found = importlib.util.find_spec("plotly")  # which is not imported
    script = Path(str(found and found.origin)).parent / "package_data" / "plotly.min.js"
    if not script.is_file():
        raise ConfigError('rondo view draws with plotly: pip install "rondo-rl[view]"')
    return script


class Server:
    """The page of some runs. folders: each a run, or a folder that holds runs. port 0: a free one."""

    def __init__(self, folders: Sequence[str], port: int = 0) -> None:
        """Listens. Raises ConfigError, DataError."""
        files = {path.name: path for path in _PAGE.iterdir() if path.suffix in _KINDS}
        secret = secrets.token_urlsafe(24)
        own = {"views": Views(folders), "secret": secret, "files": files | {"plotly.js": charts()}}
        try:
            self._server = _Threads(("127.0.0.1", port), type("Handler", (_Handler,), own))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port}: cannot listen there ({error}); choose another port") from error
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/{secret}/"
        self._serving = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._serving.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the page, and its address for a window of its own."""
        frame = f'<iframe src="{self.address}" width="100%" height="720" style="border: 0"></iframe>'
        return f'<a href="{self.address}" target="_blank">{self.address}</a>{frame}'


class _Threads(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs why a request has no answer: the browser does not wait for it any more."""
        _log.debug("a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request. HTTP/1.0: its connection ends with the answer."""

    views: Views
    secret: str
    files: dict[str, Path]
    timeout = 60.0  # of a browser that says nothing, or takes nothing

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        secret, _, name = asked.path.removeprefix("/").partition("/")
        try:
            Access(hosts=()).check_host(self.headers.get("Host", ""))
        except AccessError as error:
            return self._refuse(error.status, str(error))
        if not hmac.compare_digest(secret.encode(errors="surrogateescape"), self.secret.encode()):
            return self._refuse(403, "open the address that `rondo view` printed, all of it")
        try:
            self._found(name, parse_qs(asked.query, max_num_fields=1000))
        except (RondoError, ValueError) as error:  # ValueError: too many fields
            self._refuse(400, str(error))

    def _found(self, name: str, query: dict[str, list[str]]) -> None:
        if name in self.views.of:
            body = json.dumps(finite(self.views.of[name](query)), allow_nan=False).encode()
            self._send(body, "application/json")
        elif name == "image":
            self._send(self.views.image(query), "image/png")
        elif name == "export":
            with tempfile.TemporaryDirectory() as folder:
                made = self.views.export(query, folder)
                self._send(made, "application/octet-stream", made.name)
        elif (file := self.files.get(name or "index.html")) is not None:
            self._send(file, f"{_KINDS[file.suffix]}; charset=utf-8")
        else:
            self._refuse(404, f"{name:.100}: there is nothing of that name")

    def _refuse(self, status: int, text: str) -> None:
        self._send(json.dumps({"error": text}).encode(), "application/json", status=status)

    def _send(self, body: bytes | Path, kind: str, save_as: str = "", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if isinstance(body, bytes) else body.stat().st_size))
        for header, value in _HEADERS.items():
            self.send_header(header, value)
        if save_as:
            self.send_header("Content-Disposition", f'attachment; filename="{save_as}"')
        self.end_headers()
        if isinstance(body, bytes):
            self.wfile.write(body)
            return
        with body.open("rb") as file:
            while piece := file.read(1 << 20):
                self.wfile.write(piece)

    def log_message(self, *_: Any) -> None:
        """Logs nothing: the page asks every few seconds."""
