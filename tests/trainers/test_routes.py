"""Which route a placement gives, and what the route between two pools makes of what its two sides report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rondo.config import load
from rondo.config.schema import Config
from rondo.core.errors import ConfigError, WeightSyncError, WorkerError, outage
from rondo.trainers.commands.train import train
from rondo.trainers.loop.routes import CollectiveRoute, DiskRoute, GatheredRoute, SharedRoute, make_route
from rondo.trainers.program.inputs import settled
from rondo.trainers.program.roles import create_rollout
from rondo.trainers.program.step import Roles
from rondo.weights.exchange import SendReport, Transfer
from rondo.weights.layout import Layout, Parameter
from rondo.weights.sync import SyncReport
from rondo.workers.models import ActorWorker
from rondo.workers.rollout import RolloutWorker
from tests.messages import full_text
from tests.trainers.conftest import metrics, weights

LAYOUT = Layout.sharded([Parameter("w", (4, 2), "float32")], [0, 1])
DONE = SyncReport(9, num_tensors=1, bytes_moved=64, bytes_needed=64, peak_bytes=32, rounds=1)


class Group:
    """Stands in for a WorkerGroup: answers(method, rank) is the result, or an exception to raise."""

    def __init__(self, role: str, devices: tuple[int, ...], answers: Callable[[Any, int], Any]) -> None:
        self.role, self.devices, self.size = role, devices, len(devices)
        self.dead: set[int] = set()
        self.hung: set[int] = set()  # ranks that never answer a call of their own
        self.hangs = False  # nor does the group
        self.calls: list[tuple[str, Any]] = []
        self._answers = answers

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in self.dead)

    async def call(self, method: Any, *args: Any, ranks: Any = None, **kwargs: Any) -> Any:
        self.calls.append((method.__name__, args))
        if self.hangs:
            await asyncio.Event().wait()
        results = [self._answer(method, rank) for rank in (self.alive if ranks is None else ranks)]
        return results if method is ActorWorker.send_weights else results[0]

    async def call_rank(self, rank: int, method: Any, *args: Any) -> Any:
        self.calls.append((method.__name__, (rank, *args)))
        if rank in self.hung:
            await asyncio.Event().wait()
        return self._answer(method, rank)

    async def call_each(self, method: Any, *args: Any) -> Any:
        self.calls.append((method.__name__, args))
        return {rank: self._answer(method, rank) for rank in self.alive}

    def _answer(self, method: Any, rank: int) -> Any:
        result = self._answers(method, rank)
        if isinstance(result, WorkerError) and result.died:
            self.dead.add(rank)
        if isinstance(result, BaseException):
            raise result
        return result


def error(message: str, *, died: bool = False) -> WorkerError:
    found = WorkerError("rollout", 1, "receive_weights", message)
    found.died = died
    return found


@pytest.fixture
def config(recipe: Path) -> Callable[..., Config]:
    return lambda *overrides: settled(load([str(recipe)], list(overrides)).config)


def groups(sent: Any, received: Callable[[int], Any]) -> tuple[Group, Group]:
    def actor(method: Any, rank: int) -> Any:
        return {"weight_layout": LAYOUT, "send_weights": sent}.get(method.__name__)

    def rollout(method: Any, rank: int) -> Any:
        return received(rank) if method is RolloutWorker.receive_weights else None

    return Group("actor", (0, 1), actor), Group("rollout", (2, 4), rollout)


def test_placement_chooses_the_route(config: Callable[..., Config], tmp_path: Path) -> None:
    def route(actor: tuple[int, ...], rollout: tuple[int, ...], *overrides: str) -> Any:
        none = lambda method, rank: None  # noqa: E731
        roles = Roles(Group("actor", actor, none), Group("rollout", rollout, none))  # type: ignore[arg-type]
        return make_route(config(*overrides), roles, tmp_path)

    assert isinstance(route((0,), (0,)), SharedRoute)
    assert isinstance(route((0,), (0,), "trainer.max_staleness=1"), GatheredRoute)
    assert isinstance(route((0, 1), (0, 1), "cluster.backend=process", "cluster.devices=2"), GatheredRoute)
    assert isinstance(route((0, 1), (2, 3)), CollectiveRoute)
    disk = route((0,), (0,), "rollout.weight_transport=disk")
    assert isinstance(disk, DiskRoute)
    assert str(tmp_path / "weights") in disk.describe()
    with pytest.raises(ConfigError, match=full_text("actor is on devices [0, 1]")):
        route((0, 1), (1, 2))


def test_every_route_trains_the_same_weights(recipe: Path, tmp_path: Path) -> None:
    """Synchronous, on one device: shared in place, gathered, by disk."""

    def run(name: str, *overrides: str) -> tuple[bytes, dict[str, Any]]:
        folder = tmp_path / name
        options = [f"trainer.run_dir={folder}", "trainer.total_steps=2", "checkpoint.every=2"]
        train(load([str(recipe)], [*options, *overrides]))
        return weights(folder), metrics(folder)[-1]

    shared, in_place = run("shared")
    assert in_place["weights/bytes_moved"] == 0
    assert "weights/canary_gap" not in in_place
    gathered, copied = run("gathered", "rollout.weight_transport=collective")
    assert 0 <= copied["weights/canary_gap"] < 1e-5
    written, by_disk = run("disk", "rollout.weight_transport=disk", "rollout.bucket_bytes=20000")
    assert by_disk["weights/bytes_moved"] == 2 * by_disk["weights/bytes_needed"] > 0
    assert by_disk["weights/rounds"] > 1
    assert not (tmp_path / "disk/weights").exists()  # one copy of the model, which nobody reads any more
    assert shared == gathered == written


def test_both_sides_are_told_of_the_transfer_once(config: Callable[..., Config]) -> None:
    actor, rollout = groups(SendReport(), lambda rank: DONE)
    route = CollectiveRoute(actor, rollout, config())  # type: ignore[arg-type]
    for version in (8, 9):
        assert asyncio.run(route.load(version)).bytes_moved == 64
    transfer = Transfer(LAYOUT, (2, 4), 256 << 20)
    assert actor.calls == [
        ("weight_layout", ("float32", "merged")),
        ("prepare_transfer", (transfer,)),
        ("send_weights", ()),
        ("send_weights", ()),
    ]
    assert rollout.calls[0] == ("prepare_transfer", (transfer,))
    assert rollout.calls[1:] == [
        ("receive_weights", (rank, version, "merged")) for version in (8, 9) for rank in (0, 1)
    ]


def test_adapters_go_alone_once_every_engine_has_the_base(config: Callable[..., Config]) -> None:
    wanting = {0: 1, 1: 1}
    actor, rollout = groups(SendReport(), lambda rank: DONE)
    answer = rollout._answers

    def with_wanting(method: Any, rank: int) -> Any:
        return wanting[rank] if method is RolloutWorker.wants_weights else answer(method, rank)

    rollout._answers = with_wanting
    route = CollectiveRoute(actor, rollout, config("actor.lora={send: adapters}"))  # type: ignore[arg-type]
    told = []
    for version, waiting in enumerate(({0: 1, 1: 1}, {0: 0, 1: 0}, {0: 0, 1: 0}, {0: 0, 1: 2})):
        wanting.update(waiting)
        asyncio.run(route.load(version))
        told.append([arguments[2] for name, arguments in rollout.calls if name == "receive_weights"][-2:])
    assert told == [["all"] * 2, ["adapters"] * 2, ["adapters"] * 2, ["all"] * 2]
    layouts = [arguments for name, arguments in actor.calls if name == "weight_layout"]
    assert layouts == [("float32", "all"), ("float32", "adapters")]  # each is asked for once
    assert "adapters alone" in route.describe()


def test_a_rank_that_died_is_left_out_from_then_on(config: Callable[..., Config]) -> None:
    died = error("its host process died", died=True)
    sent = SendReport(lost={4: "it went away"})
    actor, rollout = groups(sent, lambda rank: died if rank == 1 else DONE)
    route = CollectiveRoute(actor, rollout, config())  # type: ignore[arg-type]
    assert asyncio.run(route.load(8)).lost == {1: "its host process died"}
    sent.lost.clear()
    assert asyncio.run(route.load(9)).lost is None
    assert [c for c in rollout.calls if c[0] == "prepare_transfer"][-1][1][0].target_ranks == (2,)
    assert rollout.calls[-1] == ("receive_weights", (0, 9, "merged"))
    rollout.dead = {0, 1}
    with pytest.raises(WeightSyncError, match=full_text("no rollout rank is left to send weights")) as caught:
        asyncio.run(route.load(10))
    assert caught.value.is_outage  # the run begins again


@pytest.mark.parametrize(("nccl", "arrived"), [(True, False), (True, True), (False, False)])
def test_the_others_are_sent_it_again_when_one_that_died_took_their_connections_with_it(
    config: Callable[..., Config], nccl: bool, arrived: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With NCCL, where one communicator serves all. arrived: at rank 0, of which the senders do not know."""
    died, echo = error("its host process died", died=True), outage(error("did not arrive from rank 0"))
    sent = SendReport(lost={2: "broken", 4: "broken"})
    actor, rollout = groups(sent, lambda rank: DONE)
    told, call_one, call_all = asyncio.Event(), rollout.call_rank, rollout.call_each

    async def call_rank(rank: int, method: Any, *args: Any) -> Any:
        if rollout.dead:
            sent.lost.clear()
            return await call_one(rank, method, *args)
        if rank == 1:
            await asyncio.sleep(0.01)
            rollout.dead = {1}
            raise died
        await told.wait()  # that rank 1 is gone
        if arrived:
            return DONE
        raise echo

    async def call_each(method: Any, *args: Any) -> Any:
        if method is RolloutWorker.break_transfer:
            told.set()
        return await call_all(method, *args)

    rollout.call_rank, rollout.call_each = call_rank, call_each  # type: ignore[method-assign]
    route, answers = CollectiveRoute(actor, rollout, config()), actor._answers  # type: ignore[arg-type]
    own_group = ActorWorker.prepare_transfer
    actor._answers = lambda method, rank: nccl if method is own_group else answers(method, rank)
    if not nccl:  # the first error is the run's: the connections of gloo are gone
        with pytest.raises(WorkerError, match="did not arrive from rank 0"):
            asyncio.run(asyncio.wait_for(route.load(8), 60))
        return
    assert asyncio.run(asyncio.wait_for(route.load(8), 60)).lost is None
    assert "version 8 goes again to rollout ranks [0]" in caplog.text
    assert [args for name, args in actor.calls if name == "break_transfer"] == [(str(died),)]
    prepared = [args[0] for name, args in actor.calls if name == "prepare_transfer"]
    assert [transfer.target_ranks for transfer in prepared] == [(2, 4), (2,)]
    assert prepared[0].name != prepared[1].name
    assert rollout.calls[-1] == ("receive_weights", (0, 8, "merged"))


