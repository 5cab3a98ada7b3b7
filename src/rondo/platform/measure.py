"""A row of this machine's device for `rondo plan`: what `planning.time` counts, done until it is known how
fast it goes. A card's seconds are those of the clock. A host's are those that its processor works (one
thread, as rondo gives each device its own), so that what other programs do meanwhile is not measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rondo.core.errors import ConfigError
from rondo.planning.devices import (
    DECODED_ROWS,
    FAR_BYTES,
    NEAR_BYTES,
    DeviceRow,
    Reached,
    measured_row,
    row_text,
)
from rondo.platform.base import Platform
from rondo.platform.choose import named_in_environment, planned
from rondo.system.actor import Actor, ActorHandle, CallFailedError, ProcessLostError, spawn
from rondo.system.process import import_path
from rondo.system.storage import make_folder, write_atomic

Clock = Callable[[], float]

_MOST_RANKS = 2  # that links are measured between: each one's share comes from the others
_PATIENCE = 120.0  # seconds in which the other processes have started and done their part


@dataclass(frozen=True)
class Amounts:
    """How much is measured with."""

    seconds: float = 2.0
    """Of each kind of work."""
    tokens: int = 1024
    """Of a product: rows of the left matrix."""
    widths: tuple[int, ...] = (1024, 2048, 4096)
    """Of layers: each product has these columns, from the first width."""
    numbers: int = 1 << 24
    """Of a pass over memory: in float32 more than caches and allocators keep (64 MiB)."""
    near: int = NEAR_BYTES // 4
    """Of weights that the cache of a core does not hold."""
    far: int = FAR_BYTES // 4
    """Of those that no cache does: processors in a cloud share some of hundreds of MiB."""
    calls: int = 2000
    """Of small operations, one after the other."""


FULL = Amounts()


def rate_of(work: float, call: Callable[[], object], seconds: float, clock: Clock, least: int = 3) -> float:
    """Returns how much work is done a second: by the median of calls that take so many seconds together, and
    of at least so many calls. One before them counts for nothing.
    """
    call()
    took: list[float] = []
    while len(took) < least or sum(took) < seconds:
        begun = clock()
        call()
        took.append(clock() - begun)
    return work / statistics.median(took)


def measure(
    platform: Platform,
    say: Callable[[str], None],
    amounts: Amounts = FULL,
    own_product: Callable[[int, int, int], Callable[[], object]] | None = None,
) -> DeviceRow:
    """Measures the first device of a platform. say: is told each result as it comes. own_product: makes a
    call of one product of the native engine's own kernels, [rows, inputs] × [inputs, columns]; None: it has
    none.
    """
    platform.check_here()
    with _one_thread(platform):
        device = Device(platform, 0)
        found = dict(device.speeds(amounts, say))
        if own_product is not None:
            found["decode"] = device.own_products(own_product, DECODED_ROWS, amounts, amounts.near)
            say(f"  decode      {found['decode'] / 1e12:10.3f} TFLOP/s in the native engine's own products")
            # With one row these wait for weights: two operations for the four bytes of each.
            found["reads"] = 2 * device.own_products(own_product, 1, amounts, amounts.near)
            say(f"  reads       {found['reads'] / 1e9:10.2f} GB/s of weights, by these")
            found["far"] = 2 * device.own_products(own_product, 1, amounts, amounts.far)
            say(f"  far         {found['far'] / 1e9:10.2f} GB/s of weights that no cache holds")
    together = (os.cpu_count() or 1) if platform.host else platform.count()
    links = "no link: there is one device"
    # What goes to other devices without a link, or to other machines, crosses the host's memory.
    found["link"] = found["host"]
    if together > 1:
        ranks = min(_MOST_RANKS, together)
        found["link"] = link_of(platform, ranks, amounts)
        links = f"link by {platform.collectives} between {ranks} processes"
        say(f"  link        {found['link'] / 1e9:10.2f} GB/s between two devices")
    found["network"] = min(found["link"], found["host"])
    name = platform.kind if platform.host else platform.describe(0).partition(",")[0]
    a_thread = "; CPU-seconds of one thread, cores are devices" if platform.host else ""
    source = f"measured with torch {torch.__version__}{a_thread}; {links}; network not measured"
    return DeviceRow(
        name,
        platform.total(0),
        **found,
        together=together,
        source=source,
        is_host=platform.host,
        reached=Reached(),
    )


def write_row(row: DeviceRow, path: Path) -> DeviceRow:
    """Writes a measured row, whole or not at all. Returns it as it is read back, with four digits of each
    number. Raises ConfigError (see `check_target`), StorageError.
    """
    check_target(path)
    make_folder(path.parent)
    write_atomic(path, row_text(row))
    return measured_row(path)


def check_target(path: Path) -> None:
    """Raises ConfigError where no row may be written: the name is no .tsv, or something else is there."""
    if path.suffix != ".tsv":
        raise ConfigError(f"--measure {path}: give the name of a file that ends in .tsv")
    if path.exists():
        try:
            measured_row(path)
        except ConfigError as error:
            raise ConfigError(f"--measure: {error}; give another name, or remove that") from error


@contextmanager
def _one_thread(platform: Platform) -> Iterator[None]:
    """On the host torch has one thread inside."""
    before = torch.get_num_threads()
    try:
        if platform.host:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


class Device:
    """One device that work is done on. clock: None: the one for its platform."""

    def __init__(self, platform: Platform, index: int, clock: Clock | None = None) -> None:
        self._platform = platform
        self._name = platform.device(index)
        platform.use(self._name)
        self._clock = clock or (time.process_time if platform.host else time.perf_counter)

    def rate(self, work: float, call: Callable[[], object], seconds: float, least: int = 3) -> float:
        """See `rate_of`; a call has ended when the device has done what it was asked."""

        def done() -> None:
            call()
            if not self._platform.host:
                self._platform.wait(self._name)

        return rate_of(work, done, seconds, self._clock, least)

    def speeds(self, amounts: Amounts, say: Callable[[str], None]) -> Iterator[tuple[str, float]]:
        """Yields what the formulas of time use, by column, a second or in seconds; all but links."""
        for column, dtype in (("flops32", torch.float32), ("flops", torch.bfloat16)):
            rate = self.products(dtype, amounts)
            say(f"  {column:12}{rate / 1e12:10.3f} TFLOP/s in products of {dtype}".replace("torch.", ""))
            yield column, rate
        for column, call, told in (
            ("bandwidth", self.bandwidth, "what is there is read and written"),
            ("fresh", self.fresh, "results are new memory"),
            ("host", self.copies, "copied to the device from the host"),
        ):
            rate = call(amounts)
            say(f"  {column:12}{rate / 1e9:10.2f} GB/s: {told}")
            yield column, rate
        launch = 1 / self.launches(amounts)
        say(f"  launch      {launch * 1e6:10.2f} µs for a small operation")
        yield "launch", launch

    def products(self, dtype: torch.dtype, amounts: Amounts) -> float:
        """Returns operations a second of products as layers have them: all widths, one after the other."""
        first = amounts.widths[0]
        rows = self._random(amounts.tokens, first, dtype=dtype)
        layers = [self._random(width, first, dtype=dtype) for width in amounts.widths]
        work = sum(2.0 * amounts.tokens * first * width for width in amounts.widths)
        linear = torch.nn.functional.linear
        return self.rate(work, lambda: [linear(rows, layer) for layer in layers], amounts.seconds)

    def own_products(
        self, make: Callable[[int, int, int], Callable[[], object]], rows: int, amounts: Amounts, weights: int
    ) -> float:
        """Returns the same of products that `make` makes. weights: numbers of all of them together."""
        first, numbers = amounts.widths[0], sum(amounts.widths) * amounts.widths[0]
        layers = max(1, weights // numbers)
        calls = [make(rows, first, width) for _ in range(layers) for width in amounts.widths]
        work = 2.0 * rows * numbers * layers
        return self.rate(work, lambda: [call() for call in calls], amounts.seconds)

    def bandwidth(self, amounts: Amounts) -> float:
        """Returns the bytes a second of a pass over what is there: two numbers are read and one written."""
        left, right, into = (self._random(amounts.numbers) for _ in range(3))
        return self.rate(12.0 * amounts.numbers, lambda: torch.add(left, right, out=into), amounts.seconds)

    def fresh(self, amounts: Amounts) -> float:
        """Returns the same of a pass whose result is new memory, as those of models are."""
        left, right = self._random(amounts.numbers), self._random(amounts.numbers)
        return self.rate(12.0 * amounts.numbers, lambda: torch.add(left, right), amounts.seconds)

    def copies(self, amounts: Amounts) -> float:
        """Returns the bytes a second from the host's memory, pinned where that is of use."""
        source = torch.zeros(amounts.numbers)
        if self._platform.pins:
            source = source.pin_memory()
        target = self._random(amounts.numbers)
        return self.rate(
            4.0 * amounts.numbers, lambda: target.copy_(source, non_blocking=True), amounts.seconds
        )

    def launches(self, amounts: Amounts) -> float:
        """Returns the small operations that the host begins in a second."""
        left, right = self._random(16), self._random(16)

        def call() -> None:
            for _ in range(amounts.calls):
                torch.add(left, right)

        return self.rate(amounts.calls, call, amounts.seconds)

    def exchange(self, ranks: int, amounts: Amounts) -> float:
        """Returns the bytes a second that this process gets from the others of the process group, as training
        has it: weights are gathered, gradients added up and scattered. All processes call as often.
        """
        mine = self._random(amounts.numbers // 4)
        parts = [self._random(len(mine)) for _ in range(ranks)]

        def call() -> None:
            dist.all_gather(parts, mine)
            dist.reduce_scatter(mine, parts)

        # No time ends it: the others would wait for one who had enough.
        return self.rate(2 * 4.0 * len(mine) * (ranks - 1), call, 0.0, least=9)

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, device=self._name).to(dtype)


