"""`rondo migrate`: names that have moved since an older rondo, in files of a user's. The change is shown, or
made.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rondo.core.errors import DataError, RondoError, StorageError
from rondo.system.storage import refused, storing
from rondo.system.streams import clean_text

SUFFIXES = (".py", ".yaml", ".yml")
HELP = "show, or make, the change of names that have moved since an older rondo, in files of yours"
DESCRIPTION = """\
Looks for names of modules of rondo, and of what is in them, that have moved since an older version: in
imports, in what is written out behind `import rondo.…`, and in strings and values of YAML that are such a
name and nothing else. Shows the change as a unified diff; --write makes it. All else in a file stays."""
EPILOG = """\
Folders are searched for .py, .yaml and .yml; hidden folders, virtual environments (with a pyvenv.cfg) and
links to folders in them are left out. What cannot be changed without you is said with its line.

Exit code: 0 nothing is to be changed, or --write has changed it; 1 something is, or is left to you;
2 a file could not be read, understood or written: it is named, and the others are gone through."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "migrate",
        help=HELP,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .py, .yaml or .yml file, or a folder")
    parser.add_argument("--write", action="store_true", help="change the files")


def run(args: argparse.Namespace) -> int:
    """Goes through the files, and prints what changes; returns the exit code that the help has."""
    failed: list[RondoError] = []
    number = changed = left = 0
    for path in _files(args.files, failed.append):
        number += 1
        try:
            is_changed, notes = _migrate(path, args.write)
        except (DataError, StorageError) as error:
            failed.append(error)
            continue
        changed += is_changed
        left += len(notes)
        for note in notes:
            _say(note)
    for problem in failed:
        _say(str(problem))
    files = f"{number} file" if number == 1 else f"{number} files"
    print(f"{changed} of {files} {'changed' if args.write else 'would change'}")
    if failed:
        return 2
    return 1 if left or (changed and not args.write) else 0


def _say(problem: str) -> None:
    print(f"rondo migrate: {problem}", file=sys.stderr)


def _migrate(path: Path, write: bool) -> tuple[bool, list[str]]:
    """Shows or makes the change of one file. Returns whether there is one, and what is left to its owner,
    each with its place. Raises DataError, StorageError.
    """
    from rondo.cli.renaming import changes_in  # yaml

    old = _text_of(path)
    mark = old[: old.startswith("\ufeff")]  # an editor's, at the start of the file
    changes = changes_in(path, old.removeprefix(mark))
    new = mark + changes.made()
    if new != old and write:
        _write(path, new)
        print(f"changed {clean_text(str(path))}")
    elif new != old:
        print(_diff(clean_text(str(path)), old, new), end="")
    return new != old, [f"{path}, line {line}: {note}" for line, note in sorted(set(changes.notes))]


def _files(names: Sequence[str], fail: Callable[[RondoError], None]) -> Iterator[Path]:
    """Yields what is to be looked at, each once; says what cannot be."""
    seen: set[str] = set()
    for name in names:
        for path in _walk(name, fail) if os.path.isdir(name) else [Path(name)]:
            if path.suffix not in SUFFIXES:
                fail(DataError(f"{path}: only folders and files that end in {', '.join(SUFFIXES)} are taken"))
            elif (whole := os.path.abspath(path)) not in seen:
                seen.add(whole)
                yield path


def _walk(folder: str, fail: Callable[[RondoError], None]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        fail(refused(error.filename, "read", error.errno or 0))

    for place, folders, names in os.walk(folder, onerror=unreadable):
        here = Path(place)
        folders[:] = sorted(
            name for name in folders if name[0] != "." and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(names) if Path(name).suffix in SUFFIXES)


def _text_of(path: Path) -> str:
    with storing(path, "read"):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise DataError(f"{path}: is a link; name what it leads to")
        if not stat.S_ISREG(mode):  # a pipe, say, whose end would be waited for
            raise DataError(f"{path}: is no file")
        data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: is not UTF-8; save it as UTF-8") from error


def _write(path: Path, text: str) -> None:
    from rondo.system.storage import write_atomic  # torch

    with storing(path):
        if not os.access(path, os.W_OK):  # its folder may let it be replaced nevertheless
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        mode = stat.S_IMODE(path.stat().st_mode)
        write_atomic(path, text, private=True)  # until it has the permissions of the old one
        path.chmod(mode)


def _diff(name: str, old: str, new: str) -> str:
    """Returns a unified diff, as `patch` and `git apply` read it."""
    before, after = (list(io.StringIO(text, newline="\n")) for text in (old, new))
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(before, after, name, name)
    )
