"""Tasksets of verifiers, made here: sums, and those that are not adapted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def messages(self, trace: vf.Trace) -> float:
        return float(len(trace.messages))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(7):
            data = SumData(
                prompt=f"What is {number} + {number}?", system_prompt="A number only.", answer=2 * number
            )
            yield SumTask(data, self.config.task)


class Endless(Sums):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        return (SumTask(SumData(prompt=f"{n}?", answer=n), self.config.task) for n in itertools.count())


class Machine(SumTask):
    async def setup(self, trace: Any, runtime: Any) -> None:
        await runtime.start()


class Shell(SumTask):
    @vf.reward
    async def ran(self, trace: Any, runtime: Any) -> float:
        return 1.0


class WithTools(SumTask):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[Any]:
        return ["a server of tools"]


class Silent(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Without rewards: an `Env` of its own would give them."""


def sums() -> Any:
    return Sums(vf.TasksetConfig())


def endless() -> Any:
    return Endless(vf.TasksetConfig())


def _of(kind: type[Any], **data: Any) -> Any:
    class Few(vf.Taskset[kind, vf.TasksetConfig]):  # type: ignore[valid-type]
        def load(self) -> Any:
            return [kind(SumData(answer=1, **data), self.config.task)]

    return Few(vf.TasksetConfig())


def machine() -> Any:
    return _of(Machine, prompt="1?")


def shell() -> Any:
    return _of(Shell, prompt="1?")


def tools() -> Any:
    return _of(WithTools, prompt="1?")


def silent() -> Any:
    return _of(Silent, prompt="1?")


def promptless() -> Any:
    return _of(SumTask)


def none() -> Any:
    return []
