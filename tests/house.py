"""Measures the house: what its files and rooms are like in size, and who imports whom. Imports no rondo.

    python -m tests.house                   prints the figures
    python -m tests.house --write-budget    also lowers the numbers of budget.toml that are higher than needed

`tests/test_house.py` holds what is measured here against BOUNDS and budget.toml. Who may import whom is in
`tests/test_layers.py`. A room is a folder of src/rondo, a module that stands beside these folders, or a whole
package beside rondo (a wing). `rondo/__init__.py` and `rondo/__main__.py` are the room `rondo`.

Read by AST: imports inside functions and under TYPE_CHECKING count, and import_module("a literal"). An import
through a façade (`from rondo.config import load`) is an arrow to the file that defines the name. Arrows to
rondo/__init__.py do not count: it has the version.
"""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
BUDGET = ROOT / "budget.toml"
SMALL = 80  # raw lines; of files with fewer, one has to open too many to follow a call
ADDED = (
    "rondo/agents/calculator.py",
    "rondo/algorithms/*",
    "rondo/chat/tools/harmony.py",
    "rondo/cli/*",
    "rondo/recipes/*",
    "rondo/rewards/retrieval.py",
    "rondo/platform/*",
    "rondo_sandbox/tool.py",
    "rondo_search/command.py",
    "rondo_view/command.py",
    "rondo_search/*_index.py",
    "rondo_verl/programs.py",
    "rondo_worlds/*",
)
"""What somebody adds, who looks for one of its kind: a small file of its own is easiest to copy."""
APART: Mapping[str, str] = {
    "rondo/chat/tools/forced.py": "imports the parser that __init__ has",
    "rondo/config/json_schema.py": "imports pydantic, which the help does without",
    "rondo/controller/ray_address.py": "imports no Ray",
    "rondo/controller/start.py": "the factory: the kinds of clusters import the base class",
    "rondo/core/arithmetic.py": "standard library only",
    "rondo/core/moved.py": "standard library only",
    "rondo/environments/rows.py": "rows for a source of data; no names of environments",
    "rondo/models/positions.py": "configs only: no torch",
    "rondo/models/precision.py": "read by loading, training and engines",
    "rondo/models/source.py": "records that travel: no torch",
    "rondo/rollout/build.py": "the factory: the kinds of engines do not know each other",
    "rondo/system/actor_program.py": "a program",
    "rondo/training/megatron/adapters.py": "backend, its reader, imports as many files as one may",
    "rondo/training/telling.py": "checkpoints and exports import it, and no layout",
    "rondo/training/torch_backend/parameters.py": "adapters and backend import it",
    "rondo_verl/metrics.py": "what trackers ask for by its name",
    "rondo_sandbox/inside/wire.py": "read in the sandbox, without rondo",
    "rondo_sandbox/records.py": "all sides import it",
}
"""All other small files, each with the reason why it does not join what reads it; the aim is 15."""
TWICE: Mapping[str, str] = {
    "rondo.Actor": "a process that serves calls, and the policy in training: both are the field's word",
    "rondo_sandbox.Head": "inside/ is a program of another interpreter, with its end of the same thing",
    "rondo_sandbox.Trial": "inside/ is a program of another interpreter, with its end of the same thing",
}
"""The class names that a package has more than once (package.Class), each with the reason."""


@dataclass(frozen=True)
class Bounds:
    """The most that the house may have. Lower a number when a change makes it smaller."""

    folders: int = 24  # of src/rondo
    modules: int = 0  # of src/rondo, beside __init__ and __main__
    file: int = 600  # raw lines of a file
    function: int = 100  # raw lines of a function
    # Between rooms (the last: scripts of verl are run in the sandbox); 13 of them to platform, which all
    # that computes stands on.
    arrows: int = 146  # three of them: the page in the browser knows core, system and tracking
    imports: int = 25  # files of ours that one file imports


BOUNDS = Bounds()


# --- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A Python file."""

    path: str  # below src: rondo/agents/tools.py
    raw: int  # lines
    code: int  # lines without blank ones, comments and docstrings
    comments: int  # lines that are nothing else
    raises: int  # lines of `raise` statements
    functions: list[tuple[str, int, int]]  # (name, first line, lines)
    imports: list[tuple[str, str, int]]  # (module, name, line); the name is "" for a whole module
    classes: list[str]  # names, also of those inside functions and classes
    names: dict[str, tuple[str, str] | None]  # of the top level -> None, or the module and name it comes from
    fields: list[tuple[int, str]]  # (line, what is wrong) of fields that are not documented below them

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_dunder(self) -> bool:
        return self.path.endswith(("/__init__.py", "/__main__.py"))


