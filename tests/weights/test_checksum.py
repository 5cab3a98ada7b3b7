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
from rondo.weights.checksum import MODULUS, box_sum, checksum, checksums, combine, read

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


def of_box(part: torch.Tensor, offset: tuple[int, ...], whole: tuple[int, ...]) -> int:
    return read({"": box_sum(part, offset, whole)})[""]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few words are then summed as those of many are: by rows and columns, in slabs."""
    monkeypatch.setattr(module, "_COLUMNS", 7)
    monkeypatch.setattr(Cpu, "numbers", replace(Cpu.numbers, checksum_words=32))


SHAPES = ((), (0,), (1,), (5, 3), (7,), (13,), (14,), (1000,), (4, 25), (3, 130), (40, 3), (3, 2, 19))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", ["as it is", "small"])
def test_it_is_the_sum_of_its_definition(
    dtype: torch.dtype, size: str, request: pytest.FixtureRequest
) -> None:
    if size == "small":
        request.getfixturevalue(size)
    for shape in SHAPES:
        tensor = values(shape, dtype)
        assert checksum(tensor) == by_hand(tensor), shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_a_large_one(dtype: torch.dtype) -> None:
    tensor = values((3, 1 << 18), dtype)
    assert checksum(tensor) == by_hand(tensor)
    assert of_box(tensor[:, 7:99].contiguous(), (0, 7), (3, 1 << 18)) == by_hand(
        torch.zeros_like(tensor).index_copy(1, torch.arange(7, 99), tensor[:, 7:99])
    )


def test_several_tensors_at_one_time() -> None:
    tensors = {str(dtype): values((5, 3), dtype) for dtype in DTYPES}
    tensors["one of a wider"] = values((5, 3), torch.float32)[1:2, 0]
    one_by_one = {name: checksum(tensor) for name, tensor in tensors.items()}
    with Counted() as counted:
        assert checksums(tensors) == one_by_one
    assert counted.looks == 0  # at a single one; tests/host_card counts the copy that brings all
    assert checksums({}) == {}


def test_one_and_two_by_hand() -> None:
    assert checksum(torch.tensor([1, 2], dtype=torch.uint8)) == 1 * 1 + 2 * 3
    assert of_box(torch.tensor([2], dtype=torch.uint8), (1,), (2,)) == 2 * 3
    assert checksum(torch.tensor([-1], dtype=torch.int8)) == MODULUS - 1


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_parts_add_up(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    tensor = values(shape, dtype, seed=7)
    flat = tensor.flatten()
    cut = data.draw(st.integers(0, flat.numel()))
    ends = (of_box(flat[:cut], (0,), flat.shape), of_box(flat[cut:], (cut,), flat.shape))
    assert combine(ends) == checksum(tensor) == by_hand(tensor)
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = [((0,) * len(shape), tensor)]
    for dim, size in enumerate(shape):  # cut every box once along every dimension
        at = data.draw(st.integers(0, size))
        halves = []
        for offset, part in boxes:
            low, high = part.split([at, size - at], dim)
            beyond = tuple(o + at if d == dim else o for d, o in enumerate(offset))
            halves += [(offset, low), (beyond, high)]
        boxes = halves
    # On the device, where they wrap around; and read, each by itself.
    sums = [box_sum(part, offset, shape) for offset, part in boxes]
    assert combine([int(torch.stack(sums).sum())]) == combine(int(one) for one in sums) == checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small")
def test_boxes_of_any_axes_add_up_in_slabs(dtype: torch.dtype) -> None:
    whole = values((6, 5, 40), dtype)
    for dims in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
        boxes = [((0, 0, 0), whole)]
        for dim in dims:
            at = whole.shape[dim] // 3
            boxes = [
                (tuple(o + low if d == dim else o for d, o in enumerate(offset)), part.narrow(dim, low, size))
                for offset, part in boxes
                for low, size in ((0, at), (at, whole.shape[dim] - at))
            ]
        assert combine(of_box(part, offset, whole.shape) for offset, part in boxes) == by_hand(whole), dims


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
        self.looks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.looks += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cut", [1, 0])
def test_a_shard_costs_a_few_operations_and_no_look_at_the_device(cut: int) -> None:
    """Along rows and along columns: a look per row was 16 s of each sync of a model of 8B on a card."""
    whole = values((512, 1024), torch.bfloat16)
    part = whole.chunk(2, cut)[1].contiguous()
    offset = (0, 512) if cut else (256, 0)
    with Counted() as counted:
        box_sum(part, offset, whole.shape)
    assert counted.looks == 0
    assert counted.operations < 30
    other = of_box(whole.chunk(2, cut)[0].contiguous(), (0, 0), whole.shape)
    assert combine([other, of_box(part, offset, whole.shape)]) == checksum(whole)
