"""What can hold a program on a machine, the strongest first, and how each starts the head of a sandbox."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rondo.core.errors import SandboxError
from rondo_sandbox import seccomp
from rondo_sandbox.records import Limits

HERE = str(Path(__file__).resolve().parent)
# Imported, not run as a file, so that its compiled code is used. First in sys.path is the current folder,
# which is the program's to write: nothing may be imported from there.
HEAD = "import sys; sys.path[0] = sys.argv[1]; from inside.head import main; del sys.path[0]; main()"
NAMES = ("bubblewrap", "landlock", "none")
SYSTEM_PYTHON = "/usr/bin/python3"
# What every program may read. Of /etc only what the loader and Debian's alternatives need.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FOLDER = "/sandbox"
"""Where a program runs inside bubblewrap, and the only place that it can write."""
SHARED_MEMORY = 16 << 20

Sweeping = Literal["namespace", "user", "tree"]


@dataclass(frozen=True)
class Start:
    """How to start one sandbox's head, and the settings that it reads first."""

    argv: list[str]
    """Of the head's process."""
    settings: dict[str, Any]
    """The first message to the head, before any program."""
    filter: bytes | None = None
    """To be handed to bubblewrap in a file; its descriptor stands for `{filter}` in argv."""


@dataclass(frozen=True)
class Backend:
    """One way to hold programs on this machine."""

    name: str
    """bubblewrap, landlock or none."""
    python: str
    """The interpreter in the sandbox."""
    packages: tuple[str, ...]
    """Folders with packages that programs may import."""
    as_root: bool
    """Whether this process is root, and can give each program a user of its own."""

    @property
    def confines(self) -> bool:
        """Whether a program on trial must see that it is held."""
        return self.name != "none"

    @property
    def description(self) -> str:
        """Says what holds programs."""
        user = "a user of its own for each" if self.as_root else "the same user"
        return {
            "bubblewrap": f"bubblewrap ({user}, seccomp)",
            "landlock": f"Landlock + seccomp ({user})",
            "none": "none: limits only, programs reach whatever this process reaches",
        }[self.name]

    def start(self, limits: Limits) -> Start:
        """Returns how to start a sandbox with these limits."""
        bounds: dict[str, Any] = {
            "memory_mb": limits.memory_mb,
            "processes": limits.processes,
            "output_bytes": limits.output_bytes,
            "disk_mb": limits.disk_mb,
            "socket_bytes": _socket_bytes(),
        }
        settings: dict[str, Any] = {
            "limits": bounds,
            "uid": _user() if self.as_root and self.confines else None,
            "sweeping": "tree",
            "kernel": True,
            "readable": None,
            "writable": [],
            "filter": None,
            # The head makes it, and removes it, also where this process was killed.
            "folder": os.path.join(tempfile.gettempdir(), f"rondo-sandbox-{secrets.token_hex(8)}"),
            "made": True,
            "packages": list(self.packages),
        }
        # Not -I, which would ignore the seed of hashes; all other variables are `head.ENVIRONMENT`'s, too.
        head = [self.python, "-s", "-S", "-X", "utf8", "-c", HEAD, HERE]
        if self.name == "bubblewrap":
            # As root, bubblewrap, the change of user and CAP_SYS_PTRACE do what else needs ctypes, and 5 ms.
            settings |= {"sweeping": "namespace", "folder": FOLDER, "made": False}
            settings["kernel"] = not (self.as_root and _may_look())
            if not self.as_root:  # a guest is the head's user: what is left to the head is not left to it
                settings["filter"] = seccomp.program()
            return Start([*self._bubblewrap(limits), *head], settings, seccomp.program(head=True))
        if not self.as_root:
            bounds["processes"] += _threads_of_user()  # the kernel counts them by user
        elif not self.confines:
            bounds["processes"] = None  # it does not count those of root
        if self.confines:
            readable = [*SYSTEM, *DEVICES[1:], prefix_of(self.python), *self.packages]
            settings |= {"readable": readable, "writable": ["/dev/null"]}
            settings["filter"] = seccomp.program(owners=self.as_root)
            settings["sweeping"] = "user" if self.as_root else "tree"
        return Start(head, settings)

    def _bubblewrap(self, limits: Limits) -> list[str]:
        argv = [
            "bwrap",
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        argv += [
            "--die-with-parent",
            "--new-session",
            "--as-pid-1",
            "--hostname",
            "sandbox",
            "--seccomp",
            "{filter}",
        ]
        argv += ["--cap-drop", "ALL"]
        if self.as_root:  # the head becomes the guest's user, looks at it, ends it and clears away after it
            looking = ("SYS_PTRACE",) if _may_look() else ()
            for capability in ("SETUID", "SETGID", "KILL", "DAC_OVERRIDE", "FOWNER", *looking):
                argv += ["--cap-add", f"CAP_{capability}"]
        else:
            argv += ["--unshare-user", "--disable-userns"]
        made: set[str] = set()
        for path in (*SYSTEM, prefix_of(self.python), *self.packages, HERE):
            argv += _bound(path, made)
        disk = str(limits.disk_mb << 20)
        argv += ["--proc", "/proc", "--dev", "/dev"]
        argv += [
            "--size",
            str(SHARED_MEMORY),
            "--perms",
            "1777",
            "--tmpfs",
            "/dev/shm",
            "--remount-ro",
            "/dev",
        ]
        argv += ["--size", disk, "--perms", "1777", "--tmpfs", FOLDER, "--chdir", FOLDER]
        if "/tmp/" not in made:  # nothing that is shown lies in it
            argv += ["--symlink", FOLDER, "/tmp"]
        return [*argv, "--remount-ro", "/", "--"]


def _bound(path: str, made: set[str]) -> list[str]:
    """Returns the arguments of bubblewrap that show `path` read-only at its own place, in folders that all
    can read.
    """
    if (
        path == "/"
        or not os.path.lexists(path)
        or any(parent in made for parent in (path, *map(str, Path(path).parents)))
    ):
        return []
    argv: list[str] = []
    for parent in reversed(Path(path).parents[:-1]):
        if str(parent) + "/" not in made:
            made.add(str(parent) + "/")
            argv += ["--perms", "0755", "--dir", str(parent)]
    made.add(path)
    if os.path.islink(path) and path in SYSTEM:
        return [*argv, "--symlink", os.readlink(path), path]
    return [*argv, "--ro-bind", path, path]


def _user() -> int:
    """Returns a random user id, so that neither the machine's users nor other sandboxes have the same."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        first, _, count = map(int, file.read().split()[:3])
    least = 1 << 30 if first + count > 1 << 31 else first + min(count // 2, 20000)
    most = min(first + count, 1 << 31) - 1
    return least + secrets.randbelow(max(1, most - least))


def _threads_of_user() -> int:
    """Returns how many tasks of this user there are now."""
    own, tasks = os.getuid(), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == own:
                tasks += len(os.listdir(process / "task"))
        except OSError:
            continue
    return tasks


@cache
def _may_look() -> bool:
    """Says whether this process may look at the processes of all users (CAP_SYS_PTRACE)."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 19 & 1)


@cache
def _socket_bytes() -> int:
    """Returns how much the system may buffer for one end of a pair, which no guest can raise."""
    usual = 212_992
    try:
        return max(usual, int(Path("/proc/sys/net/core/wmem_default").read_text()))
    except FileNotFoundError:  # in a container that has a network of its own nobody sees it
        return usual


def prefix_of(python: str) -> str:
    """Returns the folder in which an interpreter's library lies."""
    return str(Path(python).resolve().parent.parent)


def landlock_version() -> int:
    """Returns the version of the kernel's Landlock; 0: none."""
    create_ruleset = 444
    return max(0, int(ctypes.CDLL(None).syscall(create_ruleset, None, 0, 1)))


def base_python() -> str:
    """Returns the interpreter that this one's environment was made from."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sysconfig.get_config_var("BINDIR") or sys.base_prefix + "/bin") / name
    return str(own.resolve()) if own.exists() else SYSTEM_PYTHON


def _reachable(path: str) -> bool:
    """Says whether a user without any rights can reach a path."""
    return all(folder.stat().st_mode & 0o001 for folder in (Path(path), *Path(path).parents))


def backend(name: str, python: str | None, packages: Sequence[str] = ()) -> Backend:
    """Returns the back end of that name; SandboxError: what it lacks here."""
    if sys.platform != "linux":
        raise SandboxError("it needs Linux")
    found = Backend(name, python or base_python(), tuple(map(os.path.abspath, packages)), os.geteuid() == 0)
    if name == "none":
        return found
    if seccomp.program() is None:
        raise SandboxError(f"its filter of system calls is written for {' and '.join(seccomp.MACHINES)} only")
    if name == "bubblewrap":
        if shutil.which("bwrap") is None:
            raise SandboxError("the command bwrap was not found; install it (apt-get install bubblewrap)")
        return found
    version, wanted = landlock_version(), 4 if found.as_root else 6
    if version < wanted:
        why = "" if found.as_root else ", as a user that is not root"
        raise SandboxError(f"this kernel has Landlock version {version}; {wanted} or newer is needed{why}")
    if found.as_root:
        found = replace(found, python=_for_all(found.python, explicit=python is not None))
        for folder in found.packages:
            if not _reachable(folder):
                raise SandboxError(f"packages: {folder} lies in a folder that only its owner may enter")
    return found


def _for_all(python: str, *, explicit: bool) -> str:
    """Returns this interpreter, or the system's where other users cannot reach this one."""
    if _reachable(os.path.realpath(python)):
        return python
    if explicit or not os.path.exists(SYSTEM_PYTHON):
        raise SandboxError(
            f"python: {python} lies in a folder that only its owner may enter; install one elsewhere"
        )
    return SYSTEM_PYTHON
