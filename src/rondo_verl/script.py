"""What a launch script of verl would run, found by running it where nothing else can: bash in the sandbox,
with stand-ins for all programs but coreutils (`sandboxed/`). They write down their arguments and do nothing.

The script sees a copy of the files around it, of its working directory and an empty home, each at its own
path below a folder of the sandbox; that folder's name is taken out of what it says. So it may read, `cd`,
write and redirect as it does at home.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rondo.core.errors import ConfigError, SandboxError
from rondo_sandbox import Limits, Result, open_sandbox

SECONDS = 20
MOST_FILES, MOST_BYTES, LARGEST = 2000, 32 << 20, 256 << 10
_SANDBOXED = Path(__file__).parent / "sandboxed"
_DOWNLOADS = re.compile(
    r"(wget|curl|scp|rsync)\b|\S+ (download|clone|install|pull|sync)\b|python3? .*download"
)
_WHOLE_PATHS = re.compile(r"/(?:[\w.-]+/)+(?:python3?|torchrun|ray|accelerate|deepspeed|pip3?|nvidia-smi)\b")


@dataclass(frozen=True)
class Ran:
    """A program that a script would have run."""

    file: str
    """Which script names it: the one that was given, or one that this one sources or runs."""
    line: int
    """Where its command begins."""
    argv: tuple[str, ...]
    """Its name, and its arguments."""

    def __str__(self) -> str:
        text = shlex.join(self.argv)
        return f"{os.path.basename(self.file)}:{self.line} `{text if len(text) < 60 else text[:57] + '…'}`"


@dataclass(frozen=True)
class Report:
    """What a script did."""

    ran: tuple[Ran, ...]
    """The programs, in the order in which they would have begun."""
    code: int
    """How it ended."""
    at: str
    """file:line of the last command."""
    said: tuple[str, ...]
    """Lines of standard error, with the script's paths as they are here."""
    marker: str
    """What stands for the output of a program that was not run, with its number and `@` behind it."""

    def behind(self, text: str) -> Ran | None:
        """Returns the program whose output is in `text`."""
        found = re.search(re.escape(self.marker) + r"(\d+)@", text)
        return self.ran[int(found[1]) - 1] if found else None

    def downloads(self) -> list[Ran]:
        """Returns what was to bring something from elsewhere."""
        return [one for one in self.ran if _DOWNLOADS.match(" ".join(one.argv))]


def run_script(path: str, arguments: Sequence[str], env: Mapping[str, str]) -> Report:
    """Runs a script with stand-ins. Raises ConfigError for one that cannot be run to its end, SandboxError
    where this machine can hold no program.
    """
    script, cwd, home = os.path.abspath(path), os.getcwd(), os.path.expanduser("~")
    token, marker = f"rondo-{secrets.token_hex(8)}", f"@not-run-{secrets.token_hex(4)}-"
    text = Path(script).read_text(encoding="utf-8")
    files: dict[str, str | bytes] = {f"{token}{name}": content for name, content in _around(script, cwd)}
    files[f"{token}{script}"] = text
    for name in ("before.sh", "program.sh", "changing.sh"):
        files[f"{token}/.{name}"] = (_SANDBOXED / name).read_bytes()
    files["boot.sh"] = (_SANDBOXED / "boot.sh").read_bytes()
    places = " ".join(sorted(set(_WHOLE_PATHS.findall(text))))
    words = [token, cwd, home, script, str(SECONDS), marker, places]
    words += [*(f"{name}={value}" for name, value in env.items()), "--", *arguments]
    result = _in_sandbox(["/bin/bash", "boot.sh", *words], files, path)
    if not result.ok:
        raise ConfigError(
            f"{path}: the script could not be run ({result.status}): {result.stderr.strip()[-300:]}"
        )
    root = result.stdout.partition("\0")[0]
    _, code, at, said, *rest = result.stdout.replace(root + script, path).replace(root, "").split("\0")
    if int(code) in (124, 137):  # of `timeout`
        raise ConfigError(
            f"{at or path}: the script did not end within {SECONDS} s, and programs do nothing and end at "
            "once here; take out of it what waits"
        )
    return Report(tuple(_records(rest)), int(code), at, tuple(said.splitlines()), marker)


def _around(script: str, cwd: str) -> Iterator[tuple[str, bytes]]:
    """Yields the files that a script may read, the nearest first: below its folder, below the repository that
    it lies in, and below the working directory where that holds it. None that is hidden or large.
    """
    folder = Path(script).parent
    roots = [folder, *(above for above in folder.parents if (above / ".git").exists() or str(above) == cwd)]
    waiting, seen, size = deque(map(str, roots)), set[str](), 0
    while waiting:
        try:
            entries = sorted(os.scandir(waiting.popleft()), key=lambda entry: entry.name)
        except OSError:  # not ours to read
            continue
        for entry in entries:
            # A file of another name, or below a longer path, is none that the sandbox takes.
            if entry.name.startswith(".") or not entry.path.isprintable() or len(entry.path.encode()) > 900:
                continue
            if entry.path in seen:
                continue
            seen.add(entry.path)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif entry.is_file() and (content := _small(entry.path)) is not None:
                size += len(content) + 4096
                if size > MOST_BYTES or len(seen) > MOST_FILES:
                    return
                yield entry.path, content


def _small(path: str) -> bytes | None:
    """Reads a file; None: it is large, gone, or not ours to read."""
    try:
        return Path(path).read_bytes() if os.path.getsize(path) <= LARGEST else None
    except OSError:
        return None


def _in_sandbox(argv: Sequence[str], files: Mapping[str, str | bytes], path: str) -> Result:
    limits = Limits(seconds=SECONDS + 10.0, disk_mb=2 * MOST_BYTES >> 20, output_bytes=4 << 20, processes=128)

    async def opened() -> Result:
        async with await open_sandbox(limits=limits) as sandbox:
            return await sandbox.run(argv, files=files)

    try:
        with ThreadPoolExecutor(1) as elsewhere:  # a loop may run here
            return elsewhere.submit(asyncio.run, opened()).result()
    except SandboxError as error:
        raise SandboxError(
            f"{path}: a script runs in a sandbox only, and there is none here: {error}. Or give the launch "
            "itself: rondo train verl.trainer.main_ppo key=value …"
        ) from error


def _records(fields: Sequence[str]) -> Iterator[Ran]:
    """Reads what the stand-ins wrote down."""
    at = 0
    while at + 2 < len(fields):
        file, _, line = fields[at].rpartition(":")
        end = at + 2 + int(fields[at + 1])
        yield Ran(file, int(line or 0), tuple(fields[at + 2 : end]))
        at = end
