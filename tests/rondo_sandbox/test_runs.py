"""Programs, sessions and warm sandboxes on every back end of this machine: what comes of each kind."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import ConfigError, SandboxError
from rondo.system.guard import children_of
from rondo_sandbox import (
    Limits,
    Result,
    Sandbox,
    Session,
    Warm,
    check_sandbox,
    code_rewards,
    head,
    open_sandbox,
)
from rondo_sandbox.escapes import processes_named
from rondo_sandbox.tool import Python
from tests.waiting import wait_for

LIMITS = Limits(seconds=20.0, memory_mb=256, output_bytes=1000, disk_mb=16)


@functools.cache
def opened(backend: str) -> Sandbox:
    """One for all tests: it starts each program, session and warm sandbox anew, and keeps nothing of them."""
    return asyncio.run(open_sandbox(backend, limits=LIMITS))


def within(backend: str, work: Callable[[Sandbox], Coroutine[Any, Any, object]]) -> None:
    """Does `work` with a sandbox, and looks that nothing runs in it any more."""
    asyncio.run(work(opened(backend)))
    assert not opened(backend)._heads


def program(backend: str, code: str | list[str], limits: Limits = LIMITS, **more: Any) -> Result:
    """Runs one."""
    return asyncio.run(opened(backend).run(code, limits=limits, **more))


def head_of(running: Warm | Session) -> int:
    """The process that the host has started: the head, or bubblewrap, whose child the head is."""
    lasting = running._head
    assert isinstance(lasting, head.LastingHead)
    assert lasting._head is not None
    return lasting._head._process.pid


def has_head(running: Warm | Session) -> bool:
    lasting = running._head
    return isinstance(lasting, head.LastingHead) and lasting._head is not None


def innermost(backend: str, running: Warm | Session) -> int:
    """The head itself."""
    pid = head_of(running)
    return children_of(pid)[0] if backend == "bubblewrap" else pid


async def killed(running: Warm | Session) -> None:
    """Kills the head between two questions, and waits until it cannot answer any more."""
    lasting = running._head
    assert isinstance(lasting, head.LastingHead)
    assert lasting._head is not None
    os.killpg(head_of(running), signal.SIGKILL)
    await lasting._head._process.wait()


def opened_to_all(folder: Path) -> None:
    """Lets the users of sandboxes pass pytest's own folders."""
    for each in (folder, *folder.parents):
        if each == Path(tempfile.gettempdir()):
            break
        each.chmod(0o755)


