"""A warm start is made once on a machine for equal settings, rows, tokenizer, model and code."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from rondo.config import load
from rondo.trainers.commands.warm_cache import entry_of, keep
from rondo.trainers.program import settled
from tests.trainers.conftest import RECIPE, SFT_RECIPE, inline, metrics, weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RONDO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warm_starts"


def write(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A recipe that begins with a warm start of two steps."""
    write(tmp_path / "sft.yaml", SFT_RECIPE)
    model = {"tokenizer": "rondo.recipes.quickstart.tokenizer"}
    trainer = {**RECIPE["trainer"], "warm_start": "sft.yaml", "total_steps": 1}
    return write(tmp_path / "warm.yaml", {**RECIPE, "model": model, "trainer": trainer})


@pytest.mark.slow
def test_the_second_run_begins_with_the_first_ones(warm: Path, tmp_path: Path, cache: Path) -> None:
    for name in ("a", "b"):
        inline("train", str(warm), f"trainer.run_dir={tmp_path / name}")
    (entry,) = cache.iterdir()
    assert not (tmp_path / "a" / "warm_start").is_symlink()
    assert (tmp_path / "b" / "warm_start").readlink() == entry
    assert (entry / "export" / "model.safetensors").read_bytes() == weights(tmp_path / "a" / "warm_start")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    # Another reward makes no difference to a warm start; another seed does.
    mine = "reward.functions=['tests/trainers/scorers.py:first_is_even']"
    inline("train", str(warm), f"trainer.run_dir={tmp_path / 'c'}", mine)
    assert (tmp_path / "c" / "warm_start").is_symlink()
    inline("train", str(warm), f"trainer.run_dir={tmp_path / 'd'}", "trainer.seed=1")
    assert not (tmp_path / "d" / "warm_start").is_symlink()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.slow
def test_an_entry_that_was_removed_is_made_again(warm: Path, tmp_path: Path, cache: Path) -> None:
    inline("train", str(warm), f"trainer.run_dir={tmp_path / 'a'}")
    (entry,) = cache.iterdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "warm_start").symlink_to(entry.with_name("gone"))
    inline("train", str(warm), f"trainer.run_dir={tmp_path / 'b'}")
    assert (tmp_path / "b" / "warm_start").readlink() == entry


def test_what_a_warm_start_depends_on(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")

    def entry(*overrides: str, answer: str = "a") -> Path | None:
        rows.write_text(json.dumps({"prompt": "p", "response": answer}) + "\n")
        source = f"data.train=[{{type: jsonl, path: {rows}}}]"
        path = write(tmp_path / "sft.yaml", SFT_RECIPE)
        return entry_of(settled(load([str(path)], [source, *overrides]).config))

    first = entry()
    assert first is not None
    assert first.parent == cache
    assert entry() == first
    assert entry("tracking.samples=5", "checkpoint.every=1") == first
    others = [
        entry(answer="b"),
        entry("trainer.seed=1"),
        entry("trainer.total_steps=3"),
        entry("actor.optimizer.lr=2e-2"),
        entry("model.config.hidden_size=64"),
        entry(f"model.chat_template={template}"),
        entry("cluster.devices=2", "cluster.backend=process"),
    ]
    assert len({first, *others}) == len(others) + 1
    monkeypatch.setenv("RONDO_CACHE", "")
    assert entry() is None


def test_several_runs_may_keep_theirs_at_one_time(tmp_path: Path) -> None:
    made, entry = tmp_path / "made", tmp_path / "cache" / "entry"
    (made / "export").mkdir(parents=True)
    weights = bytes(range(256)) * 4096
    for name in ("export/model.safetensors", "summary.json", "config.yaml", "metrics.jsonl"):
        (made / name).write_bytes(weights)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: keep(made, entry), range(8)))
    assert [path.name for path in entry.parent.iterdir()] == ["entry"]
    assert {path.name for path in entry.iterdir()} == {
        "export",
        "summary.json",
        "config.yaml",
        "metrics.jsonl",
    }
    assert all(path.read_bytes() == weights for path in entry.rglob("*") if path.is_file())
