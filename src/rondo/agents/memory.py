"""What a policy is shown of the steps before, where each step is asked with a prompt of its own (`steps`)."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rondo.config.functions import check_options, resolve_function
from rondo.core.errors import ConfigError
from rondo.core.images import NAME
from rondo.environments import Observation

NO_ACTION = "That was no action."
_WORD = re.compile(r"\w+|[^\w\s]+")
_SATURATION, _BY_LENGTH = 1.5, 0.75  # BM25's k1 and b, as they are usually set


@dataclass(frozen=True)
class Acted:
    """A turn that was made."""

    seen: Observation
    """What the policy saw."""
    answer: str
    """What it said."""
    actions: tuple[str | None, ...]
    """The actions as they were carried out, one after the other; None: an invalid one."""
    reward: float
    """What the environment gave for the actions, in sum."""

    @property
    def action(self) -> str | None:
        """What was done, as text; None: nothing."""
        return ", ".join(action for action in self.actions if action is not None) or None

    @property
    def invalid(self) -> bool:
        """Whether it ended with what was no action."""
        return None in self.actions


@dataclass(frozen=True)
class View:
    """What a prompt shows of earlier turns."""

    steps: tuple[Acted, ...]
    """The turns that it shows whole."""
    notes: str = ""
    """What the policy noted of the others."""


Ask = Callable[[str], Awaitable[str]]
"""Asks the policy, in a context of its own that begins with the task."""


class Memory(Protocol):
    """What the prompts of one episode remember. Its options are keyword-only parameters of `__init__`; what
    it keeps is plain data, which pickle can write.
    """

    def append(self, acted: Acted) -> None:
        """Keeps a step."""

    async def view(self, budget: int, seen: Observation, ask: Ask) -> View:
        """Returns what the next prompt shows. budget: `history`. seen: what there is to see now."""


class Recent:
    """The last steps, as many as `history` says."""

    def __init__(self) -> None:
        self._steps: list[Acted] = []

    def append(self, acted: Acted) -> None:
        self._steps.append(acted)

    async def view(self, budget: int, seen: Observation, ask: Ask) -> View:
        return View(tuple(self._steps[max(0, len(self._steps) - budget) :]))


class Summary:
    """The last steps, at least `history`, and the policy's own words for those before: whenever there are
    `every` more, it is asked to write these down, too.
    """

    def __init__(self, *, every: int = 4) -> None:
        if every < 1:
            raise ConfigError(f"rollout.agent.memory: summary: every must be at least 1, got {every}")
        self._every = every
        self._steps: list[Acted] = []
        self._notes = ""

    def append(self, acted: Acted) -> None:
        self._steps.append(acted)

    async def view(self, budget: int, seen: Observation, ask: Ask) -> View:
        if len(self._steps) >= budget + self._every:
            old = tuple(self._steps[: self._every])
            self._notes = (await ask(_to_sum_up(View(old, self._notes)))).strip()
            del self._steps[: self._every]
        return View(tuple(self._steps), self._notes)


class Retrieval:
    """The steps, as many as `history` says, that are most like what is to be seen now, in the order in which
    they were made: by the words that they share (BM25), of equals the later one. Those that share none are
    not shown.
    """

    def __init__(self) -> None:
        self._steps: list[Acted] = []

    def append(self, acted: Acted) -> None:
        self._steps.append(acted)

    async def view(self, budget: int, seen: Observation, ask: Ask) -> View:
        texts = [f"{acted.seen.text} {acted.action or ''}" for acted in self._steps]
        # Of a picture's name what only this picture has: a step that showed the same shares a word.
        *texts, now = (NAME.sub(r"\1", text) for text in (*texts, seen.text))
        scores = similarities(texts, now)
        # The latest first: the next sort is stable, so that of equally similar steps the latest are shown.
        alike = sorted((place for place, score in enumerate(scores) if score > 0), reverse=True)
        best = sorted(alike, key=lambda place: -scores[place])[:budget]
        return View(tuple(self._steps[place] for place in sorted(best)))


def similarities(texts: list[str], query: str) -> list[float]:
    """Returns BM25's score of each text for the words of the query; case does not matter."""
    words = [Counter(_WORD.findall(text.casefold())) for text in texts]
    mean = sum(found.total() for found in words) / len(words) if words else 0.0
    scores = [0.0] * len(texts)
    for word in dict.fromkeys(_WORD.findall(query.casefold())):
        having = sum(word in found for found in words)
        weight = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for place, found in enumerate(words):
            length = 1 - _BY_LENGTH + _BY_LENGTH * found.total() / mean if found else 1.0
            scores[place] += weight * found[word] * (_SATURATION + 1) / (found[word] + _SATURATION * length)
    return scores


def told(acted: Acted) -> str:
    """Writes a step as prompts show it."""
    done = [acted.action] if acted.action else []
    return f"{acted.seen.text}\n> {'. '.join([*done, NO_ACTION] if acted.invalid else done)}"


def _to_sum_up(view: View) -> str:
    parts = [f"Notes: {view.notes}"] if view.notes else []
    parts += [told(acted) for acted in view.steps]
    return "\n\n".join([*parts, "Write down in a few sentences what is worth remembering of all this."])


MEMORIES: Mapping[str, type[Memory]] = {"recent": Recent, "summary": Summary, "retrieval": Retrieval}


def load_memory(chosen: str | Mapping[str, Any]) -> Callable[[], Memory]:
    """Returns what makes an episode's memory. chosen: a name, or {name, options…}. Raises ConfigError."""
    where = "rollout.agent.memory"
    given = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: needs a name ({', '.join(MEMORIES)}, or path.py:Class), got {chosen!r}")
    try:
        made: Any = resolve_function(name, MEMORIES)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    for method in ("append", "view"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f"{where}: {name} has no method {method}; a memory has append and view")
    check_options(made, given, where, given=0)
    made(**given)
    return functools.partial(made, **given)
