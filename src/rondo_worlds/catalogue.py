"""The shop's catalogue, its search, customers' goals, and what a purchase is worth (WebShop, 2207.01206)."""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

MOST_RESULTS = 50
_COLORS = ("black", "blue", "green", "grey", "pink", "red", "white", "yellow")
_SIZES = ("small", "medium", "large", "x-large")
_BRANDS = ("Adler", "Brixo", "Calda", "Dunmore", "Elvi", "Fenwick", "Gorlo", "Hanbury", "Ixo", "Jovan")
_DOLLARS = (5, 80)


@dataclass(frozen=True)
class Category:
    """Kinds of things that have attributes and options in common."""

    kinds: tuple[str, ...]
    """What its products are, such as `desk lamp`; each is one of them."""
    attributes: tuple[str, ...]
    """A product has four of them."""
    options: Mapping[str, tuple[str, ...]]
    """By name the values of which each product offers two or more."""


CATEGORIES: Mapping[str, Category] = {
    "clothing": Category(
        ("hoodie", "t shirt", "rain jacket", "running shorts", "winter jacket"),
        ("machine washable", "slim fit", "loose fit", "quick drying", "long sleeve", "water repellent"),
        {"color": _COLORS, "size": _SIZES},
    ),
    "electronics": Category(
        ("wireless earbuds", "phone case", "portable speaker", "desk lamp", "wireless charger"),
        (
            "fast charging",
            "noise cancelling",
            "water resistant",
            "long lasting",
            "hands free",
            "easy to carry",
        ),
        {"color": _COLORS, "pack": ("1 pack", "2 pack", "3 pack")},
    ),
    "home": Category(
        ("throw pillow", "area rug", "shower curtain", "storage basket", "floor lamp"),
        ("easy to clean", "hand woven", "fade resistant", "non slip", "super soft", "space saving"),
        {"color": _COLORS, "width": ("40 cm", "60 cm", "90 cm")},
    ),
    "beauty": Category(
        ("face cream", "shampoo bar", "lip balm", "body lotion", "hand cream"),
        ("cruelty free", "paraben free", "fragrance free", "long wearing", "for dry skin", "plant based"),
        {"scent": ("citrus", "lavender", "mint", "rose"), "volume": ("50 ml", "100 ml", "200 ml")},
    ),
    "food": Category(
        ("green tea", "granola bar", "trail mix", "dark chocolate", "black tea"),
        ("gluten free", "non gmo", "sugar free", "low sodium", "fair trade", "kosher certified"),
        {"flavor": ("almond", "cherry", "ginger", "vanilla"), "box": ("box of 6", "box of 12", "box of 24")},
    ),
}


@dataclass(frozen=True)
class Product:
    """What can be bought."""

    number: str
    """B and seven hexadecimal digits, unique in a catalogue."""
    brand: str
    """One of _BRANDS; nobody asks for it."""
    category: str
    """A key of CATEGORIES."""
    kind: str
    """One of its category's."""
    attributes: tuple[str, ...]
    """Only the first two are in the title."""
    options: Mapping[str, tuple[str, ...]]
    """By name the values to choose from, two or more."""
    price: int
    """In cents."""

    @property
    def title(self) -> str:
        return f"{self.brand} {self.kind}, {', '.join(self.attributes[:2])}"

    @property
    def words(self) -> list[str]:
        """The words by which the search finds the product."""
        values = [value for values in self.options.values() for value in values]
        return words_of(" ".join([self.brand, self.kind, self.category, *self.attributes, *values]))


@dataclass(frozen=True)
class Goal:
    """What a customer wants: a product like `product`."""

    product: Product
    """Its kind and category are wanted, and it fits all the rest."""
    attributes: tuple[str, ...]
    """Two of the product's, sorted."""
    options: tuple[tuple[str, str], ...]
    """(name, value) of each option of the product."""
    price: int
    """The most that it may cost, in cents."""

    @property
    def instruction(self) -> str:
        options = ", ".join(f"{name}: {value}" for name, value in self.options)
        return (
            f"Find a {self.product.kind}, {' and '.join(self.attributes)}, with {options}, and a price lower "
            f"than {self.price / 100:.2f} dollars."
        )

    @property
    def query(self) -> str:
        """A query that finds the product."""
        return " ".join([self.product.kind, *self.attributes, *(value for _, value in self.options)])


