"""What a call of `policy.chat` costs beside the model, by the turns of its episode; how many calls a worker
answers in a second; and the memory of episodes that are all in flight.

    python benchmarks/turns.py [--turns 8,32,128,512] [--against CHECKOUT] [--repeat 3] [--in-flight 10000]

The engine answers at once, with 8 tokens; the agent's own message is 48 tokens. Episodes run as in a rollout
worker: the agent on the agents' thread, the endpoint on the worker's event loop. Counted are the CPU seconds
of the whole process, the rows included, but not what is made once. Each figure is of a process of its own,
and the cheapest of `repeat` counts. against: another checkout, whose processes alternate with this one's.
in-flight: so many episodes take their turns one after the other, and each that ends makes room for another;
printed is what the process holds (its resident memory above that of before) after each round of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rondo.agents.external import ExternalAgent
from rondo.agents.policy import Policy
from rondo.agents.runner import EpisodeRunner
from rondo.chat import decode, encode_prompt, stop_token_ids
from rondo.config.schema import FunctionConfig
from rondo.core.types import Completion, GenerateRequest, Prompt, SamplingParams
from rondo.recipes.quickstart import tokenizer
from rondo.workers.rollout import Unscored

TOKENIZER = tokenizer()
STOPS = stop_token_ids(TOKENIZER)
OBSERVED = "12345678 " * 5
CALLS = 2048  # of all episodes of a measurement, at least


async def talk(messages: list[Any], policy: Policy, *, turns: int = 8) -> str:
    """The agent: asks, and goes on behind the answer."""
    for _ in range(turns):
        answer = await policy.chat(messages)
        messages = [*messages, answer.message, {"role": "user", "content": OBSERVED}]
    return answer.text


def engine() -> Any:
    """Returns what answers at once."""
    ids = np.append(TOKENIZER("a" * 7, add_special_tokens=False)["input_ids"], STOPS[0]).astype(np.int32)
    log_probs, versions = np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32)

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        return Completion(request.request_id, request.token_ids, ids, log_probs, versions, "stop")

    return generate


def runner(turns: int, generate: Any) -> tuple[EpisodeRunner, Any]:
    """Returns what plays episodes of so many turns, and how to end it."""
    agent = ExternalAgent(
        FunctionConfig(f"{__file__}:talk", {"turns": turns}), TOKENIZER, max_context=1 << 16
    )
    read = lambda ids: decode(TOKENIZER, ids)  # noqa: E731
    return EpisodeRunner(generate, Unscored(), read, run_seed=0, agent=agent), agent.close


def prompts(count: int, first: int = 0) -> list[Prompt]:
    messages = ({"role": "user", "content": "Tom has 3 apples. Go on."},)
    ids = encode_prompt(TOKENIZER, messages)
    return [Prompt(i, f"b/0/{i}", "b", ids, {"seed": i}, messages) for i in range(first, first + count)]


SAMPLING = SamplingParams(1 << 15, stop_token_ids=STOPS)


async def cost(turns: int) -> tuple[float, float]:
    """Returns CPU milliseconds a call, and calls a second."""
    episodes = max(CALLS // turns, 4)
    runs, close = runner(turns, engine())
    await runs.run_group(prompts(1)[0], SAMPLING, 1)  # what is made once
    began, used = time.monotonic(), time.process_time()
    groups = await asyncio.gather(*(runs.run_group(one, SAMPLING, 1) for one in prompts(episodes, 1)))
    used, wall = time.process_time() - used, time.monotonic() - began
    assert all(len(made.rows) == 1 for group in groups for made in group)
    assert groups[0][0].rows[0].response_mask.sum() == 8 * turns
    await asyncio.to_thread(close)
    return 1000 * used / (episodes * turns), episodes * turns / wall


def resident() -> float:
    """Megabytes of memory that no file is behind."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


async def in_flight(episodes: int, turns: int, rounds: int) -> None:
    """Holds each answer until all episodes have asked, and prints what is held."""
    answer = engine()
    waiting: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        future = asyncio.get_running_loop().create_future()
        waiting.append((request, future))
        return await future

    runs, close = runner(turns, generate)
    number = 0
    running: set[asyncio.Task[Any]] = set()

    def begin(count: int) -> None:
        nonlocal number
        for prompt in prompts(count, number):
            running.add(asyncio.create_task(runs.run_group(prompt, SAMPLING, 1)))
        number += count

    before = resident()
    print(f"{episodes} episodes of {turns} turns in flight, begun at different turns", flush=True)
    for step in range(turns * rounds):
        begin(episodes // turns if step < turns else episodes - len(running))
        while len(waiting) < len(running):
            await asyncio.sleep(0.01)
        if step >= turns - 1 and (step + 1) % (turns // 2) == 0:
            held = resident() - before
            cells = f"turn {step + 1} | {number} begun | {held:.0f} MB | {1000 * held / episodes:.1f} kB each"
            print(f"| {cells} |", flush=True)
        asked, waiting[:] = waiting[:], []
        for request, future in asked:
            future.set_result(await answer(request))
        del asked
        while len(waiting) + sum(one.done() for one in running) < len(running):
            await asyncio.sleep(0.01)
        running -= {one for one in running if one.done()}
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.to_thread(close)


def measured(checkout: Path, turns: int) -> tuple[float, float]:
    """Measures in a process of this checkout's."""
    own = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", str(turns)]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    milliseconds, calls = json.loads(done.stdout.splitlines()[-1])
    return milliseconds, calls


def main(given: Sequence[str] | None = None) -> None:
    """Measures; tables to stdout."""
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=numbers, default=[8, 32, 128, 512])
    parser.add_argument("--against", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--in-flight", type=int, metavar="EPISODES")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.measure:
        print(json.dumps(asyncio.run(cost(options.measure))))
        return
    if options.in_flight:
        asyncio.run(in_flight(options.in_flight, options.turns[0], 4))
        return
    here = Path(__file__).parent.parent
    checkouts = [here, *([options.against.absolute()] if options.against else [])]
    print("| turns | ms a call | calls a second |" + (" there | ratio |" if options.against else ""))
    print("|---|---|---|" + ("---|---|" if options.against else ""), flush=True)
    for turns in options.turns:
        costs = [[measured(one, turns) for one in checkouts] for _ in range(options.repeat)]
        best = [min(each) for each in zip(*costs, strict=True)]  # the cheapest, with its rate
        cells = [f"{turns}", f"{best[0][0]:.2f}", f"{best[0][1]:,.0f}"]
        if options.against:
            cells += [f"{best[1][0]:.2f}", f"{best[0][0] / best[1][0]:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
