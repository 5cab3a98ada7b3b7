"""Who is to blame for a process that dies, and how often one is started again: one policy, for engines,
episode workers, scorers and MCP servers.

    a process dies ─▶ what ran in it is suspected, and runs again alone ─┬─▶ it ends: innocent
                                                                         └─▶ a process dies of it: guilty

`Supervisor` only decides: no clock, no process, and no lock (its users have one, or one event loop). `Pool`
is several processes of one kind under it.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rondo.core.errors import RondoError
from rondo.system.border import heard

K = TypeVar("K", bound=Hashable)
P = TypeVar("P", bound="Pooled")
_REMEMBER = 4096  # keys that saw a death last


@dataclass(frozen=True)
class Supervision:
    """The numbers of the policy, for one kind of process."""

    restarts: int | None
    """So many processes are started in the place of dead ones, but for deaths that a key is guilty of; None:
    any number.
    """
    deaths: int
    """So many make a key guilty that saw them, the last one while nothing else ran in the process."""
    forgiven: int = 0
    """So many a key may see before it is suspected: where much runs at once, and to run it all alone takes
    long, for processes also die of what no key is to blame for.
    """


class Supervisor(Generic[K]):
    """Counts the deaths of one kind of process, and which keys (of requests, episodes, calls) ran in them.
    The `remember` keys that saw a death last are known, also when they are issued anew.
    """

    def __init__(self, numbers: Supervision, remember: int = _REMEMBER) -> None:
        self.numbers = numbers
        self._remember = remember
        # Which deaths a key has seen, by their numbers.
        self._seen: OrderedDict[K, list[int]] = OrderedDict()
        self._guilty: set[K] = set()
        self._num_deaths = 0
        # Those that a key is guilty of, and how many there were when a process last did something.
        self._explained: set[int] = set()
        self._num_before = 0

    def died(self, running: Collection[K] = ()) -> K | None:
        """Notes that a process died while these keys ran in it. Returns the guilty key: all deaths that it
        saw are explained, and keys that saw no others are suspected no more.
        """
        self._num_deaths += 1
        for key in running:
            self._seen.setdefault(key, []).append(self._num_deaths)
            self._seen.move_to_end(key)
        guilty = None
        if len(running) == 1 and self.num_deaths(*running) >= self.numbers.deaths:
            (guilty,) = running
            self._guilty.add(guilty)
            self._explained.update(self._seen[guilty])
            self._seen = OrderedDict(
                (key, seen)
                for key, seen in self._seen.items()
                if key in self._guilty or not self._explained.issuperset(seen)
            )
        while len(self._seen) > self._remember:
            self.ended(next(iter(self._seen)))
        return guilty

    def num_deaths(self, key: K) -> int:
        """Counts the deaths that a key has seen."""
        return len(self._seen.get(key, ()))

    def is_suspect(self, key: K) -> bool:
        """Says whether a key must run alone: it saw more deaths than are forgiven, and did not end since."""
        return self.num_deaths(key) > self.numbers.forgiven

    def ended(self, key: K) -> None:
        """Clears a key that ran to its end."""
        self._seen.pop(key, None)
        self._guilty.discard(key)

    def worked(self) -> None:
        """Notes that a process has done something: where only deaths in a row count, those so far are
        forgotten.
        """
        self._num_before = self._num_deaths

    @property
    def num_unexplained(self) -> int:
        """Counts the deaths, in a row, that no key is guilty of."""
        return len(set(range(self._num_before + 1, self._num_deaths + 1)) - self._explained)

    @property
    def gives_up(self) -> bool:
        """Says whether no other process may be started in place of the one that died last."""
        return self.numbers.restarts is not None and self.num_unexplained > self.numbers.restarts


def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Returns the task of a process that starts. Those who wait for it hear that it failed, and nobody does
    where none waits any more, because the run has ended.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(heard)
    return task


class Pooled(ABC):
    """A process of a pool."""

    def __init__(self) -> None:
        self.running: set[Hashable] = set()
        """The keys of what is in it."""
        self.judged = False
        """Its death was counted."""
        self.guilty: Hashable = None
        """The key that it died of."""

    @property
    @abstractmethod
    def ended(self) -> object:
        """Says whether the process takes no more work."""

    @abstractmethod
    def end(self) -> None:
        """Ends the process at once. From any thread."""


class Pool(Generic[P]):
    """A pool of `count` processes, each started when there is something for it to run, and of one more for
    suspects, which run there one at a time. Use it on one event loop, except `close`.

    start: starts the one of a number, in the place of the one before it. room: for so many keys each, at a
    time.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int, P | None], P],
        numbers: Supervision,
        room: int | None = None,
    ) -> None:
        self.supervisor: Supervisor[Hashable] = Supervisor(numbers)
        self.processes: list[P | None] = [None] * (count + 1)
        self._start = start
        self._slots = contextlib.nullcontext() if room is None else asyncio.Semaphore(count * room)
        self._alone = asyncio.Lock()
        self._closed = False

    @contextlib.asynccontextmanager
    async def place(self, key: Hashable) -> AsyncIterator[P]:
        """Waits for a place in a process, which is the key's until the end. One that leaves a process that
        lives is no suspect any more.
        """
        alone = self.supervisor.is_suspect(key)
        async with self._alone if alone else self._slots:
            process = self.seat(key, alone)
            try:
                yield process
            finally:
                process.running.discard(key)
                if not (process.judged or process.ended):
                    self.supervisor.ended(key)

    def seat(self, key: Hashable, alone: bool = False) -> P:
        """Returns the process with the least to do, which has one key more now; alone: the suspects'."""
        if self._closed:
            raise RondoError("the processes that this would run in have ended")
        *others, _ = (0 if one is None or one.ended else len(one.running) for one in self.processes)
        number = len(others) if alone else others.index(min(others))
        process = self.processes[number]
        if process is None or process.ended:
            if process is not None:
                self.died(process)
            process = self.processes[number] = self._start(number, process)
        process.running.add(key)
        return process

    def died(self, process: P, running: Collection[Hashable] = ()) -> Hashable:
        """Counts the death of a process that was running these, once. Returns the guilty key."""
        if not process.judged:
            process.judged = True
            process.guilty = self.supervisor.died(running)
        return process.guilty

    def close(self) -> None:
        """Ends the processes. From any thread."""
        self._closed = True
        for process in self.processes:
            if process is not None:
                process.end()
