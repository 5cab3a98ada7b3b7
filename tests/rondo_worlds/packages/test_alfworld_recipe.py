"""The recipe alfworld: its demonstrations, and what it makes of a game."""

from __future__ import annotations

import re

import pytest

from rondo.agents.memory import Acted
from rondo.cli.main import main
from rondo.core.errors import ConfigError
from rondo.environments import Observation
from rondo_worlds.alfworld_adapter import AlfWorld, made_room
from rondo_worlds.recipes.alfworld import (
    Sight,
    Walk,
    _sight,
    act,
    demonstrations,
    prompt,
    searched,
    tokenizer,
)
from tests.installed import needs
from tests.messages import full_text

needs("alfworld", "textworld")

BEYOND = re.compile(r"help|inventory|look|examine .*|use .*")  # what no answer can name
SENTENCE = "Your task is to: clean some cup and put it in cabinet."


def of_the_game(seen: Observation) -> Observation:
    """Without what a walk does not have."""
    return Observation(seen.text.splitlines()[-1], tuple(a for a in seen.actions if not BEYOND.fullmatch(a)))


@pytest.mark.parametrize("task", ["place", "clean", "heat", "cool"])
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_a_walk_is_the_game_without_its_words(task: str, seed: int) -> None:
    """A searcher walks through both: what can be done is the same at every step, and at the end it is won."""
    world, walk = AlfWorld(tasks=[task], others=2), Walk(made_room(seed, [task], 2))
    seen, memory = world.reset(seed), list[Acted]()
    while True:
        shown = walk.seen
        assert (of_the_game(seen).text, set(of_the_game(seen).actions)) == (shown.text, set(shown.actions))
        assert prompt("Find", memory, seen) == prompt("Find", memory, shown)
        said = searched(sight(memory, seen))
        assert said is not None
        action = act(f"{said}\n", seen)
        assert action is not None
        memory.append(Acted(seen, said, (action,), 0.0))
        result = world.step(action)
        walk.do(action)
        if result.done:
            break
        seen = result.observation
    assert (result.reward, said) == (1.0, "put")
    world.close()


def sight(memory: list[Acted], seen: Observation) -> Sight:
    return _sight([acted.action for acted in memory], [*(acted.seen for acted in memory), seen])


def seen_at(*actions: str) -> Observation:
    return Observation(f"You see.\n{SENTENCE}", actions)


