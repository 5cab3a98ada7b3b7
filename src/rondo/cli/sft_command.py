"""`rondo sft`: supervised fine-tuning from a recipe."""

from __future__ import annotations

import argparse

from rondo.cli.arguments import load_arguments, recipe_parser

HELP = "fine-tune on conversations"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the subcommand."""
    return recipe_parser(subparsers, "sft", HELP)


def run(args: argparse.Namespace) -> int:
    """Fine-tune; the console shows progress and the final table. Returns the exit code."""
    loaded = load_arguments(args.config)
    from rondo.trainers.commands.train import sft

    sft(loaded)
    return 0
