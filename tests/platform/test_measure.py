"""A row of this machine: what is measured is work by time, and a file holds what was measured."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rondo.core.errors import ConfigError, StorageError
from rondo.planning.devices import DECODED_ROWS, TABLE, DeviceRow, Reached, find_device
from rondo.platform import measure, planned
from rondo.platform.cpu import Cpu
from rondo.platform.measure import Amounts, Device, rate_of, write_row
from rondo.rollout.native.kernels import random_product
from tests.trainers.conftest import inline

SMALL = Amounts(seconds=0.0, tokens=4, widths=(8, 16), numbers=256, near=512, far=600, calls=10)
ROW = DeviceRow(
    "mine",
    memory=3 << 29,
    flops=4.0e11,
    flops32=1.0e11,
    bandwidth=3.5e10,
    link=8e8,
    network=7e8,
    host=1.8e10,
    together=2,
    source="here",
    launch=1e-6,
    is_host=True,
    reached=Reached(),
    fresh=6e9,
    decode=2.5e11,
    reads=3e10,
    far=1.5e10,
)


class Card(Cpu):
    """A device whose memory is not the host's, and which the host waits for."""

    host = False

    def __init__(self) -> None:
        self.asked = self.waited = 0

    def describe(self, index: int) -> str:
        return f"Some Card {index}, 3 GiB"

    def total(self, index: int) -> int:
        return 3 << 30

    def wait(self, device: torch.device | str) -> None:
        self.waited += 1


def ticking() -> Callable[[], float]:
    """A clock by which everything takes a second."""
    return itertools.count().__next__


def test_a_rate_is_work_by_the_median_of_the_calls_after_the_first() -> None:
    now, calls = 0.0, 0
    took = [100.0, 2.0, 8.0, 4.0, 6.0, 6.0]

    def call() -> None:
        nonlocal now, calls
        now, calls = now + took[calls], calls + 1

    # 2 + 8 + 4 seconds are enough, and three calls: the median is 4.
    assert rate_of(12.0, call, 14.0, lambda: now) * 4 == 12.0
    assert calls == 4
    now, calls = 0.0, 0
    assert rate_of(12.0, call, 0.0, lambda: now, least=5) * 6 == 12.0
    assert calls == 6


def test_the_work_of_each_kind() -> None:
    """In a second each: operations of products, bytes read and written, small operations."""
    device = Device(planned("cpu"), 0, ticking())
    widths = 8 * 8 + 8 * 16
    assert device.products(torch.float32, SMALL) == 2 * 4 * widths
    assert device.bandwidth(SMALL) == device.fresh(SMALL) == 256 * (4 + 4 + 4)
    assert device.copies(SMALL) == 256 * 4
    assert device.launches(SMALL) == 10
    # As often as 512 numbers hold the weights.
    made: list[tuple[int, ...]] = []

    def make(*sizes: int) -> Callable[[], object]:
        made.append(sizes)
        return int

    assert device.own_products(make, 3, SMALL, SMALL.near) == 2 * 3 * 2 * widths
    assert made == [(3, 8, 8), (3, 8, 16)] * 2
    made.clear()
    assert device.own_products(make, 1, SMALL, SMALL.far) == 2 * 1 * 3 * widths
    assert made == [(1, 8, 8), (1, 8, 16)] * 3


