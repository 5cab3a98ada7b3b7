"""`rondo runs` and `rondo compare`: what runs there are, and in what they differ, to read in the terminal."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from rondo.cli.arguments import note
from rondo.core.errors import DataError, RondoError

if TYPE_CHECKING:
    from rondo.tracking.runs import RunRecord

HELP = {
    "runs": "list runs, the newest first: command, state, steps, last metrics, wall time",
    "compare": "compare runs: their settings, their metrics, and where they begin to differ",
}
_HEAD = ("run", "command", "state", "steps", "last metrics", "time", "began")
_SHOWN = 3  # of the console's numbers, on a run's line
_LONGEST = 60  # characters of a setting's value in a table


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the two subcommands."""
    runs = subparsers.add_parser("runs", help=HELP["runs"], description=HELP["runs"])
    holds = "that holds runs, or is one (default: runs)"
    runs.add_argument("folder", nargs="*", default=["runs"], metavar="FOLDER", help=holds)
    compare = subparsers.add_parser("compare", help=HELP["compare"], description=HELP["compare"])
    compare.add_argument("first", metavar="A", help="a run's folder (runs/…)")
    compare.add_argument("others", nargs="+", metavar="B", help="other runs' folders, each compared with A")
    compare.add_argument("--step", type=int, help="metrics of this step (default: the last of each)")
    which = "these metrics, such as 'eval/*' (default: those of the console)"
    compare.add_argument("--metrics", nargs="+", default=[], metavar="PATTERN", help=which)
    for parser in (runs, compare):
        parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Prints the list, or the comparison."""
    return _runs(args) if args.command == "runs" else _compare(args)


def _runs(args: argparse.Namespace) -> int:
    """Says on standard error what is no run, and which cannot be read."""
    from rondo.tracking.runs import read_run, runs_in

    found: list[RunRecord] = []
    for folder in args.folder:
        runs, others = runs_in(folder)
        for path in runs:
            try:
                found.append(read_run(path))
            except (RondoError, OSError) as error:  # such as one that is removed meanwhile
                note(error)
        if others or not runs:
            named = ", ".join(one.name for one in others)
            note(f"{folder}: " + (f"not the folders of runs: {named}" if named else "there is no run in it"))
    found.sort(key=lambda one: one.began, reverse=True)
    if args.json:
        for one in found:
            print(json.dumps({"command": _command(one), **asdict(one)}))
    elif found:
        _print_table([_HEAD, *map(_row, found)])
    return 0


def _command(run: RunRecord) -> str:
    return {"rl": "train", "reward_model": "reward-model"}.get(str(run.kind), run.kind or "-")


def _row(run: RunRecord) -> Sequence[str]:
    from rondo.tracking.shown import FIELDS, find
    from rondo.tracking.text import format_duration, format_number

    shown = [
        f"{short} {format_number(find(run.metrics, names))}"
        for _, short, names in FIELDS.get(run.kind or "rl", ())
        if any(name in run.metrics for name in names)
    ]
    steps = f"{run.step}/{'?' if run.total_steps is None else run.total_steps}"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))
    metrics = "  ".join(shown[:_SHOWN]) or "-"
    return run.run, _command(run), run.state, steps, metrics, format_duration(run.seconds), began


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def _compare(args: argparse.Namespace) -> int:
    """Prints settings, then metrics, then where the sums of each begin to differ from those of the first."""
    from rondo.config.printing import side_by_side
    from rondo.tracking.runs import read_run, settings_of
    from rondo.tracking.text import shorten

    names = [args.first, *args.others]
    runs = [read_run(name, args.step) for name in names]
    settings = side_by_side(*map(settings_of, names))
    metrics = {name: [run.metrics.get(name) for run in runs] for name in _names(runs, args.metrics)}
    sums = {other: _sums(args.first, other) for other in args.others}
    if args.json:
        values = {
            key: [None if one == "not set" else json.loads(one) for one in settings[key]] for key in settings
        }
        said = {"runs": names, "steps": [run.step for run in runs], "settings": values, "metrics": metrics}
        print(json.dumps(said | {"sums": {other: told for other, (_, told) in sums.items()}}, indent=2))
        return 0
    rows = [(key, *(shorten(value, _LONGEST) for value in settings[key])) for key in settings]
    _print_table([("setting", *names), *rows] if rows else [("their settings are equal",)])
    head = ("metric", *(f"{run.run}, step {run.step}" for run in runs))
    cells = [
        (name, _cell(values[0]), *(_cell(one, values[0]) for one in values[1:]))
        for name, values in metrics.items()
    ]
    print()
    _print_table([head, *cells])
    print()
    for other, (line, _) in sums.items():
        print(f"{args.first} against {other}: {line}")
    return 0


def _names(runs: Sequence[RunRecord], patterns: Sequence[str]) -> list[str]:
    """Returns the metrics to show, of those that one of the runs has. Raises DataError for none."""
    from rondo.tracking.shown import FIELDS

    there = dict.fromkeys(name for run in runs for name in run.metrics)
    if not patterns:
        fields = [names for run in runs for _, _, names in FIELDS.get(run.kind or "rl", ())]
        return list(dict.fromkeys(name for names in fields for name in names if name in there))
    found = [name for name in there if any(fnmatch(name, pattern) for pattern in patterns)]
    if not found:
        some = ", ".join(list(there)[:8])
        raise DataError(f"--metrics {' '.join(patterns)}: the runs have none like that. They have {some} …")
    return found


def _cell(value: Any, first: Any = None) -> str:
    """Returns a metric's value as text, and the difference to that of the first run."""
    from rondo.tracking.text import format_number

    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    difference = f" ({value - first:+.3g})" if isinstance(first, int | float) else ""
    return f"{format_number(value)}{difference}"


def _sums(first: str, other: str) -> tuple[str, dict[str, Any]]:
    """Returns where another run begins to differ: as a line, and for programs."""
    from rondo.tracking.sums import compared

    try:
        found = compared(first, other)
    except DataError as error:  # `rondo sft` keeps none, for one
        return str(error), {"none": str(error)}
    return found.line(), asdict(found)
