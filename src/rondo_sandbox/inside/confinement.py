"""The limits, user and filters of a sandbox's guests, and the end of all that they started."""

from __future__ import annotations

import _signal as signal  # without the enumerations of `signal`, which take 5 ms
import os
import resource
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MIB = 1 << 20
MOST_PATH = 2000  # characters; the system takes 4,095
DESCRIPTORS = 256
"""Of each process."""
ENTRY = 4096
"""Bytes that a file or folder counts at least: an empty one takes memory of the system, too."""
# Bytes that the system may keep for one: a pipe has 16 pages, a poll of 256 descriptors an entry for each.
KEPT = {"pipe": 65_536, "anon_inode:[eventpoll]": 65_536}


class Confinement:
    """What holds this sandbox's guests. settings: what `backends.Backend.start` made."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.limits = settings["limits"]
        self.uid = settings["uid"]
        self.sweeping = settings["sweeping"]
        self.folder = settings["folder"]
        self.filter = settings["filter"]
        self.ruleset = -1
        self.kernel = settings["kernel"]
        if self.kernel:
            import ctypes

            self.libc = ctypes.CDLL(None, use_errno=True)
            self.libc.prctl(
                4, 0, 0, 0, 0
            )  # PR_SET_DUMPABLE: no guest of the same user opens our memory or pipes
            self.libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: who loses its parent becomes our child
        if settings["readable"] is not None:
            self.ruleset = self._ruleset(settings["readable"], settings["writable"])

    def _checked(self, what: str, result: int) -> int:
        import ctypes

        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return result

    def _ruleset(self, readable: list[str], writable: list[str]) -> int:
        """Returns the descriptor of Landlock rules: these paths; no TCP, signals, abstract sockets."""
        abi = self._checked("Landlock", self.libc.syscall(444, None, 0, 1))
        files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
        reading = 0b1101  # execute, read files, read folders
        of_files = files & 0b1100000000000111  # what a rule about a file, not a folder, may say
        attributes = struct.pack("=QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
        size = 8 if abi < 4 else 16 if abi < 6 else 24
        ruleset = self._checked("Landlock rules", self.libc.syscall(444, attributes, size, 0))
        for path, access in [(p, reading) for p in readable] + [(p, files) for p in [*writable, self.folder]]:
            if not os.path.exists(path):
                continue
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access if os.path.isdir(path) else access & of_files, descriptor)
            self._checked(f"Landlock rule for {path}", self.libc.syscall(445, ruleset, 1, rule, 0))
            os.close(descriptor)
        return ruleset

    def enter(self, seconds: float | None) -> None:
        """Puts everything on this process, for good. seconds: of CPU time; None: without a limit."""
        os.setsid()
        most = self.limits["memory_mb"] * MIB
        bounds = {
            resource.RLIMIT_AS: most,
            resource.RLIMIT_FSIZE: self.limits["disk_mb"] * MIB,
            resource.RLIMIT_NOFILE: DESCRIPTORS,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_SIGPENDING: 256,  # a user has them, and so may the host's processes
            resource.RLIMIT_RTPRIO: 0,
            resource.RLIMIT_NICE: 0,
        }
        if self.limits["processes"] is not None:
            bounds[resource.RLIMIT_NPROC] = self.limits["processes"]
        os.chdir(self.folder)
        if self.uid is not None:
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
        for name, bound in bounds.items():
            resource.setrlimit(name, (bound, bound))
        if seconds is not None:
            # SIGXCPU, then SIGKILL: where both limits are one, the system sends SIGKILL only, which nobody
            # can tell from one that comes from outside.
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if self.kernel:  # the head looks at its descriptors as the same user
            self.libc.prctl(4, 1, 0, 0, 0)
        if self.ruleset >= 0 or self.filter is not None:
            self.libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            self._checked("no new privileges", self.libc.prctl(38, 1, 0, 0, 0))
        if self.ruleset >= 0:
            self._checked("Landlock", self.libc.syscall(446, self.ruleset, 0))
            os.close(self.ruleset)
        if self.filter is not None:
            import ctypes

            program = ctypes.create_string_buffer(self.filter, len(self.filter))
            header = struct.pack("@HP", len(self.filter) // 8, ctypes.addressof(program))
            self._checked("seccomp", self.libc.prctl(22, 2, header, 0, 0))

    # ---- its processes

    def processes(self) -> list[int]:
        """Returns the process ids of all guests that live."""
        own, parents = os.getpid(), {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != own:
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        state, parent = file.read().rpartition(b")")[2].split()[:2]
                except OSError:
                    continue
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
        if self.sweeping == "namespace":
            return list(parents)
        found, front = [], [own]
        while front:
            front = [pid for pid, parent in parents.items() if parent in front]
            found += front
        return found

    def sweep(self) -> None:
        """Ends every guest and its descendants, daemons too, and waits for them."""
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:  # orphans would be our children
                return
            if self.sweeping == "namespace":
                self._kill(-1)
            elif self.uid is not None:
                self.end_user()
            else:
                for pid in self.processes():
                    self._kill(pid)
            time.sleep(0.0005)

    def end_user(self) -> None:
        """Ends all of this sandbox's user at once, which no fork can outrun."""
        if self.uid is None:
            return
        helper = os.fork()
        if helper == 0:
            os.setresuid(self.uid, self.uid, self.uid)
            self._kill(-1)
            os._exit(0)
        try:
            os.waitpid(helper, 0)
        except ChildProcessError:
            pass

    def _kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def exceeded(self) -> str | None:
        """Returns the limit that the guests exceed together, which no limit of one process holds."""
        if self.uid is None or not self.kernel:
            memory, unlinked = self._held()
        else:
            # A process's own user may look at it; root may not everywhere (containers seldom let it).
            self.libc.setfsgid(self.uid)
            self.libc.setfsuid(self.uid)
            try:
                memory, unlinked = self._held()
            finally:
                self.libc.setfsuid(0)
                self.libc.setfsgid(0)
        if memory > self.limits["memory_mb"] * MIB:
            return "memory_limit"
        if self.sweeping == "namespace":
            own, shared = os.statvfs(self.folder), os.statvfs("/dev/shm")  # whose size is another
            used = max((own.f_blocks - own.f_bfree) * own.f_frsize, _entries(own), _entries(shared))
        else:
            used = self._used(self.folder) + unlinked
        return "disk_limit" if used > self.limits["disk_mb"] * MIB else None

    def _held(self) -> tuple[int, int]:
        """Returns the bytes of memory that guests hold, and of files that have no name any more."""
        processes = self.processes()
        kept, unlinked = self._descriptors(processes)
        memory = kept + sum(map(_resident, processes))
        if memory > self.limits["memory_mb"] * MIB:  # by a count that is fast, and too high
            # Parts of what is shared grow while those end that shared it: who is counted behind them has
            # their parts, too. That happens once.
            memory = kept + min(sum(map(_proportional, processes)) for _ in range(2))
        return memory, unlinked

    def _descriptors(self, processes: list[int]) -> tuple[int, int]:
        """Returns the bytes that the system keeps for the guests' open files, and those of deleted files that
        are still open or mapped.
        """
        kept, sizes, mapped, of_socket = 0, {}, set(), self.limits["socket_bytes"]
        seen: set[str] = set()
        for pid in processes:
            try:
                numbers = os.listdir(f"/proc/{pid}/fd")
            except PermissionError:  # it has hidden them; or it is ending, and has no memory any more
                kept += DESCRIPTORS * of_socket * bool(_resident(pid))
                continue
            except OSError:
                continue
            for number in numbers:
                try:
                    name = os.readlink(f"/proc/{pid}/fd/{number}")
                    if name.endswith(" (deleted)") and self.sweeping != "namespace":
                        status = os.stat(f"/proc/{pid}/fd/{number}")
                        sizes[status.st_ino] = max(ENTRY, status.st_blocks * 512)
                except OSError:
                    continue
                if name.startswith(("socket:", "pipe:")):
                    if name in seen:  # of another process, too
                        continue
                    seen.add(name)
                    name = name.partition(":")[0]
                kept += of_socket if name == "socket" else KEPT.get(name, ENTRY)
            if self.sweeping != "namespace":
                mapped |= self._unlinked_maps(pid)
        # What is only mapped cannot be measured: it may be as large as a file may be.
        return kept, sum(sizes.values()) + len(mapped - set(sizes)) * self.limits["disk_mb"] * MIB

    def _unlinked_maps(self, pid: int) -> set[int]:
        """Returns the inodes of files in our folder that a process has mapped and that have no name."""
        try:
            with open(f"/proc/{pid}/maps", "rb") as file:
                lines = [line.split(None, 5) for line in file if line.endswith(b" (deleted)\n")]
        except OSError:
            return set()
        folder = os.fsencode(self.folder) + b"/"
        return {int(line[4]) for line in lines if line[5].startswith(folder)}

    def _used(self, folder: str) -> int:
        total, ahead = 0, [folder]
        while ahead:
            at = ahead.pop()
            if len(at) > MOST_PATH:  # where nothing can be looked at any more
                return sys.maxsize
            try:
                with os.scandir(at) as entries:
                    found = [
                        (e.path, e.is_dir(follow_symlinks=False), e.stat(follow_symlinks=False))
                        for e in entries
                    ]
            except PermissionError:  # nor where it has been shut to us
                return sys.maxsize
            except OSError:
                continue
            total += sum(max(ENTRY, status.st_blocks * 512) for _, _, status in found)
            ahead += [path for path, deeper, _ in found if deeper]
        return total

    def empty(self) -> None:
        """Removes what guests left in their folder."""
        if self.uid is None:
            os.chmod(self.folder, 0o700)  # a guest of our own user may have shut us out
        clear(self.folder)


