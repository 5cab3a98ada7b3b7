"""Rows have many forms: the same content is the same tokens in each; what a form adds or loses is said."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rondo.api.inputs import Inputs
from rondo.config.build import build
from rondo.config.schema import FileSourceConfig, HuggingfaceSourceConfig, SourceConfig, TaskSourceConfig
from rondo.config.tree import Node, Origin, read_value
from rondo.core.errors import ConfigError, DataError
from rondo.data import ConversationStream, PairStream, PromptStream, eval_prompts
from rondo.data.plain import plain
from rondo.data.sources import open_source
from rondo.recipes import quickstart
from tests.messages import full_text

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = quickstart.fast_tokenizer(quickstart._word_problem_bpe(), TEMPLATE)
TOKENIZER.chat_template_options = {}
Rows = list[dict[str, Any]]

# Arrow has one type of a key's values.
LEAF = {"city": st.sampled_from(["Rome", "Oslo"]), "days": st.integers(0, 9), "near": st.booleans()}
NESTED = {
    "at": st.fixed_dictionaries({}, optional=LEAF),
    "stops": st.lists(st.fixed_dictionaries({}, optional=LEAF)),
}
ARGUMENTS = st.fixed_dictionaries({}, optional={**LEAF, **NESTED})
NAMES = st.sampled_from(["weather", "route"])


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _sorted(value: Any) -> Any:
    """With the keys of mappings in one order: Arrow has one for all rows."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(child) for child in value] if isinstance(value, list) else value


def _row(question: str, name: str, arguments: Any, answer: str, tools: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [_call(name, _sorted(arguments))]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, **({"tools": _sorted(tools)} if tools else {})}


TOOL = st.builds(lambda name, parameters: {"name": name, "parameters": parameters}, NAMES, ARGUMENTS)
ROWS = st.lists(
    st.builds(_row, st.just("q"), NAMES, ARGUMENTS, st.just("a"), st.lists(TOOL, max_size=2)),
    min_size=1,
    max_size=4,
)
MADE: list[Rows] = []


def made() -> Any:
    return MADE[-1]


def _with_arrays(value: Any) -> Any:
    """As pandas gives cells of a Parquet file."""
    if isinstance(value, dict):
        return {key: _with_arrays(child) for key, child in value.items()}
    if isinstance(value, list):
        array = np.empty(len(value), object)
        array[:] = [_with_arrays(child) for child in value]
        return array
    return np.int64(value) if type(value) is int else value


def as_lines(rows: Rows, folder: Path) -> SourceConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSourceConfig(type="jsonl", path=str(path))


def as_list(rows: Rows, folder: Path) -> SourceConfig:
    (folder / "rows.json").write_text(json.dumps(rows, indent=1))
    return FileSourceConfig(type="jsonl", path=str(folder / "rows.json"))


def as_compressed(rows: Rows, folder: Path) -> SourceConfig:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for suffix, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        (folder / f"rows.{suffix}").write_bytes(compress(text))
    found = [
        list(open_source(FileSourceConfig(type="jsonl", path=str(path))).rows)
        for path in folder.glob("rows.*z*")
    ]
    assert found == [rows] * 3
    return FileSourceConfig(type="jsonl", path=str(folder / "rows.gz"))


def as_parquet(rows: Rows, folder: Path) -> SourceConfig:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return FileSourceConfig(type="parquet", path=str(folder / "rows.parquet"))


def as_dataset(rows: Rows, folder: Path) -> SourceConfig:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(pa.Table.from_pylist(rows)).save_to_disk(str(folder / "set"))
    return HuggingfaceSourceConfig(path=str(folder / "set"))


def as_function(rows: Rows, folder: Path) -> SourceConfig:
    MADE.append([_with_arrays(row) for row in rows])
    return TaskSourceConfig(type="function", task=f"{__name__}.made")


def _given(data: Any, folder: Path) -> SourceConfig:
    """As `rondo.train` is given it."""
    sources = Inputs(folder / "inputs").sources(data, "train")
    _, node = read_value("train", sources, 0, Origin("test"))
    built = build(Node({"data": Node({"train": node}, Origin("test"), 0)}, Origin("test"), 0))
    (source,) = built.config.data.train
    return source


