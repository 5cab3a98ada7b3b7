"""What this process is doing, for whoever watches that it goes on (`controller/watch.py`).

    with Activity("actor[0].update_actor", in_turn=True):
        with Activity("forward and backward"):
            progress(1, of=7)                           micro-batches, bytes: whatever is counted

To enter, to leave and to count is to move. None of them takes a lock: a lost count does no harm.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import dropwhile
from types import FrameType, TracebackType
from typing import Self

from rondo.system.usage import children_cpu_seconds, state_of

# A thread whose innermost frame is here waits for other ranks. Checkpoints' files are written here, too.
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}"
_FILES = f"{_COLLECTIVES}checkpoint{os.sep}"
# Those of DTensors (parallel axes) wait here, in an operator: through the frames of torch that call one.
_OPERATORS = (f"{os.sep}torch{os.sep}_ops.py", f"{os.sep}torch{os.sep}_library{os.sep}")
_WAITS = f"{_COLLECTIVES}_functional_collectives.py"
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


class Activity:
    """Something that this process does from `with` to its end, inside of what the same task or thread does.

    in_turn: a call that runs in the controller's order, as all that is inside of it: collectives are there.
    bound: True, it is over within seconds or never, so a hang in it ends the run; False, it may take any
    time, or has a limit of its own; None, as what it is inside of, or unknown. in_bytes: what is counted.
    """

    __slots__ = ("_parent", "bound", "done", "in_bytes", "in_turn", "name", "started", "thread", "total")

    def __init__(
        self, name: str, *, in_turn: bool = False, bound: bool | None = None, in_bytes: bool = False
    ) -> None:
        self.name = name
        self.in_turn = in_turn
        self.bound = bound
        self.in_bytes = in_bytes
        self.done = 0
        self.total = 0

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.pop(id(self), None)
        _current.set(self._parent)
        _moves[self.in_turn] += 1

    def path(self) -> tuple[str, ...]:
        """Returns what this is inside of, outermost first, then itself, each with its count."""
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
    if inner is None:
        _moves[False] += 1
        return
    inner.done += count
    inner.total = of or inner.total
    _moves[inner.in_turn] += 1


@dataclass(frozen=True)
class Deed:
    """An activity without another one inside, as others see it."""

    path: tuple[str, ...]
    """What it is inside of, outermost first, then itself."""
    seconds: float
    """Since it began."""
    in_turn: bool
    bound: bool | None
    collective: str
    """The function of torch.distributed in which its thread is; empty: in none."""
    on_disk: bool
    """Its thread waits for a disk, or a file system."""
    times: int = 1
    """How many such deeds there are, of which this is the oldest."""


@dataclass(frozen=True)
class Pulse:
    """A process's word that it lives. stacks: of all its threads, where they were asked for."""

    pid: int
    moves: tuple[int, int]
    """How often it moved so far, beside the turn and in turn."""
    cpu_seconds: float
    """Its own, and of all that it has started: a compiler, an engine."""
    deeds: tuple[Deed, ...]
    stacks: str = ""


def pulse(stacks: bool = False) -> Pulse:
    """Returns what this process is doing; from any thread."""
    frames = sys._current_frames()
    running = list(_running.values())
    outer = {id(one._parent) for one in running}
    found: dict[tuple[str, ...], Deed] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for one in running:
        if id(one) in outer:
            continue
        ident, native = one.thread
        frame = frames.get(ident)
        deed = Deed(
            path=one.path(),
            seconds=time.monotonic() - one.started,
            in_turn=one.in_turn,
            bound=one.bound,
            collective=_collective(frame) if one.in_turn else "",
            on_disk=one.in_turn and state_of(f"self/task/{native}")[0] == "D",
        )
        counts[deed.path] += 1
        if deed.path not in found or deed.seconds > found[deed.path].seconds:
            found[deed.path] = deed
    deeds = tuple(replace(deed, times=counts[path]) for path, deed in found.items())
    text = _stacks() if stacks else ""
    return Pulse(
        os.getpid(), (_moves[0], _moves[1]), time.process_time() + children_cpu_seconds(), deeds, text
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
    """Returns the stack of every thread, innermost frame last, but of those that only wait for work."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        inner = os.path.basename(frames[-1].filename), frames[-1].name
        if ident != threading.get_ident() and inner not in _IDLE:
            told = dropwhile(lambda one: os.path.basename(one.filename) in _BEGINNINGS, frames)
            lines = [f"  {one.filename}:{one.lineno} {one.name}: {one.line}" for one in told]
            parts.append("\n".join([f"thread {names.get(ident, '?')}", *lines]))
    return "\n".join(parts)
