"""A user to talk to: a served model that plays one, or a function."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.core.masking import warn_of_open_way
from rondo.environments.protocol import Observation, StepResult
from rondo.system.urls import open_there

PERSONA = (
    "You play a user who talks to an assistant. Say what that user would say, one message at a time, and "
    "nothing else. What you want: {wants}\nWhen you have it, or will not get it, say {end}"
)
_BEGIN = "(The assistant waits for you to begin.)"


class User:
    """Says something, is answered by the policy, and says more, until its message has `end` in it.

    It has no reward of its own: reward functions read the conversation. A row's `task` says what the user
    wants (`wants`) and may say how it begins (`opening`; default: it is asked).
    """

    instructions = "Help the user who talks to you."

    def __init__(
        self,
        *,
        base_url: str = "",
        model: str = "",
        function: str | Callable[..., Any] | None = None,
        persona: str = PERSONA,
        end: str = "[END]",
        max_turns: int = 10,
        max_tokens: int = 256,
        temperature: float = 0.0,
        api_key: str = "",
    ) -> None:
        """base_url, model: what plays the user, behind OpenAI's API (a server's `…/v1`). function: instead,
        `(task, conversation, seed) -> text`, plain or a coroutine. persona: the served model's instructions;
        {wants} and {end} are filled in. max_turns: answers of the policy, at most. api_key: of the server, in
        a recipe `{env: NAME}`; without it OpenAI's own host gets OPENAI_API_KEY, and any other host none.
        """
        if bool(base_url and model) == (function is not None):
            raise ConfigError(
                "user: needs base_url and model of a server, or a function (path.py:name), one of the two"
            )
        if base_url and (urlsplit(base_url).scheme not in ("http", "https") or not urlsplit(base_url).netloc):
            raise ConfigError(f"user: base_url: {base_url!r} is no http:// or https:// URL")
        if max_turns < 1 or max_tokens < 1 or temperature < 0 or not end:
            raise ConfigError(
                "user: needs max_turns >= 1, max_tokens >= 1, temperature >= 0 and an end, got "
                f"{max_turns}, {max_tokens}, {temperature} and {end!r}"
            )
        self._base_url = base_url
        self._model = model
        self._function = None if function is None else resolve_function(function)
        self._persona = persona
        self._end = end
        self._max_turns = max_turns
        self._sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        self._key = api_key or _own_key(base_url)
        self._said: list[dict[str, str]] = []

    @classmethod
    def check(cls, **options: Any) -> None:
        """Asks the server which models it has. Raises ConfigError."""
        user = cls(**options)
        if user._function is not None:
            return
        warn_of_open_way("rollout.environments: user", user._base_url, key=bool(user._key))
        try:
            served = models(user._base_url, user._key)
        except EnvironmentFailedError as error:
            raise ConfigError(f"user: {user._base_url} cannot be asked for its models: {error}") from error
        if user._model not in served:
            raise ConfigError(f"user: {user._base_url} has no model {user._model!r}, but {', '.join(served)}")

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Begins a conversation. task: `{wants: a refund, opening: Hello!}`."""
        self._task = dict(task or {})
        self._seed = seed
        self._said = []
        opening = self._task.get("opening")
        return Observation(self._heard(str(opening) if opening else self._speak()))

    def step(self, action: str) -> StepResult:
        """Says the policy's answer to the user."""
        self._said.append({"role": "assistant", "content": action})
        text = self._heard(self._speak())
        over = self._end in text
        turns = sum(message["role"] == "assistant" for message in self._said)
        return StepResult(Observation(text), done=over, truncated=not over and turns >= self._max_turns)

    def state(self) -> Mapping[str, Any]:
        """Returns the conversation."""
        return {"conversation": [dict(message) for message in self._said]}

    def close(self) -> None:
        """Has nothing to end."""

    def _heard(self, text: str) -> str:
        self._said.append({"role": "user", "content": text})
        return text

    def _speak(self) -> str:
        # What is drawn follows from the episode's seed and the turn: the samples of a prompt meet one user.
        seed = zlib.crc32(f"{self._seed} {len(self._said)}".encode())
        if self._function is None:
            return self._served(seed)
        said = [dict(message) for message in self._said]
        return text_of("the user's function", self._function(self._task, said, seed))

    def _served(self, seed: int) -> str:
        """Asks the model, for which the policy is the user."""
        swapped = {"user": "assistant", "assistant": "user"}
        persona = self._persona.replace("{wants}", str(self._task.get("wants", "talk a little")))
        messages = [
            {"role": "system", "content": persona.replace("{end}", self._end)},
            {"role": "user", "content": _BEGIN},
            *({**message, "role": swapped[message["role"]]} for message in self._said),
        ]
        return say(self._base_url, self._model, messages, seed=seed, key=self._key, **self._sampling)


def text_of(who: str, given: Any) -> str:
    """Returns the text that a function of a recipe gave, awaited where it is a coroutine. Raises
    EnvironmentFailedError for anything else.
    """
    text = asyncio.run(given) if inspect.iscoroutine(given) else given
    if not isinstance(text, str):
        raise EnvironmentFailedError(f"{who} gave {type(text).__name__}, no text")
    return text


def _own_key(base_url: str) -> str:
    """Returns the key that is sent where none is named: OpenAI's, to OpenAI."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    theirs = parts.scheme == "https" and (host == "api.openai.com" or host.endswith(".api.openai.com"))
    return os.environ.get("OPENAI_API_KEY", "") if theirs else ""


# ---- a model behind an OpenAI-compatible endpoint ----


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
