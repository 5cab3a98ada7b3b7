"""`rondo show`: a run's trajectories, to read in the terminal."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from rondo.core.errors import DataError
from rondo.system.streams import drawn_on

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
    parser.add_argument("--evaluation", action="store_true", help="answers of the step's evaluation")
    parser.add_argument(
        "--images",
        choices=("auto", "path", "inline"),
        default="auto",
        help="print their paths, or draw them, too: in kitty, Ghostty, iTerm2 and WezTerm (default: auto, "
        "draws them in these)",
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="only of prompts with this text, or id")


def run(args: argparse.Namespace) -> int:
    """Prints the trajectories that were asked for."""
    from rondo.tracking.pictures import drawing, protocol_of
    from rondo.tracking.trajectories import parts_of, read_trajectories

    order = "best" if args.best else "worst" if args.worst else "first"
    found = read_trajectories(
        args.run,
        step=args.step,
        order=order,  # type: ignore[arg-type]
        failed=True if args.failed else None,
        prompt=args.prompt,
        number=args.n,
        evaluation=args.evaluation,
    )
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    terminal = drawn_on(sys.stdout)
    protocol = protocol_of(os.environ) if terminal.isatty() and args.images != "path" else None
    if args.images == "inline" and protocol is None:
        raise DataError(
            "--images inline: standard output is no terminal that says that it draws images (in TERM, "
            "TERM_PROGRAM or KITTY_WINDOW_ID, outside of tmux and screen); --images path says where they are"
        )
    for one in found:
        for part in parts_of(one, width, draw=protocol is not None):
            if isinstance(part, str):
                print(part)
            elif protocol is not None:
                terminal.write(f"  {drawing(part.png, protocol)}\n")  # `print` would spell it out
    if not found:
        print("no trajectory of that step is like that")
    return 0
