"""Scorers for tests: one that learns quickly, and broken ones."""

from __future__ import annotations

import asyncio
import os

from rondo.core.types import Prompt, Trajectory


def even_share(prompt: Prompt, trajectory: Trajectory) -> float:
    """Share of tokens with an even id: every policy can raise it."""
    return float((trajectory.response_ids % 2 == 0).mean())


def first_is_even(prompt: Prompt, trajectory: Trajectory) -> float:
    """Right or wrong: whether the first token's id is even."""
    return float(trajectory.response_ids[0] % 2 == 0)


def raises(prompt: Prompt, trajectory: Trajectory) -> float:
    if trajectory.sample_index == 1:
        raise KeyError("no answer column")
    return even_share(prompt, trajectory)


async def hangs(prompt: Prompt, trajectory: Trajectory) -> float:
    """For one sample; the others have their score at once, so that no time limit is too short for them."""
    if trajectory.sample_index == 1:
        await asyncio.sleep(3600)
    return even_share(prompt, trajectory)


HOLD = "RONDO_TEST_HOLD"  # in the environment: the prompts, by number, that `held` gives no score ("8:16")


async def held(prompt: Prompt, trajectory: Trajectory) -> float:
    """Keeps a run where a test wants it: until it is killed, interrupted, or the variable is gone."""
    while HOLD in os.environ and not prompt.prompt_id.startswith("eval:"):
        first, end = map(int, os.environ[HOLD].split(":"))
        if not first <= prompt.seq < end:
            break
        await asyncio.sleep(0.01)
    return even_share(prompt, trajectory)


async def held_first(prompt: Prompt, trajectory: Trajectory) -> float:
    await held(prompt, trajectory)
    return first_is_even(prompt, trajectory)


def not_a_number(prompt: Prompt, trajectory: Trajectory) -> float:
    return float("nan")


def a_string(prompt: Prompt, trajectory: Trajectory) -> str:
    return "1.0"


async def never(prompt: Prompt, trajectory: Trajectory) -> float:
    await asyncio.sleep(3600)
    return 0.0


def always_raises(prompt: Prompt, trajectory: Trajectory) -> float:
    raise KeyError("service down")


def speaks(prompt: Prompt, trajectory: Trajectory) -> float:
    print(f"scoring {prompt.prompt_id}")
    return even_share(prompt, trajectory)
