"""The filter of system calls: its verdicts by a machine of our own, for both processors; what a program still
can do under the kernel of this machine. ARM64 is a table that was compared with headers: none was run.
"""

from __future__ import annotations

import asyncio
import errno
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo_sandbox import Limits, open_sandbox, seccomp
from rondo_sandbox.escapes import _CALLS

ALLOW, KILL = "allow", "kill"
COLUMNS = {"x86_64": 0, "aarch64": 1}
KINDS = {
    "guest": seccomp.program,
    "guest of the same user": lambda machine: seccomp.program(machine, owners=False),
    "head": lambda machine: seccomp.program(machine, head=True),
}


def verdict(program: bytes, architecture: int, number: int, *arguments: int) -> str | int:
    """What the filter says to a call: allow, kill, or an error's number."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(operand, operand & 0xFFFF)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no


SELF, OTHER = 0, 4321
# Name -> numbers, arguments, the verdict: for a guest of another user.
ON_ARGUMENTS: list[tuple[str, tuple[int, int], tuple[int, ...], str | int]] = [
    ("prlimit64", (302, 261), (SELF, 7), ALLOW),
    ("prlimit64", (302, 261), (OTHER, 7), errno.EPERM),
    ("sched_setaffinity", (203, 122), (SELF,), ALLOW),
    ("sched_setaffinity", (203, 122), (OTHER,), errno.EPERM),
    ("sched_getaffinity", (204, 123), (SELF,), ALLOW),
    ("sched_getaffinity", (204, 123), (OTHER,), errno.ENOSYS),
    ("sched_setscheduler", (144, 119), (OTHER,), errno.EPERM),
    ("sched_setattr", (314, 274), (OTHER,), errno.EPERM),
    ("setpriority", (141, 140), (0, SELF, 5), ALLOW),
    ("setpriority", (141, 140), (0, OTHER, 5), errno.EPERM),
    ("setpriority", (141, 140), (1, SELF, 5), errno.EPERM),  # of a group
    ("setpriority", (141, 140), (2, SELF, 5), errno.EPERM),  # of a user
    ("ioprio_set", (251, 30), (1, SELF), errno.EPERM),
    ("socketpair", (53, 199), (1,), ALLOW),
    ("socketpair", (53, 199), (30,), errno.EPERM),  # TIPC
    ("sendto", (44, 206), (3, 1, 1, 0, 0), ALLOW),
    ("sendto", (44, 206), (3, 1, 1, 0, 0x7FFF1000), errno.EPERM),
    ("sendto", (44, 206), (3, 1, 1, 0, 0x7FFF00000000), errno.EPERM),  # the lower half is none
    ("sendmsg", (46, 211), (3,), errno.EPERM),
    ("fcntl", (72, 25), (3, 4, 0x800), ALLOW),  # F_SETFL
    ("fcntl", (72, 25), (3, 8, OTHER), errno.EPERM),  # F_SETOWN
    ("fcntl", (72, 25), (3, 1031, 1 << 20), errno.EPERM),  # F_SETPIPE_SZ
    ("ioctl", (16, 29), (0, 0x5401), ALLOW),  # TCGETS
    ("ioctl", (16, 29), (0, 0x5412), errno.EPERM),  # TIOCSTI
    ("prctl", (157, 167), (38, 1), ALLOW),
    ("prctl", (157, 167), (4, 0), errno.EPERM),  # PR_SET_DUMPABLE
    ("prctl", (157, 167), (62, 1, OTHER), errno.EPERM),  # PR_SCHED_CORE
    ("clone", (56, 220), (0x003D0F00,), ALLOW),  # a thread
    ("clone", (56, 220), (0x10000000 | 17,), errno.EPERM),  # a user namespace
    ("clone", (56, 220), (0x40000000 | 17,), errno.EPERM),  # a network namespace
    ("clone3", (435, 435), (), errno.ENOSYS),
    ("a call to come", (463, 463), (), errno.ENOSYS),
    ("a call of x32", (0x40000001, 0x40000001), (), errno.EPERM),
    ("socket", (41, 198), (1, 1), errno.EPERM),
    ("ptrace", (101, 117), (16, OTHER), errno.EPERM),
    ("shmat", (30, 196), (5,), errno.EPERM),
    ("semop", (65, 193), (5,), errno.EPERM),
    ("msgsnd", (69, 189), (5,), errno.EPERM),
    ("mq_unlink", (241, 181), (1,), errno.EPERM),
    ("kill", (62, 129), (OTHER, 9), ALLOW),  # a program may end its children; others the kernel keeps from it
]


@pytest.mark.parametrize("machine", COLUMNS)
@pytest.mark.parametrize(("name", "numbers", "arguments", "expected"), ON_ARGUMENTS)
def test_verdicts_on_arguments(
    machine: str, name: str, numbers: tuple[int, int], arguments: tuple[int, ...], expected: str | int
) -> None:
    program = seccomp.program(machine)
    assert program is not None
    architecture, number = seccomp.MACHINES[machine], numbers[COLUMNS[machine]]
    assert verdict(program, architecture, number, *arguments) == expected
    assert verdict(program, 0x40000003, number, *arguments) == KILL  # 32 bits: other numbers


@pytest.mark.parametrize("machine", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_not_listed_is_refused(machine: str, kind: str) -> None:
    """Every number that there is, and some that there are not."""
    program, column = KINDS[kind](machine), COLUMNS[machine]
    assert program is not None
    listed = dict(seccomp.ALLOWED)
    listed |= seccomp.OF_THE_HEAD if kind == "head" else {}
    listed |= {} if kind == "guest of the same user" else seccomp.OF_OWNERS
    allowed = {numbers[column] for numbers in listed.values()} - {-1}
    limited = {numbers[column] for numbers, _, _ in seccomp.LIMITED.values()} | {(56, 220)[column]}
    assert not allowed & limited
    odd = 0x7FFFFFFF  # what no argument may be, with a namespace among its bits
    for number in range(600):
        expected: str | int = errno.EPERM if number <= seccomp.LAST_KNOWN else errno.ENOSYS
        if number in allowed:
            expected = ALLOW
        elif number == 435 or number == (204, 123)[column]:
            expected = errno.ENOSYS
        said = verdict(program, seccomp.MACHINES[machine], number, *[odd] * 6)
        assert (number, said) == (number, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_way_out_by_a_call_is_allowed(kind: str) -> None:
    """The list of the attempts, which is another one, has no call that the filter allows."""
    for name, numbers in _CALLS.items():
        if name == "pidfd_open":  # of the head; a guest's looks at processes of its own namespace
            continue
        for machine, column in COLUMNS.items():
            program = KINDS[kind](machine)
            assert program is not None
            assert (name, verdict(program, seccomp.MACHINES[machine], numbers[column])) == (name, errno.EPERM)


def test_another_machine_has_none() -> None:
    assert seccomp.program("riscv64") is None


HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
ALIASES = {"newfstatat": "fstatat"}


def listed() -> Iterator[tuple[str, tuple[int, int]]]:
    for numbers in (seccomp.ALLOWED, seccomp.OF_OWNERS, seccomp.OF_THE_HEAD, _CALLS):
        yield from numbers.items()
    for name, (pair, _, _) in seccomp.LIMITED.items():
        yield name, pair
    for name, pair, _, _ in ON_ARGUMENTS:
        if " " not in name:
            yield name, pair


@pytest.mark.parametrize(("column", "header"), list(enumerate(HEADERS)))
def test_numbers_are_those_of_the_kernel(column: int, header: str) -> None:
    """As far as this machine's headers go. ARM64 has the generic ones."""
    if not Path(header).exists():
        pytest.skip(f"{header} is not there")
    defined = re.findall(r"define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    known = {name: int(number) for name, number in defined}
    newest = max(known.values())
    for name, pair in listed():
        number = known.get(name, known.get(ALIASES.get(name, ""), -1))
        if number >= 0 or pair[column] <= newest:
            assert (name, pair[column]) == (name, number)


# What programs that are none of an attacker's do. Commands are a list.
PROGRAMS: dict[str, tuple[str | list[str], str]] = {
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool: print(sum(pool.map(abs, range(-9, 0))))",
        "45\n",
    ),
    "subprocess": (
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True).stdout)\n"
        "print(subprocess.check_output('echo ab | tr a b', shell=True, text=True).strip())\n"
        "slow = subprocess.Popen(['sleep', '60']); slow.terminate(); print(slow.wait())",
        "b'42\\n'\nbb\n-15\n",
    ),
    "asyncio": (
        "import asyncio\n"
        "async def main():\n"
        "    child = await asyncio.create_subprocess_exec('echo', 'hi', stdout=asyncio.subprocess.PIPE)\n"
        "    print((await child.communicate())[0].decode(), end='')\n"
        "asyncio.run(main())",
        "hi\n",
    ),
    "multiprocessing": (
        "import multiprocessing\n"
        "here, there = multiprocessing.Pipe()\n"
        "child = multiprocessing.get_context('fork').Process(target=lambda: there.send(42))\n"
        "child.start(); print(here.recv()); child.join()",
        "42\n",
    ),
    "files": (
        "import os, shutil, sqlite3, tempfile\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    open(f'{folder}/a', 'w').write('x')\n"
        "    shutil.copyfile(f'{folder}/a', f'{folder}/b'); os.rename(f'{folder}/b', f'{folder}/c')\n"
        "    base = sqlite3.connect(f'{folder}/base'); base.execute('create table t(x)'); base.commit()\n"
        "    print(sorted(os.listdir(folder)))",
        "['a', 'base', 'c']\n",
    ),
    "clocks and signals": (
        "import signal, time\n"
        "signal.signal(signal.SIGALRM, lambda *_: print('rang'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.2)",
        "rang\n",
    ),
    "its own limits": (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(1), os.sched_getaffinity(0) != set())",
        "(64, 64) 1 True\n",
    ),
    "a shell": (
        [
            "bash",
            "-c",
            "for i in 1 2 3; do echo $i; done | sort -r | head -1; cat <(echo b); sleep 0 & wait; ls | wc -l",
        ],
        "3\nb\n0\n",
    ),
    "a call to come": (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.syscall(900), ctypes.get_errno())",
        f"-1 {errno.ENOSYS}\n",
    ),
}


