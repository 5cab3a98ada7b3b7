"""Dynamic sampling: which complete groups are dropped (algorithm.filter)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rondo.algorithms import bind, columns_read
from rondo.config import FunctionConfig
from rondo.core.errors import ConfigError, TrainError
from rondo.data import firsts, is_scored
from rondo.trainers.loop.buffer import Group


def group_filter(chosen: FunctionConfig) -> Callable[[Group], str | None]:
    """Dynamic sampling: `keep` of a Buffer by a filter's name (`algorithms/filters.py`): why a group is
    dropped, or None. The filter sees the group's scored trajectories, a row each.

    Raises ConfigError for an unknown name or option; when called, for a row without `accuracy`.
    """
    decide = bind("filter", chosen)
    read = columns_read(decide)

    def keep(group: Group) -> str | None:
        index = group.ref.index.take(firsts(group.ref.index))
        scored = is_scored(index)
        columns = {name: index.scalars(name)[scored] for name in read}
        if "accuracy" in columns and np.isnan(columns["accuracy"]).any():
            raise ConfigError(
                f"algorithm.filter={chosen.name} reads whether an answer is right, and an answer to a prompt "
                f"of source {index.scalars('source')[0]!r} does not have the score that says so; name one in "
                "reward.accuracy that every source has"
            )
        reason = decide(**columns)
        if reason is not None and not isinstance(reason, str):
            raise TrainError(
                f"algorithm.filter={chosen.name} returned {reason!r}; a filter returns None to keep a group, "
                "or the reason for which it is dropped"
            )
        return reason

    return keep
