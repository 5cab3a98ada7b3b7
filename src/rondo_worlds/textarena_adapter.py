"""Games of textarena for one player. Needs rondo-rl[textarena]."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from rondo.core.errors import ConfigError, did_you_mean
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.levels import level_of
from rondo_worlds.packages import borrowed_globals, require_package


class TextArena:
    """The game `id` of textarena, which the further options make. An action is what its rules say, such as
    `[A C]`; one without brackets is put into them. The reward comes at the end.

    What is to be seen are the rules and what the last action led to. success: the least reward that counts as
    one. Where the game's start follows from the seed, those of odd seeds are held out.
    """

    instructions = (
        "Play the game. Answer with one move as its rules say, between <action> and </action>, such as "
        "<action>[A C]</action>."
    )

    def __init__(self, *, id: str, success: float = 1.0, **options: Any) -> None:
        self.check(id=id, success=success, **options)
        self._id = id
        self._success = success
        self._options = options

    @classmethod
    def check(cls, *, id: str, success: float = 1.0, **options: Any) -> None:
        """Raises ConfigError where the package is missing, and for a game that is not there, is not for one
        player, or does not start: some want data from elsewhere, or another Python.
        """
        require_package("textarena")
        with borrowed_globals():
            known: Mapping[str, Any] = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        games = [name.removesuffix("-raw") for name in known if name.endswith("-raw")]
        if id not in games:
            raise ConfigError(f"textarena has no game {id!r}{did_you_mean(id, games)}")
        _varies(id, json.dumps(options, sort_keys=True))

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Begins a game. task: options of the game, where it is to have others."""
        options = {**self._options, **(task or {})}
        self._seed = seed
        self._turn = 0
        if _varies(self._id, json.dumps(options, sort_keys=True)):
            name = f"textarena {self._id} {sorted(options.items())}"
            start = level_of(name, seed, lambda rng: _draw(rng, self._id, options), _told)
        else:
            start = _draw(random.Random(seed), self._id, options)
        self._game: Any = start
        messages = start.get_observation()[1]
        self._rules = _text(messages, rules=True)
        return self._observe(messages)

    def step(self, action: str) -> StepResult:
        """Moves."""
        said = action if "[" in action else f"[{action}]"
        self._turn += 1
        with borrowed_globals(hash((self._seed, self._turn)) % 2**32):
            done, _ = self._game.step(said)
            seen = self._observe(self._game.get_observation()[1])
        state = self._game.state
        if not done:
            return StepResult(seen, invalid=state.error_count > 0)
        reward: Any = state.rewards[0]
        reason = str(state.game_info[0].get("reason", ""))
        if isinstance(reward, str):  # some games say them the wrong way round where a move is invalid
            reward, reason = float(reason.removeprefix("Invalid Move: ")), reward
        return StepResult(
            Observation(f"{seen.text}\n{reason}"),
            float(reward),
            done=True,
            success=reward >= self._success,
            invalid=bool(state.game_info[0]["invalid_move"]),
        )

    def _observe(self, messages: Any) -> Observation:
        return Observation("\n".join(part for part in (self._rules, _text(messages, rules=False)) if part))

    def state(self) -> Mapping[str, Any]:
        """Returns the game's own state, as far as JSON can say it."""
        return {"turn": self._game.state.turn, "state": _plain(self._game.state.game_state)}

    def close(self) -> None:
        """Has nothing to end."""


def _started(id: str, options: Mapping[str, Any], seed: int) -> Any:
    with borrowed_globals(seed):
        game: Any = importlib.import_module("textarena").make(f"{id}-raw", **options)
        game.reset(num_players=1, seed=seed)
    return game


def _draw(rng: random.Random, id: str, options: Mapping[str, Any]) -> Any:
    return _started(id, options, rng.randrange(2**31))


def _text(messages: Any, rules: bool) -> str:
    """Joins what the game said: its rules, or all but those and the player's own actions."""
    kinds = {"PROMPT"} if rules else {"GAME_MESSAGE", "GAME_ACTION_DESCRIPTION", "GAME_BOARD", "GAME_ADMIN"}
    named = [(str(text).strip("\n"), getattr(kind, "name", kind)) for _, text, kind in messages]
    return "\n".join(text for text, kind in named if kind in kinds)


def _told(game: Any) -> object:
    """Returns all that a game says, and keeps, at its start."""
    said = [str(text) for _, text, _ in game.state.observations[0]]
    return said, _plain(game.state.game_state)


@lru_cache(maxsize=256)
def _varies(id: str, options: str) -> bool:
    """Says whether starts follow from seeds. options: as JSON. Raises ConfigError where it does not start, or
    not for one player.
    """
    try:
        games = [_started(id, json.loads(options), seed) for seed in range(4)]
    except Exception as error:  # the boundary: games are of many authors
        raise ConfigError(
            f"textarena: {id} does not start with one player and the options {options}: "
            f"{type(error).__name__}: {str(error).strip():.200}"
        ) from error
    if type(games[0].state).__name__ != "SinglePlayerState":
        raise ConfigError(f"textarena: {id} is for several players, and only games for one are played")
    return len({repr(_told(game)) for game in games}) > 1


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(str(part) for part in value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__
