"""The Scorer: from a finished trajectory to one with reward, named scores and an outcome.

```
score(trajectory) ─▶ each function that applies to the prompt's source ─▶ Σ weight × score = reward
                       │ raises, NaN, wrong type: on_error      ┐ stop: RewardError
                       │ over timeout_seconds:    on_timeout    ┘ drop: outcome reward_error / reward_timeout,
                       reward NaN └─────────────────────────────────────────  retry: again, max_retries times,
                       then drop
score_group(trajectories) ─▶ the same for functions that compare a prompt's trajectories
```
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rondo.config.schema import RewardConfig
from rondo.core.errors import ConfigError, DataError, RewardError
from rondo.core.types import SCORED, StepStats, Trajectory, request_seed
from rondo.rewards.answers import final_answer
from rondo.rewards.execution import DaemonThreads, ProcessPool
from rondo.rewards.failures import FailurePolicy, ScoringError
from rondo.rewards.functions import RewardFunction, accuracy_among, load_functions
from rondo.rewards.verl import SOURCE
from rondo.system.activity import Activity
from rondo.system.border import awaited_within, contained

_THREADS = 8
_LARGEST = float(np.finfo(np.float32).max)  # rewards and scores are columns of float32
_COROUTINES = 256  # calls of a coroutine function that are in its process at one time


class Scorer:
    """Scores trajectories as they finish. One per run; used on one event loop.

    names: every score's name, fixed from the start: a function's own name, and `name/part` for parts that it
    declares. accuracy: the one of them that says right or wrong, or None. Raises ConfigError when a function,
    an option or that score does not exist.
    """

    def __init__(self, config: RewardConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed
        self._functions = load_functions(config.functions)
        self._threads = DaemonThreads(_THREADS)
        self._pools = {f.name: _pool_of(f) for f in self._functions if self._in_process(f)}
        self._failures = FailurePolicy(config)
        self._seconds = StepStats()
        # Source -> the functions that score its trajectories.
        self._chosen = functools.cache(lambda source: tuple(f for f in self._functions if f.applies(source)))
        self.names: tuple[str, ...] = tuple(name for f in self._functions for name in f.names)
        self.accuracy = accuracy_among(self.names, config)
        self.has_group_functions: bool = any(f.marks.group for f in self._functions)

    def answer(self, trajectory: Trajectory) -> str | None:
        """Returns what a trajectory answers, for votes: as the first function reads it that scores it and
        reads answers, else as `final_answer` does.
        """
        for function in self._chosen(trajectory.prompt.source):
            if function.marks.answer is not None:
                return function.marks.answer(trajectory.text, **function.options)
        return final_answer(trajectory.text)

    def source(self, trajectory: Trajectory) -> str:
        """Returns the source that evaluation reports an answer under: where its scorer reads rows of verl's,
        the row's `data_source`.
        """
        prompt = trajectory.prompt
        theirs = [f for f in self._chosen(prompt.source) if f.marks.verl]
        return str(prompt.fields.get(SOURCE, prompt.source)) if theirs else prompt.source

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """Returns the trajectory with reward, scores and outcome; one that failed before as it is.

        With group functions the reward stays NaN until `score_group`. Raises RewardError where the policy
        says stop.
        """
        if trajectory.outcome != SCORED:
            return trajectory
        source = trajectory.prompt.source
        chosen = self._chosen(source)
        if not chosen and self._config.models:
            return trajectory.replaced(reward=0.0)  # the models' scores are added to it by the trainer
        if not chosen:
            raise RewardError(
                f"source {source!r} has no reward function; see reward.functions and their `sources`"
            )
        started = time.perf_counter()
        single = [f for f in chosen if not f.marks.group]
        try:
            (scores,) = await self._scores(single, [trajectory])
        except ScoringError as failure:
            return _failed(trajectory, failure)
        finally:
            self._seconds.add_mean("perf/reward_seconds", time.perf_counter() - started)
        reward = math.nan  # until the group functions have scored, too
        if len(single) == len(chosen):
            reward = float(sum(f.config.weight * scores[f.name] for f in chosen))
        return trajectory.replaced(scores=scores, reward=reward)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns a prompt's trajectories after `score`, with the scores of group functions and the final
        reward.

        Failed trajectories are not shown to the functions. Where a group function fails, all the others fail
        with it.
        """
        scored = [i for i, t in enumerate(trajectories) if t.outcome == SCORED]
        if not scored or not self.has_group_functions:
            return list(trajectories)
        shown = [trajectories[i] for i in scored]
        chosen = self._chosen(shown[0].prompt.source)
        out = list(trajectories)
        try:
            added = await self._scores([f for f in chosen if f.marks.group], shown)
        except ScoringError as failure:
            for i in scored:
                out[i] = _failed(trajectories[i], failure)
            return out
        for i, more in zip(scored, added, strict=True):
            out[i] = self._rewarded(trajectories[i], {**trajectories[i].scores, **more}, chosen)
        return out

    def stats(self) -> StepStats:
        """Returns counts and seconds since the last call of `stats`."""
        stats = self._seconds
        self._seconds = StepStats()
        stats.sums.update(self._failures.counts)
        self._failures.counts = dict.fromkeys(self._failures.counts, 0.0)
        return stats

    def close(self) -> None:
        """Ends the threads and processes. A thread that hangs in a reward function ends with the program."""
        self._threads.close()
        for pool in self._pools.values():
            pool.close()

    async def _scores(
        self, functions: Sequence[RewardFunction], shown: Sequence[Trajectory]
    ) -> list[dict[str, float]]:
        """Returns the functions' scores of each trajectory. If some fail, the first in order decides, not the
        fastest.
        """
        if len(functions) == 1:
            return await self._scored(functions[0], shown)
        parts = await asyncio.gather(*(self._scored(f, shown) for f in functions), return_exceptions=True)
        scores: list[dict[str, float]] = [{} for _ in shown]
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            for named, more in zip(scores, part, strict=True):
                named |= more
        return scores

    def _in_process(self, function: RewardFunction) -> bool:
        marks = function.marks
        return marks.run_in == "process" or (
            self._config.isolation == "process" and marks.run_in != "sandbox"
        )

    def _rewarded(
        self, trajectory: Trajectory, scores: Mapping[str, float], chosen: Sequence[RewardFunction]
    ) -> Trajectory:
        """Returns a trajectory with its scores, and the sum of those of the functions that apply: all but
        TRL's that returned None. Where these are all, or say right or wrong, it fails.
        """
        silent = [f for f in chosen if f.name not in scores]
        judging = [f for f in silent if self.accuracy in f.names]
        if judging or (len(silent) == len(chosen) and not self._config.models):
            function = (judging or silent)[0]
            why = "and it is what says right or wrong" if judging else "as do all that score this source"
            error = ValueError(f"it returned None, {why}: an answer must have that score")
            failure = self._failures.judge(function, trajectory, error, last=True)
            assert failure is not None
            return _failed(trajectory, failure)
        reward = float(sum(f.config.weight * scores[f.name] for f in chosen if f not in silent))
        return trajectory.replaced(scores=scores, reward=reward)

    async def _scored(self, function: RewardFunction, shown: Sequence[Trajectory]) -> list[dict[str, float]]:
        """Returns one function's scores of each trajectory. Where it fails, the policy says what follows:
        RewardError, another attempt, or ScoringError.
        """
        for attempt in range(self._config.max_retries + 1):
            try:
                with Activity(f"reward {function.name}"):
                    value = await self._call(function, shown)
                if not function.marks.group:
                    return [_named(function, value)]
                values = _one_each(value, len(shown))
                is_silent = [function.marks.trl and one is None for one in values]
                return [
                    {} if none else _named(function, one) for one, none in zip(values, is_silent, strict=True)
                ]
            except (ConfigError, RewardError):
                raise
            except DataError as error:
                raise RewardError(f"reward function {function.name}: {error}") from error
            except Exception as error:  # user code: the one boundary for whatever a reward function raises
                last = attempt == self._config.max_retries
                failure = self._failures.judge(function, shown[0], error, last=last)
                if failure is not None:
                    raise failure from error
        raise AssertionError("unreachable")

    async def _call(self, function: RewardFunction, shown: Sequence[Trajectory]) -> Any:
        """Runs a reward function where its marks say. shown: the group, or the one trajectory."""
        trajectory, options = shown[0].lent(), dict(function.options)
        chosen = function.scoring(trajectory.prompt)
        if chosen is not function:
            score = _named(chosen, await self._call(chosen, shown))[chosen.name]
            return dict.fromkeys(("reward", *function.marks.score_names), score)
        args = ([t.lent() for t in shown],) if function.marks.group else (trajectory.prompt, trajectory)
        if function.takes_seed:
            options["seed"] = request_seed(
                self._seed, function.name, trajectory.prompt.prompt_id, trajectory.sample_index
            )
        if function.handed:
            function.check_row(trajectory.prompt)
            options |= {name: trajectory.prompt.fields[name] for name in function.handed}
        timeout = self._config.timeout_seconds
        if function.name not in self._pools and self._in_process(function):  # one that was chosen
            self._pools[function.name] = _pool_of(function)
        if function.name in self._pools:
            return await self._pools[function.name].run(args, options, timeout)
        if function.is_async:
            bound = None if function.marks.run_in == "sandbox" else timeout
            return await awaited_within(function.function(*args, **options), bound)
        if function.marks.run_in == "loop":
            with contained():
                return function.function(*args, **options)
        call = functools.partial(function.function, *args, **options)
        value = await self._threads.run(call, timeout, function.name)
        return await awaited_within(value, timeout) if inspect.isawaitable(value) else value


