"""Which of fifty planted edits of src the tests catch: a change of the tests must catch the same ones.

    python benchmarks/planted_edits.py list [CHECKOUT] [--seed 0] [--count 50]
    python benchmarks/planted_edits.py draw [CHECKOUT] --sample SAMPLE.json
    python benchmarks/planted_edits.py run CHECKOUT --sample SAMPLE.json --out RESULTS.json [--seconds 60]
    python benchmarks/planted_edits.py compare BEFORE.json AFTER.json     exit 1 where fewer were caught after

The sample depends on src and the seed only, and fits another commit where the edited lines are the
same there. Each edit (`drawn_edits.py`) is made in a copy of the checkout. There the tests of its room
(tests/<room> without those marked slow) run until one fails, all have passed, or the time is over. The test
that fails is run without the edit, too: one that fails anyway has caught nothing. An interrupted `run` goes
on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from drawn_edits import Edit, draw, edited, planted

ROOT = Path(__file__).resolve().parent.parent
# Tests of a room that are elsewhere than in a folder of its name or a test_<room>.py: places in tests/.
ROOMS = {"__init__": ("api",), "__main__": ("cli",), "recipes": ("recipes", "trainers")}
ANYWAY = "fails anyway"
OUTCOMES = ("caught", "survived", "time", ANYWAY)
OPTIONS: tuple[str, ...] = ("-x", "-q", "-p", "no:cacheprovider", "-p", "planted_edits_reporter")
OPTIONS += ("--hypothesis-profile=ci", "-m", "not slow")
# What an edit's processes carry in their environment: the file that the names of failed tests are written to.
MARK = "PLANTED_EDIT"
REPORTER = f"""
import os

def pytest_runtest_logreport(report):
    if report.failed:
        with open(os.environ["{MARK}"], "a", encoding="utf-8") as file:
            print(report.nodeid, file=file)

pytest_collectreport = pytest_runtest_logreport
"""


@dataclass(frozen=True)
class Result:
    edit: Edit
    outcome: str
    """One of OUTCOMES."""
    test: str
    """The first that failed; empty: none."""
    took: float
    """Seconds."""


def places_of(checkout: Path, room: str) -> list[Path]:
    """Returns the folders and files with the tests of a room."""
    names = ROOMS.get(room, (room, f"test_{room}.py"))
    if not (places := [checkout / "tests" / name for name in names if (checkout / "tests" / name).exists()]):
        sys.exit(f"{checkout}/tests has no tests of {room}: say in ROOMS of {__file__} where they are")
    return places


def files_of(checkout: Path, edit: Edit) -> list[str]:
    """Returns the test files of a room: first those that are called as the module is or name it."""
    files: list[Path] = []
    for place in places_of(checkout, edit.room):
        files += [place] if place.is_file() else sorted(place.rglob("test_*.py"))
    module = edit.file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    first = {f for f in files if f.name.startswith(f"test_{name}") or named.search(f.read_text("utf-8"))}
    return [f.relative_to(checkout).as_posix() for f in sorted(files, key=lambda f: f not in first)]


def git(checkout: Path, *arguments: str) -> str:
    """Returns what git says of a checkout."""
    done = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{checkout}: {done.stderr.strip()}: name a checkout of rondo")
    return done.stdout


def commit_of(checkout: Path) -> str:
    """Returns its commit, and whether files of it were changed since."""
    return git(checkout, "describe", "--always", "--dirty", "--exclude=*").strip()


@contextmanager
def scratch(checkout: Path) -> Iterator[Path]:
    """Makes a folder with a copy of what git knows or would take up, and removes it."""
    files = git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    # A short name: the path of a socket in it has no more than 107 characters.
    with tempfile.TemporaryDirectory(prefix="pe-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # sandboxes look into it as other users
        for file in files:
            if (checkout / file).is_file():
                target = folder / "checkout" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / file, target)
        (folder / "plugin").mkdir()
        (folder / "plugin" / "planted_edits_reporter.py").write_text(REPORTER)
        yield folder


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends a process's group, and wherever they are, those with its mark and their children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while True:
        left: list[psutil.Process] = []
        for each in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is another user's
                if each.environ().get(MARK) == mark:
                    left += [each, *each.children(recursive=True)]
        if not left:
            return
        if time.monotonic() > deadline:
            sys.exit(f"processes {[each.pid for each in left]} do not end: end them, and run this once more")
        for each in left:
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=1)


def pytest_in(folder: Path, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Runs pytest in the copy; returns its exit code, None at the limit, and the first test that failed."""
    checkout, failed, temporary = folder / "checkout", folder / "failed", folder / "t"
    failed.write_text("")
    temporary.mkdir()
    temporary.chmod(0o1777)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = (checkout / "src", checkout, folder / "plugin")
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", MARK: str(failed)}
    # Nothing that edited code keeps may reach the next edit.
    environment |= {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(temporary / "cache")}
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--rootdir={checkout}", *arguments]
    code = None
    with (folder / "output").open("wb") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=checkout, env=environment, start_new_session=True, **streams)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            end(process, str(failed))
            # A test that was ended may leave folders deeper than `shutil.rmtree` has descriptors for.
            subprocess.run(["rm", "-rf", temporary], check=True)
    test = failed.read_text("utf-8").partition("\n")[0]
    if not test and code not in (None, 0, 5):  # 5: no tests, as all are slow
        said = (folder / "output").read_text("utf-8", "replace").split("\n")
        test = f"pytest, with exit code {code}: {next((line for line in reversed(said) if line.strip()), '')}"
    return code, test


