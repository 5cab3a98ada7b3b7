"""TextWorld's games, made from a seed: find a coin, cook a meal, tidy a house. Needs rondo-rl[textworld]."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import random
import re
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rondo.core.errors import ConfigError
from rondo.environments.protocol import Observation, StepResult
from rondo.system.storage import cache_folder
from rondo_worlds.levels import level_of
from rondo_worlds.packages import borrowed_globals, require_package


class TextWorld:
    """A game of one of TextWorld's challenges (`tw-coin_collector`, `tw-simple`, `tw-cooking`,
    `tw-treasure_hunter`); the further options are those of the challenge. The return of a game is the share
    of its points.

    Making a game takes seconds, so that each is kept in the cache, by options and seed. Two states are the
    same to GiGPO where place and inventory are.
    """

    instructions = (
        "You play a text adventure. Answer with one of the possible actions, such as <action>look</action>."
    )

    def __init__(self, *, challenge: str, **settings: Any) -> None:
        self.check(challenge=challenge, **settings)
        self._challenge = challenge
        self._settings = settings
        self._engine: Any = None

    @classmethod
    def check(cls, *, challenge: str, **settings: Any) -> None:
        """Raises ConfigError where the package is missing, or has no such challenge or options."""
        require_package("textworld")
        _complete(challenge, settings)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Starts a game. task: options of the challenge, where it is to have others: `{level: 10}`."""
        self.close()
        game = _game(self._challenge, _complete(self._challenge, {**self._settings, **(task or {})}), seed)
        with borrowed_globals():
            import textworld

            wanted = ("admissible_commands", "won", "lost", "score", "max_score", "description", "inventory")
            infos = textworld.EnvInfos(**dict.fromkeys(wanted, True), objective=True, extras=["walkthrough"])
            self._engine = textworld.start(str(game), infos)
            self._state = self._engine.reset()
        self._score = 0
        return self._observe(self._state["description"])

    def step(self, action: str) -> StepResult:
        """Acts."""
        with borrowed_globals():
            self._state, score, _ = self._engine.step(action)
        gained, self._score = score - self._score, score
        won, lost = bool(self._state["won"]), bool(self._state["lost"])
        reward = gained / self._state["max_score"]
        return StepResult(self._observe(self._state.feedback), reward, won or lost, success=won)

    def _observe(self, feedback: str) -> Observation:
        """Makes the observation. The goal is part of it, because a prompt that shows only the last steps
        would lack it.
        """
        state = self._state
        said = re.sub(r"\s*\n\s*\n\s*", "\n", feedback.partition("Would you like to RESTART")[0]).strip()
        anchor = f"{state['description']}\n{state['inventory']}"
        return Observation(f"{said}\nGoal: {state['objective']}", tuple(state["admissible_commands"]), anchor)

    def plan(self) -> list[str]:
        """Returns actions that win the game from its start on."""
        return list(self._state["extra.walkthrough"])

    def state(self) -> Mapping[str, Any]:
        """Returns the place as it is described, the inventory, and the score of all that can be had."""
        return {name: self._state[name] for name in ("description", "inventory", "score", "max_score")}

    def close(self) -> None:
        """Ends the game."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _challenges() -> Mapping[str, Any]:
    # The interpreter under it says so of every game that is not one of the classics.
    warnings.filterwarnings("ignore", "Game .* is not fully supported")
    with borrowed_globals():
        return importlib.import_module("textworld.challenges").CHALLENGES


def _complete(challenge: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all settings of a challenge. Raises ConfigError."""
    known = _challenges()
    if challenge not in known:
        raise ConfigError(f"textworld has no challenge {challenge!r}; it has {', '.join(known)}")
    parser = argparse.ArgumentParser(add_help=False)
    _, _, add_arguments = known[challenge]
    add_arguments(parser)
    options = {action.dest: action for action in parser._actions}
    wrong = sorted(set(settings) - set(options))
    missing = [name for name, option in options.items() if option.required and name not in settings]
    if wrong or missing:
        raise ConfigError(
            f"textworld: {challenge} has the options {', '.join(options)}; "
            + (f"not {', '.join(wrong)}" if wrong else f"{', '.join(missing)} must be given")
        )
    for name, value in settings.items():
        choices = options[name].choices
        if choices is not None and value not in choices:
            raise ConfigError(f"textworld: {name} of {challenge} is one of {choices}, not {value!r}")
    return {name: settings.get(name, option.default) for name, option in options.items()}


def _game(challenge: str, settings: Mapping[str, Any], seed: int) -> Path:
    """Returns the file of a game, which is made where the cache does not have it."""
    told = json.dumps([version("textworld"), challenge, settings, seed], sort_keys=True)
    folder = cache_folder() / "textworld"
    path = folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.z8"
    if path.exists():
        return path
    name = f"textworld {challenge} {sorted(settings.items())}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made, borrowed_globals(seed):
        generator: Any = importlib.import_module("textworld.generator")
        # Not with all those before it: making one takes seconds.
        draw = functools.partial(_drawn, challenge, settings)
        game = level_of(name, seed, draw, _fixed, are_distinct=False)
        options = generator.GameOptions()
        options.path = str(Path(made) / path.name)
        compiled = Path(generator.compile_game(game, options))
        for file in (compiled.with_suffix(".json"), compiled):  # who sees the game finds all of it
            os.replace(file, folder / file.name)
    return path


def _drawn(challenge: str, settings: Mapping[str, Any], rng: random.Random) -> Any:
    textworld: Any = importlib.import_module("textworld")
    options = textworld.GameOptions()
    options.seeds = rng.randrange(2**31)
    textworld.g_rng.set_seed(options.seeds)
    _, make, _ = _challenges()[challenge]
    return make(dict(settings), options)


def _fixed(game: Any) -> object:
    """Returns what no action changes: how the rooms lie, which things there are, and what the goals are."""
    rooms = sorted(str(fact) for fact in game.world.facts if fact.name.endswith("_of"))
    things = sorted(str(info.name) for info in game.infos.values())
    goals = sorted(str(event.condition) for quest in game.quests for event in quest.win_events)
    return rooms, things, goals
