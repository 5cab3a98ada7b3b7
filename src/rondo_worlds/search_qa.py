"""Questions over a made corpus that take two searches: people, the cities where they were born, and who
founded those. The world of the environment is always the same one; no line of it is true.

    Who founded the city where Ana Bek was born?
        search[Ana Bek]     Ana Bek was born in North Oak.
        search[North Oak]   North Oak was founded by Tom Lind. Its river is the Sava.
        answer[Tom Lind]

Cities are in two halves, and every question stays in the half of its city, with all passages that it takes:
those of even seeds and those of odd seeds, which are held out, have no passage in common.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from rondo.core.errors import ConfigError, EnvironmentFailedError, ToolError
from rondo.environments.protocol import HELD_OUT, Observation, StepResult
from rondo_search import MOST_RESULTS, index_of

CORPUS = "rondo_worlds.search_qa:corpus"
FIRST = (
    "Ana Ben Cleo Dan Eva Finn Gia Hugo Ivy Jon Kim Leo Mia Nils Ola Pia Quin Raj Sam Tea Uma Vic Wes Zoe"
).split()
LAST = "Bek Cole Dorn Egg Falk Gray Holm Isak Jung Kern Lind Moss Nord Otto Pohl Rask Stern Voss".split()
PLACES = "North South East West Upper Lower Old New Red White Grand Little".split()
THINGS = "Oak Ford Hill Lake Mill Port Bridge Field Rock Wood Bay Tower".split()
RIVERS = "Sava Drava Elbe Oder Isar Neckar Tisza Prut Rhone Loire Volga Neva".split()
_ACTION = re.compile(r"\s*(search|answer)\[(.*)\]\s*", re.DOTALL)
_NO_ACTION = "Write search[words] or answer[text]."


@dataclass(frozen=True)
class Person:
    id: str
    """That of the passage about the person."""
    name: str
    """Unique in a world."""
    city: int
    """Index of the city of birth in `world`."""


@dataclass(frozen=True)
class City:
    id: str
    """That of the passage about the city."""
    name: str
    """Unique in a world."""
    founder: int
    """Index of a person in `world`, who was born in another city."""
    river: str
    """One of RIVERS; several cities may share it."""


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the passages that lead to it."""

    kind: str
    """founder, river or birthplace."""
    text: str
    """As the policy reads it."""
    answer: str
    """The only right one, compared without case."""
    hops: tuple[str, str]
    """The entities whose passages are read, one after the other."""
    gold: tuple[str, str]
    """The ids of these passages."""


@functools.lru_cache(maxsize=4)
def world(number: int = 0) -> tuple[tuple[Person, ...], tuple[City, ...]]:
    """Returns 432 people and 144 cities, in each of which three of them were born. Cities at an even place
    are one half, those at an odd place the other; founders were born in their city's half. number: of another
    world, in which the same names have other facts.
    """
    rng = random.Random(f"rondo search_qa: {number}")
    names = [" ".join(parts) for parts in product(FIRST, LAST)]
    places = [" ".join(parts) for parts in product(PLACES, THINGS)]
    rng.shuffle(names)
    rng.shuffle(places)
    people = tuple(Person(f"person-{i}", name, i % len(places)) for i, name in enumerate(names))
    cities = []
    for place, name in enumerate(places):
        others = [i for i in range(place % 2, len(people), 2) if people[i].city != place]
        cities.append(City(f"city-{place}", name, rng.choice(others), rng.choice(RIVERS)))
    return people, tuple(cities)


def corpus(number: int = 0) -> list[dict[str, str]]:
    """Makes the passages of a world, one of each person and of each city: rows with id, title and text."""
    people, cities = world(number)
    rows = [
        {"id": one.id, "title": one.name, "text": f"{one.name} was born in {cities[one.city].name}."}
        for one in people
    ]
    for city in cities:
        founder = people[city.founder].name
        text = f"{city.name} was founded by {founder}. Its river is the {city.river}."
        rows.append({"id": city.id, "title": city.name, "text": text})
    return rows


