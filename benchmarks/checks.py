"""What the checks cost: every stage of `.ci/run`, every file of tests, and the minutes that are left.

    python benchmarks/checks.py stage NAME COMMAND…   runs a command; what it took, into build/checks
    python benchmarks/checks.py show                  what build/checks holds, as the table of CONTRIBUTING.md
    python benchmarks/checks.py write                 the same into benchmarks/checks.json and CONTRIBUTING.md

`.ci/run` runs each of its parts as a stage; pytest's own report log (pytest-reportlog) of a stage lies beside
it. `write` is for the figures of an idle machine: tests/conftest.py starts files of tests by them, longest
first, and tests/benchmarks/test_checks.py holds the table against them. Needs the standard library only,
because the first stage installs all others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "checks"
RECORD = ROOT / "benchmarks" / "checks.json"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- benchmarks/checks.py writes what follows -->\n", "<!-- to here -->\n"
LIMIT_MINUTES = 50
"""That `.ci/run` may take on an idle machine."""
MOST_FILES = 25
"""In the table: those that take longest."""
KINDS = ("set_up", "call", "fast")


@dataclass(frozen=True)
class Stage:
    """One part of `.ci/run`."""

    name: str
    begin: float
    """Seconds since the epoch."""
    end: float
    idle: float
    """Seconds of all processors, whatever else ran."""
    processors: int
    python: str
    """The version that ran `stage`: `.ci/run` takes the one that environments are made of."""

    @property
    def seconds(self) -> float:
        """Returns how long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class File:
    """The tests of one file in one stage. Seconds of the worker that ran them."""

    stage: str
    path: str
    tests: int
    set_up: float
    """Fixtures, with what they take to end."""
    call: float
    fast: float
    """Of both, what `make test` runs: the tests without the marker `slow`."""

    @property
    def seconds(self) -> float:
        """Returns what it took in all."""
        return self.set_up + self.call


@dataclass(frozen=True)
class Record:
    """What `write` keeps. last: by stage, when each of its workers ended its last test."""

    machine: str
    day: str
    stages: tuple[Stage, ...]
    files: tuple[File, ...]
    last: Mapping[str, tuple[float, ...]]


# ---- one stage ----


def stage(name: str, command: list[str], folder: Path = FOLDER) -> int:
    """Runs a command, writes down what it took, and returns its exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, idle = time.time(), _idle_seconds()
    log = folder / f"{name}.jsonl"
    with subprocess.Popen(command, env={**os.environ, "CHECKS_LOG": str(log)}) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        status = process.wait()
    idle = _idle_seconds() - idle
    done = Stage(name, begin, time.time(), idle, os.cpu_count() or 1, platform.python_version())
    (folder / f"{name}.json").write_text(json.dumps(asdict(done)), encoding="utf-8")
    print(f"{name}: {done.seconds / 60:.1f} minutes, exit {status}", flush=True)
    return status


def _idle_seconds() -> float:
    """Of all processors since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


# ---- what stages and report logs say ----


