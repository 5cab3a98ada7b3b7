"""docs/algorithms.md and docs/recipes.md list what there is, with its defaults, and tests that exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rondo.algorithms.registry import Kind, bind_preparation, lookup, names
from rondo.config.schema import FunctionConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
TABLES = {
    "advantage": "Advantage estimators",
    "policy_loss": "Policy losses",
    "value_loss": "Value loss",
    "kl": "KL",
    "aggregation": "Aggregation",
    "filter": "Filters: which prompts are trained on",
    "select": "Selection: which of a step's answers are trained on",
    "resample": "Resampling: how often a sample is trained on",
    "pair_loss": "Pair losses",
    "term": "Terms",
    "coefficient": "Numbers that adapt",
}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def described(kind: Kind, name: str) -> dict[str, str]:
    """Options and defaults as the page has them: in the function's row, or after its name in bold."""
    text = section(TABLES[kind])
    row = next(
        line for line in text.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]
    )
    if row.split("|")[3].strip() == "see below":
        after = re.split(rf"\*\*`{name}`\*\*(?: options)?:", text)[1]
        row = re.split(r"[.;]\s", after)[0]
    else:
        row = row.split("|", 3)[3]
    return dict(re.findall(r"`(\w+)` ([\w./+-]*\w)", " ".join(row.split())))


def options(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_name_is_in_its_table(kind: Kind) -> None:
    rows = [line for line in section(TABLES[kind]).splitlines() if line.startswith("|")]
    first = "".join(line.split("|")[1] for line in rows)
    assert not [name for name in names(kind) if f"`{name}`" not in first]


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in get_args(Kind) for n in names(k) if k != "kl"])
def test_options_and_defaults_are_on_the_page(kind: Kind, name: str) -> None:
    expected = options(lookup(kind, name))
    prepare = bind_preparation(FunctionConfig(name)) if kind == "policy_loss" else None
    if prepare is not None:
        expected |= options(prepare)
    found = described(kind, name)
    assert not set(expected) - set(found)
    assert not expected or not set(found) - set(expected)
    for option, default in expected.items():
        if default is inspect.Parameter.empty:
            assert found[option] == "required"
        elif isinstance(default, float):
            assert float(found[option]) == default
        else:
            assert yaml.safe_load(found[option]) == default


def test_tests_named_on_the_page_exist() -> None:
    folders = ("algorithms", "trainers")
    code = "".join(
        p.read_text(encoding="utf-8") for f in folders for p in (ROOT / "tests" / f).glob("test_*.py")
    )
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert named
    assert not [name for name in named if f"def {name}(" not in code]


def test_every_recipe_is_in_the_table() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    recipes = [p.stem for p in (ROOT / "src" / "rondo" / "recipes").glob("*.yaml")]
    others = ("quickstart", "reasoning_gym", "calculator", "visual_", "figures_", "compare_")
    of_algorithms = [name for name in recipes if not name.startswith(others)]
    assert not [name for name in of_algorithms if f"| `{name}` |" not in page]
