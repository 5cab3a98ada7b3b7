"""`rondo view`: a page in the browser that shows runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rondo_view.server import Server

HELP = "look at runs in the browser: curves, rollouts, tokens, groups, evaluations, timeline"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser("view", help=HELP, description=HELP)
    holds = "a run, or a folder that holds runs (default: runs)"
    parser.add_argument("runs", nargs="*", default=["runs"], metavar="RUN", help=holds)
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1 (default: a free one)")


def run(args: argparse.Namespace) -> int:
    """Prints the address, and serves until Ctrl-C."""
    import threading

    server = view(*args.runs, port=args.port)
    try:
        print(
            f"{server.address}\nCtrl-C ends it. From another machine: ssh -L, with the same port", flush=True
        )
        threading.Event().wait()
    finally:
        server.close()
    return 0


def view(*runs: str, port: int = 0) -> Server:
    """Returns the page of runs, which a notebook shows; `close` ends it."""
    from rondo_view.server import Server

    return Server(runs, port)