def read(folder: Path) -> Record:
    """Returns what the stages of a folder took. Exits where there are none."""
    stages = [Stage(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    if not stages:
        sys.exit(f"{folder}: no stage was recorded there; `.ci/run` records its own")
    stages.sort(key=lambda one: one.begin)
    files: list[File] = []
    last: dict[str, tuple[float, ...]] = {}
    for one in stages:
        reports = list(_reports(folder.glob(f"{one.name}*.jsonl")))
        if reports:
            files += _files(one.name, reports)
            last[one.name] = _last(reports)
    files.sort(key=lambda one: (one.stage, one.path))
    return Record(_machine(), date.today().isoformat(), tuple(stages), tuple(files), last)


def _reports(logs: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """Yields those of tests, not of their collection."""
    for log in logs:
        with log.open(encoding="utf-8") as lines:
            for report in map(json.loads, lines):
                if report["$report_type"] == "TestReport":
                    yield report


def _files(stage: str, reports: Iterable[Mapping[str, Any]]) -> Iterator[File]:
    tests: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for report in reports:
        path = report["nodeid"].partition("::")[0]
        kind = "call" if report["when"] == "call" else "set_up"
        seconds[path][kind] += report["duration"]
        if "slow" not in report["keywords"]:
            seconds[path]["fast"] += report["duration"]
        if report["when"] == "call":
            tests[path].add(report["nodeid"])
    for path, took in seconds.items():
        yield File(stage, path, len(tests[path]), *(round(took[kind], 1) for kind in KINDS))


def _last(reports: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    ends: dict[str, float] = {}
    for report in reports:
        worker = report.get("worker_id", "one")
        ends[worker] = max(ends.get(worker, 0.0), report["stop"])
    return tuple(sorted(ends.values()))


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.machine()
    return f"{os.cpu_count()} cores of {name}, on which Python counts to a million in {_counting():.3f} s"


def _counting() -> float:
    """Returns what tells one machine from another: the shortest of five times, in seconds."""
    times = []
    for _ in range(5):
        begin, number = time.perf_counter(), 0
        while number < 1_000_000:
            number += 1
        times.append(time.perf_counter() - begin)
    return min(times)


# ---- the table ----


def table(record: Record) -> str:
    """Returns the text that stands in CONTRIBUTING.md."""
    begin = min(one.begin for one in record.stages)
    minutes = (max(one.end for one in record.stages) - begin) / 60
    is_whole = any(one.name == "install" for one in record.stages)
    what = (
        "`.ci/run` with all installations"
        if is_whole
        else "These stages of `.ci/run`, without installations,"
    )
    lines = [
        f"{what} took **{minutes:.1f} minutes** ({record.day}, {record.machine}; tests on Python "
        f"{record.stages[0].python}); "
        f"{LIMIT_MINUTES - minutes:.0f} are left. `make test` is {_fast(record):.1f} of them. "
        "A stage that begins before the end of another runs beside it.",
        "",
        "| stage | begins after | minutes | processors idle | a worker idle at its end | a further minute |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_stage_row(one, record, begin) for one in record.stages]
    lines += ["", "| tests | of | tests | set-up | call | both in `make test` |", "|---|---|---|---|---|---|"]
    order = sorted(record.files, key=lambda one: -one.seconds)
    rest = order[MOST_FILES:]
    sums = [sum(getattr(one, field) for one in rest) for field in ("tests", *KINDS)]
    lines += map(_file_row, [*order[:MOST_FILES], File("", f"{len(rest)} other files", *sums)])
    return "\n".join(lines) + "\n"


def _fast(record: Record) -> float:
    """Minutes of `make test`, with as many workers."""
    workers = len(record.last.get("test-all", ())) or 1
    return sum(one.fast for one in record.files if one.stage == "test-all") / workers / 60


def _stage_row(one: Stage, record: Record, begin: float) -> str:
    share = one.idle / (one.seconds * one.processors)
    worked = sum(file.seconds for file in record.files if file.stage == one.name)
    ends = record.last.get(one.name, ())
    alone = f"{sum(ends[-1] - end for end in ends):.0f} s" if ends else ""
    further = f"costs {one.seconds / worked:.2f}" if worked else ""
    times = (f"{seconds / 60:.1f}" for seconds in (one.begin - begin, one.seconds))
    return f"| {' | '.join((one.name, *times, f'{share:.0%}', alone, further))} |"


def _file_row(one: File) -> str:
    seconds = (f"{getattr(one, kind):.0f} s" for kind in KINDS)
    return f"| {one.path} | {one.stage} | {one.tests} | {' | '.join(seconds)} |"


def write(record: Record, kept: Path = RECORD, page: Path = PAGE) -> None:
    """Keeps a record, and puts its table where the last one stands. Exits where there is no place for it."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{page}: has no lines {BEGIN.strip()} and {END.strip()}, between which the table stands")
    stages = [asdict(one) for one in record.stages]
    head = {"machine": record.machine, "day": record.day, "last": record.last, "stages": stages}
    files = ",\n".join(f"  {json.dumps(asdict(one))}" for one in record.files)  # a line each, for diffs
    kept.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "files": [\n{files}\n ]\n}}\n', encoding="utf-8")
    page.write_text(before + BEGIN + table(record) + END + after, encoding="utf-8")


def kept(path: Path = RECORD) -> Record:
    """Returns what `write` has kept."""
    data = json.loads(path.read_text(encoding="utf-8"))
    stages = tuple(Stage(**one) for one in data["stages"])
    files = tuple(File(**one) for one in data["files"])
    last = {name: tuple(ends) for name, ends in data["last"].items()}
    return Record(data["machine"], data["day"], stages, files, last)


def main() -> int:
    """Runs one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("stage", help="runs a command and records what it took")
    one.add_argument("name")
    one.add_argument("run", nargs=argparse.REMAINDER, metavar="COMMAND…")
    commands.add_parser("show", help="prints the table of what was recorded")
    commands.add_parser("write", help="keeps what was recorded, and writes the table into CONTRIBUTING.md")
    given = parser.parse_args()
    if given.command == "stage":
        return stage(given.name, given.run)
    record = read(FOLDER)
    if given.command == "write":
        write(record)
    print(table(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
