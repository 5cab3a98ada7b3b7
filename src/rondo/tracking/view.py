"""What the console shows, as rich renderables made from plain state. Nothing here prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.box import ASCII, ROUNDED, SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rondo.tracking import names
from rondo.tracking.samples import BeforeAfter, Report, Sample
from rondo.tracking.text import clean_text, format_duration, format_number, shorten, sparkline

Kind = Literal["rl", "sft", "preference", "reward_model"]
Fields = Sequence[tuple[str, str, tuple[str, ...]]]

_PAIRS: Fields = (
    ("loss", "loss", names.LOSS),
    ("pairs right", "right", names.PAIR_ACCURACY),
    ("margin", "margin", names.PAIR_MARGIN),
    ("grad norm", "grad", names.GRAD_NORM),
    ("learning rate", "lr", names.LEARNING_RATE),
    ("tokens/s", "tok/s", names.TRAINED_RATE),
)

# (label, label in a plain line, metric names); shown where the metric is there
FIELDS: Mapping[Kind, Fields] = {
    "rl": (
        ("reward", "reward", names.REWARD),
        ("response length", "len", names.RESPONSE_LENGTH),
        ("KL to reference", "KL(ref)", names.REFERENCE_KL),
        ("KL of the update", "KL(old)", names.UPDATE_KL),
        ("entropy", "ent", names.ENTROPY),
        ("grad norm", "grad", names.GRAD_NORM),
        ("log-prob gap", "gap", names.LOG_PROB_GAP),
        ("value loss", "vloss", names.VALUE_LOSS),
        ("cost", "cost", names.COST),
        ("multiplier", "λ", names.MULTIPLIER),
        ("process-reward loss", "prm", names.PRM_LOSS),
        ("filtered groups", "filtered", names.FILTERED),
        ("tokens/s", "tok/s", names.GENERATED_RATE),
        ("staleness", "stale", names.STALENESS),
        ("groups in flight", "flying", names.IN_FLIGHT),
        ("weight sync, s", "sync", names.SYNC_SECONDS),
        ("truncated", "trunc", names.TRUNCATED),
    ),
    "sft": (
        ("loss", "loss", names.LOSS),
        ("grad norm", "grad", names.GRAD_NORM),
        ("learning rate", "lr", names.LEARNING_RATE),
        ("tokens/s", "tok/s", names.TRAINED_RATE),
    ),
    "preference": _PAIRS,
    "reward_model": _PAIRS,
}
_WHEN_NOT_ZERO = ("KL of the update", "truncated", "staleness", "groups in flight", "weight sync, s")
_NO_PHASES = ("step", "cpu", "weight_sync")  # seconds that phases count already
_PANEL_ONLY = ("truncated", "groups in flight", "weight sync, s")
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@dataclass(frozen=True)
class Header:
    """What is being trained, on what, how: `Qwen3, 0.85 M parameters`, `cpu`, `grpo`, `runs/quickstart`."""

    model: str
    device: str
    algorithm: str
    run_dir: str = ""


@dataclass
class RunView:
    """State of one stage (SFT, RL, …). seconds: per phase, over the steps seen. warnings: newest last, with
    how often."""

    header: Header
    total_steps: int | None
    kind: Kind = "rl"
    step: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    sample: tuple[int, Sample] | None = None
    elapsed: float = 0.0
    left: float | None = None

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics in; any may be missing."""
        self.step = step
        for label, _, metric in FIELDS[self.kind]:
            value = names.find(metrics, metric)
            if value is not None:
                self.history.setdefault(label, []).append(value)
        for name, value in metrics.items():
            if name.startswith("timing/") and name.endswith("_s") and isinstance(value, int | float):
                phase = name.removeprefix("timing/").removesuffix("_s")
                self.seconds[phase] = self.seconds.get(phase, 0.0) + float(value)

    def phase_shares(self) -> list[tuple[str, float]]:
        """Phases by share of the steps' wall time, largest first, then `other`; what is below 1 % counts as
        other."""
        phases = {name: s for name, s in self.seconds.items() if name not in _NO_PHASES}
        whole = max(self.seconds.get("step", 0.0), sum(phases.values()))
        if whole <= 0:
            return []
        shares = sorted(
            ((name, s / whole) for name, s in phases.items() if s / whole >= 0.01), key=lambda x: -x[1]
        )
        other = 1.0 - sum(share for _, share in shares)
        return [*shares, ("other", other)] if other >= 0.005 else shares