@dataclass(frozen=True)
class House:
    """The packages of one src."""

    src: Path
    files: dict[str, File]  # by path
    arrows: dict[tuple[str, str], int]  # (a file, another that it imports) -> the first line that does


@cache
def read(src: Path) -> House:
    """Returns the house in `src`, where every folder with an `__init__.py` is a package. Reads it once."""
    packages = [folder for folder in sorted(src.iterdir()) if (folder / "__init__.py").is_file()]
    files = [_read_file(path, src) for package in packages for path in sorted(package.rglob("*.py"))]
    modules = {file.module: file for file in files}
    arrows: dict[tuple[str, str], int] = {}
    for file in files:
        for module, name, line in sorted(file.imports, key=lambda item: item[2]):
            home = _home(modules, module, name)
            if home and home.path not in (file.path, "rondo/__init__.py"):
                arrows.setdefault((file.path, home.path), line)
    return House(src, {file.path: file for file in files}, arrows)


def _read_file(path: Path, src: Path) -> File:
    relative = path.relative_to(src)
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    nodes = list(ast.walk(tree))
    code, comments = _kinds_of_lines(text.split("\n"), nodes)
    functions, imports, classes, raises = [], [], [], 0
    fields: list[tuple[int, str]] = []
    for node in nodes:
        imports += _imported(node, relative.parts[:-1])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append((node.name, node.lineno, len(_span(node))))
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
            fields += _fields_not_below(node, text.split("\n"))
        elif isinstance(node, ast.Raise):
            raises += len(_span(node))
    names: dict[str, tuple[str, str] | None] = {}
    for statement in _top_level(tree.body):
        names |= _names_bound(statement, relative.parts[:-1])
    raw = text.count("\n")
    return File(
        relative.as_posix(), raw, len(code), len(comments), raises, functions, imports, classes, names, fields
    )


def _kinds_of_lines(lines: list[str], nodes: list[ast.AST]) -> tuple[set[int], set[int]]:
    """Returns the numbers of lines with code, and of those that are comments; docstrings are neither."""
    comments = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    code = {number for number, line in enumerate(lines, 1) if line.strip()} - comments
    docstrings: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.lineno != node.end_lineno:
            start = lines[node.lineno - 1].encode()[node.col_offset :]
            if re.match(rb"\w*('''|\"\"\")", start):  # blank lines and # are text in it
                code |= _span(node)
                comments -= _span(node)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                docstrings |= _span(node.body[0])
    return code - docstrings, comments - docstrings


