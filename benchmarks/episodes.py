"""What episodes cost beside their tokens, with an engine that answers at once: the endpoint per call, a
thousand episodes at one time, and environments that block or compute, in threads and in episode workers.

python benchmarks/episodes.py
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.agents.external import ExternalAgent
from rondo.agents.runner import EpisodeRunner
from rondo.agents.worlds import Worlds
from rondo.chat import decode, encode_prompt, stop_token_ids
from rondo.config.schema import EnvironmentConfig, FunctionConfig
from rondo.core.types import Completion, GenerateRequest, Prompt, SamplingParams
from rondo.environments import Observation, StepResult
from rondo.recipes.quickstart import tokenizer
from rondo.serving import Endpoint, Sessions
from rondo.serving.http import HttpServer
from rondo.workers.rollout import Unscored

TOKENS = 32  # of an answer
TURNS = 4  # of a conversation
CALLS, ROUNDS = 100, 20
EPISODES = 1000
TOKENIZER = tokenizer()
KEY = "benchmark"
BLOCK_SECONDS = 0.005


@dataclass
class Cost:
    """Seconds, by the clock and of this process's processors."""

    wall: float = 0.0
    own: float = 0.0


@contextmanager
def measured() -> Iterator[Cost]:
    """Fills in what is spent inside."""
    cost, began, used = Cost(), time.monotonic(), time.process_time()
    yield cost
    cost.wall = time.monotonic() - began
    cost.own = time.process_time() - used


def saying(text: str) -> Any:
    """Returns an engine that says this and ends at once."""
    ids = np.array([*TOKENIZER(text, add_special_tokens=False)["input_ids"]], np.int32)
    ids = np.append(ids, np.int32(stop_token_ids(TOKENIZER)[0]))
    log_probs, versions = np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32)

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        return Completion(request.request_id, request.token_ids, ids, log_probs, versions, "stop")

    return generate


# ---- the endpoint


def ask(port: int) -> None:
    """The client: for each line that it reads, conversations of TURNS calls on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for round_number, _ in enumerate(sys.stdin):
        used = time.process_time()
        for number in range(CALLS // TURNS):
            headers = {
                "Authorization": f"Bearer {KEY}:{round_number}-{number}",
                "Content-Type": "application/json",
            }
            messages = [{"role": "user", "content": "Tom has 3 apples and buys 4. How many has he?"}]
            for _ in range(TURNS):
                body = json.dumps({"model": "policy", "messages": messages, "return_token_ids": True})
                connection.request("POST", "/v1/chat/completions", body, headers)
                said = json.loads(connection.getresponse().read())["choices"][0]
                assert len(said["token_ids"]) == TOKENS
                messages += [said["message"], {"role": "user", "content": "Are you sure? Think again."}]
        print(time.process_time() - used, flush=True)


async def endpoint() -> None:
    """Measures calls over HTTP from another process, in which conversations grow to TURNS answers."""
    engine = saying("a" * (TOKENS - 1))
    served = Endpoint(TOKENIZER, model="policy", max_context=4096, sessions=Sessions(CALLS), generate=engine)
    server = HttpServer(served, KEY)
    url = await server.start()
    port = url.rsplit(":", 1)[1].partition("/")[0]
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "ask", port, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdin is not None
    assert client.stdout is not None
    own, whole = [], []
    for _ in range(ROUNDS):
        with measured() as cost:
            client.stdin.write(b"go on\n")
            theirs = float(await client.stdout.readline())
        own.append(1000 * cost.own / CALLS)
        whole.append(1000 * (cost.own + theirs) / CALLS)
    client.stdin.close()
    await client.wait()
    for what, each in (("the endpoint over HTTP", own), ("with its client", whole)):
        print(
            f"{what:25} {statistics.median(each):.2f} ms of processor a call, lowest {min(each):.2f}",
            flush=True,
        )
    await server.close()
    served.close()


# ---- episodes


class Trivial:
    """Ends after four steps."""

    def reset(self, seed: int, task: Any) -> Observation:
        self.count = 0
        return Observation("Go on?", ("on",))

    def step(self, action: str) -> StepResult:
        self.count += 1
        self.block()
        return StepResult(Observation("Go on?", ("on",)), 1.0, done=self.count == TURNS)

    def block(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class Waits(Trivial):
    """Sleeps in each step."""

    def block(self) -> None:
        time.sleep(BLOCK_SECONDS)


class Computes(Trivial):
    """Keeps a processor, and Python, busy in each step."""

    def block(self) -> None:
        began = time.thread_time()
        while time.thread_time() - began < BLOCK_SECONDS:
            pass


async def episodes(name: str, count: int, workers: int) -> None:
    """Plays `count` episodes at one time."""
    worlds = Worlds([EnvironmentConfig(f"{__file__}:{name}")], episode_workers=workers)
    agent = ExternalAgent(FunctionConfig("steps"), TOKENIZER, max_context=4096, worlds=worlds)
    engine, most = saying("<action>on</action>"), 0

    async def generate(request: GenerateRequest, on_tokens: Any = None) -> Completion:
        nonlocal most
        most = max(most, threading.active_count())
        return await engine(request)

    runner = EpisodeRunner(generate, Unscored(), lambda ids: decode(TOKENIZER, ids), run_seed=0, agent=agent)
    messages = ({"role": "user", "content": "Go on until the end."},)
    ids = encode_prompt(TOKENIZER, messages)
    sampling = SamplingParams(2048, stop_token_ids=stop_token_ids(TOKENIZER))
    prompts = [Prompt(i, f"b/0/{i}", "b", ids, {"seed": i}, messages) for i in range(count)]
    for some in (prompts[:8], prompts):  # the first warm up, and start the processes
        with measured() as cost:
            groups = await asyncio.gather(*(runner.run_group(each, sampling, 1) for each in some))
    assert all(made.outcome == "scored" for group in groups for made in group)
    await asyncio.to_thread(agent.close)
    where = f"{workers} episode workers" if workers else "threads"
    print(
        f"{name:10} {where:20} {cost.wall:6.2f} s, {cost.own:6.2f} s of this process's processor, "
        f"at most {most} threads in it",
        flush=True,
    )


def main() -> None:
    """Measures it all."""
    asyncio.run(endpoint())
    for name, count in (("Trivial", EPISODES), ("Waits", 200), ("Computes", 200)):
        print(f"{count} episodes of {TURNS} steps at one time")
        for workers in (0, 2, 8) if name == "Waits" else (0, 2):
            asyncio.run(episodes(name, count, workers))


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        ask(int(sys.argv[2]))
    else:
        main()