def plain_line(view: RunView, metrics: Mapping[str, Any]) -> str:
    """One step in one line, for logs."""
    total = "?" if view.total_steps is None else str(view.total_steps)
    parts = [f"step {view.step:>{len(total)}}/{total}"]
    for label, short, metric in FIELDS[view.kind]:
        value = names.find(metrics, metric)
        hidden = label in _PANEL_ONLY or (label in _WHEN_NOT_ZERO and not any(view.history.get(label, ())))
        if value is not None and not hidden:
            parts.append(
                f"{format_number(value)} {short}" if short == "tok/s" else f"{short} {format_number(value)}"
            )
    if view.left is not None:
        parts.append(f"left {format_duration(view.left)}")
    return "  ".join(parts)


def alarms(metrics: Mapping[str, Any]) -> list[str]:
    """Messages for what must not go unnoticed."""
    found = []
    for name, meaning in names.ALARMS.items():
        value = names.find(metrics, (name,))
        if value is not None and value > 0:
            share = name.endswith("_share")
            found.append(f"{value:.0%} {meaning}" if share else f"{name} = {value:g}: {meaning}")
    odd = metrics.get("not_finite")
    return [*found, f"not finite: {', '.join(odd)}"] if isinstance(odd, Mapping) and odd else found


def render_run(
    view: RunView, warnings: Sequence[str], activity: RenderableType | None, width: int = 100
) -> RenderableType:
    """The live panel; made for 100 columns, usable from 60."""
    header = view.header
    title = Text.assemble(("rondo", "bold"), f" · {header.algorithm} · {header.model} · {header.device} ")
    parts: list[RenderableType] = [_progress(view), Text(), _numbers(view, width)]
    if view.phase_shares():
        parts += [Text(), _phases(view.phase_shares())]
    if view.sample is not None:
        parts += [Text(), *_sample(*view.sample)]
    if activity is not None:
        parts += [Text(), activity]
    if warnings:
        parts += [Text(), *(Text(f"! {shorten(message, 180)}", style="bold red") for message in warnings)]
    subtitle = Text(header.run_dir, style="dim") if header.run_dir else None
    return Panel(
        Group(*parts), title=title, subtitle=subtitle, title_align="left", subtitle_align="right", box=ROUNDED
    )


def _progress(view: RunView) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    for ratio in (None, 1, None, None):
        grid.add_column(ratio=ratio, no_wrap=True)
    total = view.total_steps
    times = f"{format_duration(view.elapsed)} gone"
    if view.left is not None:
        times += f", {format_duration(view.left)} left"
    share = f"{view.step / total:.0%}" if total else ""
    grid.add_row(
        Text(f"step {view.step}/{'?' if total is None else total}", style="bold"),
        ProgressBar(total=total or None, completed=view.step, pulse=total is None, complete_style="green"),
        share,
        Text(times, style="dim"),
    )
    return grid


