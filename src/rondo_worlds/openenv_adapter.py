"""Environments of OpenEnv's servers, over a WebSocket each. Needs rondo-rl[openenv]."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.packages import require_package


class OpenEnv:
    """A session of the server at `url`, which decides what an episode is.

    action: the field of its action that takes what the policy says, or a function `(text) -> mapping` of all
    fields. text: a function `(observation) -> str` that writes what the policy reads of the observation's
    fields; default: all of them, as JSON. success: the least return of an episode that ended and counts as a
    success.
    """

    def __init__(
        self, *, url: str, action: str = "message", text: str | None = None, success: float = 1.0
    ) -> None:
        self.check(url=url, action=action, text=text, success=success)
        self._url = url
        self._action: Callable[[str], Any] = (
            resolve_function(action) if _is_function(action) else lambda said: {action: said}
        )
        self._text: Callable[[Any], Any] = resolve_function(text) if text else _as_json
        self._success = success
        self._client: Any = None
        self._return = 0.0

    @classmethod
    def check(
        cls, *, url: str, action: str = "message", text: str | None = None, success: float = 1.0
    ) -> None:
        """Raises ConfigError where the package is missing or an option cannot be."""
        require_package("openenv")
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"openenv: url is {url!r}; it begins with http:// or ws://")
        for function in (action, text):
            if function and _is_function(function):
                resolve_function(function)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Begins an episode. task: further arguments of the server's `reset`, beside `seed`."""
        if self._client is None:
            from openenv.core import GenericEnvClient

            # Its coroutines run on an event loop of its own, in a thread of its own.
            self._client = GenericEnvClient(base_url=self._url, mode="simulation").sync()
        self._return = 0.0
        return self._observe(self._asked(lambda: self._client.reset(**{**(task or {}), "seed": seed})))

    def step(self, action: str) -> StepResult:
        """Sends an action."""
        result = self._asked(lambda: self._client.step(dict(self._action(action))))
        reward = float(result.reward or 0.0)
        self._return += reward
        won = bool(result.done) and self._return >= self._success
        return StepResult(self._observe(result), reward, bool(result.done), success=won)

    def _asked(self, call: Callable[[], Any]) -> Any:
        from websockets.exceptions import WebSocketException

        try:
            return call()
        except (OSError, RuntimeError, TimeoutError, WebSocketException) as error:
            said = str(error) or type(error).__name__
            raise EnvironmentFailedError(f"openenv: the server at {self._url} failed: {said:.500}") from error

    def _observe(self, result: Any) -> Observation:
        return Observation(str(self._text(result.observation)))

    def state(self) -> Mapping[str, Any]:
        """Returns what the server says of itself, but for the name of the session, which no seed gives."""
        said = dict(self._asked(lambda: self._client.state()))
        said.pop("episode_id", None)
        return said

    def close(self) -> None:
        """Ends the session."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _is_function(name: str) -> bool:
    return ":" in name or "." in name


def _as_json(observation: Any) -> str:
    return json.dumps(observation, ensure_ascii=False)
