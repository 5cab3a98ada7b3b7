"""What writing a checkpoint and going on from it costs: one role's weights and moments through the run's own
`Checkpoints`, on the ranks of one machine.

    python benchmarks/checkpoint.py [--megabytes 500] [--ranks 1] [--repeat 3] [--folder FOLDER]

`save` is from the snapshot in memory to the renamed folder, synced; `resume` is what a run does with the
folder before its first step (check and restore). read: bytes that all processes asked the system for during
that part, as multiples of the checkpoint's size (/proc/self/io; what the page cache answers counts too).
CPU-s: of all processes. Medians; the folder's file system decides the wall time, so name it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rondo.checkpoint import ControllerState
from rondo.config import Config
from rondo.config.schema import (
    ClusterConfig,
    EngineConfig,
    LocalBackendConfig,
    OptimizerConfig,
    ProcessBackendConfig,
)
from rondo.controller import WorkerGroup, dispatch, start_cluster
from rondo.models.source import ModelSource
from rondo.system.usage import process_usage
from rondo.tracking import RunFolder
from rondo.trainers.loop.checkpoints import Checkpoints
from rondo.training import ModelSpec
from rondo.workers import ActorWorker

MB = 10**6
LAYER = 4 * 512 * 512 + 3 * 512 * 1536  # parameters of one layer of the model below, about


class MeasuredWorker(ActorWorker):
    """An actor that says what its process has used."""

    @dispatch("per_rank")
    def usage(self) -> tuple[int, float]:
        return read_bytes(), process_usage().cpu_seconds


class Trainer:
    """As much of a trainer as `Checkpoints` sees."""

    step = 1
    total_steps = 1

    def __init__(self, actor: WorkerGroup) -> None:
        self.actor = actor

    def saved_roles(self) -> dict[str, WorkerGroup]:
        return {"actor": self.actor}

    async def state(self) -> ControllerState:
        return ControllerState(1, 1)

    async def load_state(self, state: ControllerState) -> None:
        assert state.step == 1


def read_bytes() -> int:
    """Bytes that this process has asked `read` for since it began."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


async def measured(actor: WorkerGroup, act: Callable[[], Awaitable[object]]) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds, bytes read) of `act`, all processes together."""

    async def used() -> tuple[int, float]:
        ranks = await actor.call(MeasuredWorker.usage)
        if len(ranks) > 1:  # the ranks are processes of their own
            ranks = [*ranks, (read_bytes(), process_usage().cpu_seconds)]
        return sum(read for read, _ in ranks), sum(cpu for _, cpu in ranks)

    read, cpu = await used()
    started = time.perf_counter()
    await act()
    wall = time.perf_counter() - started
    read_after, cpu_after = await used()
    return wall, cpu_after - cpu, read_after - read


async def measure(megabytes: int, ranks: int, repeat: int, folder: Path) -> None:
    model = {
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": max(1, round(megabytes * MB / 12 / LAYER)),
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 512,
    }
    backend = LocalBackendConfig() if ranks == 1 else ProcessBackendConfig()
    config = Config()
    kwargs = {"model": ModelSpec(ModelSource(config=model), EngineConfig(), OptimizerConfig())}
    parts: dict[str, list[tuple[float, float, int]]] = {"save": [], "resume": []}
    size = 0
    async with await start_cluster(
        ClusterConfig(backend=backend, devices=ranks, device="cpu", threads=1)
    ) as cluster:
        actor = await cluster.create_group("actor", MeasuredWorker, kwargs=kwargs)
        trainer = Trainer(actor)
        for turn in range(repeat):
            run_folder = folder / f"run-{turn}"
            with RunFolder(run_folder) as run:
                await actor.call(MeasuredWorker.snapshot)
                parts["save"].append(
                    await measured(actor, lambda run=run: Checkpoints(config, run).save_now(trainer))
                )
            with RunFolder(run_folder, resume="must") as run:
                checkpoints = Checkpoints(config, run)

                async def resume(checkpoints: Checkpoints = checkpoints) -> None:
                    checkpoints.check()
                    await checkpoints.restore(trainer)

                parts["resume"].append(await measured(actor, resume))
            size = sum(file.stat().st_size for file in run_folder.rglob("*") if file.is_file())
            shutil.rmtree(run_folder)
    print(f"{size / MB:.0f} MB on {ranks} rank{'s' if ranks > 1 else ''}, {os.cpu_count()} cores, {folder}")
    for name, turns in parts.items():
        wall, cpu, read = (statistics.median(turn[i] for turn in turns) for i in range(3))
        print(f"{name:7} {wall:6.2f} s  {cpu:6.2f} CPU-s  read {read / size:.3f} times")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=int, default=500, help="about: weights and two moments in float32"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help="on the file system to measure (default: the temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        asyncio.run(measure(args.megabytes, args.ranks, args.repeat, Path(folder)))


if __name__ == "__main__":
    main()
