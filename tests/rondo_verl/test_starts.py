"""Forty of verl's own launches, of those whose keys differ most, make a first update."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rondo.config import LoadedConfig, load
from rondo_verl.programs import program

FILE = Path(__file__).with_name("starts.tsv")


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1], ids=["one half", "the other half"])
def test_forty_of_verls_launches_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: int
) -> None:
    """In one process, with tiny models and made rows. `benchmarks/verl_starts.py --most 40 --write` chose
    them, without the paths of their authors' machines.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("verl_starts")
    here, replaced = benchmark.made(tmp_path), set[str]()
    lines = [line.split("\t") for line in FILE.read_text(encoding="utf-8").splitlines()]
    launches = [{"module": module, "overrides": overrides} for module, *overrides in lines]
    assert len(launches) == 40
    failed = {
        at: why
        for at, one in enumerate(launches, 1)
        if at % 2 == part and (why := benchmark.starts(one, here, replaced))
    }
    assert failed == {}


def test_what_they_are() -> None:
    """Programs, and how many of them see images, have adapters or a reference, and run ahead."""
    lines = [line.split("\t") for line in FILE.read_text(encoding="utf-8").splitlines()]
    loaded: list[LoadedConfig] = [
        load([name] if program(name) is not None else [], overrides) for name, *overrides in lines
    ]
    configs = [one.config for one in loaded]
    assert [one.command for one in loaded].count("sft") == 10
    assert sum("data.train.0.image_key" in one.origins for one in loaded) == 4
    assert sum(one.actor.lora is not None for one in configs) == 3
    assert sum(one.algorithm.kl is not None for one in configs) == 11
    assert sum(bool(one.trainer.max_staleness) for one in configs) == 3
    names = {one.algorithm.advantage.name for one in configs}
    assert names == {"grpo", "gae", "rloo", "reinforce_pp", "otb", "gpg"}
