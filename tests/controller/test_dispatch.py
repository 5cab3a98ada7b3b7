"""How rows are cut and collected: properties of the cut, and eight ranks of a mesh without eight
processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.config import load
from rondo.config.schema import AttentionBalanceConfig, TokenBalanceConfig
from rondo.controller import Mesh, WorkerContext, WorkerGroup, start_cluster
from rondo.controller.calls import Ended, RankCall
from rondo.controller.host import Host
from rondo.controller.local import LocalHandle
from rondo.controller.worker import Placer, cut
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.errors import WorkerError
from rondo.system.actor import Failure
from tests.controller.sample_workers import Calculator
from tests.messages import full_text

MESHES = [
    Mesh((("pp", 2), ("dp", 2), ("tp", 2))),
    Mesh((("dp", 3),)),
    Mesh((("dp", 2), ("cp", 2))),
    Mesh((("tp", 2),)),
]


def index_of(lengths: list[int], mini_batch: list[int] | None = None) -> Batch:
    columns = {ROW_ID: np.arange(len(lengths)), "prompt_length": np.array(lengths, np.int64)}
    if mini_batch is not None:
        columns["mini_batch"] = np.array(mini_batch, np.int64)
    return Batch.of(columns)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=30), st.integers(1, 5))
def test_a_cut_is_a_balanced_partition_within_each_mini_batch(
    rows: list[tuple[int, int]], parts: int
) -> None:
    lengths, mini_batch = [length for length, _ in rows], [number for _, number in rows]
    shards = cut(index_of(lengths, mini_batch), parts)
    assert len(shards) == parts
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(rows)))
    for number in set(mini_batch):
        loads = [sum(lengths[i] for i in shard if mini_batch[i] == number) for shard in shards]
        assert max(loads) - min(loads) <= max(n for n, m in rows if m == number)


def test_rows_are_spread_by_what_the_cluster_says() -> None:
    index = index_of([8000, 4000, 4000, 4000, 4000])
    found = {
        by: sorted(sorted(shard.tolist()) for shard in cut(index, 2, by))
        for by in (
            TokenBalanceConfig(),
            AttentionBalanceConfig("attention", linear=1000.0),
            AttentionBalanceConfig("attention", linear=1000.0, equal_sizes=True),
        )
    }
    sizes = [sorted(map(len, shards)) for shards in found.values()]
    assert sizes == [[2, 3], [1, 4], [2, 3]]
    cluster = load(["quickstart"], ["cluster.balance={name: attention, linear: 6144}"]).config.cluster
    assert cluster.balance == AttentionBalanceConfig("attention", 6144.0)

    async def placed_by() -> object:
        running = await start_cluster(replace(cluster, device="cpu"))
        try:
            return running.placer.by
        finally:
            await running.shutdown()

    assert asyncio.run(placed_by()) == cluster.balance


def test_without_lengths_rows_cost_the_same() -> None:
    assert sorted(len(s) for s in cut(Batch.of({ROW_ID: np.arange(7)}), 3)) == [2, 2, 3]


def group_in_this_process(mesh: Mesh) -> WorkerGroup:
    """A host object per rank, all on the event loop's thread; no torch.distributed."""
    handles = []
    for rank in range(mesh.size):
        host = Host(rank, mesh.size, "cpu", 1, 60.0, inline=True)
        context = WorkerContext(
            role="calculator",
            rank=rank,
            world_size=mesh.size,
            device="cpu",
            threads=1,
            peers=MappingProxyType(host.workers),
            mesh=mesh,
            ranks=tuple(range(mesh.size)),
            groups=(),
        )
        host.workers["calculator"] = Calculator(context)
        handles.append(LocalHandle(host))

    async def resolve(blocks: object) -> list[Batch]:
        return list(blocks)  # type: ignore[call-overload]

    return WorkerGroup("calculator", Calculator, mesh, handles, resolve)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MESHES), st.lists(st.lists(st.integers(0, 1000), max_size=5), max_size=12))
def test_split_and_collect_is_the_identity_on_any_mesh(mesh: Mesh, tokens: list[list[int]]) -> None:
    rows = ragged_rows([np.array(row) for row in tokens], np.int32)
    lengths = np.array([len(row) for row in tokens], np.int32)
    batch = Batch.of({ROW_ID: np.arange(len(tokens)), "response_length": lengths, "tokens": rows})

    async def main() -> None:
        group = group_in_this_process(mesh)
        ref = BatchRef.of(batch, ["response_length"])
        out = await (await group.call(Calculator.multiply, ref)).fetch(["multiplied"])
        assert [row.tolist() for row in out.rows("multiplied")] == [[2 * t for t in row] for row in tokens]
        seen = await group.call(Calculator.row_ids, ref)
        assert len(seen) == mesh.axis_size("dp")
        assert sorted(i for shard in seen for i in shard) == list(range(len(tokens)))

    asyncio.run(main())


