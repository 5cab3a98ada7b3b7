"""A stand-in for the HTTP API of Hugging Face's hub, in memory: what `huggingface_hub` asks for to send a
folder to a repository of models. It is not the hub: tests against it are of what we ask for, and of what we
make of the answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = {"hf_writer": "write", "hf_reader": "read"}


@dataclass
class Repository:
    """One of its repositories."""

    private: bool
    """Whether only its owner sees it."""
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": b"*.safetensors\n"}])
    """The files at each commit."""

    def head(self) -> str:
        """Returns the name of the last commit."""
        return f"{len(self.commits):040x}"


class Hub(ThreadingHTTPServer):
    """The server; one repository after the other is made by those who ask."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256: what was sent, and is in no commit yet perhaps
        self.asked: list[str] = []  # what changes something
        self.fault = ""  # what goes wrong: `commit`, `commit and delete`, or `list NAME`


@contextmanager
def hub() -> Iterator[Hub]:
    """Runs a hub until the end of the block."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if (role := self._role()) is None:
            return
        if self.path == "/api/whoami-v2":
            return self._answer({"name": "me", "auth": {"accessToken": {"role": role}}})
        path, _, _ = self.path.partition("?")
        found = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/tree/([0-9a-f]{40}))?", path)
        if found is None or found[1] not in self.server.repositories:
            return self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        repository = self.server.repositories[found[1]]
        if found[2] is None:
            return self._answer({"id": found[1], "sha": repository.head(), "private": repository.private})
        files = repository.commits[int(found[2], 16) - 1]
        return self._answer([self._listed(name, files[name]) for name in sorted(files)])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._role() is None:
            return
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said['organization']}/{said['name']}"
            self.server.asked.append(f"create {name}")
            self.server.repositories[name] = Repository(said.get("visibility") == "private")
            return self._answer({"url": f"{self.server.url}/{name}"})
        if found := re.fullmatch(r"/api/models/[\w.-]+/[\w.-]+/preupload/main", self.path):
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in files
            ]
            return self._answer({"files": modes})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.server.url}/large/{one['oid']}"}}
            return self._answer({"transfer": "basic", "objects": objects})
        found = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/main", self.path)
        assert found, self.path
        self.server.asked.append(f"commit {found[1]}")
        if self.server.fault.startswith("commit"):
            return self._answer({"error": "the disks are full"}, 507)
        return self._commit(self.server.repositories[found[1]], body, found[1])

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.removeprefix("/large/")
        assert hashlib.sha256(data).hexdigest() == name
        self.server.large[name] = data
        self._answer({})

    def do_DELETE(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._role() is not None:
            name = f"{said['organization']}/{said['name']}"
            self.server.asked.append(f"delete {name}")
            if self.server.fault.endswith("delete"):
                return self._answer({"error": "not now"}, 500)
            del self.server.repositories[name]
            self._answer({})

    def _commit(self, repository: Repository, body: bytes, name: str) -> None:
        files = dict(repository.commits[-1])
        parent = json.loads(body.splitlines()[0])["value"].get("parentCommit")
        if parent not in (None, repository.head()):
            return self._answer({"error": "A commit has happened since"}, 412)
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                assert key == "header", line
        repository.commits.append(files)
        oid = repository.head()
        return self._answer({"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid})

    def _listed(self, name: str, data: bytes) -> dict[str, Any]:
        if self.server.fault == f"list {name}":
            data += b"?"
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found = {"type": "file", "path": name, "size": len(data), "oid": blob}
        if name.endswith(".safetensors"):
            found["oid"] = "0" * 40  # of the pointer
            sha256 = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
        return found

    def _role(self) -> str | None:
        """Returns what the token may do; None: nothing, which is said."""
        role = TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if role is None:
            self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        return role

    def _answer(self, said: Any, status: int = 200, headers: dict[str, str] = {}) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""