@pytest.mark.parametrize(("name", "depth"), [("d", 1500), ("d" * 200, 60)])
def test_folders_deeper_than_a_path_can_say(
    backend: str, name: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program leaves is removed; the next one finds an empty folder."""
    opened_to_all(tmp_path)
    monkeypatch.setattr("rondo_sandbox.backends.tempfile.gettempdir", lambda: str(tmp_path))
    deep = f"import os\nfor _ in range({depth}): os.mkdir({name!r}); os.chdir({name!r})\nprint('deep')"

    async def work(sandbox: Sandbox) -> None:
        async with sandbox.warm() as warm:
            made = await warm.run(deep)
            assert (made.status, made.stdout) in (
                ("finished", "deep\n"),
                ("disk_limit", "deep\n"),
                ("disk_limit", ""),
            )
            assert (await warm.run("import os; print(os.listdir('.'))")).stdout == "[]\n"

    within(backend, work)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "status", "return_code", "stdout", "last_line"),
    [
        ("print(int(input()) + 1)", "finished", 0, "42\n", ""),
        ("import sys; sys.exit()", "finished", 0, "", ""),
        ("print('a')\nexit()", "finished", 0, "a\n", ""),
        ("quit(3)", "error", 3, "", ""),
        ("import builtins; builtins.exit('bye')", "error", 1, "", "bye"),
        ("import sys; print('a'); sys.exit('bye')", "error", 1, "a\n", "bye"),
        ("import os; os._exit(7)", "error", 7, "", ""),
        ("import os; os.kill(os.getpid(), 11)", "error", -11, "", ""),
        ("x = 1\ny = x / 0", "error", 1, "", "ZeroDivisionError: division by zero"),
        ("def f(:", "error", 1, "", "SyntaxError: invalid syntax"),
        ("bytearray(1 << 30)", "memory_limit", 1, "", "MemoryError"),
        ("print('é' * 400)", "finished", 0, "é" * 400 + "\n", ""),
        ("while True: print('x' * 99)", "output_limit", -9, ("x" * 99 + "\n") * 10, ""),
        ("import atexit; atexit.register(print, 'last')", "finished", 0, "last\n", ""),
        ("import threading; threading.Timer(0.05, print, ['later']).start()", "finished", 0, "later\n", ""),
    ],
)
def test_what_comes_of_a_program(
    backend: str, code: str, status: str, return_code: int, stdout: str, last_line: str
) -> None:
    result = program(backend, code, stdin="41\n")
    assert (result.status, result.return_code, result.stdout) == (status, return_code, stdout)
    assert (result.stderr.splitlines() or [""])[-1] == last_line
    assert result.ok == (status == "finished")


def test_a_traceback_shows_the_programs_own_lines_only(backend: str) -> None:
    error = program(backend, "def f():\n    return 1 / 0\nf()").stderr
    assert 'File "program.py", line 2, in f\n    return 1 / 0' in error
    assert "inside" not in error


def test_a_program_that_does_not_end(backend: str) -> None:
    for code in ("while True: pass", "import time; time.sleep(600)"):
        assert program(backend, code, Limits(seconds=0.3), stdin="x" * 300_000).status == "time_limit"
    result = program(backend, "import sys; sys.stdin.read(); input()", stdin="x" * 300_000)
    assert result.status == "error"
    assert result.stderr.endswith("EOFError: EOF when reading a line\n")


# Programs that hold on to something without a limit of its own until they are ended.
SHARED = """
import mmap, os, time
held = mmap.mmap(-1, 100 << 20)
for _ in range(100):
    held.write(b"x" * (1 << 20))
children = []
for _ in range(5):
    children.append(os.fork())
    if children[-1] == 0:
        sum(held[at] for at in range(0, 100 << 20, 4096))
        time.sleep(0.2)
        os._exit(0)
for child in children:
    os.waitpid(child, 0)
print("done")
"""
EMPTY = "import time\nfor number in range({}): open(f'{{number}}', 'x').close()\ntime.sleep({})"
SOCKETS = """
import os, socket, time
for _ in range(6):
    if os.fork() == 0:
        kept = [socket.socketpair() for _ in range({})]
        time.sleep({})
        os._exit(0)
time.sleep({})
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (SHARED, "finished"),  # 600 MiB by each process's own count
        (EMPTY.format(3000, 0.2), "finished"),
        (EMPTY.format(5000, 60), "disk_limit"),  # of 4 KiB each
        (SOCKETS.format(20, 0.2, 0.4), "finished"),
        (SOCKETS.format(120, 60, 60), "memory_limit"),
    ],
)
def test_what_the_system_keeps_for_programs_counts(backend: str, code: str, status: str) -> None:
    result = program(backend, code)
    assert (result.status, result.stderr) == (status, "")


WITHOUT_RIGHTS = """
import asyncio, json, sys
from rondo_sandbox import Limits, open_sandbox
from rondo_sandbox.backends import _may_look
async def main():
    assert not _may_look()
    backend, *programs = json.loads(sys.argv[1])
    async with await open_sandbox(backend, limits=Limits(seconds=100.0, memory_mb=256)) as sandbox:
        print(json.dumps([(await sandbox.run(code)).status for code in programs]))
asyncio.run(main())
"""


