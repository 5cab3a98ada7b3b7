"""What `rondo.train` is given comes back from the files that the recipe names as it was given."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest

from rondo.api import rows as rows_module
from rondo.api.inputs import Inputs
from rondo.config.build import build
from rondo.config.functions import _KNOWN, resolve_function
from rondo.config.tree import Node, Origin, read_value
from rondo.core.errors import ConfigError, DataError
from rondo.data.sources import open_source
from rondo.rewards.builtin import gsm8k
from tests.messages import full_text
from tests.trainers import scorers

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    return Inputs(tmp_path / "inputs")


def read_back(sources: list[Any]) -> list[dict[str, Any]]:
    """The rows as a run reads them."""
    _, node = read_value("train", sources, 0, Origin("test"))
    built = build(Node({"data": Node({"train": node}, Origin("test"), 0)}, Origin("test"), 0))
    assert not built.problems
    return [dict(row) for source in built.config.data.train for row in open_source(source).rows]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        (row for row in ROWS),
        pandas.DataFrame(ROWS),
        pa.Table.from_pylist(ROWS),
        [{"prompt": np.str_("a"), "answer": np.int64(1)}, {"prompt": "b", "answer": np.int32(2)}],
    ],
    ids=["list", "tuple", "iterator", "generator", "pandas", "arrow", "numpy"],
)
def test_rows_of_every_kind_come_back_equal(data: Any, inputs: Inputs) -> None:
    assert read_back(inputs.sources(data, "train")) == ROWS


def test_rows_of_a_dataset(inputs: Inputs) -> None:
    datasets = pytest.importorskip("datasets")
    assert read_back(inputs.sources(datasets.Dataset.from_list(ROWS), "train")) == ROWS


def test_prompts_alone_are_rows(inputs: Inputs) -> None:
    assert read_back(inputs.sources(["a", "b"], "train")) == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "a", "x": 1}, {"prompt": "b", "x": 2.5}],  # Parquet would make 1 a 1.0
        [{"prompt": "a", "x": {"u": 1}}, {"prompt": "b", "x": {"v": 2}}],  # and give both mappings both keys
        [{"prompt": "a", "x": 1}, {"prompt": "b"}],  # and this row an x
        [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "text"}],
        [{"prompt": [{"role": "user", "content": "a"}], "x": None}],
        [{"prompt": "a", "x": {}}],  # Parquet has no such type
    ],
)
def test_what_parquet_would_change_is_written_as_json(rows: list[dict[str, Any]], inputs: Inputs) -> None:
    found = read_back(inputs.sources(rows, "train"))
    assert repr(found) == repr(rows)


def test_what_no_file_holds_is_refused(inputs: Inputs) -> None:
    for value, kind in (
        ({1j}, "set"),
        ("half \ud800", "str"),
        (float("nan"), "float"),
        (len, "builtin_fun"),
    ):
        rows = [{"prompt": "a", "x": 1}, {"prompt": "b", "x": value}]
        with pytest.raises(DataError, match=rf"train, row 1: column 'x' holds {kind}"):
            inputs.sources(rows, "train")
    assert not inputs.folder.exists()
    with pytest.raises(DataError, match=full_text("row 1: a row is a mapping (or a prompt)")):
        inputs.sources([{"prompt": "a"}, 3], "train")
    with pytest.raises(DataError, match="train: there are no rows"):
        inputs.sources([], "train")
    with pytest.raises(ConfigError, match="float is no rows"):
        inputs.sources(1.5, "train")


def test_dates_are_for_parquet(inputs: Inputs) -> None:
    rows = [{"prompt": "a", "day": datetime.date(2026, 1, 2)}]
    assert read_back(inputs.sources(rows, "train")) == rows


DAY = datetime.date(2026, 1, 2)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("parquet", [None, None, None, None, DAY]),  # a type that the first batches do not know
        ("parquet", [{"image": b"1", "path": None}] * 3 + [{"image": b"2", "path": "a.png"}]),
        ("parquet", [[], [], [], [b"1"], []]),
        ("parquet", [Decimal("1.25"), Decimal("1.25"), Decimal("100.25")]),
        ("jsonl", [1, 2, 3, 2.5, 4]),
        ("jsonl", [1, 2, 3, "text"]),
        ("jsonl", [1, 2, 3, {"a": 1}]),
        ("jsonl", [{"u": 1}, {"u": 1}, {"u": 1, "v": 2}]),
        ("jsonl", [2**63, 1, -1]),
    ],
)
def test_batches_that_differ_come_back_as_they_were(
    kind: str, values: list[Any], inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BATCH", 2)
    rows = [{"prompt": str(number), "x": value} for number, value in enumerate(values)]
    (source,) = inputs.sources(iter(rows), "train")
    assert source["type"] == kind
    assert repr(read_back([source])) == repr(rows)
    assert [path.name for path in inputs.folder.iterdir()] == [f"train.{kind}"]


def test_a_column_that_comes_later_is_in_its_rows_only(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BATCH", 1)
    rows = [{"prompt": "a"}, {"prompt": "b", "x": 1}, {"prompt": "c"}]
    assert read_back(inputs.sources(iter(rows), "train")) == rows


def test_nothing_stays_of_a_generator_that_fails_late(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BATCH", 2)

    def then(row: Any, x: Any = 1) -> Any:
        yield from ({"prompt": "a", "x": x} for _ in range(5))
        yield row if row is not None else {}["gone"]

    with pytest.raises(KeyError, match="gone"):
        inputs.sources(then(None), "train")
    with pytest.raises(DataError, match="data, row 5: a row is a mapping"):
        inputs.sources(then(3), "train")
    with pytest.raises(DataError, match="train, row 5: column 'x' holds set"):
        inputs.sources(then({"prompt": "a", "x": {1j}}), "train")
    with pytest.raises(DataError, match="train, row 0: column 'x' holds date"):  # for Parquet, but for row 5
        inputs.sources(then({"prompt": "a", "x": 1.5}, DAY), "train")
    assert not inputs.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("last", [1, 0.5], ids=["parquet", "jsonl"])
def test_the_memory_of_a_generator_is_that_of_a_batch(
    last: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BATCH", 200)

    def once(size: int, folder: Path) -> int:
        rows = ({"prompt": f"{n} apples", "x": n if n < size - 1 else last} for n in range(size))
        tracemalloc.start()
        Inputs(folder).sources(rows, "train")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    def peak(size: int) -> int:
        """The least of three: what other threads of this process take meanwhile comes on top."""
        return min(once(size, tmp_path / f"{size}-{n}") for n in range(3))

    peak(400)
    assert peak(8_000) < 1.5 * peak(800)


def test_a_generator_without_end_is_cut_where_it_is_said(inputs: Inputs) -> None:
    def endless() -> Any:
        number = 0
        while True:
            yield {"prompt": str(number)}
            number += 1

    rows = endless()
    assert [row["prompt"] for row in read_back(inputs.sources(rows, "train", size=3))] == ["0", "1", "2"]
    assert next(rows) == {"prompt": "3"}  # no row more was asked for


def test_files_hub_ids_and_sources_are_named_not_copied(inputs: Inputs) -> None:
    task = {"type": "function", "task": "m.f"}
    assert inputs.sources("a/b.jsonl", "train") == [{"type": "jsonl", "path": "a/b.jsonl"}]
    assert inputs.sources(Path("b.parquet"), "train") == [{"type": "parquet", "path": "b.parquet"}]
    assert inputs.sources("openai/gsm8k", "train") == [{"type": "huggingface", "path": "openai/gsm8k"}]
    assert inputs.sources([task, Path("a.jsonl")], "train") == [task, {"type": "jsonl", "path": "a.jsonl"}]
    assert not inputs.folder.exists()


def test_functions_have_the_name_under_which_other_processes_find_them(inputs: Inputs) -> None:
    assert inputs.function(gsm8k) == "rondo.rewards.builtin:gsm8k"
    assert inputs.function(scorers.even_share) == "tests/trainers/scorers.py:even_share"
    assert not inputs.folder.exists()


def test_functions_without_a_name_are_written_down(inputs: Inputs) -> None:
    seen: list[int] = []
    offset = 5

    def closure(x: int) -> int:
        seen.append(x)
        return x + offset

    name = inputs.function(closure)
    assert resolve_function(name) is closure  # here it is the function itself, with what it holds
    code = f"from rondo.config.functions import resolve_function; print(resolve_function({name!r})(2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, seen) == ("7\n", [])
    assert inputs.function(closure) == name  # by what it is, not by how often it was given
    _KNOWN.pop(name)
    assert resolve_function(name)(3) == 8


def test_a_function_that_another_python_wrote_down_is_refused(inputs: Inputs) -> None:
    """Its bytes are no code there: one of 3.11 ran in 3.12, and raised SystemError in the middle."""
    name = inputs.function(lambda x: x + 1)
    file = Path(name.rpartition(":")[0])
    line, rest = file.read_bytes().split(b"\n", 1)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert line.decode() == f"a function of rondo, for Python {here}"
    file.write_bytes(line.replace(here.encode(), b"3.7") + b"\n" + rest)
    _KNOWN.pop(name)
    with pytest.raises(ConfigError, match=rf"of Python 3\.7, and this is Python {here}"):
        resolve_function(name)
    file.write_bytes(rest)  # as an older rondo wrote it
    assert resolve_function(name)(3) == 4


def test_lambdas_partials_and_objects(inputs: Inputs) -> None:
    assert resolve_function(inputs.function(lambda x: x + 1))(1) == 2
    name = inputs.named({"a": [{"name": print}]})["a"][0]["name"]
    assert resolve_function(name) is print


def test_what_cannot_be_written_down_is_said(inputs: Inputs, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file, pytest.raises(ConfigError, match="cannot be written down"):
        inputs.function(lambda: file.write("x"))


def test_settings_that_no_recipe_can_hold() -> None:
    with pytest.raises(ConfigError) as caught:
        read_value("rollout.n", object(), 0, Origin("setting rollout.n"))
    assert caught.value.key == "rollout.n"
