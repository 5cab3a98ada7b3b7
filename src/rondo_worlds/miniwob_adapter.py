"""MiniWoB: small tasks on web pages, in a real Chromium. Needs rondo-rl[miniwob], whose pages these are."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rondo.core.errors import ConfigError, did_you_mean
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.chromium import Page, find_chromium
from rondo_worlds.levels import level_of
from rondo_worlds.packages import require_package
from rondo_worlds.tiles import check_observe, observed_as

_ACTION = re.compile(r"(click|type|select)\[(\d{1,9})\](?: (.*))?", re.DOTALL)
_AT = re.compile(r"(click|type)\[(\d{1,3}), ?(\d{1,3})\](?: (.*))?", re.DOTALL)
_WIDTH, _HEIGHT = 160, 210
_CLOCK = 1.5e9  # at the start of every episode, seconds since 1970
_MILLISECONDS = (
    1000  # of the page's own time, that pass with an action: animations are over, timers have fired
)
# Before the page's own scripts: what they draw before there is a seed, and frames by the page's time.
_FIRST = """(() => {
  let drawn = 1;
  Math.random = () => (drawn = drawn * 16807 % 2147483647) / 2147483647;
  const frame = window.requestAnimationFrame;
  window.painted = () => new Promise(done => frame(() => frame(done)));
  window.requestAnimationFrame = paint => setTimeout(() => paint(performance.now()), 16);
  window.cancelAnimationFrame = clearTimeout;
})()"""
# The page's own limit would end episodes by how fast the policy is.
_BEGIN = """(() => {
  core.endEpisode(0);
  core.EPISODE_MAX_TIME = 2147483647;
  Math.seedrandom(%d);
  core.startEpisodeReal();
})()"""
_LOOK = """(() => {
  const elements = [];
  const walk = (info, parent) => {
    const element = core.previousDOMInfo[info.ref];
    if (info.children.length) return info.children.forEach(child => walk(child, info));
    const seen = {ref: element ? info.ref : parent.ref, tag: element ? info.tag.toLowerCase() : '',
                  text: (info.text || '').replace(/\\s+/g, ' '), at: [info.left, info.top]};
    if (info.value !== undefined) seen.value = info.value;
    if (element instanceof HTMLSelectElement) {
      seen.value = element.selectedOptions.length ? element.selectedOptions[0].text.trim() : '';
      seen.options = Array.from(element.options, option => option.text.trim());
      seen.text = '';
    }
    if (!seen.text && seen.value === undefined) {
      seen.colour = element instanceof SVGElement ? element.getAttribute('fill') : info.bgColor;
      if (seen.colour === 'rgba(0, 0, 0, 0)') delete seen.colour;
    }
    if (seen.tag !== 'div' || seen.text || seen.colour) elements.push(seen);  // else it only takes up room
  };
  walk(core.getDOMInfo());
  return {task: core.getUtterance(), elements, done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL};
})()"""
# The middle of an element, or where nothing else lies over it. A mouse finds what was painted last.
_PLACE = """(async element => {
  const before = element.getBoundingClientRect();
  element.scrollIntoView({block: 'nearest', inline: 'nearest'});
  const after = element.getBoundingClientRect();
  if (before.top !== after.top || before.left !== after.left) await painted();
  const box = element.getClientRects()[0] || element.getBoundingClientRect();
  const parts = [0.5, 0.1, 0.3, 0.7, 0.9];
  const points = parts.flatMap(x => parts.map(y => [box.left + box.width * x, box.top + box.height * y]));
  return points.find(point => element.contains(document.elementFromPoint(...point))) || points[0];
})(core.previousDOMInfo[%d])"""
# Whether what has the focus takes text; what is in it is selected, so that typing replaces it.
_TAKES_TEXT = """(element => {
  if (!(element instanceof HTMLInputElement || element instanceof HTMLTextAreaElement)) return false;
  element.select();
  return true;
})(document.activeElement)"""
_CHOOSE = """((element, chosen) => {
  element.selectedIndex = Array.from(element.options).findIndex(option => option.text.trim() === chosen);
  for (const kind of ['input', 'change']) element.dispatchEvent(new Event(kind, {bubbles: true}));
})(core.previousDOMInfo[%d], %s)"""


class MiniWob:
    """The task of a page of MiniWoB, such as `click-button`. The text has its sentence and, a line each, what
    the page shows, with a number by which actions name it: `click[4]`, `type[5] some text`, `select[7] an
    option`. Clicks and keys are those of a real mouse and keyboard.

    The reward is the page's, from -1 to 1, without what it takes off for time: the page's clock stands, but
    for a second with each action. observe: text, image (the page as it looks, 160 × 210 pixels) or both;
    where there is a picture, actions may name a place in it, too: `click[80,120]`, `type[80,120] some text`.
    browser: a program, or its path.
    """

    instructions = (
        "Do the task on the web page. Answer with one action on a numbered element, such as "
        "<action>click[4]</action>, <action>type[5] some text</action> or "
        "<action>select[7] an option</action>."
    )

    def __init__(self, *, id: str = "click-button", observe: str = "text", browser: str = "chromium") -> None:
        self.check(id=id, observe=observe, browser=browser)
        self._id = id
        self._observe_as = observe
        self._program = find_chromium(browser)
        self._page: Page | None = None
        self._seen: dict[str, Any] = {}

    @classmethod
    def check(cls, *, id: str = "click-button", observe: str = "text", browser: str = "chromium") -> None:
        """Raises ConfigError where the package or the browser is missing, or there is no such page."""
        check_observe(observe, "miniwob")
        _url(id)
        find_chromium(browser)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Opens a page. task: `{id: click-link}`, where it is to be another."""
        id = str((task or {}).get("id", self._id))
        url = _url(id)
        page = Page(self._program)
        self.close()
        self._page = page
        page.call("Page.addScriptToEvaluateOnNewDocument", source=_FIRST)
        page.open(url)
        page.call("Emulation.setVirtualTimePolicy", policy="pause", initialVirtualTime=_CLOCK)
        level_of(f"miniwob {id}", seed, partial(self._draw, page))
        self._seen = self._after(page)
        return self._observe(page)

    def _draw(self, page: Page, rng: random.Random) -> object:
        page.evaluate(_BEGIN % rng.getrandbits(31))
        return page.evaluate(_LOOK)

    def step(self, action: str) -> StepResult:
        """Acts on an element. What is no action on one that is shown is invalid."""
        page = self._page
        assert page is not None, "reset comes first"
        if not self._acts(page, action.strip()):
            return StepResult(self._observe(page), invalid=True)
        self._seen = self._after(page)
        done = bool(self._seen["done"])
        reward = float(self._seen["reward"]) if done else 0.0
        return StepResult(self._observe(page), reward, done, success=done and reward >= 1)

    def _acts(self, page: Page, action: str) -> bool:
        """Does as `_act` or `_act_at`."""
        if self._observe_as != "text" and (placed := _AT.fullmatch(action)):
            verb, x, y, text = placed.groups(default="")
            return self._act_at(page, verb, int(x), int(y), text.strip())
        if (parsed := _ACTION.fullmatch(action)) is None:
            return False
        verb, ref, text = parsed.groups(default="")
        return self._act(page, verb, int(ref), text.strip())

    def _act(self, page: Page, verb: str, ref: int, text: str) -> bool:
        """Says whether this could be done."""
        found = [one for one in self._seen["elements"] if one["ref"] == ref]
        if not found or (verb == "click") != (not text):
            return False
        if verb == "select":
            if text not in found[0].get("options", ()):
                return False
            page.evaluate(_CHOOSE % (ref, json.dumps(text)))
            return True
        is_select, is_field = "options" in found[0], isinstance(found[0].get("value"), str)
        if is_select or (verb == "type" and not is_field):
            return False
        page.click(*page.evaluate(_PLACE % ref))
        if verb == "type":
            page.evaluate(f"core.previousDOMInfo[{ref}].select()")
            page.type(text)
        return True

    def _act_at(self, page: Page, verb: str, x: int, y: int, text: str) -> bool:
        """Does as `_act` at a place of the picture."""
        if x >= _WIDTH or y >= _HEIGHT or (verb == "click") != (not text):
            return False
        page.click(x, y)
        if verb == "type" and page.evaluate(_TAKES_TEXT):  # elsewhere it was a click
            page.type(text)
        return True

    def _after(self, page: Page) -> dict[str, Any]:
        """Lets the page's time pass, and returns what is to be seen then."""
        page.advance(_MILLISECONDS)
        return dict(page.evaluate(_LOOK))

    def _observe(self, page: Page) -> Observation:
        task, elements = f"Task: {self._seen['task']}", self._seen["elements"]
        picture = partial(page.picture, _WIDTH, _HEIGHT)
        if self._seen["done"]:
            return observed_as(self._observe_as, "The episode is over.", (), picture, task)
        clicks = tuple(dict.fromkeys(f"click[{one['ref']}]" for one in elements))
        free = self._observe_as != "text" or any(isinstance(one.get("value"), str) for one in elements)
        text = "\n".join(map(_line, elements))
        return observed_as(self._observe_as, text, () if free else clicks, picture, task)

    def state(self) -> Mapping[str, Any]:
        """Returns what the page says of itself: the task, all elements with their places, done and reward."""
        return self._seen

    def close(self) -> None:
        """Closes the page."""
        page, self._page = self._page, None
        if page is not None:
            page.close()


