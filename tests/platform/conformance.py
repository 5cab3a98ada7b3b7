"""What every platform answers, in one list: it runs on the CPU and on one that is named by a path
(tests/platform), on the host card, and on a real one (tests/gpu/test_platform.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rondo.platform import Numbers, Platform, on_host, planned, platform_of

GIB = 1 << 30


def is_found_by_its_devices(platform: Platform) -> None:
    """By torch's device, its name, its kind; a tensor on it is where the name says."""
    name = platform.device()
    made = torch.ones(2, device=name).device
    for spelled in (name, platform.kind, torch.device(name), made):
        assert platform_of(spelled) is platform
        assert on_host(spelled) is platform.host
    assert made.type == platform.kind


def counts_its_devices(platform: Platform) -> None:
    """There are as many as it says, each with an id; one more there is not."""
    count = platform.count()
    assert platform.available()
    assert count >= 1
    assert len(platform.visible_ids()) == len(set(platform.visible_ids())) == count
    platform.check_here()
    for index in range(count):
        assert torch.ones(1, device=platform.device(index)).sum() == 1
        assert platform.describe(index)


def knows_its_memory(platform: Platform) -> None:
    """Free is at most all; what is made counts in the peak, and what is released is free again."""
    device = platform.device()
    free, total = platform.memory(device)
    assert 0 < free <= total
    assert platform.total(0) == total
    before = platform.peak(device)
    held = torch.ones(1 << 24, device=device)  # 64 MiB
    assert platform.peak(device) >= max(before, held.nbytes)
    less = platform.memory(device)[0]
    del held
    platform.release(device)
    if not platform.host:  # there, others come and go
        assert platform.memory(device)[0] - less >= 1 << 26


def has_a_current_device(platform: Platform) -> None:
    """It is the one that was made so, or devices have no number."""
    platform.use(platform.device())
    assert platform.current() in (0, None)
    if (current := platform.current()) is not None:
        assert torch.empty(1, device=platform.kind).device.index == current


def copies_from_pinned_memory(platform: Platform) -> None:
    """To and fro without a change, and only where it says so."""
    values = torch.arange(1 << 10)
    if not platform.pins:
        return
    there = values.pin_memory().to(platform.device(), non_blocking=True)
    back = torch.empty_like(there, device="cpu", pin_memory=True).copy_(there)
    assert torch.equal(back, values)


def copies_beside_what_it_computes(platform: Platform) -> None:
    """In the order in which it is asked, behind what the device computes; the host reads after `finish`."""
    device, stream = platform.device(), platform.stream(platform.device())
    host = torch.zeros(1 << 20, pin_memory=platform.pins)
    there = torch.zeros(1 << 20, device=device)
    for number in range(1, 4):
        there += number
        stream.copy([(host, there)])
        stream.wait(stream.copy([(there, host)]))
        there *= 2
    stream.copy([(host, there)])
    stream.finish()
    assert bool((host == ((1 * 2 + 2) * 2 + 3) * 2).all())


def _answers(pipe: Connection) -> None:
    """Opens what it is sent; says what is in it, and writes there once."""
    shared = pipe.recv()
    platform = planned(platform_of(shared.kind).name)
    opened = platform.opened(shared)
    pipe.send(opened.tolist())
    pipe.recv()
    pipe.send(opened.tolist())
    opened += 10
    platform.wait(opened.device)
    del opened
    pipe.send(None)


def lends_its_memory(platform: Platform) -> None:
    """Another process sees the same bytes, also those that come later, and closes them; each device has a
    name of its own, and one that nobody has is said.
    """
    if not platform.ipc:
        return
    names = [platform.uuid(index) for index in range(platform.count())]
    assert len(set(names)) == len(names)
    memory = torch.zeros(600, dtype=torch.uint8, device=platform.device())
    shared = platform.share(memory)
    assert (shared.kind, shared.uuid) == (platform.kind, names[0])
    assert pickle.loads(pickle.dumps(shared)) == shared
    assert {type(part) for part in shared.parts} <= {int, bytes, bool}
    with pytest.raises(RuntimeError, match="abacus"):
        platform.opened(replace(shared, uuid="abacus"))
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answers, args=(theirs,))
    process.start()
    theirs.close()
    ours.send(shared)
    assert ours.recv() == [0] * 600
    memory[:3] = 7
    platform.wait(memory.device)
    ours.send(None)
    assert ours.recv()[:4] == [7, 7, 7, 0]
    ours.recv()
    assert memory[:4].tolist() == [17, 17, 17, 10]
    process.join(60)
    assert process.exitcode == 0


def captures_graphs(platform: Platform) -> None:
    """A replay computes anew from what the tensors hold now; two graphs share one memory."""
    if not platform.graphs:
        return
    held = torch.ones(8, device=platform.device())
    graph, out = platform.capture(lambda: held * 3 + 1, None)
    held.copy_(torch.arange(8.0))
    graph.replay()
    assert out.tolist() == [1.0 + 3 * i for i in range(8)]
    second, doubled = platform.capture(lambda: held * 2, graph.pool())
    second.replay()
    assert doubled.tolist() == [2.0 * i for i in range(8)]


def multiplies_as_it_says(platform: Platform) -> None:
    """In half precision, summed and kept in float32 where it can."""
    left = torch.full((2, 512), 0.125, dtype=torch.bfloat16, device=platform.device())
    if platform.wide_products:
        product = torch.mm(left, left.T, out_dtype=torch.float32)
        assert product.dtype == torch.float32
        assert product.tolist() == [[8.0, 8.0]] * 2
    assert getattr(torch, platform.half) in (torch.float32, torch.bfloat16, torch.float16)


def says_all_numbers(platform: Platform) -> None:
    """Each is a size, and none is left out."""
    for field in fields(Numbers):
        number = getattr(platform.numbers, field.name)
        assert number is None or number > 0, field.name


def has_kernels_or_says_why_not(platform: Platform) -> None:
    """An error without words would reach a user."""
    assert set(platform.flash()) <= {"flash-attn", "torch"}
    assert platform.why_no_triton(torch.float64)
    assert (platform.why_no_triton(torch.float32) != "") >= platform.host


def adds_over_ranks(platform: Platform, group: Any = None) -> None:
    """Its back end for collectives takes its tensors. In a world of one."""
    device = torch.device(platform.device())
    platform.use(device)
    host = platform_of("cpu").collectives
    names = host if platform.host else f"cpu:{host},{platform.kind}:{platform.collectives}"
    at = None if platform.host else device
    dist.init_process_group(names, store=dist.HashStore(), rank=0, world_size=1, device_id=at)
    try:
        sums = torch.tensor([1.0, 2.0], device=device)
        dist.all_reduce(sums)
        assert sums.tolist() == [1.0, 2.0]
    finally:
        dist.destroy_process_group()


ASKED: tuple[Callable[[Platform], None], ...] = (
    is_found_by_its_devices,
    counts_its_devices,
    knows_its_memory,
    has_a_current_device,
    copies_from_pinned_memory,
    copies_beside_what_it_computes,
    lends_its_memory,
    captures_graphs,
    multiplies_as_it_says,
    says_all_numbers,
    has_kernels_or_says_why_not,
    adds_over_ranks,
)
EACH = pytest.mark.parametrize("asks", ASKED, ids=lambda asks: asks.__name__)
