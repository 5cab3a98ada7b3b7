"""ALFWorld for a small model that is made here: a prompt of six short lines, an answer of one or two words,
and demonstrations of somebody who searches.

The player knows what was done and what is to be seen, and not where things lie: the searcher looks into
one piece of furniture after the other. Demonstrations are played in rooms that are drawn, without the game.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rondo.core.errors import ConfigError
from rondo.environments import Observation
from rondo.recipes.quickstart import fast_tokenizer, train_bpe
from rondo_worlds.alfworld_adapter import known_rules, made_room
from rondo_worlds.alfworld_rooms import CHANGES, ROOMS, TOOLS, Room

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TASK = "Find"
TASKS = ("place", "clean")
_TO_BE = {"clean": "clean", "hot": "heat", "cool": "cool"}
_SENTENCES = (
    re.compile(r"put (?:a|some) (?:(?P<to_be>clean|hot|cool) )?(?P<wanted>\w+) (?:in|on) (?P<target>\w+)"),
    re.compile(r"(?P<change>clean|heat|cool) some (?P<wanted>\w+) and put it in (?P<target>\w+)"),
)
_ANSWERS = ("go", "take", "open", "close", "put")
_WORDS = ("place", "carry", "here", "left", "see", "nothing", "closed", "found", "target", "tool", *_ANSWERS)


_SEARCHED = 0.4  # share of the steps at which nothing is found yet that demonstrations show


@dataclass(frozen=True)
class Sight:
    """What is known at a step. Furniture has names (`drawerB` for the game's `drawer 2`, so that each is one
    token), and objects are known by their kinds (`apple`).
    """

    change: str
    """What is to be done with it before: clean, heat or cool; empty: nothing."""
    wanted: str
    """The kind of object that the task is about."""
    target: str
    """The first of the furniture that it may be brought to."""
    carried: str
    """Empty: nothing."""
    changed: bool
    """Whether `change` was done with what is carried."""
    here: str
    """Empty: the middle of the room."""
    closed: bool
    """Whether that has to be opened."""
    things: Sequence[str]
    """What could be taken, in the order of names."""
    left: Sequence[str]
    """Furniture that nobody has looked into, in the order of names."""


def prompt(task: str, memory: Sequence[Any], seen: Observation) -> str:
    """Returns what a step's prompt says, for the option `prompt` of a loop. memory: all steps (`history`).
    Raises ConfigError for other tasks than place, clean, heat and cool.
    """
    return _written(
        task, _sight([acted.action for acted in memory], [*(acted.seen for acted in memory), seen])
    )


def act(answer: str, seen: Observation) -> str | None:
    """Reads an answer such as `go drawerB`, `take apple`, `open`, `close`, `put` or `clean`, and nothing
    else, for the option `action` of a loop. Of several apples the first is taken.
    """
    return _answers(seen.actions).get(answer.strip())


def _answers(actions: Sequence[str]) -> dict[str, str]:
    """Returns the possible answers, each with the action that it stands for."""
    found: dict[str, str] = {}
    for action in sorted(actions):
        verb, name = _parted(action)
        if verb == "go":
            found[f"go {_furniture(name)}"] = action
        elif verb == "take":
            found.setdefault(f"take {_kind(name)}", action)
        elif verb in ("open", "close", *CHANGES):
            found[verb] = action
        elif verb == "move":
            found["put"] = action
    return found


def _parted(action: str) -> tuple[str, str]:
    """Splits an action into its verb and the game's name for its object."""
    verb, _, rest = action.partition(" ")
    return verb, re.split(" from | to | with ", rest.removeprefix("to "))[0]


def _furniture(name: str) -> str:
    """Returns `drawerB` for `drawer 2`."""
    kind, _, number = name.partition(" ")
    return kind + chr(ord("A") + int(number) - 1)


def _kind(name: str) -> str:
    return name.partition(" ")[0]


