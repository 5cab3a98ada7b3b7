"""`rondo train`: reinforcement learning from a recipe."""

from __future__ import annotations

import argparse

from rondo.cli.arguments import load_arguments, recipe_parser

HELP = "train by reinforcement learning"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the subcommand."""
    return recipe_parser(subparsers, "train", HELP)


def run(args: argparse.Namespace) -> int:
    """Train; the console shows progress and the final table. Returns the exit code."""
    loaded = load_arguments(args.config)
    from rondo.trainers.commands.train import train

    train(loaded)
    return 0
