"""What the driver of an RL step costs: its CPU seconds and bytes against rows and ranks, on ranks that are
simulated.

    python benchmarks/controller.py [--rows 512,8192,65536] [--ranks 8,64,512] [--program grpo] [--json FILE]

One step as the loop makes it, from the calls of the rollout workers to the metrics: the real stages of a
planned program, worker groups, batches, clock, timeline and rollout file. Only the far end is simulated: a
rank is an object here that unpacks its call, makes columns of the right size and packs its reply, and the
CPU time of that is taken off. Replies arrive one by one. What a backend adds to send bytes (sockets,
descriptors of shared memory) is not in it, nor is the publish of weights, whose calls carry no rows.

plan: from `WorkerGroup.call` to the first call that is packed, over all calls of the step that are split:
which row goes to which rank, and where its columns lie. The slopes are those of log seconds (bytes) over log
rows (ranks), least squares over the sweep.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from rondo.config import Config, load
from rondo.controller import Mesh, WorkerGroup
from rondo.controller.host import _ended
from rondo.controller.remote import RemoteCluster, RemoteHandle, _pack_reply, unpack_call
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_array
from rondo.core.columns import column
from rondo.core.roles import ROLES
from rondo.core.types import SCORED, Prompt, SamplingParams, StepStats
from rondo.data import index_columns, is_scored
from rondo.data.rows import row_ids
from rondo.tracking import Clock, Console, RunFolder, Timeline
from rondo.trainers.loop.report import Reporter, describe_rows
from rondo.trainers.program import Program, Roles, Step, plan_program, update_actor
from rondo.trainers.program.roles import worker_class
from rondo.workers import RolloutWorker
from rondo.workers.estimating import EstimatingWorker
from rondo.workers.models import WritesRows

PROMPT_TOKENS = 64
COMMON = ["model.path=none", "trainer.total_steps=1", "trainer.max_staleness=2", "tracking.samples=0"]
# The calls of a step and what is made of columns, by program: a KL in the loss and the correction of stale
# samples; the same with a critic and token rewards.
PROGRAMS = {
    "grpo": ["algorithm.kl={name: k3, where: loss, coef: 0.01}"],
    "ppo": [
        "algorithm.advantage={name: gae}",
        "algorithm.kl={name: k1, where: reward, coef: 0.01}",
        "algorithm.rollout_correction.importance={level: token, normalize: true}",
    ],
}


class Meter:
    """CPU seconds of this thread by part, without those of the ranks that are simulated on it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.simulated = 0.0
        self.mark = 0.0  # since the call of a group began
        self.planning = False

    def now(self) -> float:
        return time.thread_time() - self.simulated

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = self.now()
        yield
        self.seconds[name] += self.now() - begun

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        begun = time.thread_time()
        yield
        self.simulated += time.thread_time() - begun