def test_what_failed_without_a_death_is_raised_and_prepared_anew(config: Callable[..., Config]) -> None:
    answers: list[Any] = [outage(error("did not arrive from rank 0")), DONE]
    actor, rollout = groups(SendReport(), lambda rank: answers[0] if rank == 0 else DONE)
    route = CollectiveRoute(actor, rollout, config())  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="did not arrive"):
        asyncio.run(route.load(8))
    answers.pop(0)
    assert asyncio.run(route.load(8)).lost is None
    prepared = [args[0] for name, args in actor.calls if name == "prepare_transfer"]
    assert prepared[0] == prepared[1] == Transfer(LAYOUT, (2, 4), 256 << 20)
    assert prepared[0].name != prepared[1].name


def test_errors_of_either_side_are_the_routes(config: Callable[..., Config]) -> None:
    def load_with(sent: Any, received: Callable[[int], Any]) -> None:
        actor, rollout = groups(sent, received)
        asyncio.run(CollectiveRoute(actor, rollout, config()).load(3))  # type: ignore[arg-type]

    refused = error("'w' has shape (4, 2), the model wants (5, 2)")
    with pytest.raises(WorkerError, match=r"'w' has shape \(4, 2\)"):
        load_with(SendReport(lost={4: "it refused"}), lambda rank: refused if rank == 1 else DONE)
    with pytest.raises(WorkerError, match="out of memory"):
        load_with(error("out of memory"), lambda rank: DONE)
    with pytest.raises(WeightSyncError, match=full_text("not sent whole to rollout[1]: it hung")):
        load_with(SendReport(lost={4: "it hung"}), lambda rank: DONE)
    with pytest.raises(WeightSyncError, match=full_text("version 3: no rollout rank is left")):
        load_with(SendReport(), lambda rank: error("its host died", died=True))


