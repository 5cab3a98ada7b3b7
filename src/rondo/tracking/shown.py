"""What people are shown of a run, as plain state: metrics, their course, alarms, answers. `view` draws it.

Metrics go by the names under which they are logged. A tuple of names stands for the first of them that is
there. A metric that is not there is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rondo.tracking.pictures import Picture
from rondo.tracking.text import format_duration, format_number

REWARD = ("reward/mean",)
RESPONSE_LENGTH = ("rollout/response_length",)
REFERENCE_KL = ("actor/kl_loss", "actor/kl_reward")  # how far the policy has gone from the reference
UPDATE_KL = ("actor/ppo_kl",)  # how far one update goes: to the policy before it (0 with one optimizer step)
ENTROPY = ("actor/entropy", "actor/entropy_sampled")
GRAD_NORM = ("actor/grad_norm",)
LOG_PROB_GAP = ("rollout/log_prob_gap_mean", "rollout/log_prob_gap")
LOSS = ("sft/loss", "pair/loss")
LEARNING_RATE = ("actor/lr",)
GENERATED_RATE = ("rollout/tokens_per_second", "perf/generated_tokens_per_s")
TRAINED_RATE = ("perf/trained_tokens_per_s",)
ROW_RATE = ("perf/row_tokens_per_s",)  # of whole rows, what nothing is learnt from included
STALENESS = ("buffer/staleness_mean",)

# Anything above 0 here is said loudly. The text is what one of them means.
ALARMS: Mapping[str, str] = {
    "actor/skipped_steps": "optimizer step(s) skipped: gradient not finite",
    "critic/skipped_steps": "critic step(s) skipped: gradient not finite",
    "reward/errors": "scorer error(s)",
    "reward/timeouts": "scorer timeout(s)",
    "reward/failed_share": "of the trajectories were not scored and are dropped",
}

Kind = Literal["rl", "sft", "preference", "reward_model"]
Fields = Sequence[tuple[str, str, tuple[str, ...]]]

_PAIRS: Fields = (
    ("loss", "loss", LOSS),
    ("pairs right", "right", ("pair/accuracy",)),
    ("margin", "margin", ("pair/margin",)),
    ("grad norm", "grad", GRAD_NORM),
    ("learning rate", "lr", LEARNING_RATE),
    ("tokens/s, prompts too", "tok/s (prompts too)", ROW_RATE),
)

# (label, label in a plain line, metric names); shown where the metric is there
FIELDS: Mapping[Kind, Fields] = {
    "rl": (
        ("reward", "reward", REWARD),
        ("response length", "len", RESPONSE_LENGTH),
        ("KL to reference", "KL(ref)", REFERENCE_KL),
        ("KL of the update", "KL(old)", UPDATE_KL),
        ("entropy", "ent", ENTROPY),
        ("grad norm", "grad", GRAD_NORM),
        ("log-prob gap", "gap", LOG_PROB_GAP),
        ("value loss", "vloss", ("critic/loss",)),
        ("cost", "cost", ("reward/cost_average",)),
        ("multiplier", "λ", ("actor/multiplier",)),
        ("process-reward loss", "prm", ("prm/loss",)),
        ("filtered groups", "filtered", ("buffer/filtered_share",)),
        ("tokens/s", "tok/s", GENERATED_RATE),
        ("staleness", "stale", STALENESS),
        ("groups in flight", "flying", ("buffer/in_flight",)),
        ("weight sync, s", "sync", ("timing/weight_sync_s",)),
        ("truncated", "trunc", ("rollout/truncated_share",)),
    ),
    "sft": (
        ("loss", "loss", LOSS),
        ("grad norm", "grad", GRAD_NORM),
        ("learning rate", "lr", LEARNING_RATE),
        ("tokens/s, prompts too", "tok/s (prompts too)", ROW_RATE),
    ),
    "preference": _PAIRS,
    "reward_model": _PAIRS,
}
_WHEN_NOT_ZERO = ("KL of the update", "truncated", "staleness", "groups in flight", "weight sync, s")
_NO_PHASES = ("step", "cpu", "weight_sync")  # seconds that phases count already
_PANEL_ONLY = ("truncated", "groups in flight", "weight sync, s")


@dataclass(frozen=True)
class Sample:
    """One trajectory as text."""

    prompt: str
    """The prompt as text."""
    response: str
    """The answer as text."""
    reward: float | None = None
    """The answer's reward; None: it has none."""
    note: str = ""
    """Anything short to show beside it: `length`, `reward_timeout`, the expected answer."""
    images: Sequence[Picture] = ()
    """What the policy was shown."""


@dataclass(frozen=True)
class BeforeAfter:
    """Answers to the same prompt, before and after training (either may be missing)."""

    before: Sample | None
    """The answer before training."""
    after: Sample | None
    """The answer after training."""


