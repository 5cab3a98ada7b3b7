"""Real gloo ranks for tests: processes from one preloaded fork server; four ranks start in two seconds.

    from tests.ranks import run_ranks

    def _body(rank: int, world: int, factor: float) -> float:   # a module-level function of a test file
        ...torch.distributed is initialised with gloo here...

    def test_something() -> None:
        results = run_ranks(2, _body, 3.0)                        # [result of rank 0, result of rank 1]

A rank that raises fails the test with its own traceback; a rank that hangs or dies is killed and named.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

# All that a process of any test imports. There is one fork server, and the first process that it is asked for
# decides what it has loaded: whoever wants processes asks `fork_server` for them.
PRELOAD = [
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "pytest",
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "rondo.checkpoint",
    "rondo.models.loading",
    "rondo.rollout.native",
    "rondo.tracking",
    "rondo.training",
    "rondo.weights.exchange",
    "rondo.workers",
    "tests.models.families",
    "tests.training.helpers",
    "tests.frozen",  # the last
]
ECHO_SECONDS = 2.0  # after the first failure: how long its peers' own failures are waited for
TIMEOUT_SECONDS = 240.0
# Longer than the parent waits: a rank that hangs in a collective is said to hang, never that it timed out.
COLLECTIVE_SECONDS = 600.0


class RankError(AssertionError):
    """A rank raised, died or hung; the message carries the traceback of every rank that raised."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    cards: bool = False,
) -> list[Any]:
    """Run `function(rank, world, *args)` in `world` processes over gloo; the results in rank order.

    cards: rank i has CUDA device i, and NCCL for tensors there.
    function: of a module's level; arguments and results are pickled (tensors come back as copies).
    Raises RankError. Never hangs longer than `timeout` seconds, and leaves no process.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory(prefix="rondo-ranks-") as folder:
        ranks: list[ForkServerProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_one, args=(rank, world, f"{folder}/store", sender, function, args, cards)
                )
                process.start()
                sender.close()
                ranks.append(process)
                pipes.append(receiver)
            return _collect(ranks, pipes, timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def fork_server() -> ForkServerContext:
    """Where processes come from: each starts at once, with everything imported."""
    context = multiprocessing.get_context("forkserver")
    more = os.environ.get("RONDO_TESTS_PRELOAD", "").split()
    context.set_forkserver_preload([*more, *PRELOAD])  # has an effect before the first process only
    return context


def _collect(ranks: list[ForkServerProcess], pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        waiting = [pipe for pipe in pipes if id(pipe) in open_pipes]
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = open_pipes.pop(id(pipe))
            try:
                succeeded, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join(60)
                failures[rank] = f"died without a word (exit code {ranks[rank].exitcode})"
                continue
            if succeeded:
                results[rank] = payload
            else:
                failures[rank] = payload
        if failures:
            deadline = min(deadline, time.monotonic() + ECHO_SECONDS)
    if failures:
        raise RankError(
            "\n".join(f"--- rank {rank} of {len(ranks)} ---\n{failures[rank]}" for rank in failures)
        )
    if open_pipes:
        raise RankError(f"ranks {sorted(open_pipes.values())} of {len(ranks)} not done after {timeout:.0f} s")
    return [results[rank] for rank in range(len(ranks))]


def _run_one(
    rank: int,
    world: int,
    store: str,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    cards: bool,
) -> None:
    """One rank's process: initialises gloo, runs, answers (succeeded, result or traceback) once."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        if cards:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cards else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            device_id=torch.device("cuda", rank) if cards else None,
        )
        answer = pickle.dumps((True, function(rank, world, *args)))
    except BaseException:  # whatever it was belongs into the parent's message
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)
    sender.close()
    # Who has ended its part of the last collective must not hang up on a peer that is still in it. A peer
    # that died is not waited for any longer than the parent does, who kills all.
    ends = dist.FileStore(f"{store}-ends", world)
    ends.add("ended", 1)
    while ends.add("ended", 0) < world:
        time.sleep(0.01)
    with contextlib.suppress(Exception):  # a peer that failed may be gone already
        dist.destroy_process_group()
