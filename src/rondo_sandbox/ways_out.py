"""The programs of the known ways out (`escapes.py`): each says by itself what it goes after, and how, and
knows nothing of what holds it. One prints a line `escaped: …` for each success.
"""

from __future__ import annotations

from rondo_sandbox.inside.wire import ANSWER

PRELUDE = """\
import ctypes, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, function):
    try:
        result = function()
    except BaseException as error:
        print(name + ":", type(error).__name__, flush=True)
    else:
        print("escaped:", name, repr(result)[:80], flush=True)
"""

READ = """\
for path in ("/etc/passwd", "/etc/shadow", "/root/.bashrc", CANARY):
    attempt("read " + path, lambda: open(path).read())
attempt("list " + FOLDER, lambda: os.listdir(FOLDER))
"""
WRITE = """\
for path in (FOLDER, "/usr", "/etc", "/var/tmp", "/dev", "/"):
    attempt("write " + path, lambda: open(os.path.join(path, "rondo-escaped"), "w").write("x"))
attempt("change", lambda: open(CANARY, "a").write("x"))
attempt("remove", lambda: os.remove(CANARY))
"""
NETWORK = """\
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", TCP), 1))
attempt("udp", lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", UDP)))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect(ABSTRACT))
attempt("named", lambda: socket.socket(socket.AF_UNIX).connect(NAMED))
for address in (DATAGRAMS, HIDDEN_DATAGRAMS):  # a pair's end may name another address
    attempt("datagram", lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", address))
    attempt("message", lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendmsg([b"x"], [], 0, address))
attempt("raw", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK))
"""
FORKS = """\
made = 0
try:
    while made < 400:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError:
    pass
print("forks:", made)
if made >= PROCESSES:
    print("escaped:", made, "processes")
"""
MEMORY = """\
attempt("allocate", lambda: len(bytearray(3 << 30)))
import mmap
attempt("share", lambda: mmap.mmap(-1, 3 << 30))
attempt("hidden", lambda: os.memfd_create("x"))
"""
MEMORY_OF_MANY = """\
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(b"x") * (128 << 20)
        time.sleep(60)
time.sleep(2)
print("escaped: 1 GiB in eight processes")
"""
SHARED_BY_MANY = """\
import mmap
ends = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        held = mmap.mmap(-1, 100 << 20)
        for _ in range(100):
            held.write(bytes(1 << 20))
        os.write(ends[1], b"x")
        time.sleep(60)
done = sum(len(os.read(ends[0], 1)) for _ in range(8))
time.sleep(0.3)
print("escaped:", done * 100, "MiB in eight processes")
"""
# Eight processes fill what the system buffers for them; make and fill say of what.
BUFFERS = """\
import fcntl
ends = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        kept, total = [], 0
        try:
            for _ in range(4000):
                reading, writing = make()
                kept.append((reading, writing))
                total += fill(writing)
        except OSError:
            pass
        os.write(ends[1], total.to_bytes(8, "big"))
        time.sleep(60)
total = sum(int.from_bytes(os.read(ends[0], 8), "big") for _ in range(8))
time.sleep(0.3)
print(total >> 20, "MiB in buffers")
if total > MEMORY:
    print("escaped:", total >> 20, "MiB in buffers")
"""
SOCKETS = """\
def make():
    return socket.socketpair()
def fill(writing):
    writing.setblocking(False)
    try:
        writing.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    except OSError:
        pass
    total = 0
    try:
        while True:
            total += writing.send(bytes(1 << 16))
    except BlockingIOError:
        return total
"""
PIPES = """\
def make():
    return os.pipe()
def fill(writing):
    try:
        fcntl.fcntl(writing, 1031, 1 << 20)
    except OSError:
        pass
    os.set_blocking(writing, False)
    total = 0
    try:
        while True:
            total += os.write(writing, bytes(1 << 16))
    except BlockingIOError:
        return total
"""
ENTRIES = """\
made, end = 0, time.monotonic() + 3
try:
    while time.monotonic() < end:
        open(f"empty{made}", "x").close()
        made += 1
except OSError as error:
    print(error)
if made << 10 > DISK:
    print("escaped:", made, "empty files")
"""
HIDDEN = """\
os.mkdir("hidden", 0o300)  # to be written, and not to be read
written = 0
try:
    for number in range(16):
        with open(f"hidden/part{number}", "wb") as file:
            written += file.write(bytes(8 << 20))
            os.fsync(file.fileno())
        time.sleep(0.05)
except OSError as error:
    print(error)
else:
    print("escaped: wrote", written, "bytes")
"""
# Files without a name that are open, only mapped, or only in a message that nobody takes.
NAMELESS = """\
kept, written, carrier = [], 0, socket.socketpair()
try:
    for number in range(64):
        with open(f"part{number}", "w+b", buffering=0) as file:
            os.remove(f"part{number}")
            written += file.write(bytes(4 << 20))
            os.fsync(file.fileno())
            if HELD == "by a map":
                libc.mmap(None, 4096, 1, 1, file.fileno(), 0)
            elif HELD == "in flight":
                socket.send_fds(carrier[0], [b"x"], [file.fileno()])
            else:
                kept.append(os.dup(file.fileno()))
except OSError as error:
    print(error)
time.sleep(0.3)
if written > DISK:
    print("escaped: wrote", written, "bytes into files without a name")
"""
HANDLES = """\
buffer = ctypes.create_string_buffer(4096)
attributes = (ctypes.c_uint32 * 32)(1, 128)  # of an event: a clock of software's, of this process
attributes[10] = 0b1100000  # not of the kernel, not of the machine below it
def call(name, *arguments):
    result = libc.syscall(CALLS[name][MACHINE], *arguments)
    if result >= 0:
        print("escaped:", name, result)
call("io_uring_setup", 8, buffer)
call("io_setup", 1, ctypes.create_string_buffer(8))
call("memfd_create", b"x", 0)
call("memfd_secret", 0)
call("userfaultfd", 1)
call("perf_event_open", attributes, 0, -1, -1, 0)
call("add_key", b"user", b"x", b"x", 1, -2)
call("keyctl", 0, -2, 1)
call("bpf", 0, (ctypes.c_uint32 * 32)(2, 4, 4, 1), 128)  # an array
call("inotify_init1", 0)
call("fanotify_init", 0, 0)
call("vmsplice", os.pipe()[1], (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8), 1, 0)
call("name_to_handle_at", -100, b"/", (ctypes.c_uint32 * 40)(128), ctypes.byref(ctypes.c_int()), 0)
call("fsopen", b"tmpfs", 0)
call("open_tree", -100, b"/", 1)
call("syslog", 3, buffer, 64)
for name, result in (
    ("shmget", libc.shmget(0, 4096, 0o600)),
    ("semget", libc.semget(0, 1, 0o600)),
    ("msgget", libc.msgget(0, 0o600)),
    ("mq_open", libc.mq_open(b"/rondo-queue", os.O_CREAT | os.O_RDWR, 0o600, None)),
):
    if result >= 0:
        print("escaped:", name, result)
print("nothing")
"""
IPC = """\
libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(SEGMENT, None, 0)
if at not in (None, ctypes.c_void_p(-1).value):
    print("escaped: the segment says", ctypes.string_at(at))
    ctypes.memmove(at, b"OWNED!", 7)
if libc.shmctl(SEGMENT, 2, ctypes.create_string_buffer(256)) >= 0:
    print("escaped: knows the segment")
if libc.semctl(SEMAPHORE, 0, 16, 7) >= 0 or libc.semop(SEMAPHORE, (ctypes.c_int16 * 3)(0, 1, 0), 1) >= 0:
    print("escaped: set the semaphore")
if libc.msgsnd(QUEUE, (ctypes.c_long * 2)(1, 1), 8, 0o4000) >= 0:
    print("escaped: sent a message")
print("nothing")
"""
# By numbers of processes; how their own limits stand, and are set by 0, is their business.
SCHEDULING = """\
import resource
for pid in (VICTIM, os.getppid(), 1):
    attempt("limit", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)))
    attempt("processor time", lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)))
    attempt("limits", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
    attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
    attempt("priority of a group", lambda: os.setpriority(os.PRIO_PGRP, pid, 19))
    attempt("processors", lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}))
    attempt("policy", lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
    if libc.syscall(CALLS["ioprio_set"][MACHINE], 1, pid, 3 << 13) >= 0:
        print("escaped: input and output of", pid)
attempt("priority of a user", lambda: os.setpriority(os.PRIO_USER, 0, 19))
"""
MODES = """\
attempt("mode", lambda: os.chmod(CANARY, 0))
attempt("owner", lambda: os.chown(CANARY, os.getuid(), os.getgid()))
attempt("times", lambda: os.utime(CANARY, (1, 1)))
attempt("attribute", lambda: os.setxattr(CANARY, "user.rondo", b"x"))
attempt("mode of the folder", lambda: os.chmod(FOLDER, 0o777))
"""
PROCESSOR = """\
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
os.fork()
while True:
    pass
"""
DISK = """\
written = 0
try:
    for number in range(64):
        with open(f"part{number}", "wb") as file:
            written += file.write(bytes(8 << 20))
            os.fsync(file.fileno())
except OSError as error:
    print(error)
else:
    print("escaped: wrote", written, "bytes")
"""
SHARED_MEMORY = """\
def fill():
    written = 0
    with open("/dev/shm/x", "wb") as file:
        while written < 64 << 20:
            written += file.write(bytes(1 << 20))
attempt("fill /dev/shm", fill)
"""
OUTPUT = "while True: print('x' * 1000)"
ENVIRONMENT = """\
found = [name for name in os.environ if SECRET in name]
for name in ("self", 1, os.getppid(), VICTIM):
    try:
        with open(f"/proc/{name}/environ", "rb") as file:
            if SECRET.encode() in file.read():
                found.append(name)
    except OSError:
        pass
if found:
    print("escaped: found the secret in", found)
"""
OTHERS = """\
for pid in (VICTIM, os.getppid(), 1):
    if libc.ptrace(16, pid, 0, 0) == 0:
        print("escaped: traces", pid)
    data = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)
    if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) > 0:
        print("escaped: reads the memory of", pid)
    attempt(f"memory of {pid}", lambda: open(f"/proc/{pid}/mem", "r+b"))
    attempt(f"descriptors of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    word = ctypes.c_uint64()
    for name, arguments in (
        ("kcmp", (os.getpid(), pid, 0, 0, 0)),
        ("get_robust_list", (pid, ctypes.byref(word), ctypes.byref(word))),
        ("migrate_pages", (pid, 64, ctypes.byref(ctypes.c_uint64(1)), ctypes.byref(ctypes.c_uint64(1)))),
        ("move_pages", (pid, 0, None, None, None, 0)),
    ):
        if libc.syscall(CALLS[name][MACHINE], *arguments) >= 0:
            print("escaped:", name, pid)
    handle = libc.syscall(CALLS["pidfd_open"][MACHINE], pid, 0)
    if handle >= 0 and libc.syscall(CALLS["pidfd_getfd"][MACHINE], handle, 0, 0) >= 0:
        print("escaped: took a descriptor of", pid)
    if handle >= 0 and libc.syscall(CALLS["process_madvise"][MACHINE], handle, vector, 1, 20, 0) >= 0:
        print("escaped: advises on the memory of", pid)
"""
SIGNALS = """\
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import fcntl
for pid in (VICTIM, os.getppid()):  # the kernel sends one when there is something to read
    one, other = socket.socketpair()
    try:
        fcntl.fcntl(one, fcntl.F_SETOWN, pid)
        fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC)
        other.send(b"x")
    except OSError:
        pass
for pid in (VICTIM, os.getppid()):
    for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except OSError:
            pass
"""
DAEMON = """\
import subprocess
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        quiet = subprocess.DEVNULL
        subprocess.Popen(["/bin/sh", "-c", "while :; do sleep 1; done; : " + MARK], stdin=quiet, stdout=quiet,
                         stderr=quiet, start_new_session=True)
        os._exit(0)
    os._exit(0)
time.sleep(0.3)
print("left a daemon")
"""
NAMESPACE = """\
for flag in (0x10000000, 0x00020000, 0x40000000):
    if libc.unshare(flag) == 0:
        print("escaped: unshare", hex(flag))
def child(_):
    return 0
function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(child)
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16))
if libc.clone(function, top, 0x10000000 | 17, None) >= 0:
    print("escaped: clone")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    print("escaped: mount")
attempt("chroot", lambda: os.chroot("."))
"""
PRIVILEGES = """\
attempt("setuid", lambda: os.setuid(0))
attempt("setgid", lambda: os.setgid(0))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("chown", lambda: (open("mine", "w"), os.chown("mine", 12345, 12345)))
attempt("nice", lambda: os.nice(-5))
if libc.prctl(39, 0, 0, 0, 0) != 1:
    print("escaped: programs with the setuid bit get their owner's rights")
"""
DEVICES = """\
for name in ("kvm", "mem", "kmsg", "fuse", "net/tun", "vda", "sda", "nvidia0"):
    path = "/dev/" + name
    attempt(path, lambda: os.open(path, os.O_RDWR))
attempt("mknod", lambda: os.mknod("device", 0o20666, os.makedev(1, 1)))
"""
ANSWERS = f"""\
import struct
forged = struct.pack({ANSWER!r}, 0, 0, 0.0, 6, 0) + b"forged"
targets = list(range(3, 256))
for pid in (os.getppid(), 1):
    for number in range(64):
        try:
            targets.append(os.open(f"/proc/{{pid}}/fd/{{number}}", os.O_WRONLY))
        except OSError:
            pass
for target in targets:
    try:
        os.write(target, forged)
    except OSError:
        pass
print("my own")
"""
NEIGHBOUR = """\
import glob
if PROCESS not in (os.getpid(), os.getppid()):
    attempt("kill", lambda: os.kill(PROCESS, 9))
attempt("folder", lambda: os.listdir(PLACE) if PLACE != os.getcwd() else 1 / 0)
attempt("file", lambda: open(os.path.join(PLACE, "answer-of-another")).read())
attempt("overwrite", lambda: open(os.path.join(PLACE, "answer-of-another"), "r+").write("forged"))
for folder in ("/tmp", "/var/tmp", "/dev/shm"):
    for path in glob.glob(folder + "/**/*another*", recursive=True):
        print("escaped: sees", path)
"""
