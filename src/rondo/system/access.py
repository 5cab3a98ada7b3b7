"""Who may ask a server of rondo's: its keys, the name that it is asked by, and JSON only. `rondo serve`,
`rondo sandbox serve` and `rondo search serve` ask here, and check nothing of this themselves.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rondo.core.errors import ConfigError, RondoError

# Variables of the environment that name a server's key, to the server and to whoever asks it.
ENDPOINT_KEY = "RONDO_TOKEN"
SANDBOX_KEY = "RONDO_SANDBOX_TOKEN"
SEARCH_KEY = "RONDO_SEARCH_TOKEN"


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
