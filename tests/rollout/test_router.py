"""Routing decisions, and the router over engines that a test drives by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from rondo.core.errors import DeadlyRequestError, ReplicaLostError, RolloutError
from rondo.core.types import Completion, GenerateRequest, StepStats
from rondo.rollout.members import ENGINES, Affinity
from rondo.rollout.requests import so_far
from rondo.rollout.router import Router, choose
from rondo.system.pool import Supervision
from tests.messages import full_text
from tests.rollout.conftest import request


class TestChoose:
    @pytest.mark.parametrize(
        ("in_flight", "preferred", "chosen"),
        [
            ((3, 2, 4), None, "b"),
            ((2, 2, 2), None, "a"),  # the first of equals
            ((8, 8, 8), None, None),  # all full
            ((8, 7, 8), "a", "b"),  # full, though preferred
            ((4, 2, 2), "a", "a"),  # two busier than the idlest: within its slack
            ((5, 2, 2), "a", "b"),
            ((5, 2, 2), "gone", "b"),
        ],
    )
    def test_of_three(self, in_flight: tuple[int, ...], preferred: str | None, chosen: str | None) -> None:
        assert choose(dict(zip("abc", in_flight, strict=True)), 8, preferred) == chosen

    def test_of_none(self) -> None:
        assert choose({}, 8) is None

    def test_affinity_is_bounded(self) -> None:
        affinity = Affinity(remember=3)
        for key in "pqrps":  # p is used again before s comes
            affinity.put(key, key.upper())
        affinity.put("", "nobody")
        assert affinity.names == {"r": "R", "p": "P", "s": "S"}
        affinity.forget("R")
        assert affinity.names == {"p": "P", "s": "S"}


class Engine:
    """Calls of generate wait until the test says what comes of them."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.calls: dict[str, tuple[GenerateRequest, asyncio.Future[Completion]]] = {}
        self.log: list[str] = []

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Completion:
        future = asyncio.get_running_loop().create_future()
        self.calls[request.request_id] = request, future
        try:
            return await future
        finally:
            del self.calls[request.request_id]

    def made(
        self, request_id: str, tokens: list[int], reason: str = "stop", log_prob: float = -1.0
    ) -> Completion:
        """The prefix and `tokens`, under this engine's version."""
        before = so_far(self.calls[request_id][0], "length")
        n = len(tokens)
        return dataclasses.replace(
            before,
            token_ids=np.concatenate([before.token_ids, np.array(tokens, np.int32)]),
            log_probs=np.concatenate([before.log_probs, np.full(n, log_prob, np.float32)]),
            policy_versions=np.concatenate([before.policy_versions, np.full(n, self.version, np.int32)]),
            finish_reason=reason,  # type: ignore[arg-type]
        )

    def answer(self, request_id: str, tokens: list[int], log_prob: float = -1.0) -> None:
        self.calls[request_id][1].set_result(self.made(request_id, tokens, log_prob=log_prob))

    def die(self, partial: dict[str, list[int]] | None = None, last_lines: str = "") -> None:
        """Everybody who waits loses; what it had made of the request is in `partial`."""
        for request_id, (_, future) in list(self.calls.items()):
            made = self.made(request_id, (partial or {}).get(request_id, []), "cancelled")
            future.set_exception(ReplicaLostError("it fell over", made, last_lines))

    async def cancel(self, request_id: str) -> None:
        self.calls[request_id][1].set_result(self.made(request_id, [7], "cancelled"))

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def stats(self) -> StepStats:
        return StepStats(sums={"perf/decoded_tokens": 10.0})


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def req(name: str, **fields: Any) -> GenerateRequest:
    return request(name, np.array([1, 2], np.int32), **fields)


def start(router: Router, *names: str, **fields: Any) -> dict[str, asyncio.Task[Completion]]:
    return {name: asyncio.ensure_future(router.generate(req(name, **fields))) for name in names}


