"""MiniWoB in a real Chromium: what is seen and done on its pages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rondo.config.schema import EnvironmentConfig
from rondo.core.errors import ConfigError
from rondo.environments import check_environment
from rondo_worlds.chromium import Page, find_chromium
from rondo_worlds.miniwob_adapter import SOLVED, MiniWob, next_action
from tests.installed import needs, needs_programs
from tests.rondo_worlds.packages.browsing import any_act, browsers, mains

needs("miniwob")
needs_programs("chromium")


@pytest.fixture(scope="module", autouse=True)
def _one_browser() -> Iterator[None]:
    """A page that stays open, so that the browser starts once."""
    page = Page(find_chromium("chromium"))
    yield
    page.close()
    assert not browsers(os.getpid())


@pytest.fixture
def make() -> Iterator[Callable[..., MiniWob]]:
    made: list[MiniWob] = []

    def world(id: str, **options: Any) -> MiniWob:
        made.append(MiniWob(id=id, **options))
        return made[-1]

    yield world
    for one in made:
        one.close()


@pytest.fixture
def running(make: Callable[..., MiniWob]) -> MiniWob:
    world = make("click-test")
    world.reset(0)
    return world


@pytest.mark.parametrize("id", ["click-test", "click-button", "enter-text"])
def test_promises_are_kept(id: str) -> None:
    check_environment(lambda: MiniWob(id=id), act=any_act, steps=4)


@pytest.mark.parametrize("id", ["click-collapsible", "use-slider"])
def test_what_moves_and_fades_does_so_alike(id: str) -> None:
    """The time of a page passes with actions only: no episode is cut off or changed by how fast it is."""
    check_environment(lambda: MiniWob(id=id), seeds=(0,), act=any_act, steps=3)


@pytest.mark.parametrize("id", SOLVED)
def test_a_solver_that_reads_the_page_wins(id: str, make: Callable[..., MiniWob]) -> None:
    world = make(id)
    for seed in range(3):
        world.reset(seed)
        for _ in range(12):
            result = world.step(next_action(world.state()))
            if result.done:
                break
        assert (result.reward, result.done, result.success, result.invalid) == (1.0, True, True, False)
        assert result.observation.text.endswith("The episode is over.")


def test_what_is_seen_and_typed(make: Callable[..., MiniWob]) -> None:
    world = make("enter-text")
    seen = world.reset(2)
    task, field, button = seen.text.split("\n")
    assert task == 'Task: Enter "Livia" into the text field and press Submit.'
    assert (field, button, seen.actions) == ('[5] input_text = ""', '[6] button "Submit"', ())
    for said in ("Livi", 'a "ü" b'):  # the last replaces the first
        field = world.step(f"type[5] {said}").observation.text.split("\n")[1]
    assert field == '[5] input_text = "a \\"ü\\" b"'
    wrong = world.step("click[6]")
    assert (wrong.reward, wrong.done, wrong.success) == (-1.0, True, False)


def test_what_is_no_action_changes_nothing(make: Callable[..., MiniWob]) -> None:
    world = make("choose-list")
    before = world.reset(0)
    for wrong in (
        "click",
        "click[99]",
        "click[4]",  # a list is chosen from
        "click[5] now",
        "type[4] Rorie",
        "type[5] Rorie",
        "select[4] Nobody",
        "select[5] Rorie",
        "press[5]",
        "",
    ):
        result = world.step(wrong)
        assert (result.invalid, result.reward, result.done) == (True, 0.0, False), wrong
        assert result.observation == before
    chosen = world.step("select[4] Sidonia")
    assert not chosen.invalid
    assert chosen.observation.text.split("\n")[1].startswith('[4] select = "Sidonia" of ["Rorie", ')


def test_actions_are_listed_where_nothing_can_be_typed(running: MiniWob) -> None:
    assert running.reset(0).actions == ("click[4]",)
    assert running.reset(0, {"id": "click-test-2"}).actions == ("click[4]", "click[5]")


def test_a_click_is_one_of_the_mouse(running: MiniWob) -> None:
    """It goes where the element is, and scripts cannot tell it from a hand's."""
    page = running._page
    assert page is not None
    page.evaluate("window.seen = []; document.body.onclick = e => seen.push([e.isTrusted, e.target.tagName])")
    running.step("click[4]")
    assert page.evaluate("seen") == [[True, "BUTTON"]]


