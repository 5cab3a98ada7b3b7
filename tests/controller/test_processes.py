"""What is particular to hosts in processes of their own, Ray's and ours: meshes over real processes,
failures, bytes, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rondo.config.schema import ClusterConfig, RayBackendConfig
from rondo.controller import Cluster, Mesh, Worker, WorkerGroup, start_cluster
from rondo.core.batch import ROW_ID, Batch, ragged_rows
from rondo.core.errors import ConfigError, DataError, WorkerError
from tests.controller.conftest import BACKENDS, SPARE_DEVICES, Run
from tests.controller.sample_workers import Calculator
from tests.messages import full_text
from tests.waiting import wait_until_gone

pytestmark = pytest.mark.random_order(disabled=True)  # the last tests kill the hosts that all of them share
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest, run: Run) -> Iterator[Cluster]:
    if request.param == "ray":
        request.getfixturevalue("ray_instance")
    config = ClusterConfig(BACKENDS[request.param], devices=SPARE_DEVICES, device="cpu", threads=1)
    cluster = run(start_cluster(config))
    every = run(cluster.create_group("every host", Worker))
    pids = run(every.call(Worker.process_id))
    yield cluster
    run(cluster.shutdown())
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    run(cluster.shutdown())  # a second time: nothing happens


@pytest.fixture(scope="module")
def healthy(shared: Cluster, run: Run) -> WorkerGroup:
    """A group on two devices of the shared cluster, made before a test breaks one of its hosts."""
    return run(shared.create_group("healthy", Calculator, devices=(1, 2)))


@pytest.fixture
def four(request: pytest.FixtureRequest, cluster: Cluster) -> Cluster:
    """The package's cluster of four devices."""
    return cluster


many_hosts = pytest.mark.parametrize("cluster", ["process", "ray"], indirect=True)


@many_hosts
def test_meshes_over_real_processes(four: Cluster, run: Run, role: str) -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    group = run(four.create_group(role, Calculator, mesh=mesh))
    # ranks + 1 are 1 2 | 3 4; dp groups are (0, 2) and (1, 3), tp groups (0, 1) and (2, 3)
    out = run(group.call(Calculator.reduce_over, ["dp"] * 4))
    assert out == [(4.0, ("dp", "tp"), False), (6.0, ("dp", "tp"), False)] * 2
    out = run(group.call(Calculator.reduce_over, ["tp"] * 4))
    assert [total for total, _, _ in out] == [3.0, 3.0, 7.0, 7.0]
    assert run(group.call(Calculator.kind_of_devices)) == ["cpu"] * 4


@pytest.mark.parametrize("cluster", ["process"], indirect=True)
def test_a_world_of_one_machine_listens_to_nobody_else(four: Cluster, run: Run, role: str) -> None:
    """Where ranks meet no other user comes in, and their connections are of this machine: torch's own store
    listens on all of its addresses, and takes keys away from whoever asks.
    """
    group = run(four.create_group(role, Calculator, mesh=Mesh((("dp", 4),))))
    run(group.call(Calculator.reduce_over, ["dp"] * 4))
    found = [each for pid in run(group.call(Worker.process_id)) for each in listening(pid)]
    assert found  # gloo's
    assert set(found) == {"0100007F"}


def listening(pid: int) -> Iterator[str]:
    """Yields the addresses (as /proc has them) on which a process takes TCP connections."""
    sockets = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(each))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                yield fields[1].partition(":")[0]


@many_hosts
def test_split_over_dp_and_tp_shares_shards_and_collects_once(four: Cluster, run: Run, role: str) -> None:
    group = run(four.create_group(role, Calculator, mesh=Mesh((("dp", 2), ("tp", 2)))))
    batch = Batch.of(
        {ROW_ID: np.arange(5), "tokens": ragged_rows([np.arange(3)] * 5, np.int32), "weight": np.ones(5)}
    )
    ref = four.put(batch, ("weight",))
    assert sorted(i for shard in run(group.call(Calculator.row_ids, ref)) for i in shard) == [0, 1, 2, 3, 4]
    assert run(group.call(Calculator.count, ref, "x")).sums["x/tokens"] == 15  # not twice


