"""The policy as an agent calls it that runs in the worker's process: the endpoint's calls without HTTP.

    async def solve(messages, policy, tools):
        answer = await policy.chat(messages, tools=tools.schemas)
        messages = [*messages, answer.message, *await tools.answer(answer)]
        return (await policy.chat(messages)).text

Agents' coroutines run on a loop of their own; what they ask is answered on the worker's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.core.errors import RolloutError
from rondo.serving import ApiError, Endpoint, EndpointSession
from rondo.serving.answers import AnswerPiece, finish_reason, malformed_calls
from rondo.serving.endpoint import Prepared
from rondo.serving.handed import HandedMessages, read_handed
from rondo.serving.requests import Kind

MODEL = "policy"


@dataclass(frozen=True)
class Answer:
    """What the policy said in one call."""

    text: str
    """The answer without its tool calls."""
    tool_calls: tuple[Mapping[str, Any], ...]
    """As OpenAI's messages have them: {id, type, function: {name, arguments}}, the arguments as JSON text."""
    malformed: tuple[Mapping[str, str], ...]
    """What was meant as a call and is none: {reason, text}; the text stays in `text`."""
    token_ids: tuple[int, ...]
    """The tokens as they were sampled."""
    log_probs: tuple[float, ...]
    """The log-prob with which each of `token_ids` was sampled."""
    finish_reason: str
    """stop, length or tool_calls."""

    @property
    def message(self) -> dict[str, Any]:
        """The message to send back, so that the next call goes on from these very tokens."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        return {**said, "tool_calls": list(self.tool_calls)} if self.tool_calls else said


class Policy:
    """The policy as one episode calls it; the episode's record has all of its calls. What a call cannot be
    answered with raises `serving.problems.ApiError`, whose `code` says why (context_length_exceeded, …).
    """

    def __init__(self, endpoint: Endpoint, session: EndpointSession, loop: asyncio.AbstractEventLoop) -> None:
        """loop: the worker's, on which the endpoint lives."""
        self._endpoint = endpoint
        self._session = session
        self._loop = loop
        self._last: HandedMessages | None = None

    @property
    def opens_thought(self) -> bool:
        """Whether the chat template opens `<think>` itself, so that answers begin inside of it."""
        return self._endpoint.opening.rstrip().endswith("<think>")

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
    ) -> Answer:
        """Returns the answer to a conversation. A call that sends back an earlier one's messages, its answer
        as it was (`Answer.message`) and new ones behind it goes on from the tokens of that call.

        tools: schemas, for the template. max_tokens: at most what the run leaves. stop: strings. tool_choice:
        as OpenAI's: auto, none, required, or {type: function, function: {name}}.
        """
        (answer,) = await self.choices(
            messages, 1, tools=tools, max_tokens=max_tokens, stop=stop, tool_choice=tool_choice
        )
        return answer

    async def choices(
        self,
        messages: Sequence[Mapping[str, Any]],
        n: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
    ) -> list[Answer]:
        """Returns n answers to one conversation; arguments as of `chat`."""
        given = {"tools": list(tools) or None, "n": n, "tool_choice": tool_choice}
        settings = _written(max_tokens=max_tokens, stop=list(stop) or None, **given)
        said = list(messages)
        handed = read_handed(said, self._last) if said else None
        whole = "" if handed is not None else json.dumps(said)
        return await self._on_loop(self._answers_handed(settings, handed, whole))

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Answer:
        """Returns what follows a text, or token ids, without a template."""
        given = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
        body = _written(prompt=given, max_tokens=max_tokens, stop=list(stop) or None)
        (answer,) = await self._on_loop(self._answers("text", body))
        return answer

    async def _on_loop(
        self, answering: Coroutine[Any, Any, list[Answer] | ApiError | RolloutError]
    ) -> list[Answer]:
        answers = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answering, self._loop))
        if isinstance(answers, list):
            return answers
        raise answers

    async def _answers_handed(
        self, settings: str, handed: HandedMessages | None, whole: str
    ) -> list[Answer] | ApiError | RolloutError:
        """Does as `_answers`. handed: the messages; None: they are in `whole`, in JSON."""
        prepared = None
        if handed is not None:
            try:
                prepared = await self._endpoint.prepare_handed(settings, handed, self._session)
            except (ApiError, RolloutError) as error:
                return error
            whole = "" if prepared else json.dumps(handed.given)
        if prepared is None:
            return await self._answers("chat", f'{settings[:-1]}, "messages": {whole}}}')
        answers = await self._answered(prepared)
        if isinstance(answers, list):
            self._last = prepared.handed
        return answers

    async def _answers(self, kind: Kind, body: str) -> list[Answer] | ApiError | RolloutError:
        """Runs on the worker's loop. An error is returned: where the agent was cancelled meanwhile nobody
        takes it, and asyncio would log that.
        """
        try:
            prepared = await self._endpoint.prepare(kind, body.encode(), self._session)
        except (ApiError, RolloutError) as error:
            return error
        return await self._answered(prepared)

    async def _answered(self, prepared: Prepared) -> list[Answer] | ApiError | RolloutError:
        try:
            with self._endpoint.admitted(prepared):
                pieces = await self._endpoint.choices(prepared)
        except (ApiError, RolloutError) as error:
            return error
        return [_answer(piece) for piece in pieces]


def _written(**body: Any) -> str:
    """Writes a request without what is not said."""
    return json.dumps({"model": MODEL, **{name: value for name, value in body.items() if value is not None}})


def _answer(piece: AnswerPiece) -> Answer:
    return Answer(
        text=piece.text,
        tool_calls=tuple(piece.tool_calls),
        malformed=tuple(malformed_calls(piece)),
        token_ids=tuple(piece.made.token_ids.tolist()),
        log_probs=tuple(piece.made.log_probs.tolist()),
        finish_reason=finish_reason(piece, piece.made),
    )