def test_least_loaded_sticky_and_full() -> None:
    async def test() -> None:
        a, b = Engine(), Engine()
        router = Router({"a": a, "b": b}, limit=2)
        group = start(router, "g0", "g1", affinity="g")
        other = start(router, "x", "y", "z")
        await settle()
        assert (list(a.calls), list(b.calls)) == (["g0", "g1"], ["x", "y"])  # g stays together; z waits
        b.answer("x", [5])
        await settle()
        assert list(b.calls) == ["y", "z"]
        for engine in (a, b):
            for name in list(engine.calls):
                engine.answer(name, [5])
        done = await asyncio.gather(*group.values(), *other.values())
        assert [c.token_ids.tolist() for c in done] == [[5]] * 5
        stats = (await router.statistics()).values()
        assert stats["rollout/in_flight"] == 4
        assert stats["rollout/queue_length"] == 1
        assert stats["rollout/reissued"] == 0
        assert stats["perf/decoded_tokens"] == 20
        assert stats["rollout/tokens_per_second_min"] <= stats["rollout/tokens_per_second"]
        assert (await router.statistics()).values()["rollout/in_flight"] == 0

    run(test)


def test_a_dead_replicas_requests_go_on_elsewhere_with_their_tokens() -> None:
    async def test() -> None:
        a, b = Engine(version=3), Engine(version=4)
        lost: list[str] = []
        router = Router(
            {"a": a, "b": b}, limit=8, on_lost=lambda name, why: bool(lost.append(f"{name}: {why}"))
        )
        earlier = dataclasses.replace(
            so_far(req("r"), "length"),
            token_ids=np.array([9], np.int32),
            log_probs=np.array([-0.5], np.float32),
            policy_versions=np.array([2], np.int32),
        )
        task = asyncio.ensure_future(router.generate(req("r", prefix=earlier)))
        await settle()
        a.die({"r": [11, 12]})
        await settle()
        assert b.calls["r"][0].prefix.token_ids.tolist() == [9, 11, 12]  # type: ignore[union-attr]
        b.answer("r", [13], log_prob=-2.0)
        done = await task
        assert done.token_ids.tolist() == [9, 11, 12, 13]
        assert done.log_probs.tolist() == [-0.5, -1, -1, -2]
        assert done.policy_versions.tolist() == [2, 3, 3, 4]
        assert lost == ["a: it fell over"]
        assert list(router.engines()) == ["b"]
        assert (await router.statistics()).values()["rollout/reissued"] == 1

    run(test)


@pytest.mark.parametrize(("last", "stops", "reason"), [(12, (12,), "stop"), (11, (), "length")])
def test_a_partial_that_is_whole_is_not_re_issued(last: int, stops: tuple[int, ...], reason: str) -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=8, on_lost=lambda name, why: True)
        task = asyncio.ensure_future(
            router.generate(req("r", max_tokens=2 + bool(stops), stop_token_ids=stops))
        )
        await settle()
        a.die({"r": [10, last]})
        done = await task
        assert (done.token_ids.tolist(), done.finish_reason) == ([10, last], reason)

    run(test)


def test_requests_wait_for_a_replica_that_comes_back_with_weights() -> None:
    async def test() -> None:
        a, again = Engine(), Engine(version=-1)
        router = Router({"a": a}, limit=8, on_lost=lambda name, why: True)
        task = start(router, "r")["r"]
        await settle()
        a.die({"r": [10]})
        await settle()
        router.members.add("a", again)  # type: ignore[arg-type]
        late = start(router, "late")["late"]
        await settle()
        assert not again.calls
        assert not task.done()
        await router.pause()
        again.version = 1
        await router.resume()
        await settle()
        assert list(again.calls) == ["r", "late"]
        again.answer("r", [11])
        again.answer("late", [12])
        assert (await task).policy_versions.tolist() == [0, 1]
        assert (await late).token_ids.tolist() == [12]

    run(test)


