"""Two configurations side by side: the flat form, which keys differ, and which of them may."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rondo.config.printing import changes, differing, leaves_of
from rondo.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    FileSourceConfig,
    FunctionConfig,
    KlConfig,
)

CONFIG = Config(
    data=DataConfig(train=(FileSourceConfig(type="jsonl", path="a"),), batch_size=4),
    algorithm=AlgorithmConfig(advantage=FunctionConfig("gae", {"lam": 0.9})),
)


def with_data(**changed: Any) -> Config:
    return dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, **changed))


def test_every_leaf_has_the_key_of_a_recipe() -> None:
    leaves = leaves_of(CONFIG, only=("data.train", "data.batch_size", "data.eval", "algorithm.advantage"))
    source = {key: value for key, value in leaves.items() if key.startswith("data.train.0.")}
    assert source["data.train.0.path"] == "a"
    assert source["data.train.0.prompt_key"] == "prompt"
    assert {key: value for key, value in leaves.items() if key not in source} == {
        "data.eval": [],
        "data.batch_size": 4,
        "algorithm.advantage.name": "gae",
        "algorithm.advantage.lam": 0.9,  # an option stands beside the name
    }


def test_keys_to_leave_out_are_leaves_or_sections_but_no_mere_beginnings() -> None:
    everything = leaves_of(CONFIG)
    assert set(everything) - set(leaves_of(CONFIG, free=("data", "trainer.seed"))) == {
        *(key for key in everything if key.startswith("data.")),
        "trainer.seed",
    }
    assert leaves_of(CONFIG, free=("dat", "data.batch", "data.batch_size.x")) == everything


def test_keys_that_differ() -> None:
    old, new = leaves_of(CONFIG), leaves_of(with_data(batch_size=8, shuffle=False))
    assert differing(old, old) == []
    assert set(differing(old, new)) == {"data.batch_size", "data.shuffle"}
    assert differing(old, new, free=("data.shuffle",)) == ["data.batch_size"]
    assert differing(old, new, free=("data",)) == []
    more = leaves_of(with_data(train=(*CONFIG.data.train, FileSourceConfig(type="jsonl", path="b"))))
    assert "data.train.1.path" in differing(old, more)


def test_a_section_that_came_or_went_is_one_difference() -> None:
    kl = dataclasses.replace(CONFIG.algorithm, kl=KlConfig("k3", "loss", 0.1))
    old, new = leaves_of(CONFIG), leaves_of(dataclasses.replace(CONFIG, algorithm=kl))
    assert differing(old, new) == differing(new, old) == ["algorithm.kl"]
    assert differing(leaves_of(CONFIG), leaves_of(with_data(eval=CONFIG.data.train))) == ["data.eval"]
    assert differing({"a": None}, {}) == differing({}, {"a": None}) == []
    assert differing({"a": 0}, {"a": None}) == ["a"]


def test_changes_are_lines_with_both_values() -> None:
    old = {"a": 1, "b": "x", "c": None, "d": 0.5}
    new = {"a": 1, "b": "y", "c.name": "k3", "c.coef": 0.1, "e": [True]}
    assert changes(old, new, "in the journal", free=("d",)) == [
        'b: "x" in the journal, "y" now',
        'c: null in the journal, {"name": "k3", "coef": 0.1} now',
        "e: not set in the journal, [true] now",
    ]


def test_a_path_that_an_older_rondo_kept_with_a_tilde_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert changes({"model.path": "~/m"}, {"model.path": "/home/somebody/m"}, "before") == []
    assert changes({"model.path": "~/m"}, {"model.path": "/m"}, "before") == [
        'model.path: "/home/somebody/m" before, "/m" now'
    ]
