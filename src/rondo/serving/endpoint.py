"""The endpoint without its wire: bodies in, OpenAI's objects out, every call kept in its session.

body ── read_request ─▶ prompt tokens: the session's own where a call goes on, the template's otherwise
                         └─ GenerateRequest × n ─▶ generate ─▶ record ─▶ answer, or chunks as tokens come

Sessions belong to the event loop. What takes longer the more a request says (parsing, templating, tokenising,
writing the answer) runs on a few threads where that is much, so that the loop goes on with everybody else's.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from rondo.chat import (
    Message,
    ToolParser,
    call_opening,
    checked_continuation,
    encode_piece,
    opening_of,
    split_stops,
    stop_token_ids,
    template_keys,
    template_options,
)
from rondo.core.errors import ConfigError, DataError, RefusedRequestError, RolloutError
from rondo.core.types import Completion, GenerateRequest, SamplingParams, request_seed
from rondo.serving.answers import AnswerPiece, AnswerWriter, tool_calls
from rondo.serving.handed import HandedMessages
from rondo.serving.pictures import NONE_SENT, ClientImages, SentImages, check_sent
from rondo.serving.problems import ApiError, refuse
from rondo.serving.prompts import CallPlace, chat_head, conversation_key, find_place, with_names
from rondo.serving.requests import (
    SMALL,
    ApiRequest,
    ChatRequest,
    Kind,
    TextRequest,
    message_key,
    most_parts,
    read_body,
    read_request,
)
from rondo.serving.sessions import EndpointSession, Key, ModelCall, Sessions, ended
from rondo.serving.text import TextStream, answer_text
from rondo.system.border import all_of
from rondo.system.prometheus import Metrics

# A RolloutEngine's or a router's `generate`; the second argument (new tokens as they come) only for streams.
Generate = Callable[..., Awaitable[Completion]]

# More would not be faster: they share the interpreter, and the tokenizer's part is short.
_THREADS = 2
_KEPT = 32  # tools and settings of requests of this process, which are mostly the same ones
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
T = TypeVar("T")
# A finished call, and the keys of its conversation: see `EndpointSession.add`.
KeyedCall = tuple[ModelCall, Key, Key]


@dataclass(frozen=True)
class Prepared:
    """A request that can be answered."""

    session: EndpointSession
    """Where its calls are kept, when they have ended."""
    asked: ApiRequest
    """The request's body, which has been checked."""
    key: Key
    """Of the conversation without the answer."""
    place: CallPlace
    """Its prompt's tokens, and which call of the session it goes on from."""
    requests: tuple[GenerateRequest, ...]
    """One for each of the `n` choices, in their order."""
    generate: Generate
    """The session's where a training run fixes it, else the endpoint's."""
    writer: AnswerWriter
    """Shared by all chunks of the answer."""
    parser: ToolParser | None
    """Of the tools that the model is offered; None: it is offered none."""
    sent: SentImages = NONE_SENT
    """The images of the conversation; their files are there until it is answered."""
    handed: HandedMessages | None = None
    """The messages of a request of this process, once it is answered as the next one may go on from them."""

    @property
    def hidden_stops(self) -> frozenset[int]:
        """Tokens that end the answer and are no part of its text, nor of its calls."""
        shown = self.parser.mark_ids if self.parser else frozenset()
        return frozenset(self.requests[0].sampling.stop_token_ids) - shown


_QUESTION = {"role": "user", "content": ""}


def _check_last(messages: Sequence[Message]) -> None:
    if messages[-1]["role"] == "assistant":
        raise refuse("messages", "must end with a message for the assistant to answer")