def test_root_that_may_not_look_at_other_users_sees_what_counts_all_the_same(backend: str) -> None:
    """As in most containers, which have no CAP_SYS_PTRACE."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give up a right, by setpriv")
    asked = json.dumps([backend, SHARED, SOCKETS.format(20, 0.2, 0.4), SOCKETS.format(120, 60, 60)])
    without = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    done = subprocess.run(
        [*without, sys.executable, "-c", WITHOUT_RIGHTS, asked], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ('["finished", "finished", "memory_limit"]\n', "")


def test_sets_of_texts_have_the_same_order_in_each_sandbox(backend: str) -> None:
    code = "import sys; print(hash('a text'), list(map(str, {'a', 'b', 'c'})), '' in sys.path)"
    one, other = program(backend, code), program(backend, code)
    assert one.stdout == other.stdout
    assert one.stdout.endswith("False\n")
    command = program(backend, ["python3", "-c", "print(hash('a text'))"])
    assert command.stdout == program(backend, ["python3", "-c", "print(hash('a text'))"]).stdout


def test_nothing_is_imported_from_the_folder_of_a_program(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.warm() as warm:
            files = {f"{name}.py": "print('mine')" for name in ("traceback", "linecache", "ast", "decimal")}
            result = await warm.run("import decimal\n1 / 0", files=files)
            assert result.stdout == ""
            assert result.stderr.endswith("ZeroDivisionError: division by zero\n")

    within(backend, work)


def test_a_command_with_files_and_input(backend: str) -> None:
    script = "cat given folder/deep; pwd; printf '%s' \"$HOME\"; cat >&2; exit 3"
    files = {"given": "g\n", "folder/deep": b"d\n"}
    result = program(backend, ["sh", "-c", script], files=files, stdin="in")
    given, deep, folder, home = result.stdout.split("\n")
    assert (given, deep, result.stderr) == ("g", "d", "in")
    assert folder == home
    assert (result.status, result.return_code) == ("error", 3)
    assert program(backend, ["no-such-command"]).return_code == 127


def test_warm_programs_see_nothing_of_each_other(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.warm() as warm:
            left = "import builtins, os; builtins.seen = 1; os.mkdir('d', 0); os.makedirs('e/f')"
            assert (await warm.run(left)).ok
            result = await warm.run("import builtins, os; print(hasattr(builtins, 'seen'), os.listdir('.'))")
            assert result.stdout == "False []\n"
            for number in range(50):
                assert (
                    await warm.run("print(int(input()) ** 2)", stdin=str(number))
                ).stdout == f"{number**2}\n"

    within(backend, work)


def test_a_session_keeps_its_variables_through_errors_and_time_limits(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            cells: list[tuple[str, str, str]] = [
                ("x = 41", "finished", ""),
                ("x + 1", "finished", "42\n"),
                ("print('said')\n1 / 0", "error", "said\n"),
                ("def f(:", "error", ""),
                ("exit(3)", "error", ""),
                ("import time\ntry:\n    time.sleep(60)\nexcept Exception: pass", "time_limit", ""),
                ("bytearray(1 << 30)", "memory_limit", ""),
                ("'y' * 2000", "output_limit", ("'" + "y" * 1999)[:1000]),
                ("x", "finished", "41\n"),
                ("input()", "error", ""),
            ]
            for code, status, stdout in cells:
                result = await session.run(code, seconds=0.3 if "sleep" in code else None)
                assert (code, result.status, result.stdout) == (code, status, stdout)
                assert result.return_code is None

    within(backend, work)


def test_a_session_that_is_lost_says_so_and_begins_anew(backend: str) -> None:
    endless = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"

    async def work(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            for code in (endless, "import os; os._exit(0)", "os.kill(os.getpid(), 9)"):
                assert (await session.run("import os; x = 1")).ok
                result = await session.run(code, seconds=0.2)
                assert result.status == "lost"
                assert "session lost: " in result.stderr
                assert (await session.run("x")).stderr.endswith("NameError: name 'x' is not defined\n")

    within(backend, work)


def test_a_sandbox_that_is_ended_from_outside_is_no_result(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"rondo-test-{os.urandom(6).hex()}"
    daemon = f"setsid sh -c 'while :; do sleep 1; done; : {mark}' & wait"
    opened_to_all(tmp_path)
    monkeypatch.setattr("rondo_sandbox.backends.tempfile.gettempdir", lambda: str(tmp_path))

    async def work(sandbox: Sandbox) -> None:
        async with sandbox.warm() as warm:
            running = asyncio.create_task(warm.run(["sh", "-c", daemon]))
            killed: set[int] = set()
            while len(killed) < 3:
                # Between two heads there is none, while the last programs of the old one still end.
                while len(processes_named(mark)) < 2 or not has_head(warm) or head_of(warm) in killed:
                    await asyncio.sleep(0.01)
                killed.add(head_of(warm))
                os.killpg(head_of(warm), signal.SIGKILL)
            with pytest.raises(SandboxError, match="3 of them, one after the other"):
                await running
            assert list(tmp_path.iterdir()) == []
            wait_for("the end of the daemon", lambda: not processes_named(mark))
            with pytest.raises(SandboxError):
                await warm.run("pass")

    within(backend, work)


async def disturbed(backend: str, running: Warm | Session, work: Awaitable[Result], what: str) -> Result:
    """Does `work`, which takes some time; kills or freezes the head, or the program, meanwhile."""
    own = innermost(backend, running)
    task = asyncio.ensure_future(work)
    number = signal.SIGKILL if "kill" in what else signal.SIGSTOP
    while not (guests := children_of(own)):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)  # it is in its sleep now
    os.kill(guests[0] if "program" in what else own, number)
    return await task


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is frozen is ended in a moment."""
    monkeypatch.setattr(head, "LOOK_SECONDS", 0.1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What heads are asked."""
    requests: list[object] = []
    ask = head.Head.ask

    async def noting(self: head.Head, request: dict[str, object]) -> Result:
        requests.append(request)
        return await ask(self, request)

    monkeypatch.setattr(head.Head, "ask", noting)
    return requests


DISTURBANCES = ("kill the head", "freeze the head", "kill the program", "freeze the program")


@pytest.mark.parametrize("what", DISTURBANCES)
@pytest.mark.usefixtures("soon")
def test_a_program_that_was_killed_or_frozen_runs_again_to_the_same_end(backend: str, what: str) -> None:
    code = (
        "import os, time\nopen('new', 'x').close()\ntime.sleep(0.8)\nprint(input(), os.listdir('.'))\nexit(3)"
    )

    async def work(sandbox: Sandbox) -> None:
        async with sandbox.warm() as warm:
            made = await disturbed(backend, warm, warm.run(code, stdin="in", seconds=2.0), what)
            assert (made.status, made.return_code, made.stdout, made.stderr) == (
                "error",
                3,
                "in ['new']\n",
                "",
            )
            assert (await warm.run("import os; print(os.listdir('.'))")).stdout == "[]\n"

    within(backend, work)


@pytest.mark.parametrize("what", DISTURBANCES)
@pytest.mark.usefixtures("soon")
def test_a_session_that_was_killed_or_frozen_has_its_variables_and_files_all_the_same(
    backend: str, what: str
) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            cells = [
                "x = [1]",
                "open('f', 'w').write('kept')",
                "1 / 0",
                "while True: x[0] += 0",
                "x.append(2); x",
            ]
            said = [await session.run(cell, seconds=0.2 if "while" in cell else 1.0) for cell in cells]
            assert [each.status for each in said] == ["finished"] * 2 + ["error", "time_limit", "finished"]
            slow = session.run("import time; time.sleep(0.8); x.append(3); x", seconds=1.5)
            made = await disturbed(backend, session, slow, what)
            assert (made.status, made.stdout, made.return_code) == ("finished", "[1, 2, 3]\n", None)
            last = await session.run("x.append(4); print(x, open('f').read())\n1 / 0")
            assert last.stdout == "[1, 2, 3, 4] kept\n"
            assert 'File "cell 7", line 2' in last.stderr

    within(backend, work)


def test_a_session_that_was_killed_between_cells_goes_on(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            for number in range(6):
                made = await session.run(f"x = {number} + (x if {number} else 0)\nx")
                assert made.stdout == f"{sum(range(number + 1))}\n"
                if number % 2:
                    os.killpg(head_of(session), signal.SIGKILL)

    within(backend, work)


def test_a_session_that_cannot_be_what_it_was_is_an_error(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            await session.run("import os\nos.urandom(8)")
            await killed(session)
            with pytest.raises(SandboxError, match="cell 1 came to something else"):
                await session.run("1")
            with pytest.raises(SandboxError, match="was closed"):
                await session.run("1")

    within(backend, work)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 19)"])
def test_what_a_program_does_to_itself_is_its_own_doing_the_second_time(
    backend: str, end: str, asked: list[object]
) -> None:
    async def work(sandbox: Sandbox) -> None:
        stopped = "19" in end
        async with sandbox.warm() as warm:
            asked.clear()
            made = await warm.run(f"import os\n{end}", seconds=0.3)
            assert (made.status, made.return_code) == ("time_limit" if stopped else "error", -9)
            assert len(asked) == 2
        async with sandbox.session() as session:
            assert (await session.run("import os; x = 1")).ok
            asked.clear()
            made = await session.run(end, seconds=0.3)
            assert (made.status, made.return_code) == ("lost", None)
            assert len(asked) == 3
            assert (await session.run("x")).stderr.endswith("NameError: name 'x' is not defined\n")
            assert len(asked) == 4

    within(backend, work)


def test_a_session_that_ends_itself_and_cannot_be_what_it_was_is_lost_and_no_error(backend: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            for changing in ("import os, time\ntime.time()", "import os\nos.urandom(8)\nos.getpid()"):
                assert (await session.run(changing)).ok
                assert (await session.run("os.kill(os.getpid(), 9)")).status == "lost"
            assert (await session.run("6 * 7")).stdout == "42\n"

    within(backend, work)


def test_a_program_that_ends_itself_finds_nothing_that_it_left_the_second_time(backend: str) -> None:
    code = """
import os
try:
    print(os.listdir("/dev/shm"), flush=True)
    open("/dev/shm/left", "x").close()
except OSError:
    print([], flush=True)  # Landlock has none
os.kill(os.getpid(), 9)
"""
    assert program(backend, code).stdout == "[]\n"


def test_a_limit_of_the_processors_time_is_told_from_an_end_from_outside(
    backend: str, asked: list[object]
) -> None:
    code = "import os, resource, sys\nprint(resource.getrlimit(resource.RLIMIT_CPU), flush=True)\n"

    async def work(sandbox: Sandbox) -> None:
        asked.clear()
        async with sandbox.warm() as warm:
            made = await warm.run(f"{code}os.kill(os.getpid(), {int(signal.SIGXCPU)})", seconds=2.0)
        assert (made.status, made.stdout, len(asked)) == ("time_limit", "(3, 4)\n", 1)

    within(backend, work)


def test_a_child_that_stands_still_gives_a_program_no_second_time(backend: str, asked: list[object]) -> None:
    code = "import os\nif os.fork() == 0: os.kill(os.getpid(), 19)\nwhile True: pass"

    async def work(sandbox: Sandbox) -> None:
        asked.clear()
        async with sandbox.warm() as warm:
            assert (await warm.run(code, seconds=0.5)).status == "time_limit"
        assert len(asked) == 1

    within(backend, work)


def test_what_a_limit_or_an_exit_has_ended_runs_once(backend: str, asked: list[object]) -> None:
    ends = {
        "while True: pass": "time_limit",
        "import os; os._exit(1)": "error",
        "import os; os.kill(os.getpid(), 15)": "error",
        "while True: print('x' * 99)": "output_limit",
        SOCKETS.format(120, 60, 60): "memory_limit",
    }

    async def work(sandbox: Sandbox) -> None:
        asked.clear()
        async with sandbox.warm() as warm:
            made = [(await warm.run(code, seconds=2.0)).status for code in ends]
        assert made == list(ends.values())
        assert len(asked) == len(ends)

    within(backend, work)


def test_whoever_does_not_wait_ends_what_runs(backend: str) -> None:
    mark = f"rondo-test-{os.urandom(6).hex()}"

    async def work(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.run(["sh", "-c", f"sleep 600; : {mark}"]))
        while not processes_named(mark):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert processes_named(mark) == []

    within(backend, work)


HOST = """
import asyncio, sys
from rondo_sandbox import open_sandbox
PROGRAM = '''
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    subprocess.run(["sh", "-c", "while :; do sleep 1; done; : " + MARK])
time.sleep(600)
'''
async def main(backend, mark):
    async with await open_sandbox(backend) as sandbox:
        async with sandbox.session() as session:
            program = f"MARK = {mark!r}" + PROGRAM
            await asyncio.gather(sandbox.run(program), session.run(program))
asyncio.run(main(*sys.argv[1:]))
"""


def test_nothing_is_left_after_the_host_was_killed(backend: str, tmp_path: Path) -> None:
    mark = f"rondo-test-{os.urandom(6).hex()}"
    opened_to_all(tmp_path)
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, backend, mark], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    wait_for("two programs with a daemon each", lambda: len(set(processes_named(mark)) - {host.pid}) >= 2)
    host.kill()
    host.wait()
    wait_for("the end of them all", lambda: not processes_named(mark))
    wait_for("the removal of their folders", lambda: not list(tmp_path.iterdir()))


def test_packages_that_programs_may_import(backend: str, tmp_path: Path) -> None:
    opened_to_all(tmp_path)
    (tmp_path / "of_mine.py").write_text("answer = 42")

    async def work() -> None:
        async with await open_sandbox(backend, packages=[str(tmp_path)]) as sandbox:
            assert (await sandbox.run("import of_mine; print(of_mine.answer)")).stdout == "42\n"
            assert (await sandbox.run(f"open({str(tmp_path / 'of_mine.py')!r}, 'w')")).status == "error"

    asyncio.run(work())


def test_the_strongest_that_works_is_chosen_and_none_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rondo_sandbox.backends.shutil.which", lambda name: None)
    monkeypatch.setattr("rondo_sandbox.backends.landlock_version", lambda: 0)

    async def refused(name: str) -> str:
        with pytest.raises(SandboxError) as error:
            await open_sandbox(name)
        return str(error.value)

    message = asyncio.run(refused("auto"))
    assert "apt-get install bubblewrap" in message
    assert "Landlock version 0" in message
    assert "'none'" in message
    assert "Landlock" not in asyncio.run(refused("bubblewrap"))
    assert program("none", "print(6 * 7)").stdout == "42\n"
    with pytest.raises(ConfigError) as wrong:
        asyncio.run(open_sandbox("docker"))
    assert wrong.value.key == "sandbox.backend"


@pytest.mark.parametrize(
    ("name", "value"), [("seconds", 0), ("memory_mb", 1.5), ("processes", True), ("disk_mb", -1)]
)
def test_limits_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"limit {name}="):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_memory_in_which_nothing_runs_is_refused(backend: str) -> None:
    check_sandbox(backend, 64)
    with pytest.raises(ConfigError, match=r"memory_mb=1: a program that imports"):
        check_sandbox(backend, 1)
    for check in (Python.check, code_rewards.check):
        with pytest.raises(ConfigError, match=r"memory_mb=1: a program that imports"):
            check(backend=backend, memory_mb=1)
