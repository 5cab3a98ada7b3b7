"""What is particular to the local backend."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rondo.config.schema import ClusterConfig
from rondo.controller import Worker, dispatch, host, start_cluster
from rondo.core.errors import ConfigError
from tests.controller.sample_workers import Calculator
from tests.messages import full_text


@pytest.fixture
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The garbage collector looks at everything, as in a process that never asked for anything else."""
    monkeypatch.setattr(host, "_freezes", [])
    gc.unfreeze()
    yield
    gc.freeze()  # as tests/conftest.py


class WhichThread(Worker):
    @dispatch("broadcast")
    def name(self) -> str:
        return threading.current_thread().name


def test_inline_runs_on_the_event_loops_thread() -> None:
    async def main() -> list[str]:
        names = []
        for inline in (True, False):
            config = ClusterConfig(inline=inline, device="cpu")
            async with await start_cluster(config) as cluster:
                names.append(await (await cluster.create_group("w", WhichThread)).call(WhichThread.name))
        return names

    assert asyncio.run(main()) == [threading.main_thread().name, "rondo-train_0"]


def test_shutdown_undoes_what_start_did_and_closes_workers_once(unfrozen: None) -> None:
    class Closing(Calculator):
        def close(self) -> None:
            self.closed += 1

    async def main() -> tuple[int, int, bool, bool, int]:
        async with await start_cluster(ClusterConfig(device="cpu", threads=2)) as cluster:
            await cluster.create_group("w", Closing)
            worker = cluster._host.workers["w"]  # type: ignore[attr-defined]
            inside, up = torch.get_num_threads(), dist.is_initialized()
            frozen, threshold = gc.get_freeze_count() > 0, gc.get_threshold()[0]
            await cluster.create_group("also", Calculator)
            await cluster.shutdown()
        return worker.closed, inside, up, frozen, threshold

    threads, initialised, thresholds = torch.get_num_threads(), dist.is_initialized(), gc.get_threshold()
    assert asyncio.run(main()) == (1, 2, True, True, 20_000)
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, thresholds)
    assert (torch.get_num_threads(), dist.is_initialized()) == (threads, initialised)
    assert not [t for t in threading.enumerate() if t.name.startswith("rondo-train") and initialised is False]


def test_what_a_process_has_frozen_stays_so_and_no_more_is(unfrozen: None) -> None:
    """As `rondo train` does with its imports: to look through them at the end takes a second."""

    async def main() -> int:
        async with await start_cluster(ClusterConfig(device="cpu")) as cluster:
            await cluster.create_group("w", Calculator)
            return gc.get_freeze_count()

    gc.freeze()
    try:
        before = gc.get_freeze_count()
        inside, after = asyncio.run(main()), gc.get_freeze_count()
    finally:
        gc.unfreeze()
    # Frozen objects still go when nobody refers to them; none has come.
    assert 0.9 * before < after <= inside <= before


@pytest.mark.parametrize("own", [0, 50_000])
def test_a_garbage_collector_that_is_off_or_looks_less_often_stays_so(own: int) -> None:
    async def main() -> int:
        async with await start_cluster(ClusterConfig(device="cpu")) as cluster:
            await cluster.create_group("w", Calculator)
            return gc.get_threshold()[0]

    before = gc.get_threshold()
    try:
        gc.set_threshold(own)
        assert asyncio.run(main()) == gc.get_threshold()[0] == own
    finally:
        gc.set_threshold(*before)


def test_blocks_are_not_copied_on_the_way() -> None:
    """The handle of a block is the Batch itself."""

    async def main() -> bool:
        async with await start_cluster(ClusterConfig(device="cpu")) as cluster:
            group = await cluster.create_group("w", Calculator)
            ref = await group.call_rank(0, Calculator.make_rows, 4, keep=())
            (block,) = await cluster.resolve([ref.blocks[0].handle])
            return block is ref.blocks[0].handle

    assert asyncio.run(main())


def test_one_process_has_one_device() -> None:
    with pytest.raises(ConfigError, match=full_text("cluster.backend=process (this machine)")):
        asyncio.run(start_cluster(ClusterConfig(devices=2)))


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device here"):
        asyncio.run(start_cluster(ClusterConfig(device="cuda")))
