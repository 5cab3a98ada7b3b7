"""Sessions: what the model was given and what it made, call by call, as exact tokens.

A call that sends an earlier call's conversation back, with its answer as it was returned and something new
behind it, goes on from that call's own tokens; any other starts a context of its own. A session's calls are
thus a forest: an edge is an extension, a root is a context that was written anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rondo.core.types import Completion, InsertedKind, SamplingParams, request_seed
from rondo.serving.problems import ApiError

Key = tuple[str, ...]


@dataclass(frozen=True)
class ModelCall:
    """One call of the model, and where it stands in its session."""

    parent: int | None
    """The index of the call that this one goes on from; None: a context of its own."""
    inserted: InsertedKind
    """Who wrote the tokens between the parent's answer and this one."""
    completion: Completion
    """Prompt ids, token ids, log-probs and policy versions as the engine gave them."""
    key: Key
    """The conversation, the answer included."""
    whole_key: Key
    """The conversation with all that the answer's tokens say, the stop string that ended it included."""
    reencoded: int = 0
    """Tokens of the answer that the conversation goes on from, if it was tokenised whole all the same; else
    0.
    """

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + T]: the context with the answer."""
        return np.concatenate([self.completion.prompt_ids, self.completion.token_ids])

    @property
    def num_tokens(self) -> int:
        return len(self.completion.prompt_ids) + len(self.completion.token_ids)

    def begins(self, token_ids: np.ndarray) -> bool:
        """Says whether this call's tokens begin `token_ids`, which are as many or more."""
        prompt, answer = self.completion.prompt_ids, self.completion.token_ids
        head = token_ids[: self.num_tokens]
        return np.array_equal(prompt, head[: len(prompt)]) and np.array_equal(answer, head[len(prompt) :])


@dataclass(frozen=True)
class SessionRules:
    """What a training run fixes for a session, which then is one trajectory."""

    generate: Callable[..., Awaitable[Completion]]
    """Where its calls go."""
    sampling: SamplingParams
    """How to sample; max_tokens is for the whole response, inserted tokens included."""
    seed: int
    """Of the first call, if its prompt is `prompt_ids`; the seeds of all others follow from it and their
    prompts.
    """
    name: str
    affinity: str
    prompt_ids: np.ndarray
    key: Key
    """The conversation whose tokens are `prompt_ids`."""


@dataclass
class EndpointSession:
    """The calls of one agent, or of one client, to the endpoint."""

    name: str = ""
    rules: SessionRules | None = None
    calls: list[ModelCall] = field(default_factory=list)
    error: Exception | None = None
    """What an engine raised."""
    broken_streams: int = 0
    """Answers that the client stopped reading."""
    exhausted: bool = False
    """A call went on where no room was left for an answer."""
    closed: bool = False
    _answers: dict[Key, int] = field(default_factory=dict)
    _asked: dict[bytes, int] = field(default_factory=dict)
    _running: set[asyncio.Future[Any]] = field(default_factory=set)

    def extended_call(self, key: Key) -> tuple[int, ModelCall] | None:
        """Returns the latest call with the longest conversation, its answer included, that `key` goes on
        from.
        """
        lengths = {len(answer) for answer in self._answers if len(answer) < len(key)}
        heads = (key[:length] for length in sorted(lengths, reverse=True))
        found = next((self._answers[head] for head in heads if head in self._answers), None)
        return None if found is None else (found, self.calls[found])

    def extended_text(self, text: str) -> tuple[int, ModelCall, str] | None:
        """Does as `extended_call` for a text completion's prompt, and returns the new text behind it, too."""
        heads = [
            k for k in self._answers if k[0] == "text" and text.startswith(k[1]) and len(text) > len(k[1])
        ]
        if not heads:
            return None
        longest = max(heads, key=lambda key: len(key[1]))
        found = self._answers[longest]
        return found, self.calls[found], text[len(longest[1]) :]

    def extended_ids(self, token_ids: np.ndarray) -> int | None:
        """Returns the latest of the longest calls whose tokens begin `token_ids`."""
        lengths = [(call.num_tokens, i) for i, call in enumerate(self.calls)]
        longest_first = (i for length, i in sorted(lengths, reverse=True) if length <= len(token_ids))
        return next((i for i in longest_first if self.calls[i].begins(token_ids)), None)

    def root_length(self, call: int | None, otherwise: int) -> int:
        """Counts the tokens of the prompt with which the context of `call` began."""
        while call is not None:
            otherwise, call = len(self.calls[call].completion.prompt_ids), self.calls[call].parent
        return otherwise

    def next_seed(self, prompt_ids: np.ndarray) -> int:
        """Returns a seed that follows from the run's, the prompt, and how often the session asked it."""
        assert self.rules is not None
        asked = prompt_ids.astype(np.int32).tobytes()
        digest = hashlib.blake2b(asked, digest_size=16).digest()  # each call has a long prompt
        before = self._asked.get(digest, 0)
        self._asked[digest] = before + 1
        if before == 0 and np.array_equal(prompt_ids, self.rules.prompt_ids):
            return self.rules.seed
        return request_seed(self.rules.seed, asked, before)

    def add(self, call: ModelCall) -> None:
        """Keeps a finished call."""
        self._answers[call.key] = self._answers[call.whole_key] = len(self.calls)
        self.calls.append(call)

    def tokens_sent_back(self) -> tuple[int, int]:
        """Counts the tokens of answers that later calls went on from, and how many of them were tokenised
        again: then that call has no parent.
        """
        again = sum(call.reencoded for call in self.calls)
        parents = [self.calls[call.parent] for call in self.calls if call.parent is not None]
        return again + sum(len(parent.completion.token_ids) for parent in parents), again

    async def run(self, work: Awaitable[Any]) -> Any:
        """Waits for `work`, which the end of the session cancels: ApiError (410) then."""
        if self.closed:
            raise ended()
        running = asyncio.ensure_future(work)
        self._running.add(running)
        try:
            return await running
        except asyncio.CancelledError:
            running.cancel()
            if self.closed:
                raise ended() from None
            raise
        finally:
            self._running.discard(running)

    def close(self) -> None:
        """Cancels what is in flight; further calls are refused."""
        self.closed = True
        for running in tuple(self._running):
            running.cancel()