def test_what_programs_do_goes_on(backend: str) -> None:
    async def run() -> dict[str, tuple[str, str]]:
        async with await open_sandbox(backend, limits=Limits(seconds=60)) as sandbox:
            results = {name: await sandbox.run(program) for name, (program, _) in PROGRAMS.items()}
        return {name: (result.stdout, result.stderr) for name, result in results.items()}

    assert asyncio.run(run()) == {name: (said, "") for name, (_, said) in PROGRAMS.items()}


NUMPY = """\
import numpy
a = numpy.random.default_rng(0).random((200, 200))
numpy.save("a.npy", a)
b = numpy.load("a.npy", mmap_mode="r")
print(bool(numpy.allclose(a @ numpy.linalg.inv(b), numpy.eye(200))))
"""


def test_numpy(backend: str) -> None:
    """That of this environment, where all users may reach it."""
    numpy = pytest.importorskip("numpy")
    packages = Path(numpy.__file__).parent.parent
    if not all(folder.stat().st_mode & 1 for folder in (packages, *packages.parents)):
        pytest.skip(f"{packages} lies where other users may not go")

    async def run() -> tuple[str, str]:
        async with await open_sandbox(backend, packages=[str(packages)]) as sandbox:
            if backend == "landlock" and sandbox.backend.python != sys.executable:
                version = [sandbox.backend.python, "-c", "import sys; print(sys.version_info[:2])"]
                said = subprocess.run(version, capture_output=True, text=True).stdout
                if said.strip() != str(sys.version_info[:2]):
                    pytest.skip("the sandbox's interpreter is of another version")
            result = await sandbox.run(NUMPY, limits=Limits(seconds=60))
            return result.stdout, result.stderr

    assert asyncio.run(run()) == ("True\n", "")