def html() -> Path:
    """Returns the folder of the package's pages. Raises ConfigError."""
    return Path(str(require_package("miniwob").origin)).parent / "html"


def _url(id: str) -> str:
    folder = html() / "miniwob"
    pages = sorted(path.stem for path in folder.glob("*.html"))
    if id not in pages:
        raise ConfigError(f"miniwob: there is no page {id!r}{did_you_mean(id, pages)}")
    return (folder / f"{id}.html").as_uri()


def _line(seen: Mapping[str, Any]) -> str:
    parts = [f"[{seen['ref']}]", seen["tag"] or "text"]
    if seen["text"]:
        parts.append(json.dumps(seen["text"], ensure_ascii=False))
    if "value" in seen:
        parts.append(f"= {json.dumps(seen['value'], ensure_ascii=False)}")
    if "options" in seen:
        parts.append(f"of {json.dumps(seen['options'], ensure_ascii=False)}")
    if seen.get("colour"):
        parts.append(str(seen["colour"]))
    return " ".join(parts)


SOLVED = (
    "choose-list",
    "click-button",
    "click-checkboxes",
    "click-dialog",
    "click-link",
    "click-option",
    "click-tab",
    "click-test",
    "click-test-2",
    "enter-text",
    "focus-text",
)
"""Tasks that `next_action` does."""


