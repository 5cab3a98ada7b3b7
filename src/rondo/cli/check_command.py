"""`rondo check`: what a command would refuse about a recipe, and what it would do, before it does it.

Finding that out takes running what the recipe names: its files are imported, its MCP servers started, its
environments asked. `rondo config show` does none of that.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rondo.cli.arguments import load_recipe, recipe_parser
from rondo.cli.training import add_for
from rondo.system.usage import nothing_collected

if TYPE_CHECKING:
    from rondo.config import LoadedConfig
    from rondo.tracking import Found

HELP = (
    "check a recipe as its command does before it begins, and show the stages of a step; imports, starts and "
    "asks what the recipe names"
)
_FUNCTION = re.compile(r"\S+\.(py|pkl):\w[\w.]*|[A-Za-z_][\w.]*:\w[\w.]*|[A-Za-z_]\w*(\.\w+)+")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = recipe_parser(subparsers, "check", HELP, launches=True)
    add_for(parser)
    parser.add_argument("--data", action="store_true", help="read every row of the data, too")


def run(args: argparse.Namespace) -> int:
    """Prints what the recipe names that will run; then checks it; then, for `train`, the stages of one step
    and which role is where; with --data, how many rows there are.
    """
    loaded = load_recipe(args)
    args.command_for = args.command_for or loaded.command or "train"
    named = list(_named(loaded))
    if named:
        print("The recipe names, and this runs, starts or asks:", *named, sep="\n  ", flush=True)
    with nothing_collected(for_good=args.owns_process):
        from rondo.planning import placement_of
        from rondo.trainers.commands.ahead import check_data, known_ahead
        from rondo.trainers.commands.check import check_rl
        from rondo.trainers.commands.check_supervised import check_supervised
        from rondo.trainers.commands.recipe import settled_recipe
        from rondo.trainers.supervised import PREFERENCE, REWARD_MODEL, SFT

    loaded = settled_recipe(loaded)
    if args.command_for != "train":
        tasks = {"sft": SFT, "preference": PREFERENCE, "reward-model": REWARD_MODEL}
        task = tasks[args.command_for]
        check_supervised(loaded, task)
        _warn(known_ahead(loaded, task.kind))
        if args.data:
            print(*check_data(loaded, task), sep="\n")
        print(f"rondo {args.command_for} takes this recipe.")
        return 0
    program = check_rl(loaded)
    _warn(known_ahead(loaded, "rl"))
    print("One step:")
    for number, line in enumerate(program.describe(loaded.config), 1):
        print(f"  {number}. {line}")
    print("\nPlacement:")
    for line in placement_of(loaded.config, program.all_roles).describe(program.all_roles):
        print(f"  {line}")
    if args.data and program.recorded is None:
        print("\nData:", *check_data(loaded), sep="\n  ")
    return 0


def _warn(found: Sequence[Found]) -> None:
    for one in found:
        print(f"WARNING {one.warning()}", flush=True)


def _named(loaded: LoadedConfig) -> Iterator[str]:
    """Yields, by key, the functions, commands and addresses that somebody has set."""
    from rondo.config import leaves_of

    for key, value in leaves_of(loaded.config).items():
        last = key.rpartition(".")[2]
        if key == "model.trust_remote_code" and value:
            yield f"{key}: the code in model.path"
        if not isinstance(value, str) or not any(
            key == set_ or key.startswith(f"{set_}.") for set_ in loaded.origins
        ):
            continue
        if last == "command" or "://" in value or (_FUNCTION.fullmatch(value) and not last.endswith("path")):
            yield f"{key}: {value}"