def _check_template_options(asked: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuses template options that differ from those of this endpoint, which all conversations share."""
    for name, value in asked.items():
        if name not in here or here[name] != value:
            said = f"is {here[name]!r:.200}" if name in here else "is not set"
            raise refuse(
                "chat_template_kwargs",
                f"{name:.100} {said} here and cannot be {value!r:.100}: model.chat_template_options says it "
                "for all requests; leave it out",
            )


class Endpoint:
    """model: the name that requests must give. max_context: prompt and response tokens of one request.
    generate, defaults: where calls go that are of no training session, and how to sample where they do not
    say. max_pending: sequences in the endpoint at one time; one more is a 429 (None: no limit).
    deadline_seconds: of each sequence; older ones come back as they are. vocab_size: the model's (None: the
    engine finds token ids beyond it). about: labels of what is served, for `metrics_text`. load: returns how
    many sequences the engines have, and how many wait for one. images: how those of messages are read; None:
    the model reads none. All methods run on one event loop.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        model: str,
        max_context: int,
        sessions: Sessions,
        generate: Generate | None = None,
        defaults: SamplingParams | None = None,
        max_pending: int | None = None,
        deadline_seconds: float | None = None,
        vocab_size: int | None = None,
        about: Mapping[str, str] | None = None,
        load: Callable[[], tuple[int, int]] | None = None,
        images: ClientImages | None = None,
    ) -> None:
        self.model = model
        self.metrics = Metrics()
        self.sessions = sessions
        self.max_context = max_context
        self._tokenizer = tokenizer
        self.continuation = checked_continuation(tokenizer)
        self._template_keys = template_keys(tokenizer)
        self._generate = generate
        self._max_pending = max_pending
        self._deadline = deadline_seconds
        self._vocab_size = vocab_size
        self._about = {"model": model, **(about or {})}
        self._load = load
        self._images = images
        self._threads = ThreadPoolExecutor(_THREADS, "rondo-requests")
        self._read_settings = lru_cache(_KEPT)(self._settings)
        self._tool_parser = lru_cache(_KEPT)(self._parser_of)
        self._defaults = defaults or SamplingParams(max_context, stop_token_ids=stop_token_ids(tokenizer))
        self._created = int(time.time())
        self.pending = 0

    @cached_property
    def opening(self) -> str:
        """What the chat template writes before an answer; empty without a template."""
        return "" if self._tokenizer.chat_template is None else opening_of(self._tokenizer)

    def models(self) -> dict[str, Any]:
        """Writes the answer to /v1/models."""
        about = {"id": self.model, "object": "model", "created": self._created, "owned_by": "rondo"}
        read = ["text"] if self._images is None else ["text", "image"]
        own = {"max_model_len": self.max_context, "input_modalities": read}
        return {"object": "list", "data": [{**about, **own}]}

    def metrics_text(self) -> str:
        """Writes the answer to /metrics."""
        gauges = {"sequences_pending": ("Sequences in the endpoint.", float(self.pending))}
        if self._load is not None:
            running, waiting = self._load()
            gauges["sequences_running"] = ("Sequences in an engine.", float(running))
            gauges["sequences_waiting"] = ("Sequences that wait for an engine.", float(waiting))
        return self.metrics.text(self._about, gauges)

    def close(self) -> None:
        """Ends the threads, each after its current work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._images is not None:
            self._images.threads.shutdown(wait=False, cancel_futures=True)

    async def aside(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Returns what `work` returns; called on a thread where `size` (bytes or tokens) says that it takes
        long.
        """
        if size <= SMALL:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def prepare(self, kind: Kind, body: bytes, session: EndpointSession) -> Prepared:
        """Reads a request, and places it in its session. Raises ApiError for what cannot be answered."""
        shows = session.rules.shows if session.rules else None
        asked = await self.aside(len(body), self._read, kind, body, shows is not None)
        sent = NONE_SENT
        if isinstance(asked, ChatRequest) and asked.said.images:
            if shows is not None:
                asked = await with_names(asked, session, shows)
            elif self._images is not None:
                sent = await self._images.sent(asked.said.images)
        try:
            tokens = sum(image.n_tokens for image in sent.images)
            if tokens >= self.max_context:
                text = f"the images are {tokens} tokens, and {self.max_context} fit with the answer"
                raise ApiError(text, param="messages", code="context_length_exceeded")
            key = await self.aside(len(body), conversation_key, asked, sent)
            return await self._prepared(asked, key, session, len(body), sent=sent)
        except BaseException:
            sent.close()
            raise

    async def prepare_handed(
        self, settings: str, messages: HandedMessages, session: EndpointSession
    ) -> Prepared | None:
        """Does as `prepare` for a chat request of this process. settings: the body without its messages, in
        JSON. None: only the whole body in JSON can be read.
        """
        if messages.num_parts + len(settings) > most_parts(self.max_context):
            return None
        asked, head = self._read_settings(settings)
        asked = asked.model_copy(update={"messages": messages.read})
        _check_last(messages.read)
        messages = messages.keyed(head)
        size = messages.size(has_tail=self.continuation.has_tail(asked.tools or None))
        prepared = await self._prepared(asked, messages.key, session, size, messages.written)
        return replace(prepared, handed=replace(messages, written=prepared.place.written))

    async def _prepared(
        self,
        asked: ApiRequest,
        key: Key,
        session: EndpointSession,
        size: int,
        written: int = 0,
        sent: SentImages = NONE_SENT,
    ) -> Prepared:
        """Places a request that was read. size: of what has to be rendered. written: see `find_place`."""
        if session.closed:
            raise ended()
        if session.error is not None:  # a client's retries do not mend an engine
            raise ApiError(str(session.error), code="engine_failed", status=500)
        find = find_place(asked, key, session, self.continuation, self.max_context, written, sent)
        try:
            place = await self.aside(size, find)
        except (DataError, ConfigError) as error:
            raise refuse(asked.subject, str(error)) from error
        self._check_images(session, len(place.images))
        opening = self._opening(asked)
        if opening:
            ids = encode_piece(self._tokenizer, opening)
            place = replace(place, prompt_ids=np.concatenate([place.prompt_ids, ids]))
        prompt_ids = place.prompt_ids
        parser = self._parser(asked, opening)
        sampling = self._sampling(asked, session, place)
        if parser is not None:
            stops = {*sampling.stop_token_ids, *parser.stop_ids}
            sampling = replace(sampling, stop_token_ids=tuple(sorted(stops)))
        rules = session.rules
        answer_id = ("chatcmpl-" if asked.kind == "chat" else "cmpl-") + secrets.token_hex(12)
        seed = self._seed(asked, session, place)
        requests = [
            GenerateRequest(
                request_id=f"{rules.name if rules else answer_id}/{answer_id[-8:]}/{i}",
                token_ids=prompt_ids,
                sampling=sampling,
                seed=seed if i == 0 else request_seed(seed, i),
                affinity=rules.affinity if rules else session.name or answer_id,
                deadline_seconds=None if rules else self._deadline,
                images=place.images,
            )
            for i in range(asked.n)
        ]
        generate = rules.generate if rules else self._generate
        if generate is None:
            raise ApiError("there is no engine for calls without a session", code="no_engine", status=503)
        now = int(time.time())
        writer = AnswerWriter(
            asked.kind, answer_id, now, self.model, self._tokenizer, asked.logprobs, asked.return_token_ids
        )
        return Prepared(session, asked, key, place, tuple(requests), generate, writer, parser, sent)

    @staticmethod
    def _check_images(session: EndpointSession, number: int) -> None:
        """Raises RolloutError, which ends the run: a later prompt of every long episode would have too
        many.
        """
        shows = session.rules.shows if session.rules else None
        most = shows.per_prompt if shows else None
        if most is not None and number > most:
            session.error = RolloutError(
                f"a prompt of {session.name} shows {number} images, more than "
                f"model.images.per_prompt={most}: raise it, or let rollout.agent show fewer (steps with a "
                "shorter history, or fewer steps)"
            )
            raise session.error

    @contextmanager
    def admitted(self, prepared: Prepared) -> Iterator[None]:
        """Counts a request while it is answered, and removes its images then. Raises ApiError (429) when the
        endpoint is full.
        """
        n = len(prepared.requests)
        with closing(prepared.sent):
            if self._max_pending is not None and self.pending + n > self._max_pending:
                text = (
                    f"{self.pending} sequences are pending, of {self._max_pending} at most; try again later"
                )
                raise ApiError(text, code="queue_full", status=429)
            self.pending += n
            self.metrics.prompt_tokens += len(prepared.place.prompt_ids)
            try:
                yield
            finally:
                self.pending -= n

    async def answer(self, prepared: Prepared) -> str:
        """Makes the whole answer, as JSON; all else is as of `choices`."""
        pieces = await self.choices(prepared)
        completions = [piece.made for piece in pieces]
        whole = partial(prepared.writer.whole, prepared.place.prompt_ids, pieces, completions)
        return await self.aside(_size(completions), lambda: json.dumps(whole()))

    async def choices(self, prepared: Prepared) -> list[AnswerPiece]:
        """Makes the whole answer, one piece for each choice. Cancelling it frees the engine's slots. Raises
        ApiError, RolloutError.
        """
        calls = [self._generated(prepared, request) for request in prepared.requests]
        completions = await self._run(prepared, all_of(*calls))

        pieces, made_calls = await self.aside(_size(completions), self._said, prepared, completions)
        self._keep(prepared, pieces, made_calls)
        return pieces

    async def stream(self, prepared: Prepared) -> AsyncGenerator[dict[str, Any], None]:
        """Gives the answer's chunks as tokens come; together they say what `answer` says."""
        asked, writer, prompt_ids = prepared.asked, prepared.writer, prepared.place.prompt_ids
        arrived: asyncio.Queue[tuple[int, Completion, bool]] = asyncio.Queue()

        async def one(index: int, request: GenerateRequest) -> Completion:
            made = await self._generated(
                prepared, request, lambda new: arrived.put_nowait((index, new, False))
            )
            arrived.put_nowait((index, made, True))
            return made

        calls = [one(i, request) for i, request in enumerate(prepared.requests)]
        running = asyncio.ensure_future(self._run(prepared, all_of(*calls)))
        stops, parser = prepared.requests[0].sampling.stop, prepared.parser
        texts = [TextStream(self._tokenizer, prepared.hidden_stops, stops, parser) for _ in calls]
        sent, finished = [0] * len(calls), 0
        try:
            yield writer.opening(prompt_ids, len(calls))
            while finished < len(calls):
                index, new, last = await _first(arrived, running)
                if last:
                    finished += 1
                    yield writer.chunk(index, self._last_piece(texts[index], new, sent[index]), new)
                elif len(new.token_ids):
                    text = texts[index].feed(new.token_ids)
                    piece = AnswerPiece(new, text, has_begun=sent[index] > 0)
                    sent[index] += len(new.token_ids)
                    yield writer.chunk(index, piece, None)
            completions = await running
            pieces, made_calls = await self.aside(_size(completions), self._said, prepared, completions)
            self._keep(prepared, pieces, made_calls)
            if asked.stream_options and asked.stream_options.include_usage:
                yield writer.closing(prompt_ids, completions)
        finally:
            if not running.done():
                prepared.session.broken_streams += any(sent)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _generated(
        self, prepared: Prepared, request: GenerateRequest, *on_tokens: Callable[[Completion], None]
    ) -> Completion:
        """Has the engine generate, and counts the tokens."""
        started = time.monotonic()
        made = await prepared.generate(request, *on_tokens)
        if len(made.policy_versions):
            self.metrics.policy_version = int(made.policy_versions[-1])
        self.metrics.generated(len(made.token_ids), time.monotonic() - started)
        return made

    async def _run(self, prepared: Prepared, work: Awaitable[list[Completion]]) -> list[Completion]:
        """Waits for the engine, and raises where its answer cannot be one to the request."""
        session, sent = prepared.session, prepared.place.prompt_ids
        try:
            completions: list[Completion] = await session.run(work)
            for made in completions:
                if made.prompt_ids is not sent and not np.array_equal(made.prompt_ids, sent):
                    raise RolloutError(
                        f"{made.request_id}: the engine generated from {len(made.prompt_ids)} prompt tokens "
                        f"that are not the {len(sent)} it was sent; tokenizer and engine disagree"
                    )
        except RefusedRequestError as error:
            raise ApiError(str(error), code="invalid_value") from error
        except RolloutError as error:
            if session.rules is not None:  # a training session's error is the run's
                session.error = error
            raise
        for made in completions:
            if made.finish_reason == "cancelled":
                raise ApiError("the engine took the request back", code="cancelled", status=503)
            if made.finish_reason == "deadline" and len(made.token_ids) == 0:
                text = f"no token within the deadline of {self._deadline} s"
                raise ApiError(text, code="deadline_exceeded", status=504)
        return completions

    def _keep(self, prepared: Prepared, pieces: list[AnswerPiece], calls: list[KeyedCall]) -> None:
        """Keeps whole answers in their session, and counts the tool calls in them."""
        for call in calls:
            prepared.session.add(*call)
        for piece in pieces:
            self.metrics.tool_calls["ok"] += len(piece.tool_calls)
            self.metrics.tool_calls.update(call.reason for call in piece.malformed)

    # ---- what to send to the engine ----

    def _read(self, kind: Kind, body: bytes, keeps: bool) -> ApiRequest:
        body_read, images = read_body(body, self.max_context), self._images
        takes_images, keys = keeps or images is not None, self._template_keys
        asked = read_request(kind, body_read, self.model, template=keys, takes_images=takes_images)
        if isinstance(asked, ChatRequest):
            if images is not None:
                check_sent(asked.said.images, images.most, fetches=images.fetches)
            _check_template_options(asked.chat_template_kwargs, template_options(self._tokenizer))
            _check_last(asked.messages)
        elif isinstance(asked, TextRequest) and isinstance(asked.prompt, np.ndarray):
            highest = int(asked.prompt.max())
            if self._vocab_size is not None and highest >= self._vocab_size:
                raise refuse("prompt", f"has the id {highest}, and the model knows {self._vocab_size} tokens")
        return asked

    def _settings(self, settings: str) -> tuple[ChatRequest, str]:
        """Reads a chat request without its messages; returns it, and what its tools add to the conversation's
        key.
        """
        body = read_body(settings.encode(), self.max_context)
        asked = read_request("chat", {**body, "messages": [_QUESTION]}, self.model)
        assert isinstance(asked, ChatRequest)
        return asked, chat_head(asked.tools)

    def _opening(self, asked: ApiRequest) -> str:
        """Returns how an answer begins by tool_choice. The policy did not sample that: it belongs to the
        prompt, and carries no loss.
        """
        if not isinstance(asked, ChatRequest) or asked.tool_choice in ("auto", "none"):
            return ""
        name = None if asked.tool_choice == "required" else asked.tool_choice[0]
        try:
            return call_opening(self._tokenizer, name)
        except (ConfigError, DataError) as error:
            raise refuse("tool_choice", str(error)) from error

    def _parser(self, asked: ApiRequest, opening: str) -> ToolParser | None:
        if not isinstance(asked, ChatRequest) or not asked.tools:
            return None
        try:
            return self._tool_parser(json.dumps(asked.tools), asked.parallel_tool_calls, opening)
        except ConfigError as error:
            raise refuse("tools", str(error)) from error

    def _parser_of(self, tools: str, parallel: bool, opening: str) -> ToolParser:
        return ToolParser(self._tokenizer, json.loads(tools), parallel=parallel, opening=opening)

    def _sampling(self, asked: ApiRequest, session: EndpointSession, place: CallPlace) -> SamplingParams:
        rules, limit, prompt_ids = session.rules, self.max_context, place.prompt_ids
        base = rules.sampling if rules else self._defaults
        named = {name: getattr(asked, name) for name in _SAMPLING}
        said = {name: value for name, value in named.items() if value is not None}
        if rules is not None:
            limit = min(limit, session.root_length(place.parent, len(prompt_ids)) + base.max_tokens)
            for name, value in said.items():
                if value != getattr(base, name):
                    raise refuse(
                        name,
                        f"is {getattr(base, name)} in this session and cannot be {value}: the run says how "
                        f"to sample (rollout.{name}; evaluation has its own); leave it out",
                    )
        room = limit - len(prompt_ids)
        if room < 1:
            session.exhausted = session.exhausted or place.parent is not None
            whose = "data.max_prompt_tokens + rollout.max_tokens" if rules else "tokens of context"
            more = " or more" if len(prompt_ids) > self.max_context else ""  # see `tokenise_up_to`
            raise ApiError(
                f"the conversation has {len(prompt_ids)} tokens{more} and there is room for {limit} "
                f"({whose}) with the answer: nothing is left to generate",
                param=asked.subject,
                code="context_length_exceeded",
            )
        try:
            ids, texts = split_stops(self._tokenizer, asked.stop)
        except DataError as error:
            raise refuse("stop", str(error)) from error
        return replace(
            base,
            max_tokens=min(asked.max_tokens or base.max_tokens, room),
            stop_token_ids=tuple(sorted({*base.stop_token_ids, *ids})),
            stop=tuple(dict.fromkeys((*base.stop, *texts))),
            **said,
        )

    @staticmethod
    def _seed(asked: ApiRequest, session: EndpointSession, place: CallPlace) -> int:
        if session.rules is not None:
            if asked.seed is not None:
                return request_seed(session.rules.seed, "asked", asked.seed)
            return session.next_seed(place.prompt_ids, place.parent)
        return secrets.randbits(63) if asked.seed is None else asked.seed & ((1 << 63) - 1)

    # ---- what to say ----

    def _said(self, prepared: Prepared, made: list[Completion]) -> tuple[list[AnswerPiece], list[KeyedCall]]:
        """Turns completions into whole answers, and into the calls that sessions keep."""
        pieces = [self._piece(prepared, one) for one in made]
        calls = [_call(prepared, *each) for each in zip(pieces, made, strict=True)]
        return pieces, calls

    def _piece(self, prepared: Prepared, made: Completion) -> AnswerPiece:
        """Returns a whole answer."""
        stops = prepared.requests[0].sampling.stop
        said, cut = answer_text(
            self._tokenizer, made.token_ids, prepared.hidden_stops, stops, prepared.parser
        )
        return AnswerPiece(made, said.text, tool_calls(made, said.calls), said.malformed, cut)

    @staticmethod
    def _last_piece(text: TextStream, made: Completion, sent: int) -> AnswerPiece:
        said = text.feed(made.token_ids[sent:])
        rest = text.finish()
        calls = tool_calls(made, rest.calls)
        return AnswerPiece(made.part(sent), said + rest.text, calls, rest.malformed, has_begun=sent > 0)


