"""`rondo eval`: scored answers of a model to the evaluation prompts of a recipe."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rondo.cli.arguments import load_arguments, recipe_parser

HELP = "evaluate a model on a recipe's evaluation prompts"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = recipe_parser(subparsers, "eval", HELP)
    parser.add_argument("--model", help="model folder or hub id (default: model.path of the recipe)")
    parser.add_argument("--output", help="write all answers to this JSON-lines file")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the metrics as JSON."""
    extra = [f"model.path={args.model}", "model.config=null", "trainer.warm_start=null"] if args.model else []
    loaded = load_arguments(args.config, extra)
    from rondo.trainers.commands.evaluate import evaluate_model

    result = evaluate_model(loaded)
    if args.output:
        lines = [json.dumps(record, ensure_ascii=False) for record in map(dataclasses.asdict, result.samples)]
        Path(args.output).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps(result.metrics, indent=2))
    return 0
