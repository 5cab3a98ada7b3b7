"""A stream that shows where a wait is missing, and what rests without moving (a CPU has nowhere else)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rondo.platform import SideStream


class Late(SideStream):
    """Copies at the last moment that a wait allows."""

    def __init__(self) -> None:
        self._asked: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._done = 0

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
        """See SideStream.copy."""
        self._asked.append(list(pairs))
        return len(self._asked)

    def wait(self, mark: int) -> None:
        """See SideStream.wait."""
        while self._done < mark:
            super().copy(self._asked[self._done])
            self._done += 1

    def finish(self) -> None:
        """See SideStream.finish."""
        self.wait(len(self._asked))


class Noted:
    """What rests, written down."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def bring(self) -> None:
        self._happened.append("bring")

    def rest(self, *, changed: bool) -> None:
        self._happened.append("rest, changed" if changed else "rest")
