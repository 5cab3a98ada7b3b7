"""Arguments of another type than they have: each is named before anything starts, and nothing is left."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rondo
from rondo.api import run as run_module
from rondo.core.errors import ConfigError, DataError
from tests.api.test_training import ROWS, SETTINGS, even

# By annotation, values that are none of it. `Any` is looked at by what reads it, below.
WRONG: dict[str, tuple[Any, ...]] = {
    "Recipes": (5, None, [5], {"a": 1}, b"quickstart", ["quickstart", 5]),
    "str | Path": (5, None, b"x", ["x"], object()),
    "str | Path | None": (5, b"x", ["x"], {"a": 1}, True, object()),
    "str | None": (5, b"x", ["x"], True),
    "str": (5, None, b"x", ["x"]),
    "str | Iterable[str]": (5, None, [5], ["x", None]),
    "int | None": ("5", [5], 1.5, True, {"a": 1}, object()),
    "int": ("5", None, [5], 1.5, True),
    "bool": (1, None, "yes"),
    "Mapping[str, Any]": ([1], 5, None, "a", {1}),
    "OnStep | None": (5, "x", [1]),
    "OnEvaluation | None": (5, "x", [1]),
    "OnCheckpoint | None": (5, "x", [1]),
    "Any": (),
}
REQUIRED: dict[str, dict[str, Any]] = {
    "generate": {"model": "model", "prompts": "x"},
    "evaluate": {"model": "model"},
    "load": {"path": "run"},
    "Run": {"path": "run"},
    "Run.generate": {"prompts": "x"},
    "Run.export": {"path": "out"},
    "Run.push_to_hub": {"name": "owner/name"},
}
SUPERVISED = ("sft", "preference", "reward_model")
# Of those that take options by name, for the function that these are handed to.
OPTIONS = {
    "generate": {"n": "x", "max_tokens": 1.5, "temperature": "hot", "chat_template_options": 5, "en": "x"},
    "Run.generate": {"n": "x", "seed": None},
    "Run.show": {"step": "x", "number": 1.5, "order": "sideways", "steps": 1},
    "Run.serve": {"port": "x", "host": 5},
}


def offered(run: rondo.Run) -> Iterator[tuple[str, Callable[..., Any], dict[str, inspect.Parameter]]]:
    """Yields name, function and parameters of all that `rondo` offers, but `Server`, which `serve` makes."""
    for name in sorted({*rondo.__all__} - {"Server"}):
        function = getattr(rondo, name)
        parameters = dict(inspect.signature(function).parameters)
        if name in SUPERVISED:  # which hand all of theirs on
            handed = inspect.signature(run_module._trained).parameters
            parameters |= {key: one for key, one in handed.items() if key not in ("name", "recipe", "given")}
        yield name, function, parameters
    for name, method in inspect.getmembers(rondo.Run, inspect.isfunction):
        if not name.startswith("_"):
            parameters = dict(inspect.signature(method).parameters)
            del parameters["self"]
            yield f"Run.{name}", getattr(run, name), parameters


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rondo.Run:
    """The folder of a run with an export, where the working directory is."""
    monkeypatch.chdir(tmp_path)
    for file, text in {
        "config.yaml": "",
        "recipe.yaml": "# rondo train x",
        "export/config.json": "{}",
    }.items():
        (Path("run") / file).parent.mkdir(parents=True, exist_ok=True)
        (Path("run") / file).write_text(text)
    return rondo.Run("run")


def test_every_argument_of_every_function_is_named(run: rondo.Run) -> None:
    before, tried = sorted(Path().rglob("*")), 0
    for name, function, parameters in offered(run):
        for parameter in parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            for wrong in WRONG[parameter.annotation]:
                arguments = {**REQUIRED.get(name, {}), parameter.name: wrong}
                first = [arguments.pop(parameter.name)] if parameter.kind is parameter.POSITIONAL_ONLY else []
                with pytest.raises(ConfigError, match=rf"^{parameter.name}(\[\d\])? must be "):
                    function(*first, **arguments)
                tried += 1
    assert tried == 313
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(("name", "option"), [(name, one) for name in OPTIONS for one in OPTIONS[name]])
def test_options_that_are_handed_on_are_looked_at_too(name: str, option: str, run: rondo.Run) -> None:
    functions = {known: function for known, function, _ in offered(run)}
    with pytest.raises(ConfigError, match=option):
        functions[name](**REQUIRED.get(name, {}), **{option: OPTIONS[name][option]})


LOOP: dict[str, Any] = {"prompt": "a"}
LOOP |= {"one": LOOP, "two": [LOOP]}
# Arguments of `rondo.train`, and how the error begins.
GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"data": 5}, "data: int is no rows"),
    ({"data": {1, 2}}, "data: set is no rows in an order"),
    ({"data": {"prompt": "a"}}, "data: dict is no rows"),
    ({"data": even}, "data: function is no rows"),
    ({"data": [5]}, "data, row 0: a row is a mapping"),
    ({"data": [ROWS[0], LOOP]}, "data, row 1: is nested more than 100 deep, or holds itself"),
    ({"eval_data": [5]}, "eval_data, row 0: a row is a mapping"),
    ({"eval_data": object()}, "eval_data: object is no rows"),
    ({"data": ROWS, "size": 0}, "size must be 1 row or more, got 0"),
    ({"size": 3}, "size=3 is for rows in memory"),
    ({"data": "rows.jsonl", "size": 3}, "size=3 is for rows in memory"),
    ({"reward": 5}, "setting reward.functions="),
    ({"reward": [even, 5]}, "setting reward.functions="),
    ({"algorithm": 5}, "setting algorithm=5"),
    ({"sampler": 5}, "setting data.sampler="),
    ({"config": {5: 1}}, "setting 5=1: 5 is no key"),
    ({"config": {"rollout": LOOP}}, "setting rollout="),
    ({"config": {"algorithm.terms": [LOOP]}}, "setting algorithm.terms="),
    ({"rollout": np.zeros(3)}, "setting rollout="),
]


@pytest.mark.parametrize(("given", "said"), GIVEN, ids=[str(i) for i in range(len(GIVEN))])
def test_what_may_be_of_several_kinds_is_named_where_it_is_none(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"data": ROWS, "reward": even, "steps": 1, **given}
    arguments["config"] = {**SETTINGS, **given.get("config", {})}
    if given == {"size": 3}:
        del arguments["data"]
    with pytest.raises((ConfigError, DataError)) as caught:
        rondo.train(**arguments)
    assert str(caught.value).startswith(said)
    assert list(Path().rglob("*")) == []
