"""Environments, agents and a reward for episode workers."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rondo.core.types import Prompt, Trajectory
from rondo.environments import Observation, StepResult

GO = ("go",)


class Counts:
    """Counts its steps up to three; `task` says in the how manieth of them what happens."""

    def reset(self, seed: int, task: Any) -> Observation:
        self.seed, self.count = seed, 0
        self.task = dict(task or {})
        return self._seen()

    def step(self, action: str) -> StepResult:
        self.count += 1
        self._act(self.task.get(str(self.count)))
        return StepResult(self._seen(), float(self.count), done=self.count == 3, success=self.count == 3)

    def _act(self, what: Any) -> None:
        if what == "exits":
            print("no memory is left", flush=True)
            os._exit(7)
        if what == "crashes":
            ctypes.string_at(0)
        if what == "hangs":
            subprocess.Popen(["sleep", "600"])
            time.sleep(600)
        if what == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "prints":
            print("hello from Python")
            os.write(1, b"hello from C\n")
        if what == "raises":
            raise OSError("the machine is gone")

    def _seen(self) -> Observation:
        return Observation(f"{self.seed}: {self.count} of 3", GO)

    def state(self) -> dict[str, Any]:
        return {"seed": self.seed, "count": self.count}

    def close(self) -> None:
        pass


class Somewhere(Counts):
    """Says where it is. Two of its steps at a time would be seen."""

    inside = 0

    def step(self, action: str) -> StepResult:
        Somewhere.inside += 1
        self.most = Somewhere.inside
        time.sleep(0.002)
        Somewhere.inside -= 1
        return super().step(action)

    def state(self) -> dict[str, Any]:
        is_main = threading.current_thread() is threading.main_thread()
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        return {"pid": os.getpid(), "main": is_main, "devices": devices, "most": getattr(self, "most", 0)}


class Writes(Counts):
    """Makes its task easier."""

    def reset(self, seed: int, task: Any) -> Observation:
        task["goals"].clear()
        return super().reset(seed, task)


class Vectorised(Counts):
    """Makes several steps in one call, and counts the calls."""

    calls = 0

    def step(self, action: str) -> StepResult:
        Vectorised.calls += 1
        return super().step(action)

    @classmethod
    def step_many(cls, environments: Sequence[Vectorised], actions: Sequence[str]) -> list[StepResult]:
        Vectorised.calls += 1
        time.sleep(0.02)
        return [Counts.step(each, action) for each, action in zip(environments, actions, strict=True)]


class Tells(Vectorised):
    """And tells how many."""

    def state(self) -> dict[str, Any]:
        return {"calls": Vectorised.calls}


class NotThere(Counts):
    """Cannot be imported in a process of its own."""


if sys.argv[0].endswith("actor_program.py") and os.environ.get("RONDO_TEST_NOT_THERE"):
    print("there is no display", flush=True)
    os._exit(3)


def truth(prompt: Prompt, trajectory: Trajectory) -> float:
    """Reads the states of all turns: the sum of the counts after each step."""
    turns = [turn for row in trajectory.rows for turn in row.turns if turn.kind == "policy"]
    for turn, later in itertools.pairwise(turns):
        assert turn.states[-1] == later.states[0]
    return float(sum(turn.states[1]["count"] for turn in turns))


def half(answer: str, seen: Observation) -> str | None:
    """What a policy that knows nothing says, as an action or none."""
    return "go" if len(answer) % 2 else None


# ---- agents over HTTP


async def asks(messages: Any, base_url: str, api_key: str, model: str) -> str:
    """A coroutine; says where it ran, and of how many threads."""
    from tests.serving.agents import client

    create = client().with_options(base_url=base_url, api_key=api_key).chat.completions.create
    await create(model=model, messages=messages)
    return f"{os.getpid()} {threading.active_count()}"


def computes(messages: Any, base_url: str, api_key: str, model: str, *, what: str = "") -> str:
    """A plain function, which keeps its process busy."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as asked:
        asked.chat.completions.create(model=model, messages=messages)
        if what == "exits":
            print("no memory is left", flush=True)
            os._exit(7)
        if what == "hangs":
            time.sleep(600)
        if what == "raises":
            raise OSError("no such file")
        asked.chat.completions.create(model=model, messages=[*messages, {"role": "user", "content": "Sure?"}])
    return str(os.getpid())


def falls(messages: Any, base_url: str, api_key: str, model: str, fields: Any, *, folder: str) -> str:
    """Eight of them: when all have come, the fourth ends its process. The others wait for that, twice."""
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as asked:
        asked.chat.completions.create(model=model, messages=messages)
    with Path(folder, str(fields["seed"])).open("a") as visits:
        visits.write("x")
        times = visits.tell()
    if fields["seed"] == 3:
        while times < 3 and sum(path.stat().st_size >= times for path in Path(folder).iterdir()) < 8:
            time.sleep(0.01)
        os._exit(7)
    if times < 3:
        time.sleep(600)
    return "lived"