def test_no_replica_left() -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1)
        tasks = start(router, "r", "waits")
        await settle()
        a.die({})
        for task in tasks.values():
            with pytest.raises(RolloutError, match=r"no replica left \(a: it fell over\)"):
                await task
        with pytest.raises(RolloutError, match="no replica left"):
            await router.generate(req("new"))
        with pytest.raises(RolloutError, match="no replica left"):
            router.members.check_hope()

    run(test)


def test_a_replacement_that_cannot_be_made() -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1, on_lost=lambda name, why: True)
        task = start(router, "r")["r"]
        await settle()
        a.die({})
        await settle()
        assert not task.done()
        assert router.members.num_coming == 1
        await asyncio.to_thread(router.members.give_up, "a", "no memory for another")
        with pytest.raises(RolloutError, match=r"no replica left .*no memory for another"):
            await task

    run(test)


def test_the_deadline_covers_waiting() -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1)
        first = start(router, "first", deadline_seconds=100.0)["first"]
        await settle()
        waited = await router.generate(req("second", deadline_seconds=0.01))
        assert (waited.finish_reason, len(waited.token_ids)) == ("deadline", 0)
        assert waited.prompt_ids.tolist() == [1, 2]
        assert 90 < a.calls["first"][0].deadline_seconds <= 100  # type: ignore[operator]
        a.answer("first", [5])
        await first
        last = start(router, "last")["last"]
        await settle()
        a.answer("last", [6])  # nobody is counted twice
        await last

    run(test)


def test_cancel_waiting_and_running() -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1)
        tasks = start(router, "runs", "waits")
        await settle()
        await router.cancel("waits")
        await router.cancel("runs")
        await router.cancel("nobody")
        done = {name: await task for name, task in tasks.items()}
        assert {name: (c.token_ids.tolist(), c.finish_reason) for name, c in done.items()} == {
            "runs": ([7], "cancelled"),
            "waits": ([], "cancelled"),
        }
        tasks = start(router, "one", "two", "three")
        await settle()
        tasks["two"].cancel()  # the task, not the request
        await settle()
        a.answer("one", [5])
        await settle()
        assert list(a.calls) == ["three"]
        a.answer("three", [5])
        await tasks["three"]

    run(test)


@pytest.mark.parametrize("turns", range(5))
def test_cancelled_between_getting_a_place_and_using_it(turns: int) -> None:
    """turns: of the event loop between the end of the one before it and the cancellation."""

    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1)
        tasks = start(router, "first", "late")
        await settle()
        a.answer("first", [5])
        for _ in range(turns):
            await asyncio.sleep(0)
        await router.cancel("late")
        assert (await asyncio.wait_for(tasks["late"], 5)).finish_reason == "cancelled"
        assert not a.calls
        after = start(router, "next")  # the place is free again
        await settle()
        a.answer("next", [5])
        await asyncio.gather(tasks["first"], after["next"])

    run(test)


def test_an_engine_dies_while_it_is_asked_to_cancel() -> None:
    class Dying(Engine):
        async def cancel(self, request_id: str) -> None:
            self.die({request_id: [3, 4]})
            await settle()  # the generate call ends first
            raise ReplicaLostError("it fell over")

    async def test() -> None:
        told: list[str] = []

        def lost(name: str, why: str) -> bool:
            told.append(name)
            return False

        router = Router({"a": Dying(), "b": Engine()}, limit=1, on_lost=lost)
        tasks = start(router, "x")
        await settle()
        await router.cancel("x")
        done = await tasks["x"]
        assert (done.token_ids.tolist(), done.finish_reason, told) == ([3, 4], "cancelled", ["a"])

    run(test)


