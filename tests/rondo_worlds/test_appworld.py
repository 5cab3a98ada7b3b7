"""The client of AppWorld's server, against a stand-in for it: the real one was not run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments import Observation, check_environment
from rondo_worlds.appworld_adapter import AppWorld
from tests.messages import full_text
from tests.rondo_worlds.appworld_stand_in import stand_in

DONE = "apis.supervisor.complete_task(answer={})"


def write_code(seen: Observation, rng: random.Random) -> str:
    return rng.choice(["print(seed)", "pass", "nonsense", DONE.format(rng.randrange(9))])


def test_promises_are_kept() -> None:
    """With two servers: the suite has two episodes at once."""
    with stand_in() as (one, _), stand_in() as (other, _):
        check_environment(lambda: AppWorld(urls=[one, other]), task="sum_2_3", act=write_code, seeds=range(4))


def test_an_episode() -> None:
    with stand_in() as (url, server):
        world = AppWorld(urls=[url + "/"])
        seen = world.reset(7, "sum_2_3")
        assert seen.text == (
            "Add 2 and 3.\n\nAda Byron, ada@x.org, 1815, asks for it. It is 2023-05-18T12:00:00."
        )
        shown = [world.step(code) for code in ("print(seed)", "pass", "oh")]
        assert [result.observation.text for result in shown] == [
            "7\n",
            "It printed nothing.",
            "Execution failed. Traceback:\nNameError",
        ]
        assert not any(result.done or result.reward for result in shown)
        last = world.step(DONE.format(5))
        assert (last.reward, last.done, last.success) == (1.0, True, True)
        assert world.state()["tests"]["success"] is True
        world.reset(8, "sum_2_3")
        wrong = world.step(DONE.format(6))
        assert (wrong.reward, wrong.done, wrong.success) == (0.0, True, False)
        world.close()
        world.close()
        assert server.calls.count("close") == 2
        assert server.world is None


def test_a_server_has_one_episode_at_a_time() -> None:
    with stand_in() as (url, _):
        first, second = AppWorld(urls=[url]), AppWorld(urls=[url])
        first.reset(0, "sum_1_1")
        with pytest.raises(EnvironmentFailedError, match=full_text("each of the 1 servers has an episode")):
            second.reset(0, "sum_2_2")
        first.close()
        assert second.reset(0, "sum_2_2").text.startswith("Add 2 and 2.")
        second.close()


def test_failures_of_the_server_are_typed_and_leave_it_free() -> None:
    with stand_in() as (url, server):
        world = AppWorld(urls=[url])
        with pytest.raises(EnvironmentFailedError, match=full_text("initialize answered 500")):
            world.reset(0, "unknown")
        world.reset(0, "sum_1_1")
        server.world = None  # somebody else has ended it
        with pytest.raises(EnvironmentFailedError, match=full_text("execute answered 500")):
            world.step("pass")
        world.reset(0, "sum_1_1")
    with pytest.raises(EnvironmentFailedError, match="appworld serve environment"):
        world.step("pass")
    world.close()
    with pytest.raises(EnvironmentFailedError, match="appworld serve environment"):
        world.reset(0, "sum_1_1")


@pytest.mark.parametrize("task", [None, "", {"id": "sum_1_1"}])
def test_a_row_names_its_task(task: Any) -> None:
    with pytest.raises(EnvironmentFailedError, match="task's id"):
        AppWorld(urls=["http://nowhere"]).reset(0, task)


@pytest.mark.parametrize("urls", ["http://a", [], ["a:8000"], ["http://a", "http://a"]])
def test_what_are_no_addresses(urls: Any) -> None:
    with pytest.raises(ConfigError, match="appworld: urls"):
        AppWorld(urls=urls)