def as_python(rows: Rows, folder: Path) -> SourceConfig:
    return _given(rows, folder)


def as_frame(rows: Rows, folder: Path) -> SourceConfig:
    return _given(pandas.DataFrame(rows), folder)


def as_table(rows: Rows, folder: Path) -> SourceConfig:
    return _given(pa.Table.from_pylist(rows), folder)


FORMS = (as_list, as_compressed, as_parquet, as_dataset, as_function, as_python, as_frame, as_table)
OF_ARROW = (as_parquet, as_dataset, as_table)


def examples(source: SourceConfig, rows: int) -> list[tuple[str, str]]:
    """Each row's text, and what of it is learnt."""
    stream = ConversationStream((source,), TOKENIZER, max_prompt_tokens=4000, max_tokens=9000, shuffle=False)
    read = [stream.row(seq) for seq in range(rows)]
    return [
        (TOKENIZER.decode(np.concatenate([prompt, response])), TOKENIZER.decode(response[mask > 0]))
        for prompt, response, mask in read
    ]


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=ROWS)
def test_the_same_content_is_the_same_tokens(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each behind a row that has every key: Arrow takes columns and their order of keys from it."""
    place = {"city": "Rome", "days": 1, "near": False}
    every = {**place, "at": place, "stops": [place]}
    rows = [_row("q", "route", every, "a", [{"name": "route", "parameters": every}]), *rows]
    folder = tmp_path_factory.mktemp("forms")
    expected = examples(as_lines(rows, folder), len(rows))
    for form in FORMS:
        assert (form, examples(form(rows, folder), len(rows))) == (form, expected)
        for part in folder.iterdir():
            shutil.rmtree(part) if part.is_dir() else part.unlink()


NULLS = [
    _row(
        "q",
        "weather",
        {"city": "Rome", "day": None},
        "a",
        [{"name": "weather", "parameters": {"default": None}}],
    ),
    _row("q", "route", {"stops": [{"at": None, "by": 1}]}, "a", [{"name": "route", "parameters": {}}]),
]
WITHOUT_NULLS = [
    _row("q", "weather", {"city": "Rome"}, "a", [{"name": "weather", "parameters": {}}]),
    _row("q", "route", {"stops": [{"by": 1}]}, "a", [{"name": "route", "parameters": {}}]),
]


@pytest.mark.parametrize("form", FORMS)
def test_nulls_inside_tools_and_arguments(
    form: Callable[[Rows, Path], SourceConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are kept but where Arrow may have added them; that they are left out is said once."""
    found = examples(form(NULLS, tmp_path), 2)
    assert found == examples(as_lines(WITHOUT_NULLS if form in OF_ARROW else NULLS, tmp_path), 2)
    said = [
        r.getMessage()
        for r in caplog.records
        if "nulls inside tools and arguments are left out" in r.getMessage()
    ]
    assert len(said) == (form in OF_ARROW)


def test_nulls_in_json_text_are_kept_in_parquet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [json.loads(json.dumps(row)) for row in NULLS]
    for row in rows:
        function = row["messages"][1]["tool_calls"][0]["function"]
        function["arguments"], row["tools"] = json.dumps(function["arguments"]), json.dumps(row["tools"])
    assert examples(as_parquet(rows, tmp_path), 2) == examples(as_lines(NULLS, tmp_path), 2)
    assert not caplog.records


def test_flags_of_messages_are_honoured(tmp_path: Path) -> None:
    row = _row("q", "weather", {}, "a", [])
    row["messages"][1]["weight"] = 0
    ((_, learnt),) = examples(as_lines([row], tmp_path), 1)
    assert learnt == "a<|im_end|>"
    row["messages"][3]["trainable"] = False
    with pytest.raises(DataError, match=full_text("turns are empty, or none is to be learnt")):
        examples(as_lines([row], tmp_path), 1)
    asked = {"prompt": [{"role": "user", "content": "q", "loss_mask": 0}]}
    with pytest.raises(DataError, match=full_text("0.loss_mask says whether a message")):
        PromptStream((as_lines([asked], tmp_path),), TOKENIZER, max_prompt_tokens=100)
    pair = {"prompt": "q", "chosen": {"role": "assistant", "content": "a", "weight": 1}, "rejected": "b"}
    with pytest.raises(DataError, match=r"0\.weight says"):
        PairStream((as_lines([pair], tmp_path),), TOKENIZER, max_prompt_tokens=100, max_tokens=200)


def test_keys_of_messages_without_a_meaning(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "q", "timestamp": "now"}], "answer": 3}]
    source = as_lines(rows, tmp_path)
    with pytest.raises(DataError, match=full_text("message 0.timestamp has no meaning in")):
        PromptStream((source,), TOKENIZER, max_prompt_tokens=100)
    assert isinstance(source, FileSourceConfig)
    less = FileSourceConfig(type="jsonl", path=source.path, ignore_message_keys=("timestamp",))
    prompt = PromptStream((less,), TOKENIZER, max_prompt_tokens=100).prompt(0)
    assert prompt.messages == ({"role": "user", "content": "q"},)
    assert prompt.fields == {"answer": 3}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", {"bytes": b"1", "path": None}),
        ("images", ["a.png"]),
        ("Videos", ["a.mp4"]),
        ("audio", "a.wav"),
        ("figure", {"bytes": b"1", "path": "a.png"}),
        ("figures", [{"bytes": None, "path": "a.png"}]),
    ],
)
def test_columns_that_a_text_model_would_not_see(name: str, value: Any, tmp_path: Path) -> None:
    source = as_parquet([{"prompt": "<image>q", name: value, "answer": 3}], tmp_path)
    assert isinstance(source, FileSourceConfig)
    with pytest.raises(
        DataError, match=rf"row 0\): column '{name}' holds pictures.*drop_columns: \[{name}\]"
    ):
        PromptStream((source,), TOKENIZER, max_prompt_tokens=100)
    less = FileSourceConfig(type="parquet", path=source.path, drop_columns=(name,))
    assert PromptStream((less,), TOKENIZER, max_prompt_tokens=100).prompt(0).fields == {"answer": 3}
    wrong = FileSourceConfig(type="parquet", path=source.path, drop_columns=("answr",))
    with pytest.raises(ConfigError, match=full_text("has no column 'answr'; did you mean")):
        open_source(wrong)


