"""ALFWorld: household tasks in text, in rooms that are made from a seed or in its own games. Needs
rondo-rl[alfworld].
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.alfworld_rooms import CHANGES, TASKS, Room, Rules, draw_room, problem_of
from rondo_worlds.levels import level_of
from rondo_worlds.packages import borrowed_globals, require_package

_CHANGING = {"atlocation", "holds", "inreceptacle", "iscool", "isclean", "ishot", "istoggled", "opened"}


@dataclass(frozen=True)
class _Game:
    """A game as ALFWorld's files have it."""

    data: Mapping[str, Any]
    name: str
    plan: Sequence[str]
    """Actions that solve it; in a room that was made, with names of the planning problem in braces."""


class AlfWorld:
    """A task in a room: one of `tasks`, among `others` objects that are not wanted. Reward 1 when it is done.

    games: a folder of ALFWorld's own games (`*.tw-pddl`, as `alfworld-download` puts them), which are played
    instead: seeds 2i and 2i + 1 have the i-th. Such a folder is a split of its own, and held-out rows want
    another: `task: {games: …/valid_unseen}`.
    """

    instructions = (
        "You are in a room, and have a task. Answer with one of the possible actions, such as <action>go to "
        "shelf 1</action>. What is closed has to be opened before you see what is in it."
    )

    def __init__(
        self, *, tasks: Sequence[str] = tuple(TASKS), others: int = 8, games: str | None = None
    ) -> None:
        self.check(tasks=tasks, others=others, games=games)
        self._options = {"tasks": list(tasks), "others": others, "games": games}
        self._play: _Play | None = None

    @classmethod
    def check(cls, *, tasks: Sequence[str] = tuple(TASKS), others: int = 8, games: str | None = None) -> None:
        """Raises ConfigError where the package or the folder is missing, and for tasks that there are not."""
        require_package("alfworld")
        if isinstance(tasks, str) or not tasks or not set(tasks) <= set(TASKS) or not 0 <= others <= 50:
            raise ConfigError(
                f"alfworld: needs tasks of {', '.join(TASKS)} and 0 to 50 others, got {tasks!r} and {others}"
            )
        if games is not None:
            _files(games)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Enters a room. task: `{tasks: [heat], others: 12, games: folder}`, where they are to be others."""
        options = {**self._options, **(task or {})}
        self.check(**options)
        if options["games"] is None:
            self._game = _made_game(seed, options["tasks"], options["others"])
        else:
            self._game = _read_game(seed, options["games"])
        self.close()
        self._play = _Play(self._game.data)
        first = self._play.first
        intro = re.fullmatch(r"(?:-=.*=-\s+)?(.*?)\s+Your task is to: (.*?)\.?\s*", first.feedback, re.DOTALL)
        if intro is None:
            raise EnvironmentFailedError(f"alfworld: {self._game.name} begins without a task")
        self._task = intro[2]
        return self._observe(intro[1], first)

    def step(self, action: str) -> StepResult:
        """Acts."""
        assert self._play is not None, "reset comes first"
        state = self._play.step(action)
        won = bool(state["won"])
        return StepResult(self._observe(state.feedback, state), float(won), done=won, success=won)

    def _observe(self, feedback: str, state: Any) -> Observation:
        """Makes the observation. The task is part of it, because a prompt that shows only the last steps
        would lack it.
        """
        text = f"{feedback.strip()}\nYour task is to: {self._task}."
        return Observation(text, tuple(state["admissible_commands"]))

    def plan(self) -> list[str]:
        """Returns actions that do the task from the start on; empty: the game says none."""
        assert self._play is not None, "reset comes first"
        names = self._play.names
        return [re.sub(r"\{(.*?)\}", lambda found: names[found[1].lower()], one) for one in self._game.plan]

    def state(self) -> Mapping[str, Any]:
        """Returns the game, the task, and what holds of all that can change."""
        assert self._play is not None, "reset comes first"
        return {"game": self._game.name, "task": self._task, "facts": self._play.facts()}

    def close(self) -> None:
        """Ends the game."""
        play, self._play = self._play, None
        if play is not None:
            play.close()


@cache
def _rules() -> tuple[Rules, str, str]:
    """Returns ALFWorld's rules of the world, its planning domain, and its grammar."""
    with borrowed_globals():
        given = os.environ.get("ALFWORLD_DATA")
        os.environ["ALFWORLD_DATA"] = given or tempfile.gettempdir()  # or it makes a folder in the home
        try:
            constants = importlib.import_module("alfworld.gen.constants")
            goals = importlib.import_module("alfworld.gen.goal_library")
            info = importlib.import_module("alfworld.info")
        finally:
            if given is None:
                del os.environ["ALFWORLD_DATA"]
    rules = Rules(
        {kind: frozenset(of) for kind, of in constants.VAL_RECEPTACLE_OBJECTS.items()},
        {name: frozenset(constants.VAL_ACTION_OBJECTS[name]) for name in CHANGES.values()},
        frozenset(constants.OPENABLE_CLASS_LIST),
        {task: frozenset(constants.GOALS_VALID[task]) for task in TASKS.values()},
        goals.gdict,
    )
    domain, grammar = (Path(path).read_text() for path in (info.ALFRED_PDDL_PATH, info.ALFRED_TWL2_PATH))
    return rules, domain, grammar