def _pool_of(function: RewardFunction) -> ProcessPool:
    """Returns processes for a function: for a coroutine function one, which waits for many calls at once."""
    if function.is_async:
        return ProcessPool(function.importable, 1, at_once=_COROUTINES)
    processes = min(8, max(1, (os.cpu_count() or 1) // 4))
    return ProcessPool(function.importable, processes, limited=function.marks.reference is not None)


def _failed(trajectory: Trajectory, failure: ScoringError) -> Trajectory:
    return replace(trajectory, outcome=failure.outcome, reward=math.nan, scores={}, failure=failure.text)


def _one_each(values: Any, number: int) -> Sequence[Any]:
    """Checks that a group function returned one score per trajectory."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or len(values) != number:
        raise TypeError(f"it must return {number} scores, one per trajectory, got {values!r:.200}")
    return values  # type: ignore[no-any-return]


def _named(function: RewardFunction, value: Any) -> dict[str, float]:
    """Names the numbers that a function returned. A mapping's `reward` counts, or the sum of its parts."""
    parts = function.marks.score_names
    if not isinstance(value, Mapping):
        if parts:
            declared = ", ".join(parts)
            raise TypeError(
                f"it declared the scores {declared} and must return a mapping of them, got {value!r:.200}"
            )
        return {function.name: _number(value, "the returned score")}
    others = {str(name) for name in value}.difference(parts, {"reward"})
    if not set(value).issuperset(parts) or (others and not function.marks.verl):
        raise TypeError(
            f"it returned scores named {sorted(map(str, value))} and declared {sorted(parts)}; declare them: "
            "@reward_function(score_names=[…])"
        )
    numbers = {str(name): _number(part, f"score {name!r}") for name, part in value.items()}
    total = numbers["reward"] if "reward" in numbers else math.fsum(numbers.values())
    named = (*parts, *sorted(others))
    return {function.name: total} | {f"{function.name}/{part}": numbers[part] for part in named}


def _remedy(value: Any) -> str:
    if value is None:
        return "; let every path of the function return one"
    if isinstance(value, list | tuple):
        return "; a function that scores a whole group of answers is marked @reward_function(group=True)"
    return ""


def _number(value: Any, what: str) -> float:
    """Returns a Python or numpy scalar, or 0-d tensor, as a finite float. Raises TypeError or ValueError."""
    if getattr(value, "ndim", None) == 0:  # a numpy scalar, or a tensor of no dimensions
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise TypeError(
            f"{what} must be a number, got {type(value).__name__}: {value!r:.200}{_remedy(value)}"
        )
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{what} must be a finite number, got {value} (float32 ends at {_LARGEST:.1e})")
    return float(value)