def _numbers(view: RunView, width: int) -> RenderableType:
    shown = [(label, view.history[label]) for label, _, _ in FIELDS[view.kind] if label in view.history]
    shown = [(label, values) for label, values in shown if label not in _WHEN_NOT_ZERO or any(values)]
    room = max(0, min(20, (width - 60) // 2))  # for each sparkline, beside borders, labels and numbers
    if not shown:
        return Text("waiting for the first step", style="dim")
    grid = Table.grid(padding=(0, 2))
    for style in ("dim", "bold", "cyan", "dim", "bold", "cyan"):
        grid.add_column(style=style, justify="right" if style == "bold" else "left", no_wrap=True)
    half = -(-len(shown) // 2)
    for i in range(half):
        cells: list[str] = []
        for label, values in shown[i::half][:2]:
            cells += [label, format_number(values[-1]), sparkline(values, room).ljust(room)]
        grid.add_row(*cells)
    return grid


def _phases(shares: Sequence[tuple[str, float]], width: int = 24) -> RenderableType:
    """A bar of coloured stretches and its legend.

    Widths are cut from the running total, so that they add up.
    """
    bar, legend, total = Text(), Text(), 0.0
    for number, (name, share) in enumerate(shares):
        style = "bright_black" if name == "other" else _COLOURS[number % len(_COLOURS)]
        begin, end = round(total * width), round(min(1.0, total + share) * width)
        bar.append("█" * (end - begin), style=style)
        legend.append(f"{'  ' if number else ''}{name.replace('_', ' ')} {share:.0%}", style=style)
        total += share
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text("time", style="dim"), bar, legend)
    return grid


def _sample(step: int, sample: Sample) -> list[RenderableType]:
    reward = "" if sample.reward is None else f", reward {format_number(sample.reward)}"
    note = f", {clean_text(sample.note)}" if sample.note else ""
    return [
        Text(f"sample of step {step}{reward}{note}", style="dim"),
        Text(shorten(clean_text(sample.prompt).strip(), 260), style="italic"),
        Text(shorten(clean_text(sample.response).strip(), 400)),
    ]


def render_report(report: Report, encoding: str = "utf-8") -> RenderableType:
    """The final table: numbers before and after, answers to the same prompts, facts."""
    ascii_only = not encoding.lower().startswith("utf")
    box = ASCII if ascii_only else SIMPLE_HEAD
    parts: list[RenderableType] = []
    labels = [*report.before, *(label for label in report.after if label not in report.before)]
    if labels:
        table = Table(box=box, title="before and after", title_style="bold", title_justify="left")
        table.add_column("")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for label in labels:
            table.add_row(*_change(label, report.before.get(label), report.after.get(label)))
        parts.append(table)
    if report.samples:
        parts.append(_sample_table(report.samples, box, encoding))
    if report.facts:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in report.facts.items():
            grid.add_row(Text(clean_text(name, encoding)), Text(clean_text(value, encoding)))
        parts.append(grid)
    return Group(*parts)


def _change(label: str, before: float | None, after: float | None) -> tuple[Text, Text, Text, Text]:
    difference = "" if before is None or after is None else format_number(after - before)
    if difference and not difference.startswith("-"):
        difference = "+" + difference
    return (
        Text(label),
        Text(format_number(before)),
        Text(format_number(after), style="bold"),
        Text(difference),
    )


def _sample_table(samples: Sequence[BeforeAfter], box: Any, encoding: str) -> Table:
    table = Table(
        box=box, title="the same prompts", title_style="bold", title_justify="left", show_lines=True
    )
    for name in ("prompt", "before", "after"):
        table.add_column(name, ratio=1, overflow="fold")
    for pair in samples:
        either = pair.after or pair.before
        if either is not None:
            prompt = Text(_fit(either.prompt, 220, encoding), style="italic")
            table.add_row(prompt, _answer(pair.before, encoding), _answer(pair.after, encoding))
    return table


def _answer(sample: Sample | None, encoding: str) -> Text:
    if sample is None:
        return Text("-", style="dim")
    text = Text(_fit(sample.response, 320, encoding))
    notes = [f"reward {format_number(sample.reward)}"] if sample.reward is not None else []
    notes += [clean_text(sample.note, encoding)] if sample.note else []
    return text.append("\n" + ", ".join(notes), style="dim") if notes else text


def _fit(text: str, limit: int, encoding: str) -> str:
    ellipsis = " … " if encoding.lower().startswith("utf") else " ... "
    return shorten(clean_text(text, encoding).strip(), limit, ellipsis)