def known_rules() -> Rules:
    """Returns what ALFWorld says of the world. Raises ConfigError without the package."""
    require_package("alfworld")
    return _rules()[0]


def made_room(seed: int, tasks: Sequence[str], others: int) -> Room:
    """Returns the room of a seed, without the game. Raises ConfigError as `AlfWorld.check`."""
    AlfWorld.check(tasks=tasks, others=others)
    rules, name = known_rules(), f"alfworld {' '.join(sorted(tasks))} {others}"
    draw = functools.partial(draw_room, rules=rules, tasks=tasks, others=others)
    return level_of(name, seed, draw, lambda level: level.fixed, whole=lambda level: level)


def _made_game(seed: int, tasks: Sequence[str], others: int) -> _Game:
    rules, domain, grammar = _rules()
    room = made_room(seed, tasks, others)
    data = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", room.sentence),
        "pddl_problem": problem_of(room, rules),
    }
    return _Game(data, f"{room.task} {seed}", room.plan)


@cache
def _files(folder: str) -> tuple[Path, ...]:
    """Returns the games of a folder that ALFWorld plays, too."""
    at = Path(os.path.expandvars(folder)).expanduser()
    found = sorted(at.rglob("*.tw-pddl"))
    played = tuple(path for path in found if not re.search("movable|Sliced", str(path.relative_to(at))))
    if not played:
        raise ConfigError(
            f"alfworld: there are no games (*.tw-pddl) in {at}; alfworld-download fetches them, and games is "
            "a folder of them, such as $ALFWORLD_DATA/json_2.1.1/train"
        )
    return played


def _read_game(seed: int, folder: str) -> _Game:
    """Reads the game of a seed, or the next one that can be solved."""
    files = _files(folder)
    for number in range(len(files)):
        path = files[(seed // 2 + number) % len(files)]
        data = json.loads(path.read_text())
        if data.get("solvable", True):
            return _Game(data, str(path), data.get("walkthrough") or ())
    raise EnvironmentFailedError(f"alfworld: no game in {folder} can be solved")


# Engines that nobody plays with. Each has a library open, and a process that unloads one crashes at its end.
_FREE: list[Any] = []


class _Play:
    """A game of TextWorld's planning engine that is being played, with names as ALFWorld reads them."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        _rules()
        with borrowed_globals():
            from textworld import EnvInfos
            from textworld.envs import PddlEnv

            demangler = importlib.import_module("alfworld.agents.utils.misc").Demangler
            self._engine = _FREE.pop() if _FREE else PddlEnv(EnvInfos(admissible_commands=True, won=True))
            with _work_kept():
                self._engine.load(data)
                entities = self._engine._entity_infos.values()
                read = demangler(game_infos=self._engine._entity_infos)
                for entity in entities:
                    entity.name = read.demangle_alfred_name(entity.id)
                self.names = {entity.id: entity.name for entity in entities}
                self.first = self._engine.reset()

    def step(self, action: str) -> Any:
        with borrowed_globals(), _work_kept():  # the engine's parser is one for all threads
            return self._engine.step(action)[0]

    def facts(self) -> list[str]:
        """Returns what holds of all that can change."""
        return sorted(str(fact) for fact in self._engine._pddl_state.facts if fact.name in _CHANGING)

    def close(self) -> None:
        """Leaves the engine to the next game."""
        _FREE.append(self._engine)


_PLANNER, _SENTENCES = "fast_downward", "textworld.envs.pddl.textgen"
_PARSERS = ("textworld.logic", "textworld.envs.pddl.logic", _SENTENCES)


@contextmanager
def _work_kept() -> Iterator[None]:
    """Has the engine reuse its work: translations and parsed rules, which are most of a start, and parsed
    sentences, which are most of a step. Of a sentence's context it copies references, not every thing of the
    room. Its caller has borrowed what belongs to the process.
    """
    planner, sentences = importlib.import_module(_PLANNER), importlib.import_module(_SENTENCES)
    kept: list[tuple[Any, str, Any]] = [
        (planner, "pddl2sas", _translated),
        (sentences, "copy_context", _copied),
    ]
    for module in map(importlib.import_module, _PARSERS):
        parse = functools.partial(_parsed, module._parse_and_convert)
        kept.append((module, "_parse_and_convert", parse))
    own = [getattr(module, name) for module, name, _ in kept]
    for module, name, ours in kept:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for (module, name, _), its in zip(kept, own, strict=True):
            setattr(module, name, its)


def _translated(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
    """Ignores `optimize`: the engine also asks for an optimized translation, to plan with, and no plans are
    made here.
    """
    return _translated_once(domain, problem)


@lru_cache(maxsize=256)
def _translated_once(domain: str, problem: str) -> Any:
    return importlib.import_module("fast_downward.interface").pddl2sas(domain, problem)


@lru_cache(maxsize=512)
def _parsed_once(parse: Callable[..., Any], text: str, **options: Any) -> Any:
    return parse(text, **options)


def _parsed(parse: Callable[..., Any], text: str, **options: Any) -> Any:
    return copy.deepcopy(_parsed_once(parse, text, **options))


def _copied(context: Mapping[str, Any]) -> dict[str, Any]:
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}
