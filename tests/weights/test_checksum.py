"""Checksums: the definition by hand, sums over any slicing, and every change and exchange that is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rondo.platform.cpu import Cpu
from rondo.weights import checksum as module
from rondo.weights.checksum import MODULUS, box_checksum, box_sum, checksum, checksums, combine

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def by_hand(tensor: torch.Tensor) -> int:
    """The definition, in Python's own integers."""
    flat = tensor.contiguous().reshape(-1)
    width = min(flat.element_size(), 4)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    words = np.frombuffer(raw, f"<i{width}").tolist()
    return sum(word * (2 * place + 1) for place, word in enumerate(words)) % MODULUS


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_of_its_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RUN", 7)
    for shape in ((), (0,), (1,), (5, 3), (7,), (4, 25), (3, 2, 19)):
        tensor = values(shape, dtype)
        assert checksum(tensor) == by_hand(tensor), shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_on_a_device_give_the_same(dtype: torch.dtype) -> None:
    """What other devices than CPUs sum with, on a CPU: of one run that begins anywhere, and of several."""
    for shape, starts in (((1, 7), [3]), ((3, 25), [0, 90, 41]), ((2, 1), [5, 1 << 40])):
        words = values(shape, dtype).view(
            torch.int8 if dtype == torch.bool else module._WORDS[dtype.itemsize]
        )
        places = torch.tensor(starts)
        assert module._weighted_by_integers(words, places) == module._weighted(words, places)


def test_several_tensors_at_one_time() -> None:
    tensors = {str(dtype): values((5, 3), dtype) for dtype in DTYPES}
    assert checksums(tensors) == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert checksums({}) == {}


def test_one_and_two_by_hand() -> None:
    assert checksum(torch.tensor([1, 2], dtype=torch.uint8)) == 1 * 1 + 2 * 3
    assert checksum(torch.tensor([2], dtype=torch.uint8), start=1) == 2 * 3
    assert checksum(torch.tensor([-1], dtype=torch.int8)) == MODULUS - 1


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_parts_add_up(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    tensor = values(shape, dtype, seed=7)
    flat = tensor.flatten()
    cut = data.draw(st.integers(0, flat.numel()))
    assert combine([checksum(flat[:cut]), checksum(flat[cut:], cut)]) == checksum(tensor)
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = [((0,) * len(shape), tensor)]
    for dim, size in enumerate(shape):  # cut every box once along every dimension
        at = data.draw(st.integers(0, size))
        halves = []
        for offset, part in boxes:
            low, high = part.split([at, size - at], dim)
            beyond = tuple(o + at if d == dim else o for d, o in enumerate(offset))
            halves += [(offset, low), (beyond, high)]
        boxes = halves
    assert combine(box_checksum(part, offset, shape) for offset, part in boxes) == checksum(tensor)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_a_flipped_bit_and_an_exchange_are_seen(data: st.DataObject, dtype: torch.dtype) -> None:
    tensor = values((40, 30), dtype)
    before = checksum(tensor)
    raw = tensor.view(torch.uint8).view(-1)
    place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert checksum(tensor) != before
    raw[place] ^= 1 << bit
    assert checksum(tensor) == before
    flat = tensor.view(-1)
    a, b = data.draw(st.integers(0, 1199)), data.draw(st.integers(0, 1199))
    changed = bool(flat[a] != flat[b])
    flat[[a, b]] = flat[[b, a]]
    assert (checksum(tensor) != before) == changed


def test_powers_of_two_in_float64_exchange_visibly() -> None:
    """Their low words are 0: a sum over 64-bit words would not see the exchange at a distance of 2048."""
    tensor = torch.zeros(4096, dtype=torch.float64)
    tensor[0], tensor[2048] = 1.0, 2.0
    other = tensor.roll(2048)
    assert checksum(tensor) != checksum(other)


class Counted(TorchDispatchMode):
    """Counts what is asked of the device inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cut", [1, 0])
def test_a_shard_costs_a_few_operations_and_no_look_at_the_device(
    cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along rows and along columns: a look per row was 16 s of each sync of a model of 8B on a card."""
    monkeypatch.setattr(module, "_FEW", 0)  # as where there is a device
    whole = values((512, 1024), torch.bfloat16)
    part = whole.chunk(2, cut)[1].contiguous()
    offset = (0, 512) if cut else (256, 0)
    with Counted() as counted:
        box_sum(part, offset, whole.shape)
    assert counted.reads == 0
    assert counted.operations < 60
    other = box_checksum(whole.chunk(2, cut)[0].contiguous(), (0, 0), whole.shape)
    assert combine([other, box_checksum(part, offset, whole.shape)]) == checksum(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_few_words_on_the_host_have_the_sum_of_many(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {str(n): values((n,), torch.float32).to(dtype) for n in (1, 1000, 1 << 16, 70001)}
    tensors["one of a wider"] = values((5, 3), torch.float32).to(dtype)[1:2, 0]
    parts = {name: box_checksum(tensor, (7,), (80000,)) for name, tensor in tensors.items()}
    few = checksums(tensors)
    monkeypatch.setattr(module, "_FEW", 0)
    assert few == checksums(tensors) == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert parts == {name: box_checksum(tensor, (7,), (80000,)) for name, tensor in tensors.items()}


def test_large_tensors_are_summed_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "numbers", replace(Cpu.numbers, checksum_words=64))
    monkeypatch.setattr(module, "_RUN", 16)
    monkeypatch.setattr(module, "_FEW", 0)
    for shape in ((1000,), (3, 130), (40, 3)):
        tensor = values(shape, torch.float32)
        assert checksum(tensor) == by_hand(tensor)
    whole = values((30, 200), torch.float32)
    parts = [
        box_checksum(part.contiguous(), (0, at), whole.shape)
        for part, at in zip(whole.split(150, 1), (0, 150), strict=True)
    ]
    assert combine(parts) == by_hand(whole)
