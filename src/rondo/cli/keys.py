"""Flags that `rondo serve`, `sandbox serve` and `search serve` share: a server's keys, and who may ask it."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rondo.core.errors import ConfigError

if TYPE_CHECKING:
    from rondo.system.access import Access


def add_keys(parser: argparse.ArgumentParser, variable: str) -> None:
    """Registers the host, and the flags that give keys. variable: of the environment, which gives one."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument(
        "--token", help="API key (other users of this machine can read it in the process list)"
    )
    parser.add_argument(
        "--token-file", help=f"file with a key in each line (default: ${variable}, or a random one)"
    )


def add_access(parser: argparse.ArgumentParser, variable: str) -> None:
    """Registers `add_keys`, and what servers need that clients without a key ask."""
    add_keys(parser, variable)
    parser.add_argument(
        "--no-key", action="store_true", help="answer clients that send no key; on loopback only"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name in URLs of this server, beside addresses, localhost and this machine's own",
    )


def keys_of(args: argparse.Namespace, variable: str) -> tuple[tuple[str, ...], str]:
    """Returns the keys (none: there shall be a random one), and what the user gives them with. Raises
    ConfigError.
    """
    if args.token is not None and args.token_file is not None:
        raise ConfigError("--token and --token-file are both given; give one of them")
    if args.token is not None:
        return (args.token,), "--token"
    if args.token_file is not None:
        return _read_keys(Path(args.token_file)), f"the token in --token-file {args.token_file}"
    if variable in os.environ:
        return (os.environ[variable],), f"the environment variable {variable}"
    return (), f"--token-file, or {variable}"


def access_of(args: argparse.Namespace, variable: str) -> tuple[Access, str]:
    """Returns who may ask, and the line that says a key which was made here. Raises ConfigError."""
    from rondo.system.access import Access, check_chosen, is_loopback

    hosts = (args.host, *args.allow_host)
    if args.no_key:
        if args.token is not None or args.token_file is not None:
            raise ConfigError("--no-key and a key are both given; give one of them")
        if not is_loopback(args.host):
            raise ConfigError(f"--no-key --host {args.host}: other machines reach it; listen on 127.0.0.1")
        return Access((), hosts), ""
    keys, source = keys_of(args, variable)
    check_chosen(keys, source, args.host, f"--host {args.host}")
    if keys:
        return Access(keys, hosts), ""
    made = secrets.token_urlsafe(24)
    return Access((made,), hosts), f"{variable}={made}"


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        if path.stat().st_mode & 0o077:
            print(f"note: other users can read --token-file {path}; chmod 600 {path}", file=sys.stderr)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error}") from error
    return tuple(line.strip() for line in lines if line.strip()) or ("",)
