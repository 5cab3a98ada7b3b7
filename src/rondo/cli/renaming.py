"""Names in a program or a YAML file that have moved since an older rondo (`rondo/core/moved.tsv`), and what
is put in their place. Only names are touched: comments, quotes, line ends and all else stay as they are.
"""

from __future__ import annotations

import ast
import re
import symtable
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rondo.core.errors import DataError
from rondo.core.moved import successor

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")
_STRING = re.compile(r"""[rRuU]?('''|\"\"\"|'|")(.*)\1""", re.DOTALL)
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass
class Changes:
    """What is changed in a text, and what only its owner can change."""

    text: str
    """The text before the changes."""
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    """What stands from a character to another one, and what takes its place."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Each with its line."""

    def replace(self, start: int, old: str, new: str, line: int) -> None:
        """Puts `new` in the place of `old`, where that is what stands there."""
        if self.text.startswith(old, start):
            self.edits.append((start, start + len(old), new))
        else:
            self.by_hand(line, old, new)

    def by_hand(self, line: int, old: str, new: str) -> None:
        """Notes a change that only the file's owner can make."""
        self.notes.append((line, f"{old} is {new} now, which you have to write yourself here"))

    def made(self) -> str:
        """Returns the text with the edits."""
        pieces, done = [], 0
        for start, end, new in sorted(set(self.edits)):
            pieces += [self.text[done:start], new]
            done = end
        return "".join([*pieces, self.text[done:]])


