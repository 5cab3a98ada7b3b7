"""What people read: single trajectories, and how evaluation and answers changed from before to after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One trajectory as text. note: anything short to show beside it (`length`, `reward_timeout`, the
    expected answer)."""

    prompt: str
    response: str
    reward: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, str | float | None]:
        """The fields in a fixed order, for tables."""
        return {"prompt": self.prompt, "response": self.response, "reward": self.reward, "note": self.note}


@dataclass(frozen=True)
class BeforeAfter:
    """Answers to the same prompt, before and after training (either may be missing)."""

    before: Sample | None
    after: Sample | None


@dataclass(frozen=True)
class Report:
    """What the final table shows.

    before, after: numbers by label, in the order to show them (`greedy accuracy`, `mean@4`, `response
    length`, …); a label may be in one of them only. samples: the same prompts answered before and after.
    facts: single lines for the end (wall time, where the export lies).
    """

    before: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[BeforeAfter] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