@many_hosts
def test_groups_on_their_own_devices(four: Cluster, run: Run, role: str) -> None:
    """Two resource pools: each group's mesh has its own ranks, and its collectives do not wait for the
    others."""
    left = run(four.create_group(role + "l", Calculator, devices=(0, 1)))
    right = run(four.create_group(role + "r", Calculator, devices=(1, 3)))
    pids = [[pid for _, _, pid, _ in run(g.call(Calculator.place, [0, 0]))] for g in (left, right)]
    assert pids[0][1] == pids[1][0]
    assert len({*pids[0], *pids[1]}) == 3
    assert [out[0] for out in run(left.call(Calculator.reduce_over, ["dp", "dp"]))] == [3.0, 3.0]
    assert [out[0] for out in run(right.call(Calculator.reduce_over, ["dp", "dp"]))] == [3.0, 3.0]


@many_hosts
def test_token_data_does_not_pass_through_the_driver(four: Cluster, run: Run, role: str) -> None:
    group = run(four.create_group(role, Calculator))
    n = 50_000
    ref = run(group.call_rank(0, Calculator.make_rows, n, keep=()))
    token_bytes = ref.blocks[0].handle.num_bytes
    ref = ref.take(np.arange(0, n, 2))
    before = four.driver_bytes()
    out = run(group.call(Calculator.multiply, ref.with_index({"response_length": np.full(len(ref), 3)})))
    sent = four.driver_bytes() - before
    index_bytes = 8 * len(out)
    assert sent < 7 * index_bytes  # ids both ways, and the positions of the rows
    small = run(group.call_rank(0, Calculator.make_rows, 10, keep=()))
    before = four.driver_bytes()
    run(small.fetch())
    assert four.driver_bytes() - before == small.blocks[0].handle.num_bytes  # a fetch is counted in full
    assert token_bytes > n * 3 * 4


@many_hosts
def test_long_rows_cost_the_driver_nothing(four: Cluster, run: Run, role: str) -> None:
    group = run(four.create_group(role, Calculator))
    costs = []
    for length in (10_000, 50_000):
        rows = ragged_rows([np.arange(length)] * 40, np.int32)
        ref = four.put(Batch.of({ROW_ID: np.arange(40), "tokens": rows, "weight": np.ones(40)}), ("weight",))
        before = four.driver_bytes()
        run(group.call(Calculator.multiply, ref))
        costs.append(four.driver_bytes() - before)
    assert costs[0] == costs[1] < 40_000


@many_hosts
def test_a_shard_pickles_its_own_rows_only(four: Cluster, run: Run, role: str) -> None:
    group = run(four.create_group(role, Calculator))
    ref = run(group.call_rank(0, Calculator.make_rows, 100_000, keep=()))
    pickled, tokens = run(
        group.call(Calculator.address_of_tokens, ref.take(np.arange(100)), reads=("tokens",))
    )
    assert pickled < 2 * tokens + 4000


def test_the_first_cause_is_reported_while_a_peer_hangs(
    shared: Cluster, healthy: WorkerGroup, run: Run, role: str
) -> None:
    """It would hang for half an hour; `run` waits for minutes."""
    group = run(shared.create_group(role, Calculator, devices=(0, 1)))

    async def fail() -> None:
        failing = asyncio.ensure_future(group.call(Calculator.fails_in_collective, 1))
        queued = asyncio.ensure_future(group.call_rank(0, Calculator.note, "behind the rank that hangs"))
        with pytest.raises(WorkerError, match=full_text("[1].fails_in_collective failed")) as caught:
            await failing
        assert isinstance(caught.value.cause_error, DataError)
        with pytest.raises(WorkerError, match=full_text("[0].note failed")):
            await queued

    run(fail())
    with pytest.raises(WorkerError, match=full_text("[0].fails failed")):
        run(group.call(Calculator.fails, ()))
    assert run(healthy.call(Calculator.fails, ())) == "fine"  # other devices go on


