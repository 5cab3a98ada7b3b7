"""Every worker call is told to the cluster's watchers, with the time that it took; hosts tell theirs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rondo.controller import Cluster, Worker, dispatch
from rondo.core.errors import WorkerError

Run = Callable[[Any], Any]


class Sleeper(Worker):
    @dispatch("broadcast")
    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    @dispatch("broadcast")
    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @dispatch("broadcast")
    def burn(self, seconds: float) -> None:
        """Takes CPU time here, and as much in a process that it starts."""
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass
        program = f"import time\nwhile time.process_time() < {seconds}: pass"
        subprocess.run([sys.executable, "-c", program], check=True)

    @dispatch("broadcast")
    def fail(self) -> None:
        raise ValueError("no")


class Notebook:
    def __init__(self) -> None:
        self.sent: list[tuple[str, int, int, str]] = []
        self.spans: list[tuple[str, int, int, str, float, float]] = []

    def call_sent(self, role: str, rank: int, device: int, method: str) -> None:
        self.sent.append((role, rank, device, method))

    def call_ended(
        self, role: str, rank: int, device: int, method: str, start: float, end: float, *, died: bool
    ) -> None:
        assert not died
        self.spans.append((role, rank, device, method, start, end))


@pytest.fixture
def notebook(cluster: Cluster) -> Iterator[Notebook]:
    book = Notebook()
    cluster.call_watchers.append(book)
    yield book
    cluster.call_watchers.remove(book)


@pytest.mark.slow
def test_spans_are_of_the_host_and_of_every_rank(
    cluster: Cluster, run: Run, role: str, notebook: Notebook
) -> None:
    devices = tuple(range(cluster.num_devices))[-2:]  # two devices that are not the first, where there are
    group = run(cluster.create_group(role, Sleeper, devices=devices))
    before = time.time()
    run(group.call(Sleeper.work, 0.02))
    run(group.call(Sleeper.nap, 0.02))
    after = time.time()
    expected = [(role, rank, device, name) for name in ("work", "nap") for rank, device in enumerate(devices)]
    assert notebook.sent == expected
    assert [span[:4] for span in notebook.spans] == expected
    for *_, start, end in notebook.spans:
        assert end - start >= 0.02
        assert before <= start < end <= after + 1e-3  # one machine, one clock
    naps = [start for *_, name, start, _ in notebook.spans if name == "nap"]
    works = [end for *_, name, _, end in notebook.spans if name == "work"]
    assert min(naps) >= max(works)


def test_waiting_for_the_training_thread_is_not_in_the_span(
    cluster: Cluster, run: Run, role: str, notebook: Notebook
) -> None:
    group = run(cluster.create_group(role, Sleeper))

    async def both() -> None:
        await asyncio.gather(group.call(Sleeper.work, 0.05), group.call(Sleeper.work, 0.01))

    run(both())
    mine = sorted(span[4:] for span in notebook.spans if span[1] == 0)
    assert mine[0][1] <= mine[1][0]


def test_failed_and_cancelled_calls_are_told_too(
    cluster: Cluster, run: Run, role: str, notebook: Notebook
) -> None:
    group = run(cluster.create_group(role, Sleeper))
    with pytest.raises(WorkerError, match="no"):
        run(group.call(Sleeper.fail))

    async def cancelled() -> None:
        call = asyncio.ensure_future(group.call(Sleeper.nap, 1000.0))
        while "nap" not in {sent[3] for sent in notebook.sent}:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run(cancelled())
    assert [span[:4] for span in notebook.spans] == notebook.sent
    assert {span[3] for span in notebook.spans} == {"fail", "nap"}
    for _, _, _, name, start, end in notebook.spans:
        assert 0 <= end - start < 1000.0, name


def test_cpu_time_of_hosts_and_what_they_started(cluster: Cluster, run: Run, role: str) -> None:
    group = run(cluster.create_group(role, Sleeper, devices=(cluster.num_devices - 1,)))
    before = run(cluster.cpu_seconds())
    own = time.process_time()
    run(group.call(Sleeper.burn, 0.3))
    own = time.process_time() - own
    after = run(cluster.cpu_seconds())
    assert list(before) == list(after) == list(range(cluster.num_devices))
    used = {device: after[device].all - before[device].all for device in after}
    host = used.pop(cluster.num_devices - 1)
    if used:  # with `ray`: its own time, and that of its child
        assert host >= 0.57
        assert sum(used.values()) < host
    else:  # with `local`: the child's alone, for the host is this very process
        assert own >= 0.3
        assert 0.27 <= host < 0.27 + own