def test_on_lost_may_wait_for_a_thread_that_asks_the_router() -> None:
    """Replicas holds its own lock while it asks for the engines, and takes it when it is told of a loss."""
    engines = {"a": Engine(), "b": Engine()}
    others = threading.Lock()
    held, lost = threading.Event(), threading.Event()

    def on_lost(name: str, why: str) -> bool:
        lost.set()
        return others.acquire(timeout=10)

    router = Router(engines, limit=1, on_lost=on_lost)  # type: ignore[arg-type]

    def ask() -> None:
        with others:
            held.set()
            lost.wait(10)
            router.engines()

    thread = threading.Thread(target=ask)
    thread.start()
    held.wait(10)
    router.members.mark_dead("a", "it fell over")
    thread.join()
    assert router.members.num_coming == 1  # on_lost got the lock


def test_pause_holds_new_requests() -> None:
    async def test() -> None:
        a, b = Engine(), Engine()
        router = Router({"a": a, "b": b}, limit=4)
        await router.pause()
        task = start(router, "r")["r"]
        await settle()
        assert not a.calls
        await router.resume()
        await settle()
        a.answer("r", [5])
        await task
        assert a.log == b.log == ["pause", "resume"]

    run(test)


STRICT = Supervision(restarts=3, deaths=2)


class Dying:
    """A router over replicas that are replaced at once, and each replica's engine by name. numbers: of the
    policy, which by default forgives no death.
    """

    def __init__(self, *names: str, limit: int = 16, numbers: Supervision = STRICT) -> None:
        self.engines = {name: Engine() for name in names}
        self.router = Router(self.engines, limit=limit, on_lost=lambda name, why: True)
        self.router.members.supervisor.numbers = numbers

    async def die(self, name: str, last_lines: str = "", partial: dict[str, list[int]] | None = None) -> None:
        self.engines[name].die(partial, last_lines)
        await settle()
        self.engines[name] = Engine()
        self.router.members.add(name, self.engines[name])  # type: ignore[arg-type]
        await settle()

    def running(self, name: str) -> list[str]:
        return list(self.engines[name].calls)

    async def answer(self, name: str, *request_ids: str) -> None:
        for request_id in request_ids:
            self.engines[name].answer(request_id, [5])
        await settle()


def test_one_death_is_forgiven() -> None:
    """Replicas also die of what is no request's fault: then none has to wait for the others."""

    async def test() -> None:
        of = Dying("a", numbers=ENGINES)
        names = list("abcdefghij")
        tasks = start(of.router, *names)
        await settle()
        await of.die("a", partial={name: [1] for name in names})
        assert of.running("a") == names
        await of.die("a", partial={name: [2] for name in names})
        assert of.running("a") == ["a"]
        for name in names[:4]:
            await of.answer("a", name)
        assert of.running("a") == ["e"]
        await of.die("a")
        with pytest.raises(DeadlyRequestError, match=full_text("3 replicas died while they were running")):
            await tasks.pop("e")
        assert of.running("a") == names[5:]  # both deaths that they saw are explained
        await of.answer("a", *names[5:])
        assert [(await task).token_ids.tolist() for task in tasks.values()] == [[1, 2, 5]] * 9
        assert of.router.members.supervisor.num_unexplained == 0

    run(test)


def test_a_request_that_replicas_die_of_is_found_and_the_others_are_answered() -> None:
    async def test() -> None:
        of = Dying("a")
        names = [*"bcd", "poison", *"efghij"]
        tasks = start(of.router, *names)
        await settle()
        assert of.running("a") == names
        await of.die("a")
        fresh = start(of.router, "fresh")["fresh"]
        await settle()
        for name in "bcd":  # one by one, and nobody else
            assert of.running("a") == [name]
            await of.answer("a", name)
        assert of.running("a") == ["poison"]
        assert of.router.members.supervisor.num_unexplained == 1
        await of.die("a", last_lines="a line\nout of cheese")
        with pytest.raises(DeadlyRequestError, match=full_text("request 'poison'")):
            await tasks.pop("poison")
        assert of.router.members.supervisor.num_unexplained == 0
        assert of.running("a") == [*"efghij", "fresh"]  # the death that they saw is explained
        await of.answer("a", *"efghij", "fresh")
        assert (await fresh).token_ids.tolist() == [5]
        assert [(await task).token_ids.tolist() for task in tasks.values()] == [[5]] * 9
        assert (await of.router.statistics()).sums["rollout/engine_restarts"] == 2

    run(test)


