"""The watch: a thread of the controller that asks every host what it is doing, and tells when nothing moves.

HangWatch ── pulse ─▶ each host (a thread that nothing else occupies)     every few seconds
          ◀─ Pulse ──                                                     none: stopped, or the GIL is held
          ── hangs.py: is it a hang, who waits for whom, will it ever end? ─▶ log, or the end of the call

Hosts' calls are of two kinds: those in turn (training, weights), and those beside them (episodes, which wait
for the trainer while it holds them). So a hang is that no call in turn moves in any process, or that nothing
moves at all; or one process that does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

from rondo.controller.calls import HostHandle
from rondo.controller.hangs import Seen, SentCall, describe, is_hopeless, waiting_for
from rondo.core.errors import RondoError
from rondo.system import activity
from rondo.system.activity import Deed, Pulse
from rondo.system.actor import Failure
from rondo.system.usage import state_of

CALLS = "calls"
BESIDE, IN_TURN = 0, 1  # the places in Pulse.moves
MOST_SECONDS = 5.0  # between two looks
STACKS_SECONDS = 2.0  # for a host to answer with its stacks
WORKING_SHARE = 0.1  # of a processor: below it, a process does not compute
_log = logging.getLogger(__name__)


class _Host:
    """What is known of one process. Times are those of the watch."""

    def __init__(self, handle: HostHandle | None) -> None:
        self.handle = handle
        self.name = "the controller" if handle is None else f"host {handle.device}"
        self.calls: dict[tuple[str, int, str], list[float]] = {}
        """Under way: role, rank and method; when each was sent."""
        self.given_up = False
        """Its calls are about to fail."""
        self.answer: Future[Pulse] | None = None
        """That it owes."""
        self.pulse: Pulse | None = None
        self.heard = 0.0
        self.moved = [0.0, 0.0]
        """When, BESIDE and IN_TURN."""
        self.worked = 0.0
        """When it used a processor, or a disk."""
        self.state = ""
        """Of a process that does not answer."""
        self._cpu = 0.0, 0.0

    def ask(self, stacks: bool = False) -> None:
        """Asks the process for its pulse, unless it owes an answer."""
        if self.answer is not None or self.handle is None or self.lost:
            return
        with suppress(RondoError):  # it has just died, which its calls find out
            self.answer = self.handle.pulse(stacks)

    def signal(self) -> None:
        """Has a process of this machine that does not answer write its stacks to its log, whoever has the
        GIL.
        """
        if self.handle is not None and self.handle.here and self.pulse is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pulse.pid, signal.SIGUSR1)

    def listen(self, now: float) -> None:
        """Takes in what has been answered; without an answer, what the kernel says."""
        if self.handle is None:
            self._hear(activity.pulse(), now)
        elif self.answer is None:
            return
        elif self.answer.done():
            answer = self.answer
            self.answer = None
            if answer.exception() is None:
                self._hear(answer.result(), now)
        elif self.pulse is not None and self.handle.here:
            self.state, cpu_seconds = state_of(str(self.pulse.pid))
            self._work(cpu_seconds, self.state == "D", now)

    def _hear(self, pulse: Pulse, now: float) -> None:
        for kind in (BESIDE, IN_TURN):
            if self.pulse is None or pulse.moves[kind] != self.pulse.moves[kind]:
                self.moved[kind] = now
        # To write its stacks down takes a processor, and so does having it done by others: that is no work.
        asked = bool(pulse.stacks) or (self.pulse is not None and bool(self.pulse.stacks))
        self._work(pulse.cpu_seconds, any(deed.on_disk for deed in pulse.deeds), now, counts=not asked)
        self.pulse = pulse
        self.heard = now

    def _work(self, cpu_seconds: float, on_disk: bool, now: float, *, counts: bool = True) -> None:
        before, at = self._cpu
        if on_disk or (counts and cpu_seconds - before > WORKING_SHARE * (now - at)):
            self.worked = now
        self._cpu = cpu_seconds, now

    def stacks(self) -> str:
        """Returns the stacks that it has told, or why there are none."""
        if self.pulse is not None and self.pulse.stacks:
            return self.pulse.stacks
        log = None if self.handle is None else self.handle.log
        return "it does not answer" + (f"; what it could write is at the end of {log}" if log else "")

    @property
    def lost(self) -> bool:
        """Says whether it takes no more calls, or will take none soon."""
        return self.given_up or (self.handle is not None and self.handle.broken is not None)

    @property
    def in_turn(self) -> bool:
        """Says whether a call in turn is under way there."""
        return self.pulse is not None and any(deed.in_turn for deed in self.pulse.deeds)

    def seen(self, now: float, seconds: float) -> Seen:
        """Returns what there is to say of it where nothing has moved for `seconds`."""
        assert self.handle is not None
        silent = now - self.heard > seconds / 2
        deeds = () if self.pulse is None else self.pulse.deeds
        if silent:  # since its last word it may have ended what it told then
            under_way = {(role, method) for role, _, method in list(self.calls)}
            deeds = tuple(deed for deed in deeds if _call_of(deed) in under_way)
        return Seen(
            self.handle.device,
            None if self.pulse is None else self.pulse.pid,
            frozenset(self.handle.roles),
            calls=tuple(
                SentCall(*call, now - at) for call, sent in list(self.calls.items()) for at in list(sent)
            ),
            deeds=deeds,
            silent_seconds=now - self.heard if silent else None,
            state=self.state,
            owes=not silent and self.handle.owed > 0 and not self.in_turn,
            works=now - self.worked < seconds,
        )


def _call_of(deed: Deed) -> tuple[str, str]:
    """Returns role and method of the call that a deed is part of: "actor[0].update_actor"."""
    name = deed.path[0]
    return name.partition("[")[0], name.rpartition(".")[2].partition(" ")[0]


class HangWatch:
    """Is told of all calls (`CallWatcher`), and looks at the hosts between `start` and `close`.

    seconds: without a movement. limit: seconds without an answer, after which a host is given up. log: the
    file where it is written down, for messages.
    """

    def __init__(self, handles: Sequence[HostHandle], seconds: float, limit: float, log: Path | None) -> None:
        self._seconds = seconds
        self._limit = limit
        self._period = min(MOST_SECONDS, seconds / 4)
        self._log = log
        self._hosts = [_Host(handle) for handle in handles]
        self._controller = _Host(None)
        self._now = 0.0
        self._told: frozenset[str] = frozenset()
        self._since = 0.0
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rondo-hang-watch", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._closing.set()

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None:
        """See CallWatcher."""
        host = self._hosts[device]
        host.calls.setdefault((role, rank, method), []).append(self._now)
        host.moved[BESIDE] = self._now

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        """See CallWatcher."""
        host = self._hosts[device]
        host.moved[BESIDE] = self._now
        sent = host.calls[role, rank, method]
        sent.pop(0)
        if not sent:
            del host.calls[role, rank, method]

    # ---- on the thread ----

    def _run(self) -> None:
        last = time.monotonic()
        self._ask()
        while not self._closing.wait(self._period):
            now = time.monotonic()
            # Its own time: while this process was stopped itself, it could hear nobody.
            self._now += min(now - last, 2 * self._period)
            last = now
            self._look()

    def _look(self) -> None:
        self._listen()
        hang = self._hang()
        if CALLS not in self._told and hang - self._told:
            self._ask_for_stacks()
            hang = self._hang()
            if hang:
                self._since = self._now - self._seconds
                self._write_down(hang)
        elif self._told and not hang:
            _log.warning("it moves again, after %.0f s", self._now - self._since)
        if CALLS in hang and self._end_what_is_hopeless():
            hang = frozenset()
        self._end_the_silent()
        self._told = hang
        self._ask()

    def _ask(self) -> None:
        for host in self._hosts:
            host.ask()

    def _listen(self) -> None:
        for host in (*self._hosts, self._controller):
            host.listen(self._now)

    def _still(self, hosts: Sequence[_Host], *kinds: int) -> float:
        """Returns for how long none of these has moved."""
        return self._now - max(host.moved[kind] for host in hosts for kind in kinds)

    def _hang(self) -> frozenset[str]:
        """Returns what hangs: all calls, or processes that do not answer."""
        busy = [host for host in self._hosts if host.calls and not host.lost]
        hangs = {host.name for host in busy if self._now - host.heard >= self._seconds}
        in_turn = any(host.in_turn for host in busy) and self._still(self._hosts, IN_TURN) >= self._seconds
        everybody = [*self._hosts, self._controller]
        if in_turn or (busy and self._still(everybody, IN_TURN, BESIDE) >= self._seconds):
            hangs.add(CALLS)
        return frozenset(hangs)

    def _ask_for_stacks(self) -> None:
        """Returns when those who answer have answered with their stacks."""
        asked: list[Future[Pulse]] = []
        for host in self._hosts:
            if host.answer is not None:
                host.signal()
                continue
            host.ask(stacks=True)
            if host.answer is not None:
                asked.append(host.answer)
        wait(asked, STACKS_SECONDS)
        self._listen()

    def _write_down(self, hang: frozenset[str]) -> None:
        seen = self._seen()
        parts = {host.name: host.stacks() for host in self._hosts}
        own = activity.pulse(stacks=True)
        if own.pid not in {one.pid for one in seen}:  # else the controller is the host
            parts["the controller"] = own.stacks
        what = "nothing has moved" if CALLS in hang else f"{', '.join(sorted(hang))} did not answer"
        _log.warning(
            "%s for %.0f s (cluster.hang_seconds). The controller waits for %s:\n%s\n%s",
            what,
            self._now - self._since,
            waiting_for(seen),
            "\n".join(f"  {describe(one, seen)}" for one in seen),
            "\n".join(f"--- stacks of {who} ---\n{text}" for who, text in parts.items()),
        )

    def _end_what_is_hopeless(self) -> bool:
        """Fails the calls in turn where those who take part only wait for each other; says whether it did."""
        seen = self._seen()
        if self._still(self._hosts, IN_TURN) < self._seconds or not is_hopeless(seen):
            return False
        lines = "; ".join(describe(one, seen) for one in seen if one.takes_part)
        still = f"nothing has moved for {self._seconds:g} s (cluster.hang_seconds)"
        part = [host for host, one in zip(self._hosts, seen, strict=True) if one.takes_part]
        self._fail(part, f"{still}, and nobody computes: {lines}")
        return True

    def _end_the_silent(self) -> None:
        """Fails all calls of hosts that have not answered for as long as a collective may take: whatever they
        are in, stopped or out of reach, nobody would end it.
        """
        silent = [host for host in self._hosts if host.calls and self._now - host.heard >= self._limit]
        for host in silent:
            if not host.lost:
                self._fail(
                    [host], f"{host.name} has not answered for {self._limit:g} s (cluster.timeout_seconds)"
                )

    def _fail(self, hosts: Sequence[_Host], why: str) -> None:
        where = f"; the stacks are in {self._log}" if self._log is not None else ""
        _log.error("%s. These calls fail", why)
        failure = Failure(why + where, at=time.time(), outage=True)
        handles = [host.handle for host in hosts if host.handle is not None]
        for host in hosts:
            host.given_up = True

        def condemn() -> None:
            for handle in handles:
                handle.condemn(failure)

        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(condemn)

    def _seen(self) -> list[Seen]:
        return [host.seen(self._now, self._seconds) for host in self._hosts]
