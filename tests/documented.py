"""The commands and the Python of README.md and docs/, and what is known of each: tests/documented.tsv says
why one is not run where all others are. tests/test_documented.py runs them. The tables of docs/features.md
have commands, too.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).resolve().parent / "documented.tsv"
PAGES = (
    "README.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))),
)
FEATURES = "docs/features.md"


@dataclass(frozen=True)
class Piece:
    """A block of Python, or one command of a block."""

    page: str
    line: int
    """Where its block begins."""
    text: str

    @property
    def first(self) -> str:
        """Returns its first line without the comment behind it: what the table names it by."""
        line = self.text.strip().split("\n")[0]
        return line if line.startswith("#") else re.split(r"\s{2,}#", line)[0].strip()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.first}"


@dataclass(frozen=True)
class Exemption:
    """Why a piece is not run with the others."""

    how: str
    """parsed: nothing runs it as it stands. elsewhere: the test that runs it, or what it says. long: it takes
    longer, and `make test-long` runs it.
    """
    why: str
    """The reason, or the path of the test that runs it."""


def exemptions() -> dict[tuple[str, str], Exemption]:
    """Returns the table: (page, first line) -> why it is not run."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {(page, first): Exemption(how, why) for page, first, how, why in rows}


def python_blocks() -> list[Piece]:
    """Returns the blocks of Python of all pages."""
    return [Piece(*one) for one in _blocks("python")]


def feature_rows() -> list[tuple[int, list[str]]]:
    """Returns the rows of the tables of docs/features.md without their heads: line and cells."""
    rows = []
    for number, line in enumerate((ROOT / FEATURES).read_text(encoding="utf-8").split("\n"), 1):
        if line.startswith("|") and not line.startswith(("| what |", "|---")):
            rows.append((number, [cell.strip() for cell in line.strip("|").split("|")]))
    return rows


def commands() -> list[Piece]:
    """Returns the commands of all pages, each on one line, without what only a shell does with it."""
    found = []
    for page, line, text in _blocks("bash"):
        whole = text.replace("\\\n", " ")
        found += [
            Piece(page, line, command) for command in whole.split("\n") if shlex.split(command, comments=True)
        ]
    return found + [Piece(FEATURES, line, cells[-1].strip("`")) for line, cells in feature_rows()]


def words(command: Piece) -> list[str]:
    """Returns the arguments of a command, without variables before it and a file behind `>`."""
    given = shlex.split(command.text, comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", given[0]):
        given = given[1:]
    return given[: given.index(">")] if ">" in given else given


def parsable(block: Piece) -> str:
    """Returns a block as a parser takes it: dots that stand for something of yours are Python's, a signature
    gets a body, what stands in a class is moved out of it.
    """
    text = textwrap.dedent(block.text).replace("…", "...")
    text = re.sub(r"^\.\.\. (\S+) \.\.\.", r"\1", text, flags=re.MULTILINE)
    if block.page == "docs/api.md":  # signatures, made of the code
        text = text if text.startswith(("def ", "async def ")) else f"def {text.replace(':', '() ->', 1)}"
        text += ": ..."
    return text


def _blocks(language: str) -> Iterator[tuple[str, int, str]]:
    for page in PAGES:
        begin, inside = 0, None
        taken: list[str] = []
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").split("\n"), 1):
            if inside is None and line.startswith("```"):
                begin, inside, taken = number, line[3:].strip(), []
            elif inside is not None and line.startswith("```"):
                if inside == language:
                    yield page, begin, "\n".join(taken)
                inside = None
            elif inside is not None:
                taken.append(line)
