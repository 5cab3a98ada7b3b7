"""The index of a run's rollouts: what a search finds is what a walk over all files finds."""

from __future__ import annotations

import math
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import viewing
from rondo.core.errors import DataError, StorageError
from rondo.tracking.trajectories import ShownTrajectory, files_of, trajectories_of
from rondo_view.index import HEAD, ORDERS, PROMPT, SAID, Index, _tools
from tests.rondo_view.conftest import ROWS, STEPS


def walked(run: Path) -> list[ShownTrajectory]:
    return [
        one for step, file in sorted(files_of(run, "rollouts").items()) for one in trajectories_of(file, step)
    ]


@pytest.fixture(scope="module")
def index(made: Path) -> Index:
    index = Index(made)
    index.read()
    return index


def staleness(one: ShownTrajectory) -> int:
    return one.step - 1 - one.oldest_version


LIKE: dict[str, tuple[dict[str, str], Callable[[ShownTrajectory], bool]]] = {
    "all": ({}, lambda one: True),
    "step": ({"step": "7"}, lambda one: one.step == 7),
    "steps": ({"from": "3", "to": "5"}, lambda one: 3 <= one.step <= 5),
    "reward": ({"least": ".25", "most": ".75"}, lambda one: 0.25 <= one.reward <= 0.75),
    "tokens": ({"shortest": "100", "longest": "500"}, lambda one: 100 <= one.tokens <= 500),
    "staleness": ({"staleness": "1"}, lambda one: staleness(one) >= 1),
    "source": ({"source": "geometry"}, lambda one: one.source == "geometry"),
    "failed": ({"outcome": "failed"}, lambda one: one.outcome == "failed"),
    "cut off": ({"finish": "length"}, lambda one: one.finish_reason == "length"),
    "prompt": ({"prompt": "made/0/301"}, lambda one: one.prompt_id == "made/0/301"),
    "tool": ({"tool": "calculator"}, lambda one: "[tool]" in one.said),
    "text": ({"text": "FOUR and"}, lambda one: "four and" in (one.prompt + one.said[:SAID]).lower()),
    "of the prompt": ({"text": "question 302"}, lambda one: "Question 302" in one.prompt),
    "both": (
        {"text": "answer: 3", "source": "algebra", "least": "0.5"},
        lambda one: "answer: 3" in one.said[:SAID].lower() and one.source == "algebra" and one.reward >= 0.5,
    ),
    "none": ({"text": "nowhere"}, lambda one: False),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_search_finds_what_a_walk_finds(index: Index, made: Path, name: str) -> None:
    filters, is_like = LIKE[name]
    wanted = [one for one in walked(made) if is_like(one)]
    found = index.search(filters, "oldest", 0, 1000)
    assert found["total"] == len(wanted)
    assert [(row["step"], row["id"]) for row in found["rows"]] == [
        (one.step, one.trajectory_id) for one in wanted
    ]
    for name, values in {
        "reward": [one.reward for one in wanted if not math.isnan(one.reward)],
        "tokens": [one.tokens for one in wanted],
        "staleness": [staleness(one) for one in wanted],
    }.items():
        spread = found["spread"][name]
        assert sum(spread["counts"]) == len(values)
        if values:
            assert spread["edges"][0] <= min(values) <= max(values) <= spread["edges"][-1]
    by_step: dict[int, list[str]] = {}
    for one in wanted:
        by_step.setdefault(one.step, []).append(one.trajectory_id)
    assert index.chosen(filters) == by_step


def test_a_row_has_what_its_trajectory_has(index: Index, made: Path) -> None:
    for row, one in zip(index.search({}, "oldest", 0, 1000)["rows"], walked(made), strict=True):
        assert row == {
            "step": one.step, "id": one.trajectory_id, "prompt_id": one.prompt_id, "source": one.source,
            "sample": one.sample_index, "reward": None if one.outcome == "failed" else one.reward,
            "tokens": one.tokens, "contexts": 1, "outcome": one.outcome, "failure": one.failure,
            "finish": one.finish_reason, "staleness": staleness(one), "images": 0,
            "tools": ["calculator"] if "[tool]" in one.said else [],
            "prompt": one.prompt[:HEAD], "said": one.said[:HEAD],
        }  # fmt: skip


def test_pages_in_each_order_are_all_of_it_in_that_order(index: Index, made: Path) -> None:
    place = {(one.step, one.trajectory_id): number for number, one in enumerate(walked(made))}
    keys: dict[str, Callable[[ShownTrajectory], tuple[float, ...]]] = {
        "newest": lambda one: (-one.step,),
        "oldest": lambda one: (one.step,),
        "best": lambda one: (
            one.outcome != "scored",
            0 if math.isnan(one.reward) else -one.reward,
            -one.step,
        ),
        "worst": lambda one: (
            one.outcome != "scored",
            0 if math.isnan(one.reward) else one.reward,
            -one.step,
        ),
        "longest": lambda one: (-one.tokens, -one.step),
        "shortest": lambda one: (one.tokens, -one.step),
    }
    assert keys.keys() == ORDERS.keys()
    for order, key in keys.items():
        pages = [index.search({}, order, first, 50)["rows"] for first in range(0, STEPS * ROWS, 50)]
        found = [(row["step"], row["id"]) for page in pages for row in page]
        wanted = sorted(walked(made), key=lambda one: (*key(one), place[one.step, one.trajectory_id]))
        assert found == [(one.step, one.trajectory_id) for one in wanted], order


def test_what_is_chosen_from_lists(index: Index) -> None:
    state = index.state()
    assert state == {
        "read": STEPS, "steps": STEPS, "wrong": [], "source": ["algebra", "geometry"],
        "outcome": ["failed", "scored"], "finish": ["length", "stop"], "tool": ["calculator"],
    }  # fmt: skip


def test_wrong_filters_are_named(index: Index) -> None:
    with pytest.raises(DataError, match=r"^least=much: must be a number"):
        index.search({"least": "much"}, "newest", 0, 1)
    with pytest.raises(DataError, match=r"^order=random: the orders are newes"):
        index.search({}, "random", 0, 1)


def test_signs_of_patterns_are_signs(tmp_path: Path) -> None:
    texts = ["100% sure", "100 x sure", "a_b", "axb", "a\\b", "it's; DROP TABLE rows --", "ÄRGER"]
    (tmp_path / "rollouts").mkdir()
    table = viewing.table(1, len(texts)).drop_columns(["text", "transcript"])
    table = table.append_column("text", [texts])
    pq.write_table(table, tmp_path / "rollouts" / "step-000001.parquet")
    index = Index(tmp_path)
    index.read()
    for text in texts:
        assert [row["said"] for row in index.search({"text": text}, "newest", 0, 9)["rows"]] == [text]
    assert index.search({"text": "ärger"}, "newest", 0, 9)["total"] == 0  # upper and lower case: ASCII only


def test_steps_that_are_new_other_or_gone(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    index = Index(run)
    index.read()
    rollouts = run / "rollouts"
    (rollouts / "step-000002.parquet").unlink()
    pq.write_table(viewing.table(3, 8), rollouts / "step-000003.parquet")
    pq.write_table(viewing.table(20, 8), rollouts / "step-000020.parquet")
    (rollouts / "step-000004.parquet").write_bytes(b"half")
    (rollouts / "step-000005.parquet").unlink()
    (rollouts / "step-000005.parquet").mkdir()  # where many write a step: a folder
    for part, rows in enumerate((viewing.table(5, 16).slice(0, 8), viewing.table(5, 16).slice(8))):
        pq.write_table(rows, rollouts / "step-000005.parquet" / f"rank-{part}.parquet")
    index.read()
    counts = {
        step: index.search({"step": str(step)}, "newest", 0, 1)["total"] for step in (1, 2, 3, 4, 5, 20)
    }
    assert counts == {1: ROWS, 2: 0, 3: 8, 4: 0, 5: 16, 20: 8}
    (wrong,) = index.state()["wrong"]
    assert wrong.startswith(f"{rollouts / 'step-000004.parquet'}: cannot be read as rollouts")
    again = Index(run)  # of another process, or day
    again.read()
    assert again.search({}, "oldest", 0, 1000) == index.search({}, "oldest", 0, 1000)


def test_two_that_read_at_once_have_each_row_once(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    threads = [threading.Thread(target=Index(run).read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Index(run).search({}, "newest", 0, 1)["total"] == STEPS * ROWS


def test_an_index_that_is_damaged_or_of_another_rondo_is_made_anew(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    index = Index(run)
    for spoil in ("text", "version"):
        index.read()
        if spoil == "text":
            index._path.write_bytes(b"no database at all" * 1000)
        else:
            with sqlite3.connect(index._path) as database:
                database.execute("PRAGMA user_version = 99")
        assert index.state()["read"] == 0
        index.read()
        assert index.search({}, "newest", 0, 1)["total"] == STEPS * ROWS


def test_an_index_that_cannot_be_written_is_named(made: Path, tmp_path: Path) -> None:
    index = Index(made)
    index._path = tmp_path / "no such folder" / "index.sqlite"
    with pytest.raises(StorageError, match="unable to open"):
        index.read()


@pytest.mark.parametrize(
    ("said", "tools"),
    [
        (
            '[policy] <tool_call>{"name": "add", "arguments": {"name": "x"}}</tool_call>\n[tool] 3',
            ["add"],
        ),
        (
            "[policy] <function=search.web>q</function>\n[tool] a\n[policy] <function=add>",
            ["search.web", "add"],
        ),
        (
            "[policy] <|channel|>commentary to=functions.get_weather<|message|>{}\n[tool] warm",
            ["get_weather"],
        ),
        ("[policy] <tool_call>look\n<arg_key>q</arg_key></tool_call>\n[tool] a", ["look"]),
        ('[policy] the form is {"name": "add"}', []),  # nothing was called
        ('[policy] a\n[tool] {"name": "told"}', []),
        ("no transcript", []),
    ],
)
def test_which_tools_were_called(said: str, tools: list[str]) -> None:
    assert _tools(said).split() == tools


def test_texts_beyond_what_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    table = viewing.table(1, 1).drop_columns(["text", "transcript", "prompt_text"])
    table = table.append_column("text", [["a" * SAID + "behind"]])
    table = table.append_column("prompt_text", [["p" * PROMPT + "beyond"]])
    pq.write_table(table, tmp_path / "rollouts" / "step-000001.parquet")
    index = Index(tmp_path)
    index.read()
    counts = [
        index.search({"text": text}, "newest", 0, 1)["total"] for text in ("aaa", "behind", "ppp", "beyond")
    ]
    assert counts == [1, 0, 1, 0]
