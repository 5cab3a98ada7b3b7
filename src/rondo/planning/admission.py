"""Asynchrony as two pure decisions: how many prompt groups may start, and which ones are trained next.

Together they hold the staleness bound without dropping anything as too old. A group admitted at version v is
due at version v + max_staleness: trained then at the latest. It is one of the (v + max_staleness + 1) ·
batch_size credits granted by then, and steps 0 … v + max_staleness use up that many. So there is always room
for everything that is due, if no step gives a place to a younger group that an older one will need: prompt
order never does, and completion order looks ahead. max_staleness = 0 is synchronous on-policy training, 1 is
one step off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

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


def select(
    *,
    ready: Mapping[int, int] | Iterable[int],
    open_groups: Mapping[int, int],
    version: int,
    max_staleness: int,
    want: int,
    order: Order = "prompt",
) -> list[int] | None:
    """Returns the sequence numbers to train on now, ascending, or None to wait.

    ready: complete groups, sequence number -> version at admission (prompt order needs the numbers only).
    open_groups: the same of groups in flight. want: groups per step (fewer in a short last step, 0 when
    nothing is left). Waits while an open group is due: admitted at or before version - max_staleness, so that
    one more update would break its bound.

    prompt: also waits while an open group has a lower number than the last one chosen, so that what is
    trained when does not depend on who finished first. completion: takes what is complete, that which is due
    first before the rest. That alone would break the bound: newer groups that finish first would take the
    places of older ones, more of which are then due at one version than a step can take. So it also waits
    while the groups left behind, open or ready, could not all be trained in time (`all_in_time`). It never
    waits forever: with every open group complete, those due first are chosen, and then the rest fits.
    """
    if want == 0:
        return []
    if any(admitted <= version - max_staleness for admitted in open_groups.values()):
        return None
    if order == "prompt":
        chosen = sorted(ready)[:want]
        if len(chosen) < want or (chosen and any(seq < chosen[-1] for seq in open_groups)):
            return None
        return chosen
    assert isinstance(ready, Mapping), "completion order needs the versions at admission"
    by_due = sorted(ready, key=lambda seq: (ready[seq], seq))
    chosen, left = by_due[:want], by_due[want:]
    if len(chosen) < want:
        return None
    due = [admitted + max_staleness for admitted in (*open_groups.values(), *(ready[seq] for seq in left))]
    return sorted(chosen) if all_in_time(due, version + 1, want) else None


def all_in_time(due: Iterable[int], version: int, batch_size: int) -> bool:
    """Says whether steps of batch_size groups, the first at `version`, can train every group at the version
    at which it is due, or before: no more than (d - version + 1) · batch_size are due by any version d.
    """
    return all(count <= (last - version + 1) * batch_size for count, last in enumerate(sorted(due), start=1))
