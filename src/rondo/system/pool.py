"""Who is to blame for a process that dies, and how often one is started again: one policy, for engines,
episode workers, scorers and MCP servers.

    a process dies ─▶ what ran in it is suspected, and runs again alone ─┬─▶ it ends: innocent
                                                                         └─▶ a process dies of it: guilty

Decisions only: no clock, no process, and no lock (their users have one, or one thread).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_REMEMBER = 4096  # keys that saw a death last


@dataclass(frozen=True)
class Supervision:
    """The numbers of the policy, for one kind of process."""

    restarts: int
    """So many processes are started in the place of dead ones, but for deaths that a key is guilty of."""
    deaths: int
    """So many make a key guilty that saw them, the last one while nothing else ran in the process."""


class Supervisor(Generic[K]):
    """What is known of the deaths of one kind of process, and of the keys (of requests, episodes, calls)
    that ran in them. The `remember` that saw a death last are known, also when they are issued anew.
    """

    def __init__(self, numbers: Supervision, remember: int = _REMEMBER) -> None:
        self.numbers = numbers
        self._remember = remember
        # Which deaths a key has seen, by their numbers.
        self._seen: OrderedDict[K, list[int]] = OrderedDict()
        self._num_deaths = 0
        # Those that a key is guilty of, and how many there were when a process last did something.
        self._explained: set[int] = set()
        self._num_before = 0

    def died(self, running: Collection[K] = ()) -> K | None:
        """Notes that a process died while it was running these. Returns the guilty one: all deaths that it
        saw are explained, and keys that saw no others are suspected no more.
        """
        self._num_deaths += 1
        for key in running:
            self._seen.setdefault(key, []).append(self._num_deaths)
            self._seen.move_to_end(key)
        guilty = None
        if len(running) == 1 and self.num_deaths(*running) >= self.numbers.deaths:
            (guilty,) = running
            self._explained.update(self._seen[guilty])
            self._seen = OrderedDict(
                (key, seen)
                for key, seen in self._seen.items()
                if key == guilty or not self._explained.issuperset(seen)
            )
        while len(self._seen) > self._remember:
            self._seen.popitem(last=False)
        return guilty

    def num_deaths(self, key: K) -> int:
        """Counts the deaths that a key has seen."""
        return len(self._seen.get(key, ()))

    def is_suspect(self, key: K) -> bool:
        """Says whether it has to run alone: it saw a death, and has not ended since."""
        return key in self._seen

    def ended(self, key: K) -> None:
        """Clears a key that ran to its end."""
        self._seen.pop(key, None)

    def worked(self) -> None:
        """Forgets the deaths so far, where only those in a row count: a process has done something."""
        self._num_before = self._num_deaths

    @property
    def num_unexplained(self) -> int:
        """Counts the deaths, in a row, that no key is guilty of."""
        return len(set(range(self._num_before + 1, self._num_deaths + 1)) - self._explained)

    @property
    def gives_up(self) -> bool:
        """Says that no other process may be started in the place of the one that died last."""
        return self.num_unexplained > self.numbers.restarts
