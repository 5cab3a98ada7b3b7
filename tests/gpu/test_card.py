"""What a CUDA device is to the code that uses it: what it refuses, what waits, what memory it keeps.

These run on a real card and on the one in host memory (tests/host_card): the second must be like the first.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_tensors_of_two_devices_are_refused() -> None:
    on_card, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    mixed: dict[str, Callable[[], Any]] = {
        "sum": lambda: on_card + on_host,
        "product": lambda: on_card @ on_host,
        "scalars": lambda: torch.stack([torch.ones((), device="cuda"), torch.ones(())]),
        "in place": lambda: on_host.add_(on_card),
        "embedding": lambda: torch.nn.functional.embedding(torch.tensor([0]), on_card[:, None]),
        "gather": lambda: on_card.gather(0, torch.tensor([0])),
        "cross entropy": lambda: torch.nn.functional.cross_entropy(on_card[None], torch.tensor([0])),
    }
    for name, op in mixed.items():
        with pytest.raises(RuntimeError, match=r"same device|same GPU|two devices"):
            pytest.fail(f"{name}: {op()}")


def test_a_number_on_the_host_is_an_argument() -> None:
    assert (torch.ones(3, device="cuda") * torch.tensor(2.0)).tolist() == [2.0] * 3
    assert torch.arange(4, device="cuda")[torch.tensor([3, 1])].tolist() == [3, 1]


def test_a_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())


def test_a_device_without_its_number_is_not_chosen() -> None:
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device("cuda")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(torch.cuda.device_count())


def test_a_capture_runs_nothing_and_a_replay_everything() -> None:
    given, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    (given * 2).add_(1)  # handles exist before the capture
    with torch.cuda.graph(graph):
        out = given * 2 + 1
        total.add_(out)
    assert total.tolist() == [0.0] * 4
    for value in (5.0, 7.0):
        given.copy_(torch.full((4,), value))
        graph.replay()
        assert out.tolist() == [2 * value + 1] * 4
    assert total.tolist() == [26.0] * 4


@pytest.mark.parametrize(
    "op",
    [
        lambda on_card: on_card.sum().item(),
        lambda on_card: on_card.cpu(),
        lambda on_card: on_card.copy_(torch.ones(3)),
        lambda on_card: on_card.nonzero(),
        lambda on_card: torch.cuda.synchronize(),
    ],
    ids=["item", "copy out", "copy in", "size", "wait"],
)
def test_what_waits_is_refused_in_a_capture(op: Callable[[torch.Tensor], Any]) -> None:
    on_card, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):
        op(on_card)
    assert on_card.sum().item() == 3.0  # the next one works


def test_memory_is_kept_until_it_is_given_back() -> None:
    torch.cuda.empty_cache()
    size, allocated = 64 << 20, torch.cuda.memory_allocated()
    reserved, (free, total) = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    torch.cuda.reset_peak_memory_stats()
    block = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == allocated + size
    assert torch.cuda.mem_get_info() == (free - size, total)
    del block
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.max_memory_allocated() == allocated + size
    assert torch.cuda.memory_reserved() == reserved + size
    assert torch.cuda.mem_get_info() == (free - size, total)  # another process does not get it
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.mem_get_info() == (free, total)


def test_memory_has_an_end() -> None:
    torch.cuda.empty_cache()
    allocated, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.05 + allocated / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.empty(total // 10, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == allocated
        assert torch.ones(3, device="cuda").sum().item() == 3.0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_pinned_memory_is_known() -> None:
    pinned = torch.ones(1000, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[10:20].is_pinned()
    assert not torch.ones(1000).is_pinned()
    copied = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert copied.sum().item() == 1000.0


@pytest.fixture
def nccl() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_collectives_take_dense_tensors_of_the_device() -> None:
    mean = torch.ones(3, device="cuda")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="No backend type associated"):
        dist.all_reduce(torch.ones(3))
    with pytest.raises((RuntimeError, ValueError), match="contiguous"):
        dist.all_reduce(torch.ones(4, 3, device="cuda").T)


def _in_a_fork(sender: Connection) -> None:
    try:
        torch.ones(3, device="cuda")
    except RuntimeError as error:
        sender.send(str(error))
    sender.close()


def test_a_fork_of_a_process_that_uses_it_cannot() -> None:
    torch.ones(3, device="cuda")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(sender,))
    process.start()
    sender.close()
    assert "Cannot re-initialize CUDA in forked subprocess" in receiver.recv()
    process.join()


# ---- memory of another process: cudaIpcGetMemHandle, as torch.multiprocessing uses it ----------------------


@contextmanager
def _another(body: Callable[[Connection], None]) -> Iterator[Connection]:
    """A process that runs `body` with the other end of this pipe."""
    context = torch_multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(60)
    assert process.exitcode == 0


def _adds_and_frees(pipe: Connection) -> None:
    torch.cuda.set_device(0)
    allocated = torch.cuda.memory_allocated()
    part = pipe.recv()
    pipe.send((part.tolist(), part.stride(), torch.cuda.memory_allocated() - allocated))
    pipe.recv()
    pipe.send(part.tolist())
    part += 10
    torch.cuda.synchronize()
    pipe.send(None)
    pipe.recv()
    del part
    torch.cuda.ipc_collect()
    pipe.send(None)


def test_a_tensor_of_one_process_is_seen_by_another() -> None:
    """Both write into the same bytes; what has been freed stays taken until the other has closed it."""
    torch.cuda.set_device(0)
    allocated = torch.cuda.memory_allocated()
    size = 8 << 20
    numbers = torch.zeros(size // 4, device="cuda")
    numbers[:6] = torch.arange(6.0)
    with _another(_adds_and_frees) as pipe:
        pipe.send(numbers[:6].view(2, 3)[:, 1:].T)
        assert pipe.recv() == ([[1.0, 4.0], [2.0, 5.0]], (1, 3), 0)
        numbers[1] = 7.0
        torch.cuda.synchronize()
        pipe.send(None)
        assert pipe.recv() == [[7.0, 4.0], [2.0, 5.0]]
        pipe.recv()
        assert numbers[:6].tolist() == [0.0, 17.0, 12.0, 3.0, 14.0, 15.0]
        del numbers
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == allocated + size
        pipe.send(None)
        pipe.recv()
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() == allocated


def _sends_a_handle(pipe: Connection) -> None:
    torch.cuda.set_device(0)
    rebuild, handle = reduce_tensor(torch.ones(3, device="cuda"))
    pipe.send((rebuild, handle))


def test_memory_of_a_process_that_has_ended_cannot_be_opened() -> None:
    torch.cuda.set_device(0)
    with _another(_sends_a_handle) as pipe:
        rebuild, handle = pipe.recv()
    with pytest.raises(RuntimeError, match=re.compile("cuda|invalid|no such file", re.IGNORECASE)):
        rebuild(*handle)


def test_a_process_cannot_open_its_own_memory() -> None:
    given = torch.arange(6.0, device="cuda")
    rebuild, handle = reduce_tensor(given)
    with pytest.raises(RuntimeError, match="CUDA error"):
        rebuild(*handle)
    assert given.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    rebuild, handle = reduce_tensor(given[:0])  # of the same storage
    with pytest.raises(RuntimeError, match="CUDA error"):
        rebuild(*handle)
    rebuild, handle = reduce_tensor(torch.empty(0, 3, device="cuda"))
    assert rebuild(*handle).shape == (0, 3)
