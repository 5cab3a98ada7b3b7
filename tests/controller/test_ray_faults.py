"""Addresses where no Ray is, and what Ray leaves when its driver is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from rondo.controller import ray_address
from rondo.controller.distributed import interface_towards
from rondo.controller.ray_leftovers import of_ray
from rondo.core.errors import ConfigError
from tests.controller.conftest import Run
from tests.waiting import wait_for, wait_until_gone

pytest.importorskip("ray")

# Starts the watcher, and a process whose command names a Ray session, with a child that does not.
DRIVER = """
import os, subprocess, sys, time
sys.path.insert(0, {folder!r})
from ray_leftovers import Watcher
watcher = Watcher()
children = "import subprocess as s, time; s.Popen(['sleep', '600']); print(1, flush=True); time.sleep(600)"
session = f"/tmp/ray/session_2026-11-22_02-30-13_088907_{{os.getpid()}}/sockets"
command = [sys.executable, "-c", children, session]
ray = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
ray.stdout.readline()
print("up", flush=True)
time.sleep(600)
"""
RAY_DRIVER = """
import sys, time
from rondo.config.schema import ClusterConfig, RayBackendConfig
from rondo.controller.ray_backend import start_ray
print("starting", flush=True)
start_ray(ClusterConfig(backend=RayBackendConfig(), devices=1), threads=1)
print("up", flush=True)
time.sleep(600)
"""


class Page(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server() -> Iterator[int]:
    with HTTPServer(("", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def silent_socket() -> Iterator[int]:
    with closing(socket.create_server(("", 0))) as listener:
        yield listener.getsockname()[1]


def free_port() -> int:
    with silent_socket() as port:
        return port


def refused(run: Run, address: str) -> str:
    from rondo.controller.ray_backend import check_address

    with pytest.raises(ConfigError, match="no Ray there") as caught:
        run(check_address(address))
    assert caught.value.key == "cluster.backend.address"
    return str(caught.value)


def test_where_nothing_listens(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert "refused" in refused(run, address) or "Connect call failed" in refused(run, address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert "auto: no Ray there" in refused(run, "auto")


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "nowhere.invalid:1"]
)
def test_what_is_no_address(run: Run, address: str) -> None:
    refused(run, address)


def test_where_something_else_answers(run: Run) -> None:
    with http_server() as port:
        assert "something else" in refused(run, f"127.0.0.1:{port}")


def test_where_nobody_answers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "CONNECT_SECONDS", 0.2)
    with silent_socket() as port:
        assert "no answer within" in refused(run, f"127.0.0.1:{port}")


def test_the_interface_by_which_an_address_is_reached() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("::1") is None


def test_ray_itself_answers(ray_instance: None, run: Run) -> None:
    import ray

    run(ray_address.check_answers(ray.get_runtime_context().gcs_address, encrypted=False))


ASKING = """
import sys
from ray._raylet import GcsClient

print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
"""
STARTING = f"""
import os, subprocess, sys
from rondo.config.schema import ClusterConfig, RayBackendConfig
from rondo.controller.ray_backend import start_ray

connection = start_ray(ClusterConfig(backend=RayBackendConfig(), devices=1), threads=1)
import ray

command = [sys.executable, "-c", {ASKING!r}, ray.get_runtime_context().gcs_address]
for others in ({{}}, {{"RAY_AUTH_TOKEN": "f" * 64}}, {{"RAY_AUTH_MODE": "disabled"}}):
    asked = subprocess.run(command, env={{**os.environ, **others}}, capture_output=True, text=True)
    print(asked.returncode, asked.stdout.strip() or asked.stderr.count("AuthenticationError") > 0)
ray.shutdown()
connection.watcher.end()
"""


@pytest.mark.slow
def test_a_ray_that_is_started_here_wants_its_token(tmp_path: Path) -> None:
    """The tests' own Ray has none (tests/conftest.py). It is asked by who has it, with another, without."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment["HOME"] = str(tmp_path)  # Ray writes it there
    done = subprocess.run(
        [sys.executable, "-c", STARTING], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.splitlines() == ["0 1", "1 True", "1 True"], done.stderr
    assert len((tmp_path / ".ray" / "auth_token").read_text()) == 64


def driver(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def said_by_the_watcher(process: subprocess.Popen[str]) -> str:
    with process:
        assert process.stderr is not None
        return process.stderr.read()  # until the watcher has ended, too


def test_a_killed_drivers_processes_are_ended() -> None:
    folder = str(Path(ray_address.__file__).parent)
    process = driver(DRIVER.format(folder=folder))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    started = wait_for("both", lambda: found if len(found := of_ray(process.pid, {})) == 2 else None)
    process.kill()
    assert "2 processes of Ray were left" in said_by_the_watcher(process)
    wait_until_gone(started)


def test_nothing_is_said_where_nothing_is_left() -> None:
    folder = str(Path(ray_address.__file__).parent)
    text = f"import sys; sys.path.insert(0, {folder!r}); from ray_leftovers import Watcher; Watcher()"
    assert said_by_the_watcher(driver(text)) == ""
    assert said_by_the_watcher(driver(f"{text}.end()")) == ""


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_what_ray_leaves_is_ended(early: bool) -> None:
    """early: the whole group is killed as soon as Ray has a process; else the driver alone, with Ray up."""
    process = driver(RAY_DRIVER)
    assert process.stdout is not None
    process.stdout.readline()
    wait_for("Ray's first process", lambda: of_ray(process.pid, {}))
    if not early:
        assert process.stdout.readline() == "up\n"
    started = of_ray(process.pid, {})
    (os.killpg if early else os.kill)(process.pid, signal.SIGKILL)
    said_by_the_watcher(process)
    wait_until_gone(started)
    assert of_ray(process.pid, started) == {}
