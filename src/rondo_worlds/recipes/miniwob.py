"""MiniWoB's `click-link` for a small model that is made here: the link that is wanted and all that there are,
one word each; an action is such a word; and demonstrations, most of which click the first link.

Demonstrations are drawn as the page draws its links, without a browser.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rondo.core.errors import ConfigError
from rondo.environments import Observation
from rondo.recipes.quickstart import fast_tokenizer, train_bpe
from rondo_worlds.miniwob_adapter import html

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TASK = "Click"
_WANTED = re.compile(r'Task: Click on the link "(.*)"\.')
_LINK = re.compile(r'^\[(\d+)\] span "(.*)"$', re.MULTILINE)
_WORDS_OF_A_PAGE, _LINK_SHARE = 20, 0.2


def prompt(task: str, memory: Sequence[Any], seen: Observation) -> str:
    """Returns what a step's prompt says, for the option `prompt` of a loop. Raises ConfigError for a page
    that asks for no link.
    """
    wanted = _WANTED.match(seen.text)
    if wanted is None:
        raise ConfigError(
            "rondo_worlds.recipes.miniwob.prompt writes the page click-link, and this one says: "
            f"{seen.text.splitlines()[0]} (set id: click-link, or a prompt of your own)"
        )
    return _written(_plain(wanted[1]), [_plain(label) for _, label in _LINK.findall(seen.text)])


def click(answer: str, seen: Observation) -> str | None:
    """Reads an answer that is a link's word and nothing else, for the option `action` of a loop."""
    found = (f"click[{ref}]" for ref, label in _LINK.findall(seen.text) if _plain(label) == answer.strip())
    return next(found, None)


def _plain(label: str) -> str:
    return label.strip(".,").lower()


def _written(wanted: str, links: Sequence[str]) -> str:
    return "\n".join([TASK, wanted, "Links", *links])


def demonstrations(size: int = 9600, seed: int = 0, right_share: float = 0.3) -> list[dict[str, Any]]:
    """Makes rows with prompt and response for the warm start: with odds `right_share` the link that is
    wanted, else the first, which may be the same.
    """
    if size < 1 or not 0 <= right_share <= 1:
        raise ConfigError(
            f"miniwob: need size >= 1 and right_share from 0 to 1, got {size} and {right_share}"
        )
    rng = random.Random(f"rondo miniwob demonstrations: {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        page = rng.choices(_words(), k=_WORDS_OF_A_PAGE)
        links = [word for word in page if rng.random() < _LINK_SHARE]
        if not links:
            continue
        wanted = rng.choice(links)
        said = wanted if rng.random() < right_share else links[0]
        rows.append({"prompt": _written(wanted, links), "response": said})
    return rows


@functools.cache
def _words() -> tuple[str, ...]:
    """Returns the words of the package's pages, as often as they stand in its list."""
    script = (html() / "common" / "ui_utils.js").read_text(encoding="utf-8")
    listed = script.partition("lorem_words = [")[2].partition("]")[0]
    return tuple(map(_plain, re.findall(r'"(.*?)"', listed)))


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE that is trained here on those words: always the same vocabulary, in which each
    of them is a token.
    """
    return fast_tokenizer(train_bpe([*_words() * 2, *("user\n", "assistant\n", TASK, "Links") * 2]))
