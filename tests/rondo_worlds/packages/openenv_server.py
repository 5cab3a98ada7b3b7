"""A real server of OpenEnv under uvicorn, with an environment made here: a number that follows from the seed
is to be guessed. `python -m tests.rondo_worlds.packages.openenv_server` says its port.
"""

from __future__ import annotations

import random
import socket
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from rondo.environments import Observation as Seen


class Guess(Action):
    message: str


class Told(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Told:
        self._high = int(options.get("high", 8))
        self._number = random.Random(seed).randrange(self._high)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Told(hint=f"below {self._high}")

    def step(self, action: Guess, **_: Any) -> Told:  # type: ignore[override]
        self._state.step_count += 1
        guess = int(action.message)  # what is no number is an error of this server
        if guess == self._number:
            return Told(hint="found", reward=1.0, done=True)
        return Told(hint="higher" if guess < self._number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return self._state


def hint(observation: dict[str, Any]) -> str:
    """What the policy reads."""
    return str(observation["hint"])


def guess(said: str) -> dict[str, Any]:
    """What the server takes: the last word."""
    return {"message": said.split()[-1]}


def solve(seen: Seen, rng: random.Random) -> str:
    return str(rng.randrange(8))


if __name__ == "__main__":
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        app = create_app(GuessEnvironment, Guess, Told, env_name="guess", max_concurrent_envs=2)
        listening.listen()
        print(listening.getsockname()[1], flush=True)
        uvicorn.run(app, fd=listening.fileno(), log_level="error")
