"""The receiving end's books: what makes a complete set of weights, what of it has come, and its version.

Nothing here holds a tensor. Who does asks `take` before and tells `note` after.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from rondo.core.errors import WeightSyncError

_NOTHING = "; the engine serves nothing until a complete set is committed"


class Intake:
    """Notes which tensors of a set of weights have come. parameters: every name of a model with its
    parameter, tied ones under each of their names; any one of these names will do.

    factors: the shapes of adapters' A and B, by name, where these come by themselves: all of them with every
    set, and the parameters (the base, which never changes) with the first one, and whenever the sender likes.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        factors: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        first: dict[int, str] = {}
        # Each name → the first of its parameter's.
        self.canonical_names: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in parameters:
            self.canonical_names[name] = first.setdefault(id(parameter), name)
            self.shapes[name] = tuple(parameter.shape)
        self.factors = dict(factors or {})
        # The base is here, whole: a set without it will do.
        self.based = False
        # Of the last complete set; -1: none yet.
        self.version = -1
        # That set is here, untouched.
        self.complete = False
        # Why the last update failed, where the engine says so (`fail`); "" else.
        self.failure = ""
        self._arriving: int | None = None
        self._open: set[str] = set()
        self._expected = 0
        self._sums: dict[str, int] = {}

    def __len__(self) -> int:
        return len(set(self.canonical_names.values()))

    def names(self) -> dict[str, list[str]]:
        """Returns the first name of each parameter → all of its names."""
        groups: dict[str, list[str]] = {}
        for name, canonical in self.canonical_names.items():
            groups.setdefault(canonical, []).append(name)
        return groups

    def canonical(self, name: str) -> str:
        """Returns the first of a parameter's names. Raises WeightSyncError for one that the model does not
        have.
        """
        if name in self.factors:
            return name
        if name not in self.canonical_names:
            near = difflib.get_close_matches(name, self.canonical_names, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise WeightSyncError(f"the model has no parameter {name!r}{hint}")
        return self.canonical_names[name]

    def fit(self, name: str, shape: Iterable[int]) -> str:
        """Returns the canonical name of a tensor. Raises WeightSyncError for an unknown name or another
        shape.
        """
        canonical = self.canonical(name)
        wanted = self.factors[name] if name in self.factors else self.shapes[name]
        if tuple(shape) != wanted:
            raise WeightSyncError(f"{name!r} has shape {tuple(shape)}, the model wants {wanted}")
        return canonical

    # ---- an update: begin, take and note for every tensor, finish; or fail ----

    def begin(self, version: int) -> None:
        """Begins a set; what had come of an earlier one does not count."""
        self._arriving = version
        self.complete = False
        self.failure = ""
        self._open = set(self.factors)
        self._expected = len(self._open)
        if not (self.factors and self.based):
            self._await_base()
        self._sums = {}

    def _await_base(self) -> None:
        base = set(self.canonical_names.values())
        self.based = False
        self._open |= base
        self._expected += len(base)

    def take(self, name: str, shape: Iterable[int]) -> str:
        """Notes that a tensor has come, and returns its canonical name. Raises WeightSyncError where it does
        not belong.
        """
        if self._arriving is None:
            raise WeightSyncError(f"{name!r} arrived outside begin … commit{self._because()}")
        canonical = self.fit(name, shape)
        if self.based and name not in self.factors:  # it comes once more
            self._await_base()
        self._open.discard(canonical)
        return canonical

    def note(self, sums: Mapping[str, int]) -> None:
        """Keeps checksums, by name, of what came, for `check`."""
        self._sums |= {self.canonical(name): value for name, value in sums.items()}

    def check(
        self,
        version: int,
        checksums: Mapping[str, int] | None = None,
        compute: Callable[[Collection[str]], Mapping[str, int]] = lambda names: {},
    ) -> None:
        """Checks that all of `version` has come, and is what was sent. checksums: the sender's, by name.
        compute: gives those that were not noted, by canonical name. Raises WeightSyncError that names what is
        missing or differs; then the update goes on.
        """
        if self._arriving != version:
            raise WeightSyncError(f"commit({version}) without begin({version}){self._because()}")
        if self._open:
            raise WeightSyncError(
                f"commit({version}): {len(self._open)} of {self._expected} tensors did not arrive: "
                f"{', '.join(sorted(self._open)[:4])}{_NOTHING}"
            )
        sent = checksums or {}
        known = {**self._sums, **compute({self.canonical(name) for name in sent} - self._sums.keys())}
        for name, expected in sent.items():
            found = known.get(self.canonical(name))
            if found != expected:
                has = "none" if found is None else f"{found:#018x}"
                raise WeightSyncError(
                    f"commit({version}): {name!r} is not what was sent (checksum {has}, the trainer's is "
                    f"{expected:#018x}){_NOTHING}"
                )

    def finish(self, version: int) -> None:
        """Notes that the checked set is in use."""
        self._arriving = None
        self.version = version
        self.complete = self.based = True

    def fail(self, why: str) -> None:
        """Notes that there is no complete set any more, and none on its way, until another `begin`. Of
        several failures the first is kept: the others follow from it.
        """
        self._arriving = None
        self.complete = self.based = False
        self.failure = self.failure or why

    @property
    def arriving(self) -> int | None:
        """Returns the version that is on its way; None: no set is."""
        return self._arriving

    def missing(self) -> list[str]:
        """Returns the canonical names of what has not come since `begin`, sorted."""
        return sorted(self._open)

    def _because(self) -> str:
        return f" ({self.failure})" if self.failure else ""
