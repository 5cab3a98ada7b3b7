"""The filter of system calls that every guest runs under, assembled by hand: it needs no library.

What is listed is allowed, some of it for certain arguments only; all else is refused. A number that this list
was written before (above `LAST_KNOWN`), and `clone3`, whose flags lie in memory where no filter sees them, do
not exist (ENOSYS), so that libraries fall back to older calls; the rest is not permitted (EPERM).

Not listed, for instance: sockets but pairs, what looks into other processes, mounts, namespaces, modules,
keys, clocks, IPC by ids, memory that no limit counts (memfd, rings, pages lent to pipes), and messages that
carry descriptors, where nobody can count them.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from functools import cache

Numbers = dict[str, tuple[int, int]]
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _numbers(text: str) -> Numbers:
    """Reads `name x86_64 aarch64, …`; -1: not there."""
    entries = (entry.split() for entry in text.replace("\n", " ").split(","))
    return {name: (int(x86_64), int(aarch64)) for name, x86_64, aarch64 in entries}


ALLOWED = _numbers("""
read 0 63, write 1 64, open 2 -1, openat 257 56, openat2 437 437, creat 85 -1, close 3 57,
close_range 436 436, stat 4 -1, fstat 5 80, lstat 6 -1, newfstatat 262 79, statx 332 291, access 21 -1,
faccessat 269 48, faccessat2 439 439,
poll 7 -1, ppoll 271 73, select 23 -1, pselect6 270 72, epoll_create 213 -1, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -1, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -1,
eventfd2 290 19, signalfd 282 -1, signalfd4 289 74,
lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, readahead 187 213, fadvise64 221 223, fallocate 285 47,
sendfile 40 71, copy_file_range 326 285, sync_file_range 277 84, fsync 74 82, fdatasync 75 83,
truncate 76 45, ftruncate 77 46, pipe 22 -1, pipe2 293 59, dup 32 23, dup2 33 -1, dup3 292 24,
flock 73 32, getdents 78 -1, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166,
statfs 137 43, fstatfs 138 44,
rename 82 -1, renameat 264 38, renameat2 316 276, mkdir 83 -1, mkdirat 258 34, rmdir 84 -1, link 86 -1,
linkat 265 37, unlink 87 -1, unlinkat 263 35, symlink 88 -1, symlinkat 266 36, readlink 89 -1,
readlinkat 267 78,
getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
flistxattr 196 13,
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, msync 26 227, madvise 28 233,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -1, alarm 37 -1,
getitimer 36 102, setitimer 38 103, kill 62 129, tkill 200 130, tgkill 234 131,
fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, wait4 61 260,
waitid 247 95, restart_syscall 219 128, getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -1,
getpgid 121 155, setpgid 109 154, getsid 124 156, setsid 112 157,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, getrlimit 97 163, setrlimit 160 164, getrusage 98 165, times 100 153, uname 63 160,
sysinfo 99 179,
sched_yield 24 124, sched_get_priority_max 146 125, sched_get_priority_min 147 126, getcpu 309 168,
arch_prctl 158 -1, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293,
futex 202 98, futex_wait 455 455, futex_wake 454 454, futex_requeue 456 456, futex_waitv 449 449,
getrandom 318 278,
time 201 -1, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
nanosleep 35 101,
timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109,
timer_delete 226 111, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
recvfrom 45 207, recvmsg 47 212, recvmmsg 299 243, shutdown 48 210, getsockname 51 204,
getpeername 52 205, getsockopt 55 209
""")
# What changes modes, owners and times, which is no matter of Landlock's rules: a guest that is the same user
# as its host would change that user's own files, anywhere.
OF_OWNERS = _numbers("""
chmod 90 -1, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -1, fchown 93 55, lchown 94 -1,
fchownat 260 54, utime 132 -1, utimes 235 -1, futimesat 261 -1, utimensat 280 88
""")
# What bubblewrap's filter must leave to the head: it becomes the guest's user, looks as that user, and waits
# for guests.
OF_THE_HEAD = _numbers("""
pidfd_open 434 434, setgroups 116 159, setresuid 117 147, setresgid 119 149, setfsuid 122 151,
setfsgid 123 152
""")
LAST_KNOWN = 462
_CLONE, _CLONE3 = (56, 220), 435
_NAMESPACES = 0x7E020000  # CLONE_NEW… of users, mounts, processes, network, IPC, host name, cgroups
_X32 = 0x40000000

# name: (numbers, index of an argument -> what it must be, the refusal's error). Ids of processes must be 0,
# the caller: which others are its own no filter knows. Values have 32 bits, but for a pointer, which is none.
_SELF: dict[int, tuple[int, ...]] = {0: (0,)}
_SCHEDULING = _numbers("""
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_getscheduler 145 120, sched_setparam 142 118,
sched_getparam 143 121, sched_setattr 314 274, sched_getattr 315 275, sched_rr_get_interval 148 127,
prlimit64 302 261
""")
# PDEATHSIG, GET_DUMPABLE, NAME, GET_SECCOMP, CAPBSET_READ, TIMERSLACK, CHILD_SUBREAPER, NO_NEW_PRIVS,
# GET_TID_ADDRESS, THP_DISABLE, and names of memory. SET_DUMPABLE is the head's: a guest could hide from it.
_PRCTL = (1, 2, 3, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 40, 41, 42, 0x53564D41)
SET_DUMPABLE, SET_SECCOMP = 4, 22
# Duplicates, flags, locks, a pipe's size, seals: no owner of signals, lease or notice, no larger pipe.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
# Terminals and their pairs (not TIOCSTI), what can be read, non-blocking, close on exec.
_IOCTL = (
    *(0x5401, 0x5402, 0x5403, 0x5404, 0x540B, 0x540E, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414, 0x541B),
    *(0x5421, 0x5422, 0x5429, 0x5441, 0x5450, 0x5451, 0x80045430, 0x40045431),
    *(0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D),
)
LIMITED: dict[str, tuple[tuple[int, int], dict[int, tuple[int, ...]], int]] = {
    **{name: (numbers, _SELF, errno.EPERM) for name, numbers in _SCHEDULING.items()},
    # By ENOSYS libc passes over it where it asks for a thread by its id.
    "sched_getaffinity": ((204, 123), _SELF, errno.ENOSYS),
    "setpriority": ((141, 140), {0: (0,), 1: (0,)}, errno.EPERM),
    "getpriority": ((140, 141), {0: (0,), 1: (0,)}, errno.EPERM),
    "prctl": ((157, 167), {0: _PRCTL}, errno.EPERM),
    "fcntl": ((72, 25), {1: _FCNTL}, errno.EPERM),
    "ioctl": ((16, 29), {1: _IOCTL}, errno.EPERM),
    "socketpair": ((53, 199), {0: (1,)}, errno.EPERM),  # AF_UNIX
    "sendto": ((44, 206), {4: (0,)}, errno.EPERM),  # to no address, or it reaches sockets of the host
}
_POINTERS = {("sendto", 4)}

_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_Code = list[tuple[int, int, int, int]]


@cache
def program(machine: str | None = None, *, head: bool = False, owners: bool = True) -> bytes | None:
    """Returns the filter, 8 bytes an instruction, as the kernel takes it; None: for another machine.

    head: what a sandbox's head needs is allowed, too. owners: and `OF_OWNERS`.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        return None
    column = list(MACHINES).index(machine)
    code: _Code = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _error(errno.ENOSYS)),
    ]
    allowed = ALLOWED | (OF_THE_HEAD if head else {}) | (OF_OWNERS if owners else {})
    for numbers in allowed.values():
        if numbers[column] >= 0:
            code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    for name, (numbers, wanted, error) in LIMITED.items():
        more = (SET_DUMPABLE, SET_SECCOMP) if head and name == "prctl" else ()
        checks: _Code = []
        for index, values in wanted.items():
            checks += _one_of(16 + 8 * index, (*values, *more), _error(error))
            if (name, index) in _POINTERS:
                checks += _one_of(20 + 8 * index, values, _error(error))
        code += _where(numbers[column], [*checks, (_RETURN, 0, 0, _ALLOW)])
    code += _where(
        _CLONE[column],
        [
            (_LOAD, 0, 0, 16),  # its first argument, the flags
            (_ANY_OF, 0, 1, _NAMESPACES),
            (_RETURN, 0, 0, _error(errno.EPERM)),
            (_RETURN, 0, 0, _ALLOW),
        ],
    )
    code += [
        (_AT_LEAST, 0, 2, LAST_KNOWN + 1),
        (_AT_LEAST, 1, 0, _X32),
        (_RETURN, 0, 0, _error(errno.ENOSYS)),
        (_RETURN, 0, 0, _error(errno.EPERM)),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _where(number: int, block: _Code) -> _Code:
    """Returns what runs the block, which returns in every case, for this call only."""
    return [(_EQUAL, 0, len(block), number), *block]


def _one_of(offset: int, values: Iterable[int], refusal: int) -> _Code:
    """Returns what goes on where a word of the call's data has one of these values, and else refuses."""
    values = tuple(values)
    after = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [(_LOAD, 0, 0, offset), *after, (_RETURN, 0, 0, refusal)]


def _error(number: int) -> int:
    return 0x00050000 | number
