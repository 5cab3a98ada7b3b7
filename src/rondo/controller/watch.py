"""The watch: a thread of the controller that asks every host what it is doing, and tells when nothing moves.

HangWatch ── pulse ─▶ each host (a thread that nothing else occupies)     every few seconds
          ◀─ Pulse ──                                                     none: stopped, or the GIL is held
          ── hangs.py: slow, or a hang? who waits for whom? can it end? ─▶ log, or the end of the call

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
from rondo.controller.hangs import Seen, SentCall, describe, describe_work, is_hopeless, slow, waiting_for
from rondo.core.errors import RondoError
from rondo.system import activity
from rondo.system.activity import Pulse
from rondo.system.actor import Failure
from rondo.system.usage import state_of

CALLS = "calls"  # what hangs, where it is not a host that does not answer
SLOW = "slow"  # what is told of CALLS that do not hang, as far as is known
BESIDE, IN_TURN = 0, 1  # the places in Pulse.moves
MOST_SECONDS = 5.0  # between two looks
STACKS_SECONDS = 2.0  # for a host to answer with its stacks
WORKING_SHARE = 0.1  # of a processor: below it, a process does not compute
THREADS_SHARE = 0.02  # below it, a thread does not
_log = logging.getLogger(__name__)


class _Host:
    """What is known of one process. Times are those of the watch."""

    def __init__(self, handle: HostHandle) -> None:
        self.handle = handle
        self.name = f"host {handle.device}"
        self.calls: list[tuple[str, int, str, float]] = []
        """Under way: role, rank, method, and when it was sent; the oldest first."""
        self.given_up = False
        """Its calls are about to fail."""
        self.answer: Future[Pulse] | None = None
        """That it owes."""
        self.pulse = Pulse(0, (0, 0), 0.0, ())
        """The last one; without a process id before the first."""
        self.heard = 0.0
        self.moved = [0.0, 0.0]
        """When, BESIDE and IN_TURN."""
        self.worked = 0.0
        """When it used a processor, or a disk."""
        self.computed = 0.0
        """When a thread with a call in turn used a processor."""
        self.state = ""
        """Of a process that does not answer."""
        self._cpu = 0.0, 0.0

    def ask(self, stacks: bool = False) -> None:
        """Asks the process for its pulse. One of this machine that owes an answer, and is to tell its stacks,
        has to write them to its log, also while a thread holds the GIL.
        """
        if self.answer is None and not self.lost:
            with suppress(RondoError):  # it has just died, which its calls find out
                self.answer = self.handle.pulse(stacks)
        elif stacks and self.answer is not None and self.pulse.pid and self.handle.here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pulse.pid, signal.SIGUSR1)

    def listen(self, now: float) -> None:
        """Takes in what has been answered; without an answer, what the kernel says."""
        answer = self.answer
        if answer is not None and answer.done():
            self.answer = None
            if answer.exception() is None:
                self.hear(answer.result(), now)
        elif answer is not None and self.pulse.pid and self.handle.here:
            self.state, cpu_seconds = state_of(str(self.pulse.pid))
            self._use(cpu_seconds, self.state == "D", now)

    def hear(self, pulse: Pulse, now: float) -> None:
        """Takes in a pulse."""
        before = self.pulse
        for kind in (BESIDE, IN_TURN):
            if pulse.moves[kind] != before.moves[kind]:
                self.moved[kind] = now
        used = sum(deed.cpu_seconds for deed in pulse.deeds) - sum(deed.cpu_seconds for deed in before.deeds)
        if used > THREADS_SHARE * (now - self.heard):
            self.computed = now
        # To write its stacks down takes a processor, and so does having it done by others: that is no work.
        asked = bool(pulse.stacks or before.stacks)
        self._use(pulse.cpu_seconds, any(deed.on_disk for deed in pulse.deeds), now, counts=not asked)
        self.pulse = pulse
        self.heard = now

    def _use(self, cpu_seconds: float, on_disk: bool, now: float, *, counts: bool = True) -> None:
        before, at = self._cpu
        if on_disk or (counts and cpu_seconds - before > WORKING_SHARE * (now - at)):
            self.worked = now
        self._cpu = cpu_seconds, now

    def stacks(self) -> str:
        """Returns the stacks that it has sent, or why there are none."""
        log = self.handle.log
        why = "it does not answer" + (f"; what it could write is at the end of {log}" if log else "")
        return self.pulse.stacks or why

    @property
    def lost(self) -> bool:
        """Says whether it takes no more calls, or will take none soon."""
        return self.given_up or self.handle.broken is not None

    @property
    def in_turn(self) -> bool:
        """Says whether a call in turn is under way there."""
        return any(deed.in_turn for deed in self.pulse.deeds)

    def seen(self, now: float, seconds: float) -> Seen:
        """Returns what there is to say of it where nothing has moved for `seconds`."""
        late = now - self.heard > seconds / 2
        worked = now - self.worked < seconds / 2
        # One that computes may answer late where processors are short. Without answers nobody knows which of
        # its threads it is that computes.
        silent = late and (not worked or now - self.heard >= seconds)
        calls = list(self.calls)
        deeds = self.pulse.deeds
        if silent:  # since its last word it may have ended what it told then
            under_way = {(role, method) for role, _, method, _ in calls}
            deeds = tuple(deed for deed in deeds if deed.call in under_way)
        return Seen(
            self.handle.device,
            self.pulse.pid or None,
            frozenset(self.handle.roles),
            calls=tuple(SentCall(role, rank, method, now - at) for role, rank, method, at in calls),
            deeds=deeds,
            silent_seconds=now - self.heard if silent else None,
            state=self.state,
            owes=not silent and self.handle.owed > 0 and not self.in_turn,
            works=now - self.worked < seconds,
            computes=now - self.computed < seconds / 2 if self.in_turn and not late else worked,
        )


class HangWatch:
    """Looks for hangs between `start` and `close`: it hears of all calls (`CallWatcher`) and looks at the
    hosts.

    device: the kind of the hosts' devices. seconds: without a movement. limit: seconds without an answer,
    after which a host is given up. log: the file where it is written down, for messages.
    """

    def __init__(
        self, handles: Sequence[HostHandle], device: str, seconds: float, limit: float, log: Path | None
    ) -> None:
        self._hosts = [_Host(handle) for handle in handles]
        self._device = device
        self._seconds = seconds
        self._limit = limit
        self._log = log
        self._period = min(MOST_SECONDS, seconds / 4)
        self._now = 0.0
        self._moves = 0, 0
        """Of the controller's process."""
        self._moved = 0.0
        """When it moved, or a call began or ended."""
        self._told: frozenset[str] = frozenset()
        """What hung at the last look, or was SLOW."""
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
        self._hosts[device].calls.append((role, rank, method, self._now))
        self._moved = self._now

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        """See CallWatcher."""
        calls = self._hosts[device].calls
        calls.remove(next(call for call in calls if call[:3] == (role, rank, method)))
        self._moved = self._now

    # ---- on the thread ----

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            for host in self._hosts:
                host.ask()
            if self._closing.wait(self._period):
                return
            now = time.monotonic()
            # Its own time: while this process was stopped itself, it could hear nobody.
            self._now += min(now - last, 2 * self._period)
            last = now
            self._look()

    def _look(self) -> None:
        self._listen()
        hang = self._hang()
        news = set() if CALLS in self._told else hang.keys() - self._told
        if news and hang.keys() == {CALLS} and self._is_slow(hang[CALLS]):
            hang = {SLOW: hang[CALLS]}
        elif news:
            self._ask_for_stacks()
            hang = self._hang()
            if hang:
                self._write_down(hang)
        elif self._told - {SLOW} and not hang:
            _log.warning("it moves again, after %.0f s", self._now - self._since)
        if CALLS in hang and self._end_what_is_hopeless():
            hang = {}
        self._told = frozenset(hang)
        self._end_the_silent()

    def _listen(self) -> None:
        for host in self._hosts:
            host.listen(self._now)
        moves = activity.pulse().moves
        if moves != self._moves:
            self._moves = moves
            self._moved = self._now

    def _hang(self) -> dict[str, float]:
        """Returns what hangs, all calls or processes that do not answer, and for how many seconds."""
        busy = [host for host in self._hosts if host.calls and not host.lost]
        hang = {host.name: self._now - host.heard for host in busy}
        moved = [host.moved[IN_TURN] for host in self._hosts]
        if not any(host.in_turn for host in busy):
            moved += [self._moved, *(host.moved[BESIDE] for host in self._hosts)]
        if busy:
            hang[CALLS] = self._now - max(moved)
        return {what: still for what, still in hang.items() if still >= self._seconds}

    def _is_slow(self, still: float) -> bool:
        """Says whether those whose calls stand still are only slow; the log says so once, in one line."""
        working = slow(self._seen(), still / self._seconds, self._device)
        if working and SLOW not in self._told:
            text = "%s; nothing was counted for %.0f s (cluster.hang_seconds)"
            _log.warning(text, describe_work(working), still)
        return bool(working)

    def _ask_for_stacks(self) -> None:
        """Returns when those who answer have answered with their stacks."""
        asked = [host for host in self._hosts if host.answer is None]
        for host in self._hosts:
            host.ask(stacks=True)
        wait([host.answer for host in asked if host.answer is not None], STACKS_SECONDS)
        self._listen()

    def _write_down(self, hang: dict[str, float]) -> None:
        self._since = self._now - hang.get(CALLS, max(hang.values()))
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
        if not is_hopeless(seen):
            return False
        lines = "; ".join(describe(one, seen) for one in seen if one.takes_part)
        part = [host for host, one in zip(self._hosts, seen, strict=True) if one.takes_part]
        still = f"{self._seconds:g} s (cluster.hang_seconds)"
        self._fail(part, f"nothing has moved for {still}, and nobody computes: {lines}")
        return True

    def _end_the_silent(self) -> None:
        """Fails all calls of hosts that have not answered for as long as a collective may take: whatever they
        are in, stopped or out of reach, nobody would end it.
        """
        for host in self._hosts:
            if host.calls and not host.lost and self._now - host.heard >= self._limit:
                why = f"has not answered for {self._limit:g} s (cluster.timeout_seconds)"
                self._fail([host], f"{host.name} {why}")

    def _fail(self, hosts: Sequence[_Host], why: str) -> None:
        where = f"; the stacks are in {self._log}" if self._log is not None else ""
        _log.error("%s. These calls fail", why)
        failure = Failure(why + where, at=time.time(), outage=True)
        for host in hosts:
            host.given_up = True

        def condemn() -> None:
            for host in hosts:
                host.handle.condemn(failure)

        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(condemn)

    def _seen(self) -> list[Seen]:
        return [host.seen(self._now, self._seconds) for host in self._hosts]