def test_nobody_is_waited_for_who_will_never_answer(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One side failed, or hangs: the other one would wait for its messages for ten minutes, or for ever."""
    monkeypatch.setattr("rondo.trainers.loop.routes.CAUSE_SECONDS", 0.01)
    monkeypatch.setattr("rondo.trainers.loop.routes.DEATH_SECONDS", 0.01)

    def load_with(sent: Any, received: Callable[[int], Any], *, hung: set[int], hangs: bool = False) -> None:
        actor, rollout = groups(sent, received)
        rollout.hung = hung

        async def main() -> None:
            route = CollectiveRoute(actor, rollout, config())  # type: ignore[arg-type]
            await route._prepare("merged")
            actor.hangs = hangs
            await asyncio.wait_for(route.load(3), 240)

        asyncio.run(main())

    with pytest.raises(WorkerError, match="out of memory"):
        load_with(error("out of memory"), lambda rank: DONE, hung={0, 1})
    with pytest.raises(WorkerError, match="its host process died"):  # not what its receivers make of that
        load_with(error("its host process died", died=True), lambda rank: error("no arrival"), hung={0})
    with pytest.raises(WorkerError, match="TypeError: in the engine"):
        load_with(SendReport(), lambda rank: error("TypeError: in the engine"), hung={0}, hangs=True)
    with pytest.raises(WeightSyncError, match=full_text("sent whole to rollout[1]: it went away")):
        load_with(SendReport(lost={4: "it went away or hung"}), lambda rank: DONE, hung={1})
    gone = SendReport(lost={4: "it hung", 2: "connection closed"})  # gloo then closes the others' connections
    with pytest.raises(WeightSyncError, match=full_text("not sent whole to rollout[1]: it hung")):
        load_with(gone, lambda rank: error("did not arrive from rank 0"), hung={1})


def test_an_engine_on_several_devices_takes_consecutive_ones(config: Callable[..., Config]) -> None:
    wide = config("rollout.engine=vllm", "rollout.engine.tensor_parallel=2")
    for devices in ((0, 2), (0, 1, 2)):
        with pytest.raises(ConfigError, match=full_text("each engine takes 2 with consecutive")):
            asyncio.run(create_rollout(None, wide, (0,), devices=devices))  # type: ignore[arg-type]