def outcome_of(folder: Path, edit: Edit, seconds: float) -> tuple[str, str]:
    """Returns the outcome of an edit, and the test that failed."""
    files = files_of(folder / "checkout", edit)
    with planted(folder / "checkout", edit):
        code, test = pytest_in(folder, files, seconds)
    if not test:
        return ("time" if code is None else "survived"), ""
    alone = [test] if "::" in test else ["--collect-only", *files]
    return (ANYWAY if pytest_in(folder, alone, seconds)[1] else "caught"), test


def load(path: Path, remedy: str) -> dict[str, Any]:
    """Returns what `draw` or `run` wrote, its rows as Edits or Results, by number."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if "results" in content:
            rows = [Result(**{**row, "edit": Edit(**row["edit"])}) for row in content["results"]]
            return {**content, "results": {row.edit.number: row for row in rows}}
        return {**content, "edits": {row["number"]: Edit(**row) for row in content["edits"]}}
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}: {remedy}")
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path} was not written by this program ({error!r}): {remedy}")


def save(path: Path, content: dict[str, Any]) -> None:
    """Writes a file as a whole, or not."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        part.replace(path)
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}: name a file that can be written")


def run(checkout: Path, edits: Sequence[Edit], out: Path, seconds: float) -> None:
    """Tests each edit that has no result in `out` yet."""
    head = {"commit": commit_of(checkout), "seconds": seconds}
    done: dict[int, Result] = {}
    if out.exists():
        earlier = load(out, "name another --out")
        done, theirs = earlier.get("results", {}), {key: earlier.get(key) for key in head}
        other = [edit.number for edit in edits if edit.number in done and done[edit.number].edit != edit]
        if other or theirs != head:
            sys.exit(f"{out} is of {theirs}, this is {head}; edits that differ: {other}: name another --out")
    with scratch(checkout) as folder:
        for edit in edits:  # before the first of them takes its time
            edited(folder / "checkout", edit)
            files_of(folder / "checkout", edit)
        for edit in edits:
            if edit.number in done and done[edit.number].outcome != ANYWAY:
                continue
            began = time.monotonic()
            outcome, test = outcome_of(folder, edit, seconds)
            result = done[edit.number] = Result(edit, outcome, test, round(time.monotonic() - began, 1))
            save(out, {**head, "results": [asdict(done[number]) for number in sorted(done)]})
            print(f"{edit.number} {edit}: {outcome} {test} ({result.took} s)", flush=True)
    counts = Counter(done[edit.number].outcome for edit in edits)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))


def compare(before: Path, after: Path) -> bool:
    """Prints the outcomes of both and each that differs; returns whether fewer were caught after."""
    one, two = (load(path, "write it with `run`") for path in (before, after))
    if "results" not in one or "results" not in two or one["seconds"] != two["seconds"]:
        sys.exit(f"{before} and {after} are no results with the same --seconds: write them with `run`")
    olds, news = one["results"], two["results"]
    numbers = sorted(olds.keys() | news.keys())
    if apart := [n for n in numbers if n not in olds or n not in news or olds[n].edit != news[n].edit]:
        sys.exit(f"edits {apart} are not the same in {before} and {after}: run one sample on both")
    counts = [Counter(result.outcome for result in results.values()) for results in (olds, news)]
    print(f"{'of ' + str(len(numbers)):12}{one['commit']:>16}{two['commit']:>16}")
    for outcome in OUTCOMES:
        print(f"{outcome:12}{counts[0][outcome]:16}{counts[1][outcome]:16}")
    for old, new in ((olds[n], news[n]) for n in numbers if olds[n].outcome != news[n].outcome):
        print(f"{old.edit.number} {old.edit}: {old.outcome} {old.test} → {new.outcome} {new.test}")
    return counts[1]["caught"] < counts[0]["caught"]


def arguments_of(line: Sequence[str] | None) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing, drawing, running, comparing = map(commands.add_parser, ("list", "draw", "run", "compare"))
    for command in (listing, drawing):
        command.add_argument("checkout", type=Path, nargs="?", default=ROOT)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--count", type=int, default=50)
    running.add_argument("checkout", type=Path)
    for command in (drawing, running):
        command.add_argument("--sample", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--seconds", type=float, default=60.0, help="limit of an edit")
    running.add_argument("--only", type=int, nargs="+", help="numbers of edits")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    return parser.parse_args(line)


def main(line: Sequence[str] | None = None) -> None:
    """Does what the command line says."""
    given = arguments_of(line)
    if given.command == "compare":
        sys.exit(compare(given.before, given.after))
    checkout = given.checkout.resolve()
    if given.command == "run":
        sample = load(given.sample, "write it with `draw`").get("edits", {})
        numbers = set(given.only or sample)
        if not numbers or numbers - sample.keys():
            sys.exit(f"{given.sample} has no edits {sorted(numbers - sample.keys())}: write it with `draw`")
        return run(checkout, [sample[number] for number in sorted(numbers)], given.out, given.seconds)
    edits = draw(checkout, given.seed, given.count)
    if given.command == "draw":
        return save(given.sample, {"seed": given.seed, "edits": [asdict(edit) for edit in edits]})
    for edit in edits:
        places = [place.relative_to(checkout).as_posix() for place in places_of(checkout, edit.room)]
        print(f"{edit.number:3} {edit}  ({', '.join(places)})")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, too
    main()
