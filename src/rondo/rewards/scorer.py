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
import inspect
import logging
import math
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rondo.config.functions import did_you_mean
from rondo.config.schema import RewardConfig
from rondo.errors import ConfigError, DataError, RewardError, users_frames
from rondo.rewards.builtin import BUILTINS
from rondo.rewards.execution import DaemonThreads, ProcessPool, ScorerCrashError
from rondo.rewards.functions import RewardFunction, load_functions
from rondo.types import SCORED, Outcome, StepStats, Trajectory, request_seed

logger = logging.getLogger(__name__)

_THREADS = 8
_LOGGED_FAILURES = 3  # of one kind
_LOGGED_CHARACTERS = 2000


class _ScoringError(Exception):
    """A scorer failed for good and the policy does not stop the run."""

    def __init__(self, outcome: Outcome, text: str) -> None:
        super().__init__(text)
        self.outcome: Outcome = outcome
        self.text = text


class Scorer:
    """Scores trajectories as they finish. One per run; used on one event loop.

    names: every score's name, fixed from the start: a function's own name, and `name/part` for parts that it
    declares. accuracy: the one of them that says right or wrong, or None. Raises ConfigError when a function,
    an option or that score does not exist.
    """

    def __init__(self, config: RewardConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed
        self._functions = load_functions(config.functions, BUILTINS)
        self._threads = DaemonThreads(_THREADS)
        processes = min(8, max(1, (os.cpu_count() or 1) // 4))
        self._pools = {
            f.name: ProcessPool(f.spec, processes) for f in self._functions if f.run_in == "process"
        }
        self._stats = _new_stats()
        self._logged: dict[tuple[str, str], int] = {}
        self.names: tuple[str, ...] = tuple(name for f in self._functions for name in f.names)
        self.accuracy = _accuracy(config, self.names)
        self.has_group_functions: bool = any(f.group for f in self._functions)

    def check_sources(self, names: Sequence[str], *, reads_accuracy: bool = False) -> None:
        """ConfigError when a function is for a source that does not exist, or a source has no function.

        reads_accuracy: somebody reads whether an answer is right, so every source must have the score
        that says so.
        """
        for function in self._functions:
            for source in function.sources or ():
                if source not in names:
                    raise ConfigError(
                        f"reward function {function.name}: there is no source "
                        f"{source!r}{did_you_mean(source, names)} "
                        f"Sources: {', '.join(names)}"
                    )
            if reads_accuracy and self.accuracy in function.names:
                for name in names:
                    if not function.applies(name):
                        raise ConfigError(
                            f"the configured algorithm reads whether an answer is right, and the score that "
                            f"says so, reward.accuracy={self.accuracy}, is no score of source {name!r}: add "
                            f"it to the `sources` of {function.name}, or name another score"
                        )
        for name in names:
            if not self._config.models and not any(f.applies(name) for f in self._functions):
                raise ConfigError(
                    f"source {name!r} has no reward function: add one, or add it to a function's sources"
                )

    async def score(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with reward, scores and outcome. One that failed before is returned as it is.

        With group functions the reward stays NaN until `score_group`. Raises RewardError where the policy
        says stop.
        """
        if trajectory.outcome != SCORED:
            return trajectory
        source = trajectory.prompt.source
        chosen = [f for f in self._functions if f.applies(source)]
        if not chosen and self._config.models:
            return replace(trajectory, reward=0.0)  # the models' scores are added to it by the trainer
        if not chosen:
            raise RewardError(
                f"source {source!r} has no reward function; see reward.functions and their `sources`"
            )
        started = time.perf_counter()
        single = [f for f in chosen if not f.group]
        try:
            parts = await _all([self._scored(f, trajectory) for f in single])
        except _ScoringError as failure:
            return _failed(trajectory, failure)
        finally:
            self._stats.add_mean("perf/reward_seconds", time.perf_counter() - started)
        scores = {name: value for part in parts for name, value in part.items()}
        pending = len(single) < len(chosen)
        return replace(trajectory, scores=scores, reward=math.nan if pending else _reward(chosen, scores))

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """A prompt's trajectories after `score`, with the scores of group functions and the final reward.

        Failed trajectories are not shown to the functions. Where a group function fails, all the others fail
        with it.
        """
        scored = [i for i, t in enumerate(trajectories) if t.outcome == SCORED]
        if not scored or not self.has_group_functions:
            return list(trajectories)
        shown = [trajectories[i] for i in scored]
        chosen = [f for f in self._functions if f.applies(shown[0].prompt.source)]
        out = list(trajectories)
        try:
            parts = await _all([self._scored_group(f, shown) for f in chosen if f.group])
        except _ScoringError as failure:
            for i in scored:
                out[i] = _failed(trajectories[i], failure)
            return out
        for at, i in enumerate(scored):
            scores = dict(trajectories[i].scores)
            for part in parts:
                scores |= part[at]
            out[i] = replace(trajectories[i], scores=scores, reward=_reward(chosen, scores))
        return out

    def stats(self) -> StepStats:
        """Counts and seconds since the last call of `stats`."""
        stats, self._stats = self._stats, _new_stats()
        return stats

    def close(self) -> None:
        """End the threads and processes. A thread that hangs in a reward function ends with the program."""
        self._threads.close()
        for pool in self._pools.values():
            pool.close()

    async def _scored(self, function: RewardFunction, trajectory: Trajectory) -> dict[str, float]:
        def checked(value: Any) -> dict[str, float]:
            return _scores(function, value)

        return await self._with_policy(function, (trajectory.prompt, trajectory), trajectory, checked)

    async def _scored_group(
        self, function: RewardFunction, group: Sequence[Trajectory]
    ) -> list[dict[str, float]]:
        def checked(values: Any) -> list[dict[str, float]]:
            if (
                isinstance(values, str | Mapping)
                or not hasattr(values, "__len__")
                or len(values) != len(group)
            ):
                raise TypeError(
                    f"it must return {len(group)} scores, one per trajectory, got {values!r:.200}"
                )
            return [_scores(function, value) for value in values]

        return await self._with_policy(function, (list(group),), group[0], checked)

    async def _with_policy(
        self,
        function: RewardFunction,
        args: tuple[Any, ...],
        trajectory: Trajectory,
        checked: Callable[[Any], Any],
    ) -> Any:
        """The checked value; otherwise what the policy says: RewardError, another attempt, or
        _ScoringError.
        """
        for attempt in range(self._config.max_retries + 1):
            try:
                return checked(await self._call(function, args, trajectory))
            except (ConfigError, RewardError):
                raise
            except DataError as error:
                raise RewardError(f"reward function {function.name}: {error}") from error
            except Exception as error:  # user code: the one boundary for whatever a reward function raises
                failure, policy, detail = self._judged(function, error)
                if policy == "stop":
                    raise RewardError(_stop_message(function, trajectory, failure, detail)) from error
                self._log(function, trajectory, failure, detail)
                if policy == "drop" or attempt == self._config.max_retries:
                    raise failure from error
                self._stats.add_sum("reward/retries", 1)
        raise AssertionError("unreachable")

    def _judged(self, function: RewardFunction, error: Exception) -> tuple[_ScoringError, str, str]:
        """The typed failure, the policy for it, and its traceback. A TimeoutError of the function's own is
        one, too.
        """
        if isinstance(error, TimeoutError):
            self._stats.add_sum("reward/timeouts", 1)
            text = str(error) or f"no score after {self._config.timeout_seconds} s (reward.timeout_seconds)"
            return _ScoringError("reward_timeout", f"{function.name}: {text}"), self._config.on_timeout, ""
        self._stats.add_sum("reward/errors", 1)
        crashed = isinstance(error, ScorerCrashError)
        detail = str(error) if crashed else _users_part(error)
        text = detail.strip().rsplit("\n", 1)[-1]
        return _ScoringError("reward_error", f"{function.name}: {text}"), self._config.on_error, detail

    def _log(
        self, function: RewardFunction, trajectory: Trajectory, failure: _ScoringError, detail: str
    ) -> None:
        """The first failures of a kind in full, the others only counted (reward/errors, reward/timeouts)."""
        kind = (function.name, failure.text)
        self._logged[kind] = self._logged.get(kind, 0) + 1
        if self._logged[kind] <= _LOGGED_FAILURES:
            _log(function, trajectory, failure, detail)
            if self._logged[kind] == _LOGGED_FAILURES:
                logger.error("further failures of this kind are counted and not shown: %s", failure.text)

    async def _call(self, function: RewardFunction, args: tuple[Any, ...], trajectory: Trajectory) -> Any:
        options = dict(function.options)
        if function.takes_seed:
            options["seed"] = request_seed(
                self._seed, function.name, trajectory.prompt.prompt_id, trajectory.sample_index
            )
        timeout = self._config.timeout_seconds
        if function.run_in == "process":
            return await self._pools[function.name].run(args, options, timeout)
        if function.is_async:
            return await asyncio.wait_for(function.function(*args, **options), timeout)
        if function.run_in == "loop":
            return function.function(*args, **options)
        value = await self._threads.run(lambda: function.function(*args, **options), timeout)
        return await asyncio.wait_for(value, timeout) if inspect.isawaitable(value) else value


def accuracy_score(reward: RewardConfig) -> str | None:
    """The score that says whether an answer is right (> 0): the name in `reward.accuracy`, else the only
    score there is; None when there are several, or none.

    Raises ConfigError for a name that is no score of a reward function.
    """
    functions = load_functions(reward.functions, BUILTINS) if reward.functions else ()
    return _accuracy(reward, [name for function in functions for name in function.names])


def _accuracy(reward: RewardConfig, names: Sequence[str]) -> str | None:
    wanted = reward.accuracy
    if wanted is None:
        return names[0] if len(names) == 1 else None
    if wanted not in names:
        model = any(model.name == wanted for model in reward.models)
        why = (
            " It is a reward model's, and an answer is right or wrong before the models see it."
            if model
            else ""
        )
        raise ConfigError(
            f"reward.accuracy={wanted} is no score of a reward function{did_you_mean(wanted, names)}{why} "
            f"Scores: {', '.join(names) or 'none'}"
        )
    return wanted


async def _all(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """All results; if some fail, the first in order decides, whichever was faster."""
    if len(calls) == 1:
        return [await calls[0]]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _new_stats() -> StepStats:
    return StepStats(sums={"reward/errors": 0.0, "reward/timeouts": 0.0, "reward/retries": 0.0})


def _reward(functions: Sequence[RewardFunction], scores: Mapping[str, float]) -> float:
    return float(sum(function.weight * scores[function.name] for function in functions))


def _failed(trajectory: Trajectory, failure: _ScoringError) -> Trajectory:
    return replace(trajectory, outcome=failure.outcome, reward=math.nan, scores={}, failure=failure.text)


def _scores(function: RewardFunction, value: Any) -> dict[str, float]:
    """What a function returned, as named numbers. A mapping's `reward` counts, or the sum of its parts."""
    if not isinstance(value, Mapping):
        if function.parts:
            raise TypeError(
                f"it declared the scores {', '.join(function.parts)} and must return a mapping of them, got "
                f"{value!r:.200}"
            )
        return {function.name: _number(value, "the returned score")}
    names, declared = set(value), set(function.parts)
    if names not in (declared, declared | {"reward"}):
        raise TypeError(
            f"it returned scores named {sorted(map(str, names))} and declared {sorted(declared)}; declare "
            "them: "
            "@reward_function(score_names=[…])"
        )
    parts = {str(name): _number(part, f"score {name!r}") for name, part in value.items()}
    total = parts["reward"] if "reward" in parts else math.fsum(parts.values())
    return {function.name: total} | {f"{function.name}/{part}": parts[part] for part in function.parts}


def _number(value: Any, what: str) -> float:
    """A finite number (Python, numpy scalar, 0-d tensor) as float; TypeError or ValueError otherwise."""
    if getattr(value, "ndim", None) == 0:  # a numpy scalar, or a tensor of no dimensions
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise TypeError(f"{what} must be a number, got {type(value).__name__}: {value!r:.200}")
    if not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value}")
    return float(value)


def _users_part(error: Exception) -> str:
    """The traceback from the first frame that is not rondo's or asyncio's own; of our checks, the message
    only.
    """
    ours = ("asyncio", "concurrent/futures", "/threading.py")
    theirs = [f for f in users_frames(error) if not any(part in f.filename for part in ours)]
    shown = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)] if theirs else []
    return "".join([*shown, *traceback.format_exception_only(error)])


def _log(function: RewardFunction, trajectory: Trajectory, failure: _ScoringError, detail: str) -> None:
    logger.error(
        "reward function %s failed (%s) on prompt %s, trajectory %s: %s\nresponse: %.*r\n%s",
        function.name,
        failure.outcome,
        trajectory.prompt.prompt_id,
        trajectory.trajectory_id,
        failure.text,
        _LOGGED_CHARACTERS,
        trajectory.text,
        detail,
    )


def _stop_message(
    function: RewardFunction, trajectory: Trajectory, failure: _ScoringError, detail: str
) -> str:
    key = "on_timeout" if failure.outcome == "reward_timeout" else "on_error"
    return (
        f"reward function {failure.text} (prompt {trajectory.prompt.prompt_id}, trajectory "
        f"{trajectory.trajectory_id}, "
        f"response {trajectory.text[:200]!r}). Fix {function.spec}, or set reward.{key} to drop or "
        f"retry\n{detail}"
    ).rstrip()


def check_dropped_share(failures: Sequence[str], step_size: int, max_share: float) -> None:
    """RewardError when more trajectories failed since the last step than `max_share` of a step's.

    failures: their outcomes, those of groups that were dropped included. step_size: trajectories per step.
    """
    if len(failures) > max_share * step_size:
        kinds = ", ".join(f"{failures.count(kind)} {kind}" for kind in sorted(set(failures)))
        remedies = {
            "Fix the agent (rollout.agent), raise rollout.deadline_seconds, or see what engines died of"
            if kind == "rollout_error"
            else "Fix the reward function, or raise reward.timeout_seconds"
            for kind in failures
        }
        raise RewardError(
            f"{len(failures)} trajectories failed ({kinds}) for one step of {step_size}, more than "
            f"reward.max_dropped_share={max_share}; the log has samples. {'. '.join(sorted(remedies))}"
        )
