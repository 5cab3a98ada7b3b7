"""The receiving end's books: what makes a complete set of weights, what of it has come, and its version.

Nothing here holds a tensor. Who does asks `take` before and tells `note` after.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

import torch

from rondo.errors import WeightSyncError

_NOTHING = "; the engine serves nothing until a complete set is committed"


class Intake:
    """parameters: every name of a model with its parameter, tied ones under each of their names; any one of
    these names will do.

    canonical_names: each name to the first of its parameter's. version: of the last complete set; -1: none
    yet. complete: that set is here, untouched. failure: why the last update failed, where whoever uses this
    says so (`fail`); "" else.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        first: dict[int, str] = {}
        self.canonical_names: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in parameters:
            self.canonical_names[name] = first.setdefault(id(parameter), name)
            self.shapes[name] = tuple(parameter.shape)
        self.version, self.complete, self.failure = -1, False, ""
        self._arriving: int | None = None
        self._open: set[str] = set()
        self._sums: dict[str, int] = {}

    def __len__(self) -> int:
        return len(set(self.canonical_names.values()))

    def names(self) -> dict[str, list[str]]:
        """The first name of each parameter to all of its names."""
        groups: dict[str, list[str]] = {}
        for name, canonical in self.canonical_names.items():
            groups.setdefault(canonical, []).append(name)
        return groups

    def canonical(self, name: str) -> str:
        """The first of a parameter's names. Raises WeightSyncError for one that the model does not have."""
        if name not in self.canonical_names:
            near = difflib.get_close_matches(name, self.canonical_names, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise WeightSyncError(f"the model has no parameter {name!r}{hint}")
        return self.canonical_names[name]

    def fit(self, name: str, shape: Iterable[int]) -> str:
        """The canonical name of a tensor. Raises WeightSyncError for an unknown name or another shape."""
        canonical = self.canonical(name)
        if tuple(shape) != self.shapes[name]:
            raise WeightSyncError(f"{name!r} has shape {tuple(shape)}, the model wants {self.shapes[name]}")
        return canonical

    # ---- an update: begin, take and note for every tensor, finish; or fail ----

    def begin(self, version: int) -> None:
        """A set begins to arrive; what had come of an earlier one does not count."""
        self._arriving, self.complete, self.failure = version, False, ""
        self._open, self._sums = set(self.canonical_names.values()), {}

    def take(self, name: str, shape: Iterable[int]) -> str:
        """A tensor has come: returns its canonical name. Raises WeightSyncError where it does not belong."""
        if self._arriving is None:
            raise WeightSyncError(f"{name!r} arrived outside begin … commit{self._because()}")
        canonical = self.fit(name, shape)
        self._open.discard(canonical)
        return canonical

    def note(self, sums: Mapping[str, int]) -> None:
        """Checksums, by name, of what came, for `check`."""
        self._sums |= {self.canonical_names[name]: value for name, value in sums.items()}

    def check(
        self,
        version: int,
        checksums: Mapping[str, int] | None = None,
        compute: Callable[[str], int | None] = lambda canonical: None,
    ) -> None:
        """Whether all of `version` has come, and is what was sent. checksums: the sender's, by name. compute:
        gives those that were not noted. Raises WeightSyncError that names what is missing or differs; then
        the update goes on.
        """
        if self._arriving != version:
            raise WeightSyncError(f"commit({version}) without begin({version}){self._because()}")
        if self._open:
            raise WeightSyncError(
                f"commit({version}): {len(self._open)} of {len(self)} tensors did not arrive: "
                f"{', '.join(sorted(self._open)[:4])}{_NOTHING}"
            )
        for name, expected in (checksums or {}).items():
            canonical = self.canonical(name)
            found = self._sums.get(canonical)
            found = compute(canonical) if found is None else found
            if found != expected:
                has = "none" if found is None else f"{found:#018x}"
                raise WeightSyncError(
                    f"commit({version}): {name!r} is not what was sent (checksum {has}, the trainer's is "
                    f"{expected:#018x}){_NOTHING}"
                )

    def finish(self, version: int) -> None:
        """The checked set is in use."""
        self._arriving, self.version, self.complete = None, version, True

    def fail(self, why: str) -> None:
        """There is no complete set any more, and none on its way, until another `begin`. Of several failures
        the first is kept: the others follow from it.
        """
        self._arriving, self.complete = None, False
        self.failure = self.failure or why

    @property
    def arriving(self) -> int | None:
        """The version that is on its way."""
        return self._arriving

    def missing(self) -> list[str]:
        """Canonical names of what has not come since `begin`, sorted."""
        return sorted(self._open)

    def _because(self) -> str:
        return f" ({self.failure})" if self.failure else ""
