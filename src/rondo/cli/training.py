"""`rondo train`, `sft`, `preference` and `reward-model`: training from a recipe."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from rondo.cli.arguments import find_policy, load_arguments, load_recipe, recipe_parser

HELP = {
    "train": "train by reinforcement learning",
    "sft": "fine-tune on conversations",
    "preference": "train on preference pairs (DPO, IPO, SPIN)",
    "reward-model": "train a reward model on preference pairs",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the four subcommands."""
    for command, about in HELP.items():
        recipe_parser(subparsers, command, about, launches=command == "train")


def run(args: argparse.Namespace) -> int:
    """Trains; the console shows progress and the final table. Returns the exit code."""
    with _nothing_collected(for_good=args.owns_process):
        loaded = load_recipe(args) if args.command == "train" else load_arguments(args.config)
        find_policy(loaded)
        if loaded.config.tracking.console != "off":  # the first sign of life: what follows takes seconds
            print("loading PyTorch and transformers ...", flush=True)
        from rondo.trainers.commands.supervised import preference, reward_model, sft
        from rondo.trainers.commands.train import train

    programs = {"train": train, "sft": sft, "preference": preference, "reward-model": reward_model}
    programs[args.command](loaded)
    return 0


@contextmanager
def _nothing_collected(*, for_good: bool) -> Iterator[None]:
    """Turns garbage collection off while modules are imported: they make a million objects and no garbage,
    and looking for it took a quarter of the time. for_good: later collections leave out what is there at the
    end, which only a process of our own may decide."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if was_on:
            gc.enable()
