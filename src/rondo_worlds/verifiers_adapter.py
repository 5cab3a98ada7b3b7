"""Tasks of verifiers' tasksets (its v1) that are answered once: a prompt, an answer, the taskset's rewards.
Needs rondo-rl[verifiers].
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.packages import require_package


class Verifiers:
    """The tasks of a taskset, of which the seed chooses one. The answer ends the episode, and what the
    taskset's rewards say of it is the reward.

    taskset: a function `() -> Taskset`, such as `my.py:taskset`. size: takes its first tasks only; one
    without an end needs it. success: the least reward that counts as a success.
    """

    def __init__(self, *, taskset: str, size: int | None = None, success: float = 1.0) -> None:
        self._tasks = _tasks(taskset, size)
        self._success = success
        self._task: Any = None
        self._scored: dict[str, Any] = {}

    @classmethod
    def check(cls, *, taskset: str, size: int | None = None, success: float = 1.0) -> None:
        """Raises ConfigError where the package is missing, or its tasks cannot be scored here."""
        _tasks(taskset, size)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Shows a task. task: its number in the taskset; default: even seeds have tasks of even numbers, and
        odd seeds have others.
        """
        number = seed % max(len(self._tasks) // 2 * 2, 1) if task is None else int(task)
        if not 0 <= number < len(self._tasks):
            raise EnvironmentFailedError(f"verifiers: there are {len(self._tasks)} tasks, and no {number}")
        self._task = self._tasks[number]
        self._scored = {}
        data = self._task.data
        if data.prompt is None or data.image is not None:
            raise EnvironmentFailedError(
                f"verifiers: task {number} begins without a prompt, or in a container; such are not adapted"
            )
        return Observation("\n\n".join(part for part in (data.system_prompt, data.prompt_text) if part))

    def step(self, action: str) -> StepResult:
        """Scores an answer."""
        trace = _answered(self._task, action)
        asyncio.run(self._task.score(trace))
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        self._scored = {"rewards": rewards, "metrics": dict(trace.metrics)}
        reward = float(trace.reward)
        seen = Observation(f"Reward {reward:g}.")
        return StepResult(seen, reward, True, success=reward >= self._success, info=self._scored)

    def state(self) -> Mapping[str, Any]:
        """Returns the task's number, and what each of its rewards and metrics gave."""
        return {"task": self._task.data.idx, **self._scored}

    def close(self) -> None:
        """Has nothing to end."""


@functools.cache
def _tasks(taskset: str, size: int | None) -> Sequence[Any]:
    """Returns the tasks, which all episodes of this process share. Raises ConfigError."""
    require_package("verifiers")
    from verifiers.v1 import Taskset

    made = resolve_function(taskset)()
    if not isinstance(made, Taskset):
        raise ConfigError(
            f"verifiers: {taskset} returned {type(made).__name__}, and no Taskset of verifiers.v1"
        )
    if size is None and not made.bounded:
        raise ConfigError(f"verifiers: {taskset} has no end; set the option size")
    tasks = list(made if size is None else made.take(size))
    if not tasks:
        raise ConfigError(f"verifiers: {taskset} has no tasks")
    unfit = _unfit(made, tasks[0])
    if unfit:
        raise ConfigError(
            f"verifiers: the tasks of {taskset} {unfit}; only those that are answered once are adapted"
        )
    return tasks


def _unfit(taskset: Any, task: Any) -> str:
    """Says why tasks of this kind cannot be played by one answer; empty: they can."""
    from verifiers.v1 import Task

    kind = type(task)
    if kind.toolsets(task.config) or type(taskset).toolsets(taskset.config):
        return "have tools"
    if kind.NEEDS_CONTAINER or kind.setup is not Task.setup or kind.finalize is not Task.finalize:
        return "need a machine of their own"
    scorers = task.hooks("reward")
    if not scorers and not task.plugged_judges():
        return "have no rewards of their own"
    for scorer in (*scorers, *task.hooks("metric")):
        runtime = inspect.signature(scorer).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"are scored on a machine of their own ({scorer.__name__})"
    return ""


def _answered(task: Any, answer: str) -> Any:
    """Returns the trace of an episode of one answer."""
    from verifiers.v1 import AgentConfig, AgentInfo, MessageNode, Trace, TraceTask
    from verifiers.v1.state import state_cls
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    data = task.data
    messages: list[Any] = [] if data.system_prompt is None else [SystemMessage(content=data.system_prompt)]
    messages += [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
    messages.append(AssistantMessage(content=answer))
    last = len(messages) - 1
    return Trace(
        task=TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=AgentConfig()),
        state=state_cls(type(task))(),
        nodes=[
            MessageNode(parent=place - 1 if place else None, message=message, sampled=place == last)
            for place, message in enumerate(messages)
        ],
    )