@pytest.mark.parametrize("form", [as_lines, as_parquet])
@pytest.mark.parametrize(
    ("name", "value"), [("enable_thinking", False), ("chat_template_kwargs", {"enable_thinking": False})]
)
def test_options_of_the_template_row_by_row(form: Any, name: str, value: Any, tmp_path: Path) -> None:
    """As verl's and TRL's rows may have them: all rows have those of the configuration here."""
    source = form([{"prompt": "q", name: None}, {"prompt": "q", name: value}], tmp_path)
    refused = f": column '{name}' is an option of the chat template for this row"
    with pytest.raises(DataError) as caught:
        PromptStream((source,), TOKENIZER, max_prompt_tokens=100)
    assert refused in str(caught.value)
    assert f"drop_columns: [{name}]" in str(caught.value)
    less = dataclasses.replace(source, drop_columns=(name,))
    assert PromptStream((less,), TOKENIZER, max_prompt_tokens=100).prompt(1).fields == {}


@pytest.mark.parametrize("form", [as_lines, *FORMS])
def test_columns_are_dropped_in_every_form(
    form: Callable[[Rows, Path], SourceConfig], tmp_path: Path
) -> None:
    rows = [{"prompt": f"q {i}", "images": ["a.png"], "answer": i} for i in range(3)]
    source = form(rows, tmp_path)
    less = open_source(dataclasses.replace(source, drop_columns=("images",)))
    assert list(less.rows) == [{"prompt": f"q {i}", "answer": i} for i in range(3)]
    with pytest.raises(ConfigError, match=full_text("has no column 'imges'; did you mean")):
        open_source(dataclasses.replace(source, drop_columns=("imges",)))


