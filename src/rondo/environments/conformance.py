"""Whether an environment keeps its promises: for the tests of its author."""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rondo.core.errors import EnvironmentFailedError
from rondo.environments.protocol import Environment, Observation, StepResult
from rondo.environments.registry import check_protocol

Act = Callable[[Observation, random.Random], str]


def check_environment(
    make: Callable[[], Environment],
    *,
    seeds: Sequence[int] = (0, 1),
    task: Any = None,
    act: Act | None = None,
    steps: int = 30,
) -> None:
    """Plays a few episodes, and raises EnvironmentFailedError for the first promise that is not kept.

    The same seed gives the same observation and, under the same actions, the same episode, in a new instance
    and in one that has played before; nothing is printed; Python's and numpy's global random streams stay
    untouched; no observation is empty; rewards are finite; `step_many`, where there is one, does as `step`;
    `close` leaves no process and can be called twice. act: chooses an action; default: one of the admissible
    ones.
    """
    act = act or _any_action
    check_protocol(type(make()), "check_environment")
    with _untouched_streams(), _nothing_printed(), _no_process_left():
        used = make()
        alone: list[list[Any]] = []
        try:
            for seed in seeds:
                fresh = make()
                first = _played(fresh, seed, task, act, steps)
                alone.append(first)
                fresh.close()
                fresh.close()  # a second time does nothing
                _same(first, _played(used, seed, task, act, steps), f"seed {seed}: a second episode")
                _same(first, _played(used, seed, task, act, steps), f"seed {seed}: the same instance")
        finally:
            used.close()
        if hasattr(used, "step_many"):
            together = _played_together([make() for _ in seeds], seeds, task, act, steps)
            for seed, one, other in zip(seeds, alone, together, strict=True):
                _same(one, other, f"seed {seed}: the episode by step_many")


def check_observation(seen: Any) -> Observation:
    """Returns what `reset` and `step` may show. Raises EnvironmentFailedError."""
    if not isinstance(seen, Observation):
        raise EnvironmentFailedError(f"an observation is an Observation, not {type(seen).__name__}")
    picture = seen.image
    if picture is None and not seen.text.strip():
        raise EnvironmentFailedError("the observation is empty: there is nothing for the policy to read")
    if picture is not None and not _is_picture(picture):
        what = (
            f"an array {list(picture.shape)} of {picture.dtype}"
            if isinstance(picture, np.ndarray)
            else f"a {type(picture).__name__}"
        )
        raise EnvironmentFailedError(f"the picture of an observation is {what}, not [H, W, 3] uint8")
    return seen


def _is_picture(given: Any) -> bool:
    return (
        isinstance(given, np.ndarray)
        and given.dtype == np.uint8
        and given.ndim == 3
        and given.shape[2] == 3
        and given.size > 0
    )


def check_result(result: Any) -> StepResult:
    """Returns what `step` may return. Raises EnvironmentFailedError."""
    if not isinstance(result, StepResult):
        raise EnvironmentFailedError(f"step returns a StepResult, not {type(result).__name__}")
    if not isinstance(result.reward, int | float | np.number) or not math.isfinite(result.reward):
        raise EnvironmentFailedError(f"the reward of a step is a finite number, not {result.reward!r}")
    check_observation(result.observation)
    return result


def check_results(results: Any, num_environments: int) -> list[StepResult]:
    """Returns what `step_many` may return. Raises EnvironmentFailedError."""
    if not isinstance(results, list) or len(results) != num_environments:
        raise EnvironmentFailedError(f"step_many returns a list of {num_environments} results, one each")
    return [check_result(result) for result in results]


def _any_action(seen: Observation, rng: random.Random) -> str:
    if not seen.actions:
        raise EnvironmentFailedError(
            "there are no admissible actions to choose from; give check_environment act="
        )
    return rng.choice(seen.actions)


