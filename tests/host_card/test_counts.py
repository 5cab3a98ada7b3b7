"""What the host card counts, and what only it can show: memory of all processes, pinned memory that ends."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from rondo.weights.checksum import box_sum, checksums, combine, read
from rondo.weights.exchange import Transfer, piece_of, receive, send
from rondo.weights.layout import Layout, Parameter
from tests import begun
from tests.host_card import card, on_the_host_card
from tests.ranks import run_ranks

pytestmark = on_the_host_card
HERE = "test_counts.py"


def lines(counts: Counter[str]) -> dict[str, int]:
    """The counts without the numbers of lines."""
    return dict(Counter(name.rpartition(":")[0] for name in counts.elements()))


def test_kernels_and_their_bytes() -> None:
    a, b = torch.ones(4, 8, device="cuda"), torch.ones(8, 2, device="cuda")
    with card().counted() as counts:
        c = a @ b  # 128 and 64 bytes in, 32 out
        c.T.reshape(8)[2:4].unsqueeze(0).expand(5, 2) + 1  # one copy: 32 in, 32 out; 8 in, 40 out
    assert counts.kernels == {"aten::mm": 1, "aten::copy_": 1, "aten::add": 1}
    assert counts.bytes == 224 + 64 + 48
    assert counts.stalls == 0


def test_reads_have_their_line() -> None:
    on_card = torch.tensor([1.0, 0.0, 2.0], device="cuda")
    with card().counted() as counts:
        for _ in range(3):
            on_card.sum().item()
        on_card.tolist()
        on_card[on_card > 0]
        on_card[on_card > 0] = 3.0  # becomes masked_fill: the host need not know how many
        on_card.repeat_interleave(torch.tensor([1, 2, 3]).to("cuda", non_blocking=True), output_size=6)
        torch.cuda.synchronize()
    assert lines(counts.reads) == {
        f"item at {HERE}": 3,
        f"copy out at {HERE}": 1,
        f"aten::nonzero at {HERE}": 1,
        f"synchronize at {HERE}": 1,
    }
    assert len(counts.reads) == 4
    assert not counts.copies_in
    assert counts.copies == {"in, staged": 1}


def test_a_line_of_ours_is_named() -> None:
    """The innermost one in src/, not torch's below it nor the test's above."""
    from rondo.training.checkpoint import bytes_of

    with card().counted() as counts:
        bytes_of(torch.ones(3, device="cuda"))
    (line,) = counts.reads
    assert line.startswith("copy out at rondo/training/checkpoint.py:")


def test_copies_wait_unless_memory_is_pinned() -> None:
    plain, pinned, on_card = torch.ones(3), torch.ones(3, pin_memory=True), torch.empty(3, device="cuda")
    with card().counted() as counts:
        on_card.copy_(plain)
        on_card.copy_(pinned)
        on_card.copy_(plain, non_blocking=True)
        on_card.copy_(pinned, non_blocking=True)
        plain.copy_(on_card, non_blocking=True)
        pinned.copy_(on_card, non_blocking=True)
        torch.empty(100, pin_memory=True)
    assert lines(counts.copies_in) == {f"copy_ at {HERE}": 2}
    assert lines(counts.reads) == {f"copy out at {HERE}": 1}
    assert counts.copies == {"in, staged": 1, "in, async": 1, "out, async": 1}
    assert counts.pinned == 1
    assert counts.stalls == 3


def test_a_replay_is_one_launch() -> None:
    given, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given * 2 + 1
    with card().counted() as counts:
        graph.replay()
        graph.replay()
    assert counts.replays == 2
    assert not counts.kernels


def test_numbers_of_a_capture_are_none_before_its_replay() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ones(3, device="cuda") * 2
    assert out.isnan().all().item()
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_collectives_are_counted() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with card().counted() as counts:
            dist.all_reduce(torch.ones(3, device="cuda"))
            dist.broadcast(torch.ones(5, device="cuda"), 0)
    finally:
        dist.destroy_process_group()
    assert counts.collectives == {"all_reduce": 1, "broadcast": 1}
    assert counts.collective_bytes == 32


def test_pinned_memory_is_rounded_up_and_ends() -> None:
    """Each block is a power of two; one that was freed serves again."""
    ext = card().ext
    before = ext.pinned_bytes()
    for _ in range(2):  # larger than what other tests have freed
        block = torch.empty((1 << 26) + 1, dtype=torch.uint8, pin_memory=True)
        assert ext.pinned_bytes() == before + (2 << 26)
        del block
    assert ext.pinned_bytes() == before + (2 << 26)
    program = "import torch; torch.empty(3 << 19, dtype=torch.uint8, pin_memory=True)"
    for limit, fits in ((2 << 20, True), ((2 << 20) - 1, False)):
        variables = {**os.environ, "RONDO_HOST_CARD_PINNED_BYTES": str(limit)}
        done = begun.run(["-c", program], env=variables, capture_output=True, text=True)
        assert (done.returncode == 0) == fits, done.stderr
        assert fits or "2097152 bytes of pinned memory beside 0 of 2097151" in done.stderr


OTHER = """
import sys, torch
block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
{frees}
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("frees", "held"), [("", 1), ("del block", 1), ("del block; torch.cuda.empty_cache()", 0)], ids=str
)
def test_processes_share_the_memory_of_a_card(frees: str, held: int) -> None:
    """What a process has freed, and not given back, another cannot have; one that ends gives all back."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with begun.Program(["-c", OTHER.format(frees=frees)], **pipes, text=True) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == free - (held << 30)
        assert torch.cuda.mem_get_info() == (free - (held << 30), total)
        if held:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(free - (1 << 29), dtype=torch.uint8, device="cuda")
        other.kill()
    assert torch.cuda.mem_get_info() == (free, total)


def test_a_process_sees_the_cards_that_its_variable_names() -> None:
    program = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available())"
    for visible, expected in (("1", "1 True"), ("", "0 False"), ("1,0", "2 True"), ("7", "0 False")):
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        done = begun.run(["-c", program], env=variables, capture_output=True, text=True)
        assert done.stdout.strip() == expected, visible


OPENS = """
import pickle, sys, torch
rebuild, handle = pickle.load(open(sys.argv[1], "rb"))
tensor = rebuild(*handle)
print(tensor.tolist(), torch.cuda.memory_allocated())
"""


def test_memory_is_opened_on_its_own_card(tmp_path: Path) -> None:
    """By the number that the other process gives it. (CUDA maps it on another card, without a word.)"""
    given = torch.arange(3.0, device="cuda:0")
    for visible, device, said in (("1", 0, "invalid device: memory of card 0"), ("1,0", 1, ""), ("0", 0, "")):
        rebuild, handle = reduce_tensor(given)
        sent = pickle.dumps((rebuild, (*handle[:6], device, *handle[7:])))
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        (tmp_path / "handle").write_bytes(sent)
        done = begun.run(
            ["-c", OPENS, str(tmp_path / "handle")], env=variables, capture_output=True, text=True
        )
        assert said in done.stderr
        assert done.stdout == ("" if said else "[0.0, 1.0, 2.0] 0\n")


CLOSED = """
import torch
from torch.multiprocessing.reductions import reduce_tensor
given = torch.ones(4 << 20, dtype=torch.uint8, device="cuda")
handle = reduce_tensor(given)[1]
del given
torch.cuda.ipc_collect()
print(torch.cuda.memory_allocated() >> 20)
try:
    torch.empty(6 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
torch.UntypedStorage._release_ipc_counter_cuda(*handle[11:13])  # as a process does that has opened it already
torch.empty(6 << 20, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_allocated() >> 20)
"""


def test_memory_that_others_have_closed_is_taken_back_where_there_is_none_left(tmp_path: Path) -> None:
    alone = {"RONDO_HOST_CARD_BYTES": str(8 << 20), "RONDO_HOST_CARD_LEDGER": str(tmp_path / "ledger")}
    variables = {**os.environ, **alone}
    done = begun.run(["-c", CLOSED], env=variables, capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == ["4", "out of memory", "0"], done.stderr


def test_a_sum_of_rows_or_columns_is_read_with_all_others() -> None:
    whole = torch.arange(512 * 1024.0).view(512, 1024).bfloat16()
    on_card = {name: tensor.to("cuda") for name, tensor in (("all", whole), ("a few", whole[:1, :7]))}
    halves = [part.contiguous() for part in on_card["all"].chunk(2, 1)]
    with card().counted() as counts:
        sums = checksums(on_card)
        parts = [box_sum(part, (0, at), whole.shape) for at, part in zip((0, 512), halves, strict=True)]
    assert lines(counts.reads) == {"copy out at rondo/weights/checksum.py": 1}
    assert not counts.copies_in
    assert counts.kernels.total() < 60
    assert sums == checksums({"all": whole, "a few": whole[:1, :7]})
    assert combine(read(dict(zip("ab", parts, strict=True))).values()) == sums["all"]


class _Kept:
    """A sink that looks once, at its commit."""

    def begin(self, version: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor

    def commit(self, version: int, checksums_sent: Mapping[str, int] | None = None) -> None:
        assert checksums_sent == checksums(self.tensors)


def _sent(rank: int, world: int, tensors: int) -> tuple[dict[str, int], dict[str, int]]:
    """Rank 0 sends to rank 1."""
    parameters = [Parameter(f"w{i}", (8, 6), "bfloat16") for i in range(tensors)]
    layout, device = Layout.replicated(parameters, [0]), f"cuda:{rank}"
    transfer = Transfer(layout, (1,), 400, timeout_seconds=100, name="counted")
    own = transfer.own_group(device)
    held = {one.name: torch.full((8, 6), float(i), device=device) for i, one in enumerate(parameters)}
    with card().counted() as counts:
        if rank == 0:
            assert send(transfer, 1, piece_of(layout, held), device, own).lost == {}
        else:
            receive(transfer, 1, _Kept(), device, own)
    assert own is not None
    own.abort("done")
    return lines(counts.reads), lines(counts.copies_in)


def test_a_sync_between_cards_is_looked_at_as_often_whatever_it_has() -> None:
    few, many = (run_ranks(2, _sent, tensors, cards=True) for tensors in (2, 40))
    assert few == many
    here, sums = "rondo/weights/exchange.py", "rondo/weights/checksum.py"
    # The sender reads the answer to its start; the receiver the start, and both sides' sums. What a sync
    # begins and ends with, and the places of the sums, comes from the host.
    assert few[0] == ({f"copy out at {here}": 1}, {f"copy_ at {here}": 3})
    assert few[1] == ({f"copy out at {here}": 2, f"copy out at {sums}": 1}, {f"copy_ at {here}": 3})
