"""Names for what recipes and the command line choose: rondo's own, and those of other installed packages.

A package says in its entry points what it offers (docs/packages.md), in the groups of KINDS:

    [project.entry-points."rondo.environments"]
    maze = "my_worlds.maze:Maze"

A name is looked up without importing anything; what it stands for is imported when it is asked for. rondo's
own names are in rondo/entry_points.txt, which is also what pip knows of rondo. It is read as a file, because
an engine's process of another environment (`rollout.engine.python`) has rondo on its path and not installed.

Where a package is at fault, a message names it, and all other names work: two packages offer one name; rondo
has the name already (rondo's is meant); a package was made for another version of rondo; it cannot be
imported. Standard library only, but for `packaging` where a package says which rondo it wants.
"""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from rondo import __version__
from rondo.core.errors import ConfigError, did_you_mean
from rondo.system.border import contained, described

# The group `rondo.` + each of these, and what messages call one of them.
KINDS: Mapping[str, str] = {
    "environments": "environment",  # classes
    "rewards": "reward function",  # functions
    "tools": "tool",  # functions or classes
    "metric_names": "naming of metrics",  # functions
    "recipes": "recipe",  # packages: each YAML file in the folder is a recipe, by its name
    "commands": "command",  # modules with add_parser(subparsers) and run(args)
    "keys": "translator of keys",  # modules: config.load.Spelling
    "launches": "reader of launches",  # modules: config.load.Launches; an option `--NAME FILE`
}
# What a module has to have, where a name of the kind is one.
_OF_MODULES: Mapping[str, tuple[str, ...]] = {
    "commands": ("add_parser", "run"),
    "keys": ("translate", "program", "argument"),
    "launches": ("load", "translate"),
}
OURS = Path(__file__).parent.parent / "entry_points.txt"
_DISTRIBUTION = "rondo-rl"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One name of a kind, and what it stands for."""

    kind: str
    """A key of KINDS."""
    name: str
    """As recipes and the command line say it."""
    target: str
    """package.module:attribute or package.module; of a recipe its file."""
    package: str = ""
    """Who offers it, with its version; empty: rondo."""
    fault: str = ""
    """Why it cannot be used; empty: it can."""
    remedy: str = ""
    """Of the fault."""

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {self.name!r}{f' of {self.package}' if self.package else ''}"

    @property
    def told(self) -> str:
        """The fault and its remedy, for a message."""
        return f"{self}: {self.fault}; {self.remedy}"

    def load(self) -> Any:
        """Returns the object, or the path of a recipe's file. Raises ConfigError, which names the package."""
        if self.fault:
            raise ConfigError(self.told)
        if self.kind == "recipes":
            return Path(self.target)
        try:
            found = resolved(self.target)
        except ConfigError as error:
            raise ConfigError(f"{self}: {error}") from error
        wanted = _OF_MODULES.get(self.kind, ())
        if missing := [name for name in wanted if not hasattr(found, name)]:
            raise ConfigError(f"{self}: {self.target} has no {missing[0]}")
        if not wanted and isinstance(found, ModuleType):
            raise ConfigError(f"{self}: {self.target} is a module; name what is meant in it: module:name")
        return found


@dataclass(frozen=True, eq=False)
class Offered(Mapping[str, Any]):
    """The names of one kind, rondo's first. A name is imported when it is looked up, not before."""

    entries: Mapping[str, Entry]
    """By name, also those with a fault."""
    hidden: Mapping[str, Entry]
    """Of other packages, with a name that rondo has: rondo's is meant."""

    def __getitem__(self, name: str) -> Any:
        if name in self.hidden:
            _warn_once(self.hidden[name].told)
        return self.entries[name].load()

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def faults(self) -> list[Entry]:
        """Returns what other packages offer and cannot be used, as far as it shows without importing them."""
        return [*(entry for entry in self.entries.values() if entry.fault), *self.hidden.values()]


@functools.cache
def offered(kind: str) -> Offered:
    """Returns the names of a kind (one of KINDS), read once per process."""
    ours = {entry.name: entry for entry in _ours(kind)}
    theirs: dict[str, list[Entry]] = {}
    for entry in _of_others(kind):
        theirs.setdefault(entry.name, []).append(entry)
    added = {name: _only(entries) for name, entries in sorted(theirs.items()) if name not in ours}
    return Offered({**ours, **added}, {name: _hidden(theirs[name][0]) for name in theirs if name in ours})


def _only(entries: list[Entry]) -> Entry:
    """Returns the only entry of a name; of several one whose fault says which packages offer it."""
    if len(entries) == 1:
        return entries[0]
    entries = sorted(entries, key=lambda entry: entry.package)  # as they are found, they have any order
    packages = " and ".join(entry.package for entry in entries)
    targets = " or ".join(entry.target for entry in entries)
    remedy = "uninstall one" if entries[0].kind in _OF_MODULES else f"write {targets} instead"
    return Entry(entries[0].kind, entries[0].name, targets, packages, "both offer this name", remedy)


def _hidden(entry: Entry) -> Entry:
    """Returns an entry whose name rondo has."""
    remedy = "rename it there" if entry.kind in _OF_MODULES else f"write {entry.target} for this one"
    return dataclasses.replace(entry, fault="rondo has this name, and its own is meant", remedy=remedy)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _ours(kind: str) -> Iterator[Entry]:
    for name, target in read_groups(OURS.read_text(encoding="utf-8"))[f"rondo.{kind}"].items():
        yield from _spread(Entry(kind, name, target))