def _size(completions: list[Completion]) -> int:
    """Returns about how many bytes of text the tokens are."""
    return 4 * sum(len(made.token_ids) for made in completions)


def _call(prepared: Prepared, piece: AnswerPiece, made: Completion) -> KeyedCall:
    place = prepared.place
    key = _key(prepared.asked, prepared.key, piece, piece.text)
    whole_key = _key(prepared.asked, prepared.key, piece, piece.text + piece.cut) if piece.cut else key
    return ModelCall(place.parent, place.inserted, made, len(key), place.reencoded), key, whole_key


def _key(asked: ApiRequest, key: Key, piece: AnswerPiece, text: str) -> Key:
    """Returns the key of a conversation, `key` without the answer, whose answer comes back as `text`."""
    if key.kind == "chat":
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if piece.tool_calls:  # as they are read when they come back
            functions = [call["function"] for call in piece.tool_calls]
            read = [{**function, "arguments": json.loads(function["arguments"])} for function in functions]
            said["tool_calls"] = [{"function": function} for function in read]
        return key.then([message_key(said)])
    if isinstance(asked, TextRequest) and isinstance(asked.prompt, str):
        return Key.of("text", asked.prompt + text)
    return key


async def _first(
    arrived: asyncio.Queue[tuple[int, Completion, bool]], running: asyncio.Future[Any]
) -> tuple[int, Completion, bool]:
    """Waits for the next tokens; what the generation raises is raised here."""
    if arrived.empty():
        getting = asyncio.ensure_future(arrived.get())
        try:
            await asyncio.wait({getting, running}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        await running  # raises, or everything that is left has arrived
    return arrived.get_nowait()
