"""Sessions: what the model was given and what it made, call by call, as exact tokens.

A call that sends an earlier call's conversation back, with its answer as it was returned and something new
behind it, goes on from that call's own tokens; any other starts a context of its own. A session's calls are
thus a forest: an edge is an extension, a root is a context that was written anew.

What a session holds grows with its tokens, not with the square of its calls: calls that go on from one
another share one array, and conversations are known by digests.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rondo.core.images import EpisodeImages, ImageRef
from rondo.core.types import Completion, InsertedKind, SamplingParams
from rondo.serving.problems import ApiError


@dataclass(frozen=True)
class Key:
    """What a conversation is known by; equal where conversations say the same."""

    kind: str
    """chat, text, or ids: that is known by its tokens."""
    digests: list[bytes]
    """Of each beginning of its parts, the shortest first; a chat's parts are its kind, tools and messages."""
    num_characters: int
    """Of the last part."""

    @classmethod
    def of(cls, kind: str, *parts: str) -> Key:
        """Returns the key of a conversation with these parts."""
        return cls(kind, [_digest(b"", kind)], len(kind)).then(parts)

    def then(self, parts: Iterable[str]) -> Key:
        """Returns the key of the conversation that goes on with these parts."""
        digests, part = self.digests.copy(), ""
        for part in parts:
            digests.append(_digest(digests[-1], part))
        return Key(self.kind, digests, len(part))

    def __len__(self) -> int:
        return len(self.digests)

    def says_the_same(self, other: Key) -> bool:
        """Says whether both are of one conversation."""
        return self.digests[-1] == other.digests[-1]


