"""Code of a run that kills a process beside it, once, at a place that it names."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from rondo.core.types import Prompt, Trajectory
from tests.trainers.scorers import even_share
from tests.waiting import engine_processes

KILL = "RONDO_TEST_KILL"  # in the environment: a file that the first call makes, which then kills


def kills_an_engine(prompt: Prompt, trajectory: Trajectory) -> float:
    """Ends an engine of this process (kill -9), once: when the first answer of the second step is there."""
    if (prompt.seq, trajectory.sample_index) == (4, 0) and not prompt.prompt_id.startswith("eval:"):
        with suppress(FileExistsError):
            Path(os.environ[KILL]).touch(exist_ok=False)
            engine_processes(os.getpid())[0].kill()
    return even_share(prompt, trajectory)


async def kills_a_server(messages: Any, policy: Any, tools: Any) -> None:
    """An agent that asks a tool between two answers. Its server is killed (kill -9) with a call on its way,
    once.
    """
    answer = await policy.chat(messages, max_tokens=4)
    call = asyncio.ensure_future(tools.call("add", {"a": len(answer.text)}))
    await asyncio.sleep(0)
    with suppress(FileExistsError):
        Path(os.environ[KILL]).touch(exist_ok=False)
        os.kill(int(Path(os.environ["ALIVE"]).read_text().split()[0]), signal.SIGKILL)
    said = {"role": "user", "content": await call}
    await policy.chat([*messages, answer.message, said], max_tokens=4)