def test_a_killed_host_is_an_error_and_the_cause(
    run: Run, healthy: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the death is seen: its peer's "connection closed" is waited out."""
    monkeypatch.setattr("rondo.controller.calls.ECHO_GRACE_SECONDS", 300.0)
    monkeypatch.setattr("rondo.controller.calls.GRACE_SECONDS", 60.0)  # the peer's host is not given up, too
    run(healthy.call(Calculator.reduce_over, ["dp", "dp"]))
    with pytest.raises(WorkerError, match=full_text("healthy[1].dies_in_collective failed")):
        run(healthy.call(Calculator.dies_in_collective, 1))
    with pytest.raises(WorkerError, match=full_text("healthy[1].fails failed")):
        run(healthy.call(Calculator.fails, ()))


def test_a_block_outlives_the_host_that_made_it(run: Run, role: str) -> None:
    async def lose_a_host() -> None:
        config = ClusterConfig(BACKENDS["process"], devices=2, device="cpu", threads=1)
        async with await start_cluster(config) as cluster:
            group = await cluster.create_group(role, Calculator)
            alone = await cluster.create_group(role + "0", Calculator, devices=(0,))
            ref = await group.call_rank(1, Calculator.make_rows, 10, keep=())
            before = await ref.fetch()
            pids = await group.call(Worker.process_id)
            os.kill(pids[1], signal.SIGKILL)
            wait_until_gone(pids[1:])
            assert (await ref.fetch()).columns == before.columns
            assert await alone.call_rank(0, Calculator.row_ids, ref) == before.scalars(ROW_ID).tolist()

    run(lose_a_host())


def test_more_devices_than_the_cluster_has(ray_instance: None, run: Run) -> None:
    with pytest.raises(ConfigError, match=full_text("cluster.devices=64, but the Ray cluster")):
        run(start_cluster(ClusterConfig(backend=RayBackendConfig(), devices=64, device="cpu")))


PROGRAM = """
    import asyncio, os, signal, sys
    from rondo.config.schema import ClusterConfig, ProcessBackendConfig, RayBackendConfig
    from rondo.controller import Worker, dispatch, start_cluster

    class W(Worker):  # lives in __main__
        @dispatch("per_rank")
        def facts(self):
            import beside_the_program
            return os.getpid(), os.getcwd(), beside_the_program.VALUE, os.environ["OMP_NUM_THREADS"]

    async def main():
        backends = {"process": ProcessBackendConfig, "ray": RayBackendConfig}
        config = ClusterConfig(backend=backends[sys.argv[2]](), device="cpu", threads=1)
        async with await start_cluster(config) as cluster:
            group = await cluster.create_group("w", W)
            for fact in await group.call(W.facts):
                print(*fact, flush=True)
            if sys.argv[1] == "raise":
                raise KeyboardInterrupt
            os.kill(os.getpid(), 9)

    before = dict(os.environ)
    try:
        asyncio.run(main())
    finally:
        changed = sorted(name for name in os.environ if os.environ[name] != before.get(name))
        print("environment", *changed, signal.getsignal(signal.SIGTERM).name, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["process", "ray"])
@pytest.mark.parametrize("ending", ["raise", "die"])
def test_a_program_of_its_own_leaves_no_process(tmp_path: Path, ending: str, backend: str) -> None:
    """A worker class in __main__, a module beside the program, another working directory; ended by Ctrl-C or
    kill."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "beside_the_program.py").write_text("VALUE = 7\n")
    (tmp_path / "elsewhere").mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    env = {name: value for name, value in env.items() if not name.startswith("RAY_")}  # as a user has it
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), ending, backend],
        cwd=tmp_path / "elsewhere",
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    facts = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [fact[1:] for fact in facts] == [[str(tmp_path / "elsewhere"), "7", "1"]], done.stderr
    assert done.returncode in (-signal.SIGKILL, -signal.SIGINT, 130)
    wait_until_gone(int(fact[0]) for fact in facts)
    if ending == "raise":
        assert "KeyboardInterrupt" in done.stderr
        assert done.stdout.splitlines()[-1] == "environment SIG_DFL"
        assert "WARNING" not in done.stderr