def test_a_page_has_its_own_clock(running: MiniWob) -> None:
    page = running._page
    assert page is not None
    first = page.evaluate("Date.now()")
    assert first == page.evaluate("new Promise(done => document.body.click() || done(Date.now()))")
    running.step("click[4]")
    assert page.evaluate("Date.now()") - first == pytest.approx(1000, abs=1)
    running.reset(1)
    assert running._page is not page
    assert running._page is not None
    assert running._page.evaluate("Date.now()") == first


def test_held_out_pages_are_no_training_pages(make: Callable[..., MiniWob]) -> None:
    world = make("click-test-2")
    places: list[set[str]] = [set(), set()]
    for seed in range(8):
        world.reset(seed)
        places[seed % 2].add(str(world.state()["elements"]))
    assert min(map(len, places)) > 2
    assert not places[0] & places[1]


def test_a_picture(make: Callable[..., MiniWob]) -> None:
    world = make("click-test", observe="image")
    seen = world.reset(0)
    assert (seen.text, seen.actions) == ("Task: Click the button.", ())
    image = seen.image
    assert image is not None
    assert (image.shape, image.dtype) == ((210, 160, 3), np.uint8)
    (button,) = world.state()["elements"]
    left, top = map(int, button["at"])
    assert tuple(image[2, 80]) == (255, 255, 0)  # the sentence stands on yellow
    assert tuple(image[top + 3, left + 3]) == (239, 239, 239)
    assert tuple(image[top - 3, left - 3]) == (255, 255, 255)
    assert world.step("click[200,5]").invalid
    assert world.step(f"click[{left + 3},{top + 3}]").success


def test_typing_at_a_place_of_the_picture(make: Callable[..., MiniWob]) -> None:
    """What is in a field is replaced; elsewhere it is a click."""
    world = make("enter-text", observe="image")
    world.reset(0)
    field = next(one for one in world.state()["elements"] if isinstance(one.get("value"), str))
    left, top = map(int, field["at"])
    for text in ("wrong", "right"):
        world.step(f"type[{left + 5},{top + 5}] {text}")
        (field,) = [one for one in world.state()["elements"] if isinstance(one.get("value"), str)]
        assert field["value"] == text
    assert not world.step("type[155,205] nothing").invalid


def test_one_browser_has_a_page_for_each_episode() -> None:
    """Episodes at once are those that there are one after another."""

    def story(seed: int, into: dict[int, Any]) -> None:
        world = MiniWob(id="click-checkboxes")
        seen = [world.reset(seed).text]
        for _ in range(3):
            seen.append(world.step(next_action(world.state())).observation.text)
        into[seed] = seen
        world.close()

    alone: dict[int, Any] = {}
    together: dict[int, Any] = {}
    for seed in range(4):
        story(seed, alone)
    threads = [threading.Thread(target=story, args=(seed, together)) for seed in range(4)]
    for thread in threads:
        thread.start()
    assert len(mains(os.getpid())) == 1
    for thread in threads:
        thread.join()
    assert alone == together
    assert len(alone) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"browser": "no-such-chromium"}, "apt install chromium"),
        ({"id": "click-buton"}, "did you mean 'click-button'"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, str], said: str) -> None:
    for make in (MiniWob, MiniWob.check):
        with pytest.raises(ConfigError, match=said):
            make(**options)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rondo-rl\[miniwob\]"):
        MiniWob.check()


def test_a_loop_plays_it() -> None:
    """From the prompt to the reward."""
    from tests.agents.test_environment_episodes import act, play

    config = EnvironmentConfig("miniwob", options={"id": "click-checkboxes"})
    world = MiniWob(id="click-checkboxes")
    world.reset(0)
    actions = []
    while not world.state()["done"]:
        actions.append(next_action(world.state()))
        world.step(actions[-1])
    world.close()
    trajectory, values, asked = play("steps", act("click[99]", *actions), config)
    assert (trajectory.outcome, trajectory.rows[-1].turns[0].flags) == ("scored", ("success",))
    assert trajectory.rows[0].turns[0].flags == ("invalid",)
    assert values["environment/success/miniwob"] == 1
    assert values["environment/steps/miniwob"] == len(actions) + 1
    assert all("and click Submit." in text for text in asked)
