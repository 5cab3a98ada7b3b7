"""Stop strings in an engine: the tokenizer that says what tokens read as, and a request's matcher."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from rondo.chat import StopMatcher
from rondo.core.errors import RefusedRequestError
from rondo.core.types import GenerateRequest
from rondo.models.loading import load_tokenizer
from rondo.models.source import TokenizerSource


class StopText:
    """Of one engine. source: None: no request can have stop strings."""

    def __init__(self, source: TokenizerSource | None) -> None:
        self._source = source

    @cached_property
    def _tokenizer(self) -> Any:
        """The engine's own, loaded when a request first wants it: other threads use the host's."""
        assert self._source is not None
        return load_tokenizer(self._source)

    def matcher(self, request: GenerateRequest) -> StopMatcher | None:
        """Returns what finds the request's stop strings behind its prefix; None: it has no stop strings.
        Raises RefusedRequestError.
        """
        stops = request.sampling.stop
        if not stops:
            return None
        who = f"request {request.request_id!r}"
        if self._source is None:
            raise RefusedRequestError(
                f"{who} has stop strings, and this engine no tokenizer to find them with; make it with "
                "`tokenizer`, or use stop_token_ids"
            )
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RefusedRequestError(f"{who} has stop strings {stops!r}; each must be text, and not empty")
        return StopMatcher(self._tokenizer, stops)