def _sight(done: Sequence[str | None], seen: Sequence[Observation]) -> Sight:
    """Returns what is known. done: the actions; None: an invalid one. seen: before each of them, and now."""
    now = seen[-1]
    asked = _asked(now.text.rpartition("Your task is to: ")[2].rstrip("."))
    here, carried, changed, looked = "", "", False, set()
    for action, then in zip(done, seen[1:], strict=True):
        verb, name = _parted(action or "")
        if verb == "go":
            here = _furniture(name)
        elif verb in ("take", "move"):
            carried, changed = (_kind(name) if verb == "take" else ""), False
        elif verb == asked[0]:
            changed = True
        if not _named("open", then):
            looked.add(here)
    places = {*map(_furniture, _named("go", now)), here} - {""}
    things = list(map(_kind, _named("take", now)))
    return Sight(*asked, carried, changed, here, bool(_named("open", now)), things, sorted(places - looked))


def _named(verb: str, seen: Observation) -> list[str]:
    """Returns in their order what an action with this verb can be done to."""
    return sorted(name for its, name in map(_parted, seen.actions) if its == verb)


def _asked(sentence: str) -> tuple[str, str, str]:
    """Returns change, wanted and target of a task."""
    for pattern in _SENTENCES:
        if (asked := pattern.fullmatch(sentence)) is not None:
            said = asked.groupdict()
            change = said["change"] if "change" in said else _TO_BE.get(said["to_be"], "")
            return change, said["wanted"], _furniture(f"{said['target']} 1")
    raise ConfigError(
        "rondo_worlds.recipes.alfworld.prompt writes the tasks place, clean, heat and cool, and this one "
        f"says: {sentence} (set tasks, or a prompt of your own)"
    )


def _written(task: str, sight: Sight) -> str:
    """Writes what has a fixed number of words last, and of what is left the next one at its end, so that each
    stands at a fixed distance from the answer.
    """
    lines = [
        [task],
        ["see", *sight.things],
        ["left", "nothing", *reversed(sight.left)],
        ["carry", sight.carried or "nothing", sight.change if sight.changed else "nothing"],
        [sight.change or "place", sight.wanted, sight.target],
        ["here", sight.here or "nothing", _meaning(sight)],
    ]
    return "\n".join(map(" ".join, lines))


def _meaning(sight: Sight) -> str:
    """Says in a word what the place where one is has to do with the task: a model this small hardly learns to
    compare two names.
    """
    if sight.closed:
        return "closed"
    if sight.carried and sight.here == sight.target:
        return "target"
    if sight.carried and sight.change and not sight.changed and sight.here == _tool(sight.change):
        return "tool"
    if not sight.carried and sight.wanted in sight.things:
        return "found"
    return "nothing"


def _tool(change: str) -> str:
    return _furniture(f"{TOOLS[change].lower()} 1")


def searched(sight: Sight) -> str | None:
    """Returns the searcher's answer: it looks into one piece of furniture after the other, takes what is
    wanted where it sees it, and brings it to the first target. None: it has looked everywhere.
    """
    if sight.carried and sight.change and not sight.changed:
        tool = _tool(sight.change)
        return sight.change if sight.here == tool else f"go {tool}"
    if sight.carried and sight.here != sight.target:
        return f"go {sight.target}"
    if sight.closed:
        return "open"
    if sight.carried:
        return "put"
    if sight.wanted in sight.things:
        return f"take {sight.wanted}"
    return f"go {sight.left[0]}" if sight.left else None


