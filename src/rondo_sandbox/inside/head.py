"""The head of a sandbox: starts guests, feeds and watches them, and answers the host."""

from __future__ import annotations

import _signal as signal
import marshal
import os
import select
import struct
import sys
import time

from .confinement import Confinement, clear, is_stopped
from .programs import cells, prepare_to_show, run_code, run_command, write_files
from .wire import DONE, STATUSES, HostGoneError, answer, receive, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

GRACE = 1.0
"""Seconds that a cell may take to notice its alarm before its session is ended."""
LOOK = 0.05
"""Seconds between two looks at memory and disk."""


class Guest:
    """A child that runs `main` confined; its standard streams are pipes that we hold."""

    def __init__(
        self, confinement: Confinement, host: int, seconds: float | None, main: Callable[[], int]
    ) -> None:
        self.confinement, self.host = confinement, host
        self.swept = False
        pairs = [os.pipe() for _ in range(4)]  # stdin, stdout, stderr, done
        theirs = [pairs[0][0], pairs[1][1], pairs[2][1], pairs[3][1]]
        self.began = time.monotonic()  # before the fork: a short program may end before we run again
        self.pid = os.fork()
        if self.pid == 0:
            self._become(theirs, seconds, main)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin, self.stdout, self.stderr, self.done = pairs[0][1], pairs[1][0], pairs[2][0], pairs[3][0]
        self.ended = os.pidfd_open(self.pid)  # readable when the process has ended
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(descriptor, False)
        if os.read(self.done, 1) != b"\0":
            raise OSError(f"a guest could not be confined: {os.read(self.done, 4096).decode()}")

    def _become(self, theirs: list[int], seconds: float | None, main: Callable[[], int]) -> None:
        """Takes the streams, gives up everything else, and runs `main`; never returns."""
        code = 125
        try:
            kept = self.confinement.ruleset
            for number, descriptor in enumerate(theirs):
                os.dup2(descriptor, DONE - 3 + number, inheritable=False)
            for number in range(3):
                os.dup2(DONE - 3 + number, number)
            os.closerange(3, max(kept, 3))
            os.closerange(max(kept + 1, 3), DONE)
            os.closerange(DONE + 1, 1024)
            try:
                self.confinement.enter(seconds)
            except OSError as error:
                os.write(DONE, b"!" + str(error).encode())
                return
            os.write(DONE, b"\0")
            code = main()
        finally:
            os._exit(code)

    def close(self) -> None:
        """Ends the guest and all that it left behind."""
        if not self.swept:
            self.confinement.sweep()
        for descriptor in (self.stdin, self.stdout, self.stderr, self.done, self.ended):
            if descriptor >= 0:
                os.close(descriptor)

    def watch(
        self, given: bytes, seconds: float, *, cell: bool
    ) -> tuple[str | None, bytes, bytes, bytes, float]:
        """Feeds the guest, and reads its output until it ends (a cell: says that it is done) or exceeds a
        limit.

        Returns (limit exceeded or None, what it said when done, stdout, stderr, seconds).
        """
        began = time.monotonic() if cell else self.began
        deadline, look = began + seconds, began + LOOK
        room = self.confinement.limits["output_bytes"]
        read: dict[int, list[bytes]] = {self.stdout: [], self.stderr: []}
        open_ends, exceeded, said = {self.stdout, self.stderr, self.ended, self.host}, None, b""
        if cell:
            open_ends.add(self.done)
        while True:
            now = time.monotonic()
            if now >= deadline:
                exceeded = "time_limit"
                break
            if now >= look:
                exceeded = self.confinement.exceeded()
                if exceeded is not None:
                    break
                look = now + LOOK
            writing = [self.stdin] if given else []
            ready, writable, _ = select.select(
                list(open_ends), writing, [], max(0, min(deadline, look) - now)
            )
            if self.host in ready:
                raise HostGoneError
            if writable:
                try:
                    given = given[os.write(self.stdin, given[:65536]) :]
                except BrokenPipeError:
                    given = b""
            if not given and not cell and self.stdin >= 0:
                os.close(self.stdin)
                self.stdin = -1
            for descriptor in (self.stdout, self.stderr):
                if descriptor in ready and not self._read(descriptor, read[descriptor], room):
                    open_ends.discard(descriptor)
            if not cell and any(sum(map(len, chunks)) > room for chunks in read.values()):
                exceeded = "output_limit"
                break
            if self.done in ready:
                said = os.read(self.done, 1)
                open_ends.discard(self.done)
            if said or self.ended in ready:
                break
        taken = time.monotonic() - began
        if not cell:
            self._end(exceeded)
        for descriptor in (self.stdout, self.stderr):
            while descriptor in open_ends and self._read(descriptor, read[descriptor], room):
                pass
        out, err = (b"".join(read[descriptor]) for descriptor in (self.stdout, self.stderr))
        if exceeded is None and max(len(out), len(err)) > room:
            exceeded = "output_limit"
        return exceeded, said, out[:room], err[:room], taken

    def _read(self, descriptor: int, chunks: list[bytes], room: int) -> bool:
        """Reads what there is, and keeps one byte more than has room; returns False when there is no more."""
        try:
            chunk = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        chunks.append(chunk[: max(0, room + 1 - sum(map(len, chunks)))])
        return bool(chunk)

    def _end(self, exceeded: str | None) -> None:
        """Reads the exit status of a program, then ends what the program started."""
        self.code = self.how_it_ended(exceeded)
        self.confinement.sweep()
        self.swept = True

    def how_it_ended(self, exceeded: str | None) -> int:
        """Returns the exit code, negative: the signal; of what is to be ended SIGKILL, or SIGSTOP where that
        holds it up.
        """
        if exceeded is None:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        stopped = exceeded == "time_limit" and is_stopped(self.pid)
        return -int(signal.SIGSTOP if stopped else signal.SIGKILL)