def test_ranks_of_a_data_parallel_group_see_the_same_rows() -> None:
    mesh = MESHES[0]

    async def main() -> list[list[int]]:
        group = group_in_this_process(mesh)
        ref = BatchRef.of(
            Batch.of({ROW_ID: np.arange(6), "tokens": ragged_rows([np.arange(2)] * 6, np.int32)}), []
        )
        shards = ref.shards(("tokens",), cut(ref.index, 2))
        seen = []

        class Spy(LocalHandle):
            def pack(self, call: object, alike: object) -> object:  # type: ignore[override]
                seen.append(call.shard.index.scalars(ROW_ID).tolist())  # type: ignore[attr-defined]
                return call

        for handle in group._hosts:
            handle.__class__ = Spy
        await group.call(Calculator.multiply, ref)
        assert seen == [shards[at].index.scalars(ROW_ID).tolist() for at in mesh.dp_shards]
        return seen

    assert len(asyncio.run(main())) == 8


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 4))
def test_a_cut_keeps_pairs_together_and_adjacent(lengths: list[int], parts: int) -> None:
    units = np.repeat(np.arange(len(lengths))[::-1], 2)
    index = index_of([n for n in lengths for _ in range(2)]).with_columns({"unit": units})
    for shard in cut(index, parts):
        assert units[shard[0::2]].tolist() == units[shard[1::2]].tolist()
        assert np.all(shard[1::2] - shard[0::2] == 1)


def test_a_broadcast_is_packed_once_for_all_ranks() -> None:
    packed = []

    class Spy(LocalHandle):
        def pack(self, call: RankCall, alike: object) -> RankCall:
            packed.append(call.method)
            return call

    async def main() -> None:
        group = group_in_this_process(MESHES[0])
        for handle in group._hosts:
            handle.__class__ = Spy
        await group.call(Calculator.note, "hello")
        assert await group.call(Calculator.notes) == [["hello"]] * 8

    asyncio.run(main())
    assert packed == ["note", *["notes"] * 8]


def test_a_call_whose_host_breaks_before_it_has_begun_fails_with_the_reason() -> None:
    class Silent(LocalHandle):
        async def send(self, packed: RankCall, ticket: int | None) -> Ended:
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        group = group_in_this_process(Mesh((("dp", 2),)))
        group._hosts[0].__class__ = Silent
        call = asyncio.ensure_future(group.call_rank(0, Calculator.notes))
        await asyncio.sleep(0)  # submitted, and no step done of what sends it
        group._hosts[0].condemn(Failure("it hangs"))
        with pytest.raises(WorkerError, match=full_text("unusable since: it hangs")) as caught:
            await call
        assert caught.value.died
        assert group.alive == (1,)
        assert await group.call_each(Calculator.notes) == {1: []}

    asyncio.run(main())


def test_rows_are_placed_once_until_something_that_decides_changes() -> None:
    placer = Placer()
    index = index_of([5, 4, 3, 2, 1], [0, 0, 0, 1, 1])
    placed = placer.place(index, 2)
    assert [rows.tolist() for rows in placed] == [rows.tolist() for rows in cut(index, 2)]
    grown = index.with_columns({"loss_weight": np.ones(5)})
    assert placer.place(grown, 2) is placed
    assert placer.place(grown.take(np.arange(5)), 2) is placed
    assert placer.place(index, 3) is not placed
    other = placer.place(index.with_columns({"mini_batch": np.zeros(5, np.int64)}, replace=True), 2)
    assert other is not placed
    fewer = placer.place(index.take([0, 1, 2]), 2)
    assert sorted(np.concatenate(fewer).tolist()) == [0, 1, 2]
    assert placer.place(index, 2) is placed  # still known, after three others
    for lengths in ([1], [2], [3], [4]):
        placer.place(index_of(lengths), 2)
    assert placer.place(index, 2) is not placed
    assert [rows.tolist() for rows in placer.place(index, 2)] == [rows.tolist() for rows in placed]


def test_roles_with_as_many_ranks_agree_on_who_computes_which_rows() -> None:
    """What one role wrote about a rank's rows is one block, and all that the same rank of another reads."""
    first, second = group_in_this_process(MESHES[1]), group_in_this_process(MESHES[1])
    second._placer = first._placer
    index = index_of([5, 4, 3, 2, 1, 7, 8])
    rows = ragged_rows([np.arange(3)] * 7, np.int32)
    ref = BatchRef.of(index.with_columns({"tokens": rows}), ["prompt_length"])
    written = asyncio.run(first.call(Calculator.multiply, ref))
    seen = asyncio.run(second.call(Calculator.row_ids, written, reads=["multiplied"]))
    assert seen == [sorted(block.row_ids.tolist()) for block in written.blocks[1:]]
    assert len(second._placer._placed) == 1