@functools.lru_cache(maxsize=4)
def questions(held_out: bool, number: int = 0) -> tuple[Question, ...]:
    """Returns all 504 questions of one half of a world."""
    people, cities = world(number)
    made: list[Question] = []
    for place in range(int(held_out), len(cities), 2):
        city = cities[place]
        founder = people[city.founder]
        for person in people[place :: len(cities)]:
            hops, gold = (person.name, city.name), (person.id, city.id)
            where = f"the city where {person.name} was born?"
            made += [
                Question("founder", f"Who founded {where}", founder.name, hops, gold),
                Question("river", f"Which river is in {where}", city.river, hops, gold),
            ]
        text = f"Where was the founder of {city.name} born?"
        born = cities[founder.city].name
        made.append(Question("birthplace", text, born, (city.name, founder.name), (city.id, founder.id)))
    return tuple(made)


class SearchQA:
    """Answers a question over the made corpus: `search[words]` shows the `k` passages that fit best,
    `answer[text]` ends the episode, with reward 1 where it is right.
    """

    instructions = (
        "Answer the question. search[words] finds passages, answer[text] ends. "
        "Write one of them, such as <action>search[Ana Bek]</action>"
    )

    def __init__(self, *, k: int = 2) -> None:
        if not 1 <= k <= MOST_RESULTS:
            raise ConfigError(f"search_qa: k must be 1 to {MOST_RESULTS}, got {k}")
        self._k = k
        self._question: Question | None = None
        self._found: list[str] = []

    @classmethod
    def check(cls, **options: Any) -> None:
        """Builds the index. Raises ConfigError."""
        cls(**options)
        index_of(CORPUS)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Chooses a question. task: its kind: {"kind": "founder"}, "river" or "birthplace"; default: any."""
        kind = (task or {}).get("kind")
        asked = [one for one in questions(bool(seed % 2)) if kind in (None, one.kind)]
        if not asked:
            raise EnvironmentFailedError(f"search_qa: there is no question of the kind {kind!r}")
        number, is_held_out = divmod(seed, 2)
        if is_held_out and number < HELD_OUT:  # each question once
            if number >= len(asked):
                raise EnvironmentFailedError(
                    f"search_qa: seed {seed} is the {number + 1}th that is held out, and there are "
                    f"{len(asked)} such questions"
                )
            self._question = random.Random(f"rondo search_qa: {kind}").sample(asked, len(asked))[number]
        else:
            self._question = random.Random(f"rondo search_qa: {seed}").choice(asked)
        self._found = []
        return self._observe("")

    def step(self, action: str) -> StepResult:
        """Searches, or answers."""
        assert self._question is not None, "reset comes first"
        found = _ACTION.fullmatch(action)
        if found is None:
            return StepResult(self._observe(_NO_ACTION), invalid=True)
        verb, said = found[1], found[2].strip()
        if verb == "answer":
            right = said.casefold() == self._question.answer.casefold()
            return StepResult(
                self._observe(f"The answer was {said}."), float(right), done=True, success=right
            )
        try:
            hits = index_of(CORPUS).search(said, self._k)
        except ToolError as error:
            return StepResult(self._observe(f"Error: {error}"), invalid=True)
        self._found += [hit.passage.id for hit in hits if hit.passage.id not in self._found]
        texts = [f"[{number}] {hit.passage.text}" for number, hit in enumerate(hits, 1)]
        return StepResult(self._observe("\n".join(texts) or "Nothing was found."))

    def _observe(self, result: str) -> Observation:
        """Shows the question, so that a step can be made without those before it. States are equal where the
        same passages have been found.
        """
        assert self._question is not None
        lines = [f"Question: {self._question.text}", *filter(None, [result])]
        anchor = f"{self._question.text} {sorted(self._found)} {result}"
        return Observation("\n".join(lines), anchor=anchor)

    def state(self) -> Mapping[str, Any]:
        """Returns the question with its answer, and the ids of what it takes and of what was found."""
        assert self._question is not None
        asked = self._question
        return {
            "question": asked.text,
            "answer": asked.answer,
            "gold": list(asked.gold),
            "found": list(self._found),
        }

    def close(self) -> None:
        """Has nothing to end."""
