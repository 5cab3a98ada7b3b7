"""Who may ask a server of rondo's: its keys, the name that it is asked by, and JSON only; and the flags of a
command that say so. `rondo serve`, `rondo sandbox serve` and `rondo search serve` ask here, and check nothing
of this themselves.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rondo.core.errors import ConfigError, RondoError

# Variables of the environment that name a server's key, to the server and to its clients.
ENDPOINT_KEY = "RONDO_TOKEN"
SANDBOX_KEY = "RONDO_SANDBOX_TOKEN"
SEARCH_KEY = "RONDO_SEARCH_TOKEN"
_log = logging.getLogger(__name__)


class AccessError(RondoError):
    """A request that is not answered. status: of the HTTP answer. code: a word for programs."""

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def is_loopback(host: str) -> bool:
    """Says whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_keys(keys: Sequence[str], source: str) -> None:
    """Raises ConfigError for a key that a header cannot bear, and for two of which one could be the other's
    session. source: where they are from.
    """
    for key in keys:
        if not key or not all("!" <= character <= "~" for character in key):
            raise ConfigError(f"{source} must be printable ASCII without spaces, and not empty")
    for i, key in enumerate(keys):
        if any(f"{other}:".startswith(f"{key}:") for j, other in enumerate(keys) if j != i):
            raise ConfigError(f"{source}: a key is there twice, or begins another one up to a colon")


def check_chosen(keys: Sequence[str], source: str, host: str, said: str) -> None:
    """Raises ConfigError for `check_keys`, and where no key was chosen for a host that other machines reach.
    said: the host, as the user gave it.
    """
    check_keys(keys, source)
    if not keys and not is_loopback(host):
        raise ConfigError(f"{said} can be reached from other machines: choose an API key ({source})")


def bearing(variable: str) -> dict[str, str]:
    """Returns the header that bears the key in a variable; none where it is not set."""
    key = os.environ.get(variable, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def bearer_of(authorization: str) -> str:
    """Returns what an `Authorization: Bearer …` bears; nothing where it is something else."""
    scheme, _, bearer = authorization.partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True)
class Access:
    """What a request must have."""

    keys: tuple[str, ...] = ()
    """One of these, as `Authorization: Bearer <key>` or `<key>:<session>`; empty: no request needs one."""
    hosts: tuple[str, ...] | None = None
    """Names by which it may be asked, beside addresses, localhost and this machine's own: a page in a browser
    that reaches it by a name of its own (DNS rebinding) is refused. None: any name.
    """

    def key_of(self, authorization: str) -> str | None:
        """Returns the key that a request bears; None: none is needed. Raises AccessError (401)."""
        if not self.keys:
            return None
        bearer, found = bearer_of(authorization), None
        for key in self.keys:  # all of them, so that the time says nothing
            head, rest = bearer[: len(key)], bearer[len(key) :]
            same = hmac.compare_digest(head.encode(errors="surrogateescape"), key.encode())
            if same and rest[:1] in ("", ":"):
                found = key
        if found is None:
            text = "a wrong or missing API key: send `Authorization: Bearer <key>`, or `<key>:<session>`"
            raise AccessError(text, status=401, code="invalid_api_key")
        return found

    def check_host(self, host: str) -> None:
        """Raises AccessError (403) where the header Host names neither us nor an address."""
        if self.hosts is None:
            return
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        known = {"localhost", socket.gethostname().lower(), *(each.lower() for each in self.hosts)}
        if name not in known and not _is_address(name):
            text = f"asked as {host!r:.100}, which is no name of this server; --allow-host NAME adds one"
            raise AccessError(text, status=403, code="unknown_host")


def check_json(content_type: str) -> None:
    """Raises AccessError (415) for a body that is not called JSON: a page in a browser may send any other
    kind to a server that never agreed.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        text = f"Content-Type: {content_type!r:.100} is not taken; send JSON, as application/json"
        raise AccessError(text, status=415, code="unsupported_media_type")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# --- the flags of a command that serves ---


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
            _log.warning("other users can read --token-file %s; chmod 600 %s", path, path)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error}") from error
    return tuple(line.strip() for line in lines if line.strip()) or ("",)
