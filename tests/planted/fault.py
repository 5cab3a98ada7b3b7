"""What a planted fault is, and the table of them. The modules beside this one plant: `engines`, what engines
do with weights and say of their answers; `files`, models, templates, settings, data and checkpoints;
`users`, functions and environments.

A fault is a function that plants it, by monkeypatch or in a file, and returns the settings of a run of the
smallest model that meets it. Its docstring says what is wrong; `@fault` says where it enters, who met it
(public threads), and what rondo says, and when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.trainers.conftest import RECIPE

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch, Path], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One row of the table."""

    plant: Plant
    """Plants it, with a folder for files; returns settings of the run."""
    where: str
    """Where it enters."""
    others: tuple[str, ...]
    """Public threads of people who met it, below github.com."""
    ends: Literal["stops", "warns"]
    """What rondo does."""
    by: str
    """What finds it: a check of `tracking.checks`, or another sentence for the table."""
    step: int
    """The last step that was made before a run stops (-1: none, 0: the evaluation before the first), or the
    one in which what is warned of began.
    """
    says: str
    """A part of the message."""
    recipe: Mapping[str, Any]
    """What it is planted in."""
    command: Literal["train", "sft"]
    """The kind of run."""

    @property
    def name(self) -> str:
        return self.plant.__name__

    @property
    def what(self) -> str:
        return " ".join((self.plant.__doc__ or "").split())


FAULTS: dict[str, Fault] = {}


def fault(
    ends: Literal["stops", "warns"],
    where: str,
    *others: str,
    by: str,
    step: int,
    says: str,
    recipe: Mapping[str, Any] = RECIPE,
    command: Literal["train", "sft"] = "train",
) -> Callable[[Plant], Plant]:
    def take(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(plant, where, others, ends, by, step, says, recipe, command)
        return plant

    return take
