"""`rondo config`: the resolved configuration, who set every value, the dataflow that follows; the schema."""

from __future__ import annotations

import argparse
import json

from rondo.cli.arguments import add_recipes, load_arguments

HELP = "show the resolved configuration and where every value comes from"
SCHEMA = "write the JSON Schema of recipes, with which editors complete and check them"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Registers the subcommand."""
    parser = subparsers.add_parser("config", help=HELP, description=HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("schema", help=SCHEMA, description=SCHEMA)
    show = actions.add_parser("show", help=HELP, description=HELP)
    add_recipes(show, nargs="*")
    show.add_argument(
        "--yaml", action="store_true", help="one YAML file with everything (can be trained from)"
    )
    show.add_argument(
        "--no-stages", action="store_true", help="skip the dataflow (instant: imports no torch)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the schema; or the keys, then (for an RL recipe) the stages of one step, and who is where."""
    if args.action == "schema":
        from rondo.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return 0
    from rondo.config import show, to_yaml

    loaded = load_arguments(args.config)
    if args.yaml:
        print(to_yaml(loaded.config), end="")
        return 0
    print(show(loaded))
    reward = loaded.config.reward
    scored = reward.functions or reward.models or loaded.config.rollout.recorded
    if args.no_stages or not scored:  # it is no RL recipe
        return 0
    from rondo.trainers.commands.check import check_rl
    from rondo.trainers.commands.recipe import settled_recipe
    from rondo.trainers.program import placement_of

    loaded = settled_recipe(loaded)
    program = check_rl(loaded)
    print("\nOne step:")
    for number, line in enumerate(program.describe(loaded.config), 1):
        print(f"  {number}. {line}")
    print("\nPlacement:")
    for line in placement_of(loaded.config, program.all_roles).describe(program.all_roles):
        print(f"  {line}")
    return 0