def _digest(before: bytes, part: str) -> bytes:
    return hashlib.blake2b(before + part.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class PromptSeeds:
    """The seeds of a prompt, `request_seed(run_seed, its bytes, how often it was asked before)`. Those of a
    longer prompt that begins with it cost only the added tokens.

    That function hashes what Python writes for the bytes: 'with quotes like these, and \\' escaped', or "with
    these, and ' as it is" where there is a ' and no ". So both texts are hashed.
    """

    def __init__(self, run_seed: int) -> None:
        begin = f"({run_seed!r}, b"
        self.num_tokens = 0
        self._quoted = {quote: hashlib.blake2b((begin + quote).encode(), digest_size=8) for quote in "'\""}
        self._seen = {quote: False for quote in "'\""}

    def then(self, token_ids: np.ndarray) -> PromptSeeds:
        """Returns the seeds of the prompt that goes on with these tokens."""
        new = PromptSeeds.__new__(PromptSeeds)
        added = token_ids.astype(np.int32).tobytes()
        new.num_tokens = self.num_tokens + len(token_ids)
        new._seen = {quote: seen or quote.encode() in added for quote, seen in self._seen.items()}
        new._quoted = {quote: text.copy() for quote, text in self._quoted.items()}
        for quote, text in new._quoted.items():  # the other one in front has Python take this one
            other = b'"' if quote == "'" else b"'"
            text.update(repr(other + added)[3:-1].encode())
        return new

    def digest(self) -> bytes:
        """Returns 8 bytes that only this prompt has."""
        return self._quoted["'"].digest()

    def seed(self, asked_before: int) -> int:
        """Returns a seed of 63 bits."""
        quote = '"' if self._seen["'"] and not self._seen['"'] else "'"
        text = self._quoted[quote].copy()
        text.update(f"{quote}, {asked_before!r})".encode())
        return int.from_bytes(text.digest(), "little") >> 1


@dataclass(frozen=True)
class ModelCall:
    """One call of the model, and where it stands in its session."""

    parent: int | None
    """The index of the call that this one goes on from; None: a context of its own."""
    inserted: InsertedKind
    """Who wrote the tokens between the parent's answer and this one."""
    completion: Completion
    """Prompt ids, token ids, log-probs and policy versions as the engine gave them. Once the session has the
    call, the prompt ids are a read-only view of what its context's calls share.
    """
    key_length: int
    """How many parts the key of the conversation has, the answer included."""
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


class _Context:
    """The token ids of calls that go on from one another, once: each prompt is a view of the beginning.

    Growing doubles the room. Views keep the rooms of before alive, together no longer than the last one.
    """

    def __init__(self) -> None:
        self._room = np.empty(0, np.int32)
        self._used = 0
        self._seeds: PromptSeeds | None = None  # of the longest prompt that was gone on from

    def seeds(self, run_seed: int, length: int) -> PromptSeeds:
        """Returns the seeds of the prompt with the first `length` tokens."""
        before = self._seeds
        if before is None or before.num_tokens > length:
            before = PromptSeeds(run_seed)
        found = before.then(self._room[before.num_tokens : length])
        if self._seeds is None or length > self._seeds.num_tokens:
            self._seeds = found
        return found

    def prompt(self, prompt_ids: np.ndarray, known: int) -> np.ndarray | None:
        """Returns `prompt_ids` as a view; the first `known` are those of the call that they go on from.
        None: other tokens stand behind these already.
        """
        length, used = len(prompt_ids), self._used
        both = min(length, used)
        if not np.array_equal(self._room[known:both], prompt_ids[known:both]):
            return None
        if length > len(self._room):
            room = np.empty(max(length, 2 * len(self._room)), np.int32)
            room[:used] = self._room[:used]
            self._room = room
        if length > used:
            self._room[used:length] = prompt_ids[used:]
            self._used = length
        view = self._room[:length]
        view.flags.writeable = False
        return view


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
    """The trajectory's id; the ids of its requests begin with it."""
    affinity: str
    """As `GenerateRequest` has it: the same for all samples of the prompt."""
    prompt_ids: np.ndarray
    """int32 [P], the tokens of the run's prompt."""
    key: Key
    """The conversation whose tokens are `prompt_ids`."""
    images: tuple[ImageRef, ...] = ()
    """Those that `prompt_ids` show."""
    shows: EpisodeImages | None = None
    """How prompts show images, those that messages bring among them; None: the model is given none."""


@dataclass
class EndpointSession:
    """The calls of one agent, or of one client, to the endpoint."""

    name: str = ""
    """Empty: a session of one request, to which no other one comes."""
    rules: SessionRules | None = None
    """None: a client's own session, which is not trained on."""
    calls: list[ModelCall] = field(default_factory=list)
    """Those that have ended, in the order in which they did."""
    error: Exception | None = None
    """What an engine raised."""
    broken_streams: int = 0
    """Answers that the client stopped reading."""
    exhausted: bool = False
    """A call went on where no room was left for an answer."""
    closed: bool = False
    """Whether further calls are refused."""
    images: dict[str, ImageRef] = field(default_factory=dict)
    """What messages may show, by its name (`core.images.name_of`)."""
    _contexts: list[_Context] = field(default_factory=list)
    """Of each call."""
    _by_length: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, index) of each call, ascending."""
    _answers: dict[bytes, int] = field(default_factory=dict)
    """The latest call with this conversation, its answer included, by the digest of its key."""
    _text_lengths: list[int] = field(default_factory=list)
    """Lengths of the texts that a text completion can go on from, ascending, each once."""
    _asked: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """How often a prompt was asked, by its length and digest."""
    _root_lengths: list[int] = field(default_factory=list)
    """Of each call, the tokens of the prompt with which its context began."""
    _running: set[asyncio.Future[Any]] = field(default_factory=set)

    def extended_call(self, key: Key) -> tuple[int, ModelCall] | None:
        """Returns the call that `key` continues: of those whose conversation, with the answer, it begins
        with, the longest; of equal ones the latest. None: there is none.
        """
        # Without the last part: a conversation goes on from a call when something stands behind that call's
        # answer.
        known = range(len(key) - 2, -1, -1)
        found = next((self._answers[key.digests[i]] for i in known if key.digests[i] in self._answers), None)
        return None if found is None else (found, self.calls[found])

    def extended_text(self, text: str) -> tuple[int, ModelCall, str] | None:
        """Does as `extended_call` for a text completion's prompt, and returns the new text behind it, too."""
        for length in reversed(self._text_lengths):
            if length < len(text):
                found = self._answers.get(Key.of("text", text[:length]).digests[-1])
                if found is not None:
                    return found, self.calls[found], text[length:]
        return None

    def extended_ids(self, token_ids: np.ndarray) -> int | None:
        """Returns the latest of the longest calls whose tokens begin `token_ids`."""
        # The number of calls is above every index: all calls of this length are to the left.
        fitting = bisect_right(self._by_length, (len(token_ids), len(self.calls)))
        longest_first = (self._by_length[place][1] for place in range(fitting - 1, -1, -1))
        return next((i for i in longest_first if self.calls[i].begins(token_ids)), None)

    def root_length(self, call: int | None, otherwise: int) -> int:
        """Counts the tokens of the prompt with which the context of `call` began."""
        return otherwise if call is None else self._root_lengths[call]

    def next_seed(self, prompt_ids: np.ndarray, parent: int | None) -> int:
        """Returns a seed that follows from the run's, the prompt, and how often the session asked it. parent:
        the call that the prompt goes on from.
        """
        assert self.rules is not None
        known, before = 0, PromptSeeds(self.rules.seed)
        if parent is not None:
            known = len(self.calls[parent].completion.prompt_ids)
            before = self._contexts[parent].seeds(self.rules.seed, known)
        seeds = before.then(prompt_ids[known:])
        asked = (len(prompt_ids), seeds.digest())
        count = self._asked.get(asked, 0)
        self._asked[asked] = count + 1
        # An agent that asks just once samples what the built-in loop would.
        if count == 0 and np.array_equal(prompt_ids, self.rules.prompt_ids):
            return self.rules.seed
        return seeds.seed(count)

    def add(self, call: ModelCall, key: Key, whole_key: Key) -> None:
        """Keeps a finished call. key: of its conversation, the answer included. whole_key: with all that the
        answer's tokens say, the stop string that ended it included.
        """
        index, prompt_ids, known, context = len(self.calls), call.completion.prompt_ids, 0, _Context()
        if call.parent is not None:
            parent = self.calls[call.parent]
            assert parent.begins(prompt_ids)
            context, known = self._contexts[call.parent], len(parent.completion.prompt_ids)
        kept = context.prompt(prompt_ids, known)
        if kept is None:  # a second call goes on from the same one: it has a copy
            context = _Context()
            kept = context.prompt(prompt_ids, 0)
            assert kept is not None
        call = replace(call, completion=replace(call.completion, prompt_ids=kept))
        self.calls.append(call)
        self._contexts.append(context)
        self._root_lengths.append(self.root_length(call.parent, len(kept)))
        insort(self._by_length, (call.num_tokens, index))
        for one in (key, whole_key):
            if one.kind == "ids":  # found by its tokens
                continue
            self._answers[one.digests[-1]] = index
            if one.kind == "text" and one.num_characters not in self._text_lengths:
                insort(self._text_lengths, one.num_characters)

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
