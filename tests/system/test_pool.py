"""Who is to blame for a process that dies, and when no other one is started."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from rondo.core.errors import RondoError
from rondo.system.pool import Pool, Pooled, Supervision, Supervisor, begun

TWO = Supervision(restarts=3, deaths=2)


def suspects(of: Supervisor[str], names: str) -> str:
    return "".join(name for name in names if of.is_suspect(name))


def test_what_dies_alone_is_guilty_and_explains_what_it_saw() -> None:
    of: Supervisor[str] = Supervisor(TWO)
    assert of.died("pqr") is None  # one of them, or none
    assert of.died("s") is None  # alone, but for the first time
    assert suspects(of, "pqrst") == "pqrs"
    of.ended("q")
    assert suspects(of, "pqrst") == "prs"
    assert of.died("pr") is None  # their user did not keep them apart
    assert of.num_unexplained == 3
    assert of.died("p") == "p"
    assert (of.num_deaths("p"), of.num_unexplained) == (3, 1)  # of s nobody knows
    assert suspects(of, "pqrs") == "ps"  # r saw only deaths of p
    assert of.died("p") == "p"  # issued again
    assert (of.num_deaths("p"), of.num_unexplained) == (4, 1)
    assert of.died() is None
    assert of.num_unexplained == 2


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_so_many_deaths_the_last_one_alone(deaths: int) -> None:
    of: Supervisor[str] = Supervisor(Supervision(restarts=0, deaths=deaths))
    assert [of.died("p") for _ in range(deaths)] == [*[None] * (deaths - 1), "p"]
    assert [of.died("qr") for _ in range(deaths)] == [None] * deaths
    assert of.died("q") == "q"
    assert not of.is_suspect("r")


def test_a_death_that_is_forgiven_makes_no_suspect() -> None:
    of: Supervisor[str] = Supervisor(Supervision(restarts=3, deaths=3, forgiven=1))
    assert of.died("pqr") is None
    assert suspects(of, "pqr") == ""
    assert of.died("pq") is None
    assert suspects(of, "pqr") == "pq"
    of.ended("q")
    assert of.died("p") == "p"
    assert (suspects(of, "qr"), of.num_deaths("p"), of.num_unexplained) == ("", 3, 0)
    assert of.died("r") is None  # the death that it saw is explained


def test_a_start_that_failed_when_nobody_waits_any_more_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RondoError("it was closed")

    async def main() -> None:
        task = begun(work())
        await asyncio.wait([task])
        with pytest.raises(RondoError, match="it was closed"):
            await task
        begun(work())
        await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert not caplog.records


def test_a_budget_is_of_deaths_that_nobody_is_guilty_of() -> None:
    of: Supervisor[str] = Supervisor(TWO)
    said = []
    for running in ("p", "p", "p", "", "q", "r"):
        of.died(running)
        said.append((of.num_unexplained, of.gives_up))
    assert said == [(1, False), (0, False), (0, False), (1, False), (2, False), (3, False)]
    of.died()
    assert of.gives_up
    assert of.died("q") == "q"  # and so the first death of q was no chance
    assert (of.num_unexplained, of.gives_up) == (3, False)
    assert suspects(of, "pqrs") == "pqr"  # who was guilty once stays alone


def test_deaths_in_a_row() -> None:
    of: Supervisor[str] = Supervisor(Supervision(restarts=1, deaths=2))
    of.died("pq")
    of.worked()
    assert of.num_unexplained == 0
    assert suspects(of, "pqr") == "pq"
    of.died("r")
    assert not of.gives_up
    assert of.died("r") == "r"
    assert suspects(of, "pqr") == "pqr"  # p and q saw a death that r did not
    of.died()
    of.died()
    assert of.gives_up


def test_memory_is_bounded() -> None:
    of: Supervisor[str] = Supervisor(Supervision(restarts=3, deaths=9), remember=2)
    for name in "pqpr":
        of.died(name)
    assert [of.num_deaths(name) for name in "pqr"] == [2, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_exactly_those_that_processes_die_of_are_guilty(seed: int) -> None:
    """Forty keys run four at a time, suspects alone, in an order by chance; five of them end processes."""
    chance = random.Random(seed)
    of: Supervisor[int] = Supervisor(TWO)
    waiting, deadly = list(range(40)), set(chance.sample(range(40), 5))
    guilty, ended, num_deaths = [], [], 0
    while waiting:
        chance.shuffle(waiting)
        alone = [key for key in waiting if of.is_suspect(key)][:1]
        running = alone or waiting[:4]
        if deadly.isdisjoint(running):
            ended += running
            waiting = [key for key in waiting if key not in running]
            for key in running:
                of.ended(key)
            continue
        num_deaths += 1
        if (found := of.died(running)) is not None:
            guilty.append(found)
            waiting.remove(found)
    assert set(guilty) == deadly
    assert len(guilty) == 5
    assert sorted(ended) == sorted(set(range(40)) - deadly)
    assert num_deaths == 10
    assert of.num_unexplained == 0


class Box(Pooled):
    """What a process is to a pool."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.gone = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.gone.is_set()

    def end(self) -> None:
        self.gone.set()