class Network:
    """Replies on their way: one arrives at a time."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def travel(self) -> None:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._deliver)
        self._waiting.append(arrived)
        await arrived

    def _deliver(self) -> None:
        self._waiting.pop(0).set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._deliver)


class SimulatedProcess:
    """A host without a process. answer(call, blocks): what its worker returns."""

    def __init__(self, meter: Meter, network: Network, answer: Callable[..., Any]) -> None:
        self._meter, self._network, self._answer = meter, network, answer

    async def call(self, method: str, ticket: int | None, payload: bytes, *places: Any) -> tuple[bytes, Any]:
        with self._meter.elsewhere():
            answered = simulate_call(self._answer, payload, places)
        await self._network.travel()
        return answered

    def pulse(self, stacks: bool) -> Any:
        raise NotImplementedError

    def kill(self) -> None:
        """Has nothing to end."""


class SimulatedHandle(RemoteHandle):
    """Sends calls to one."""

    def __init__(self, device: int, meter: Meter, network: Network, answer: Callable[..., Any]) -> None:
        super().__init__(device, SimulatedProcess(meter, network, answer), log=None)
        self._meter = meter

    def pack(self, call: Any, alike: dict[Any, bytes]) -> Any:
        if self._meter.planning:
            self._meter.seconds["plan"] += self._meter.now() - self._meter.mark
            self._meter.planning = False
        return super().pack(call, alike)


def simulate_call(answer: Callable[..., Any], payload: bytes, places: Sequence[Any]) -> tuple[bytes, Any]:
    """Does what `HostProgram.run` and `Host.run` do, with `answer` in the place of a worker."""
    call = unpack_call(payload)
    ran, kept = _ended(call, (time.time(), time.perf_counter()), answer(call, places))
    return _pack_reply(ran), kept


class SimulatedCluster(RemoteCluster):
    """As many devices as there are ranks; a block lies where it was made, in this process."""

    def __init__(self, ranks: int, meter: Meter, answer: Callable[..., Any]) -> None:
        super().__init__(ranks, "cpu", 1, 600.0, None)
        network = Network()
        self._handles = [SimulatedHandle(rank, meter, network, answer) for rank in range(ranks)]
        self._meter = meter

    def store(self, data: Batch) -> Batch:
        return data

    async def load(self, places: Sequence[Batch]) -> list[Batch]:
        return list(places)

    def group(self, role: str) -> WorkerGroup:
        """The worker group of a role on all devices."""
        mesh = Mesh.data_parallel(self.num_devices)
        group = MeteredGroup(
            role, worker_class(ROLES[role]), mesh, self._handles, self.resolve, self.call_watchers
        )
        group.meter = self._meter
        return group


class MeteredGroup(WorkerGroup):
    """Notes when a split call begins."""

    meter: Meter

    async def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.meter.mark, self.meter.planning = self.meter.now(), True
        return await super().call(method, *args, **options)


class Rows:
    """The rows of a step and what workers make of them: `groups` prompt groups of `n` rows, each of at most
    `tokens` response tokens, half of the groups with a signal.
    """

    def __init__(self, groups: int, n: int, tokens: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.n, self.groups = n, groups
        self.lengths = random.integers(max(tokens // 2, 1), tokens + 1, groups * n).astype(np.int32)
        self.rewards = random.integers(0, 2, groups * n).astype(np.float32)
        self.rewards[np.arange(groups * n) // n % 2 == 1] = 1.0

    def answer(self, call: Any, places: Sequence[Any]) -> Any:
        """What a worker's method returns: rows, columns of the right size, or numbers."""
        if call.method == "run_group":
            return self._group(call.args[0].seq), {}
        if call.method == "sees":
            return True
        if call.method == "write_rows":
            batch = call.shard.assemble(places)
            return WritesRows.write_rows(cast(WritesRows, None), batch, *call.args)
        if hasattr(EstimatingWorker, call.method):  # small enough to be done
            method: Callable[..., Any] = getattr(EstimatingWorker, call.method)
            return method(
                cast(EstimatingWorker, None), call.shard.assemble(places), *call.args, **call.kwargs
            )
        if call.method == "update_actor":
            stats = StepStats()
            stats.add_mean("actor/loss", 1.0)
            return stats
        ids = call.shard.index.scalars(ROW_ID)
        name = {"compute_log_prob": "old_log_probs", "compute_ref_log_prob": "ref_log_probs"}.get(
            call.method, "values"
        )
        if call.method == "update_critic":
            return StepStats()
        at = (ids >> 32) * self.n + (ids >> 12) % (1 << 20)
        return Batch.of({ROW_ID: ids, name: self._tokens(at, np.float32)})

    def _tokens(self, at: np.ndarray, dtype: Any, value: float = 0.5) -> Any:
        offsets = np.zeros(len(at) + 1, np.int32)
        np.cumsum(self.lengths[at], out=offsets[1:])
        return ragged_array(np.full(int(offsets[-1]), value, dtype), offsets)

    def _group(self, seq: int) -> Batch:
        """One prompt group, with the columns of `rows_from_trajectories`."""
        n, at = self.n, seq * self.n + np.arange(self.n)
        lengths, rewards = self.lengths[at], self.rewards[at]
        prompt = np.arange(0, (n + 1) * PROMPT_TOKENS, PROMPT_TOKENS, dtype=np.int32)
        made = {
            ROW_ID: row_ids(seq, np.arange(n)),
            "seq": np.full(n, seq),
            "group_id": np.full(n, seq),
            "prompt_id": [f"train/0/{seq}"] * n,
            "source": ["train"] * n,
            "trajectory_id": [f"{seq}/{sample}" for sample in range(n)],
            "sample_index": np.arange(n, dtype=np.int32),
            "step_index": np.zeros(n, np.int32),
            "prompt_length": np.full(n, PROMPT_TOKENS, np.int32),
            "response_length": lengths,
            "num_trained_tokens": lengths,
            "oldest_version": np.zeros(n, np.int32),
            "finish_reason": ["stop"] * n,
            "outcome": [SCORED] * n,
            "reward": rewards,
            "accuracy": rewards,
            "step_reward": rewards,
            "anchor_id": np.full(n, seq),
            "prompt_ids": ragged_array(np.ones(n * PROMPT_TOKENS, np.int32), prompt),
            "response_ids": self._tokens(at, np.int32),
            "response_mask": self._tokens(at, np.uint8, 1),
            "rollout_log_probs": self._tokens(at, np.float32),
            "policy_versions": self._tokens(at, np.int32),
            "prompt_text": ["2+2="] * n,
            "text": ["4"] * n,
        }
        assert all(column(name) for name in made)
        return Batch.of(made)


