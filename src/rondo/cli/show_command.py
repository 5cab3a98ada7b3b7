"""`rondo show`: a run's trajectories, to read in the terminal."""

from __future__ import annotations

import argparse
import shutil

HELP = "print trajectories of a run: prompt, turns and tool calls, reward, why it ended"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser("show", help=HELP, description=HELP)
    parser.add_argument("run", metavar="RUN", help="a run's folder (runs/…)")
    parser.add_argument("--step", type=int, help="of this step (default: the last)")
    parser.add_argument("-n", type=int, default=3, help="at most so many (default: 3)")
    by_reward = parser.add_mutually_exclusive_group()
    by_reward.add_argument("--best", action="store_true", help="the highest rewards first")
    by_reward.add_argument("--worst", action="store_true", help="the lowest rewards first")
    parser.add_argument("--failed", action="store_true", help="only those that could not be scored")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="only of prompts with this text, or id")


def run(args: argparse.Namespace) -> int:
    """Prints the trajectories that were asked for."""
    from rondo.tracking.trajectories import read_trajectories, written

    order = "best" if args.best else "worst" if args.worst else "first"
    found = read_trajectories(
        args.run,
        step=args.step,
        order=order,  # type: ignore[arg-type]
        failed=True if args.failed else None,
        prompt=args.prompt,
        number=args.n,
    )
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    print("\n".join(written(one, width) for one in found) or "no trajectory of that step is like that")
    return 0
