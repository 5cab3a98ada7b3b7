"""`rondo export`: a checkpoint of a run as a Hugging Face folder."""

from __future__ import annotations

import argparse

HELP = "write a checkpoint as a Hugging Face folder"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser("export", help=HELP, description=HELP)
    parser.add_argument("run", help="run folder (runs/quickstart)")
    parser.add_argument("output", help="folder to write; must not exist or be empty")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the folder and say where it is."""
    from rondo.trainers.commands.export import export_checkpoint

    step = export_checkpoint(args.run, args.output, args.step)
    print(f"wrote step {step} of {args.run} to {args.output}")
    return 0
