"""`rondo reward-model`: a reward model from preference pairs, from a recipe."""

from __future__ import annotations

import argparse

from rondo.cli.arguments import load_arguments, recipe_parser

HELP = "train a reward model on preference pairs"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the subcommand."""
    return recipe_parser(subparsers, "reward-model", HELP)


def run(args: argparse.Namespace) -> int:
    """Train; the console shows progress and the final table. Returns the exit code."""
    loaded = load_arguments(args.config)
    from rondo.trainers.commands.train import reward_model

    reward_model(loaded)
    return 0