def next_action(page: Mapping[str, Any]) -> str:
    """Returns the next action of a solution of one of SOLVED, from what `state` says of it."""
    task, elements = page["task"], page["elements"]
    fields = [one for one in elements if isinstance(one.get("value"), str)]
    if entered := re.fullmatch(r'Enter "(.*)" into the text field and press Submit\.', task):
        done = fields[0]["value"] == entered[1]
        return _click(elements, "Submit") if done else f"type[{fields[0]['ref']}] {entered[1]}"
    if chosen := re.fullmatch(r"Select (.*) from the list and click Submit\.", task):
        done = fields[0]["value"] == chosen[1]
        return _click(elements, "Submit") if done else f"select[{fields[0]['ref']}] {chosen[1]}"
    if ticked := re.fullmatch(r"Select (.*) and click Submit\.", task):
        boxes = {label["text"]: box for box, label in pairwise(elements) if box.get("value") is False}
        left = [boxes[label]["ref"] for label in ticked[1].split(", ") if label in boxes]
        return f"click[{left[0]}]" if left else _click(elements, "Submit")
    if task == "Focus into the textbox.":
        return f"click[{fields[0]['ref']}]"
    if task == 'Close the dialog box by clicking the "x".':
        return _click(elements, "Close")
    named = re.search(r'"(.*)"', task) or re.search(r"(?:button|on) (ONE|TWO|Tab #\d+)\.$", task)
    return _click(elements, named[1] if named else "Click Me!")


def _click(elements: Sequence[Mapping[str, Any]], text: str) -> str:
    return next(f"click[{one['ref']}]" for one in elements if one["text"] == text)
