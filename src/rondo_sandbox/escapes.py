"""The known ways out of a sandbox, each tried for real: `rondo sandbox check` prints what came of them.

An attempt is a program that prints a line `escaped: …` for each success and, where success shows outside, a
look from the host. The programs are in `ways_out.py`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rondo.core.errors import SandboxError
from rondo_sandbox import ways_out
from rondo_sandbox.head import LastingHead
from rondo_sandbox.records import Limits, Result
from rondo_sandbox.remote import Server
from rondo_sandbox.runs import Sandbox

LIMITS = Limits(seconds=5.0, memory_mb=256, processes=24, output_bytes=1 << 16, disk_mb=16)
HARMLESS = ("read files", "network and sockets", "environment of the host", "another trajectory")
"""Attempts that may succeed without harm: where nothing holds programs, they show that the list can tell."""
SECRET = "RONDO_SECRET_OF_THE_HOST"


@dataclass(frozen=True)
class Attempt:
    """What came of one way out."""

    name: str
    """As `rondo sandbox check` lists it."""
    escaped: bool
    """Whether it got out, which does no harm where HARMLESS has its name."""
    said: str
    """How it got out, or what stopped it."""


@dataclass(frozen=True)
class Host:
    """What the attempts are after."""

    folder: Path
    """Outside of every sandbox; the file `canary` in it must not be read or changed."""
    victim: int
    """A process of the host's user, with a secret in its environment."""
    tcp: socket.socket
    """Listens on the loopback."""
    udp: socket.socket
    """Bound on the loopback."""
    abstract: socket.socket
    """Listens under a name that is in no file system."""
    named: socket.socket
    """Listens at a path that everyone may write to."""
    datagrams: socket.socket
    """Takes datagrams at a path that everyone may write to."""
    hidden_datagrams: socket.socket
    """Its name is in no file system."""
    shared: Shared
    """Made by System V's calls."""

    def reached(self) -> list[str]:
        """Returns which of the sockets something came to."""
        found = []
        for name in ("tcp", "abstract", "named"):
            with suppress(BlockingIOError):
                getattr(self, name).accept()[0].close()
                found.append(name)
        for name in ("udp", "datagrams", "hidden_datagrams"):
            with suppress(BlockingIOError):
                getattr(self, name).recv(16)
                found.append(name)
        return found

    def scheduling(self) -> tuple[object, ...]:
        """Returns what of the victim another process might set."""
        bounds = {
            name: resource.prlimit(self.victim, name)
            for name in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)
        }
        io_priority = ctypes.CDLL(None).syscall(_CALLS["ioprio_get"][_MACHINE], 1, self.victim)
        policy, processors = os.sched_getscheduler(self.victim), os.sched_getaffinity(self.victim)
        return bounds, os.getpriority(os.PRIO_PROCESS, self.victim), policy, processors, io_priority

    def modes(self) -> tuple[object, ...]:
        """Returns what can be changed about the canary without writing to it."""
        status = os.stat(self.folder / "canary")
        names = os.listxattr(self.folder / "canary")
        return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime, names

    def alive(self) -> bool:
        """Says whether the victim lives."""
        try:
            state = Path(f"/proc/{self.victim}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"


class Shared:
    """A segment, a semaphore and a queue of the host, by System V's ids, which anybody may use."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.shmat.restype = ctypes.c_void_p
        self.segment = self._libc.shmget(0, 4096, 0o1666)
        self.semaphore = self._libc.semget(0, 1, 0o1666)
        self.queue = self._libc.msgget(0, 0o1666)
        self._at = self._libc.shmat(self.segment, None, 0) if self.segment >= 0 else None
        if self._at is not None:
            ctypes.memmove(self._at, b"canary", 7)

    def touched(self) -> list[str]:
        """Returns the parts that somebody has changed."""
        found = []
        if self._at is not None and ctypes.string_at(self._at) != b"canary":
            found.append("segment")
        if self.semaphore >= 0 and self._libc.semctl(self.semaphore, 0, 12) != 0:  # GETVAL
            found.append("semaphore")
        no_wait = 0o4000
        if (
            self.queue >= 0
            and self._libc.msgrcv(self.queue, ctypes.create_string_buffer(64), 8, 0, no_wait) >= 0
        ):
            found.append("queue")
        return found

    def close(self) -> None:
        """Removes the segment, the semaphore and the queue."""
        if self._at is not None:
            self._libc.shmdt(ctypes.c_void_p(self._at))
        for remove, number in (
            (lambda: self._libc.shmctl(self.segment, 0, None), self.segment),
            (lambda: self._libc.semctl(self.semaphore, 0, 0), self.semaphore),
            (lambda: self._libc.msgctl(self.queue, 0, None), self.queue),
        ):
            if number >= 0:
                remove()


# Numbers of calls that no library has, for x86-64 and ARM64.
_CALLS = {
    "ioprio_set": (251, 30),
    "ioprio_get": (252, 31),
    "io_uring_setup": (425, 425),
    "io_setup": (206, 0),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "kcmp": (312, 272),
    "get_robust_list": (274, 100),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "quotactl": (179, 60),
    "syslog": (103, 116),
}
_MACHINE = int(os.uname().machine == "aarch64")


class Attempts:
    """The list, run in one sandbox's back end."""

    def __init__(self, sandbox: Sandbox, host: Host) -> None:
        self.sandbox, self.host = sandbox, host

    @property
    def all(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """Name -> what tries it; it returns what was said, beginning with `escaped` where it got out."""
        return {
            "read files": lambda: self.program(ways_out.READ),
            "write files": self.write,
            "network and sockets": self.network,
            "fork bomb": lambda: self.program(ways_out.FORKS),
            "memory": lambda: self.program(ways_out.MEMORY),
            "memory of many processes": lambda: self.program(ways_out.MEMORY_OF_MANY),
            "memory shared by many": lambda: self.program(ways_out.SHARED_BY_MANY),
            "memory of sockets": lambda: self.program(ways_out.SOCKETS + ways_out.BUFFERS),
            "memory of pipes": lambda: self.program(ways_out.PIPES + ways_out.BUFFERS),
            "handles that no limit counts": lambda: self.program(ways_out.HANDLES),
            "processor time": lambda: self.ended(ways_out.PROCESSOR, "time_limit", seconds=0.5),
            "disk": lambda: self.program(ways_out.DISK),
            "number of files": lambda: self.program(ways_out.ENTRIES),
            "a folder that cannot be read": lambda: self.program(ways_out.HIDDEN),
            "files without a name": lambda: self.program(ways_out.NAMELESS, HELD="open"),
            "files without a name, mapped": lambda: self.program(ways_out.NAMELESS, HELD="by a map"),
            "files without a name, in flight": lambda: self.program(ways_out.NAMELESS, HELD="in flight"),
            "shared memory": lambda: self.program(ways_out.SHARED_MEMORY),
            "endless output": lambda: self.ended(ways_out.OUTPUT, "output_limit"),
            "environment of the host": lambda: self.program(ways_out.ENVIRONMENT),
            "ptrace, memory of others": lambda: self.program(ways_out.OTHERS),
            "limits and priorities of others": self.scheduling,
            "IPC of the host": self.ipc,
            "modes, owners and times": self.modes,
            "signals": self.signals,
            "daemons": self.daemons,
            "namespaces": lambda: self.program(ways_out.NAMESPACE),
            "privileges": lambda: self.program(ways_out.PRIVILEGES),
            "devices": lambda: self.program(ways_out.DEVICES),
            "forged answers": self.answers,
            "another trajectory": self.neighbour,
        }

    def text(self, program: str, **more: object) -> str:
        """Returns the program with the facts about the host filled in."""
        known = {
            "FOLDER": str(self.host.folder),
            "CANARY": str(self.host.folder / "canary"),
            "VICTIM": self.host.victim,
            "SECRET": SECRET,
            "TCP": self.host.tcp.getsockname()[1],
            "UDP": self.host.udp.getsockname()[1],
            "ABSTRACT": self.host.abstract.getsockname(),
            "NAMED": self.host.named.getsockname(),
            "DATAGRAMS": self.host.datagrams.getsockname(),
            "HIDDEN_DATAGRAMS": self.host.hidden_datagrams.getsockname(),
            "SEGMENT": self.host.shared.segment,
            "SEMAPHORE": self.host.shared.semaphore,
            "QUEUE": self.host.shared.queue,
            "CALLS": _CALLS,
            "MACHINE": _MACHINE,
            "PROCESSES": LIMITS.processes,
            "MEMORY": LIMITS.memory_mb << 20,
            "DISK": LIMITS.disk_mb << 20,
            **more,
        }
        return "".join(f"{name} = {value!r}\n" for name, value in known.items()) + ways_out.PRELUDE + program

    async def run(self, program: str, limits: Limits = LIMITS, **more: object) -> Result:
        """Runs a program in a sandbox of its own."""
        return await self.sandbox.run(self.text(program, **more), limits=limits)

    async def program(self, program: str, **more: object) -> str:
        """Runs an attempt that says by itself whether it got out."""
        return _verdict(await self.run(program, LIMITS, **more))

    async def ended(self, program: str, status: str, seconds: float = LIMITS.seconds) -> str:
        """Runs a program that never ends by itself: it must be ended for the right reason."""
        result = await self.run(program, replace(LIMITS, seconds=seconds))
        return result.status if result.status == status else f"escaped: {result.status}, not {status}"

    async def write(self) -> str:
        """Writes; what lies on the host counts, not what a file system of the sandbox's own took."""
        result = await self.run(ways_out.WRITE)
        places = (self.host.folder, *map(Path, ("/usr", "/etc", "/var/tmp", "/dev", "/")))
        found = [str(place) for place in places if (place / "rondo-escaped").exists()]
        for place in found:
            (Path(place) / "rondo-escaped").unlink()
        canary = self.host.folder / "canary"
        if not canary.exists() or canary.read_text() != "canary":
            canary.write_text("canary")
            found.append("the canary")
        return f"escaped: wrote {', '.join(found)}" if found else _last(result)

    async def network(self) -> str:
        """Connects; what the host's sockets saw counts, too."""
        said = _verdict(await self.run(ways_out.NETWORK))
        reached = self.host.reached()
        return f"escaped: reached {', '.join(reached)}" if reached else said

    async def scheduling(self) -> str:
        """Changes what the victim and the head may use; how the victim stands counts, too."""
        before = self.host.scheduling()
        try:
            said = _verdict(await self.run(ways_out.SCHEDULING))
        except SandboxError as error:
            return f"escaped: ended the sandbox's head ({error})"
        return said if self.host.scheduling() == before else "escaped: changed a process of the host"

    async def ipc(self) -> str:
        """Uses the host's by their ids; what they hold counts, too."""
        said = _verdict(await self.run(ways_out.IPC))
        touched = self.host.shared.touched()
        return f"escaped: changed {', '.join(touched)}" if touched else said

    async def modes(self) -> str:
        """Changes the canary without writing it; how it is counts, too."""
        before = self.host.modes()
        said = _verdict(await self.run(ways_out.MODES))
        try:
            return said if self.host.modes() == before else "escaped: changed the canary"
        finally:
            (self.host.folder / "canary").chmod(0o666)

    async def signals(self) -> str:
        """Stops and kills the victim and its head."""
        try:
            result = await self.run(ways_out.SIGNALS)
        except SandboxError as error:
            return f"escaped: ended the sandbox's head ({error})"
        return _verdict(result) if self.host.alive() else "escaped: ended a process of the host"

    async def daemons(self) -> str:
        """Leaves a process behind that has a session of its own; the host looks for it."""
        mark = f"rondo-daemon-{os.getpid()}-{os.urandom(4).hex()}"
        async with self.sandbox.warm(LIMITS) as warm:
            result = await warm.run(self.text(ways_out.DAEMON, MARK=mark))
            left = processes_named(mark)
        left += processes_named(mark)
        return f"escaped: {len(left)} live on" if left else f"{result.status}, and no process left"

    async def answers(self) -> str:
        """Writes an answer in the head's place; the next program must get its own."""
        try:
            async with self.sandbox.warm(LIMITS) as warm:
                first = await warm.run(self.text(ways_out.ANSWERS))
                second = await warm.run("print('second')")
        except SandboxError as error:
            return f"escaped: the head's answers were disturbed ({error})"
        got = (first.stdout, second.stdout)
        return "each got its own" if got == ("my own\n", "second\n") else f"escaped: {got}"

    async def neighbour(self) -> str:
        """One trajectory's program goes after the file, the process and the answer of another's."""
        write = "open('answer-of-another', 'w').write('42')\nimport os\nprint(os.getcwd(), os.getpid())"
        async with self.sandbox.session(LIMITS) as session:
            place, process = (await session.run(write)).stdout.splitlines()[-1].split()
            said = _verdict(await self.run(ways_out.NEIGHBOUR, PLACE=place, PROCESS=int(process)))
            try:
                after = await session.run("print(open('answer-of-another').read())")
            except SandboxError as error:  # it could not be begun again, either
                return f"escaped: the other's process was ended ({error})"
            if isinstance(session._head, LastingHead) and session._head.num_again:
                return "escaped: the other's process was ended"
        if after.status != "finished" or after.stdout != "42\n":
            return f"escaped: the other's file or process was changed ({after.status}, {after.stdout!r})"
        return said


def _verdict(result: Result) -> str:
    escapes = [line for line in result.stdout.splitlines() if line.startswith("escaped")]
    return escapes[0] if escapes else _last(result)


def _last(result: Result) -> str:
    lines = (result.stdout + result.stderr).strip().splitlines()
    return f"{result.status}: {lines[-1][:70]}" if lines else result.status


def processes_named(mark: str) -> list[int]:
    """Returns the processes of this machine with this in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != os.getpid() and mark.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


@asynccontextmanager
async def _host() -> AsyncIterator[Host]:
    with tempfile.TemporaryDirectory(prefix="rondo-host-") as name:
        folder = Path(name)
        folder.chmod(0o777)  # so that the sandbox, not the owner's rights, is what holds
        (folder / "canary").write_text("canary")
        (folder / "canary").chmod(0o666)
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", env={SECRET: SECRET}
        )
        sockets = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(type=socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        ]
        shared = Shared()
        try:
            sockets[1].bind(("127.0.0.1", 0))
            sockets[2].bind(f"\0rondo-{os.urandom(8).hex()}")
            sockets[3].bind(str(folder / "socket"))
            (folder / "socket").chmod(0o777)
            sockets[4].bind(str(folder / "datagrams"))
            (folder / "datagrams").chmod(0o777)
            sockets[5].bind(f"\0rondo-{os.urandom(8).hex()}")
            for server in sockets[2:4]:
                server.listen()
            for each in sockets:
                each.setblocking(False)
            tcp, udp, abstract, named, datagrams, hidden = sockets
            yield Host(folder, victim.pid, tcp, udp, abstract, named, datagrams, hidden, shared)
        finally:
            shared.close()
            for each in sockets:
                each.close()
            with suppress(ProcessLookupError):
                victim.kill()
            await victim.wait()


async def check(sandbox: Sandbox, names: Sequence[str] | None = None) -> list[Attempt]:
    """Tries these ways out (None: all), one after the other; returns what came of each."""
    if isinstance(sandbox.backend, Server):
        raise SandboxError(f"{sandbox.backend.name} can only be tried where it is: rondo sandbox check")
    if not sandbox.backend.confines and (names is None or not set(names) <= set(HARMLESS)):
        raise SandboxError("back end none holds nothing: what the attempts try would be done to this machine")
    found = []
    async with _host() as host:
        attempts = Attempts(sandbox, host).all
        for name in attempts if names is None else names:
            said = await attempts[name]()
            found.append(Attempt(name, said.startswith("escaped"), said))
    return found
