"""Models behind OpenAI's API, as environments ask them: blocking, with the standard library."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from rondo.core.errors import EnvironmentFailedError
from rondo.system.urls import open_there

_SECONDS = 300.0  # of a request whose step timeout_seconds has ended


def say(
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    max_tokens: int = 256,
    temperature: float = 0.0,
    key: str = "",
) -> str:
    """Returns a model's answer to a conversation. base_url: a server's `…/v1`. key: of the server, if it
    wants one. Raises EnvironmentFailedError.
    """
    sampling = {"seed": seed, "max_tokens": max_tokens, "temperature": temperature}
    answer = ask(base_url, "chat/completions", key, {"model": model, "messages": [*messages], **sampling})
    try:
        return str(answer["choices"][0]["message"]["content"] or "").strip()
    except (LookupError, TypeError) as error:
        raise EnvironmentFailedError(f"{base_url} answers without a message") from error


def models(base_url: str, key: str = "") -> list[str]:
    """Returns the names of a server's models. Raises EnvironmentFailedError."""
    try:
        return [str(one["id"]) for one in ask(base_url, "models", key)["data"]]
    except (LookupError, TypeError) as error:
        raise EnvironmentFailedError(f"{base_url} does not say which models it has") from error


def ask(base_url: str, path: str, key: str, body: Mapping[str, Any] | None = None) -> Any:
    """Returns the JSON that a server answers. body: of a POST. Raises EnvironmentFailedError."""
    url = f"{base_url.rstrip('/')}/{path}"
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    opening = open_there if key else urllib.request.urlopen
    try:
        with opening(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except (OSError, HTTPException, ValueError) as error:
        raise EnvironmentFailedError(f"{url} does not answer: {error}") from error
