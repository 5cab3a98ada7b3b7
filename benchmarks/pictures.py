"""The pictures of the README, light and dark, from runs of two recipes.

    rondo train quickstart trainer.run_dir=runs/pictures/quickstart
    rondo train visual     trainer.run_dir=runs/pictures/visual
    python benchmarks/pictures.py [--runs runs/pictures] [--out docs/pictures]

learns-*.svg: reward and response length of the quickstart by step, and held-out answers before and after.
sees-*.svg: held-out boards of `visual`, its answers before and after, and the way that the latter take.
Nothing is chosen by hand: the answers are the first ones that the reward calls wrong before and right after,
each of another kind of prompt or length of way. Needs matplotlib and Pillow.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from rondo.recipes.visual import MOVES, SIDE
from rondo.tracking import read_metrics
from rondo.tracking.metrics import series
from rondo.tracking.shown import RESPONSE_LENGTH, REWARD

ROOT = Path(__file__).resolve().parents[1]
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Colours:
    text: str
    faint: str
    """Of axes and lines between rows."""
    good: str
    bad: str


THEMES = {
    "light": Colours(text="#1f2328", faint="#9aa3ad", good="#2457a8", bad="#c2571a"),
    "dark": Colours(text="#e6edf3", faint="#6e7681", good="#7aa7f0", bad="#f0986a"),
}


@contextmanager
def drawn(size: tuple[float, float], colours: Colours, path: Path) -> Iterator[Figure]:
    """Gives a figure without a background, and writes it. The same runs make the same file."""
    settings = {
        "svg.hashsalt": path.stem,
        "font.size": 10,
        "text.color": colours.text,
        "axes.labelcolor": colours.text,
        "axes.edgecolor": colours.faint,
        "xtick.color": colours.text,
        "ytick.color": colours.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, transparent=True, metadata={"Date": None})


def answers(run: Path) -> list[tuple[Answer, Answer]]:
    """Returns each held-out prompt's greedy answer before and after the run."""
    first, *_, last = sorted((run / "evaluations").glob("step-*.jsonl"))
    before, after = ([json.loads(line) for line in file.read_text().splitlines()] for file in (first, last))
    return [(a, b) for a, b in zip(before, after, strict=True) if a["sample_index"] == 0]


def learnt(run: Path, kinds: int, kind: Any) -> list[tuple[Answer, Answer]]:
    """Returns the first prompt of each kind whose answer was wrong before and is right after."""
    found: dict[Any, tuple[Answer, Answer]] = {}
    for before, after in answers(run):
        if before["reward"] == 0 and after["reward"] == 1:
            found.setdefault(kind(after), (before, after))
    return list(itertools.islice(found.values(), kinds))


def curve(axes: Any, lines: Sequence[Mapping[str, Any]], metric: tuple[str, ...], colour: str) -> None:
    """Draws a metric by step: faintly each step, and the mean of five."""
    steps, values = series(lines, metric)
    axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
    smooth = [sum(values[max(0, i - 4) : i + 1]) / min(5, i + 1) for i in range(len(values))]
    axes.plot(steps, smooth, color=colour, linewidth=2)
    axes.set_xlabel("step")


def learns(run: Path, colours: Colours, path: Path) -> None:
    """Draws the quickstart: two curves, and a table of answers."""
    lines = list(read_metrics(run))
    with drawn((9.2, 2.7), colours, path) as figure:
        grid = figure.add_gridspec(
            1, 3, width_ratios=(1, 1, 2.1), left=0.05, right=0.995, top=0.87, bottom=0.18
        )
        reward, length, table = (figure.add_subplot(cell) for cell in grid)
        curve(reward, lines, REWARD, colours.good)
        reward.set(ylim=(0, 1))
        reward.set_title("reward", loc="left", fontsize=10)
        curve(length, lines, RESPONSE_LENGTH, colours.bad)
        length.set(ylim=(0, None))
        length.set_title("tokens of an answer", loc="left", fontsize=10)
        table.axis("off")
        table.set(xlim=(0, 1), ylim=(0, 1))
        right = [sum(both[i]["reward"] for both in answers(run)) / len(answers(run)) for i in (0, 1)]
        heads = ("held-out prompt", f"before: {right[0]:.0%}", f"after: {right[1]:.0%}")
        for x, head in zip((0, 0.56, 0.82), heads, strict=True):
            table.text(x, 1.02, head, va="bottom")
        for row, (before, after) in enumerate(learnt(run, 3, lambda one: one["prompt"].split()[1])):
            top = 1 - row / 3
            table.axhline(top, color=colours.faint, linewidth=0.6)
            table.text(0, top - 0.06, before["prompt"].replace(". How", ".\nHow"), va="top", fontsize=9)
            table.text(0.56, top - 0.06, before["text"], va="top", fontsize=9, color=colours.bad)
            table.text(0.82, top - 0.06, after["text"], va="top", fontsize=9, color=colours.good)


def way(axes: Any, text: str, disc: tuple[float, float], cell: float, colour: str) -> None:
    """Draws the moves of an answer over its board."""
    x, y = disc
    for move in text.partition("####")[2].split():
        across, down = (cell * step for step in MOVES[move])
        axes.annotate(
            "", (x + across, y + down), (x, y), arrowprops={"arrowstyle": "->", "color": colour, "lw": 2}
        )
        x, y = x + across, y + down


def sees(run: Path, colours: Colours, path: Path) -> None:
    """Draws boards with the answers that they got."""
    chosen = learnt(run, 4, lambda one: len(one["text"].partition("####")[2].split()))
    with drawn((9.2, 2.5), colours, path) as figure:
        grid = figure.subplots(1, len(chosen), squeeze=False)
        figure.subplots_adjust(left=0.01, right=0.99, top=0.98, bottom=0.24, wspace=0.3)
        for axes, (before, after) in zip(grid.flat, chosen, strict=True):
            picture = Image.open(run / "images" / after["images"][0]["sha256"]).resize(
                (288, 288), Image.Resampling.NEAREST
            )
            axes.imshow(picture)
            cell = picture.width / SIDE
            start = int(after["text"].split()[0]) - 1
            way(
                axes,
                after["text"],
                ((start % SIDE + 0.5) * cell, (start // SIDE + 0.5) * cell),
                cell,
                "#1f2328",
            )
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(True)
            said = (("before", before, colours.bad, -0.05), ("after", after, colours.good, -0.17))
            for when, answer, colour, y in said:
                text = f"{when}  {answer['text']}"
                axes.text(0, y, text, color=colour, va="top", fontsize=8, transform=axes.transAxes)


def main() -> None:
    """Draws both pictures in both themes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "pictures", help="folder of the two runs"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for theme, colours in THEMES.items():
        learns(args.runs / "quickstart", colours, args.out / f"learns-{theme}.svg")
        sees(args.runs / "visual", colours, args.out / f"sees-{theme}.svg")


if __name__ == "__main__":
    main()
