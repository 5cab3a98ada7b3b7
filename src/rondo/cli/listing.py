"""`rondo recipes` and `rondo list`: what there is to choose from, a line each."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rondo.cli.arguments import note
from rondo.core.errors import ConfigError, did_you_mean
from rondo.system.names import offered

if TYPE_CHECKING:
    from rondo.algorithms import Kind

HELP = {
    "recipes": "list the recipes that have a name, or print one",
    "list": "list what a recipe may name: functions, tools, environments",
}
# By what `rondo list` calls them: the kind of function, and the key that names one.
ALGORITHMS: Mapping[str, tuple[Kind, str]] = {
    "advantages": ("advantage", "algorithm.advantage"),
    "losses": ("policy_loss", "algorithm.policy_loss"),
    "value-losses": ("value_loss", "algorithm.value_loss"),
    "aggregations": ("aggregation", "algorithm.aggregation"),
    "kl": ("kl", "algorithm.kl"),
    "filters": ("filter", "algorithm.filter"),
    "selections": ("select", "algorithm.select"),
    "resamplers": ("resample", "algorithm.resample"),
    "preference-losses": ("pair_loss", "algorithm.preference_loss"),
    "terms": ("term", "algorithm.terms"),
    "coefficients": ("coefficient", "algorithm.coefficients"),
}
BY_NAME = ("environments", "rewards", "tools")
KINDS = (*BY_NAME, *ALGORITHMS)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the two subcommands."""
    recipes = subparsers.add_parser("recipes", help=HELP["recipes"], description=HELP["recipes"])
    recipes.add_argument("name", nargs="?", help="print this one, to start one's own from")
    listing = subparsers.add_parser("list", help=HELP["list"], description=HELP["list"])
    listing.add_argument("kind", nargs="?", metavar="KIND", help=f"one of {', '.join(KINDS)} (default: all)")


def run(args: argparse.Namespace) -> int:
    """Prints the list."""
    if args.command == "recipes":
        print(_recipe(args.name) if args.name else "\n".join(_table(_recipes())))
    elif args.kind is not None:
        print("\n".join(_table(_functions(args.kind))))
    else:
        print("\n\n".join("\n".join([f"{kind}:", *_table(_functions(kind), "  ")]) for kind in KINDS))
    return 0


def _recipe(name: str) -> str:
    """Returns the text of a recipe."""
    recipes = offered("recipes")
    if name not in recipes:
        raise ConfigError(
            f"there is no recipe {name!r}{did_you_mean(name, recipes)} `rondo recipes` lists them"
        )
    text: str = recipes[name].read_text(encoding="utf-8")
    return text.rstrip("\n")


def _recipes() -> Iterable[tuple[str, str]]:
    """Yields name and first sentence of every recipe: of the comment at its head."""
    for name, path in _looked_up("recipes"):
        comment: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("# yaml-language-server"):  # for editors
                comment.append(line.lstrip("# "))
        yield name, _first_sentence(" ".join(comment))


def _looked_up(kind: str) -> Iterable[tuple[str, Any]]:
    """Yields the names of a kind, each with what it stands for; writes to standard error why others cannot be
    used.
    """
    names = offered(kind)
    for name in names:
        try:
            yield name, names[name]
        except ConfigError as error:
            note(error)


def _functions(kind: str) -> Iterable[tuple[str, str]]:
    """Yields name, and first sentence and options, of every function of a kind."""
    if kind in BY_NAME:
        for name, function in _looked_up(kind):
            yield name, _described(function)
    elif kind in ALGORITHMS:
        from rondo.algorithms import lookup, names  # imports torch

        for name in names(ALGORITHMS[kind][0]):
            yield name, _described(lookup(ALGORITHMS[kind][0], name))
    else:
        raise ConfigError(f"there is no list {kind!r}{did_you_mean(kind, KINDS)} Lists: {', '.join(KINDS)}")


def _described(function: Callable[..., Any]) -> str:
    """Returns the first sentence of a function's docstring, and the options that it takes."""
    options = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    text = _first_sentence(inspect.getdoc(function) or "")
    return f"{text} [{', '.join(options)}]" if options else text


def _first_sentence(text: str) -> str:
    """Returns a text up to the first full stop that ends a sentence, in one line."""
    line = " ".join(text.split("\n\n", 1)[0].split())
    return re.split(r"(?<=[^.\s]{2}\.)\s+(?=[A-Z`])", line, maxsplit=1)[0].rstrip(".")


def _table(lines: Iterable[tuple[str, str]], indent: str = "") -> list[str]:
    rows = list(lines)
    width = max(len(name) for name, _ in rows)
    return [f"{indent}{name:{width}}  {text}" for name, text in rows]