class Walk:
    """A room without its game: which actions there are, and what each changes."""

    def __init__(self, room: Room) -> None:
        rules, names = known_rules(), room.names
        self._kinds = {names[name]: kind for name, kind in {**room.furniture, **room.objects}.items()}
        self._furniture = sorted(names[name] for name in room.furniture)
        self._places = {names[name]: names[place] for name, place in room.places.items()}
        self._closed = {name for name in self._furniture if self._kinds[name] in rules.openable}
        self._rules = rules
        self._sentence = room.sentence
        self._here = self._carried = ""

    @property
    def seen(self) -> Observation:
        """The task, and what can be done of all that `act` reads."""
        here, carried = self._here, self._carried
        actions = [f"go to {name}" for name in self._furniture if name != here]
        if here and self._kinds[here] in self._rules.openable:
            actions.append(f"{'open' if here in self._closed else 'close'} {here}")
        if here and here not in self._closed and not carried:
            actions += [f"take {name} from {here}" for name, at in self._places.items() if at == here]
        if here and carried:
            kind = self._kinds[carried]
            if here not in self._closed and kind in self._rules.fits[self._kinds[here]]:
                actions.append(f"move {carried} to {here}")
            for change, able in CHANGES.items():
                if self._kinds[here] == TOOLS[change] and kind in self._rules.changes[able]:
                    actions.append(f"{change} {carried} with {here}")
        return Observation(f"Your task is to: {self._sentence}.", tuple(actions))

    def do(self, action: str) -> None:
        """Does one of the actions."""
        verb, name = _parted(action)
        if verb == "go":
            self._here = name
        elif verb == "open":
            self._closed.remove(name)
        elif verb == "close":
            self._closed.add(name)
        elif verb == "take":
            self._carried = name
            del self._places[name]
        elif verb == "move":
            self._carried = ""
            self._places[name] = self._here


def demonstrations(
    size: int = 12800,
    seed: int = 0,
    right_share: float = 0.8,
    tasks: Sequence[str] = TASKS,
    others: int = 2,
    steps: int = 16,
) -> list[dict[str, Any]]:
    """Makes rows with prompt and response for the warm start, in rooms of even seeds: with odds `right_share`
    what the searcher says, else `open`, `close` or a place to go to; and that is done, for so many steps at
    most. Of the steps at which nothing is found yet, which are most, 4 in 10 are shown.
    """
    if size < 1 or seed < 0 or not 0 <= right_share <= 1:
        raise ConfigError(
            f"alfworld: need size >= 1, seed >= 0 and right_share from 0 to 1, got {size}, {seed} and "
            f"{right_share}"
        )
    rng = random.Random(f"rondo alfworld demonstrations: {seed}")
    rows: list[dict[str, Any]] = []
    number = seed
    while len(rows) < size:
        rows += _demonstrated(Walk(made_room(2 * number, tasks, others)), rng, right_share, steps)
        number += 1
    return rows[:size]


def _demonstrated(walk: Walk, rng: random.Random, right_share: float, steps: int) -> list[dict[str, Any]]:
    done: list[str] = []
    seen = [walk.seen]
    rows = []
    while len(done) < steps:
        answers, sight = _answers(seen[-1].actions), _sight(done, seen)
        said = searched(sight)
        if said is None:
            break
        if rng.random() >= right_share:
            said = rng.choice([one for one in answers if _kind(one) in ("go", "open", "close")])
        if sight.carried or sight.wanted in sight.things or rng.random() < _SEARCHED:
            rows.append({"prompt": _written(TASK, sight), "response": said})
        walk.do(answers[said])
        done.append(answers[said])
        seen.append(walk.seen)
        if said == "put":
            break
    return rows


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE that is trained here on the words of all rooms: always the same vocabulary, in
    which each of them is a token.
    """
    fits, most = known_rules().fits, Counter[str]()
    for room in ROOMS.values():
        most |= Counter({kind.lower(): number for kind, (_, number) in room.items()})
    names = [_furniture(f"{kind} {number + 1}") for kind in most for number in range(most[kind])]
    names += sorted({one.lower() for room in ROOMS.values() for kind in room for one in fits[kind]})
    words = [f" {name}" for name in names]
    words += [written for word in (*_WORDS, *CHANGES) for written in (word, f" {word}")]
    return fast_tokenizer(train_bpe([*words, f"user\n{TASK}", "assistant\n"] * 2))
