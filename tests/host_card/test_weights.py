"""What a weight sync to an engine in a process of its own asks of a card and of the host, on both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rondo.core.types import Hop
from rondo.rollout.weights import WeightStore
from rondo.weights.checksum import checksums
from tests.gpu.test_ipc import CARD, SPEC
from tests.host_card import on_the_host_card
from tests.host_card.syncs import Side, counted_engine, counted_sync
from tests.rollout.conftest import build, weights

pytestmark = on_the_host_card
BUCKET = 51_200  # a multiple of what the allocator rounds to


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {name: one.to(CARD, torch.bfloat16) for name, one in weights(build("qwen3")).items()}


def synced(tensors: dict[str, torch.Tensor], hop: Hop) -> tuple[Side, Side, int]:
    sums = checksums(tensors)
    with counted_engine(replace(SPEC, dtype="bfloat16"), BUCKET, hop) as engine:
        return counted_sync(engine, tensors, sums, BUCKET)


def test_nothing_goes_through_the_host(tensors: dict[str, torch.Tensor]) -> None:
    """No copy on either side but one: the checksums' numbers, which the engine reads at once, in no more than
    two reads. Beside the two models there are two buckets, the sender's; and one wait for each bucket on each
    side, for what was copied.
    """
    sent, received, peak = synced(tensors, "ipc")
    largest = max(tensor.nbytes for tensor in tensors.values())
    least = -(-sum(tensor.nbytes for tensor in tensors.values()) // BUCKET)
    assert (sent.host_copies, sent.values.total()) == (0, 0)
    assert received.values.total() <= 2, received.values
    assert received.host_copies <= 2, (received.values, received.copies_in)
    assert sent.peak == peak <= BUCKET + max(BUCKET, largest)
    for side in (sent, received):
        waits = side.reads.total() - side.values.total()
        assert least <= waits <= 2 * least, side.reads


def test_through_the_host_each_tensor_is_copied_twice(tensors: dict[str, torch.Tensor]) -> None:
    """What the other test would see if no memory of a card were opened: a copy per tensor on each side."""
    sent, received, peak = synced(tensors, "host")
    assert peak > 0
    assert sent.host_copies == len(tensors)
    assert len(tensors) <= received.host_copies <= len(tensors) + 2
    assert sent.peak == 0


def test_what_was_cast_on_its_way_in_is_read_with_the_rest() -> None:
    """One tensor comes wider than it is kept: its sum is of what came, in the host's memory."""
    module = build("qwen3").to(CARD, torch.bfloat16)
    store = WeightStore(module, None, torch.bfloat16, torch.device(CARD))
    sent = {name: one.to("cpu", torch.bfloat16) for name, one in weights(build("qwen3")).items()}
    wide = next(iter(sent))
    sent[wide] = sent[wide].float() + 1e-4
    store.begin(1)
    for name, tensor in sent.items():
        store.receive(name, tensor)
    store.commit(1, checksums(sent))
    assert (store.version, store.complete) == (1, True)
