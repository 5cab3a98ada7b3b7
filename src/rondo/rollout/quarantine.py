"""Which requests are suspected of ending replicas, and how many of them may run together: pure decisions over
small records, asked only once a replica has died. No clock, no engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rondo.core.errors import DeadlyRequestError, ReplicaLostError
from rondo.core.types import GenerateRequest

SUSPECT_DEATHS = 2  # of replicas that were running a request: now it is a suspect
SUSPECTS_TOGETHER = 8  # on one replica; after another death each runs alone
LAST_LINES = 10  # of a dead engine's output, in the error of the request that it died of


class Suspects:
    """Which requests were running on replicas when those died. Most of them are innocent: nobody knows which
    of a replica's requests it died of, until it has died of one that was alone.

    The `remember` requests that saw a death last are known, also when they are issued anew meanwhile. deaths:
    request id → the numbers of the deaths that it saw.
    """

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self.deaths: OrderedDict[str, list[int]] = OrderedDict()
        self._num_deaths = 0
        self._explained: set[int] = set()

    @property
    def num_explained(self) -> int:
        """Counts deaths that some request was found to be the cause of."""
        return len(self._explained)

    def num_deaths(self, request_id: str) -> int:
        """Counts deaths of replicas that were running this request."""
        return len(self.deaths.get(request_id, ()))

    def company(self, request_id: str) -> int | None:
        """Says how many suspects may run on its replica, itself included; None: it is no suspect."""
        deaths = self.num_deaths(request_id)
        if deaths < SUSPECT_DEATHS:
            return None
        return SUSPECTS_TOGETHER if deaths == SUSPECT_DEATHS else 1

    def died(self, running: Sequence[str]) -> bool:
        """Notes that a replica died while it was running these requests. Returns whether that was the fault
        of the only one: it had been a suspect already. Then all the deaths that it saw are explained.
        """
        self._num_deaths += 1
        for request_id in running:
            self.deaths.setdefault(request_id, []).append(self._num_deaths)
            self.deaths.move_to_end(request_id)
        guilty = len(running) == 1 and len(self.deaths[running[0]]) > SUSPECT_DEATHS
        if guilty:
            self._explained.update(self.deaths[running[0]])
        while len(self.deaths) > self._remember:
            self.deaths.popitem(last=False)
        return guilty

    def ended(self, request_id: str) -> None:
        """Clears a request that a replica answered, and lives."""
        self.deaths.pop(request_id, None)


def deadly_error(request: GenerateRequest, num_deaths: int, error: ReplicaLostError) -> DeadlyRequestError:
    """Returns the error of a request that replicas die of. error: how the last one did."""
    made = 0 if request.prefix is None else len(request.prefix.token_ids)
    last = "\n".join(error.last_lines.splitlines()[-LAST_LINES:])
    return DeadlyRequestError(
        f"request {request.request_id!r} ({len(request.token_ids)} prompt tokens, {made} made) is given up: "
        f"{num_deaths} replicas died while they were running it, the last one while it was running nothing "
        f"else: {error}; " + (f"it wrote last:\n{last}" if last else "it wrote nothing")
    )
