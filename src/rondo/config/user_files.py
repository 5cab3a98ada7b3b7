"""Python files of users (`path/to/file.py:name`), run once for each content that they have had, with the
modules that lie beside them.
"""

from __future__ import annotations

import dis
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, ModuleType

from rondo.core.errors import ConfigError
from rondo.system.names import importable, importing

# Of what a module beside such a file held when it was imported.
_beside: dict[Path, bytes] = {}


def module_of(path: str, name: str) -> ModuleType:
    """Returns the module in a file. name: what messages say was asked for. Raises ConfigError where there is
    none, or where it would run with another module than the one beside it.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"'{name}': there is no file {file}; paths are relative to the working directory")
    beside = dict(_imported_from_beside(file))
    contents = {one: _content_of(one) for one in (file, *beside.values())}
    digest = hashlib.sha256(b"".join([str(file).encode(), *contents.values()])).hexdigest()
    module_name = f"rondo_file_{file.stem}_{digest[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{name}': {file} is no Python file; its name must end in .py")
    for word, own in beside.items():
        _check_not_another(word, own, file, name)
        if _beside.get(own, contents[own]) != contents[own]:  # edited since: it is imported anew
            for old in [one for one in sys.modules if one == word or one.startswith(f"{word}.")]:
                del sys.modules[old]
        _beside[own] = contents[own]
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up
    try:
        with importing(f"'{name}': {file}"), importable(str(file.parent)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _content_of(file: Path) -> bytes:
    """Returns a digest of a file; of a package's first one that of the whole package."""
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    return hashlib.sha256(b"".join(hashlib.sha256(one.read_bytes()).digest() for one in files)).digest()


def _imported_from_beside(file: Path) -> Iterator[tuple[str, Path]]:
    """Yields the modules in a file's folder that it, or one of them, imports: name and file. None of a
    package, whose modules have its name before theirs.
    """
    if (file.parent / "__init__.py").is_file():
        return
    unread, seen = [file], {file}
    while unread:
        for word in _imports_of(unread.pop()):
            for own in (file.parent / f"{word}.py", file.parent / word / "__init__.py"):
                if own.is_file() and own not in seen:
                    seen.add(own)
                    unread.append(own)
                    yield word, own


def _imports_of(file: Path) -> list[str]:
    """Returns the first words of what a file imports; none of what is no Python, which running it says. (Of
    compiled code: `ast` fails in a deep stack.)
    """
    try:
        unread = [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return []
    named: set[str] = set()
    while unread:
        code = unread.pop()
        unread += [one for one in code.co_consts if isinstance(one, CodeType)]
        steps = list(dis.get_instructions(code))
        # Two steps before an import say how many folders up it begins, and what of the module is wanted.
        named |= {
            step.argval.partition(".")[0]
            for level, _, step in zip(steps, steps[1:], steps[2:], strict=False)
            if step.opname == "IMPORT_NAME" and not level.argval
        }
    return sorted(named)


def _check_not_another(word: str, own: Path, file: Path, name: str) -> None:
    """Raises ConfigError where this process has, or would find, another module of this name."""
    there = sys.modules.get(word)
    if there is not None:
        found = getattr(there, "__file__", None) or "Python's own"
    else:
        spec = PathFinder.find_spec(word)
        found = None if spec is None else spec.origin  # None: a folder without code
    if found is None or (found != "Python's own" and Path(found).resolve() == own):
        return
    raise ConfigError(
        f"'{name}': {file.name} imports {word}, and {own} would not be what it gets, or would hide another: "
        f"{word} is {found} in this process. Give the file beside it a name of its own"
    )