def _fields_not_below(record: ast.ClassDef, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, what is wrong) of a record's fields that are documented elsewhere than below them, or not
    at all where it is public. A record is a dataclass, a NamedTuple, a TypedDict or a pydantic model.
    """
    marks = [mark.func if isinstance(mark, ast.Call) else mark for mark in record.decorator_list]
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in (*marks, *record.bases)}
    if names.isdisjoint({"dataclass", "NamedTuple", "TypedDict", "BaseModel"}):
        return
    prose = ast.get_docstring(record) or ""
    for field, below in zip_longest(record.body, record.body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name = field.target.id
        beside = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode()
        is_below = (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        )
        if re.search(rf"(^|[.;:,]\s+){name}(, \w+)*: ", prose):
            where = "in the docstring of its class"
        elif lines[field.lineno - 2].lstrip().startswith("#"):
            where = "in a comment above it"
        elif re.match(r"\s*#(?! *(type:|noqa))", beside):
            where = "in a comment beside it"
        elif not is_below and not name.startswith("_") and not record.name.startswith("_"):
            where = "nowhere"
        else:
            continue
        yield field.lineno, f"the field {record.name}.{name} is documented {where}: write a text below it"


def _span(node: ast.expr | ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _imported(node: ast.AST, package: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Returns (module, name, line) of what a node imports; relative modules are resolved in `package`."""
    if isinstance(node, ast.Import):
        return [(alias.name, "", node.lineno) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = _module_of(node, package)
        return [(module, alias.name, node.lineno) for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called == "import_module" and isinstance(node.args[0].value, str):
            return [(node.args[0].value, "", node.lineno)]
    return []


def _module_of(node: ast.ImportFrom, package: tuple[str, ...]) -> str:
    base = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join([*base, *filter(None, [node.module])])


def _top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, and those in its `if` and `try`."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            handlers = [child for handler in getattr(statement, "handlers", ()) for child in handler.body]
            yield from _top_level([*statement.body, *handlers, *statement.orelse])


def _names_bound(statement: ast.stmt, package: tuple[str, ...]) -> dict[str, tuple[str, str] | None]:
    """Returns the names that a statement defines (None), or imports (their module and name there)."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name: None}
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {
            node.id: None for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
        }
    if isinstance(statement, ast.ImportFrom):
        module = _module_of(statement, package)
        return {alias.asname or alias.name: (module, alias.name) for alias in statement.names}
    if isinstance(statement, ast.Import):
        return {alias.asname: (alias.name, "") for alias in statement.names if alias.asname}
    return {}


def _home(modules: Mapping[str, File], module: str, name: str) -> File | None:
    """Returns the file that defines `module.name`, through façades; None for a package of others."""
    for _ in range(10):  # façades of façades
        file = modules.get(module)
        names = file.names if file else {}
        if not name or (name in names and names[name] is None):
            return file
        origin = names.get(name)
        if origin is None or origin[0] not in modules or origin == (module, name):
            return modules.get(f"{module}.{name}", file)
        module, name = origin
    raise ValueError(f"{module}.{name} is imported through more than ten files: import it from its own")


# --- rooms --------------------------------------------------------------------------------------------------


def room(path: str) -> str:
    """Returns core for rondo/core/types.py, types for rondo/types.py, rondo_worlds for rondo_worlds/x.py."""
    package, *inner = path.split("/")
    if package != "rondo":
        return package
    if len(inner) > 1:
        return inner[0]
    return "rondo" if inner[0].startswith("__") else inner[0].removesuffix(".py")


def code_by_room(house: House) -> dict[str, int]:
    """Returns the code lines of each room, by its name."""
    lines: dict[str, int] = defaultdict(int)
    for file in house.files.values():
        lines[room(file.path)] += file.code
    return dict(sorted(lines.items()))


def tolls(house: House) -> dict[str, int]:
    """Returns for each wing the lines of src/rondo, in Python and YAML, that name it."""
    wings = sorted({room(path) for path in house.files if not path.startswith("rondo/")})
    if not wings:
        return {}
    paths = [path for path in (house.src / "rondo").rglob("*") if path.suffix in (".py", ".yaml")]
    lines = [line for path in sorted(paths) for line in path.read_text(encoding="utf-8").split("\n")]
    return {wing: sum(bool(re.search(rf"\b{wing}\b", line)) for line in lines) for wing in wings}


def arrows_between_rooms(house: House) -> dict[tuple[str, str], int]:
    """Returns the pairs of rooms of which the first imports the second, with the pairs of files that do."""
    pairs = Counter((room(start), room(end)) for start, end in house.arrows)
    return {pair: number for pair, number in sorted(pairs.items()) if pair[0] != pair[1]}


def first_floor(house: House) -> tuple[list[str], list[str]]:
    """Returns the folders of src/rondo, and its modules beside `__init__` and `__main__`."""
    inner = [path.split("/")[1:] for path in house.files if path.startswith("rondo/")]
    folders = {parts[0] for parts in inner if len(parts) > 1}
    modules = {parts[0] for parts in inner if len(parts) == 1 and not parts[0].startswith("__")}
    return sorted(folders), sorted(modules)


def small_files(house: House) -> list[File]:
    """Returns the files of fewer than SMALL raw lines, without `__init__` and `__main__`."""
    return [file for file in house.files.values() if file.raw < SMALL and not file.is_dunder]


def apart(house: House) -> list[str]:
    """Returns the paths of the small files that are not ADDED."""
    paths = [file.path for file in small_files(house)]
    return [path for path in paths if not any(fnmatch(path, pattern) for pattern in ADDED)]


def widest_files(house: House) -> list[tuple[str, int]]:
    """Returns every file that imports files of ours with their number, most first."""
    return Counter(start for start, _ in sorted(house.arrows)).most_common()


# --- checks: each returns what is wrong, one message for each place -----------------------------------------


def circles_of_files(house: House) -> list[str]:
    """Returns circles of files that import each other, which share no file."""
    return _circles({pair: _import_line(pair, line) for pair, line in house.arrows.items()})


def circles_of_folders(house: House) -> list[str]:
    """Returns circles of rooms, and of the folders inside a room, that import each other."""
    arrows: dict[tuple[str, str], str] = {}
    for pair, line in sorted(house.arrows.items()):
        start, end = _where_paths_part(*pair)
        if start and end:
            arrows.setdefault((start, end), _import_line(pair, line))
    return _circles(arrows)


def _import_line(pair: tuple[str, str], line: int) -> str:
    return f"{pair[0]}:{line} imports {pair[1]}"


def _where_paths_part(one: str, two: str) -> tuple[str, str]:
    """Returns the rooms of two files, or their folders within one room; "" for a file that is in none."""
    if room(one) != room(two):
        return room(one), room(two)
    first, second = one.split("/"), two.split("/")
    depth = next(n for n, (left, right) in enumerate(zip(first, second, strict=False)) if left != right)
    folders = ["/".join(parts[: depth + 1]) if len(parts) > depth + 1 else "" for parts in (first, second)]
    return folders[0], folders[1]


def _circles(arrows: Mapping[tuple[str, str], str]) -> list[str]:
    """Returns the texts of the arrows of a shortest circle, then of a shortest one elsewhere, and so on."""
    ends: dict[str, list[str]] = defaultdict(list)
    for start, end in sorted(arrows):
        ends[start].append(end)
    found = []
    while ways := [way for start in sorted(ends) if (way := _way_back(ends, start))]:
        way = min(ways, key=len)
        found.append("\n".join(arrows[pair] for pair in pairwise(way)))
        for start in way[:-1]:
            del ends[start]
    return found


def _way_back(ends: Mapping[str, list[str]], start: str) -> list[str]:
    """Returns a shortest way from a place to itself, both ends named; [] where there is none."""
    ways = {start: [start]}
    queue = [start]
    for place in queue:  # breadth first; the queue grows
        for end in ends.get(place, ()):
            if end == start:
                return [*ways[place], start]
            if end not in ways:
                ways[end] = [*ways[place], end]
                queue.append(end)
    return []


def over_bounds(house: House, bounds: Bounds = BOUNDS) -> list[str]:
    """Returns what is more than `bounds` allow, but for single files and functions (`too_long`)."""
    folders, modules = first_floor(house)
    wrong = []
    if len(folders) > bounds.folders:
        wrong.append(f"src/rondo has {len(folders)} folders, {bounds.folders} allowed: {', '.join(folders)}")
    if len(modules) > bounds.modules:
        wrong.append(
            f"src/rondo has {len(modules)} modules beside its folders, {bounds.modules} allowed; "
            f"put the new one into a room: {', '.join(modules)}"
        )
    arrows = len(arrows_between_rooms(house))
    if arrows > bounds.arrows:
        wrong.append(
            f"{arrows} arrows between rooms, {bounds.arrows} allowed: two rooms that did not know each other "
            "do now; `python -m tests.house` shows who imports whom, compare it with the commit before"
        )
    wrong += [
        f"{path} imports {number} files of ours, {bounds.imports} allowed"
        for path, number in widest_files(house)
        if number > bounds.imports
    ]
    return wrong


def too_long(house: House, bounds: Bounds = BOUNDS) -> list[str]:
    """Returns the files and functions that have more raw lines than `bounds` allow."""
    wrong = []
    for file in house.files.values():
        if file.raw > bounds.file:
            wrong.append(f"{file.path} has {file.raw} lines, {bounds.file} allowed")
        wrong += [
            f"{file.path}:{line} {name} has {length} lines, {bounds.function} allowed"
            for name, line, length in file.functions
            if length > bounds.function
        ]
    return wrong


def classes_twice(house: House) -> dict[str, str]:
    """Returns the class names that a package has more than once, as package.Class, with what is wrong."""
    paths: dict[str, list[str]] = defaultdict(list)
    for file in house.files.values():
        for name in file.classes:
            paths[f"{file.path.split('/')[0]}.{name}"].append(file.path)
    return {
        name: f"the class name {name} stands in {' and '.join(where)}: name each by what it is"
        for name, where in sorted(paths.items())
        if len(where) > 1
    }


def fields_not_below(house: House) -> list[str]:
    """Returns the fields of records whose documentation is not the text below them."""
    return [f"{file.path}:{line} {wrong}" for file in house.files.values() for line, wrong in file.fields]


# --- the budget ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """What budget.toml allows, as numbers of lines."""

    rooms: dict[str, int]  # code lines of each room
    toll: dict[str, int]  # lines of src/rondo that name each wing


def read_budget(path: Path) -> Budget:
    """Returns what a budget.toml says.

    ValueError: a table that is missing or unknown, or a number that is none.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    if set(tables) != {"rooms", "toll"}:
        raise ValueError(
            f"{path} has the tables {sorted(tables)}: it has to have [rooms] and [toll], no other"
        )
    for table, numbers in tables.items():
        for name, number in numbers.items():
            if type(number) is not int:
                raise ValueError(
                    f"{path}, [{table}]: {name} is {number!r}: a number of lines has to stand there"
                )
    return Budget(**tables)


def over_budget(house: House, budget: Budget) -> list[str]:
    """Returns the rooms and wings with more lines than their number, without one, or that are not there."""
    rooms = _compared(code_by_room(house), budget.rooms, "rooms", "code lines")
    return rooms + _compared(tolls(house), budget.toll, "toll", "lines of src/rondo that name it")


def _compared(lines: Mapping[str, int], budget: Mapping[str, int], table: str, what: str) -> list[str]:
    wrong = [
        f"budget.toml, [{table}]: there is no {name}: take its line out"
        for name in budget
        if name not in lines
    ]
    for name, number in lines.items():
        if name not in budget:
            wrong.append(
                f"{name} has no number in budget.toml: add `{name} = {number}` ({what}) to [{table}], "
                "with the reason beside it"
            )
        elif number > budget[name]:
            wrong.append(
                f"{name} has {number} {what}, {number - budget[name]} more than budget.toml allows: lower "
                f"that, or write `{name} = {number}` in [{table}], and why beside it, in the same commit"
            )
    return wrong


def lowered(text: str, house: House) -> str:
    """Returns the text of a budget.toml with each number that is higher than needed lowered.

    Everything else stays as it is: comments, numbers that are too low, lines of rooms that are not there.
    """
    needed = {"rooms": code_by_room(house), "toll": tolls(house)}
    table, lines = "", []
    for line in text.split("\n"):
        if match := re.match(r"\[(\w+)\]", line):
            table = match[1]
        elif match := re.match(r"(\w+)(\s*=\s*)([\d_]+)(.*)", line):
            name, sign, number, rest = match.groups()
            number = str(min(int(number), needed[table].get(name, int(number))))
            line = f"{name}{sign}{number}{rest}"
        lines.append(line)
    return "\n".join(lines)


# --- the figures --------------------------------------------------------------------------------------------


def figures(house: House, budget: Budget, bounds: Bounds = BOUNDS) -> str:
    """Returns the figures of the house as text; of those that are bound, also the bound."""
    files = house.files.values()
    raw = sum(file.raw for file in files)
    raises = 100 * sum(file.raises for file in files) / raw
    comments = 100 * sum(file.comments for file in files) / raw
    folders, modules = first_floor(house)
    arrows, small = arrows_between_rooms(house), small_files(house)
    lines = [
        f"{len(files)} files, {sum(file.is_dunder for file in files)} of them __init__ or __main__; "
        f"{raw:,} raw and {sum(file.code for file in files):,} code lines",
        f"of the raw lines {raises:.2f} % raise and {comments:.2f} % are comments (not bound)",
        f"first floor: {len(folders)} folders (≤ {bounds.folders}), "
        f"{len(modules)} modules (≤ {bounds.modules})",
        f"longest file: {max(file.raw for file in files)} raw lines (≤ {bounds.file})",
        f"arrows between rooms: {len(arrows)} (≤ {bounds.arrows})",
        f"circles of files: {len(circles_of_files(house))}, of folders: {len(circles_of_folders(house))} (0)",
        "",
        f"{'room':20}{'files':>6}{'code':>8}{'budget':>8}  imports (pairs of files)",
    ]
    count = Counter(room(path) for path in house.files)
    for name, code in code_by_room(house).items():
        ends = ", ".join(f"{end} {number}" for (start, end), number in arrows.items() if start == name)
        lines.append(f"{name:20}{count[name]:6}{code:8,}{budget.rooms.get(name, 0):8,}  {ends}")
    for wing, number in tolls(house).items():
        lines.append(f"lines of src/rondo that name {wing}: {number} (≤ {budget.toll.get(wing, 0)})")
    lines += ["", f"widest files, by the files of ours that they import (≤ {bounds.imports})"]
    lines += [f"{number:4}  {path}" for path, number in widest_files(house)[:20]]
    lines += [
        "",
        f"files of fewer than {SMALL} raw lines: {len(small)}, {len(apart(house))} of them not ADDED",
    ]
    lines += [f"{file.raw:4}  {file.path}" for file in small]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write-budget", action="store_true", help="lower numbers of budget.toml, raise none"
    )
    write = parser.parse_args().write_budget
    budget = read_budget(BUDGET)
    if write:
        BUDGET.write_text(lowered(BUDGET.read_text(encoding="utf-8"), read(SRC)), encoding="utf-8")
        budget = read_budget(BUDGET)
    print(figures(read(SRC), budget))


if __name__ == "__main__":
    main()
