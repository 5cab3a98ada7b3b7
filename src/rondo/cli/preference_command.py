"""`rondo preference`: preference learning (DPO and its relatives) from a recipe."""

from __future__ import annotations

import argparse

from rondo.cli.arguments import load_arguments, recipe_parser

HELP = "train on preference pairs (DPO, IPO, SPIN)"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the subcommand."""
    return recipe_parser(subparsers, "preference", HELP)


def run(args: argparse.Namespace) -> int:
    """Train; the console shows progress and the final table. Returns the exit code."""
    loaded = load_arguments(args.config)
    from rondo.trainers.commands.train import preference

    preference(loaded)
    return 0
