"""`rondo sandbox`: tests that the sandbox is safe on this machine, or runs programs for others."""

from __future__ import annotations

import argparse

from rondo.core.errors import ConfigError
from rondo.system.access import SANDBOX_KEY, access_of, add_access

HELP = "test that the sandbox is safe on this machine, or run programs for other machines"
CHECK = "try every known way out of the sandbox; exit code 1 if one works"
SERVE = "run programs for other machines, by SandboxFusion's HTTP API"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser("sandbox", help=HELP, description=HELP)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help=CHECK, description=CHECK)
    serve = actions.add_parser("serve", help=SERVE, description=SERVE)
    add_access(serve, SANDBOX_KEY)
    serve.add_argument("--port", type=int, default=8080, help="0 takes a free one (default: 8080)")
    serve.add_argument("--at-once", type=int, help="programs at a time (default: one for each processor)")
    for action in (check, serve):
        action.add_argument("--backend", default="auto", help="auto (default), bubblewrap or landlock")


def run(args: argparse.Namespace) -> int:
    """Does what the action says."""
    return {"check": _check, "serve": _serve}[args.action](args)


def _serve(args: argparse.Namespace) -> int:
    """Prints the URL, then serves until Ctrl-C."""
    import asyncio

    from rondo_sandbox import open_sandbox
    from rondo_sandbox.server import SandboxServer

    if args.at_once is not None and args.at_once < 1:
        raise ConfigError(f"--at-once {args.at_once}: it must be at least 1")

    access, made = access_of(args, SANDBOX_KEY)

    async def serving() -> None:
        async with await open_sandbox(args.backend, at_once=args.at_once) as sandbox:
            server = SandboxServer(sandbox, access)
            print(f"url={await server.start(args.host, args.port)}")
            if made:
                print(made)
            print(f"sandbox: {sandbox.backend.description}; Ctrl-C ends it", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                await server.close()

    asyncio.run(serving())
    return 0


def _check(args: argparse.Namespace) -> int:
    """Prints which back end was chosen and why no stronger one, then a line for each attempt."""
    import asyncio

    from rondo_sandbox import open_sandbox
    from rondo_sandbox.escapes import Attempt, check

    async def tried() -> list[Attempt]:
        async with await open_sandbox(args.backend) as sandbox:
            for name, why in sandbox.passed_over.items():
                print(f"not {name}: {why}")
            print(f"sandbox: {sandbox.backend.description}, {sandbox.backend.python}", flush=True)
            return await check(sandbox)

    attempts = asyncio.run(tried())
    for attempt in attempts:
        said = attempt.said.removeprefix("escaped: ")
        print(f"  {attempt.name:32} {'ESCAPED' if attempt.escaped else 'held':8} {said}")
    escaped = sum(attempt.escaped for attempt in attempts)
    print(f"{escaped} of {len(attempts)} escaped")
    return 1 if escaped else 0
