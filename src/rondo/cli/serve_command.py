"""`rondo serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rondo.cli.arguments import find_policy, load_arguments, note, recipe_parser
from rondo.system.access import ENDPOINT_KEY, add_keys, keys_of
from rondo.system.usage import nothing_collected

if TYPE_CHECKING:
    from rondo.config import LoadedConfig
    from rondo.trainers.commands.serve import Serving

HELP = "serve a model over an OpenAI-compatible endpoint"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Registers the subcommand."""
    parser = recipe_parser(subparsers, "serve", HELP)
    first = "The first argument is a model folder, a hub id, or a recipe with model.path."
    parser.epilog = f"{first}\n\n{parser.epilog}"
    add_keys(parser, ENDPOINT_KEY)
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--name", help="name of the model for clients (default: of its folder)")
    parser.add_argument("--replicas", type=int, help="engines, each in a process of its own")
    parser.add_argument("--max-context", type=int, help="prompt and answer tokens of a request")
    parser.add_argument(
        "--check",
        action="store_true",
        help="first compare a few tokens of the engine with what training computes (loads the model twice)",
    )
    parser.add_argument(
        "--fetch-images",
        action="store_true",
        help="fetch images that requests name by http(s) URLs; nothing in this network is asked",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the address and what a client needs, then serves until Ctrl-C."""
    loaded = load_served(args.config, args.replicas)
    find_policy(loaded)
    with nothing_collected(for_good=args.owns_process):
        from rondo.trainers.commands.serve import Asked, serve

    keys, keys_from = keys_of(args, ENDPOINT_KEY)
    given = {
        name: getattr(args, name) for name in ("host", "port", "name", "max_context", "check", "fetch_images")
    }
    asked = Asked(keys=keys, keys_from=keys_from, spelled=_as_flag, **given)
    serve(
        loaded,
        asked,
        ready=lambda serving: _announce(serving, is_random=not keys),
        note=note,
    )
    return 0


def load_served(arguments: Sequence[str], replicas: int | None = None) -> LoadedConfig:
    """Loads the configuration of a model folder or hub id, or of recipes. Raises ConfigError."""
    from rondo.config.load import recipe_path

    extra = [] if replicas is None else [f"rollout.replicas={replicas}"]
    first = arguments[0]
    if recipe_path(first).endswith((".yaml", ".yml")) or "=" in first:
        return load_arguments(arguments, extra)
    # what a recipe must say for a run, and no server reads
    model = [f"model.path={first}", "trainer.total_steps=1"]
    return load_arguments([*model, *arguments[1:]], extra)


def _as_flag(option: str, value: object) -> str:
    flag = f"--{option.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _announce(serving: Serving, *, is_random: bool) -> None:
    print(f"base_url={serving.base_url}")
    print(f"model={serving.model}")
    if is_random:
        print(f"api_key={serving.api_key}")
    print(f"{serving.engine}; Ctrl-C ends it", flush=True)