class Head:
    """Answers the host's requests, one after the other."""

    def __init__(self, confinement: Confinement, requests: int, answers: int) -> None:
        self.confinement, self.requests, self.answers = confinement, requests, answers
        self.session: Guest | None = None

    def serve(self) -> None:
        """Says that the head is ready, then answers until the host closes its end."""
        compile("", "first", "exec")  # the first one of a process takes 2 ms: once here, not in every guest
        write_all(self.answers, answer("finished", 0, 0.0, b"", b""))
        while True:
            request = receive(self.requests)
            reply = self.cell(request) if "cell" in request else self.run(request)
            write_all(self.answers, reply)

    def run(self, request: dict[str, Any]) -> bytes:
        """Runs one program in a process of its own, in an empty folder."""

        def main() -> int:
            os.close(DONE)
            write_files(request["files"])
            if request["argv"]:
                return run_command(request["argv"], dict(os.environ))
            return run_code(request["code"])

        guest = Guest(self.confinement, self.requests, request["seconds"], main)
        try:
            exceeded, _, out, err, seconds = guest.watch(request["stdin"], request["seconds"], cell=False)
        finally:
            guest.close()
            self.confinement.empty()
        if guest.code == 1:
            prepare_to_show()  # others will fail, too
        return answer(exceeded or _status(guest.code, err), guest.code, seconds, out, err)

    def cell(self, request: dict[str, Any]) -> bytes:
        """Runs a cell in the session, which begins with the first one and anew after it was lost. Its return
        code is 0, or of a lost one how its process ended, where no limit but that of time did it.
        """
        if self.session is None:
            self.session = Guest(self.confinement, self.requests, None, cells)
        wanted = marshal.dumps({"code": request["cell"], "seconds": request["seconds"]}, 2)
        wanted = struct.pack(">I", len(wanted)) + wanted
        exceeded, said, out, err, seconds = self.session.watch(wanted, request["seconds"] + GRACE, cell=True)
        if said and exceeded in (None, "output_limit"):
            status = exceeded or STATUSES[min(said[0], len(STATUSES) - 1)]
            return answer(status, 0, seconds, out, err)
        code = self.session.how_it_ended(exceeded) if exceeded in (None, "time_limit") else 0
        if exceeded and code == -signal.SIGKILL:  # it was busy
            code = 0
        self.session.close()
        self.session = None
        self.confinement.empty()
        why = {None: "its process ended", "time_limit": "it did not stop at its time limit"}
        said_why = why.get(exceeded, f"it exceeded a limit ({exceeded})")
        return answer("lost", code, seconds, out, err + f"session lost: {said_why}\n".encode())


def _status(code: int, err: bytes) -> str:
    if code in (-signal.SIGXCPU, -signal.SIGXFSZ):
        return "time_limit" if code == -signal.SIGXCPU else "disk_limit"
    if code == 0:
        return "finished"
    return "memory_limit" if err.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError") else "error"


def main() -> None:
    """Reads the settings, makes the sandbox's folder, and serves; ends everything at the end."""
    sys.dont_write_bytecode = True
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    confinement, settings = None, None
    try:
        settings = receive(requests)
        sys.path[:0] = settings["packages"]
        if settings["made"]:
            succeeds = os.path.isdir(settings["folder"])
            os.makedirs(settings["folder"], 0o700, exist_ok=True)
            if settings["uid"] is not None:
                os.chown(settings["folder"], settings["uid"], settings["uid"])
        os.environ.update(HOME=settings["folder"], TMPDIR=settings["folder"])
        confinement = Confinement(settings)
        if settings["made"] and succeeds:  # a head that was killed: its guests are not our children
            confinement.end_user()
        Head(confinement, requests, answers).serve()
    except (HostGoneError, BrokenPipeError):
        pass
    finally:
        if confinement is not None:
            confinement.sweep()
        if settings is not None and settings["made"]:
            clear(settings["folder"])
            os.rmdir(settings["folder"])
    os._exit(0)  # spares the interpreter's own end