def test_a_prompt_says_what_was_found_out() -> None:
    """And nothing else: here with everything that it can say."""
    first = seen_at("go to cabinet 2", "go to cabinet 1", "go to sinkbasin 1", "help", "look")
    memory = [Acted(first, "go cabinetB", ("go to cabinet 2",), 0.0)]
    closed = seen_at("go to cabinet 1", "go to sinkbasin 1", "open cabinet 2", "examine cabinet 2")
    assert prompt("Find", memory, closed).split("\n") == [
        "Find",
        "see",
        "left nothing sinkbasinA cabinetB cabinetA",
        "carry nothing nothing",
        "clean cup cabinetA",
        "here cabinetB closed",
    ]
    memory += [Acted(closed, "fly", (None,), 0.0), Acted(closed, "open", ("open cabinet 2",), 0.0)]
    opened = seen_at("close cabinet 2", "take plate 1 from cabinet 2", "take cup 1 from cabinet 2")
    opened = seen_at(*opened.actions, "take cup 2 from cabinet 2", "go to sinkbasin 1", "go to cabinet 1")
    things, left = ["cup", "cup", "plate"], ["cabinetA", "sinkbasinA"]
    known = Sight("clean", "cup", "cabinetA", "", False, "cabinetB", False, things, left)
    assert sight(memory, opened) == known
    assert searched(known) == "take cup"
    assert prompt("Find", memory, opened).endswith("here cabinetB found")
    assert act("take cup", opened) == "take cup 1 from cabinet 2"
    memory += [Acted(opened, "take cup", ("take cup 1 from cabinet 2",), 0.0)]
    carrying = seen_at("close cabinet 2", "move cup 1 to cabinet 2", "go to sinkbasin 1", "go to cabinet 1")
    assert searched(sight(memory, carrying)) == "go sinkbasinA"
    memory += [Acted(carrying, "go sinkbasinA", ("go to sinkbasin 1",), 0.0)]
    basin = seen_at("clean cup 1 with sinkbasin 1", "move cup 1 to sinkbasin 1", "go to cabinet 1")
    assert [act(said, basin) for said in ("clean", "put", "go cabinetA", "open", "cup", "")] == [
        "clean cup 1 with sinkbasin 1",
        "move cup 1 to sinkbasin 1",
        "go to cabinet 1",
        None,
        None,
        None,
    ]
    assert searched(sight(memory, basin)) == "clean"
    assert prompt("Find", memory, basin).endswith("here sinkbasinA tool")
    memory += [Acted(basin, "clean", ("clean cup 1 with sinkbasin 1",), 0.0)]
    assert prompt("Find", memory, basin).split("\n")[2:] == [
        "left nothing cabinetA",
        "carry cup clean",
        "clean cup cabinetA",
        "here sinkbasinA nothing",
    ]
    assert searched(sight(memory, basin)) == "go cabinetA"
    memory += [Acted(basin, "go cabinetA", ("go to cabinet 1",), 0.0)]
    target = seen_at("move cup 1 to cabinet 1", "go to cabinet 2", "go to sinkbasin 1")
    assert prompt("Find", memory, target).endswith("here cabinetA target")
    assert searched(sight(memory, target)) == "put"


def test_other_tasks_are_refused() -> None:
    said = Observation("You see.\nYour task is to: put two cup in cabinet.")
    with pytest.raises(ConfigError, match=full_text("this one says: put two cup in cabinet")):
        prompt("Find", (), said)


def test_every_word_is_a_token() -> None:
    tok = tokenizer()
    assert len(tok) == 680
    for row in demonstrations(600, tasks=["place", "clean", "heat", "cool"], others=6):
        for line in [*row["prompt"].split("\n"), row["response"]]:
            tokens = tok(line, add_special_tokens=False)["input_ids"]
            assert len(tokens) == len(line.split(" ")), line


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_demonstrations_are_as_right_as_asked(share: float) -> None:
    """Where something is closed and nothing is carried, the searcher opens it; at random that is rare."""
    rows = demonstrations(3000, seed=3, right_share=share)
    closed = [row for row in rows if row["prompt"].endswith(" closed") and "\ncarry nothing" in row["prompt"]]
    opened = sum(row["response"] == "open" for row in closed) / len(closed)
    assert opened == 1 if share == 1 else share < opened < share + 0.1
    assert rows == demonstrations(3000, seed=3, right_share=share)
    assert rows[:50] != demonstrations(50, seed=4, right_share=share)


@pytest.mark.parametrize("wrong", [{"right_share": 1.5}, {"size": 0}, {"seed": -1}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"need .*{next(iter(wrong))}"):
        demonstrations(**wrong)  # type: ignore[arg-type]


def test_the_recipe_passes_the_second_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "alfworld"]) == 0, capsys.readouterr().err


def test_the_searcher_needs_nothing_that_a_prompt_does_not_say() -> None:
    """It does most held-out rooms of the recipe in the 16 steps that the recipe gives."""
    done = 0
    for number in range(60):
        walk = Walk(made_room(2 * number + 1, ["place", "clean"], 2))
        memory, said = list[Acted](), None
        while len(memory) < 16 and said != "put":
            said = searched(sight(memory, walk.seen))
            if said is None:
                break
            action = act(said, walk.seen)
            memory.append(Acted(walk.seen, said, (action,), 0.0))
            walk.do(str(action))
        done += said == "put"
    assert done == 50
