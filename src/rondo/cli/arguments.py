"""What the subcommands share: recipe files and overrides on one command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rondo.config import LoadedConfig, load


def recipe_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], command: str, about: str
) -> argparse.ArgumentParser:
    """The parser of a subcommand that takes recipe files and overrides."""
    parser = subparsers.add_parser(command, help=about, description=about)
    parser.add_argument(
        "config", nargs="+", help="recipe files, merged in order, then key.sub=value overrides"
    )
    return parser


def load_arguments(arguments: Sequence[str], extra: Sequence[str] = ()) -> LoadedConfig:
    """Arguments with `=` before any `/` are overrides, the others recipe files. Raises ConfigError."""
    overrides = [a for a in arguments if "=" in a and "/" not in a.split("=", 1)[0]]
    files = [a for a in arguments if a not in overrides]
    loaded = load(files, [*overrides, *extra])
    for note in loaded.notes:  # keys in verl's spelling that mean nothing here
        print(f"note: {note}", file=sys.stderr)
    return loaded