def test_what_ranks_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the parts of the two others, and its part of their sums; all call as often."""
    calls = []
    monkeypatch.setattr(dist, "all_gather", lambda parts, mine: calls.append((len(parts), len(mine))))
    monkeypatch.setattr(dist, "reduce_scatter", lambda mine, parts: calls.append((len(mine), len(parts))))
    device = Device(planned("cpu"), 0, ticking())
    assert device.exchange(3, replace(SMALL, seconds=99.0)) == 2 * (256 // 4) * 4 * 2
    assert calls == [(3, 64), (64, 3)] * 10


@pytest.mark.slow
def test_a_row_of_this_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    before, path = torch.get_num_threads(), tmp_path / "new" / "mine.tsv"
    told: list[str] = []
    seen: list[tuple[int, ...]] = []

    def make(*sizes: int) -> Callable[[], object]:
        seen.append((torch.get_num_threads(), *sizes))
        return random_product(*sizes)

    row = measure.measure(planned("cpu"), told.append, SMALL, make)
    assert torch.get_num_threads() == before
    assert {threads for threads, *_ in seen} == {1}
    assert {rows for _, rows, *_ in seen} == {DECODED_ROWS, 1}
    assert (row.name, row.is_host, row.reached, row.together) == ("cpu", True, Reached(), os.cpu_count())
    assert row.memory == planned("cpu").total(0)
    assert "one thread" in row.source
    assert [line.split()[0] for line in told[:-1]] == [
        *("flops32", "flops", "bandwidth", "fresh", "host", "launch", "decode", "reads", "far")
    ]
    # Four digits of each number are written.
    written = write_row(row, path)
    assert written == find_device(str(path)) == write_row(written, path)
    speeds = ("flops", "flops32", "bandwidth", "fresh", "decode", "reads", "far")
    numbers = (*speeds, "link", "network", "host", "launch")
    for name in (*numbers, "memory"):
        assert getattr(written, name) == pytest.approx(getattr(row, name), rel=1e-3), name
    assert replace(row, **{name: getattr(written, name) for name in (*numbers, "memory")}) == written


def test_a_card_is_waited_for_and_has_no_kernels_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    row = measure.measure(card, lambda line: None, SMALL)
    assert (row.name, row.is_host, row.memory, row.together) == ("Some Card 0", False, 3 << 30, 1)
    assert (row.decode, row.reads, row.far) == (None, None, None)
    # Six kinds, each of one call and three more.
    assert card.waited == 6 * 4
    assert row.link == row.network == row.host
    assert "no link" in row.source
    monkeypatch.setattr(measure, "link_of", lambda platform, ranks, amounts: 1e15)
    monkeypatch.setattr(Card, "count", lambda self: 4)
    several = measure.measure(card, lambda line: None, SMALL)
    assert (several.together, several.link, several.network) == (4, 1e15, several.host)


def test_processes_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "name", "nothing.there:Platform")
    with pytest.raises(ConfigError, match="two devices cannot be measured: "):
        measure.link_of(Cpu(), 1, SMALL)


def test_a_file_is_written_whole_and_never_over_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.tsv"
    assert write_row(ROW, path) == ROW == find_device(str(path))
    assert write_row(replace(ROW, launch=2e-6), path).launch == 2e-6
    kept = path.read_bytes()
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(StorageError, match=str(path)):
            write_row(ROW, path)
    assert path.read_bytes() == kept
    assert [one.name for one in tmp_path.iterdir()] == ["mine.tsv"]
    with pytest.raises(ConfigError, match=r"mine\.txt: give the name of a file"):
        write_row(ROW, tmp_path / "mine.txt")
    for other in (b"", b"a\tb\n1\t2\n", b"\xff\xfe", TABLE.read_bytes(), kept.replace(b"\t0.4\t", b"\t-1\t")):
        path.write_bytes(other)
        with pytest.raises(ConfigError, match=r"mine\.tsv: no row of .* another name"):
            write_row(ROW, path)
        assert path.read_bytes() == other


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    write_row(ROW, path)
    whole = path.read_text()
    wrong = (whole.replace("\tlink", "\tlnk"), whole.replace("\t35\t", "\tx\t"))
    for damaged in ("", whole.splitlines()[0], *wrong, TABLE.read_text()):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"mine\.tsv: no row of `rondo plan"):
            find_device(str(path))


def test_the_command_measures_and_plans_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.tsv"
    asked = []

    def measured(platform: Cpu, say: Callable[[str], None], own_product: object) -> DeviceRow:
        asked.append((platform.kind, own_product))
        say("  flops32 is known")
        return ROW

    monkeypatch.setattr(measure, "measure", measured)
    told = inline("plan", "quickstart", "cluster.device=cpu", "--measure", str(path)).stdout
    assert asked == [("cpu", random_product)]
    assert "flops32 is known" in told
    assert f"{path}: the row of mine" in told
    assert find_device(str(path)) == ROW
    path.write_text("something else")
    failed = inline("plan", "--measure", str(path), check=False)
    assert (failed.returncode, len(asked)) == (2, 1)  # before anything is measured
    assert str(path) in failed.stderr
    path.unlink()
    write_row(ROW, path)
    arguments = ["plan", "quickstart", "model.override={vocab_size: 512}", "--card", str(path)]
    program = (
        "import sys; from rondo.cli.main import main; "
        f"code = main({arguments!r}); print('torch' in sys.modules, code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split()[-2:] == ["False", "0"]
    assert "Seconds of a step on 1 mine" in done.stdout
