"""Environments, a loop, and functions of a loop, as a user writes them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, ClassVar

import numpy as np

from rondo.agents.memory import View
from rondo.environments import Observation, StepResult
from tests.agents import calling

GO = ("go",)


class Breaks:
    """Does so in its second step, or before."""

    def __init__(self, *, what: str) -> None:
        self.what = what
        self.steps = 0

    def reset(self, seed: int, task: Any) -> Observation:
        if self.what == "starts":
            raise OSError("no such machine")
        if self.what == "picture":
            return Observation("a picture", image=np.zeros((2, 2), np.float32))
        return Observation("" if self.what == "empty" else "here", GO)

    def step(self, action: str) -> Any:
        self.steps += 1
        if self.steps == 2:
            if self.what == "dies":
                raise OSError("the machine is gone")
            if self.what == "exits":
                raise SystemExit(1)
            if self.what == "hangs":
                time.sleep(1.0)
            if self.what == "nothing":
                return None
        return StepResult(Observation("there", GO), 1.0)

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Moody(Breaks):
    """Begins otherwise each time."""

    times = 0

    def __init__(self) -> None:
        super().__init__(what="nothing of the kind")

    def reset(self, seed: int, task: Any) -> Observation:
        Moody.times += 1
        return Observation(f"mood {Moody.times}", GO)


class Meets(Breaks):
    """Its step ends when so many are in it, or none is to come any more."""

    together: threading.Barrier
    lock = threading.Lock()
    number = inside = most = waited = 0

    def __init__(self) -> None:
        super().__init__(what="nothing of the kind")

    @classmethod
    def begin(cls, number: int) -> None:
        cls.together = threading.Barrier(number)
        cls.inside = cls.most = cls.waited = 0
        cls.number = number

    def step(self, action: str) -> StepResult:
        with Meets.lock:
            Meets.inside += 1
            Meets.most = max(Meets.most, Meets.inside)
            Meets.waited += 1
            first = Meets.waited <= Meets.number
        if first:
            Meets.together.wait(timeout=60)
        with Meets.lock:
            Meets.inside -= 1
        return StepResult(Observation("there", GO), 1.0)


class Counted(Breaks):
    """Notes how many are between reset and close. An odd seed does not begin."""

    open = most = 0

    def __init__(self) -> None:
        super().__init__(what="nothing of the kind")
        self.is_open = False

    def reset(self, seed: int, task: Any) -> Observation:
        with Meets.lock:
            self.is_open = True
            Counted.open += 1
            Counted.most = max(Counted.most, Counted.open)
        if seed % 2:
            raise OSError("no such machine")
        return super().reset(seed, task)

    def close(self) -> None:
        with Meets.lock:
            Counted.open -= self.is_open
            self.is_open = False


ROOMS = (
    "a kitchen with a red kettle",
    "a cellar with green bottles",
    "a garden with old trees",
    "a kitchen with a blue kettle",
)


class Rooms(Breaks):
    """One after the other; worth 1, 2, 4, …"""

    def __init__(self) -> None:
        super().__init__(what="nothing of the kind")

    def reset(self, seed: int, task: Any) -> Observation:
        self.steps = 0
        return Observation(ROOMS[0], GO)

    def step(self, action: str) -> StepResult:
        self.steps += 1
        return StepResult(Observation(ROOMS[self.steps % len(ROOMS)], GO), 2.0 ** (self.steps - 1))


SIZES = ((32, 32), (32, 48), (64, 32), (32, 32))


class Drawn(Rooms):
    """Shows each room as a picture of a colour of its own, and a size; and says in words what `says` has."""

    def __init__(self, *, says: str = "", sizes: Any = SIZES) -> None:
        super().__init__()
        self.says = says
        self.sizes = sizes

    def reset(self, seed: int, task: Any) -> Observation:
        super().reset(seed, task)
        return self.drawn()

    def step(self, action: str) -> StepResult:
        reward = super().step(action).reward
        return StepResult(self.drawn(), reward)

    def drawn(self) -> Observation:
        room = self.steps % len(ROOMS)
        picture = np.full((*self.sizes[room], 3), 40 * room + 30, np.uint8)
        return Observation(self.says, GO, image=picture)


class DrawnKept(Drawn):
    """Can be put into a state."""

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, state: Any) -> None:
        self.steps = state["steps"]


class Waits(Rooms):
    """Waits in a step for what tools wait for, of the prompt whose row has twice its number as a seed."""

    def reset(self, seed: int, task: Any) -> Observation:
        self.seq = seed // 2
        return super().reset(seed, task)

    def step(self, action: str) -> StepResult:
        asyncio.run(calling.before_a_result(self.seq))
        return super().step(action)


class Held(Rooms):
    """Its steps wait until they are let go."""

    opened = threading.Event()
    waiting: ClassVar[set[int]] = set()

    def step(self, action: str) -> StepResult:
        Held.waiting.add(id(self))
        Held.opened.wait(timeout=240)
        return super().step(action)


class Newest:
    """A memory of a user's own: the last step, backwards."""

    def __init__(self, *, times: int) -> None:
        self.times = times
        self.last: Any = None

    def append(self, acted: Any) -> None:
        self.last = acted

    async def view(self, budget: int, seen: Observation, ask: Any) -> View:
        return View((self.last,) * self.times if self.last else (), "mine")


class Rambles(Newest):
    """Asks for more than fits, once there is something to ask about."""

    def __init__(self) -> None:
        super().__init__(times=1)

    async def view(self, budget: int, seen: Observation, ask: Any) -> View:
        return View((), await ask("and so on " * 4000) if self.last else "")


async def thinks_first(messages: Any, policy: Any, environment: Any) -> str:
    """Two calls to a step; where an answer says twice, two steps to a call."""
    seen = await environment.reset()
    for _ in range(2):
        said = [{"role": "user", "content": f"Think. {seen.text}"}]
        thought = await policy.chat(said)
        acts = [*said, thought.message, {"role": "user", "content": "Act."}]
        answer = await policy.chat(acts)
        for _ in range(2 if "twice" in answer.text else 1):
            seen = (await environment.step("up" if "up" in answer.text else "left")).observation
    return str(answer.text)


async def takes_both(messages: Any, policy: Any, tools: Any, environment: Any) -> None:
    """Is never run."""


def short_prompt(task: str, memory: Any, seen: Observation) -> str:
    return f"{task} {seen.text}"


def first_word(answer: str, seen: Observation) -> str | None:
    return next((action for action in seen.actions if answer.startswith(action)), None)


def by_length(answer: str, seen: Observation) -> str | None:
    """What a policy that knows nothing says, as a move: each with the same odds, and as often none."""
    return (*seen.actions, None)[len(answer) % (len(seen.actions) + 1)]


def as_many_as_words(answer: str, seen: Observation) -> list[str]:
    return ["go"] * len(answer.split())


def one_row(row: Any) -> list[Any]:
    return [row]


def goes(answer: str, seen: Observation) -> str:
    return "go"
