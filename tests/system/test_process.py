"""Processes under a guard: whoever is killed, nothing is left behind, however the process was started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.core.errors import StorageError
from rondo.system import forkserver
from rondo.system.forkserver import ForkServer, fork_server, kept
from rondo.system.process import ChildProcess
from tests.waiting import is_gone, wait_for, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]

# A process that starts another, says so, and waits for ever, or ends as it is told.
_FORKER = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("grandchild", child.pid, file=sys.stderr, flush=True)
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[1]))
time.sleep(1000)
"""
_HOST = """
import os, socket, sys, time
from rondo.system.forkserver import ForkServer
from rondo.system.process import ChildProcess
assert "torch" not in sys.modules
server = ForkServer([], os.environ) if sys.argv[1] == "forked" else None
here, there = socket.socketpair()
process = ChildProcess("x", ["forker"], there.fileno(), os.environ, server)
while "grandchild" not in process.tail():
    time.sleep(0.01)
print(process._guard.pid, process.tail().split()[-1], process.folder, flush=True)
time.sleep(1000)
"""


def fill(folder: Path) -> None:
    """As an engine does: files, folders in folders, links."""
    inner = folder / "rondo-vllm-x" / "deliveries"
    inner.mkdir(parents=True)
    (inner.parent / "config.json").write_text("{}", encoding="utf-8")
    (inner / "link").symlink_to(folder)
    (inner / "delivery-1").write_text("x", encoding="utf-8")


class TestNothingIsLeftBehind:
    """A process, its guard, a grandchild in a session of its own, and files in the process's folder."""

    @pytest.fixture
    def environment(self, tmp_path: Path) -> dict[str, str]:
        (tmp_path / "forker.py").write_text(_FORKER, encoding="utf-8")
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])}

    @pytest.fixture(params=["executed", "forked"])
    def server(
        self, request: pytest.FixtureRequest, environment: dict[str, str]
    ) -> Iterator[ForkServer | None]:
        if request.param == "executed":
            yield None
            return
        server = ForkServer([], environment)
        yield server
        server.close()

    def started(
        self, environment: dict[str, str], server: ForkServer | None, *arguments: str
    ) -> tuple[ChildProcess, int]:
        here, there = socket.socketpair()
        with here, there:
            process = ChildProcess("x", ["forker", *arguments], there.fileno(), environment, server)
        wait_for("the grandchild starts", lambda: "grandchild" in process.tail())
        return process, int(process.tail().split()[-1])

    def test_killed(self, environment: dict[str, str], server: ForkServer | None) -> None:
        process, grandchild = self.started(environment, server)
        assert not is_gone(grandchild)
        fill(process.folder)
        process.kill()
        assert is_gone(grandchild)
        assert process.how_it_ended() == "exit code 0"  # the guard did as it was told
        assert not process.folder.exists()

    def test_it_ends_and_leaves_a_child(self, environment: dict[str, str], server: ForkServer | None) -> None:
        process, grandchild = self.started(environment, server, "3")
        assert process.wait(240)
        assert process.how_it_ended() == "exit code 3"
        assert is_gone(grandchild)
        assert not process.folder.exists()

    def test_the_guard_is_killed(self, environment: dict[str, str], server: ForkServer | None) -> None:
        """Then it removes nothing, and the host does."""
        process, grandchild = self.started(environment, server)
        fill(process.folder)
        os.kill(process._guard.pid, signal.SIGKILL)
        os.kill(grandchild, signal.SIGKILL)  # in a session of its own: only the guard would have found it
        assert process.wait(240)
        assert not process.folder.exists()

    @pytest.mark.parametrize("how", ["executed", "forked"])
    def test_the_host_is_killed(self, environment: dict[str, str], how: str) -> None:
        host = subprocess.Popen(
            [sys.executable, "-c", _HOST, how], stdout=subprocess.PIPE, env=environment, text=True
        )
        assert host.stdout is not None
        *words, name = host.stdout.readline().split()
        pids, folder = [int(word) for word in words], Path(name)
        fill(folder)
        assert not any(map(is_gone, pids))
        host.kill()
        host.wait()
        host.stdout.close()
        wait_until_gone(pids)  # guard and grandchild
        wait_for("the folder goes", lambda: not folder.exists())

    def test_a_closed_fork_server_ends_what_it_forked(self, environment: dict[str, str]) -> None:
        server = ForkServer([], environment)
        process, grandchild = self.started(environment, server)
        server.close()
        assert process.wait(240)
        assert is_gone(grandchild)