class Catalogue:
    """All products of a shop, and the search for them: BM25 with k1 = 1.2 and b = 0.75."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = tuple(products)
        counts = [Counter(product.words) for product in products]
        mean = sum(count.total() for count in counts) / len(counts)
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for place, count in enumerate(counts):
            length = 1.2 * (0.25 + 0.75 * count.total() / mean)
            for word, times in count.items():
                found[word].append((place, 2.2 * times / (times + length)))
        self._scores: dict[str, list[tuple[int, float]]] = {}  # of products, by word
        for word, scores in found.items():
            rare = math.log(1 + (len(counts) - len(scores) + 0.5) / (len(scores) + 0.5))
            self._scores[word] = [(place, rare * score) for place, score in scores]

    def search(self, query: str) -> list[Product]:
        """Returns the products that have a word of the query, the best first."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(words_of(query)):
            for place, score in self._scores.get(word, ()):
                scores[place] += score
        best = sorted(scores, key=lambda place: (-scores[place], place))
        return [self.products[place] for place in best[:MOST_RESULTS]]


@lru_cache(maxsize=8)
def catalogue_of(seed: int, count: int) -> Catalogue:
    """Returns the catalogue that follows from the seed."""
    rng = random.Random(f"rondo shop: catalogue {seed}")
    return Catalogue([_product(rng, f"B{number:07X}") for number in rng.sample(range(16**7), count)])


def _product(rng: random.Random, number: str) -> Product:
    name = rng.choice(list(CATEGORIES))
    category = CATEGORIES[name]
    options = {}
    for option, values in category.options.items():
        offered = set(rng.sample(values, rng.randint(2, len(values))))
        options[option] = tuple(value for value in values if value in offered)
    attributes = tuple(rng.sample(category.attributes, 4))
    price = rng.randrange(100 * _DOLLARS[0], 100 * _DOLLARS[1])
    return Product(number, rng.choice(_BRANDS), name, rng.choice(category.kinds), attributes, options, price)


def draw_goal(rng: random.Random, products: Sequence[Product]) -> Goal:
    """Draws a product, two of its attributes, a value of each of its options, and a price that is enough."""
    product = rng.choice(products)
    attributes = tuple(sorted(rng.sample(product.attributes, 2)))
    options = tuple((name, rng.choice(values)) for name, values in product.options.items())
    enough = 100 * (product.price // 100 + rng.choice((1, 5, 10, 20)))
    return Goal(product, attributes, options, enough)


def words_of(text: str) -> list[str]:
    """Returns the words of a text, as the search compares them."""
    return re.findall(r"[a-z0-9]+", text.lower())


def purchase_reward(goal: Goal, product: Product, options: Mapping[str, str]) -> float:
    """Returns what the paper's reward is for a product that was bought with these options:

    r = r_type · (|attributes wanted and had| + |options wanted and chosen| + [price ≤ wanted])
               / (|attributes wanted| + |options wanted| + 1)
    """
    attributes = len(set(goal.attributes) & set(product.attributes))
    chosen = len(set(goal.options) & set(options.items()))
    affordable = product.price <= goal.price
    wanted = len(goal.attributes) + len(goal.options) + 1
    return _type_reward(goal.product, product) * (attributes + chosen + affordable) / wanted


def _type_reward(wanted: Product, bought: Product) -> float:
    nouns = set(words_of(wanted.kind))
    text_match = len(nouns & set(words_of(bought.kind))) / len(nouns)
    return type_reward(text_match, wanted.kind == bought.kind, wanted.category == bought.category)


def type_reward(text_match: float, same_kind: bool, same_category: bool) -> float:
    """Returns r_type. text_match: share of the nouns of the wanted product's title that are in the other's;
    same_kind: both are of one fine-grained query of the paper's.
    """
    if text_match == 0:
        return 0.0
    if text_match < 0.1:
        return 0.1
    return 0.5 if text_match <= 0.2 and not same_kind and not same_category else 1.0
