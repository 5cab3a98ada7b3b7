"""Which replica gets a request: pure decisions over small records. No clock, no tokens, no engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


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
