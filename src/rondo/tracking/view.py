"""What the console shows, as rich renderables made from plain state. Nothing here prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rondo.system.streams import clean_text
from rondo.tracking.shown import FIELDS, BeforeAfter, Report, RunView, Sample
from rondo.tracking.text import format_duration, format_number, shorten, sparkline

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def render_run(
    view: RunView, warnings: Sequence[str], activity: RenderableType | None, width: int = 100
) -> RenderableType:
    """Returns the live panel, made for 100 columns, usable from 60."""
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
    shown = [(label, view.history[label]) for label, _, _ in FIELDS[view.kind] if view.is_shown(label)]
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
    """Returns a bar with a coloured stretch for each phase, and its legend.

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
    return [
        Text(", ".join([f"sample of step {step}", *_notes(sample)]), style="dim"),
        Text(_fit(sample.prompt, 260), style="italic"),
        *_images(sample),
        Text(_fit(sample.response, 400)),
    ]


def _images(sample: Sample, encoding: str = "utf-8") -> list[Text]:
    return [
        Text(clean_text(one.line(number), encoding), style="dim")
        for number, one in enumerate(sample.images, 1)
    ]


def render_report(report: Report, encoding: str) -> RenderableType:
    """Returns the final table: numbers before and after, answers to the same prompts, facts. encoding: of
    what it is drawn on, whose frames are ASCII where it has no others.
    """
    parts: list[RenderableType] = []
    labels = [*report.before, *(label for label in report.after if label not in report.before)]
    if labels:
        table = _table("before and after")
        table.add_column("")
        for name in ("before", "after", "change"):
            table.add_column(name, justify="right")
        for label in labels:
            table.add_row(*_change(label, report.before.get(label), report.after.get(label)))
        parts.append(table)
    if report.samples:
        parts.append(_sample_table(report.samples, encoding))
    if report.facts:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in report.facts.items():
            grid.add_row(Text(clean_text(name)), Text(clean_text(value)))
        parts.append(grid)
    return Group(*parts)


def _table(title: str, *, show_lines: bool = False) -> Table:
    return Table(
        box=SIMPLE_HEAD, title=title, title_style="bold", title_justify="left", show_lines=show_lines
    )


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


def _sample_table(samples: Sequence[BeforeAfter], encoding: str) -> Table:
    table = _table("the same prompts", show_lines=True)
    for name in ("prompt", "before", "after"):
        table.add_column(name, ratio=1, overflow="fold")
    for pair in samples:
        either = pair.after or pair.before
        if either is not None:
            prompt = Text(_fit(either.prompt, 220, encoding), style="italic")
            for line in _images(either, encoding):
                prompt.append("\n").append(line)
            table.add_row(prompt, _answer(pair.before, encoding), _answer(pair.after, encoding))
    return table


def _answer(sample: Sample | None, encoding: str) -> Text:
    if sample is None:
        return Text("-", style="dim")
    text = Text(_fit(sample.response, 320, encoding))
    notes = _notes(sample, encoding)
    return text.append("\n" + ", ".join(notes), style="dim") if notes else text


def _notes(sample: Sample, encoding: str = "utf-8") -> list[str]:
    """Returns what is shown beside an answer: its reward, and the note."""
    notes = [] if sample.reward is None else [f"reward {format_number(sample.reward)}"]
    return [*notes, clean_text(sample.note, encoding)] if sample.note else notes


def _fit(text: str, limit: int, encoding: str = "utf-8") -> str:
    ellipsis = " … " if encoding.lower().startswith("utf") else " ... "
    return shorten(clean_text(text, encoding).strip(), limit, ellipsis)
