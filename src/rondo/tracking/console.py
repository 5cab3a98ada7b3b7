"""What the user sees while a run goes on: a live panel on a terminal, one line per step elsewhere.

The only place outside the command line that writes to the terminal, through one rich Console.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from rondo.system.streams import LastingStream, clean_text, drawn_on, lasting
from rondo.tracking.shown import Header, Kind, Report, RunView, Sample, alarms, plain_line
from rondo.tracking.text import CleanConsole, format_duration, format_number, shorten
from rondo.tracking.view import render_report, render_run

Mode = Literal["auto", "live", "plain", "off"]

_REFRESH_PER_SECOND = 2  # drawing takes CPU time from training
_TOLD_SECONDS = 10.0  # between two lines of how far something is, where nothing is drawn
_WARNINGS_SHOWN = 3  # the latest; all are in the log
_PLAIN_SUPERVISED_LINES = 40  # steps of supervised training are many and short: a log shows some of them


@dataclass(eq=False)
class _Activity:
    """Something long that is no step."""

    label: str
    started: float
    so_far: str = ""

    def __post_init__(self) -> None:
        self.told = self.started


class Console:
    """What is shown of a run. A context manager, which leaves the terminal as it was found, with the last
    picture on it.

    mode: `auto` is live on a terminal that can show it and plain otherwise; `off` shows warnings only.
    samples: how many trajectories of a step are shown in plain mode, and pairs in the final table. `out`
    and `clock` (seconds) are seams for tests.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        samples: int = 2,
        out: RichConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = lasting(drawn_on(sys.stdout), "standard output")
        self.out = out or CleanConsole(highlight=False, file=stream)
        self._notebook = Notebook() if out is None and mode in ("auto", "live") and in_notebook() else None
        if self._notebook is not None:
            mode = "live"
        elif mode == "auto":
            utf8 = self.out.encoding.lower().startswith("utf")
            drawable = self.out.is_terminal and not self.out.is_dumb_terminal and utf8
            mode = "live" if drawable else "plain"
        self.mode: Mode = mode
        self.samples = samples
        self._clock = clock
        self._view: RunView | None = None
        self._started = 0.0
        self._first_step = 0
        self._warnings: dict[str, int] = {}
        self._activities: list[_Activity] = []
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tell_silence(self, tell: Callable[[str], None]) -> None:
        """Calls `tell` with the reason once the console can show nothing any more: at once where that is so
        already.
        """
        if isinstance(self.out.file, LastingStream):
            self.out.file.tell(tell)

    def start(
        self, header: Header, total_steps: int | None, *, kind: Kind = "rl", first_step: int = 0
    ) -> None:
        """Begins a stage (SFT, RL). first_step: steps already done by the run that this one goes on with."""
        self.end_stage()
        if self.mode == "off":
            return
        self._view = RunView(header, total_steps, kind, step=first_step)
        self._started = self._clock()
        self._first_step = first_step
        if self.mode == "plain":
            steps = "" if total_steps is None else f", {total_steps} steps"
            resumed = f", going on after step {first_step}" if first_step else ""
            where = f", in {header.run_dir}" if header.run_dir else ""
            self._line(f"rondo: {header.algorithm}, {header.model}, {header.device}{steps}{resumed}{where}")
        self._show()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows a step that is done. metrics: as logged; what is missing is not shown."""
        view = self._view
        if view is not None:
            view.add(step, metrics)
            view.elapsed = self._clock() - self._started
            done = step - self._first_step
            if view.total_steps is not None and done > 0:
                view.left = view.elapsed / done * max(0, view.total_steps - step)
            self._redraw()
            every = max(1, (view.total_steps or 1) // _PLAIN_SUPERVISED_LINES) if view.kind != "rl" else 1
            if self.mode == "plain" and (step % every == 0 or step == 1):
                self._line(plain_line(view, metrics))
        for message in alarms(metrics):
            self.warn(message, where=f"step {step}")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Shows trajectories of a step, as text. Live: the first one stays until the next call."""
        if self._view is not None and samples:
            self._view.sample = (step, samples[0])
        if self.mode == "plain":
            for sample in samples[: self.samples]:
                reward = "" if sample.reward is None else f" (reward {format_number(sample.reward)})"
                self._line(
                    f"  sample{reward}: {_one_line(sample.prompt, 120)} -> {_one_line(sample.response, 240)}"
                )

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows results of an evaluation; labels as in `metrics`, less a leading `eval/`."""
        shown = {n.removeprefix("eval/"): v for n, v in metrics.items() if isinstance(v, int | float)}
        numbers = "  ".join(f"{name} {format_number(float(value))}" for name, value in shown.items())
        self.note(f"evaluation at step {step}: {numbers}")

    def note(self, message: str) -> None:
        """Writes a line that stays."""
        if self.mode != "off":
            self._line(message)

    def warn(self, message: str, where: str = "") -> None:
        """Shows a warning in every mode. Live: it stays in the panel with how often it came."""
        key = clean_text(message)
        self._warnings[key] = self._warnings.pop(key, 0) + 1
        if self.mode != "live" or self._live is None or self._view is None:
            self._line(f"WARNING {where}{': ' if where else ''}{message}", style="bold red")

    @contextmanager
    def phase(self, label: str) -> Iterator[Callable[[str], None]]:
        """Shows the progress of something long that is no step: `with console.phase("loading model"): …`.
        Gives a function that says how far it is.
        """
        activity = _Activity(label, self._clock())
        self._activities.append(activity)
        if self.mode == "plain":
            self._line(f"{label} ...")
        self._show()

        def tell(so_far: str) -> None:
            activity.so_far = so_far
            now = self._clock()
            if so_far and self.mode == "plain" and now - activity.told >= _TOLD_SECONDS:
                activity.told = now
                self._line(f"{label}: {so_far}")

        try:
            yield tell
        finally:
            self._activities.remove(activity)
            taken = self._clock() - activity.started
            if self.mode != "off" and taken >= 1:
                self._line(f"{label}: {format_duration(taken)}")

    def end_stage(self) -> None:
        """Closes the stage: its panel stays as it is now, and a line says where it began and ended."""
        self.close()
        view = self._view
        self._view = None
        if view is None:
            return
        label = "reward" if view.kind == "rl" else "loss"
        values = view.history.get(label, [])
        course = f", {label} {format_number(values[0])} to {format_number(values[-1])}" if values else ""
        elapsed = format_duration(self._clock() - self._started)
        to = f", to step {view.step}," if self._first_step else ""
        steps = view.step - self._first_step
        self._line(f"{view.header.algorithm}: {steps} steps{to} in {elapsed}{course}")

    def report(self, report: Report) -> None:
        """Shows the final table. Ends the stage."""
        self.end_stage()
        if self.mode != "off":
            shown = Report(report.before, report.after, list(report.samples)[: self.samples], report.facts)
            self._print(render_report(shown, self.out.encoding))

    def _show(self) -> None:
        if self._notebook is not None:
            self._redraw()
        elif self.mode == "live" and self._live is None:
            self._live = Live(
                get_renderable=self._render,
                console=self.out,
                refresh_per_second=_REFRESH_PER_SECOND,
                vertical_overflow="ellipsis",
            )
            self._live.start()

    def close(self) -> None:
        """Turns the panel into ordinary text; warnings for which it had no room follow. Idempotent."""
        if self._notebook is not None and self._view is not None:
            self._notebook.add(self._render())
        if self._live is not None:
            self._live.stop()
            self._live = None
            for message in self._counted_warnings()[:-_WARNINGS_SHOWN]:
                self._line(f"WARNING {message}", style="bold red")
        self._warnings.clear()

    def _render(self) -> RenderableType:
        """Returns the panel, for the live display's thread."""
        view, activity = self._view, None
        activities = list(self._activities)  # the loop's thread may end one meanwhile
        if activities:
            now = activities[-1]
            taken = format_duration(self._clock() - now.started)
            text = "  ".join(filter(None, [now.label, taken, now.so_far]))
            self._spinner.update(text=Text(clean_text(text), style="dim"))
            activity = self._spinner
        if view is None:
            return activity or Text()
        view.elapsed = self._clock() - self._started
        return render_run(view, self._counted_warnings()[-_WARNINGS_SHOWN:], activity, self.out.width)

    def _counted_warnings(self) -> list[str]:
        """Returns the warnings so far, each with how often it came; the newest last."""
        counts = list(self._warnings.items())
        return [f"{message} ({count} times)" if count > 1 else message for message, count in counts]

    def _line(self, message: str, style: str = "") -> None:
        """Prints one line of any length; markup in it is text."""
        self._print(Text(clean_text(message), style=style), soft_wrap=True)  # rich drops some controls

    def _print(self, what: RenderableType, **options: Any) -> None:
        if self._notebook is None:
            self.out.print(what, **options)
        else:
            self._notebook.add(what)
            self._redraw(now=True)

    def _redraw(self, *, now: bool = False) -> None:
        if self._notebook is not None:
            self._notebook.show(self._render(), now=now)


