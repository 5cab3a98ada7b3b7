"""Rows from everywhere, and what a user reads when a source is wrong."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rondo.config.schema import FileSourceConfig, HuggingfaceSourceConfig, TaskSourceConfig
from rondo.core.errors import ConfigError, DataError
from rondo.data.sources import check_source, open_source, open_sources, source_name
from tests.messages import full_text

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(20)]

FUNCTIONS = """
def rows(size=3, seed=0, *, word="q"):
    return [{"prompt": f"{word} {seed} {i}", "answer": i} for i in range(size)]

def endless(seed):
    i = 0
    while True:
        yield {"prompt": f"{seed} {i}"}
        i += 1

def plain():
    return [{"prompt": "a"}]

def wrong_type():
    return {"prompt": "a"}

def wrong_rows():
    return [{"prompt": "a"}, "b"]

def nothing():
    return []
"""


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl(tmp_path):
    path = write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    source = open_source(FileSourceConfig(type="jsonl", path=path))
    assert source.name == "prompts"
    assert list(source.rows) == ROWS
    assert source.where(16) == f"{path}, line 17"
    assert len(open_source(FileSourceConfig(type="jsonl", path=path, size=5))) == 5


def test_jsonl_broken_line_17_is_named(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    lines[16] = '{"prompt": "question 16", "answer": }'
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=full_text("prompts.jsonl, line 17: broken JSON")):
        open_source(FileSourceConfig(type="jsonl", path=str(path)))


def test_jsonl_counts_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\n\n{"prompt": "b"}\n')
    source = open_source(FileSourceConfig(type="jsonl", path=str(path)))
    assert [row["prompt"] for row in source.rows] == ["a", "b"]
    assert source.where(1).endswith("line 3")


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b'{"prompt": "a"}\n"b"\n', "line 2: a row must be an object"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8"),
        (b"\n", "has no rows"),
        (
            b'{"prompt": "a"}\n{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            "line 2: JSON that cannot be read",
        ),
        (
            b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
            full_text("the row is nested more than 100 deep"),
        ),
        (b'{"prompt": "a"}\n{"prompt": "b", "n": ' + b"9" * 5000 + b"}", "line 2: JSON that cannot be read"),
        (b'{"prompt": "a"}\n{"prompt": "b \\ud800"}', r"line 2: '\\ud800' is half of a character"),
        (b'{"prompt": "a", "\\uDEAD": 1}', r"line 1: '\\udead' is half of a character"),
    ],
)
def test_jsonl_content_errors(tmp_path, content, wrong):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=wrong):
        open_source(FileSourceConfig(type="jsonl", path=str(path)))


def test_what_is_nested_and_what_is_beyond_ascii_are_rows(tmp_path):
    rows = [{"prompt": "🙂", "deep": json.loads("[" * 99 + "]" * 99), "wide": [[]] * 200}]
    source = open_source(FileSourceConfig(type="jsonl", path=write_jsonl(tmp_path / "p.jsonl", rows)))
    assert list(source.rows) == rows


def test_parquet_with_text_that_is_none(tmp_path):
    texts = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="UTF8"):
        open_source(FileSourceConfig(type="parquet", path=str(tmp_path / "p.parquet")))


def test_missing_file_names_the_nearest(tmp_path):
    write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    with pytest.raises(ConfigError, match=full_text("promts.jsonl is missing; did you mean")):
        open_source(FileSourceConfig(type="jsonl", path=str(tmp_path / "promts.jsonl")))
    with pytest.raises(ConfigError, match="has no file that ends as parquet does"):
        open_source(FileSourceConfig(type="parquet", path=str(tmp_path)))


def test_parquet(tmp_path):
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt": [{"role": "user", "content": f"q {i}"}], "answer": i} for i in range(7)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    source = open_source(FileSourceConfig(type="parquet", path=str(path), size=6))
    assert list(source.rows) == rows[:6]
    assert source.where(3) == f"{path}, row 3"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_source(FileSourceConfig(type="parquet", path=str(path)))


def test_missing_column_names_the_columns_there_are(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"promt": "a", "answer": "1"}])
    source = open_source(FileSourceConfig(type="jsonl", path=path))
    with pytest.raises(DataError, match=full_text("'prompt'; did you mean 'promt'? Columns")):
        source.prompt(0)


def test_huggingface_folder_and_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": data, "test": data.select(range(4))}).save_to_disk(tmp_path / "dict")

    def rows(**keys):
        return list(open_source(HuggingfaceSourceConfig(**keys)).rows)

    assert rows(path=str(tmp_path / "plain"), size=3) == ROWS[:3]
    assert rows(path=str(tmp_path / "plain"), split="train") == ROWS
    with pytest.raises(ConfigError, match=full_text("is one data set of save_to_disk")):
        rows(path=str(tmp_path / "plain"), split="test")
    for folder in ("plain", "dict"):
        with pytest.raises(ConfigError, match=full_text("is read as save_to_disk wrote it")):
            rows(path=str(tmp_path / folder), options={"revision": "main"})
    assert rows(path=str(tmp_path / "dict"), split="test") == ROWS[:4]
    with pytest.raises(ConfigError, match=full_text("did you mean 'test'? Splits: train, test")):
        rows(path=str(tmp_path / "dict"), split="tset")
    write_jsonl(tmp_path / "p.jsonl", ROWS)
    assert rows(path=str(tmp_path / "p.jsonl")) == ROWS


def test_huggingface_missing_says_so(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("offline"))
    )
    with pytest.raises(ConfigError, match=r"'no/such-set' on the hub.*offline"):
        open_source(HuggingfaceSourceConfig(path="no/such-set"))


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    config = TaskSourceConfig(
        type="reasoning_gym", task="chain_sum", size=4, seed=7, options={"max_terms": 3}
    )
    rows = list(open_source(config).rows)
    assert rows == list(open_source(config).rows)
    assert len(rows) == 4
    assert set(rows[0]) == {"prompt", "answer", "task", "task_options", "entry"}
    assert rows[0]["answer"] == rows[0]["entry"]["answer"]
    other = TaskSourceConfig(type="reasoning_gym", task="chain_sum", size=4, seed=8, options={"max_terms": 3})
    assert rows != list(open_source(other).rows)


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"task": "chain_sun"}, full_text("no task 'chain_sun'; did you mean")),
        ({"task": "chain_sum", "options": {"max_term": 3}}, full_text("no option 'max_term'; did you mean")),
        ({"task": "chain_sum", "options": {"max_terms": "three"}}, "max_terms"),
        ({"task": "chain_sum", "options": {"min_terms": 5, "max_terms": 3}}, "refuses"),
    ],
)
def test_reasoning_gym_errors(keys, wrong):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=wrong):
        open_source(TaskSourceConfig(type="reasoning_gym", **keys))


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)

    def open_function(name, **keys):
        return open_source(TaskSourceConfig(type="function", task=f"{path}:{name}", **keys))

    return open_function


def test_function_gets_options_seed_and_size(functions):
    source = functions("rows", seed=4, size=2, options={"word": "x"})
    assert source.name == "rows"
    assert [row["prompt"] for row in source.rows] == ["x 4 0", "x 4 1"]
    assert [row["prompt"] for row in functions("endless", seed=1, size=3).rows] == ["1 0", "1 1", "1 2"]
    assert len(functions("rows", options={"size": 5})) == 5


@pytest.mark.parametrize(
    ("name", "keys", "error", "wrong"),
    [
        ("rows", {"options": {"wrod": 1}}, ConfigError, "no option 'wrod'; did you mean 'word'"),
        ("plain", {"seed": 1}, ConfigError, "no parameter 'seed'"),
        ("wrong_type", {}, ConfigError, full_text("must return a list of mappings")),
        ("wrong_rows", {}, DataError, "row 1.*must be a mapping, got str"),
        ("nothing", {}, DataError, "has no rows"),
        ("rowz", {}, ConfigError, "did you mean 'rows'"),
    ],
)
def test_function_errors(functions, name, keys, error, wrong):
    with pytest.raises(error, match=wrong):
        functions(name, **keys)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("rows", {"options": {"wrod": 1}}), ("plain", {"seed": 1}), ("rowz", {}), ("wrong_type", {})],
)
def test_a_check_finds_what_opening_does_but_for_what_the_function_returns(tmp_path, functions, name, keys):
    task = f"{tmp_path / 'functions.py'}:{name}"
    with pytest.raises(ConfigError) as opened:
        functions(name, **keys)
    if name == "wrong_type":  # it is not called
        assert check_source(TaskSourceConfig(type="function", task=task)) is None
        return
    with pytest.raises(ConfigError) as checked:
        check_source(TaskSourceConfig(type="function", task=task, **keys))
    assert str(checked.value) == str(opened.value)


def test_a_check_leaves_tasks_of_a_package_to_the_package():
    assert check_source(TaskSourceConfig(type="reasoning_gym", task="chain_sum")) is None


def test_names():
    assert source_name(FileSourceConfig(type="jsonl", path="a/b.jsonl")) == "b"
    assert source_name(HuggingfaceSourceConfig(path="openai/gsm8k")) == "gsm8k"
    assert source_name(TaskSourceConfig(type="function", task="pkg.mod.rows")) == "rows"
    with pytest.raises(ConfigError, match="2 sources are called 'b'"):
        open_sources(
            [
                FileSourceConfig(type="jsonl", path="a/b.jsonl"),
                FileSourceConfig(type="jsonl", path="c/b.jsonl"),
            ]
        )
    with pytest.raises(ConfigError, match="no source of rows"):
        open_sources([])
