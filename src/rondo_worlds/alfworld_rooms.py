"""Made rooms for ALFWorld: what stands in them, what lies where, what is to be done, as a planning problem.

Which objects there are, what fits where, what can be heated, and what each of the six tasks asks for are
ALFWorld's own; which furniture a room has, and what lies where, is drawn. The plan of a room is known by
construction, so that each can be solved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Least and most of each kind of furniture.
ROOMS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "Kitchen": {
        "CounterTop": (1, 2),
        "Cabinet": (2, 4),
        "Drawer": (1, 3),
        "DiningTable": (1, 1),
        "Fridge": (1, 1),
        "Microwave": (1, 1),
        "SinkBasin": (1, 1),
        "GarbageCan": (1, 1),
        "StoveBurner": (1, 2),
    },
    "LivingRoom": {
        "Sofa": (1, 1),
        "ArmChair": (1, 2),
        "CoffeeTable": (1, 1),
        "SideTable": (1, 2),
        "Drawer": (1, 3),
        "Shelf": (1, 3),
        "GarbageCan": (0, 1),
    },
    "Bedroom": {
        "Bed": (1, 1),
        "Desk": (1, 1),
        "SideTable": (1, 1),
        "Drawer": (2, 4),
        "Shelf": (1, 3),
        "Dresser": (0, 1),
        "Safe": (0, 1),
        "GarbageCan": (0, 1),
    },
    "Bathroom": {
        "CounterTop": (1, 1),
        "Cabinet": (1, 3),
        "SinkBasin": (1, 1),
        "BathtubBasin": (1, 1),
        "Toilet": (1, 1),
        "Shelf": (0, 2),
        "GarbageCan": (1, 1),
    },
}
TASKS = {
    "place": "pick_and_place_simple",
    "light": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
TOOLS = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
CHANGES = {"clean": "Cleanable", "heat": "Heatable", "cool": "Coolable"}
_LAMPS = {"Bedroom": ("DeskLamp", "Desk"), "LivingRoom": ("FloorLamp", "SideTable")}


@dataclass(frozen=True)
class Rules:
    """What ALFWorld says of the world."""

    fits: Mapping[str, frozenset[str]]
    """Objects, by the furniture that may hold them."""
    changes: Mapping[str, frozenset[str]]
    """Objects, by Heatable, Coolable and Cleanable."""
    openable: frozenset[str]
    """Types of furniture that are closed at first."""
    rooms: Mapping[str, frozenset[str]]
    """By task."""
    goals: Mapping[str, Any]
    """By task: the goal of the planning problem, and sentences."""


@dataclass(frozen=True)
class Room:
    """A room and its task."""

    task: str
    """A key of TASKS."""
    wanted: str
    """The type of the objects that the task is about."""
    target: str
    """The type of the furniture that they have to come to; the task `light` does without."""
    sentence: str
    """The task as the policy reads it."""
    furniture: Mapping[str, str]
    """Types, by name in the planning problem."""
    objects: Mapping[str, str]
    """Types, by name in the planning problem."""
    places: Mapping[str, str]
    """Where each object lies."""
    lamp: str
    """Its name in the planning problem; empty: the task needs none."""
    plan: tuple[str, ...]
    """Actions, with names of the planning problem in braces."""

    @property
    def names(self) -> dict[str, str]:
        """What ALFWorld calls furniture and objects: types with numbers, of which the first name in the
        planning problem has the highest.
        """
        kinds = {name: kind.lower() for name, kind in {**self.furniture, **self.objects}.items()}
        left = Counter(kinds.values())
        called = {}
        for name in sorted(kinds, key=str.lower):
            called[name] = f"{kinds[name]} {left[kinds[name]]}"
            left[kinds[name]] -= 1
        return called

    @property
    def fixed(self) -> object:
        """What no action changes."""
        return self.sentence, sorted(self.furniture), sorted(self.objects)


def draw_room(rng: random.Random, rules: Rules, tasks: Sequence[str], others: int) -> Room | None:
    """Draws a room with `others` objects besides the wanted one. None: the room has no place for the task."""
    task = rng.choice(list(tasks))
    where = rng.choice(sorted(set(ROOMS) & rules.rooms[TASKS[task]]))
    furniture: dict[str, str] = {}
    for kind, (least, most) in ROOMS[where].items():
        for _ in range(rng.randint(least, most)):
            furniture[_name(kind, len(furniture))] = kind
    fitting = sorted({one for kind in set(furniture.values()) for one in rules.fits[kind]})
    fitting = [one for one in fitting if not one.endswith("Sliced")]
    able = rules.changes[CHANGES[task]] if task in CHANGES else fitting
    wanted = rng.choice([one for one in fitting if one in able])
    tool = TOOLS.get(task, "")
    targets = sorted(kind for kind in set(furniture.values()) if wanted in rules.fits[kind] and kind != tool)
    if not targets:
        return None
    target = rng.choice(targets)
    kinds = [wanted] * (2 if task == "two" else 1)
    kinds += rng.choices([one for one in fitting if one != wanted], k=others)
    objects: dict[str, str] = {}
    places: dict[str, str] = {}
    for kind in kinds:
        away = target if kind == wanted and task != "light" else ""
        free = [name for name, of in furniture.items() if kind in rules.fits[of] and of != away]
        if not free:
            return None
        name = _name(kind, len(objects))
        objects[name], places[name] = kind, rng.choice(free)
    lamp = ""
    if task == "light":
        kind, stand = _LAMPS[where]
        lamp = _name(kind, len(objects))
        objects[lamp], places[lamp] = kind, next(name for name, of in furniture.items() if of == stand)
    sentence = rng.choice(rules.goals[TASKS[task]]["templates"])
    sentence = sentence.format(obj=wanted.lower(), recep=target.lower(), toggle=objects.get(lamp, "").lower())
    plan = _plan(rules, task, furniture, objects, places, wanted, target)
    return Room(task, wanted, target, sentence, furniture, objects, places, lamp, plan)


def _name(kind: str, number: int) -> str:
    """Returns a name as ALFWorld reads them: it says sinkbasin and bathtubbasin of what has `basin` in it."""
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin')}_bar_{number}_bar_basin"
    return f"{kind}_bar_{number}_bar_0"


def _plan(
    rules: Rules,
    task: str,
    furniture: Mapping[str, str],
    objects: Mapping[str, str],
    places: Mapping[str, str],
    wanted: str,
    target: str,
) -> tuple[str, ...]:
    """Returns what to do, from the middle of the room on."""
    actions: list[str] = []
    opened: set[str] = set()

    def go_to(name: str, inside: bool = True) -> None:
        actions.append(f"go to {{{name}}}")
        if inside and furniture[name] in rules.openable and name not in opened:
            opened.add(name)
            actions.append(f"open {{{name}}}")

    def first(kind: str) -> str:
        return next(name for name, of in furniture.items() if of == kind)

    for name in [one for one, kind in objects.items() if kind == wanted]:
        go_to(places[name])
        actions.append(f"take {{{name}}} from {{{places[name]}}}")
        if task == "light":
            lamp = next(one for one, kind in objects.items() if kind.endswith("Lamp"))
            if places[lamp] != places[name]:
                go_to(places[lamp])
            actions.append(f"use {{{lamp}}}")
            break
        if task in TOOLS:
            tool = first(TOOLS[task])
            if tool != places[name]:
                go_to(tool, inside=False)
            actions.append(f"{task} {{{name}}} with {{{tool}}}")
        go_to(first(target))
        actions.append(f"move {{{name}}} to {{{first(target)}}}")
    return tuple(actions)


def problem_of(room: Room, rules: Rules) -> str:
    """Writes the planning problem (PDDL) of a room."""
    locations = {name: f"loc_bar_{number}" for number, name in enumerate(room.furniture)}
    start = f"loc_bar_{len(locations)}"
    kinds = sorted(set(room.objects.values()))
    facts = [f"(atLocation agent1 {start})", "(= (total-cost) 0)"]
    for name, kind in room.furniture.items():
        facts += [f"(receptacleType {name} {kind}Type)", f"(receptacleAtLocation {name} {locations[name]})"]
        facts += [f"(openable {name})"] if kind in rules.openable else []
    for kind in sorted(set(room.furniture.values())):
        facts += [f"(canContain {kind}Type {one}Type)" for one in kinds if one in rules.fits[kind]]
    for name, kind in room.objects.items():
        place = room.places[name]
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {place})"]
        facts += [f"(objectAtLocation {name} {locations[place]})"]
        facts.append(f"(toggleable {name})" if name == room.lamp else f"(pickupable {name})")
        facts += [f"({change.lower()} {name})" for change, of in rules.changes.items() if kind in of]
    things = ["agent1 - agent", *(f"{name} - object" for name in room.objects)]
    things += [f"{name} - receptacle" for name in room.furniture]
    things += [f"{place} - location" for place in (*locations.values(), start)]
    things += [f"{kind}Type - rtype" for kind in sorted(set(room.furniture.values()))]
    things += [f"{kind}Type - otype" for kind in kinds]
    goal = rules.goals[TASKS[room.task]]["pddl"].replace("#", "-")
    goal = goal.format(obj=room.wanted, recep=room.target, toggle=room.objects.get(room.lamp, ""))
    lines = ["(define (problem made)", "(:domain alfred)", f"(:objects {' '.join(things)})"]
    return "\n".join([*lines, "(:init", *facts, ")", goal])
