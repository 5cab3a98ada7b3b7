"""The made shop: WebShop's actions, and its reward in numbers."""

from __future__ import annotations

import dataclasses

import pytest

from rondo.core.errors import ConfigError
from rondo_worlds.catalogue import CATEGORIES, Goal, Product, catalogue_of, purchase_reward, type_reward
from rondo_worlds.shop import Shop

HOODIE = Product(
    "B1",
    "Adler",
    "clothing",
    "hoodie",
    ("slim fit", "long sleeve", "loose fit", "machine washable"),
    {"color": ("red", "blue"), "size": ("small", "large")},
    2000,
)
GOAL = Goal(HOODIE, ("long sleeve", "slim fit"), (("color", "red"), ("size", "small")), 2500)
RIGHT = {"color": "red", "size": "small"}


class TestReward:
    """Of 5: two attributes, two options and the price."""

    def test_all_that_was_wanted(self) -> None:
        assert purchase_reward(GOAL, HOODIE, RIGHT) == 1

    @pytest.mark.parametrize(
        ("changes", "options", "points"),
        [
            ({}, {"color": "blue", "size": "small"}, 4),
            ({}, {}, 3),
            ({}, {"color": "small", "size": "red"}, 3),
            ({"attributes": ("slim fit", "loose fit")}, RIGHT, 4),
            ({"price": 2500}, RIGHT, 5),
            ({"price": 2501}, RIGHT, 4),
            ({"price": 9900, "attributes": ()}, {}, 0),
        ],
    )
    def test_what_is_missing_costs_its_share(
        self, changes: dict[str, object], options: dict[str, str], points: int
    ) -> None:
        bought = dataclasses.replace(HOODIE, **changes)  # type: ignore[arg-type]
        assert purchase_reward(GOAL, bought, options) == points / 5

    def test_a_thing_of_another_type_is_worth_nothing(self) -> None:
        shirt = dataclasses.replace(HOODIE, kind="t shirt")
        assert purchase_reward(GOAL, shirt, RIGHT) == 0
        wanted = dataclasses.replace(GOAL, product=dataclasses.replace(HOODIE, kind="rain jacket"))
        bought = dataclasses.replace(HOODIE, kind="winter jacket")
        assert purchase_reward(wanted, bought, RIGHT) == 1  # it has half of the nouns

    @pytest.mark.parametrize(
        ("text_match", "same_kind", "same_category", "worth"),
        [
            (0.0, True, True, 0.0),
            (0.09, True, True, 0.1),
            (0.1, False, False, 0.5),
            (0.2, False, False, 0.5),
            (0.2, True, False, 1.0),
            (0.2, False, True, 1.0),
            (0.21, False, False, 1.0),
        ],
    )
    def test_type(self, text_match: float, same_kind: bool, same_category: bool, worth: float) -> None:
        assert type_reward(text_match, same_kind, same_category) == worth


def test_every_goal_can_be_reached() -> None:
    """By the shop's own plan, of which each action is one that is listed; on pages of three, too."""
    pages = set()
    for options in ({}, {"page": 3, "products": 1000}, {"products": 10, "catalogue": 7}):
        world = Shop(**options)
        for seed in range(60):
            seen = world.reset(seed)
            plan = world.plan()
            pages.add(sum(action == "click[Next >]" for action in plan))
            for action in plan[:-1]:
                assert not seen.actions or action in seen.actions
                result = world.step(action)
                assert (result.reward, result.done, result.invalid) == (0.0, False, False)
                seen = result.observation
            last = world.step(plan[-1])
            assert (last.reward, last.done, last.success) == (1.0, True, True)
    assert {0, 1} <= pages


def test_pages_and_clicks() -> None:
    world = Shop(products=1000, page=20)
    seen = world.reset(0)
    assert seen.actions == ()
    assert seen.text.splitlines()[0] == f"Instruction: {world.goal.instruction}"
    for nonsense in ("click[Buy Now]", "search[]", "search[!?]", "hoodie"):
        result = world.step(nonsense)
        assert (result.invalid, result.observation) == (True, seen)
    first = world.step(f"search[{world.goal.product.category}]").observation
    assert first.actions[:2] == ("click[Back to Search]", "click[Next >]")
    assert len(first.actions) == 22
    assert first.text.splitlines()[1] == "Page 1 (Total results: 50)"
    second = world.step("click[Next >]").observation
    assert second.actions[:3] == ("click[Back to Search]", "click[< Prev]", "click[Next >]")
    third = world.step("click[Next >]").observation
    assert third.actions[:2] == ("click[Back to Search]", "click[< Prev]")
    assert len(third.actions) == 12
    assert not set(first.actions[2:]) & set(second.actions[3:])
    assert world.step("click[< Prev]").observation == second
    item = world.step(second.actions[4]).observation
    assert {"click[Description]", "click[Features]", "click[Buy Now]"} <= set(item.actions)
    features = world.step("click[Features]").observation
    assert features.actions == ("click[Back to Search]", "click[< Prev]")
    assert len(features.text.splitlines()) == 6  # instruction, title, four attributes
    assert world.step("click[< Prev]").observation == item
    value = item.actions[2]
    assert f"(chosen: {value[6:-1]})" in world.step(value).observation.text
    assert world.step("click[< Prev]").observation == second
    assert world.state()["chosen"] == {}
    assert world.step("click[Back to Search]").observation == seen
    assert world.step("search[zzz]").observation.text.splitlines()[1] == "Page 1 (Total results: 0)"


def test_the_search_puts_first_what_has_more_and_rarer_words() -> None:
    catalogue = catalogue_of(0, 300)
    for product in catalogue.products[::20]:
        found = catalogue.search(" ".join(product.words))
        assert found[0].words == product.words
        kind = catalogue.search(product.kind)
        assert kind[0].kind == product.kind
    assert catalogue.search("nothing like that") == []


def test_held_out_goals_are_no_training_goals() -> None:
    """Nor do they differ in the price alone."""
    world = Shop(products=10)
    goals: dict[int, set[object]] = {0: set(), 1: set()}
    for seed in range(400):
        world.reset(seed)
        goals[seed % 2].add((world.goal.product.kind, world.goal.attributes, world.goal.options))
    assert min(len(half) for half in goals.values()) > 20
    assert not goals[0] & goals[1]


def test_values_of_options_say_which_option_they_are_of() -> None:
    for category in CATEGORIES.values():
        values = [value for values in category.options.values() for value in values]
        assert len(set(values)) == len(values)


def test_a_task_has_its_own_number_of_products() -> None:
    world = Shop(products=20)
    world.reset(0, {"products": 500})
    world.step(f"search[{world.goal.product.category}]")
    assert len(world.state()["results"]) == 50
    with pytest.raises(ConfigError, match="shop: needs 10 to"):
        Shop(products=5)