def _one_line(text: str, limit: int) -> str:
    return shorten(" ".join(text.split()), limit)


# ---- a notebook: one output of the cell, which changes while the run goes on ----


_WIDTH = 100
_LINES = 200  # that stay, the latest
_INTERVAL_SECONDS = 0.5  # between two pictures: drawing takes CPU time from training
_STYLE = "white-space: pre; line-height: normal; font-family: Menlo, 'DejaVu Sans Mono', consolas, monospace"


class Notebook:
    """The lines so far, and below them the panel. Made in a cell, it shows there, from any thread."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str]] = []
        self._handle: Any = None
        self._shown = 0.0

    def add(self, line: RenderableType) -> None:
        """Adds what stays."""
        self._lines = [*self._lines[1 - _LINES :], _drawn(line)]

    def show(self, panel: RenderableType, *, now: bool = False) -> None:
        """Shows everything; now: also right after the last time."""
        if not now and time.monotonic() - self._shown < _INTERVAL_SECONDS:
            return
        from IPython.display import display  # there is one: see `in_notebook`

        pages, texts = zip(*self._lines, _drawn(panel), strict=True)
        data = {"text/html": f'<pre style="{_STYLE}">{"".join(pages)}</pre>', "text/plain": "".join(texts)}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._shown = time.monotonic()


def in_notebook() -> bool:
    """Says whether a notebook's kernel runs this."""
    return RichConsole().is_jupyter


def _drawn(what: RenderableType) -> tuple[str, str]:
    """Returns HTML and plain text."""
    console = RichConsole(
        file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False, force_terminal=True,
        color_system="truecolor", highlight=False,
    )  # fmt: skip
    console.print(what)
    page = console.export_html(inline_styles=True, code_format="{code}", clear=False)
    return page, console.export_text()
