"""The environments that ship, as the conformance suite plays them: each of the registry at least once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.environments import Environment, Observation
from rondo_worlds.alfworld_adapter import AlfWorld
from rondo_worlds.bandit import Bandit
from rondo_worlds.frozen_lake import FrozenLake
from rondo_worlds.gymnasium_adapter import Gymnasium
from rondo_worlds.minigrid_adapter import MiniGrid
from rondo_worlds.miniwob_adapter import MiniWob
from rondo_worlds.observed import Observed
from rondo_worlds.reasoning_gym_adapter import ReasoningGym
from rondo_worlds.search_qa import SearchQA
from rondo_worlds.shop import Shop
from rondo_worlds.sokoban import Sokoban
from rondo_worlds.textarena_adapter import TextArena
from rondo_worlds.textworld_adapter import TextWorld
from rondo_worlds.user import User
from rondo_worlds.verifiers_adapter import Verifiers
from tests.environments.worlds import cell

LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "text": cell}


@dataclass(frozen=True)
class Shipped:
    """One with some options."""

    make: Callable[[], Environment]
    act: Callable[[Observation, random.Random], str] | None = None
    """Chooses actions where there is no list of them."""
    seeds: int = 6
    steps: int = 30
    packages: tuple[str, ...] = ()
    """Modules beyond the extra `test`: it is played in tests/rondo_worlds/packages."""
    programs: tuple[str, ...] = ()


def number(seen: Observation, rng: random.Random) -> str:
    """Writes any number."""
    return str(rng.randrange(100))


def shop(seen: Observation, rng: random.Random) -> str:
    """Searches for a word of the instruction, and clicks on anything."""
    return rng.choice(seen.actions or [f"search[{word}]" for word in seen.text.split()])


def search(seen: Observation, rng: random.Random) -> str:
    """Searches, answers, or says what is neither."""
    return rng.choice(["search[Ana Bek]", "search[North Oak]", "search[]", "hm", "answer[Sava]"])


def talk(seen: Observation, rng: random.Random) -> str:
    """Asks."""
    return rng.choice(["Why?", "How?"])


def tells(seen: Observation, state: Any, seed: int) -> str:
    """Says what is seen, and a number."""
    return f"{seen.text} {seed}"


def user(task: Any, conversation: list[dict[str, str]], seed: int) -> str:
    """Counts the answers, and ends the fourth time."""
    return f"{len(conversation)} {seed % 7}{' [END]' * (len(conversation) > 6)}"


def move(seen: Observation, rng: random.Random) -> str:
    """Makes a move of one game or another."""
    return rng.choice(["[A B]", "[A C]", "[B C]", "[right]", "[down]", "[red]", "[blue]", "[0 1 +]", "hm"])


def coins() -> TextWorld:
    return TextWorld(challenge="tw-coin_collector", level=2)


SUMS = "tests/rondo_worlds/packages/tasksets.py:sums"
# Of each kind of mission one, and one with pictures.
MISSIONS = ["GoToLocal", "PutNextLocal", "PickupLoc", "OpenDoorsOrderN4", "UnlockPickup", "GoToSeqS5R2"]

SHIPPED: Sequence[tuple[str, Shipped]] = [
    ("alfworld", Shipped(lambda: AlfWorld(others=2), seeds=2, steps=8, packages=("alfworld",))),
    ("bandit", Shipped(Bandit)),
    ("frozen_lake", Shipped(FrozenLake)),
    ("frozen_lake", Shipped(lambda: FrozenLake(size=6, slippery=True))),
    ("gymnasium", Shipped(lambda: Gymnasium(**LAKE, is_slippery=True))),
    *(
        ("minigrid", Shipped(lambda id=id: MiniGrid(id=id), steps=12, packages=("minigrid",)))  # type: ignore[misc]
        for id in (*(f"BabyAI-{mission}-v0" for mission in MISSIONS), "MiniGrid-FourRooms-v0")
    ),
    ("minigrid", Shipped(lambda: MiniGrid(observe="both"), steps=12, packages=("minigrid",))),
    (
        "miniwob",
        Shipped(lambda: MiniWob(id="click-test"), seeds=1, packages=("miniwob",), programs=("chromium",)),
    ),
    ("reasoning_gym", Shipped(lambda: ReasoningGym(dataset="chain_sum"), act=number)),
    ("reasoning_gym", Shipped(lambda: ReasoningGym(dataset="pool_matrix", tries=1), act=number)),
    ("search_qa", Shipped(SearchQA, act=search)),
    ("shop", Shipped(Shop, act=shop)),
    ("shop", Shipped(lambda: Shop(products=30, page=3, catalogue=1), act=shop)),
    ("sokoban", Shipped(Sokoban)),
    ("sokoban", Shipped(lambda: Sokoban(size=5, boxes=2, shaping=0.1))),
    ("textarena", Shipped(lambda: TextArena(id="TowerOfHanoi-v0"), act=move, packages=("textarena",))),
    ("textarena", Shipped(lambda: TextArena(id="FrozenLake-v0"), act=move, packages=("textarena",))),
    ("textarena", Shipped(lambda: TextArena(id="Bandit-v0"), act=move, packages=("textarena",))),
    ("textarena", Shipped(lambda: TextArena(id="Countdown-v0"), act=move, packages=("textarena",))),
    ("textworld", Shipped(coins, seeds=2, packages=("textworld",))),
    ("observed", Shipped(lambda: Observed(of="bandit", by=tells))),
    ("user", Shipped(lambda: User(function=user), act=talk)),
    ("verifiers", Shipped(lambda: Verifiers(taskset=SUMS), act=number, packages=("verifiers",))),
]

# Those that want a server: the suite plays them in these files.
ELSEWHERE = {"appworld": "test_appworld.py", "openenv": "packages/test_openenv.py"}
