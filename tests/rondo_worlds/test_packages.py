"""What environments of other packages rest on: the remedy where one is missing, and a loan of globals."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from rondo.core.errors import ConfigError
from rondo.environments.registry import environment_class
from rondo_worlds.packages import borrowed_globals


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alfworld", {}),
        ("gymnasium", {"id": "FrozenLake-v1", "actions": ["left"]}),
        ("minigrid", {}),
        ("miniwob", {}),
        ("openenv", {"url": "http://localhost"}),
        ("reasoning_gym", {"dataset": "chain_sum"}),
        ("textarena", {"id": "TowerOfHanoi-v0"}),
        ("textworld", {"challenge": "tw-cooking"}),
        ("verifiers", {"taskset": "my.py:taskset"}),
    ],
)
def test_a_package_that_is_missing_is_named(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start of a run, and where an episode begins."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = environment_class(name, "here")
    for begin in (made.check, made):
        with pytest.raises(ConfigError, match=rf"pip install 'rondo-rl\[{name.replace('_', '-')}\]'"):
            begin(**options)


def test_borrowed_globals_are_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    """Also by threads that borrow them at one time, and whatever is raised."""
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    drawn: dict[int, tuple[float, float]] = {}

    def draw(seed: int) -> None:
        with borrowed_globals(seed):
            print("to standard error")
            drawn[seed] = (random.random(), np.random.rand())
            raise OSError("broken")

    def borrow(seed: int) -> None:
        with pytest.raises(OSError, match="broken"):
            draw(seed)

    threads = [threading.Thread(target=borrow, args=(seed % 2,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == {
        seed: (random.Random(seed).random(), np.random.RandomState(seed).rand()) for seed in (0, 1)
    }
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "to standard error\n" * 8)
