"""Questions over the made corpus: each can be answered by two searches, and halves share no passage."""

from __future__ import annotations

import pytest

from rondo.core.errors import ConfigError, EnvironmentFailedError
from rondo_search import index_of
from rondo_worlds.search_qa import CORPUS, SearchQA, corpus, questions


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        index_of(CORPUS, anew=True)


@pytest.mark.parametrize("held_out", [False, True])
def test_two_searches_answer_every_question(held_out: bool) -> None:
    """The best passage for each name is its own, says the next one, and the second one has the answer."""
    texts = {row["id"]: row["text"] for row in corpus()}
    index = index_of(CORPUS)
    asked = questions(held_out)
    assert len({one.text for one in asked}) == len(asked) == 504
    for one in asked:
        assert [index.search(name, 1)[0].passage.id for name in one.hops] == list(one.gold)
        assert one.hops[0] in one.text
        assert one.hops[1] in texts[one.gold[0]]
        assert one.answer in texts[one.gold[1]]
        assert one.answer not in one.text + texts[one.gold[0]]


def test_halves_have_no_passage_in_common() -> None:
    gold = [{name for one in questions(held_out) for name in one.gold} for held_out in (False, True)]
    assert not gold[0] & gold[1]
    assert len(gold[0] | gold[1]) == len(corpus()) == 432 + 144


def test_an_episode() -> None:
    world = SearchQA(k=1)
    first = world.reset(5, {"kind": "river"})
    question = next(one for one in questions(True) if first.text == f"Question: {one.text}")
    assert question.kind == "river"
    person, city = question.hops
    read = world.step(f"search[{person}]").observation.text
    assert read == f"{first.text}\n[1] {person} was born in {city}."
    assert world.step("search[?!]").invalid
    assert world.step("look it up").invalid
    result = world.step(f" search[{city}] ")
    assert (result.reward, result.done, result.invalid) == (0.0, False, False)
    assert world.state()["found"] == world.state()["gold"] == list(question.gold)
    result = world.step(f"answer[{question.answer.upper()} ]")
    assert (result.reward, result.done, result.success) == (1.0, True, True)
    world.reset(5, {"kind": "river"})
    result = world.step("answer[the Thames]")
    assert (result.reward, result.done, result.success) == (0.0, True, False)


def test_states_in_which_the_same_was_found_are_the_same() -> None:
    """Whatever the way there, as far as the last result is the same."""
    seen = []
    for searches in (["Oak", "Sava"], ["Sava", "Oak", "Sava"], ["Sava"]):
        world = SearchQA()
        world.reset(0)
        for words in searches:
            last = world.step(f"search[{words}]").observation
        seen.append(last.identity)
    assert seen[0] == seen[1] != seen[2]


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="search_qa: k must be 1 to 100, got 0"):
        SearchQA.check(k=0)
    with pytest.raises(EnvironmentFailedError, match="there is no question of the kind 'age'"):
        SearchQA().reset(0, {"kind": "age"})


def test_the_world_is_the_same_everywhere() -> None:
    rows = corpus()
    assert [rows[0]["text"], rows[-1]["text"]] == [
        "Ben Jung was born in Little Rock.",
        "Little Mill was founded by Quin Stern. Its river is the Isar.",
    ]