class Sessions:
    """Sessions by name. limit: an unknown name makes a new session, and the longest unused beyond `limit`
    are forgotten; None: only those that were opened exist.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._sessions: OrderedDict[str, EndpointSession] = OrderedDict()

    def another(self) -> Sessions:
        """Returns sessions of the same kind, none yet: those of another key."""
        return Sessions(self._limit)

    def open(self, name: str, rules: SessionRules) -> EndpointSession:
        """Opens a training run's session."""
        assert name not in self._sessions
        self._sessions[name] = EndpointSession(name, rules)
        return self._sessions[name]

    def get(self, name: str | None) -> EndpointSession:
        """Returns the session of a call; without a name, one of its own. Raises ApiError (404)."""
        if name is not None and name in self._sessions:
            self._sessions.move_to_end(name)
            return self._sessions[name]
        if self._limit is None:
            text = "there is no such session, or it has ended; use the api_key that the agent was given"
            raise ApiError(text, code="session_not_found", status=404)
        if name is None:
            return EndpointSession()
        session = self._sessions[name] = EndpointSession(name)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)
        return session

    def peek(self, name: str) -> EndpointSession:
        """Returns the session of this name. Raises ApiError (404)."""
        if name not in self._sessions:
            raise ApiError(f"there is no session {name!r:.100}", code="session_not_found", status=404)
        return self._sessions[name]

    def close(self, name: str) -> None:
        """Ends and forgets a session; unknown names are ignored."""
        session = self._sessions.pop(name, None)
        if session is not None:
            session.close()


def ended() -> ApiError:
    """Returns what a call of a closed session gets."""
    return ApiError("the session has ended", code="session_ended", status=410)


def describe_call(call: ModelCall) -> dict[str, Any]:
    """Writes a call as JSON has it."""
    made = call.completion
    return {
        "parent": call.parent,
        "inserted": call.inserted,
        "prompt_token_ids": made.prompt_ids.tolist(),
        **exact_tokens(made),
        "finish_reason": made.finish_reason,
    }


def exact_tokens(made: Completion) -> dict[str, list[Any]]:
    """Writes tokens with their log-probs and versions as JSON has them."""
    return {
        "token_ids": made.token_ids.tolist(),
        "token_log_probs": made.log_probs.tolist(),
        "policy_versions": made.policy_versions.tolist(),
    }
