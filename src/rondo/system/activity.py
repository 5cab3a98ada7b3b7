"""What this process is doing, for the watch (`controller/watch.py`), which looks whether it goes on.

    with Activity("actor[0].update_actor", in_turn=True):
        with Activity("forward and backward"):
            progress(1, of=7)                           micro-batches, bytes: whatever is counted

To enter, to leave and to count is to move. None of them takes a lock: a count may be lost.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from itertools import dropwhile
from types import FrameType
from typing import Self

from rondo.system.usage import children_cpu_seconds, state_of

# A thread whose innermost frame is here waits for other ranks. Checkpoints' files are written here, too.
_TORCH = f"{os.sep}torch{os.sep}"
_COLLECTIVES = f"{_TORCH}distributed{os.sep}"
_FILES = f"{_COLLECTIVES}checkpoint{os.sep}"
# Those of DTensors (parallel axes) wait here, in an operator, and Megatron's stages for all that was begun on
# their card: through the frames of torch that call it.
_OPERATORS = (f"{_TORCH}_ops.py", f"{_TORCH}_library{os.sep}", f"{_TORCH}cuda{os.sep}")
_STAGES = f"{os.sep}pipeline_parallel{os.sep}p2p_communication.py"
_WAITS = (f"{_COLLECTIVES}_functional_collectives.py", _STAGES)
# Where threads of pools and links are that wait for work.
_IDLE = {
    ("thread.py", "_worker"),
    ("actor.py", "_write"),
    ("frames.py", "_exactly"),
    ("process.py", "_watch"),
}
# How the stacks of threads and programs begin.
_BEGINNINGS = {"<frozen runpy>", "forkserver.py", "guard.py", "threading.py", "thread.py"}

# Each process's own: how often it moved, (beside the turn, in turn); and what is under way.
_moves = [0, 0]
_running: dict[int, Activity] = {}
_current: ContextVar[Activity | None] = ContextVar("rondo_activity", default=None)


@dataclass(eq=False, slots=True)
class Activity:
    """Something that this process does from the beginning of a `with` to its end. One that the same task or
    thread is in already is around it.
    """

    name: str
    """What people read of it; a call is named `role[rank].method`."""
    _: KW_ONLY
    in_turn: bool = False
    """It runs in the controller's order, and so does all inside of it: collectives are there."""
    bound: bool | None = None
    """True: it is over within seconds or never, so a hang in it ends the run. False: it may take any time, or
    has a limit of its own. None: as what it is inside of, or unknown.
    """
    in_bytes: bool = False
    """Whether `done` and `total` count bytes."""
    done: int = field(default=0, init=False)
    """So far; `progress` counts."""
    total: int = field(default=0, init=False)
    """How many they will be; 0: unknown."""
    thread: tuple[int, int] = field(init=False)
    """Python's number of its thread, and the kernel's."""
    started: float = field(init=False)
    """Seconds of `time.monotonic`."""
    _parent: Activity | None = field(init=False)

    def __enter__(self) -> Self:
        self._parent = parent = _current.get()
        if parent is not None:
            self.in_turn = parent.in_turn
            self.bound = parent.bound if self.bound is None else self.bound
        self.thread = threading.get_ident(), threading.get_native_id()
        self.started = time.monotonic()
        _current.set(self)
        _running[id(self)] = self
        _moves[self.in_turn] += 1
        return self

    def __exit__(self, *exc: object) -> None:
        _running.pop(id(self), None)
        _current.set(self._parent)
        _moves[self.in_turn] += 1

    def path(self) -> tuple[str, ...]:
        """Returns the names of the activities around this one, outermost first, then its own, each with its
        count.
        """
        count = ""
        if self.in_bytes:
            total = f" of {self.total / 2**20:.0f}" if self.total else ""
            count = f" {self.done / 2**20:.0f}{total} MiB"
        elif self.total:
            count = f" {self.done} of {self.total}"
        outer = () if self._parent is None else self._parent.path()
        return (*outer, self.name + count)


def progress(count: int = 1, *, of: int = 0) -> None:
    """Counts in the innermost activity of this task or thread; outside of all it is movement all the same.

    of: how many they will be.
    """
    inner = _current.get()
    if inner is not None:
        inner.done += count
        inner.total = of or inner.total
    _moves[inner is not None and inner.in_turn] += 1