def link_of(platform: Platform, ranks: int, amounts: Amounts) -> float:
    """Returns the bytes a second that each of so many processes, with a device each, gets from the others.
    Raises ConfigError where they cannot reach each other.
    """
    variables = {**os.environ, **named_in_environment(platform), "PYTHONPATH": import_path()}
    handles: list[ActorHandle] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                handles.append(spawn(LinkRank, f"the process of device {rank}", variables))
            for handle in handles:
                handle.begin()
            store = str(Path(folder, "store"))
            answers = [
                handle.call("exchange", platform.name, rank, ranks, store, amounts, seconds=_PATIENCE)
                for rank, handle in enumerate(handles)
            ]
            return statistics.median(answer.result() for answer in answers)
        except (CallFailedError, ProcessLostError) as error:
            raise ConfigError(f"the link between two devices cannot be measured: {error}") from error
        finally:
            for handle in handles:
                handle.close()


class LinkRank(Actor):
    """A process with one device, and one rank of those that send."""

    def exchange(self, choice: str, rank: int, ranks: int, store: str, amounts: Amounts) -> float:
        """Returns what `Device.exchange` measures. choice: of the platform, as cluster.device says it."""
        platform = planned(choice)
        with _one_thread(platform):
            device = Device(platform, 0 if platform.host else rank)
            dist.init_process_group(
                platform.collectives,
                store=dist.FileStore(store, ranks),
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=_PATIENCE),
            )
            try:
                return device.exchange(ranks, amounts)
            finally:
                dist.destroy_process_group()
