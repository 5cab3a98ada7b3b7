"""`include`: a recipe as the difference to another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.config import load
from rondo.config.load import MOST_FILES
from rondo.core.errors import ConfigError
from tests.messages import full_text


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_the_including_file_wins_over_what_it_includes(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="trainer: {total_steps: 3, seed: 1}\nrollout: {n: 4}\n",
        more="trainer: {seed: 2}\n",
        top="include: [base.yaml, more.yaml]\nrollout: {n: 5}\n",
    )
    loaded = load([str(tmp_path / "top.yaml")], ["model.path=x"])
    config = loaded.config
    assert (config.trainer.total_steps, config.trainer.seed, config.rollout.n) == (3, 2, 5)
    assert loaded.origins["trainer.seed"].where == f"{tmp_path}/more.yaml:1"
    assert loaded.origins["rollout.n"].where == f"{tmp_path}/top.yaml:2"


def test_a_missing_include_names_line_and_place(tmp_path: Path) -> None:
    write(tmp_path, top="\ninclude: nowhere.yaml\n")
    with pytest.raises(ConfigError, match=full_text("top.yaml:2: include: no such file")):
        load([str(tmp_path / "top.yaml")])


def test_a_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, a="include: b.yaml\n", b="include: a.yaml\n")
    with pytest.raises(ConfigError, match="includes itself"):
        load([str(tmp_path / "a.yaml")])


def test_a_recipe_includes_so_many_files_and_no_more(tmp_path: Path) -> None:
    """A chain, and a ladder in which each file includes the next one twice: 2^8 - 1 files, or 2^24 - 1."""
    for rungs in (7, 23):
        ladder = {
            f"d{rungs}_{i}": f"include: [d{rungs}_{i + 1}.yaml, d{rungs}_{i + 1}.yaml]" for i in range(rungs)
        }
        write(tmp_path, **ladder, **{f"d{rungs}_{rungs}": "trainer: {total_steps: 3}"})
    chain = {f"c{i}": f"include: c{i + 1}.yaml" for i in range(2000)}
    write(tmp_path, **chain, c2000="trainer: {total_steps: 3}")
    there = (tmp_path / "d7_0.yaml", tmp_path / f"c{2000 - MOST_FILES + 1}.yaml")
    assert [load([str(path)], ["model.path=x"]).config.trainer.total_steps for path in there] == [3, 3]
    for name in ("d23_0", "c0"):
        with pytest.raises(
            ConfigError, match=f"{name}.yaml: includes more than {MOST_FILES} files, of which"
        ):
            load([str(tmp_path / f"{name}.yaml")])
