"""Asynchrony as two pure decisions: how many prompt groups may start, and which ones are trained next.

Together they hold the staleness bound without dropping anything as too old. A group admitted at version v is
one of the (v + max_staleness + 1) · batch_size credits granted by then, and steps 0 … v + max_staleness use
up that many; as steps take the lowest sequence numbers and wait for whatever was admitted at version -
max_staleness, it is trained at version v + max_staleness at the latest. max_staleness = 0 is synchronous
on-policy training, 1 is one step off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


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
    """How many more groups may start now (0 or more). This is all the back-pressure there is.

    num_admitted: groups that were ever started and not given back (dropped ones included); num_dropped: those
    that were dropped since, whose credit admits another. Each version grants batch_size credits,
    max_staleness + 1 versions ahead and never beyond total_steps; the stream has total_groups prompts.
    """
    granted = min(version + max_staleness + 1, total_steps) * batch_size
    return max(min(granted - (num_admitted - num_dropped), total_groups - num_admitted), 0)


def select(
    *, ready: Iterable[int], open_groups: Mapping[int, int], version: int, max_staleness: int, want: int
) -> list[int] | None:
    """Sequence numbers to train on now, rising, or None to wait.

    ready: complete groups. open_groups: sequence number -> version at admission, of groups in flight. want:
    groups per step (fewer in a short last step, 0 when nothing is left). Waits while an open group was
    admitted at or before version - max_staleness, for one more update would break its bound; and, to keep
    prompt order, while an open group has a lower number than the last one chosen, so that what is trained
    when does not depend on who finished first. (Without the second wait the first is not enough: newer groups
    that finish first would take the places of older ones, more of which are then due at one version than a
    step can take.)
    """
    if any(admitted <= version - max_staleness for admitted in open_groups.values()):
        return None
    chosen = sorted(ready)[:want]
    if len(chosen) < want:
        return None
    if chosen and any(seq < chosen[-1] for seq in open_groups):
        return None
    return chosen