@functools.cache
def _others() -> Mapping[str, Distribution]:
    """Returns the other distributions that have entry points of rondo's, by name: of two with one name the
    first on the path, as Python does. They are searched once for all kinds.
    """
    found: dict[str, Distribution] = {}
    for one in distributions():
        if "rondo." not in _entry_points(one):  # of most; their metadata would take a tenth of a second
            continue
        name = _normalized(str(one.metadata["Name"] or "") if "Name" in one.metadata else "")
        if name not in ("", _DISTRIBUTION, *found):
            found[name] = next(iter(distributions(name=name)), one)
    return found


def _of_others(kind: str) -> Iterator[Entry]:
    """Yields what other distributions offer."""
    for name, found in _others().items():
        package = f"{name} {found.version}"
        try:
            group = read_groups(_entry_points(found)).get(f"rondo.{kind}", {})
        except configparser.Error as error:
            why = f"its entry_points.txt cannot be read: {' '.join(str(error).split())}"
            yield Entry(kind, name, "", package, why, "install another version of it")
            continue
        fault = _made_for_another(found) if group else ""
        for key, target in group.items():
            yield from _spread(Entry(kind, key, target, package, fault, "update one of them"))


def _entry_points(found: Distribution) -> str:
    """Returns a distribution's entry points; empty: it has none, or they are no text."""
    try:
        return found.read_text("entry_points.txt") or ""
    except UnicodeDecodeError:
        return ""


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_groups(text: str) -> Mapping[str, Mapping[str, str]]:
    """Returns entry points: target by name, by group. Raises configparser.Error."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, default_section="")
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
    parser.read_string(text)
    return {group: dict(parser.items(group)) for group in parser.sections()}


def _made_for_another(found: Distribution) -> str:
    """Says that a distribution asks for another version of rondo; empty where it does not."""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in found.requires or ():
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue  # pip, too, has accepted the package
        if _normalized(wanted.name) != _DISTRIBUTION:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue  # of an extra, or of another Python
        if not wanted.specifier.contains(__version__, prereleases=True):
            return f"it was made for rondo-rl{wanted.specifier}, and this is {__version__}"
    return ""


def _spread(entry: Entry) -> Iterator[Entry]:
    """Yields an entry; in place of a package of recipes each of its files."""
    if entry.kind != "recipes":
        yield entry
        return
    top, *inner = entry.target.split(".")
    spec = importlib.util.find_spec(top) if top else None  # looks for it, and imports nothing
    folders = [Path(place, *inner) for place in (spec.submodule_search_locations if spec else None) or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.yaml"))
    if not files:
        why = f"{entry.target} is no folder of a package with YAML files in it"
        yield dataclasses.replace(entry, fault=why, remedy="put them into its package-data")
    for file in files:
        yield dataclasses.replace(entry, name=file.stem, target=str(file))


# --- importing by name ---


def resolved(target: str) -> Any:
    """Imports the module `a.b`, or the object `a.b:name`, from what is installed: never a folder of that name
    in the working directory. Raises ConfigError.
    """
    module_name, colon, attribute = target.partition(":")
    module = module_by_name(module_name, target, here=False)
    return attribute_of(module, attribute, target) if colon else module


def module_by_name(module_name: str, name: str, *, here: bool = True) -> ModuleType:
    """Imports a module. name: what messages say was asked for. here: also from the working directory. Raises
    ConfigError.
    """
    place = importable(os.getcwd()) if here else contextlib.nullcontext()
    with importing(f"'{name}': module {module_name}"), place:
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    _refuse_moved(name)
    raise ConfigError(f"'{name}': there is no module {missing}; install it, or run where it can be imported")


def attribute_of(module: ModuleType, attribute: str, name: str) -> Callable[..., Any]:
    """Returns what is called `attribute` (`Class.method` is legal) in a module, and can be called with
    arguments that it names. name: what messages say was asked for. Raises ConfigError.
    """
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            _refuse_moved(name)
            public = [key for key in vars(found) if not key.startswith("_")]
            place = getattr(module, "__file__", None) or module.__name__
            raise ConfigError(f"'{name}': {place} has no '{part}'{did_you_mean(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"'{name}' is {type(found).__name__}, not a function")
    try:
        inspect.signature(found)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"'{name}' does not say which parameters it takes; name a function around it"
        ) from error
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def importable(folder: str) -> Iterator[None]:
    """Makes modules in `folder` importable inside (a console script's path lacks the working directory)."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Turns whatever a module's code raises inside into a ConfigError, which says where a moved name is
    today.
    """
    try:
        with contained():
            yield
    except Exception as error:
        from rondo.core.moved import advice

        raise ConfigError(f"{what} could not be imported: {described(error)}{advice(error)}") from error


def _refuse_moved(name: str) -> None:
    """Raises ConfigError for a name of an older rondo, in place of what is said of one that is not there."""
    from rondo.core.moved import successor

    new = successor(name)
    if new is not None:
        raise ConfigError(f"'{name}' is '{new}' now: write that (`rondo migrate FILE` does it in a file)")
