"""The browser of MiniWoB's pages: that it starts once, fails by name, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import EnvironmentFailedError
from rondo.environments import StepResult
from rondo_worlds import chromium
from rondo_worlds.chromium import Page, find_chromium
from rondo_worlds.miniwob_adapter import MiniWob
from tests.installed import needs, needs_programs
from tests.messages import full_text
from tests.rondo_worlds.packages.browsing import browsers, none_left

needs("miniwob")
needs_programs("chromium")


@pytest.fixture(autouse=True)
def _no_browser_is_left() -> Iterator[None]:
    yield
    assert not browsers(os.getpid())
    assert not list(Path(tempfile.gettempdir()).glob(f"rondo-chromium-{os.getpid()}-*"))


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page(find_chromium("chromium"))
    yield made
    made.close()


@pytest.mark.parametrize("killed", ["browser", "all of it"])
def test_a_browser_that_is_killed_is_the_environments_failure(killed: str) -> None:
    """Of all episodes that are in it. The next one has another."""
    worlds = [MiniWob(id="click-test"), MiniWob(id="click-button")]
    for world in worlds:
        world.reset(0)
    assert worlds[0]._page is not None
    process = worlds[0]._page._browser._process.pid
    (os.kill if killed == "browser" else os.killpg)(process, signal.SIGKILL)
    for world, action in zip(worlds, ("click[4]", "click[4]"), strict=True):
        with pytest.raises(EnvironmentFailedError, match="the browser is gone"):
            world.step(action)
    again = MiniWob(id="click-test")
    again.reset(0)
    assert again.step("click[4]").success
    for world in (*worlds, again):
        world.close()
        world.close()


def test_a_page_that_crashes_takes_no_other_with_it() -> None:
    running, world = MiniWob(id="click-test"), MiniWob(id="click-button")
    running.reset(0)
    world.reset(0)
    assert world._page is not None
    with pytest.raises(EnvironmentFailedError, match="the page crashed"):
        world._page.call("Page.crash")
    with pytest.raises(EnvironmentFailedError, match="crashed"):
        world.step("click[4]")
    world.close()
    assert running.step("click[4]").success
    running.close()


def test_a_script_that_never_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    monkeypatch.setattr(chromium, "SECONDS", 0.5)
    with pytest.raises(EnvironmentFailedError, match=full_text("Runtime.evaluate took longer than 0.5 s")):
        page.evaluate("(() => { for (;;) {} })()")


def test_a_page_that_fails_says_so(page: Page) -> None:
    with pytest.raises(EnvironmentFailedError, match=full_text("the page failed: ReferenceError: nothing")):
        page.evaluate("nothing()")
    with pytest.raises(EnvironmentFailedError, match=r"refused: 'Page\.nothing' wasn't found"):
        page.call("Page.nothing")


def test_nothing_outlives_who_is_killed() -> None:
    code = """
import os
from rondo_worlds.miniwob_adapter import MiniWob
world = MiniWob(id="click-test")
world.reset(0)
print("ready", flush=True)
os.read(0, 1)
"""
    host = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert host.stdout is not None
    assert host.stdout.readline() == b"ready\n"
    assert len(browsers(host.pid)) > 3
    host.kill()
    host.communicate()
    assert none_left(host.pid)
    for profile in Path(tempfile.gettempdir()).glob(f"rondo-chromium-{host.pid}-*"):
        shutil.rmtree(profile)


def test_a_browser_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no display for me >&2\nexit 1\n")
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nsleep 60\n")
    for program in (broken, hangs):
        program.chmod(0o755)
    with pytest.raises(EnvironmentFailedError, match="broken did not start: no display for me"):
        MiniWob(id="click-test", browser=str(broken)).reset(0)
    monkeypatch.setattr(chromium, "SECONDS", 0.5)
    with pytest.raises(EnvironmentFailedError, match=full_text("hangs did not start")):
        Page(str(hangs))


def test_a_browser_that_dies_is_no_reward_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode has the outcome environment_error, and keeps what was said before."""
    from tests.agents.test_environment_episodes import act, play

    step = MiniWob.step

    def killed(self: MiniWob, action: str) -> StepResult:
        if action == "click[6]":
            assert self._page is not None
            os.kill(self._page._browser._process.pid, signal.SIGKILL)
        return step(self, action)

    monkeypatch.setattr(MiniWob, "step", killed)
    config = EnvironmentConfig("miniwob", options={"id": "enter-text"})
    trajectory, values, _ = play("steps", act("type[5] Ada", "click[6]", "never asked"), config)
    assert trajectory.outcome == "environment_error"
    assert trajectory.failure.startswith("the environment miniwob: the browser is gone")
    assert "[action] type[5] Ada · reward 0" in trajectory.transcript
    assert values["environment/failures/miniwob"] == 1