@pytest.mark.parametrize("numbers", [STRICT, ENGINES])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("deadly", [{0: 3}, {4: 0}, {9: 5}, {2: 1, 7: 4}, {3: 2, 4: 2, 5: 3}])
def test_innocents_end_with_their_tokens_and_each_deadly_one_costs_so_many_replicas(
    replicas: int, deadly: dict[int, int], numbers: Supervision
) -> None:
    """Ten requests that want six tokens each. deadly: when these have so many, their replica dies."""
    length, deaths = 6, 0

    async def decode(of: Dying, name: str, made: dict[str, list[int]]) -> None:
        """One token more of all that run on a replica, or its death."""
        nonlocal deaths
        new = {}
        for request_id in of.running(name):
            before = so_far(of.engines[name].calls[request_id][0], "length").token_ids.tolist()
            new[request_id] = made[request_id][len(before) :]
        if any(len(made[request_id]) == deadly.get(int(request_id)) for request_id in new):
            deaths += 1
            await of.die(name, partial=new)
            return
        for request_id, tokens in new.items():
            tokens.append(100 * int(request_id) + len(made[request_id]))
            made[request_id].append(tokens[-1])
            if len(made[request_id]) == length:
                of.engines[name].answer(request_id, tokens)
        await settle()

    async def test() -> None:
        of = Dying(*"abc"[:replicas], limit=10, numbers=numbers)
        tasks = start(of.router, *map(str, range(10)))
        made: dict[str, list[int]] = {name: [] for name in tasks}
        await settle()
        while not all(task.done() for task in tasks.values()):
            for name in list(of.engines):
                await decode(of, name, made)
        given_up = {number for number, task in enumerate(tasks.values()) if task.exception() is not None}
        assert given_up == set(deadly)
        for number, task in enumerate(tasks.values()):
            if number in deadly:
                said = rf"{deadly[number]} made\) .* {numbers.deaths} replicas died"
                with pytest.raises(DeadlyRequestError, match=said):
                    task.result()
                continue
            tokens = [100 * number + index for index in range(length)]
            assert task.result().token_ids.tolist() == tokens
        most = numbers.deaths * len(deadly)
        assert deaths == most if numbers is STRICT else most - 1 <= deaths <= most  # some are of two at once
        assert of.router.members.supervisor.num_unexplained == 0

    run(test)


def test_suspects_have_one_replica_and_the_others_go_on() -> None:
    async def test() -> None:
        of = Dying("a", "b", limit=4)
        suspects = start(of.router, "s", "t", affinity="g")  # both on a
        others = start(of.router, "o", "p")
        await settle()
        assert (of.running("a"), of.running("b")) == (["s", "t"], ["o", "p"])
        await of.die("a")
        assert (of.running("a"), of.running("b")) == (
            ["s"],
            ["o", "p"],
        )  # a has nothing else: it is theirs
        others |= start(of.router, "q", "r", "late")
        await settle()
        assert (of.running("a"), of.running("b")) == (["s"], ["o", "p", "q", "r"])  # b is full
        await of.answer("b", "o")
        assert of.running("b") == ["p", "q", "r", "late"]
        await of.answer("a", "s")
        assert of.running("a") == ["t"]
        await of.die("b")  # of which it was none of those: they are suspects, too
        await of.answer("a", "t")
        for name in ("p", "q", "r", "late"):
            assert (of.running("a"), of.running("b")) == ([name], [])
            await of.answer("a", name)
        others |= start(of.router, "last")
        await settle()
        assert of.running("a") == ["last"]  # the quarantine is over
        await of.answer("a", "last")
        await asyncio.gather(*suspects.values(), *others.values())

    run(test)


