"""Numbers and text for people: short, aligned, and harmless on any terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from rondo.system.streams import clean_text

_BARS = "▁▂▃▄▅▆▇█"


def format_number(value: float | None) -> str:
    """Writes a number in at most six characters: 0.412, 34.5, 1.2e-03, 3.2k, 12.3M; `-` for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size != size or size == float("inf"):
        return str(value)
    if size >= 10_000:
        for unit in ("k", "M", "G", "T"):
            size /= 1000
            if size < 999.5 or unit == "T":
                return f"{'-' if value < 0 else ''}{size:.{1 if size < 99.95 else 0}f}{unit}"
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.01 or size == 0:
        return f"{value:.3f}"
    return f"{value:.1e}"


def format_duration(seconds: float) -> str:
    """Writes a duration as 0:07, 12:30, 3:05:00 or 2d 04:00:00."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds_left = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}:{seconds_left:02d}"
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Draws the course of `values` in at most `width` characters; neighbours are averaged when there are more
    values.
    """
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    if len(finite) < 2:
        return ""
    cells = min(width, len(finite))
    edges = [len(finite) * i // cells for i in range(cells + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        return _BARS[3] * cells
    return "".join(_BARS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def shorten(text: str, limit: int, ellipsis: str = " … ") -> str:
    """Cuts a text to `limit` characters; what is too long loses its middle, for answers stand at the end."""
    if len(text) <= limit:
        return text
    keep = max(2, limit - len(ellipsis))
    return text[: keep - keep // 2] + ellipsis + text[len(text) - keep // 2 :]


class CleanConsole(RichConsole):
    """A rich Console whose escape sequences are its own: all other text is drawn as `clean_text`, that of
    programs whose output it catches, too. (Text that must fit its frame is cleaned before it is laid out.)
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields what is drawn of `renderable`."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(clean_text(text, self.encoding), style)