@dataclass(frozen=True)
class Deed:
    """An innermost activity, as other processes see it."""

    path: tuple[str, ...]
    """What it is inside of, outermost first, then itself."""
    seconds: float
    """Since it began."""
    in_turn: bool
    """As `Activity` has it."""
    bound: bool | None
    """As `Activity` has it."""
    collective: str
    """The function of torch.distributed in which its thread is; empty: in none."""
    on_disk: bool
    """Its thread waits for a disk, or a file system."""
    times: int = 1
    """How many such deeds there are, of which this is the oldest."""
    cpu_seconds: float = 0.0
    """Of its thread, if it is in turn."""

    @property
    def call(self) -> tuple[str, str]:
        """Returns role and method of the call that it is part of: "actor[0].update_actor"."""
        name = self.path[0]
        return name.partition("[")[0], name.rpartition(".")[2].partition(" ")[0]


@dataclass(frozen=True)
class Pulse:
    """A process's sign of life."""

    pid: int
    """On its own machine; 0: it has not answered yet."""
    moves: tuple[int, int]
    """How often it moved so far, beside the turn and in turn."""
    cpu_seconds: float
    """Its own, and of all that it has started: a compiler, an engine."""
    deeds: tuple[Deed, ...]
    """The innermost of its activities; those with the same path are one deed."""
    stacks: str = ""
    """Of all its threads, where they were asked for."""


def pulse(stacks: bool = False) -> Pulse:
    """Returns what this process is doing; from any thread."""
    frames = _frames()
    running = list(_running.values())
    outer = {id(one._parent) for one in running}
    alike: dict[tuple[str, ...], list[Activity]] = {}
    for one in running:
        if id(one) not in outer:
            alike.setdefault(one.path(), []).append(one)
    deeds = tuple(_deed(path, ones, frames) for path, ones in alike.items())
    cpu_seconds = time.process_time() + children_cpu_seconds()
    return Pulse(os.getpid(), (_moves[0], _moves[1]), cpu_seconds, deeds, _stacks() if stacks else "")


def _frames() -> dict[int, FrameType]:
    """Returns where each thread is, but for this one: its frame would hold these, and they it. Then, until
    the garbage collector came, they would hold what their functions' variables were: the tensors of a pass.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def _deed(path: tuple[str, ...], alike: list[Activity], frames: dict[int, FrameType]) -> Deed:
    """Returns what other processes see of activities with the same path. frames: those of all threads."""
    oldest = min(alike, key=lambda one: one.started)
    ident, native = oldest.thread
    state, cpu_seconds = state_of(f"self/task/{native}") if oldest.in_turn else ("", 0.0)
    return Deed(
        path=path,
        seconds=time.monotonic() - oldest.started,
        in_turn=oldest.in_turn,
        bound=oldest.bound,
        collective=_collective(frames.get(ident)) if oldest.in_turn else "",
        on_disk=state == "D",
        times=len(alike),
        cpu_seconds=cpu_seconds,
    )


def _collective(frame: FrameType | None) -> str:
    """Returns the function of torch.distributed in which a thread waits for other ranks; else ""."""
    innermost = frame
    while frame is not None and any(part in frame.f_code.co_filename for part in _OPERATORS):
        frame = frame.f_back
    if frame is None:
        return ""
    where = frame.f_code.co_filename
    waits = where.endswith(_WAITS) or (frame is innermost and _COLLECTIVES in where and _FILES not in where)
    return frame.f_code.co_name if waits else ""


def _stacks() -> str:
    """Returns the stacks of all threads that do not just wait for work, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in _frames().items():
        stack = traceback.extract_stack(frame)
        inner = os.path.basename(stack[-1].filename), stack[-1].name
        if inner not in _IDLE:
            told = dropwhile(lambda one: os.path.basename(one.filename) in _BEGINNINGS, stack)
            lines = [f"  {one.filename}:{one.lineno} {one.name}: {one.line}" for one in told]
            parts.append("\n".join([f"thread {names.get(ident, '?')}", *lines]))
    return "\n".join(parts)