def boxes(count: int, room: int | None = None, deaths: int = 2) -> tuple[Pool[Box], list[Box]]:
    """A pool, and all that it starts."""
    started: list[Box] = []

    def start(number: int, before: Box | None) -> Box:
        assert before is None or before.ended
        started.append(Box(number))
        return started[-1]

    return Pool(count, start, Supervision(restarts=None, deaths=deaths), room), started


def test_a_pool_has_room_for_so_many_and_starts_what_it_needs() -> None:
    async def main() -> None:
        pool, started = boxes(2, room=2)
        leave = [asyncio.Event() for _ in range(6)]
        came: list[tuple[int, int]] = []

        async def be_in(key: int) -> None:
            async with pool.place(key) as box:
                came.append((key, box.number))
                await leave[key].wait()

        tasks = [asyncio.create_task(be_in(key)) for key in range(6)]
        await asyncio.sleep(0)
        assert came == [(0, 0), (1, 1), (2, 0), (3, 1)]
        tasks[4].cancel()
        leave[3].set()
        await tasks[3]
        await asyncio.sleep(0)
        assert came[4:] == [(5, 1)]
        for event in leave:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [box.running for box in started] == [set(), set()]
        pool.close()
        assert all(box.ended for box in started)
        with pytest.raises(RondoError, match="have ended"):
            await be_in(7)

    asyncio.run(main())


@pytest.mark.parametrize("deaths", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_in_a_pool_only_the_guilty_are_given_up_and_suspects_are_alone(seed: int, deaths: int) -> None:
    """Forty keys in two processes with room for eight; five of them end what they are in."""

    async def main() -> None:
        chance = random.Random(seed)
        pool, _ = boxes(2, 8, deaths)
        deadly = set(chance.sample(range(40), 5))
        guilty, ended = [], []

        async def run(key: int) -> None:
            while True:
                async with pool.place(key) as box:
                    if pool.supervisor.is_suspect(key):
                        assert (box.number, box.running) == (2, {key})
                    for _ in range(chance.randrange(1, 9)):
                        await asyncio.sleep(0)
                    if key in deadly:
                        box.end()
                    if not box.ended:
                        ended.append(key)
                        return
                    if pool.died(box, box.running) == key:
                        guilty.append(key)
                        return

        await asyncio.gather(*map(run, range(40)))
        assert (set(guilty), len(guilty)) == (deadly, 5)
        assert sorted(ended) == sorted(set(range(40)) - deadly)
        assert pool.supervisor.num_unexplained == 0
        assert [key for key in range(40) if pool.supervisor.is_suspect(key)] == sorted(deadly)

    asyncio.run(main())