class Driver:
    """One step after the other, on simulated ranks."""

    def __init__(self, config: Config, folder: RunFolder, rows: Rows, ranks: int) -> None:
        self.config, self.rows, self.ranks = config, rows, ranks
        self.meter = Meter()
        self.cluster = SimulatedCluster(ranks, self.meter, rows.answer)
        self.program: Program = plan_program(config)
        models = {role: self.cluster.group(role) for role in self.program.roles}
        self.roles = Roles(self.cluster.group("actor"), self.cluster.group("rollout"), models)
        self.reporter = Reporter(config, folder, Console("off"), title="benchmark")
        self.reporter.writers = self.roles.actor
        self.clock = Clock(Timeline(folder.timeline_dir))
        self.cluster.call_watchers.append(self.clock)
        gc.freeze()  # as `Cluster.create_group` does

    async def step(self, number: int) -> dict[str, float]:
        """CPU seconds by part, and the bytes that passed through the driver."""
        meter, program, clock = self.meter, self.program, self.clock
        meter.seconds.clear()
        before = self.cluster.driver_bytes()
        gc.collect()
        begun = meter.now()
        with meter.part("generate"):
            refs = await self._generate()
        step = Step(number, 0, self.cluster, self.roles)
        with meter.part("take"):
            everything = BatchRef.concat(refs)
            batch = everything.take(np.flatnonzero(is_scored(everything.index)))
        for stage in program.scoring:
            with meter.part("stages"), clock.phase(stage.phase):
                batch = await stage(batch, step)
        scored = batch
        with meter.part("rollouts"), clock.phase("write_rollouts"):
            await self.reporter.rollouts(number + 1, everything)
        for stage in program.stages:
            with meter.part(type(stage).__name__), clock.phase(stage.phase):
                batch = await stage(batch, step)
        with meter.part("update"), clock.phase("update_actor"):
            loss, epochs = program.actor_loss, self.config.actor.epochs
            stats = await update_actor(self.roles.actor, batch, loss, epochs, step, old_is_current=True)
            step.stats.merge(stats)
        with meter.part("report"):
            describe_rows(scored, step.stats)
            clock.end_step(number + 1)
        meter.seconds["step"] = meter.now() - begun
        return {**meter.seconds, "bytes": float(self.cluster.driver_bytes() - before)}

    async def _generate(self) -> list[BatchRef]:
        engines, sampling = self.roles.engines, SamplingParams(max_tokens=4096)
        prompts = [
            Prompt(seq, f"train/0/{seq}", "train", np.ones(PROMPT_TOKENS, np.int32))
            for seq in range(self.rows.groups)
        ]
        calls = (
            engines.call_rank(
                seq % self.ranks, RolloutWorker.run_group, prompts[seq], sampling, self.rows.n, keep=KEPT
            )
            for seq in range(self.rows.groups)
        )
        return [ref for ref, _ in await asyncio.gather(*calls)]