def test_a_fork_begins_with_the_imports_done_and_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import os\nIMPORTED_BY = os.getpid()\n", encoding="utf-8")
    (tmp_path / "says.py").write_text(
        "import os, sys, slow_import\n"
        "print(slow_import.IMPORTED_BY != os.getpid(), os.environ.get('MINE'), os.environ.get('HOME'), "
        "os.getcwd(), "
        "file=sys.stderr)\nraise SystemExit(7)\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    server = ForkServer(["slow_import"], {**os.environ, "PYTHONPATH": path})
    here, there = socket.socketpair()
    with here, there:
        process = ChildProcess("x", ["says"], there.fileno(), {"MINE": "1", "PYTHONPATH": path}, server)
    assert process.wait(240)
    server.close()
    assert process.tail() == f"True 1 None {os.getcwd()}"
    assert process.how_it_ended() == "exit code 7"


def test_a_fork_has_what_imports_set_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text("import os\nos.environ['SET'] = 'by import'\n", encoding="utf-8")
    says = "import os, sys\nprint(os.environ['SET'], os.environ['MINE'], len(os.environ), file=sys.stderr)\n"
    (tmp_path / "says.py").write_text(says, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    server = ForkServer(["sets"], {**os.environ, "PYTHONPATH": path, "MINE": "1"})
    here, there = socket.socketpair()
    with here, there:
        own = {"MINE": "2", "PYTHONPATH": path}
        process = ChildProcess("x", ["says"], there.fileno(), own, server)
    assert process.wait(240)
    server.close()
    assert process.tail() == "by import 2 3"


def test_a_fork_server_that_has_ended_says_so(tmp_path: Path) -> None:
    server = ForkServer(["no_such_module"], {**os.environ, "PYTHONPATH": str(ROOT / "src")})
    here, there = socket.socketpair()
    with here, there, pytest.raises(OSError, match="fork server"):
        ChildProcess("x", ["says"], there.fileno(), os.environ, server)
    server.close()


class TestShared:
    """Who asks for the same server as another gets the same, also later, within `kept`."""

    @pytest.fixture(autouse=True)
    def nothing_else_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forkserver, "_servers", [])
        monkeypatch.setattr(forkserver, "_keepers", 0)

    def lent(self, **environment: str) -> ForkServer:
        return fork_server([], {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment})

    def test_the_last_user_ends_it(self) -> None:
        first, second = self.lent(), self.lent()
        assert second is first
        first.give_back()
        assert not first.has_ended()
        second.give_back()
        assert first.has_ended()

    def test_within_kept_the_next_user_gets_it(self) -> None:
        with kept():
            with kept():
                first = self.lent()
                first.give_back()
            assert self.lent() is first
            first.give_back()
            assert not first.has_ended()
        assert first.has_ended()

    def test_what_is_used_at_the_end_of_kept_ends_with_its_user(self) -> None:
        with kept():
            server = self.lent()
        assert not server.has_ended()
        server.give_back()
        assert server.has_ended()

    def test_who_asks_for_another_does_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with kept():
            server = self.lent(MINE="1")
            others = [self.lent(MINE="2"), fork_server(["json"], {**os.environ, "MINE": "1"})]
            monkeypatch.chdir(tmp_path)  # where its forks look for modules
            others.append(self.lent(MINE="1"))
            assert len({server, *others}) == 4
            for each in (server, *others):
                each.give_back()
            # The two that were given back last are kept.
            assert [each.has_ended() for each in (server, *others)] == [True, True, False, False]

    def test_one_that_has_ended_is_not_lent_again(self) -> None:
        with kept():
            server = self.lent()
            server.close()
            other = self.lent()
            assert other is not server
            other.give_back()
            server.give_back()
            assert forkserver._servers == [other]


@pytest.mark.parametrize("log", ["log.txt", "/dev/full"])
def test_a_full_disk_below_its_log_does_not_stop_a_process(tmp_path: Path, log: str) -> None:
    """More than a pipe holds is read to the end, and the last lines are there for a message."""
    program = "import sys\nfor n in range(20000): print('line', n, file=sys.stderr)\n"
    (tmp_path / "talker.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    here, there = socket.socketpair()
    with here, there:
        process = ChildProcess("x", ["talker"], there.fileno(), environment, log=tmp_path / log)
        assert process.wait(60)
    assert process.how_it_ended() == "exit code 0"
    assert process.tail().splitlines()[-1] == "line 19999"
    if log == "log.txt":
        lines = (tmp_path / log).read_text().splitlines()
        assert lines[0].startswith("=== x, started ")
        assert lines[1:] == [f"line {n}" for n in range(20000)]


def test_a_log_that_cannot_be_opened_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(StorageError, match=r"log\.txt: cannot be written"):
        ChildProcess("x", ["talker"], there.fileno(), os.environ, log=tmp_path / "nowhere" / "log.txt")
