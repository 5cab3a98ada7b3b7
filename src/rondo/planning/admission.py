"""Asynchrony as two pure decisions: how many prompt groups may start, and which ones are trained next.

Together they hold the staleness bound without dropping anything as too old. A group admitted at version v is
due at version v + max_staleness: trained then at the latest. It is one of the (v + max_staleness + 1) ·
batch_size credits granted by then, and steps 0 … v + max_staleness use up that many. So there is always room
for everything that is due, if no step gives a place to a younger group that an older one will need: prompt
order never does, and completion order looks ahead. max_staleness = 0 is synchronous on-policy training, 1 is
one step off.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")
OnUpdate = Literal["finish", "resume", "abort"]
Order = Literal["prompt", "completion"]


def effective_on_update(on_update: OnUpdate | Literal["auto"], max_staleness: int) -> OnUpdate:
    """Returns what becomes of episodes in flight when weights arrive; auto: finish (the same bits every time)
    while that costs little, resume from max_staleness = 2 on.
    """
    if on_update != "auto":
        return on_update
    return "finish" if max_staleness <= 1 else "resume"


def may_admit(
    *,
    num_admitted: int,
    num_dropped: int,
    version: int,
    max_staleness: int,
    batch_size: int,
    total_steps: int,
    total_groups: int,
) -> int:
    """Returns how many more groups may start now (0 or more). This is all the back-pressure there is.

    num_admitted: groups that were ever started and not given back (dropped ones included); num_dropped: those
    that were dropped since, whose credit admits another. Each version grants batch_size credits,
    max_staleness + 1 versions ahead and never beyond total_steps; the stream has total_groups prompts.
    """
    granted = min(version + max_staleness + 1, total_steps) * batch_size
    return max(min(granted - (num_admitted - num_dropped), total_groups - num_admitted), 0)


class AdmittedGroups(MutableMapping[int, T]):
    """Prompt groups by sequence number, kept in the two orders in which `select` looks at them: a look costs
    no walk over all of them.
    """

    def __init__(self, admitted: Callable[[T], int], groups: Mapping[int, T] | Iterable[tuple[int, T]] = ()):
        """admitted: gives the version at which a group was admitted; it never changes."""
        self._admitted = admitted
        self._groups: dict[int, T] = {}
        self.by_seq: list[int] = []
        self.by_version: list[tuple[int, int]] = []
        """Version at admission and sequence number, ascending."""
        self.update(groups)

    def __getitem__(self, seq: int) -> T:
        return self._groups[seq]

    def __setitem__(self, seq: int, group: T) -> None:
        self.pop(seq, None)
        self._groups[seq] = group
        insort(self.by_seq, seq)
        insort(self.by_version, (self._admitted(group), seq))

    def __delitem__(self, seq: int) -> None:
        version = self._admitted(self._groups.pop(seq))
        del self.by_seq[bisect_left(self.by_seq, seq)]
        del self.by_version[bisect_left(self.by_version, (version, seq))]

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def up_to(self, version: int) -> int:
        """Counts the groups that were admitted at this version or before."""
        return bisect_left(self.by_version, (version + 1,))


def select(
    *,
    ready: AdmittedGroups[T],
    open_groups: AdmittedGroups[int],
    version: int,
    max_staleness: int,
    want: int,
    order: Order = "prompt",
) -> list[int] | None:
    """Returns the sequence numbers to train on now, ascending, or None to wait.

    ready: complete groups. open_groups: those in flight. want: groups per step (fewer in a short last step, 0
    when nothing is left). Waits while an open group is due: admitted at or before version - max_staleness, so
    that one more update would break its bound.

    prompt: also waits while an open group has a lower number than the last one chosen, so that what is
    trained when does not depend on who finished first. completion: takes what is complete, that which is due
    first before the rest. That alone would break the bound: newer groups that finish first would take the
    places of older ones, more of which are then due at one version than a step can take. So it also waits
    while the groups left behind, open or ready, could not all be trained in time: the steps from the next one
    up to the version at which a group is due train want groups each. It never waits forever: with every open
    group complete, those due first are chosen, and then the rest fits.
    """
    if want == 0:
        return []
    if len(ready) < want or open_groups.up_to(version - max_staleness):
        return None
    if order == "prompt":
        chosen = ready.by_seq[:want]
        return None if open_groups and open_groups.by_seq[0] < chosen[-1] else chosen
    for admitted in _versions(ready, open_groups):
        left = open_groups.up_to(admitted) + max(ready.up_to(admitted) - want, 0)
        if left > (admitted + max_staleness - version) * want:
            return None
    return sorted(seq for _, seq in ready.by_version[:want])


def _versions(*groups: AdmittedGroups[Any]) -> range:
    """Returns the versions from the first at which any group was admitted to the last."""
    ends = [one.by_version[at][0] for one in groups if one for at in (0, -1)]
    return range(min(ends), max(ends) + 1)


def last_of_first(count: int, *ascending: Sequence[int]) -> float:
    """Returns the highest of the `count` lowest numbers in these ascending lists; inf where they have fewer
    in all.
    """
    if sum(map(len, ascending)) < count:
        return math.inf
    highest = max(numbers[-1] for numbers in ascending if numbers)

    def up_to(number: int) -> int:
        return sum(bisect_right(one, number) for one in ascending)

    return bisect_left(range(highest), count, key=up_to)  # the lowest that has `count` of them up to it