KEPT = index_columns()


def measure(program: str, rows: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """The medians of a few steps of one size."""
    config = load([], [*COMMON, *PROGRAMS[program], *options.set]).config
    given = Rows(rows // options.n, options.n, options.tokens)
    with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
        folder.begin("")

        async def steps() -> list[dict[str, float]]:
            driver = Driver(config, folder, given, ranks)
            await driver.step(0)  # imports, and the allocator's first pages
            return [await driver.step(number + 1) for number in range(options.repeat)]

        made = asyncio.run(steps())
    found = {name: statistics.median(one[name] for one in made) for name in made[0]}
    return {
        "program": program,
        "rows": rows,
        "ranks": ranks,
        "n": options.n,
        "tokens": options.tokens,
        **found,
    }


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of log y over log x, least squares; NaN for a single point."""
    if len(points) < 2:
        return float("nan")
    x, y = np.log([a for a, _ in points]), np.log([b for _, b in points])
    return float(np.polyfit(x, y, 1)[0])


def machine() -> str:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else 'unknown'}"


PARTS = ("step", "plan", "bytes")


def report(program: str, options: argparse.Namespace) -> dict[str, Any]:
    """Prints the tables of a program, and returns what is in them."""
    sizes = [(rows, options.at_ranks) for rows in options.rows]
    sizes += [(options.at_rows, ranks) for ranks in options.ranks]
    made: dict[tuple[int, int], dict[str, Any]] = {}
    print(f"\n{program}, CPU-s of the driver for one step\n\n| rows | ranks | step | plan | MB | parts |")
    print("|---|---|---|---|---|---|")
    for size in dict.fromkeys(sizes):
        one = made[size] = measure(program, *size, options)
        own = {name: value for name, value in one.items() if isinstance(value, float) and name not in PARTS}
        parts = ", ".join(f"{name} {value:.3f}" for name, value in own.items())
        print(
            f"| {size[0]} | {size[1]} | {one['step']:.3f} | {one['plan']:.3f} | {one['bytes'] / 1e6:.2f} "
            f"| {parts} |",
            flush=True,
        )
    slopes: dict[str, dict[str, float]] = {"rows": {}, "ranks": {}}
    for name in PARTS:
        slopes["rows"][name] = slope(
            [(rows, made[rows, at][name]) for rows, at in sizes[: len(options.rows)]]
        )
        slopes["ranks"][name] = slope([(n, made[at, n][name]) for at, n in sizes[len(options.rows) :]])
    for over, at in (("rows", f"{options.at_ranks} ranks"), ("ranks", f"{options.at_rows} rows")):
        said = ", ".join(f"{name} {value:.2f}" for name, value in slopes[over].items())
        print(f"\nslope in {over}, at {at}: {said}")
    return {"points": list(made.values()), "slopes": slopes}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--rows", type=numbers, default=[512, 2048, 8192, 32768, 65536])
    parser.add_argument("--ranks", type=numbers, default=[8, 32, 128, 512])
    parser.add_argument("--at-rows", type=int, default=8192, help="where ranks are swept")
    parser.add_argument("--at-ranks", type=int, default=64, help="where rows are swept")
    parser.add_argument("--program", choices=[*PROGRAMS], nargs="+", default=[*PROGRAMS])
    parser.add_argument("--n", type=int, default=16, help="rows of a prompt group, each a block")
    parser.add_argument("--tokens", type=int, default=64, help="of a response, at most")
    parser.add_argument("--repeat", type=int, default=3, help="steps, of which the median counts")
    parser.add_argument("--set", nargs="*", default=[], help="settings, such as actor.mini_batch_size=64")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures; tables to stdout."""
    options = parse(arguments)
    print(machine())
    made = {program: report(program, options) for program in options.program}
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **made}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
