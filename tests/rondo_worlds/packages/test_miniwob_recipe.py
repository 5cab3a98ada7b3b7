"""The recipe miniwob: its demonstrations, and what it makes of a page in a real Chromium."""

from __future__ import annotations

import pytest

from rondo.cli.main import main
from rondo_worlds.miniwob_adapter import MiniWob
from rondo_worlds.recipes.miniwob import click, demonstrations, prompt, tokenizer
from tests.installed import needs, needs_programs

needs("miniwob")
needs_programs("chromium")


def test_what_a_prompt_asks_for_is_what_the_page_rewards() -> None:
    """And each word of it is one token."""
    tok = tokenizer()
    world = MiniWob(id="click-link")
    for seed in range(4):
        seen = world.reset(seed)
        task, wanted, title, *links = prompt("Click", (), seen).split("\n")
        assert (task, title) == ("Click", "Links")
        assert wanted in links
        assert all(len(tok(word, add_special_tokens=False)["input_ids"]) == 1 for word in links)
        action = click(f" {wanted}", seen)
        assert action is not None
        result = world.step(action)
        assert (result.reward, result.success) == (1.0, True)
    world.close()


def test_the_recipe_passes_the_second_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "miniwob"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_demonstrations_are_as_right_as_asked(share: float) -> None:
    right = []
    for row in demonstrations(2000, seed=3, right_share=share):
        _, wanted, _, first, *others = row["prompt"].split("\n")
        assert wanted in (first, *others)
        if wanted == first:
            assert row["response"] == first
        else:
            assert row["response"] in (first, wanted)
            right.append(row["response"] == wanted)
    assert sum(right) / len(right) == pytest.approx(share, abs=0.05)