@dataclass(frozen=True)
class Report:
    """What the final table shows."""

    before: Mapping[str, float] = field(default_factory=dict)
    """Numbers by label (`greedy accuracy`, `mean@4`, …), in the order to show them."""
    after: Mapping[str, float] = field(default_factory=dict)
    """As `before`; a label may be in one of them only."""
    samples: Sequence[BeforeAfter] = ()
    """The same prompts answered before and after."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Single lines for the end: wall time, where the export lies."""


@dataclass(frozen=True)
class Header:
    """What is being trained, on what, and how."""

    model: str
    """The model in words: `Qwen3, 0.85 M parameters`."""
    device: str
    """The device, such as `cpu`."""
    algorithm: str
    """The algorithm, such as `grpo`."""
    run_dir: str = ""
    """The run's folder, such as `runs/quickstart`."""


@dataclass
class RunView:
    """State of one stage (SFT, RL, …)."""

    header: Header
    """What is being trained."""
    total_steps: int | None
    """The number of steps in all; None: it is not known."""
    kind: Kind = "rl"
    """The kind of stage."""
    step: int = 0
    """The newest step."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """By label, the value of each step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each phase, over the steps seen."""
    sample: tuple[int, Sample] | None = None
    """The newest one's step, and itself."""
    elapsed: float = 0.0
    """Seconds since the start."""
    left: float | None = None
    """Seconds to the end, as estimated; None: it is not known."""

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes one step's metrics in; any may be missing."""
        self.step = step
        for label, _, metric in FIELDS[self.kind]:
            value = find(metrics, metric)
            if value is not None:
                self.history.setdefault(label, []).append(value)
        for name, value in metrics.items():
            if name.startswith("timing/") and name.endswith("_s") and isinstance(value, int | float):
                phase = name.removeprefix("timing/").removesuffix("_s")
                self.seconds[phase] = self.seconds.get(phase, 0.0) + float(value)

    def is_shown(self, label: str) -> bool:
        """Says whether there is anything to show: a value; for some labels one that was not 0."""
        values = self.history.get(label, ())
        return any(values) if label in _WHEN_NOT_ZERO else bool(values)

    def phase_shares(self) -> list[tuple[str, float]]:
        """Returns phases by share of the steps' wall time, largest first, then `other`; what is below 1 %
        counts as other."""
        phases = {name: s for name, s in self.seconds.items() if name not in _NO_PHASES}
        whole = max(self.seconds.get("step", 0.0), sum(phases.values()))
        if whole <= 0:
            return []
        shares = sorted(
            ((name, s / whole) for name, s in phases.items() if s / whole >= 0.01), key=lambda x: -x[1]
        )
        other = 1.0 - sum(share for _, share in shares)
        return [*shares, ("other", other)] if other >= 0.005 else shares


def find(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """Returns the first of `names` that has a number; None when none does."""
    for name in names:
        value = metrics.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def alarms(metrics: Mapping[str, Any]) -> list[str]:
    """Returns messages for what must not go unnoticed."""
    found = []
    for name, meaning in ALARMS.items():
        value = metrics.get(name)
        if isinstance(value, int | float) and value > 0:
            share = name.endswith("_share")
            found.append(f"{value:.0%} {meaning}" if share else f"{name} = {value:g}: {meaning}")
    odd = metrics.get("not_finite")
    return [*found, f"not finite: {', '.join(odd)}"] if isinstance(odd, Mapping) and odd else found


def plain_line(view: RunView, metrics: Mapping[str, Any]) -> str:
    """Writes one step in one line, for logs."""
    total = "?" if view.total_steps is None else str(view.total_steps)
    parts = [f"step {view.step:>{len(total)}}/{total}"]
    for label, short, metric in FIELDS[view.kind]:
        value = find(metrics, metric)
        if value is not None and label not in _PANEL_ONLY and view.is_shown(label):
            parts.append(
                f"{format_number(value)} {short}"
                if short.startswith("tok/s")
                else f"{short} {format_number(value)}"
            )
    if view.left is not None:
        parts.append(f"left {format_duration(view.left)}")
    return "  ".join(parts)


@dataclass
class Found:
    """A check whose threshold was passed."""

    check: str
    """Its name."""
    began: int
    """The first of the steps in a row; 0: it was known before."""
    step: int
    """The last of them, so far."""
    value: float | None
    """The number of the last of them."""
    says: str
    """What that means."""
    remedy: str
    """What to look at, and what to set."""

    def line(self) -> str:
        """Returns it as a line."""
        if not self.step:
            return f"{self.says}. {self.remedy}"
        since = f"step {self.began}" if self.began == self.step else f"steps {self.began} to {self.step}"
        return f"{self.says} ({since}). {self.remedy}"

    def warning(self) -> str:
        """Returns what a run says of it."""
        return f"{self.line()}. tracking.checks.{self.check}=off says nothing"
