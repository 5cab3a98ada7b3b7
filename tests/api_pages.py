"""What docs/ has of the code: api.md its docstrings, columns.md the table of columns, each below a mark. What
stands above it is written by hand.

    python -m tests.api_pages write

tests/test_api_pages.py fails where they differ from the code, and where something public has no docstring.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from rondo.core.columns import documented

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
# Of each chapter, the classes by their files.
CHAPTERS = {
    "The session of a program": {
        "trainers/sessions/session.py": ("Session",),
        "trainers/sessions/handles.py": ("Actor", "Critic", "Reference", "FrozenModel", "Reward", "Cost"),
        "controller/group.py": ("WorkerGroup",),
    },
    "Prompts, answers, metrics": {
        "core/types.py": ("Prompt", "SamplingParams", "Completion", "Trajectory", "StepStats"),
        "trainers/program/inputs.py": ("Prompts",),
    },
    "Batches": {"core/batch.py": ("BatchRef", "Batch")},
}
MADE = "<!-- From here on: python -m tests.api_pages write -->\n"


def api_page() -> str:
    """Returns what docs/api.md has below the mark."""
    parts = [""]
    for chapter, files in CHAPTERS.items():
        parts.append(f"## {chapter}\n")
        for file, names in files.items():
            tree = ast.parse((ROOT / "src" / "rondo" / file).read_text(encoding="utf-8"))
            found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            for name in names:
                parts += _of_class(found[name], f"rondo.{file.removesuffix('.py').replace('/', '.')}")
    return "\n".join(parts)


def columns_page() -> str:
    """Returns what docs/columns.md has below the mark."""
    return "\n" + documented() + "\n"


PAGES = {"docs/api.md": api_page, "docs/columns.md": columns_page}


def page(path: str) -> str:
    """Returns a page as it should be."""
    by_hand, mark, _ = (ROOT / path).read_text(encoding="utf-8").partition(MADE)
    assert mark, f"{path} has no line {MADE!r}"
    return by_hand + MADE + PAGES[path]()


def undocumented() -> list[str]:
    """Returns the public classes, methods and fields of the page that have no text."""
    missing = []
    for files in CHAPTERS.values():
        for file, names in files.items():
            tree = ast.parse((ROOT / "src" / "rondo" / file).read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name in names:
                    missing += [node.name] if ast.get_docstring(node) is None else []
                    missing += [
                        f"{node.name}.{one.name}" for one in _methods(node) if not ast.get_docstring(one)
                    ]
                    missing += [f"{node.name}.{name}" for name, _, text in _fields(node) if not text]
    return missing


def _of_class(node: ast.ClassDef, module: str) -> Iterator[str]:
    yield f"### {node.name}\n\n`{module}.{node.name}`. {_written(ast.get_docstring(node))}\n"
    fields = [f"| `{name}` | {_cell(kind)} | {_cell(_written(text))} |" for name, kind, text in _fields(node)]
    if fields:
        yield "\n".join(["| | | |", "|---|---|---|", *fields, ""])
    for method in _methods(node):
        yield f"```python\n{signature_of(method)}\n```\n{_written(ast.get_docstring(method))}\n"


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield child


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yields (name, type, text) of the public fields: of a record, or set in __init__ with a text below."""
    made = next((x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"), None)
    for body in (node.body, made.body if made is not None else ()):
        for child, below in zip(body, [*body[1:], None], strict=False):
            text = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = str(below.value.value)
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                name, kind = child.target.id, f"`{ast.unparse(child.annotation)}`"
            elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Attribute) and text:
                name, kind = child.targets[0].attr, "–"
            else:
                continue
            if not name.startswith("_"):
                yield name, kind, text


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = {ast.unparse(one) for one in node.decorator_list}
    answer = ast.unparse(node.returns) if node.returns is not None else "None"
    if "property" in kind or "functools.cached_property" in kind:
        return f"{node.name}: {answer}"
    said = _arguments(node.args)
    said = said if "staticmethod" in kind else said[1:]
    before = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    line = f"{before} {node.name}({', '.join(said)}) -> {answer}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{before} {node.name}(", *(f"    {one}," for one in said), f") -> {answer}"])


def _arguments(arguments: ast.arguments) -> list[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    said = [_argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    if arguments.vararg is not None:
        said.append("*" + _argument(arguments.vararg, None))
    elif arguments.kwonlyargs:
        said.append("*")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    said += [_argument(one, default) for one, default in named]
    return said if arguments.kwarg is None else [*said, "**" + _argument(arguments.kwarg, None)]


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    said = one.arg if one.annotation is None else f"{one.arg}: {ast.unparse(one.annotation)}"
    return said if default is None else f"{said} = {ast.unparse(default)}"


def _written(text: str | None) -> str:
    """Returns a docstring as Markdown has it: a line for each paragraph, and no tags but in code."""
    paragraphs: Iterable[str] = textwrap.dedent(text or "").strip().split("\n\n")
    joined = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    parts = joined.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__" and sys.argv[1:] == ["write"]:
    for path in PAGES:
        (ROOT / path).write_text(page(path), encoding="utf-8")
