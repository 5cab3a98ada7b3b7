"""`rondo config`: the resolved configuration and who set every value; the schema; a launch of another program
as a recipe. Nothing that a recipe names is imported, started or asked: `rondo check` does that.
"""

from __future__ import annotations

import argparse
import json
import sys

from rondo.cli.arguments import add_launches, add_recipes, load_recipe, of_launch

HELP = "show the resolved configuration and where every value comes from"
TRANSLATE = "write a launch of verl as a recipe, with a comment for each line: what it was there"
SCHEMA = "write the JSON Schema of recipes, with which editors complete and check them"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Registers the subcommand."""
    parser = subparsers.add_parser("config", help=HELP, description=HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("schema", help=SCHEMA, description=SCHEMA)
    show = actions.add_parser("show", help=HELP, description=HELP)
    add_recipes(show, nargs="*")
    add_launches(show)
    show.add_argument(
        "--yaml", action="store_true", help="one YAML file with everything (can be trained from)"
    )
    translate = actions.add_parser("translate", help=TRANSLATE, description=TRANSLATE)
    add_launches(translate, option=False)
    translate.add_argument("config", nargs="*", metavar="KEY=VALUE", help="overrides, in either spelling")
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the schema, or the keys."""
    if args.action == "schema":
        from rondo.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
        return 0
    if args.action == "translate":
        found = of_launch(args, "translate")
        print(found.table, file=sys.stderr)
        print(found.recipe, end="")
        return 0
    from rondo.config import show, to_yaml

    loaded = load_recipe(args)
    if args.yaml:
        print(to_yaml(loaded.config), end="")
    else:
        print(show(loaded.config, loaded.origins))
    return 0
