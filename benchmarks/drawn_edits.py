"""Small edits of src, drawn at random, for `planted_edits.py`: what a line of a function is changed to.

An edit changes something inside one line of a function: an operator, a number, True or False, min or max, a
condition, what is returned, or a whole statement. Annotations, messages of errors and logs stay as they are.
"""

from __future__ import annotations

import ast
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

SOURCE = "src"
PAIRS = {
    "comparison": (("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in")),
    "arithmetic": (("+", "-"), ("*", "/")),
    "logic": (("and", "or"),),
    "extreme": (("min", "max"),),
}
SWAPS = {kind: dict([*pairs, *(pair[::-1] for pair in pairs)]) for kind, pairs in PAIRS.items()}
LOG = re.compile(r"(_?log|logger|logging|warnings)\.\w+\(")

Position = tuple[int, int]  # line, from 1, and column in bytes: ast's own
Change = tuple[str, Position, Position, str]  # the kind, from where to where, and what to put there


@dataclass(frozen=True)
class Edit:
    number: int
    """Its place in the sample, from 1."""
    file: str
    """From the root of the checkout."""
    line: int
    text: str
    """All of that line, as it was."""
    start: int
    end: int
    """Columns in characters: what lies between is replaced by `new`."""
    kind: str
    new: str
    room: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.kind}: {self.text[self.start : self.end]} → {self.new}"


def nodes(node: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Yields what runs inside functions, without messages (`raise`, logging, f-strings) and annotations."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Expr) and LOG.match(ast.unparse(node)):
        return
    if inside:
        yield node
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children, inside = list(node.body), True  # decorators and defaults are made at import
    elif isinstance(node, ast.AnnAssign):
        children.remove(node.annotation)
    for child in children:
        yield from nodes(child, inside)


def ends(node: ast.expr | ast.stmt) -> tuple[Position, Position]:
    """Returns where it begins and ends."""
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def cut(lines: Sequence[bytes], begin: Position, end: Position) -> str:
    """Returns what lies between two positions of one line; nothing where they are on two."""
    return lines[begin[0] - 1][begin[1] : end[1]].decode() if begin[0] == end[0] else ""


def operators(kind: str, operands: Sequence[ast.expr], lines: Sequence[bytes]) -> Iterator[Change]:
    """Yields the operators between operands, each with the one to put there."""
    for left, right in pairwise(operands):
        begin, end = ends(left)[1], ends(right)[0]
        between = cut(lines, begin, end)
        operator = between.strip(" ()")
        if operator in SWAPS[kind]:
            column = begin[1] + between.index(operator)
            yield kind, (begin[0], column), (begin[0], column + len(operator)), SWAPS[kind][operator]


def changes(node: ast.AST, lines: Sequence[bytes]) -> Iterator[Change]:
    """Yields what may be changed in a node itself."""
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield "condition", *ends(test), f"not ({cut(lines, *ends(test))})"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", *ends(value), "None"
        case ast.Constant(value=bool(truth)):
            yield "truth", *ends(node), str(not truth)
        case ast.Constant(value=int(number)):
            yield "number", *ends(node), str(number + 1)
        case ast.Compare(left=left, comparators=others):
            yield from operators("comparison", [left, *others], lines)
        case ast.BinOp(left=left, right=right):
            yield from operators("arithmetic", [left, right], lines)
        case ast.BoolOp(values=values):
            yield from operators("logic", values, lines)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SWAPS["extreme"]:
            line, column = ends(node.func)[1]
            yield "extreme", (line, column - len(name)), (line, column), SWAPS["extreme"][name]
        case (
            ast.Expr(value=ast.Call() | ast.Await())
            | ast.Assign(targets=[ast.Attribute()])
            | ast.AugAssign(target=ast.Attribute())
            | ast.AnnAssign(target=ast.Attribute(), value=ast.expr())
        ):
            yield "deletion", *ends(node), "pass"


def offered(checkout: Path, path: Path) -> tuple[list[Edit], int]:
    """Returns every edit that could be drawn in a file, and the number of lines on which code begins."""
    source = path.read_bytes()
    lines, tree = source.split(b"\n"), ast.parse(source)
    package, inner = path.relative_to(checkout / SOURCE).parts[:2]
    room = inner.removesuffix(".py") if package == "rondo" else package
    edits = []
    for node in nodes(tree):
        for kind, begin, end, new in changes(node, lines):
            if not cut(lines, begin, end):
                continue
            text = lines[begin[0] - 1]
            start, stop = (len(text[:column].decode()) for column in (begin[1], end[1]))
            file = path.relative_to(checkout).as_posix()
            edits.append(Edit(0, file, begin[0], text.decode(), start, stop, kind, new, room))
    code = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)}
    return edits, len(code)


def draw(checkout: Path, seed: int, count: int) -> list[Edit]:
    """Returns edits in the order in which they are drawn: a file by its lines of code, a kind, a place."""
    generator = random.Random(seed)
    paths = sorted((checkout / SOURCE).rglob("*.py"))
    if not paths:
        sys.exit(f"{checkout} has no Python files in {SOURCE}: name a checkout of rondo")
    offers = {path: offered(checkout, path) for path in paths}
    drawn: list[Edit] = []
    while len(drawn) < count:
        files = [path for path in paths if offers[path][0]]
        if not files:
            sys.exit(f"{checkout / SOURCE} has room for {len(drawn)} edits: lower --count {count}")
        path = generator.choices(files, [offers[path][1] for path in files])[0]
        edits, lines = offers[path]
        kind = generator.choice(sorted({edit.kind for edit in edits}))
        edit = generator.choice([edit for edit in edits if edit.kind == kind])
        offers[path] = [other for other in edits if other.line != edit.line], lines
        drawn.append(replace(edit, number=len(drawn) + 1))
    return drawn


def edited(checkout: Path, edit: Edit) -> str:
    """Returns the file with the edit made: at its line, or else where the text of that line is now."""
    path = checkout / edit.file
    lines = path.read_bytes().decode().split("\n") if path.is_file() else []
    found = [place for place, text in enumerate(lines) if text == edit.text]
    if edit.line - 1 in found:
        found = [edit.line - 1]
    name = f"edit {edit.number} ({edit.file}:{edit.line}, leave it out with --only or draw anew)"
    if len(found) != 1:
        sys.exit(f"{name}: {edit.text.strip()!r} is not at that line, and {len(found)} times in the file")
    lines[found[0]] = edit.text[: edit.start] + edit.new + edit.text[edit.end :]
    source = "\n".join(lines)
    try:
        compile(source, edit.file, "exec", dont_inherit=True)
    except SyntaxError as error:
        sys.exit(f"{name}: the file does not compile with it: {error}")
    return source


@contextmanager
def planted(checkout: Path, edit: Edit) -> Iterator[None]:
    """Makes an edit, and takes it back."""
    path = checkout / edit.file
    source, times = path.read_bytes(), path.stat()
    path.write_bytes(edited(checkout, edit).encode())
    # Byte code counts as that of a file of the same size and second: each edit has a second of its own.
    os.utime(path, (times.st_atime, times.st_mtime + edit.number))
    try:
        yield
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