def test_the_quarantine_waits_for_what_runs_there_and_ends_with_its_last_suspect() -> None:
    async def test() -> None:
        of = Dying("a", limit=4)
        task = start(of.router, "s")["s"]
        await settle()
        await of.die("a")
        task.cancel()  # its group is given back and comes again: the same request
        await settle()
        others = start(of.router, "o", "p")
        await settle()
        again = start(of.router, "s")["s"]
        late = start(of.router, "late")["late"]
        await settle()
        assert of.running("a") == ["o", "p"]
        again.cancel()
        await settle()
        assert of.running("a") == ["o", "p", "late"]
        again = start(of.router, "s")["s"]
        await of.answer("a", "o", "p", "late")
        assert of.running("a") == ["s"]
        await of.die("a")
        with pytest.raises(DeadlyRequestError, match=r"2 replicas died .* it wrote nothing"):
            await again
        assert of.router.members.supervisor.num_unexplained == 0
        await asyncio.gather(late, *others.values())

    run(test)


def test_nobody_is_to_blame_for_a_death_in_a_pause() -> None:
    async def test() -> None:
        of = Dying("a")
        task = start(of.router, "r")["r"]
        await settle()
        for _ in range(ENGINES.restarts):
            await of.router.pause()
            await of.die("a")
            await of.router.resume()
            await settle()
        assert of.running("a") == ["r"]
        assert not of.router.members.supervisor.is_suspect("r")
        assert of.router.members.supervisor.num_unexplained == ENGINES.restarts
        await of.answer("a", "r")
        assert (await task).finish_reason == "stop"

    run(test)


def test_urgent_requests_go_before_the_others_in_their_own_order() -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1)
        tasks = start(router, "runs", "waits", "waits too")
        await settle()
        for name in ("urgent", "urgent too"):
            request = dataclasses.replace(req(name), urgent=True)
            tasks[name] = asyncio.ensure_future(router.generate(request))
        for name in ("runs", "urgent", "urgent too", "waits", "waits too"):
            await settle()
            assert list(a.calls) == [name]
            a.answer(name, [5])
        await asyncio.gather(*tasks.values())

    run(test)


def test_cancelled_requests_do_not_fill_the_queue() -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1)
        tasks = start(router, "runs", "first", "second")
        await settle()
        await router.cancel("second")
        await tasks["second"]
        await router.statistics()
        tasks |= start(router, "third")
        await settle()
        assert (await router.statistics()).maxima["rollout/queue_length"] == 2  # first and third
        for name in ("runs", "first", "third"):
            await settle()
            a.answer(name, [5])
        await asyncio.gather(*tasks.values())

    run(test)


def test_a_replica_that_nobody_can_replace_is_not_waited_for() -> None:
    """on_lost itself fails: no thread left, say."""

    def lost(name: str, why: str) -> bool:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=1, on_lost=lost)
        tasks = start(router, "waits", "waits too")
        await settle()
        with pytest.raises(RuntimeError):
            router.members.mark_dead("a", "it fell over")
        with pytest.raises(RolloutError, match="no replica left"):
            await tasks["waits too"]
        a.die()
        with pytest.raises(RolloutError, match="no replica left"):
            await tasks["waits"]
        router.members.give_up("a", "again")  # too late, and no harm
        router.members.give_up("nobody", "never there")

    run(test)


def test_a_loop_that_is_closed_is_not_woken() -> None:
    engines = {"a": Engine(), "b": Engine()}
    router = Router(engines, limit=1)  # type: ignore[arg-type]
    asyncio.run(router.pause())
    router.members.mark_dead("a", "it fell over")
    assert list(router.engines()) == ["b"]


def test_ids_are_unique() -> None:
    async def test() -> None:
        a = Engine()
        router = Router({"a": a}, limit=4)
        first = start(router, "r")["r"]
        await settle()
        with pytest.raises(RolloutError, match="'r' is in flight already"):
            await router.generate(req("r"))
        a.answer("r", [5])
        await first

    run(test)
