"""Which replica gets a request, and which requests are suspected of ending replicas: pure decisions over
small records. No clock, no tokens, no engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

SUSPECT_DEATHS = 2  # of replicas that were running a request: now it is a suspect
SUSPECTS_TOGETHER = 8  # on one replica; after another death each runs alone


@dataclass(frozen=True)
class Load:
    """A replica that can take requests: how many it has, and how many it may have at most."""

    name: str
    in_flight: int
    limit: int

    @property
    def slack(self) -> int:
        """How much busier than the idlest replica it may be and still get what belongs to it."""
        return max(1, self.limit // 4)


def choose(loads: Sequence[Load], preferred: str | None = None) -> str | None:
    """The replica for a request; None: wait. preferred: the one that has its prefix in the cache.

    The least loaded with room, the first of equals; the preferred one while it is at most its slack busier.
    """
    free = [load for load in loads if load.in_flight < load.limit]
    if not free:
        return None
    least = min(free, key=lambda load: load.in_flight)
    for load in free:
        if load.name == preferred and load.in_flight <= least.in_flight + load.slack:
            return load.name
    return least.name


class Affinity:
    """Which replica had a key last; the `remember` keys that were used last are known."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._names: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def get(self, key: str) -> str | None:
        return self._names.get(key)

    def put(self, key: str, name: str) -> None:
        """The empty key is nobody's."""
        if not key:
            return
        self._names[key] = name
        self._names.move_to_end(key)
        if len(self._names) > self._remember:
            self._names.popitem(last=False)

    def forget(self, name: str) -> None:
        """A replica is gone, and what it had cached."""
        self._names = OrderedDict((key, value) for key, value in self._names.items() if value != name)


class Suspects:
    """Which requests were running on replicas when those died. Most of them are innocent: nobody knows which
    of a replica's requests it died of, until it has died of one that was alone.

    The `remember` requests that saw a death last are known, also when they are issued anew meanwhile.
    """

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._deaths: OrderedDict[str, list[int]] = OrderedDict()  # request id → the deaths that it saw
        self._num_deaths = 0
        self._explained: set[int] = set()

    @property
    def num_explained(self) -> int:
        """Deaths that some request was found to be the cause of."""
        return len(self._explained)

    def num_deaths(self, request_id: str) -> int:
        """Of replicas that were running this request."""
        return len(self._deaths.get(request_id, ()))

    def company(self, request_id: str) -> int | None:
        """How many suspects may run on its replica, itself included; None: it is no suspect."""
        deaths = self.num_deaths(request_id)
        if deaths < SUSPECT_DEATHS:
            return None
        return SUSPECTS_TOGETHER if deaths == SUSPECT_DEATHS else 1

    def died(self, running: Sequence[str]) -> bool:
        """A replica died while it was running these requests. Returns whether that was the fault of the only
        one: it had been a suspect already. Then all the deaths that it saw are explained.
        """
        self._num_deaths += 1
        for request_id in running:
            self._deaths.setdefault(request_id, []).append(self._num_deaths)
            self._deaths.move_to_end(request_id)
        guilty = len(running) == 1 and len(self._deaths[running[0]]) > SUSPECT_DEATHS
        if guilty:
            self._explained.update(self._deaths[running[0]])
        while len(self._deaths) > self._remember:
            self._deaths.popitem(last=False)
        return guilty

    def ended(self, request_id: str) -> None:
        """A replica answered it and lives: it is innocent."""
        self._deaths.pop(request_id, None)
