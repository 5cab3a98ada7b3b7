"""Hangs, in words, and whether one can ever end: pure functions of what was seen of every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rondo.system.activity import Deed

_STATES = {
    "T": "it is stopped (SIGSTOP, or a debugger)",
    "t": "a debugger has stopped it",
    "D": "it waits for a disk or a file system",
    "Z": "it has ended",
    "": "its machine may be gone, or out of reach",
}


@dataclass(frozen=True)
class SentCall:
    """A call for whose end the controller waits."""

    role: str
    rank: int
    method: str
    seconds: float


@dataclass(frozen=True)
class Seen:
    """What the watch knows of a host process when nothing moves."""

    device: int
    pid: int | None
    """None: it has never answered."""
    roles: frozenset[str]
    calls: tuple[SentCall, ...]
    deeds: tuple[Deed, ...]
    """Of one that does not answer: the last ones that it told, of the calls that it still has."""
    silent_seconds: float | None = None
    """None: it answers."""
    state: str = ""
    """Of one that does not answer, the kernel's letter (`usage.state_of`), where it is on this machine."""
    works: bool = False
    """It has used a processor, or a disk, in the last `cluster.hang_seconds`."""
    owes: bool = False
    """It answers, and is in no call in turn, but one is under way: on the way to it, behind another, or its
    answer on the way back."""

    @property
    def in_turn(self) -> tuple[Deed, ...]:
        """Returns what it does of the calls in turn."""
        return tuple(deed for deed in self.deeds if deed.in_turn)

    @property
    def takes_part(self) -> bool:
        """Says whether somebody may wait for its part of a call in turn."""
        return self.owes or bool(self.in_turn) or (self.silent_seconds is not None and bool(self.calls))

    @property
    def is_stopped(self) -> bool:
        """Says whether it stands still, whatever it was in, until somebody else lets it go on."""
        return self.silent_seconds is not None and self.state in ("T", "t", "Z")

    @property
    def waits(self) -> bool:
        """Says whether it is in something that is over within seconds, or never."""
        return self.silent_seconds is None and any(deed.collective or deed.bound for deed in self.in_turn)

    @property
    def may_go_on(self) -> bool:
        """Says whether it may move again by itself: it computes, is to begin, or in what may take long."""
        if self.is_stopped:
            return False
        long = any(deed.bound is False and not deed.collective for deed in self.in_turn)
        return self.works or self.owes or long


def is_hopeless(processes: Sequence[Seen]) -> bool:
    """Says whether a hang of calls in turn can never end: somebody is in something with a known bound, and
    nobody may go on by itself who takes part, or who computes and may come to its part yet.
    """
    part = [one for one in processes if one.takes_part]
    may_come = any(one.works and one.calls for one in processes)
    return any(one.waits for one in part) and not may_come and not any(one.may_go_on for one in part)


def waiting_for(processes: Sequence[Seen]) -> str:
    """Writes which calls the controller waits for: "actor.update_actor (ranks 0, 1; since 63 s)"."""
    calls: dict[tuple[str, str], list[SentCall]] = {}
    for process in processes:
        for call in process.calls:
            calls.setdefault((call.role, call.method), []).append(call)
    parts = []
    for (role, method), sent in calls.items():
        ranks = sorted({call.rank for call in sent})
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        number = f"{len(sent)} calls, " if len(sent) > len(ranks) else ""
        parts.append(f"{role}.{method} ({number}{who}; since {max(call.seconds for call in sent):.0f} s)")
    return " and ".join(parts) or "nothing"


def describe(process: Seen, others: Sequence[Seen]) -> str:
    """Writes one line: where a process is, and for whom it waits there."""
    who = f"host {process.device}" + ("" if process.pid is None else f" (pid {process.pid})")
    deeds = "; ".join(_deed(deed, process, others) for deed in process.deeds) or "nothing to do"
    if process.silent_seconds is None:
        return f"{who}: {deeds}"
    why = _STATES.get(process.state, "something in it may hold Python's lock (GIL)")
    return f"{who} has not answered for {process.silent_seconds:.0f} s: {why}; the last it said: {deeds}"


def _deed(deed: Deed, process: Seen, others: Sequence[Seen]) -> str:
    text = f"{' > '.join(deed.path)}, since {deed.seconds:.0f} s"
    if deed.times > 1:
        text = f"{deed.times} x {text}"
    if not deed.collective:
        return text
    role = deed.path[0].partition("[")[0]
    late = [one for one in others if one is not process and role in one.roles and not one.waits]
    hosts = ", ".join(f"host {one.device} ({_short(one)})" for one in late)
    hosts = hosts or "the others, which are in collectives, too"
    return f"{text}, waits in {deed.collective} for {hosts}"


def _short(process: Seen) -> str:
    if process.silent_seconds is not None:
        return "which does not answer"
    return "; ".join(deed.path[-1] for deed in process.in_turn) or "in no call"
