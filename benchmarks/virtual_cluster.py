"""Accelerators that only keep time: what `benchmarks/async.py` puts under the real buffer, feeder, publisher.

A rollout device decodes all its sequences together; a decode step takes as long as memory and arithmetic need
for as many sequences as there are. Training, weight transfer and recomputed caches take their seconds.
Nothing is computed, on a virtual clock (benchmarks/simulation.py).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from rondo.core.batch import BatchRef
from rondo.core.types import SCORED, Ended
from rondo.planning.admission import OnUpdate
from rondo.trainers.loop.buffer import Buffer, Group
from rondo.trainers.loop.feeder import EpisodeFeeder
from rondo.weights.sync import SyncReport
from simulation import SimulatedEngines, run_virtual, simulate

Length = Callable[[int, int], int]


@dataclass(frozen=True)
class Accelerator:
    """One device and the model on it. The defaults: H100 SXM (NVIDIA's data sheet: 989 TFLOP/s bf16 dense,
    3.35 TB/s, 80 GB) and Qwen3-8B (its config.json: 8.2e9 parameters, 36 layers, 8 key/value heads of 128).

    decode_efficiency, train_efficiency: reached share of bandwidth and of arithmetic; assumptions, as are the
    others without a source. network: bytes per second into a device (half of a 400 Gb/s port).
    train_flops: per parameter and token: 6 forward and backward, 2 recomputed activations, 2 old log-probs.
    """

    parameters: float = 8.2e9
    kv_bytes: float = 2 * 36 * 8 * 128 * 2  # per token, bf16
    flops: float = 989e12
    bandwidth: float = 3.35e12
    memory: float = 80e9
    decode_efficiency: float = 0.7
    train_efficiency: float = 0.4
    decode_overhead: float = 2e-3  # seconds per decode step: scheduler, launches, sampling
    network: float = 25e9
    train_flops: float = 10.0
    max_sequences: int = 256  # vLLM's default max_num_seqs

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters

    def decode_seconds(self, sequences: int, context: float) -> float:
        """One token for each of `sequences` with `context` tokens in the cache on average."""
        reached = self.bandwidth * self.decode_efficiency
        weights = max(
            self.weight_bytes / reached,
            2 * self.parameters * sequences / (self.flops * self.decode_efficiency),
        )
        return self.decode_overhead + weights + sequences * context * self.kv_bytes / reached

    def slots(self, context: float) -> int:
        """Sequences that fit beside the weights in nine tenths of the memory."""
        room = (0.9 * self.memory - self.weight_bytes) / (context * self.kv_bytes)
        return max(1, min(self.max_sequences, int(room)))

    def train_rate(self) -> float:
        """Tokens per second."""
        return self.flops * self.train_efficiency / (self.train_flops * self.parameters)

    def prefill_rate(self) -> float:
        """Tokens per second whose cache is computed anew when partial sequences go on under new weights."""
        return self.flops * self.decode_efficiency / (2 * self.parameters)

    def sync_seconds(self) -> float:
        """All weights into every rollout device, at the rate of its port."""
        return self.weight_bytes / self.network


@dataclass(frozen=True)
class Rates:
    """What a simulated cluster needs to know of its devices. step_seconds(c): a decode step for c sequences
    on one rollout device; train_rate: tokens per second of one trainer device; prefill_rate: of a rollout
    device (inf: nothing is computed anew); overhead: seconds of a step that no device shortens.
    """

    step_seconds: Callable[[int], float]
    slots: int
    train_rate: float
    sync_seconds: float
    context: float = 0.0
    prefill_rate: float = float("inf")
    overhead: float = 0.0


def rates_of(accelerator: Accelerator, lengths: np.ndarray, prompt: int, overhead: float) -> Rates:
    """lengths: of responses, a sample. The context of a sequence in flight is the prompt and half of a
    response that is met with a probability that grows with its length.
    """
    context = prompt + float((lengths**2.0).mean() / lengths.mean() / 2)
    table = [accelerator.decode_seconds(c, context) for c in range(accelerator.max_sequences + 1)]
    return Rates(
        step_seconds=table.__getitem__,
        slots=accelerator.slots(context),
        train_rate=accelerator.train_rate(),
        sync_seconds=accelerator.sync_seconds(),
        context=context,
        prefill_rate=accelerator.prefill_rate(),
        overhead=overhead,
    )


class Rows:
    """Stands for the BatchRef of a group: its index alone, as numpy (Arrow's would be most of the time)."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns, self.index = columns, self

    def scalars(self, name: str) -> np.ndarray:
        return self.columns[name]

    def take(self, rows: np.ndarray) -> Rows:
        return Rows({name: column[rows] for name, column in self.columns.items()})

    def __len__(self) -> int:
        return len(self.columns["outcome"])


@dataclass(eq=False)
class _Sequence:
    tokens: int
    done: asyncio.Future[None]
    begin: float | None = None  # the device's progress at its first token; None: waits for a slot

    @property
    def finish(self) -> float:
        assert self.begin is not None
        return self.begin + self.tokens


class _Device:
    """Decodes its sequences together. progress: tokens that a sequence which was always there would have."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, _Sequence]] = []
        self._running: set[_Sequence] = set()
        self._waiting: deque[_Sequence] = deque()
        self._held = True
        self._timer: asyncio.TimerHandle | None = None
        self.progress, self._at = 0.0, self._loop.time()
        self.busy_seconds = self.tokens = self.wasted = 0.0

    def submit(self, lengths: Sequence[int]) -> list[_Sequence]:
        sequences = [_Sequence(tokens, self._loop.create_future()) for tokens in lengths]
        self._waiting += sequences
        self._changed()
        return sequences

    def withdraw(self, sequence: _Sequence) -> None:
        """Its tokens are lost."""
        if sequence in self._running:
            self._advance()
            self._running.discard(sequence)
            assert sequence.begin is not None
            self.wasted += min(self.progress - sequence.begin, sequence.tokens)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._changed()

    def hold(self) -> None:
        self._advance()
        self._held = True
        self._changed()

    def release(self, recompute: bool) -> None:
        """recompute: the cache of what is in flight, before the next token."""
        self._advance()
        self._held = False
        if recompute:
            seconds = len(self._running) * self._rates.context / self._rates.prefill_rate
            if self._running:
                self.busy_seconds += seconds
            self._at += seconds
        self._changed()

    def _advance(self) -> None:
        elapsed = self._loop.time() - self._at
        if elapsed <= 0:
            return
        self._at = self._loop.time()
        if self._running and not self._held:
            gained = elapsed / self._rates.step_seconds(len(self._running))
            self.progress += gained
            self.busy_seconds += elapsed
            self.tokens += gained * len(self._running)

    def _changed(self) -> None:
        """Fill free slots, and be called when the next sequence is complete."""
        self._advance()
        while self._waiting and len(self._running) < self._rates.slots and not self._held:
            sequence = self._waiting.popleft()
            sequence.begin = self.progress
            self._running.add(sequence)
            heapq.heappush(self._heap, (sequence.finish, next(self._numbers), sequence))
        while self._heap and self._heap[0][2] not in self._running:
            heapq.heappop(self._heap)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap and not self._held:
            left = max(0.0, self._heap[0][0] - self.progress)
            seconds = left * self._rates.step_seconds(len(self._running))
            self._timer = self._loop.call_at(self._at + seconds, self._complete)

    def _complete(self) -> None:
        self._advance()
        while self._heap and self._heap[0][0] <= self.progress + 1e-6:
            sequence = heapq.heappop(self._heap)[2]
            if sequence in self._running:
                self._running.discard(sequence)
                sequence.done.set_result(None)
        self._changed()


class VirtualDevices(SimulatedEngines):
    """One engine per rollout device. length(seq, sample): tokens of a response."""

    def __init__(self, rates: Rates, ranks: int, n: int, length: Length, *, recompute: bool) -> None:
        super().__init__(ranks=ranks, slots=rates.slots, n=n, length=length)
        self._rates, self._recompute = rates, recompute
        self._lengths = length
        self.devices = [_Device(rates) for _ in range(ranks)]
        self._published: list[tuple[list[float], int]] = []  # progress of each device, version from there on

    async def pause(self) -> None:
        for device in self.devices:
            device.hold()

    async def resume(self) -> None:
        for device in self.devices:
            device.release(self._recompute)

    async def load(self, version: int) -> SyncReport:
        await asyncio.sleep(self._rates.sync_seconds)
        self.version = version
        self._published.append(([device.progress for device in self.devices], version))
        return SyncReport(version, 0, 0)

    async def run_group(self, rank: int, seq: int) -> tuple[BatchRef, Ended]:
        """What feeder and buffer read of a group; no tokens."""
        device = self.devices[rank]
        sequences = device.submit([self._lengths(seq, sample) for sample in range(self.n)])
        try:
            await asyncio.gather(*(sequence.done for sequence in sequences))
        except asyncio.CancelledError:
            for sequence in sequences:
                if sequence.begin is None or not sequence.done.done() or sequence.done.cancelled():
                    device.withdraw(sequence)
                else:
                    device.wasted += sequence.tokens
            raise
        columns = {
            "response_length": np.array([sequence.tokens for sequence in sequences], np.int32),
            "oldest_version": np.array([self._version(rank, s) for s in sequences], np.int32),
            "step_index": np.zeros(self.n, np.int32),
            "outcome": np.full(self.n, SCORED),
            "reward": np.zeros(self.n, np.float32),
        }
        return cast(BatchRef, Rows(columns)), {}

    def _version(self, rank: int, sequence: _Sequence) -> int:
        """Of its first token, which is its oldest."""
        assert sequence.begin is not None
        return next(v for progress, v in reversed(self._published) if progress[rank] <= sequence.begin)


@dataclass(frozen=True)
class Setup:
    """One run. trainers = 0: colocated, all devices generate, then all train."""

    rollouts: int
    trainers: int
    max_staleness: int
    on_update: OnUpdate
    batch_size: int
    n: int
    steps: int
    max_aborts: int = 2


@dataclass
class Outcome:
    """seconds: of the whole run. idle: share of all device-seconds without work; rollout_idle, trainer_idle:
    of the parts. wasted: tokens of aborted groups over trained ones. once: every prompt was trained exactly
    once.
    """

    seconds: float
    idle: float
    rollout_idle: float
    trainer_idle: float
    staleness_mean: float
    staleness_max: int
    wasted: float
    once: bool
    complete_at: list[float] = field(default_factory=list)  # each step's groups


def run(setup: Setup, rates: Rates, length: Length) -> Outcome:
    """Simulate one run with the real buffer, feeder and publisher."""
    return run_virtual(_run(setup, rates, length))


async def _run(setup: Setup, rates: Rates, length: Length) -> Outcome:
    groups = setup.steps * setup.batch_size
    buffer = Buffer(
        batch_size=setup.batch_size,
        max_staleness=setup.max_staleness,
        total_steps=setup.steps,
        total_groups=groups,
        n=setup.n,
    )
    colocated = setup.trainers == 0
    engines = VirtualDevices(rates, setup.rollouts, setup.n, length, recompute=setup.on_update == "resume")
    feeder = EpisodeFeeder(buffer, engines, on_update=setup.on_update, max_aborts=setup.max_aborts)
    rate = rates.train_rate * (setup.rollouts if colocated else setup.trainers)
    trained, times = [0.0], []
    loop = asyncio.get_running_loop()

    async def update(taken: Sequence[Group]) -> None:
        times.append(loop.time())
        tokens = sum(float(group.ref.index.scalars("response_length").sum()) for group in taken)
        trained[0] += tokens
        await asyncio.sleep(rates.overhead + tokens / rate)

    done = await simulate(buffer, engines, feeder, update_seconds=0.0, shared=colocated, on_step=update)
    devices = setup.rollouts + setup.trainers
    generating = sum(device.busy_seconds for device in engines.devices)
    training = trained[0] / rates.train_rate  # device-seconds
    seconds = done.seconds - rates.sync_seconds  # without the first weights, before the first episode
    idle = 1 - (generating + training) / (seconds * devices)
    return Outcome(
        seconds=seconds,
        idle=idle,
        rollout_idle=idle if colocated else 1 - generating / (seconds * setup.rollouts),
        trainer_idle=idle if colocated else 1 - training / (seconds * setup.trainers),
        staleness_mean=float(np.mean(done.staleness)),
        staleness_max=max(done.staleness),
        wasted=sum(device.wasted for device in engines.devices) / trained[0],
        once=sorted(seq for step in done.steps for seq in step) == list(range(groups)),
        complete_at=times,
    )
