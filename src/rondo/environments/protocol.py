"""What an environment is: a world that a policy acts in, step by step, by text, pictures or both.

    reset(seed, task) ─▶ Observation ─▶ the policy's action ─▶ step(action) ─▶ StepResult ─▶ … ─▶ close()

The methods are plain functions, may take long, and may be called from one thread after another, never from
two at a time, but for `close` where a step hangs; in an episode worker from its main thread only, one call of
any environment at a time. All that is random follows from `seed`. What an environment raises is its own
failure: the episode has no reward, and is in no baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

HELD_OUT = 4096
"""So many odd seeds, from 1 on, may be held out: of a generated environment each has a level of its own."""


@dataclass(frozen=True)
class Observation:
    """What there is to see."""

    text: str
    """The observation as text; empty: there is a picture alone."""
    actions: tuple[str, ...] = ()
    """The actions that are possible now; empty: any text may be one."""
    anchor: str = ""
    """Equal where two states are the same to GiGPO and HGPO; empty: where their texts and pictures are."""
    image: np.ndarray | None = None
    """[H, W, 3] uint8, of any size; the policy sees it where the text has `<image>`, or before the text."""

    @property
    def identity(self) -> str:
        """The anchor, or the text where there is none."""
        return self.anchor or self.text


@dataclass(frozen=True)
class StepResult:
    """What became of an action."""

    observation: Observation
    """What there is to see after the action."""
    reward: float = 0.0
    """The reward of this step alone."""
    done: bool = False
    """The episode is over by the rules."""
    truncated: bool = False
    """The episode is over by a limit of the environment's own."""
    success: bool = False
    """The task is done."""
    invalid: bool = False
    """The text was no action, which counts as the policy's fault."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that the environment tells."""


class Environment(Protocol):
    """One world, for one episode after another. Options of the recipe go to `__init__`.

    A class may say `instructions`, what the policy is told to do (the prompt of `episodes`), and have a class
    method `check(**options)`, which raises RondoError where this machine lacks what is needed. A vectorised
    one has a class method `step_many(environments, actions) -> list[StepResult]`, which does in each what
    `step` does: an episode worker makes the steps that wait there in one such call. One that can be put into
    a state has a method `restore(state)`, called after `reset`: with keep_state branches use it. state: as
    `state()` returned it, as JSON has it; the episode goes on as from there, what is drawn included.
    """

    def reset(self, seed: int, task: Any) -> Observation:
        """Begins an episode. task: of the prompt's row (column `task`); None: it has none."""

    def step(self, action: str) -> StepResult:
        """Acts. An action that is not among `Observation.actions` never comes here."""

    def state(self) -> Mapping[str, Any]:
        """Returns the true state, as JSON can write it: for tests, and for rewards."""

    def close(self) -> None:
        """Ends what was opened; may be called at any time, and again."""
