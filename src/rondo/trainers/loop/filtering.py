"""Dynamic sampling: a filter by name (`algorithms/filters.py`), as the buffer's question about one group."""

from __future__ import annotations

import numpy as np

from rondo.algorithms.registry import bind, columns_read
from rondo.config.schema import FunctionConfig
from rondo.data.rows import is_scored
from rondo.errors import ConfigError, TrainError
from rondo.trainers.loop.buffer import Group


class GroupFilter:
    """`keep` of a Buffer: why a group is dropped, or None. The filter sees the group's scored rows only.

    Raises ConfigError for an unknown name or option; when called, for a row without `accuracy`.
    """

    def __init__(self, config: FunctionConfig) -> None:
        self._name = config.name
        self._decide = bind("filter", config)
        self.columns: tuple[str, ...] = columns_read(self._decide)

    def __call__(self, group: Group) -> str | None:
        index = group.ref.index
        scored = is_scored(index)
        columns = {name: index.scalars(name)[scored] for name in self.columns}
        if "accuracy" in columns and np.isnan(columns["accuracy"]).any():
            raise ConfigError(
                f"algorithm.filter={self._name} reads whether an answer is right, and an answer to a prompt "
                f"of source {index.scalars('source')[0]!r} does not have the score that says so; name one in "
                "reward.accuracy that every source has"
            )
        reason = self._decide(**columns)
        if reason is not None and not isinstance(reason, str):
            raise TrainError(
                f"algorithm.filter={self._name} returned {reason!r}; a filter returns None to keep a group, "
                "or the reason for which it is dropped"
            )
        return reason
