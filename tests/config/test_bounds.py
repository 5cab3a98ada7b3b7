"""Numbers, names and texts that cannot be: every number of the schema has two bounds, and whatever is written
is read or refused in bounded work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo.config import load
from rondo.config.json_schema import json_schema
from rondo.config.tree import MOST_BYTES, MOST_DIGITS, MOST_LEVELS, MOST_NODES
from rondo.core.errors import ConfigError

BASE = ("model.path=model", "trainer.total_steps=10")
LOWER, UPPER = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}


def numbers(schema: Any, key: str) -> Iterator[tuple[str, set[str]]]:
    """Yields every number that a JSON Schema has, with the names of its bounds."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield key, set(schema) & (LOWER | UPPER)
        for name, part in schema.items():
            yield from numbers(part, f"{key}.{name}")
    elif isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from numbers(part, f"{key}.{index}")


def test_every_number_of_the_schema_has_two_bounds() -> None:
    found = list(numbers(json_schema(), ""))
    assert len(found) > 80
    assert [key for key, bounds in found if not (bounds & LOWER and bounds & UPPER)] == []


def problem(*arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load([], [*BASE, *arguments])
    return caught.value


@pytest.mark.parametrize(
    ("argument", "bound"),
    [
        ("rollout.n=1000000000", "65536"),
        ("rollout.n=1e300", "65536"),
        ("data.batch_size=1000000000", "1048576"),
        ("rollout.max_concurrent=1000000000", "65536"),
        ("data.max_prompt_tokens=4294967296", "2147483648"),
        ("trainer.seed=1180591620717411303424", "9223372036854775808"),
        ("trainer.seed=-9223372036854775809", "-9223372036854775808"),
        ("actor.optimizer.lr=.inf", "100"),
        ("actor.optimizer.grad_clip=.inf", "1000000000000"),
        ("rollout.deadline_seconds=1e10", "100000000"),
        ("algorithm.constraint={cost: c, limit: -.inf}", "-1000000000000"),
        ("cluster.pools={all: 100000}", "65536"),
        ("data.train=[{type: reasoning_gym, task: t, size: 1000000000}]", "100000000"),
    ],
)
def test_the_error_says_key_value_and_bound(argument: str, bound: str) -> None:
    error = problem(argument)
    assert error.key is not None
    assert error.key.startswith(argument.partition("=")[0])
    assert f" {bound}, got " in str(error)


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_the_bound_itself_is_taken(seed: int) -> None:
    assert load([], [*BASE, f"trainer.seed={seed}"]).config.trainer.seed == seed


@pytest.mark.parametrize(
    ("argument", "key", "said"),
    [
        (f"rollout.n={'9' * 5000}", "rollout.n", "integer of 5000 digits"),
        (f"reward.functions=[{{name: f, x: {'9' * 101}}}]", "reward.functions.0.x", f"{MOST_DIGITS}"),
        ("reward.functions=[{name: f, x: .nan}]", "reward.functions.0.x", ".nan"),
        (f"rollout.stop={'[' * 5000}", "rollout.stop", f"{MOST_LEVELS} deep"),
        (f"model.config={'{a: ' * 5000}", "model.config", f"{MOST_LEVELS} deep"),
        ("rollout.stop=&s [*s]", "rollout.stop.0", "holds itself"),
        ("model.config=&m {a: {b: *m}}", "model.config.a.b", "holds itself"),
        (f"rollout.stop=[{'a,' * MOST_NODES}]", "rollout.stop", f"{MOST_NODES}"),
        ('model.path="\\ud800"', "model.path", "surrogate"),
        ('model.path="a\\0b"', "model.path", "no NUL"),
        (f"trainer.run_dir={'x' * 300}", "trainer.run_dir", "255 bytes"),
        (f"trainer.run_dir={'x/' * 3000}", "trainer.run_dir", "255 bytes"),
        ("~rollout.n", "rollout.n", "rollout.n=null"),
        ("~rollout.n=4", "rollout.n", "rollout.n=null"),
    ],
)
def test_arguments_that_cannot_be(argument: str, key: str, said: str) -> None:
    error = problem(argument)
    assert error.key == key
    assert said in str(error)
    assert len(str(error)) < 1000


def bomb(levels: int = 9, width: int = 9) -> str:
    """Lists of lists by aliases: `width` to the power of `levels` values in a few lines."""
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bomb(), f"{MOST_NODES} keys and values"),
        ("model: &m {config: *m}", "recipe.yaml:1: model.config holds itself"),
        ("rollout:\n  stop: " + "[" * 5000, f"line 2 is nested more than {MOST_LEVELS} deep"),
        (
            "rollout:\n  stop: [" + "a, " * MOST_NODES + "]",
            f"more than {MOST_NODES} keys and values up to line 2",
        ),
        ("a: b\n" * (MOST_BYTES // 5 + 1), f"at most {MOST_BYTES}"),
        (f"rollout:\n  n: {'1' * 5000}", "recipe.yaml:2: rollout.n is an integer of 5000 digits"),
        ('"\\ud800": 1', "recipe.yaml:1: key '\\ud800' is no text"),
    ],
)
def test_recipes_that_cannot_be(in_tmp_path: Path, text: str, said: str) -> None:
    Path("recipe.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(["recipe.yaml"], BASE)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("~nobody-of-this-name/r.yaml", "cannot be read"),
        ("x" * 300 + ".yaml", "cannot be read"),
        ("a\0b.yaml", "does not exist"),
        ("loop.yaml", "does not exist"),
    ],
)
def test_files_that_cannot_be(in_tmp_path: Path, name: str, said: str) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match=f"^configuration file .*{said}"):
        load([name], BASE)
    Path("r.yaml").write_text(f'include: "{name}"'.replace("\0", "\\0"), encoding="utf-8")
    with pytest.raises(ConfigError):
        load(["r.yaml"], BASE)