def _played(world: Environment, seed: int, task: Any, act: Act, steps: int) -> list[Any]:
    """Returns all that was to be seen of an episode. The actions follow from the seed."""
    rng = random.Random(f"actions {seed}")
    with _about(f"seed {seed}, reset"):
        seen = check_observation(world.reset(seed, task))
        story: list[Any] = [[_shown(seen), world.state()]]
    for step in range(1, steps + 1):
        with _about(f"seed {seed}, step {step}"):
            action = act(seen, rng)
            result = check_result(world.step(action))
            seen = result.observation
            story.append(_happened(action, result, world))
        if result.done or result.truncated:
            break
    return story


def _played_together(
    worlds: Sequence[Any], seeds: Sequence[int], task: Any, act: Act, steps: int
) -> list[list[Any]]:
    """Does as `_played` for one episode of each seed, side by side."""
    rngs = [random.Random(f"actions {seed}") for seed in seeds]
    with _about("step_many"):
        seen = [check_observation(world.reset(seed, task)) for world, seed in zip(worlds, seeds, strict=True)]
        stories = [[[_shown(first), world.state()]] for first, world in zip(seen, worlds, strict=True)]
        playing = list(range(len(worlds)))
        for _ in range(steps):
            actions = [act(seen[i], rngs[i]) for i in playing]
            chosen = [worlds[i] for i in playing]
            results = check_results(type(chosen[0]).step_many(chosen, actions), len(chosen))
            for i, action, result in zip(playing, actions, results, strict=True):
                seen[i] = result.observation
                stories[i].append(_happened(action, result, worlds[i]))
            ended = [result.done or result.truncated for result in results]
            playing = [i for i, end in zip(playing, ended, strict=True) if not end]
            if not playing:
                break
    for world in worlds:
        world.close()
    return stories


def _happened(action: str, result: StepResult, world: Environment) -> list[Any]:
    ends = (result.done, result.truncated, result.success, result.invalid)
    return [action, _shown(result.observation), result.reward, ends, world.state()]


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Says where in an episode something is wrong."""
    try:
        yield
    except EnvironmentFailedError as error:
        raise EnvironmentFailedError(f"{where}: {error}") from error
    except Exception as error:
        error.add_note(f"check_environment: {where}")
        raise


def _shown(seen: Observation) -> list[Any]:
    image = None if seen.image is None else (seen.image.shape, seen.image.tobytes())
    return [seen.text, seen.actions, seen.anchor, image]


def _same(first: list[Any], other: list[Any], what: str) -> None:
    for number, (one, two) in enumerate(zip(first, other, strict=False)):
        if one != two:
            raise EnvironmentFailedError(
                f"{what} is another from step {number} on (0: reset): {one!r:.300} and {two!r:.300}"
            )
    if len(first) != len(other):
        raise EnvironmentFailedError(f"{what} is of another length: {len(first)} and {len(other)}")


@contextmanager
def _untouched_streams() -> Iterator[None]:
    before = random.getstate(), np.random.get_state()
    try:
        yield
    except EnvironmentFailedError:  # perhaps because of that
        _check_streams(before)
        raise
    _check_streams(before)


def _check_streams(before: tuple[Any, Any]) -> None:
    if random.getstate() != before[0]:
        raise EnvironmentFailedError("Python's global random stream was used: draw from a random.Random")
    for one, two in zip(before[1], np.random.get_state(), strict=True):
        if not np.array_equal(one, two):
            raise EnvironmentFailedError("numpy's global random stream was used: draw from a Generator")


@contextmanager
def _nothing_printed() -> Iterator[None]:
    """Looks at the file descriptor, so that what children and C code write is found, too."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 1)
        stdout, sys.stdout = sys.stdout, open(1, "w", encoding="utf-8", closefd=False)
        try:
            yield
            sys.stdout.flush()
        finally:
            sys.stdout = stdout
            os.dup2(kept, 1)
            os.close(kept)
        written.seek(0)
        said = written.read(200)
    if said:
        raise EnvironmentFailedError(f"it printed {said!r}, and standard output is the run's")


@contextmanager
def _no_process_left() -> Iterator[None]:
    before = _children()
    yield
    left = _children() - before
    if left:
        raise EnvironmentFailedError(f"after close() there are processes that it started: {sorted(left)}")


def _children() -> set[int]:
    """Returns the processes that threads of this one have started; empty where there is no /proc."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(child) for one in lists for child in one.read_text().split()}
