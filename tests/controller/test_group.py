"""Worker groups: the same bodies on both backends, with real processes and real collectives in `ray`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

from rondo.controller import Cluster, Mesh, WorkerGroup, together
from rondo.core.batch import ROW_ID, Batch, BatchRef, ragged_rows
from rondo.core.errors import ConfigError, DataError, WorkerError
from rondo.core.types import StepStats
from tests.controller.conftest import Run
from tests.controller.sample_workers import Calculator, Neighbour
from tests.messages import full_text

LENGTHS = (3, 0, 5, 1, 4, 4, 2, 7, 1, 1)


def make_batch(lengths: tuple[int, ...] = LENGTHS, first_id: int = 100) -> Batch:
    tokens = [np.arange(n, dtype=np.int32) + 10 * i for i, n in enumerate(lengths)]
    return Batch.of(
        {
            ROW_ID: np.arange(len(lengths)) + first_id,
            "response_length": np.array(lengths, np.int32),
            "weight": np.linspace(0, 1, len(lengths)).astype(np.float32),
            "tokens": ragged_rows(tokens, np.int32),
        }
    )


def make_group(run: Run, cluster: Cluster, role: str, **options: Any) -> WorkerGroup:
    return run(cluster.create_group(role, Calculator, **options))


def put(cluster: Cluster, batch: Batch) -> BatchRef:
    return cluster.put(batch, ("response_length", "weight"))


@pytest.mark.slow
def test_split_returns_every_row_once_with_new_columns(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role, kwargs={"factor": 3})
    batch = make_batch()
    ref = run(group.call(Calculator.multiply, put(cluster, batch)))
    fetched = run(ref.fetch())
    assert fetched.scalars(ROW_ID).tolist() == batch.scalars(ROW_ID).tolist()
    for old, new in zip(batch.rows("tokens"), fetched.rows("multiplied"), strict=True):
        assert new.tolist() == (old * 3).tolist()
    assert fetched.select(batch.columns) == batch
    # the new block is read by the next call like any other
    again = run(group.call(Calculator.sums_and_stats, ref, reads=("multiplied", "tokens")))[0]
    assert run(again.fetch(["token_sum"])).scalars("token_sum").tolist() == [
        r.sum() for r in batch.rows("tokens")
    ]


def test_shards_are_balanced_within_mini_batches(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    ref = put(cluster, make_batch()).with_index({"mini_batch": np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])})
    shards = run(group.call(Calculator.row_ids, ref))
    assert sorted(i for shard in shards for i in shard) == ref.index.scalars(ROW_ID).tolist()
    assert len(shards) == cluster.num_devices
    lengths = dict(zip(ref.index.scalars(ROW_ID).tolist(), LENGTHS, strict=True))
    for low, high in ((100, 105), (105, 110)):
        loads = [sum(lengths[i] for i in shard if low <= i < high) for shard in shards]
        assert max(loads) - min(loads) <= max(lengths[i] for i in range(low, high))
    assert run(group.call(Calculator.row_ids, ref)) == shards  # the same cut for every call of a step


def test_step_stats_do_not_depend_on_the_number_of_shards(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    stats: StepStats = run(group.call(Calculator.count, put(cluster, make_batch()), "x"))
    assert stats.sums["x/tokens"] == sum(LENGTHS)
    assert stats.values()["x/weight"] == pytest.approx(0.5)
    assert stats.maxima["x/rows"] >= len(LENGTHS) / cluster.num_devices


def test_a_pair_of_batch_and_stats(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    ref, stats = run(group.call(Calculator.sums_and_stats, put(cluster, make_batch())))
    assert stats.sums == {"rows": len(LENGTHS)}
    assert "token_sum" in ref.columns


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_fewer_rows_than_ranks(cluster: Cluster, run: Run, role: str, num_rows: int) -> None:
    group = make_group(run, cluster, role)
    ref = put(cluster, make_batch((2, 3)[:num_rows]))
    seen = run(group.call(Calculator.shape_of, ref))
    assert sum(rows for _, rows in seen) == num_rows
    assert all(columns == [ROW_ID, "tokens"] for columns, _ in seen)
    out = run(run_fetch(group, ref))
    assert out.lengths("multiplied").tolist() == [2, 3][:num_rows]
    assert str(out.array("multiplied").type) == "list<item: int32>"


async def run_fetch(group: WorkerGroup, ref: BatchRef) -> Batch:
    return await (await group.call(Calculator.multiply, ref)).fetch(["multiplied"])


def test_take_concat_and_split_calls_commute(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    a, b = put(cluster, make_batch()), put(cluster, make_batch((6, 1, 2), first_id=500))
    mixed = BatchRef.concat([a, b]).take([12, 0, 7, 3, 10])
    out = run(run_fetch(group, mixed))
    assert out.scalars(ROW_ID).tolist() == [502, 100, 107, 103, 500]
    rows = [row.tolist() for row in out.rows("multiplied")]
    assert (rows[0], rows[3]) == ([40, 42], [60])


def test_broadcast_returns_rank_0_and_assembles_whole_batches(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    total = run(group.call(Calculator.total, put(cluster, make_batch()), reads=("tokens",)))
    assert total == sum(int(row.sum()) for row in make_batch().rows("tokens"))
    assert run(group.call(Calculator.fails, ())) == "fine"


def test_per_rank(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    n = cluster.num_devices
    places = run(group.call(Calculator.place, list(range(5, 5 + n)), power=2))
    assert [(rank, size, value) for rank, size, _, value in places] == [
        (r, n, (5 + r) ** 2) for r in range(n)
    ]
    pids = {pid for _, _, pid, _ in places}
    assert len(pids) == n
    assert (os.getpid() in pids) == (n == 1)
    with pytest.raises(ValueError, match=f"list of {n}"):
        run(group.call(Calculator.place, [1] * (n + 1)))


def test_sync_methods_run_on_one_training_thread(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    assert {(t, name.startswith("rondo-train")) for t, name in run(group.call(Calculator.threads))} == {
        (1, True)
    }
    assert "rondo-train" not in run(group.call_rank(0, Calculator.napping, 0.0))


def test_calls_that_overlap_keep_their_order_on_every_rank(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    names = [f"call{i}" for i in range(12)]

    async def all_at_once() -> None:
        await asyncio.gather(*(group.call(Calculator.note, name) for name in names))

    run(all_at_once())
    assert run(group.call(Calculator.notes)) == [names] * cluster.num_devices


def test_async_methods_overlap_with_each_other_and_with_training(
    cluster: Cluster, run: Run, role: str
) -> None:
    group = make_group(run, cluster, role)

    async def meet() -> None:
        busy = asyncio.ensure_future(group.call(Calculator.hold))
        await asyncio.gather(*(group.call_rank(0, Calculator.meet, 5) for _ in range(5)))
        assert not busy.done()
        await group.call_each(Calculator.open_gate)
        await busy

    run(meet())


def test_cancelling_an_async_call_reaches_the_worker(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)

    async def cancel() -> None:
        task = asyncio.ensure_future(group.call_rank(0, Calculator.wait_at_the_gate))
        while (await group.call(Calculator.notes))[0] != ["waiting"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await group.call(Calculator.notes))[0] != ["waiting", "cancelled"]:
            await asyncio.sleep(0.01)

    run(cancel())


def test_a_worker_finds_its_neighbour(cluster: Cluster, run: Run, role: str) -> None:
    make_group(run, cluster, role, kwargs={"factor": 17})
    other = run(cluster.create_group(role + "-rollout", Neighbour, kwargs={"of": role}))
    assert run(other.call(Neighbour.factor)) == [(17, rank) for rank in range(cluster.num_devices)]


def test_a_batch_that_a_worker_makes_stays_in_the_store(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    ref = run(group.call_rank(0, Calculator.make_rows, 4, keep=("reward",)))
    assert ref.index.columns == [ROW_ID, "reward"]
    assert [block.columns for block in ref.blocks] == [("tokens",)]
    assert run(ref.fetch(["tokens"])).ragged("tokens")[0].tolist() == [0, 1, 2] * 4
    pair = run(group.call_rank(0, Calculator.make_rows_and_name, 2, keep=()))
    assert isinstance(pair[0], BatchRef)
    assert pair[1] == role
    whole = run(group.call_rank(0, Calculator.make_rows, 3))
    assert isinstance(whole, Batch)
    with pytest.raises(WorkerError, match="no column 'absent'"):
        run(group.call_rank(0, Calculator.make_rows, 4, keep=("absent",)))


def test_together_joins_the_blocks_of_overlapping_calls(cluster: Cluster, run: Run, role: str) -> None:
    one, two = make_group(run, cluster, role), make_group(run, cluster, role + "b")
    ref = put(cluster, make_batch())

    async def sums(batch: BatchRef) -> BatchRef:
        return (await two.call(Calculator.sums_and_stats, batch))[0]

    out = run(together(ref, lambda batch: one.call(Calculator.multiply, batch), sums))
    assert out.columns == [*ref.columns, "multiplied", "token_sum"]
    assert run(out.fetch(["token_sum"])).scalars("token_sum")[0] == 3


# ---- errors ----


def test_an_exception_arrives_with_role_rank_and_traceback(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    last = cluster.num_devices - 1
    with pytest.raises(WorkerError) as caught:
        run(group.call(Calculator.fails, (last,)))
    error = caught.value
    assert (error.role, error.rank, error.method) == (role, last, "fails")
    assert f"{role}[{last}].fails failed: DataError: bad row on rank {last}" in str(error)
    assert "sample_workers.py" in error.worker_traceback
    assert 'raise DataError(f"bad row on rank' in error.worker_traceback
    assert "controller/host.py" not in error.worker_traceback
    assert isinstance(error.cause_error, DataError)
    assert error.__cause__ is error.cause_error
    assert run(group.call(Calculator.fails, ())) == "fine"  # all ranks had answered: the group goes on


@pytest.mark.parametrize("kind", ["unwritable", "exit"])
def test_exceptions_that_cannot_travel(cluster: Cluster, run: Run, role: str, kind: str) -> None:
    group = make_group(run, cluster, role)
    with pytest.raises(
        WorkerError, match="UnwritableError: unwritable" if kind == "unwritable" else "SystemExit: 3"
    ):
        run(group.call(Calculator.fails, (0,), kind=kind))
    assert run(group.call(Calculator.fails, ())) == "fine"


def test_a_constructor_that_raises(cluster: Cluster, run: Run, role: str) -> None:
    with pytest.raises(WorkerError, match=full_text("__init__ failed: DataError")) as caught:
        make_group(run, cluster, role, kwargs={"fail": True})
    assert isinstance(caught.value.cause_error, DataError)


def test_columns_are_checked(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    ref = put(cluster, make_batch())
    with pytest.raises(DataError, match=full_text("reads absent, which not all rows")):
        run(group.call(Calculator.count, ref, "x", reads=("absent",)))
    done = run(group.call(Calculator.multiply, ref))
    with pytest.raises(DataError, match=full_text("writes multiplied, which the batch")):
        run(group.call(Calculator.multiply, done))
    with pytest.raises(DataError, match=full_text("returned other, not declared")):
        run(group.call(Calculator.undeclared, ref))
    with pytest.raises(DataError, match="rows that are not the"):
        run(group.call(Calculator.loses_rows, ref))


def test_programming_errors(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    with pytest.raises(TypeError, match="not marked"):
        run(group.call(Calculator.make_rows, 3))
    with pytest.raises(TypeError, match="first argument is a BatchRef"):
        run(group.call(Calculator.multiply, 3))
    with pytest.raises(TypeError, match=full_text("returned str, of which nothing can")):
        run(group.call_rank(0, Calculator.fails, (), keep=()))
    with pytest.raises(TypeError, match="no method factor"):
        run(group.call_rank(0, Neighbour.factor))


def test_pools_that_do_not_fit(cluster: Cluster, run: Run, role: str) -> None:
    n = cluster.num_devices
    with pytest.raises(ConfigError, match=f"the cluster has {n}: raise"):
        make_group(run, cluster, role, mesh=Mesh.data_parallel(n + 1))
    with pytest.raises(ConfigError, match="2 ranks, the resource pool"):
        make_group(run, cluster, role, mesh=Mesh.data_parallel(2), devices=(0,))


def test_driver_bytes_count_the_index(cluster: Cluster, run: Run, role: str) -> None:
    group = make_group(run, cluster, role)
    ref = run(group.call_rank(0, Calculator.make_rows, 4, keep=()))
    before = cluster.driver_bytes()
    run(group.call(Calculator.multiply, ref))
    assert cluster.driver_bytes() - before >= 4 * 8  # at least the row ids


def test_a_role_is_on_a_device_once(cluster: Cluster, run: Run, role: str) -> None:
    """The calls of the first group would go to the second one's workers."""
    group = make_group(run, cluster, role, kwargs={"factor": 3})
    with pytest.raises(ConfigError, match=rf"a worker group '{role}' on device 0 already: use that one"):
        make_group(run, cluster, role, kwargs={"factor": 5})
    ref = run(group.call(Calculator.multiply, put(cluster, make_batch((2,)))))
    assert run(ref.fetch()).rows("multiplied")[0].tolist() == [0, 3]
