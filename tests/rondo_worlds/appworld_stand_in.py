"""A stand-in for AppWorld's server: it is not AppWorld, and has none of its apps. It answers as the routes of
appworld 0.1.3's serve/environment.py do (read there, not run: the data cannot be had here), for one world at
a time, and knows three lines of code.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandIn(ThreadingHTTPServer):
    """world: of the task that was initialized last; None: there is none."""

    world: dict[str, Any] | None = None
    calls: list[str]

    def answer(self, route: str, body: dict[str, Any]) -> Any:
        """Raises LookupError where the real server does not answer."""
        self.calls.append(route)
        if route == "initialize":
            if not body["task_id"].startswith("sum_"):
                raise LookupError(f"no task {body['task_id']}")
            self.world = {"task_id": body["task_id"], "answer": None, "seed": body["random_seed"]}
            person = {"first_name": "Ada", "last_name": "Byron", "email": "ada@x.org", "phone_number": "1815"}
            asked = body["task_id"].removeprefix("sum_").replace("_", " and ")
            return {
                "task_id": body["task_id"],
                "instruction": f"Add {asked}.",
                "supervisor": person,
                "datetime": "2023-05-18T12:00:00",
            }
        if self.world is None or self.world["task_id"] != body["task_id"]:
            raise LookupError("AppWorld has not been initialized.")
        return getattr(self, f"_{route}")(**{key: body[key] for key in body if key != "task_id"})

    def _execute(self, code: str) -> str:
        assert self.world is not None
        if said := re.fullmatch(r"apis\.supervisor\.complete_task\(answer=(\d+)\)", code):
            self.world["answer"] = int(said[1])
            return "Execution successful."
        if code == "print(seed)":
            return f"{self.world['seed']}\n"
        return "" if code == "pass" else "Execution failed. Traceback:\nNameError"

    def _task_completed(self) -> bool:
        assert self.world is not None
        return self.world["answer"] is not None

    def _evaluate(self, suppress_errors: bool) -> dict[str, Any]:
        assert self.world is not None
        assert suppress_errors
        right = sum(map(int, self.world["task_id"].split("_")[1:])) == self.world["answer"]
        return {"success": right, "difficulty": 1, "num_tests": 1, "passes": [], "failures": []}

    def _close(self) -> None:
        self.world = None


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            code, said = 200, {"output": self.server.answer(self.path.strip("/"), body)}
        except LookupError as error:
            code, said = 500, {"detail": str(error)}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def stand_in() -> Iterator[tuple[str, StandIn]]:
    """Serves until the end, at the address that it yields."""
    server = StandIn(("127.0.0.1", 0), _Handler)
    server.calls = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
