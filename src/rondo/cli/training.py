"""`rondo train`, `sft`, `preference` and `reward-model`: training from a recipe."""

from __future__ import annotations

import argparse

from rondo.cli.arguments import find_policy, load_arguments, load_recipe, recipe_parser
from rondo.core.errors import ConfigError
from rondo.system.usage import nothing_collected

HELP = {
    "train": "train by reinforcement learning",
    "sft": "fine-tune on conversations",
    "preference": "train on preference pairs (DPO, IPO, SPIN)",
    "reward-model": "train a reward model on preference pairs",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the four subcommands."""
    for command, about in HELP.items():
        recipe_parser(subparsers, command, about, launches=command in ("train", "sft"))


def add_for(parser: argparse.ArgumentParser) -> None:
    """Registers --for, of a command that looks at a recipe of one of these."""
    parser.add_argument(
        "--for",
        dest="command_for",
        choices=tuple(HELP),
        help="the command that the recipe is for (default: train, or that of a launch)",
    )


def run(args: argparse.Namespace) -> int:
    """Trains; the console shows progress and the final table. Returns the exit code."""
    with nothing_collected(for_good=args.owns_process):
        loaded = load_recipe(args) if args.command in ("train", "sft") else load_arguments(args.config)
        if loaded.command not in ("", args.command):
            raise ConfigError(
                f"these keys are those of a program that `rondo {loaded.command}` stands for, and not "
                f"`rondo {args.command}`"
            )
        find_policy(loaded)
        if loaded.config.tracking.console != "off":  # the first sign of life: what follows takes seconds
            print("loading PyTorch and transformers ...", flush=True)
        from rondo.trainers.commands.supervised import preference, reward_model, sft
        from rondo.trainers.commands.train import train

    programs = {"train": train, "sft": sft, "preference": preference, "reward-model": reward_model}
    programs[args.command](loaded)
    return 0
