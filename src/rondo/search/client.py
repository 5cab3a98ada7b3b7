"""A retriever behind a URL that speaks Search-R1's API."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

from rondo.core.errors import ConfigError
from rondo.core.masking import masked_urls
from rondo.search.corpus import passage_of
from rondo.search.index import Hit
from rondo.system.access import SEARCH_KEY, bearing
from rondo.system.urls import open_there

_SECONDS = 60.0  # of a request whose call the tool's own limit has ended


class RetrieverError(Exception):
    """A retriever does not answer, or not as it should. Its text has no passwords in URLs."""

    def __str__(self) -> str:
        return masked_urls(super().__str__())


def endpoint(url: str) -> str:
    """Returns the URL that is asked: a server's with Search-R1's path. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"url: {url!r} is no http:// or https:// URL")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/retrieve"


def retrieve(url: str, query: str, k: int) -> list[Hit]:
    """Returns what a retriever finds (POST {queries, topk, return_scores}), asked with the key in
    RONDO_SEARCH_TOKEN where that is set. Raises RetrieverError.
    """
    body = json.dumps({"queries": [query], "topk": k, "return_scores": True}).encode()
    headers = {"Content-Type": "application/json", **bearing(SEARCH_KEY)}
    request = urllib.request.Request(url, body, headers)
    try:
        with open_there(request, timeout=_SECONDS) as answer:
            (found,) = json.load(answer)["result"]
        return [
            Hit(passage_of(each.get("document", each), ""), float(each.get("score", "nan")))
            for each in found[:k]
        ]
    except (OSError, HTTPException) as error:
        raise RetrieverError(f"the retriever {url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RetrieverError(
            f"the retriever {url} does not answer as Search-R1's does "
            f'({{"result": [[{{"document": {{"contents": "…"}}}}, …]]}}): {type(error).__name__}: {error}'
        ) from error