def is_stopped(pid: int) -> bool:
    """Says whether a process stands still (SIGSTOP)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def _resident(pid: int) -> int:
    """Returns the memory of a process, with all that it shares with others: quickly read."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Returns the memory of a process without files, and only its part of what it shares: slow to read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            parts = dict(line.split()[:2] for line in file.readlines()[1:])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:  # it has hidden itself
        return _resident(pid)
    # Older systems do not tell files from the rest.
    return 1024 * (int(parts.get(b"Pss_Anon:", parts.get(b"Pss:", 0))) + int(parts.get(b"Pss_Shmem:", 0)))


def _entries(system: os.statvfs_result) -> int:
    return (system.f_files - system.f_ffree) * ENTRY


def clear(folder: str) -> None:
    """Removes all that is in a folder, however deep it is: folders in its folders are moved up first, so that
    no path is too long for the system.
    """
    mark, moved = os.urandom(8).hex(), 0
    while True:
        with os.scandir(folder) as entries:
            left = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        if not left:
            return
        for path, is_folder in left:
            if not is_folder:
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                inside = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for deeper, deeper_is_folder in inside:
                if deeper_is_folder:
                    os.chmod(deeper, 0o700)
                    moved += 1
                    os.rename(deeper, f"{folder}/{mark}{moved}")
                else:
                    os.unlink(deeper)
            os.rmdir(path)
