"""The tool `search`: in a corpus here, or by asking a retriever that speaks Search-R1's API."""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from rondo.core.errors import ConfigError
from rondo.core.masking import masked_urls, warn_of_open_way
from rondo.core.types import ToolResult
from rondo.system.access import SEARCH_KEY, bearing
from rondo.system.urls import open_there
from rondo_search import MOST_RESULTS, Passage, check_query, index_of
from rondo_search.corpus import passage_of
from rondo_search.index import Hit


class Search:
    """Searches texts for words and returns the passages that fit best.

    query: the words
    """

    tool_name = "search"

    def __init__(
        self,
        *,
        corpus: str = "",
        index: str = "sqlite",
        encoder: str = "",
        url: str = "",
        k: int = 3,
        max_characters: int = 1000,
    ) -> None:
        """corpus: a file of JSON lines, a folder of texts, or a function that returns rows. index, encoder:
        see `index_of`. url: of a retriever, instead. k: passages in a result. max_characters: of each.
        """
        if bool(corpus) == bool(url):
            raise ConfigError("it needs a corpus (corpus: passages.jsonl) or a url, one of the two")
        if not 1 <= k <= MOST_RESULTS:
            raise ConfigError(f"k must be 1 to {MOST_RESULTS}, got {k}")
        if max_characters < 1:
            raise ConfigError(f"max_characters must be at least 1, got {max_characters}")
        self._corpus, self._index, self._encoder = corpus, index, encoder
        self._url = endpoint(url) if url else ""
        self._k = k
        self._max_characters = max_characters

    @classmethod
    def check(cls, **options: Any) -> None:
        """Builds the index anew where the corpus has changed, or asks the retriever. Raises ConfigError,
        DataError.
        """
        try:
            tool = cls(**options)
            if tool._corpus:
                index_of(tool._corpus, backend=tool._index, encoder=tool._encoder, anew=True)
            else:
                warn_of_open_way("rollout.tools: search", tool._url, key=bool(bearing(SEARCH_KEY)))
                retrieve(tool._url, "a", 1)
        except (ConfigError, RetrieverError) as error:
            raise ConfigError(f"rollout.tools: search: {error}") from error

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Has the index, and an encoder, ready in this process."""
        tool = cls(**options)
        if tool._corpus:
            index_of(tool._corpus, backend=tool._index, encoder=tool._encoder)

    def __call__(self, query: str) -> ToolResult:
        check_query(query)
        if self._corpus:
            index = index_of(self._corpus, backend=self._index, encoder=self._encoder)
            found = index.search(query, self._k)
        else:
            found = retrieve(self._url, query, self._k)
        texts = [self._said(number, hit.passage) for number, hit in enumerate(found, 1)]
        ids = [hit.passage.id for hit in found]
        return ToolResult("\n\n".join(texts) or "Nothing was found.", {"ids": ids})

    def _said(self, number: int, passage: Passage) -> str:
        text = passage.text
        if len(text) > self._max_characters:
            text = text[: self._max_characters].rstrip() + " …"
        return f"[{number}] {passage.title}\n{text}" if passage.title else f"[{number}] {text}"


# ---- a retriever behind a URL ----


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
