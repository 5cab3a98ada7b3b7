"""What of a configuration is a secret, and what is written in its place. Standard library only.

A secret is the text of an option that is called as one (`is_secret`), and of a URL the user part and the
query. Where a configuration is kept, shown or sent there is a digest instead (`masked-1f2e3d4c`), so that two
can be compared; in the text of an error there is `***`. What is masked already stays as it is.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

_log = logging.getLogger(__name__)
_WARNED: set[tuple[str, str]] = set()
_CALLED_SO = r"(?:(?:\w+_)?(?:api_key|token|password|secret)|key)"
_NAME = re.compile(_CALLED_SO, re.IGNORECASE)
# As `cluster.env` and `{env: NAME}` have them.
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*_(?:KEY|TOKEN|PASSWORD|SECRET)")
_DIGEST = re.compile(r"masked-[0-9a-f]{8}")
_DIGEST_IN_URL = re.compile(rf"://{_DIGEST.pattern}@|\?{_DIGEST.pattern}\b")
# Scheme, all up to the query, the query; a dot or bracket at the end belongs to the sentence. It begins where
# nothing of a scheme is before it, so that a long text is read once.
_URL = re.compile(
    r"(?<![a-zA-Z0-9+.-])([a-zA-Z0-9+.-]+://)([^\s\"'<>`?#]*)(?:\?([^\s\"'<>`#]*[^\s\"'<>`#:,.;)\]}]))?"
)
_INNER = re.compile(r"://([^\s/?#@]+)@")  # of a URL in a URL, or behind a comma
_SETTING = re.compile(rf"((?<!\w){_CALLED_SO}['\"]?\s*[:=]\s*)[^\s,{{}}\[\]][^,{{}}\[\]]*", re.IGNORECASE)
# {env: …} around what is no variable's name, but perhaps the secret itself.
_MISNAMED = re.compile(
    rf"((?<!\w)(?i:{_CALLED_SO})['\"]?\s*[:=]\s*{{\s*['\"]?env['\"]?\s*:)(?!\s*['\"]?{VARIABLE.pattern}\b)[^,{{}}]+"
)


def is_secret(name: str) -> bool:
    """Says whether an option, or a variable, of this name holds a secret: key, token, password, secret,
    api_key, and what ends in _api_key, _token, _password or _secret; no `max_tokens`, `prompt_key`.
    """
    return bool(_NAME.fullmatch(name) or VARIABLE.fullmatch(name))


def variable_of(value: Any) -> str | None:
    """Returns the NAME of `{env: NAME}`, which says where a secret is; None: it is something else."""
    if isinstance(value, Mapping) and value.keys() == {"env"} and isinstance(value["env"], str):
        return value["env"]
    return None


@functools.lru_cache(maxsize=256)
def digest(secret: str) -> str:
    """Returns what is kept of a secret: 32 bits, which say that another one came, and which a guess takes a
    tenth of a second and cannot be told from a wrong one by.
    """
    made = hashlib.scrypt(secret.encode("utf-8", "replace"), salt=b"rondo", n=1 << 14, r=8, p=1, dklen=4)
    return f"masked-{made.hex()}"


def masked(name: str, value: Any) -> Any:
    """Returns an option, with all that is below it, as it may be written down: secrets masked."""
    if is_secret(name):
        return value if VARIABLE.fullmatch(variable_of(value) or "") else _all_masked(value)
    if isinstance(value, Mapping):
        return {key: masked(str(key), child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [masked(name, child) for child in value]
    return masked_urls(value, digest) if isinstance(value, str) else value


def _all_masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _all_masked(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_all_masked(child) for child in value]
    return _covered(value, digest) if isinstance(value, str) else value


def masked_urls(text: str, mask: Callable[[str], str] = lambda secret: "***") -> str:
    """Returns the text without the user parts and queries of the URLs in it. A user's name alone is none, but
    in HTTP, where it may be a token; nor is `?` in a path of another protocol.
    """
    return _URL.sub(functools.partial(_masked_url, mask), text) if "://" in text else text


def _masked_url(mask: Callable[[str], str], found: re.Match[str]) -> str:
    scheme, path, query = found[1], found[2], found[3]
    http = scheme.lower().endswith(("http://", "https://"))
    authority, slash, rest = path.partition("/")
    rest = _INNER.sub(lambda inner: f"://{_covered(inner[1], mask)}@", rest)
    user, at, host = authority.rpartition("@")
    if user and (http or ":" in user):
        user = _covered(user, mask)
    path = user + at + host + slash + rest
    if query is None:
        return scheme + path
    return f"{scheme}{path}?{_covered(query, mask) if http or '=' in query else query}"


def _covered(text: str, mask: Callable[[str], str]) -> str:
    return text if text in ("", "***") or _DIGEST.fullmatch(text) else mask(text)


def masked_settings(text: str) -> str:
    """Returns an argument, or a program's settings, as messages show them: `token=***`, `{api_key: ***}`."""
    return masked_urls(_MISNAMED.sub(r"\1 ***", _SETTING.sub(r"\1***", text)))


def was_masked(value: str) -> bool:
    """Says whether a text, or a part of a URL in it, stands in place of a masked secret."""
    return bool(_DIGEST.fullmatch(value) or _DIGEST_IN_URL.search(value))


def warn_of_open_way(where: str, url: str, *, key: bool) -> None:
    """Logs a line, once in a process, where a secret is sent to `url` so that others on the way can read it:
    not over TLS, nor to this machine. where: the key that names the URL. key: a key goes along with it; it
    may have one itself, too.
    """
    parts = urlsplit(url)
    host, shown = parts.hostname or "", masked_urls(url)
    if parts.scheme != "http" or host in ("localhost", "::1") or host.startswith("127."):
        return
    if (key or shown != url) and (where, url) not in _WARNED:
        _WARNED.add((where, url))
        _log.warning(
            "%s: %s: the key goes there unencrypted, as all that is said: use https://", where, shown
        )
