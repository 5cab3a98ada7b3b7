"""OpenEnv: a real server in a process of its own, and how it fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo.environments import check_environment
from rondo_worlds.openenv_adapter import OpenEnv
from tests.installed import needs
from tests.messages import full_text

needs("openenv")

SERVER = "tests/rondo_worlds/packages/openenv_server.py"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    module = SERVER.removesuffix(".py").replace("/", ".")
    process = subprocess.Popen([sys.executable, "-m", module], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
    process.kill()
    process.communicate()


def test_promises_are_kept(server: Any) -> None:
    from tests.rondo_worlds.packages.openenv_server import solve

    check_environment(lambda: OpenEnv(url=server[0], text=f"{SERVER}:hint"), act=solve, seeds=range(3))


def test_an_episode(server: Any) -> None:
    world = OpenEnv(url=server[0], text=f"{SERVER}:hint", action=f"{SERVER}:guess")
    assert world.reset(3, {"high": 16}).text == "below 16"
    low, high, told = 0, 16, ""
    steps = 0
    while told != "found":
        steps += 1
        tried = (low + high) // 2
        result = world.step(f"I say {tried}")
        told = result.observation.text
        low, high = (tried + 1, high) if told == "higher" else (low, tried)
    assert (result.reward, result.done, result.success) == (1.0, True, True)
    assert world.state() == {"step_count": steps}
    assert world.reset(3, {"high": 16}).text == "below 16"
    assert world.step(str(tried)).success  # the same seed has the same number
    world.close()
    world.close()


def test_without_a_text_it_is_json(server: Any) -> None:
    world = OpenEnv(url=server[0])
    assert world.reset(0).text == '{"hint": "below 8"}'
    world.close()


def test_what_the_server_refuses_is_its_failure(server: Any) -> None:
    world = OpenEnv(url=server[0])
    world.reset(0)
    with pytest.raises(EnvironmentFailedError, match=full_text("failed: Server error: invalid")):
        world.step("many")
    world.close()


def test_a_server_that_is_full_or_gone_is_a_failure(server: Any) -> None:
    url, process = server
    worlds = [OpenEnv(url=url) for _ in range(3)]
    for world in worlds[:2]:
        world.reset(0)
    with pytest.raises(EnvironmentFailedError, match="failed"):
        worlds[2].reset(0)
    process.kill()
    process.wait()
    with pytest.raises(EnvironmentFailedError, match="failed"):
        worlds[0].step("1")
    for world in worlds:
        world.close()
    with pytest.raises(EnvironmentFailedError, match="Failed to connect"):
        OpenEnv(url=url).reset(0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "begins with http"),
        ({"url": "http://here", "text": "nowhere.py:text"}, "no file"),
        ({"url": "http://here", "action": "nowhere.py:act"}, "no file"),
    ],
)
def test_what_it_cannot_be_asked(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OpenEnv(**options)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rondo-rl\[openenv\]"):
        OpenEnv.check(url="http://here")