def changes_in(path: Path, text: str) -> Changes:
    """Returns what is changed in the text of a file: YAML, or by its suffix Python. Raises DataError."""
    if path.suffix == ".py":
        with _understanding(path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strings like "\d"
            tree, scopes = ast.parse(text), symtable.symtable(text, path.name, "exec")
        return _Python(text, tree, scopes).changes
    with _understanding(path):
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    return _in_yaml(text, [node for node in nodes if node is not None])


@contextmanager
def _understanding(path: Path) -> Iterator[None]:
    """Turns a syntax error of Python or YAML inside into a DataError that says where."""
    kind = f"Python that Python {sys.version_info[0]}.{sys.version_info[1]} reads"
    try:
        yield
    except SyntaxError as error:
        raise DataError(f"{path}, line {error.lineno or 1}: is no {kind}: {error.msg}") from error
    except yaml.MarkedYAMLError as error:
        line = 1 if error.problem_mark is None else error.problem_mark.line + 1
        raise DataError(f"{path}, line {line}: is no YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise DataError(f"{path}: is no YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # of bytes that are 0
        raise DataError(f"{path}: is no {kind}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise DataError(f"{path}: is nested too deep to be read") from error


def _in_yaml(text: str, nodes: list[yaml.Node]) -> Changes:
    changes = Changes(text)
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an anchor, by another of its names
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.ScalarNode):
            new = successor(node.value) if _NAME.fullmatch(node.value) else None
            quote = node.style if node.style in ("'", '"') else ""
            start = node.end_mark.index - len(quote) - len(node.value)
            if new is not None:
                changes.replace(start, node.value, new, node.start_mark.line + 1)
    return changes


class _Python:
    """Finds what is to be changed in a program. Names are followed from the imports that bind them, through
    the whole file; where one is bound to something else, too, its owner is asked.
    """

    def __init__(self, text: str, tree: ast.Module, scopes: symtable.SymbolTable) -> None:
        self.changes = Changes(text)
        self._lines = [0, *(end.end() for end in _LINE_END.finditer(text)), len(text)]
        self._scopes = scopes
        nodes = list(ast.walk(tree))
        self._above = {below: node for node in nodes for below in ast.iter_child_nodes(node)}
        self._bound: dict[str, set[str]] = {}  # names, by what imports bind them to
        self._plain: dict[str, ast.alias] = {}  # `import a.b`, which binds a
        self._needed: dict[str, str] = {}  # modules that uses of `import a.b` need, each with its `a`
        for node in nodes:
            self._bind(node)
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in self._bound and isinstance(node.ctx, ast.Load):
                self._use(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._string(node, node.value)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node, node.module)
        for node in nodes:
            if isinstance(node, ast.Import):
                self._import(node)

    def _at(self, line: int, column: int) -> int:
        """Returns the place in the text. line: from 1 on; column: bytes of UTF-8, as ast counts."""
        start, end = self._lines[line - 1 : line + 1]
        return start + len(self.changes.text[start:end].encode()[:column].decode())

    def _start(self, node: ast.stmt | ast.expr | ast.alias) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: ast.stmt | ast.expr | ast.alias) -> int:
        return self._at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _bind(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                name, target = alias.asname or alias.name, f"{'.' * node.level}{node.module}.{alias.name}"
            elif alias.asname:
                name, target = alias.asname, alias.name
            else:
                name = target = alias.name.partition(".")[0]
                self._plain.setdefault(alias.name, alias)
            self._bound.setdefault(name, set()).add(target)

    def _is_hidden(self, name: str) -> bool:
        """Says whether some function or class has the name for something that is not imported."""
        scopes = [self._scopes]
        for scope in scopes:
            scopes += scope.get_children()
        found = [scope.lookup(name) for scope in scopes if name in scope.get_identifiers()]
        return any(symbol.is_local() and not symbol.is_imported() for symbol in found)

    def _use(self, name: ast.Name) -> None:
        """Changes `rondo.types.A` behind `import rondo.types`, or `r.types.A` behind `import rondo as r`."""
        parts, node = [name.id], self._above[name]
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = self._above[node]
        old = ".".join(parts)
        targets = self._bound[name.id]
        for target in sorted(targets):
            whole = ".".join([target, *parts[1:]])
            moved = successor(whole)
            if target == name.id:  # the beginning of what `import a.b` binds
                self._need(whole, moved or whole, name.id)
                new = moved
            else:
                new = None if moved is None else _behind(name.id, successor(target) or target, moved)
            if moved is None or new == old:
                continue
            if new is None or len(targets) > 1 or self._is_hidden(name.id):
                self.changes.by_hand(name.lineno, old, moved)
            else:
                self.changes.replace(self._start(name), *_different(old, new), name.lineno)

    def _need(self, whole: str, now: str, root: str) -> None:
        """Notes which module has to be imported for a use of `import a.b`."""
        imported = [module for module in self._plain if f"{whole}.".startswith(f"{module}.")]
        longest = max(imported, key=len, default=root)
        if longest == root:  # some import has brought it
            self._needed[now.partition(".")[0]] = root
        else:
            self._needed[now.rsplit(".", whole.count(".") - longest.count("."))[0]] = root

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            new = [successor(alias.name) or alias.name, *self._added(alias)]
            if new != [alias.name]:
                self.changes.replace(self._start(alias), alias.name, ", ".join(new), node.lineno)

    def _added(self, alias: ast.alias) -> list[str]:
        """Returns what is needed and imported nowhere, at the first import of the same name."""
        root = alias.name.partition(".")[0]
        if alias is not next((one for name, one in self._plain.items() if name.split(".")[0] == root), None):
            return []
        modules = [f"{successor(module) or module}." for module in self._plain]
        return [
            needed
            for needed, of in self._needed.items()
            if of == root and not any(module.startswith(f"{needed}.") for module in modules)
        ]

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        """Changes the module of an import if all its names move there, else puts further imports in front of
        it.
        """
        places = [_place_of(module, alias.name) for alias in node.names]
        if all(place == (module, alias.name) for place, alias in zip(places, node.names, strict=True)):
            return
        stays = module if any(place[0] == module for place in places) else places[0][0]
        start, text = self._start(node), self.changes.text
        if stays != module:
            found = re.compile(r"from[\s\\]+").match(text, start)
            self.changes.replace(found.end() if found else start, module, stays, node.lineno)
        leaving: dict[str, list[str]] = {}
        kept: list[tuple[ast.alias, str]] = []
        for alias, (to, name) in zip(node.names, places, strict=True):
            bound = alias.asname or alias.name
            written = name if name == bound else f"{name} as {bound}"
            if to == stays:
                kept.append((alias, written))
            else:
                leaving.setdefault(to, []).append(written)
        before = text[self._lines[node.lineno - 1] : start]
        ending = _LINE_END.search(text)
        next_line = "; " if before.strip() else f"{ending[0] if ending else chr(10)}{before}"
        for to, names in leaving.items():
            self.changes.edits.append((start, start, f"from {to} import {', '.join(names)}{next_line}"))
        self._keep(node, kept)

    def _keep(self, node: ast.ImportFrom, kept: list[tuple[ast.alias, str]]) -> None:
        """Leaves in `from … import` what is kept, as it is written."""
        first, end = self._start(node.names[0]), self._end(node.names[-1])
        region, text = self.changes.text[first:end], self.changes.text
        if len(kept) < len(node.names) and ("\n" not in region or "\\" in region):  # no comment in between
            self.changes.edits.append((first, end, ", ".join(written for _, written in kept)))
            return
        by_alias = dict(kept)
        for alias in node.names:
            start, end = self._start(alias), self._end(alias)
            if alias in by_alias:
                if text[start:end].split() != by_alias[alias].split():
                    self.changes.edits.append((start, end, by_alias[alias]))
                continue
            after = re.compile(r"(\s*,)?[ \t]*(?=([#\r\n])?)").match(text, end)
            if after and after[2]:  # the last in its line
                self.changes.edits.append((len(text[:start].rstrip()), end + len(after[1] or ""), ""))
            elif after:
                self.changes.edits.append((start, after.end(), ""))

    def _string(self, node: ast.Constant, value: str) -> None:
        new = successor(value) if _NAME.fullmatch(value) else None
        if new is None or isinstance(self._above[node], ast.JoinedStr):
            return
        start = self._start(node)
        found = _STRING.fullmatch(self.changes.text, start, self._end(node))
        if found and found[2] == value:
            self.changes.replace(found.start(2), value, new, node.lineno)
        else:  # in pieces, or with escapes
            self.changes.by_hand(node.lineno, repr(value), repr(new))


def _place_of(module: str, name: str) -> tuple[str, str]:
    """Returns the module and the name by which `from module import name` imports today."""
    if name == "*":
        return successor(module) or module, name
    now = successor(f"{module}.{name}")
    return (module, name) if now is None else (now.rpartition(".")[0], now.rpartition(".")[2])


def _behind(name: str, module: str, moved: str) -> str | None:
    """Returns how a dotted name is written where `name` is bound to `module`; None where it is not in it."""
    if f"{moved}.".startswith(f"{module}."):
        return name + moved.removeprefix(module)
    return None


def _different(old: str, new: str) -> tuple[str, str]:
    """Returns where two dotted names begin, up to what is the same in both at their ends."""
    before, after = old.split("."), new.split(".")
    while min(len(before), len(after)) > 1 and before[-1] == after[-1]:
        del before[-1], after[-1]
    return ".".join(before), ".".join(after)