def test_pictures_that_are_dropped_are_not_opened(tmp_path: Path) -> None:
    """Nor need there be a package that could."""
    datasets = pytest.importorskip("datasets")
    broken = [{"prompt": "q", "picture": {"bytes": b"no picture", "path": None}}]
    features = datasets.Features({"prompt": datasets.Value("string"), "picture": datasets.Image()})
    datasets.Dataset.from_list(broken, features=features).save_to_disk(str(tmp_path / "set"))
    source = HuggingfaceSourceConfig(path=str(tmp_path / "set"), drop_columns=("picture",))
    assert PromptStream((source,), TOKENIZER, max_prompt_tokens=100).prompt(0).fields == {}


def test_other_columns_of_a_function_reach_scorers_as_they_are(tmp_path: Path) -> None:
    cases = {1: ("a", "b")}
    MADE.append([{"prompt": np.array([{"role": "user", "content": "q"}]), "x": np.arange(2), "cases": cases}])
    source = TaskSourceConfig(type="function", task=f"{__name__}.made")
    prompt = PromptStream((source,), TOKENIZER, max_prompt_tokens=100).prompt(0)
    assert prompt.messages == ({"role": "user", "content": "q"},)
    assert prompt.fields["cases"] == cases
    assert (type(prompt.fields["x"]), prompt.fields["x"].tolist()) == (np.ndarray, [0, 1])


