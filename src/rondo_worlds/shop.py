"""A made shop with the actions and the reward of WebShop (2207.01206): search, look, choose options, buy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rondo.core.errors import ConfigError
from rondo.environments.protocol import Observation, StepResult
from rondo_worlds.catalogue import Goal, Product, catalogue_of, draw_goal, purchase_reward, words_of
from rondo_worlds.levels import level_of

_SEARCH = re.compile(r"search\[(.*)\]", re.DOTALL)
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
DETAILS = ("Description", "Features")


class Shop:
    """A shop of `products` products, which follow from `catalogue`, with `page` results on a page. What is to
    be bought follows from the seed.

    On the first page one searches: `search[what to look for]`. All other actions are clicks, and listed.
    Buying ends the episode with WebShop's reward, which is 1 where type, attributes, options and price are
    as wanted.
    """

    instructions = (
        "Buy what the instruction asks for. To search, answer <action>search[what you look for]</action>; to "
        "click on something, such as <action>click[Buy Now]</action>. Choose the options before you buy."
    )

    def __init__(self, *, products: int = 200, page: int = 10, catalogue: int = 0) -> None:
        if not 10 <= products <= 100_000 or not 1 <= page <= 50:
            raise ConfigError(
                f"shop: needs 10 to 100000 products and 1 to 50 on a page, got {products} and {page}"
            )
        self._count = products
        self._page = page
        self._seed = catalogue

    @classmethod
    def check(cls, **options: Any) -> None:
        """Raises ConfigError for options that it cannot have."""
        cls(**options)

    def reset(self, seed: int, task: Any = None) -> Observation:
        """Opens the shop for a customer. task: `{products: 1000}`, where it is to have more or fewer."""
        count = int((task or {}).get("products", self._count))
        self._catalogue = catalogue_of(self._seed, count)
        name = f"shop {self._seed} {count}"
        self.goal: Goal = level_of(name, seed, lambda rng: draw_goal(rng, self._catalogue.products), _wanted)
        self._leave()
        return self._observe()

    def _leave(self) -> None:
        """Goes back to the search."""
        self._found: list[Product] | None = None
        self._at = 0  # page of results
        self._product: Product | None = None
        self._detail = ""
        self._chosen: dict[str, str] = {}

    def step(self, action: str) -> StepResult:
        """Searches or clicks."""
        if self._found is None:
            asked = _SEARCH.fullmatch(action.strip())
            if asked is None or not words_of(asked[1]):
                return StepResult(self._observe(), invalid=True)
            self._found = self._catalogue.search(asked[1])
            return StepResult(self._observe())
        clicked = action.removeprefix("click[").removesuffix("]")
        if clicked == BUY:
            assert self._product is not None
            reward = purchase_reward(self.goal, self._product, self._chosen)
            bought = Observation(f"You bought {self._product.title}.")
            return StepResult(bought, reward, done=True, success=reward == 1)
        self._click(clicked)
        return StepResult(self._observe())

    def _click(self, what: str) -> None:
        assert self._found is not None
        if what == BACK:
            self._leave()
        elif self._product is None and what in (PREVIOUS, NEXT):
            self._at += 1 if what == NEXT else -1
        elif self._product is None:
            self._product = next(product for product in self._found if product.number == what)
        elif what == PREVIOUS and self._detail:
            self._detail = ""
        elif what == PREVIOUS:
            self._product, self._chosen = None, {}
        elif what in DETAILS:
            self._detail = what
        else:
            name = next(name for name, values in self._product.options.items() if what in values)
            self._chosen[name] = what

    def _observe(self) -> Observation:
        head = f"Instruction: {self.goal.instruction}"
        if self._found is None:
            return Observation(f"{head}\nSearch: search[…]")
        if self._product is None:
            lines, clicks = self._results(self._found)
        elif self._detail:
            lines, clicks = self._details(self._product), []
        else:
            lines, clicks = self._item(self._product)
        if self._product is not None or self._at:
            clicks = [PREVIOUS, *clicks]
        return Observation("\n".join([head, *lines]), tuple(f"click[{one}]" for one in [BACK, *clicks]))

    def _results(self, found: list[Product]) -> tuple[list[str], list[str]]:
        shown = found[self._at * self._page : (self._at + 1) * self._page]
        lines = [f"Page {self._at + 1} (Total results: {len(found)})"]
        lines += [f"[{one.number}] {one.title}, {_dollars(one.price)}" for one in shown]
        more = [NEXT] if (self._at + 1) * self._page < len(found) else []
        return lines, [*more, *(product.number for product in shown)]

    def _item(self, product: Product) -> tuple[list[str], list[str]]:
        lines = [product.title, f"Price: {_dollars(product.price)}"]
        clicks: list[str] = []
        for name, values in product.options.items():
            chosen = f" (chosen: {self._chosen[name]})" if name in self._chosen else ""
            lines.append(f"{name}: {', '.join(values)}{chosen}")
            clicks += values
        return lines, [*clicks, *DETAILS, BUY]

    def _details(self, product: Product) -> list[str]:
        if self._detail == DETAILS[0]:
            return [product.title, f"A {product.kind} by {product.brand}. Category: {product.category}."]
        return [product.title, *(f"- {attribute}" for attribute in product.attributes)]

    def plan(self) -> list[str]:
        """Returns actions that buy what is wanted, from the first page on."""
        wanted = self.goal.product
        place = self._catalogue.search(self.goal.query).index(wanted)
        clicks = [NEXT] * (place // self._page)
        clicks += [wanted.number, *(value for _, value in self.goal.options), BUY]
        return [f"search[{self.goal.query}]", *(f"click[{one}]" for one in clicks)]

    def state(self) -> Mapping[str, Any]:
        """Returns what is wanted, and where the customer is."""
        return {
            "goal": self.goal.instruction,
            "wanted": self.goal.product.number,
            "results": None if self._found is None else [product.number for product in self._found],
            "page": self._at,
            "product": None if self._product is None else self._product.number,
            "detail": self._detail,
            "chosen": dict(self._chosen),
        }

    def close(self) -> None:
        """Has nothing to end."""


def _dollars(cents: int) -> str:
    return f"${cents / 100:.2f}"


def _wanted(goal: Goal) -> object:
    """Returns a goal without its price, so that no two goals of the two halves differ only in price."""
    return goal.product.kind, goal.attributes, goal.options
