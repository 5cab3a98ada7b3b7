"""`rondo config`: the resolved configuration and who set every value; the schema. Nothing that a recipe names
is imported, started or asked: `rondo check` does that.
"""

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
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the schema, or the keys."""
    if args.action == "schema":
        from rondo.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return 0
    from rondo.config import show, to_yaml

    loaded = load_arguments(args.config)
    if args.yaml:
        print(to_yaml(loaded.config), end="")
    else:
        print(show(loaded.config, loaded.origins))
    return 0