@pytest.mark.parametrize("form", ["file", "large file", "table"])
def test_maps_of_arrow_are_mappings(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In lists, in mappings and in each other; messages may be such maps."""
    text = pa.map_(pa.string(), pa.string())
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    extra = {"k": {"deep": 7, "none": None}, "l": None}
    columns = {
        "messages": pa.array([[[*one.items()] for one in said]], pa.list_(text)),
        "prompt": ["q"],
        "extra": pa.array(
            [[(key, value and [*value.items()]) for key, value in extra.items()]],
            pa.map_(pa.string(), pa.map_(pa.string(), pa.int64())),
        ),
        "beside": pa.array([{"x": [("y", "z")], "n": 1}], pa.struct({"x": text, "n": pa.int64()})),
        "none": pa.array([None], text),
        "pairs": [[["a", "b"]]],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    if form == "large file":
        monkeypatch.setattr("rondo.data.files.HELD", 0)
    file = FileSourceConfig(type="parquet", path=str(tmp_path / "rows.parquet"))
    source = _given(pa.table(columns), tmp_path) if form == "table" else file
    prompt = PromptStream((source,), TOKENIZER, max_prompt_tokens=4000).prompt(0)
    assert {name: plain(prompt.fields[name]) for name in columns if name != "prompt"} == {
        "messages": said,
        "extra": extra,
        "beside": {"x": {"y": "z"}, "n": 1},
        "none": None,
        "pairs": [["a", "b"]],
    }
    assert prompt.column("extra.k.deep") == 7
    assert examples(source, 1) == examples(_given([{"messages": said}], tmp_path / "own"), 1)


def test_prompts_are_read_only(tmp_path: Path) -> None:
    """A program gets them from its session; the next epoch has the same row."""
    source = as_lines([{"prompt": "q", "cases": [1]}], tmp_path)
    stream = PromptStream((source,), TOKENIZER, max_prompt_tokens=100)
    (held_out,) = eval_prompts((source,), TOKENIZER, max_prompt_tokens=100)
    for prompt in (stream.prompt(0), held_out):
        with pytest.raises(ValueError, match="read-only"):
            prompt.fields["cases"].append(2)
        with pytest.raises(ValueError, match="read-only"):
            prompt.messages[0].update(content="x")  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="read-only"):
            prompt.token_ids[0] = 7
    assert stream.prompt(1).fields == {"cases": [1]}


def test_an_empty_column_of_pictures_is_none(tmp_path: Path) -> None:
    source = as_lines([{"prompt": "q", "images": []}, {"prompt": "q", "image": None}], tmp_path)
    PromptStream((source,), TOKENIZER, max_prompt_tokens=100)


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    columns = pa.table([["a"], ["b"]], names=["prompt", "prompt"])
    pq.write_table(columns, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="2 columns are called 'prompt'"):
        open_source(FileSourceConfig(type="parquet", path=str(tmp_path / "rows.parquet")))
    with pytest.raises(DataError, match="2 columns are called 'prompt'"):
        _given(columns, tmp_path)
    inner = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(pa.table({"prompt": ["a"], "answer": inner}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=full_text("column 'answer': 2 columns are called")):
        open_source(FileSourceConfig(type="parquet", path=str(tmp_path / "rows.parquet")))
    frame = pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    with pytest.raises(DataError, match="2 columns are called 'prompt'"):
        _given(frame, tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "x": {"y": 1, "y": 2}}\n')
    with pytest.raises(DataError, match=full_text("line 1: JSON that cannot be read")):
        open_source(FileSourceConfig(type="jsonl", path=str(tmp_path / "rows.jsonl")))


def test_what_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    source = FileSourceConfig(type="jsonl", path=str(path))
    for content, words in (
        (b"\x28\xb5\x2f\xfd rest", "compressed by zstd, which is not read"),
        (gzip.compress(b'{"prompt": "a"}\n')[:-9], "cannot be read"),
        (b'[{"prompt": "a"},\n {"prompt": }]', "broken JSON: Expecting value at line 2, column 13"),
        (b'[{"prompt": "a"}, 3]', "item 1: a row must be an object"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            open_source(source)


@pytest.mark.parametrize("missing", [None, np.nan, pandas.NaT, pandas.NA])
def test_a_missing_cell_of_pandas_is_none(missing: Any, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"prompt": ["a", "b"], "x": pandas.Series([1, missing], dtype=object)})
    assert list(open_source(_given(frame, tmp_path)).rows) == [
        {"prompt": "a", "x": 1},
        {"prompt": "b", "x": None},
    ]


@pytest.mark.parametrize("tools", [[3], ["3"], {"name": "f"}, '{"name": "f"}', "3"])
def test_tools_are_a_list_of_schemas(tools: Any, tmp_path: Path) -> None:
    source = as_lines([{"prompt": "q", "tools": tools}], tmp_path)
    with pytest.raises(DataError, match=full_text("column 'tools' must be a list of schemas")):
        PromptStream((source,), TOKENIZER, max_prompt_tokens=1000)


@pytest.mark.parametrize("tools", [[{"name": "f"}], ['{"name": "f"}'], '[{"name": "f"}]'])
def test_tools_may_be_json_text(tools: Any, tmp_path: Path) -> None:
    source = as_lines([{"prompt": "q", "tools": tools}], tmp_path)
    prompt = PromptStream((source,), TOKENIZER, max_prompt_tokens=1000).prompt(0)
    assert prompt.fields == {"tools": [{"name": "f"}]}
    assert TOKENIZER.decode(prompt.token_ids).startswith('[{"name": "f"}]')


def test_the_converters_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    code = page.partition("## What is read of a row")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "rows.py").write_text(code)
    monkeypatch.chdir(tmp_path)

    def source(form: str, row: dict[str, Any]) -> TaskSourceConfig:
        as_lines([row], tmp_path)
        return TaskSourceConfig(
            type="function", task="rows.py:rows", options={"path": "rows.jsonl", "form": form}
        )

    said = [("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b")]
    shared = {"conversations": [{"from": who, "value": text} for who, text in said]}
    ((text, learnt),) = examples(source("sharegpt", shared), 1)
    assert text == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n"
        for role, text in (("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))
    ).rstrip("\n")
    assert learnt == "a<|im_end|>b<|im_end|>"
    begin = "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: "
    dialogues = {"chosen": begin + "b", "rejected": begin + "c"}
    pairs = PairStream((source("hh_rlhf", dialogues),), TOKENIZER, max_prompt_tokens=100, max_tokens=200)
    pair = pairs.row(0)
    assert TOKENIZER.decode(pair.chosen[0]).endswith(
        "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [TOKENIZER.decode(side[1]) for side in (pair.chosen, pair.rejected)] == [
        "b<|im_end|>",
        "c<|im_end|>",
    ]
