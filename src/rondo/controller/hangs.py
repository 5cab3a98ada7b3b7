"""Hangs: whether it is one, in words, and whether it can ever end: pure functions of what was seen of every
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rondo.platform import on_host
from rondo.system.activity import Deed

PATIENCE = 5  # times `cluster.hang_seconds`: how long nothing may move where all compute, without stacks
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
    """The worker group."""
    rank: int
    """The worker's rank in its group."""
    method: str
    """The worker's method."""
    seconds: float
    """How long ago it was sent."""


@dataclass(frozen=True)
class Seen:
    """What the watch knows of a host process when nothing moves."""

    device: int
    """The host's number."""
    pid: int | None
    """None: it has never answered."""
    roles: frozenset[str]
    """The worker groups that have a worker there."""
    calls: tuple[SentCall, ...]
    """The calls that it has not answered."""
    deeds: tuple[Deed, ...]
    """Of one that does not answer: the last ones that it told, of the calls that it still has."""
    silent_seconds: float | None = None
    """None: it answers, or is a little late with it, and computes."""
    state: str = ""
    """Of one that does not answer, the kernel's letter (`usage.state_of`), where it is on this machine."""
    works: bool = False
    """It has used a processor, or a disk, in the last `cluster.hang_seconds`."""
    computes: bool = False
    """It used a processor in the latter half of that time; if it is in a call in turn, that thread did, as
    far as it has told.
    """
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
    def waits(self) -> bool:
        """Says whether it is in something that is over within seconds, or never."""
        return self.silent_seconds is None and any(deed.collective or deed.bound for deed in self.in_turn)

    @property
    def may_go_on(self) -> bool:
        """Says whether it may move again by itself: it computes, is to begin, or in what may take long."""
        if self.silent_seconds is not None and self.state in ("T", "t", "Z"):
            return False  # it is stopped, or has ended: others would have to let it go on
        long = any(deed.bound is False and not deed.collective for deed in self.in_turn)
        return self.works or self.owes or long


def is_hopeless(processes: Sequence[Seen]) -> bool:
    """Says whether a hang of calls in turn can never end: somebody is in something with a known bound, and
    nobody may go on by itself who takes part, or who computes and may come to its part yet.
    """
    part = [one for one in processes if one.takes_part]
    may_come = any(one.works and one.calls for one in processes)
    return any(one.waits for one in part) and not may_come and not any(one.may_go_on for one in part)


def slow(processes: Sequence[Seen], times: float, device: str) -> list[Seen]:
    """Returns who is at the calls under way if they are only slow, as far as is known: all compute, on a CPU,
    and none is in a collective. On a card, and in a collective, a processor is used for waiting, too. Returns
    nobody where stacks are due, as when nothing has moved for PATIENCE `times` hang_seconds.
    """
    part = [one for one in processes if one.takes_part] or [one for one in processes if one.calls]
    if not on_host(device) or times >= PATIENCE:
        return []
    return part if all(one.computes and not one.waits and one.silent_seconds is None for one in part) else []


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
    deeds = _deeds(process, others)
    if process.silent_seconds is None:
        return f"{who}: {deeds}"
    why = _STATES.get(process.state, "something in it may hold Python's lock (GIL)")
    return f"{who} has not answered for {process.silent_seconds:.0f} s: {why}; the last it said: {deeds}"


def describe_work(processes: Sequence[Seen]) -> str:
    """Writes what each slow process does."""
    return "; ".join(f"host {one.device} works: {_deeds(one, processes)}" for one in processes)


def _deeds(process: Seen, others: Sequence[Seen]) -> str:
    return "; ".join(_deed(deed, process, others) for deed in process.deeds) or "nothing to do"


def _deed(deed: Deed, process: Seen, others: Sequence[Seen]) -> str:
    text = f"{' > '.join(deed.path)}, since {deed.seconds:.0f} s"
    if deed.times > 1:
        text = f"{deed.times} x {text}"
    if not deed.collective:
        return text
    late = [one for one in others if one is not process and deed.call[0] in one.roles and not one.waits]
    hosts = ", ".join(f"host {one.device} ({_short(one)})" for one in late)
    hosts = hosts or "the others, which are in collectives, too"
    return f"{text}, waits in {deed.collective} for {hosts}"


def _short(process: Seen) -> str:
    if process.silent_seconds is not None:
        return "which does not answer"
    return "; ".join(deed.path[-1] for deed in process.in_turn) or "in no call"
