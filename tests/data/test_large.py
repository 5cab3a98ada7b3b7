"""Sources that are read as they are needed: the same rows and the same stream as of one that is held, told of
before, beside and behind the first steps; files in folders, patterns and lists.
"""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import lzma
import os
import threading
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rondo.config.schema import FileSourceConfig, SourceConfig, TaskSourceConfig
from rondo.core.errors import ConfigError, DataError
from rondo.data import ConversationStream, PairStream, PromptStream, content, eval_prompts, looking, stream
from rondo.data import sources as sources_module
from rondo.data.encoding import RowCheck
from rondo.data.sources import open_source
from rondo.recipes.quickstart import tokenizer

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{i} apples"}] if i % 3 else f"{i} apples",
        "answer": i,
        "tools": [{"type": "function", "function": {"name": f"f{i}"}}] if i % 5 == 0 else None,
    }
    for i in range(300)
]
TEXTS = [{"prompt": f"{i} apples", "answer": i} for i in range(300)]
MADE: list[dict[str, object]] = []


def made() -> list[dict[str, object]]:
    return MADE


@pytest.fixture(scope="module")
def tok():
    return tokenizer()


@pytest.fixture
def nothing_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every source is a large one. Returns the cache's folder."""
    monkeypatch.setenv("RONDO_CACHE", str(tmp_path / "cache"))
    for module in (content, stream, sources_module):
        for name, small in (("HELD", 64), ("_STRIDE", 512), ("WHOLE", 16), ("FIRST", 8)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, small)
    monkeypatch.setattr("rondo.data.files.HELD", 64)
    return tmp_path / "cache/data"


def lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(path: Path, rows: list[dict[str, object]], **options: object) -> SourceConfig:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return FileSourceConfig(type="parquet", path=str(path))


def jsonl(path: Path, rows: list[dict[str, object]]) -> SourceConfig:
    path.write_bytes(lines(rows))
    return FileSourceConfig(type="jsonl", path=str(path))


def as_list(path: Path, rows: list[dict[str, object]]) -> SourceConfig:
    path.write_text(json.dumps(rows))
    return FileSourceConfig(type="jsonl", path=str(path))


def compressed(pack):
    def write(path: Path, rows: list[dict[str, object]]) -> SourceConfig:
        path.write_bytes(pack(lines(rows)))
        return FileSourceConfig(type="jsonl", path=str(path))

    return write


def far(path: Path, rows: list[dict[str, object]]) -> SourceConfig:
    url = f"memory://large/{path.name}"
    with fsspec.open(url, "wb") as file:
        file.write(lines(rows))
    return FileSourceConfig(type="jsonl", path=url)


def far_parquet(path: Path, rows: list[dict[str, object]]) -> SourceConfig:
    url = f"memory://large/{path.name}"
    with fsspec.open(url, "wb") as file:
        pq.write_table(pa.Table.from_pylist(rows), file)
    return FileSourceConfig(type="parquet", path=url)


FORMS = {
    "lines": jsonl,
    "list": as_list,
    "gzip": compressed(gzip.compress),
    "bzip2": compressed(bz2.compress),
    "xz": compressed(lzma.compress),
    "parquet": parquet,
    "url": far,
    "parquet at a url": far_parquet,
}


# ---- the same rows ----


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [None, 77])
def test_a_large_source_has_the_rows_of_a_held_one(nothing_held, tmp_path, monkeypatch, form, size):
    rows = [{**row, "tools": json.dumps(row["tools"])} for row in TEXTS_WITH_TOOLS]
    config = FORMS[form](tmp_path / f"rows.{form[:3]}", rows)
    config = FileSourceConfig(type=config.type, path=config.path, size=size, drop_columns=("answer",))
    large = open_source(config)
    found = [(large.rows[i], large.where(i)) for i in reversed(range(len(large)))][::-1]
    monkeypatch.setattr(content, "HELD", 1 << 24)
    monkeypatch.setattr("rondo.data.files.HELD", 1 << 24)
    held = open_source(config)
    assert [(dict(row), where) for row, where in found] == [
        (dict(row), held.where(i)) for i, row in enumerate(held.rows)
    ]
    assert [dict(row) for row in held.rows] == [
        {name: row[name] for name in ("prompt", "tools")} for row in rows[:size]
    ]


TEXTS_WITH_TOOLS = [{**row, "tools": [i]} for i, row in enumerate(TEXTS)]


def test_lines_that_are_blank_are_no_rows(nothing_held, tmp_path):
    text = b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b"}\r\n \t'
    text += b" " * 9000 + b'\n\x0b\n {"prompt": "c"}\n\n '
    (tmp_path / "p.jsonl").write_bytes(text + b"\n" * 600)
    source = open_source(FileSourceConfig(type="jsonl", path=str(tmp_path / "p.jsonl")))
    assert [row["prompt"] for row in source.rows] == ["a", "b", "c"]
    assert [source.where(i).rpartition(" ")[2] for i in range(3)] == ["1", "4", "7"]


def test_a_column_to_drop_may_come_late_in_rows_that_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "FIRST", 8)
    jsonl(tmp_path / "p.jsonl", [*TEXTS, {"prompt": "a", "late": 1}])
    config = FileSourceConfig(type="jsonl", path=str(tmp_path / "p.jsonl"), drop_columns=("late",))
    assert open_source(config).rows[300] == {"prompt": "a"}


def test_a_cell_that_nobody_reads_is_not_read(nothing_held, tmp_path, tok):
    config = parquet(tmp_path / "p.parquet", [{**row, "cases": "x" * 100} for row in TEXTS])
    prompts = PromptStream((config,), tok, max_prompt_tokens=50)
    prompts.look_at_rest()
    rows = prompts._parts[0].source.rows
    assert {name for row in rows._made.values() for name in row._read} == {"prompt"}


# ---- the same stream ----


@pytest.mark.parametrize("form", ["lines", "parquet", "gzip"])
def test_the_stream_is_that_of_a_held_source(nothing_held, tmp_path, monkeypatch, tok, form):
    """Where no row is too long: also of a run that an older rondo began."""
    configs = (FORMS[form](tmp_path / "a", TEXTS), FORMS[form](tmp_path / "b", TEXTS[:100]))

    def prompts(seed, seqs):
        made_ = PromptStream(configs, tok, max_prompt_tokens=50, seed=seed)
        return [(p.seq, p.prompt_id, p.token_ids.tolist(), dict(p.fields)) for p in map(made_.prompt, seqs)]

    order = [*range(900), 3, 899, 5000, 64, 63]
    large = prompts(3, order)
    assert prompts(3, order[::-1]) == large[::-1]
    monkeypatch.setattr(stream, "WHOLE", 1000)
    assert prompts(3, order) == large
    assert prompts(4, order) != large


def conversation(i: int) -> dict[str, object]:
    return {"prompt": f"{i} apples", "response": f"{i + 1} apples"}


def pair(i: int) -> dict[str, object]:
    return {
        "prompt": f"{i} apples",
        "chosen": "1",
        "rejected": "2",
        "chosen_safe": True,
        "rejected_safe": False,
    }


@pytest.mark.parametrize(("kind", "row"), [(ConversationStream, conversation), (PairStream, pair)])
def test_batches_are_those_of_a_held_source(nothing_held, tmp_path, monkeypatch, tok, kind, row):
    config = jsonl(tmp_path / "p", [row(i) for i in range(200)])
    large = kind((config,), tok, max_prompt_tokens=50).batch(range(450))
    monkeypatch.setattr(stream, "WHOLE", 1000)
    assert kind((config,), tok, max_prompt_tokens=50).batch(range(450)) == large
    assert ("safe" in large.columns) == (kind is PairStream)


def test_a_pair_that_does_not_say_what_the_first_one_says(nothing_held, tmp_path, tok):
    rows = [pair(i) for i in range(100)]
    del rows[70]["chosen_safe"], rows[70]["rejected_safe"]
    pairs = PairStream((jsonl(tmp_path / "p", rows),), tok, max_prompt_tokens=50, shuffle=False)
    assert pairs.has_safe
    pairs.batch(range(70))
    with pytest.raises(DataError, match=r"line 71\): has no chosen_safe and"):
        pairs.batch(range(70, 71))


# ---- rows that are too long ----


LONG = {7, 8, 150, 299}


@pytest.fixture
def some_long(tmp_path):
    rows = [{"prompt": "apples " * (30 if i in LONG else 1) + str(i)} for i in range(300)]
    return jsonl(tmp_path / "p.jsonl", rows)


def test_another_row_takes_the_place_of_one_that_is_too_long(nothing_held, some_long, tok):
    prompts = PromptStream((some_long,), tok, max_prompt_tokens=20, seed=1)
    assert prompts.rows_per_epoch == 300
    ids = [prompts.prompt(seq).prompt_id for seq in range(600)]
    assert len(set(ids)) == 600
    drawn_in: list[dict[int, int]] = []
    for epoch in range(2):
        rows = [one.split("/")[2] for one in ids if one.startswith(f"p/{epoch}/")]
        drawn = {int(row.split(".")[1]): int(row.split(".")[0]) for row in rows if "." in row}
        assert set(drawn) == LONG
        assert not LONG & set(drawn.values())
        assert sorted(int(row) for row in rows if "." not in row) == sorted({*range(300)} - LONG)
        drawn_in.append(drawn)
    assert drawn_in[0] != drawn_in[1]
    again = PromptStream((some_long,), tok, max_prompt_tokens=20, seed=1)
    assert [again.prompt(seq).prompt_id for seq in reversed(range(600))] == ids[::-1]
    again.look_at_rest()  # what is known of the rows changes nothing
    cached = PromptStream((some_long,), tok, max_prompt_tokens=20, seed=1)
    assert [cached.prompt(seq).prompt_id for seq in range(600)] == ids


def test_without_shuffling_it_is_the_next_one(nothing_held, some_long, tok):
    prompts = PromptStream((some_long,), tok, max_prompt_tokens=20, shuffle=False)
    ids = [prompts.prompt(seq).prompt_id for seq in range(300)]
    assert [ids[i] for i in (6, 7, 8, 9, 150, 299)] == [
        "p/0/6",
        "p/0/9.7",
        "p/0/9.8",
        "p/0/9",
        "p/0/151.150",
        "p/0/0.299",
    ]


def test_those_dropped_are_counted_once_all_were_looked_at(nothing_held, some_long, tok, caplog):
    prompts = PromptStream((some_long,), tok, max_prompt_tokens=20)
    assert prompts.dropped == {"p": 1}  # of the first eight
    with caplog.at_level(logging.WARNING):
        prompts.look_at_rest()
    assert prompts.dropped == {"p": 4}
    assert "dropped 4 of 300 rows" in caplog.text


def test_every_row_is_too_long(nothing_held, tmp_path, tok):
    config = jsonl(tmp_path / "p", [{"prompt": "apples " * 30}] * 40)
    prompts = PromptStream((config,), tok, max_prompt_tokens=20)
    with pytest.raises(DataError, match="of 40 rows that were drawn"):
        prompts.prompt(0)
    with pytest.raises(DataError, match="every one of its 40 rows"):
        prompts.look_at_rest()


# ---- broken rows ----

BROKEN = {
    b'{"prompt": \n': r"p\.jsonl, line 201: broken JSON",
    b'{"prompt": ""}\n': r"p\.jsonl, line 201\): the prompt .* is empty",
    b'{"prompt": "a", "image": "x"}\n': r"p\.jsonl, line 201\): column 'image' holds",
    b'{"prompt": "\xff"}\n': r"p\.jsonl, line 201: not UTF-8",
    b'["a"]\n': r"p\.jsonl, line 201: a row must be an object",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_row_is_named_by_whoever_comes_to_it(nothing_held, tmp_path, tok, line):
    path = tmp_path / "p.jsonl"
    path.write_bytes(lines(TEXTS[:200]) + line + lines(TEXTS[200:]))
    config = FileSourceConfig(type="jsonl", path=str(path))
    prompts = PromptStream((config,), tok, max_prompt_tokens=50, shuffle=False)
    assert prompts.prompt(100).prompt_id == "p/0/100"
    with pytest.raises(DataError, match=BROKEN[line]):
        prompts.prompt(200)
    with pytest.raises(DataError, match=BROKEN[line]):
        prompts.look_at_rest()


def test_a_broken_row_found_beside_stops_at_the_next_row(nothing_held, tmp_path, tok, caplog):
    path = tmp_path / "p.jsonl"
    path.write_bytes(lines(TEXTS[:200]) + b"{\n" + lines(TEXTS[200:]))
    config = FileSourceConfig(type="jsonl", path=str(path))
    prompts = PromptStream((config,), tok, max_prompt_tokens=50, shuffle=False)
    with caplog.at_level(logging.WARNING), prompts.looked_at():
        ends("rondo-look-at-rows")
        with pytest.raises(DataError, match=r"line 201: broken JSON"):
            prompts.prompt(0)
    assert "line 201: broken JSON" in caplog.text


def ends(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)
            assert not thread.is_alive()


def test_what_else_is_checked_is_checked_of_every_row(nothing_held, tmp_path, tok):
    def check(source, row):
        if source.rows[row]["answer"] == 250:
            raise source.error(row, "is the one")

    config = jsonl(tmp_path / "p.jsonl", TEXTS)
    prompts = PromptStream((config,), tok, max_prompt_tokens=50, also=RowCheck(check, "not 250"))
    with pytest.raises(DataError, match=r"line 251\): is the one"):
        prompts.look_at_rest()


def test_a_file_that_changes_meanwhile_ends_the_run(nothing_held, tmp_path, tok):
    path = tmp_path / "p.jsonl"
    prompts = PromptStream((jsonl(path, TEXTS),), tok, max_prompt_tokens=50, shuffle=False)
    with path.open("ab") as file:
        file.write(b" ")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"p\.jsonl was changed while"):
        prompts.prompt(200)


# ---- what is kept ----


def counted(monkeypatch, tok) -> list[int]:
    """Returns a list that gets the number of rows of each call of the encoder."""
    calls: list[int] = []
    encode = PromptStream.encoder.__call__

    def counting(self, source, rows):
        calls.append(len(rows))
        return encode(self, source, rows)

    monkeypatch.setattr(PromptStream.encoder, "__call__", counting)
    return calls


def test_rows_that_were_looked_at_are_not_looked_at_again(nothing_held, tmp_path, tok, monkeypatch):
    calls = counted(monkeypatch, tok)
    config = jsonl(tmp_path / "p.jsonl", TEXTS)

    def looked_at(**changes):
        calls.clear()
        PromptStream((config,), tok, **{"max_prompt_tokens": 200, **changes}).look_at_rest()
        return sum(calls)

    assert looked_at() == 300
    assert looked_at() == 0
    assert looked_at(max_prompt_tokens=199) == 300
    assert looked_at(overlong="error") == 300
    assert looked_at(tools=[{"type": "function", "function": {"name": "f"}}]) == 300
    assert looked_at(also=RowCheck(lambda source, row: None, "a")) == 300
    assert looked_at(seed=5) == 0  # in whichever order
    tok.chat_template += "{# another #}"
    try:
        assert looked_at() == 300
    finally:
        tok.chat_template = tok.chat_template.removesuffix("{# another #}")
    os.utime(tmp_path / "p.jsonl", ns=(1, 1))
    assert looked_at() == 300
    monkeypatch.setenv("RONDO_CACHE", "")
    assert looked_at() == looked_at() == 300


def test_a_look_that_was_ended_goes_on_where_it_was(nothing_held, tmp_path, tok, monkeypatch):
    calls = counted(monkeypatch, tok)
    config = jsonl(tmp_path / "p.jsonl", TEXTS)
    monkeypatch.setattr("rondo.data.on_demand._SECONDS", 0.0)

    class EndedError(Exception): ...

    def look(so_far: str) -> None:
        if sum(calls) > 150:
            raise EndedError

    with pytest.raises(EndedError), looking(look):
        PromptStream((config,), tok, max_prompt_tokens=50).look_at_rest()
    done = sum(calls)
    calls.clear()
    PromptStream((config,), tok, max_prompt_tokens=50).look_at_rest()
    assert 300 - done <= sum(calls) <= 300 - done + 64  # a chunk may not have been written


@pytest.mark.parametrize("form", ["parquet", "gzip", "url"])
def test_a_file_is_made_into_another_once(nothing_held, tmp_path, form, monkeypatch):
    config = FORMS[form](tmp_path / "rows", TEXTS)
    first = [dict(row) for row in open_source(config).rows]
    kept = {path.name: path.stat().st_mtime_ns for path in nothing_held.iterdir()}
    assert kept
    assert [dict(row) for row in open_source(config).rows] == first
    assert {path.name: path.stat().st_mtime_ns for path in nothing_held.iterdir()} == kept
    FORMS[form](tmp_path / "rows", TEXTS[::-1])
    if form != "url":
        os.utime(tmp_path / "rows", ns=(5, 5))
    assert [dict(row) for row in open_source(config).rows] == first[::-1]
    assert len(list(nothing_held.iterdir())) == len(kept)  # in place of what was made of the earlier one
    monkeypatch.setenv("RONDO_CACHE", "")  # nothing is kept, and it is read all the same
    assert [dict(row) for row in open_source(config).rows] == first[::-1]


def test_one_that_is_broken_leaves_nothing_in_the_cache(nothing_held, tmp_path):
    config = parquet(tmp_path / "p.parquet", TEXTS)
    whole = (tmp_path / "p.parquet").read_bytes()
    (tmp_path / "p.parquet").write_bytes(whole[:200] + bytes(400) + whole[600:])
    with pytest.raises(DataError, match=r"p\.parquet cannot be read as Parquet"):
        list(open_source(config).rows[3].items())
    assert list(nothing_held.iterdir()) == []
    packed = gzip.compress(lines(TEXTS))
    (tmp_path / "p.gz").write_bytes(packed[:-20])
    with pytest.raises(DataError, match=r"p\.gz cannot be read"):
        open_source(FileSourceConfig(type="jsonl", path=str(tmp_path / "p.gz")))
    assert list(nothing_held.iterdir()) == []


# ---- several files ----


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    (folder / "inner").mkdir(parents=True)
    for name, rows in (("b.jsonl", TEXTS[2:4]), ("a.jsonl", TEXTS[:2]), ("inner/c.json", TEXTS[4:5])):
        jsonl(folder / name, rows)
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[5:7])))
    (folder / "README.md").write_text("no rows")
    (folder / ".hidden.jsonl").write_text("no rows")
    (folder / "_SUCCESS.json").write_text("no rows")
    return folder


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("paths", "answers", "last"),
    [
        ("", [0, 1, 2, 3, 5, 6, 4], "inner/c.json, line 1"),
        ("*.jsonl", [0, 1, 2, 3], "b.jsonl, line 2"),
        ("**/[a-d]*.json*", [0, 1, 2, 3, 5, 6, 4], "inner/c.json, line 1"),
        ("[b].jsonl", [2, 3], "b.jsonl, line 2"),
        (("b.jsonl", "inner", "a.jsonl"), [2, 3, 4, 0, 1], "a.jsonl, line 2"),
    ],
)
def test_files_of_a_folder_a_pattern_and_a_list(request, shards, large, paths, answers, last):
    if large:
        request.getfixturevalue("nothing_held")
    path = f"{shards}/{paths}" if isinstance(paths, str) else tuple(f"{shards}/{one}" for one in paths)
    config = FileSourceConfig(type="jsonl", path=path, name="s" if isinstance(path, tuple) else None)
    source = open_source(config)
    assert [row["answer"] for row in source.rows] == answers
    assert source.where(len(answers) - 1) == f"{shards}/{last}"
    assert source.name == ("shards" if isinstance(path, str) else "s")


def test_parquet_files_of_a_folder_may_differ_in_columns_and_their_order(nothing_held, tmp_path):
    parquet(tmp_path / "a.parquet", [{"prompt": "a", "answer": 1}])
    parquet(tmp_path / "b.parquet", [{"more": 3, "answer": 2, "prompt": "b"}])
    config = FileSourceConfig(type="parquet", path=str(tmp_path), name="p")
    assert [dict(row) for row in open_source(config).rows] == [
        {"prompt": "a", "answer": 1},
        {"more": 3, "answer": 2, "prompt": "b"},
    ]


def test_files_at_a_url(tmp_path):
    for name, rows in (("b.jsonl", TEXTS[2:4]), ("a.jsonl", TEXTS[:2]), ("in/c.jsonl", TEXTS[4:5])):
        with fsspec.open(f"memory://many/{name}", "wb") as file:
            file.write(lines(rows))
    for path, answers in (("", [0, 1, 2, 3, 4]), ("/*.jsonl", [0, 1, 2, 3]), ("/in", [4])):
        config = FileSourceConfig(type="jsonl", path=f"memory://many{path}", name="m")
        source = open_source(config)
        assert [row["answer"] for row in source.rows] == answers
    assert source.where(0) == "memory://many/in/c.jsonl, line 1"


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("shards/*.parquet", "no file fits .*shards/"),
        ("shards/inner", r"inner has no file that ends as parquet"),
        (("a.parquet", "a.parquet"), "a.parquet is there twice"),
        ("memory://none/*.parquet", r"memory://none/\*.parquet: no file fits"),
    ],
)
def test_paths_without_files(shards, monkeypatch, path, wrong):
    monkeypatch.chdir(shards.parent)
    parquet(Path("a.parquet"), TEXTS)
    with pytest.raises(ConfigError, match=wrong):
        open_source(FileSourceConfig(type="parquet", path=path, name="p"))


def test_a_source_of_several_paths_has_a_name_of_its_own():
    with pytest.raises(ConfigError, match="of several paths needs a name"):
        open_source(FileSourceConfig(type="jsonl", path=("a", "b")))


def test_a_thousand_shards_are_one_source(nothing_held, tmp_path, tok):
    """More files than a process may hold open."""
    for i in range(1100):
        (tmp_path / f"s{i:04d}.jsonl").write_bytes(lines([{"prompt": f"{i} apples"}]))
    config = FileSourceConfig(type="jsonl", path=f"{tmp_path}/s*.jsonl", name="s")
    prompts = PromptStream((config,), tok, max_prompt_tokens=50)
    rows = [int(prompts.prompt(seq).prompt_id.split("/")[2]) for seq in range(1100)]
    assert sorted(rows) == list(range(1100))


# ---- functions, and evaluation ----


def test_a_function_of_many_rows(nothing_held, tok, monkeypatch):
    monkeypatch.setattr(f"{__name__}.MADE", TEXTS)
    config = TaskSourceConfig(type="function", task=f"{__name__}.made", name="p")
    prompts = PromptStream((config,), tok, max_prompt_tokens=50)
    prompts.look_at_rest()
    assert not nothing_held.exists()  # nothing says that it makes the same rows again
    assert {prompts.prompt(seq).fields["answer"] for seq in range(300)} == set(range(300))


def test_evaluation_reads_no_more_than_its_limit(nothing_held, tmp_path, tok):
    path = tmp_path / "p.jsonl"
    path.write_bytes(lines(TEXTS) + b'{"prompt": 5}\n' + lines(TEXTS))
    config = FileSourceConfig(type="jsonl", path=str(path))
    few = eval_prompts((config,), tok, max_prompt_tokens=50, limit=3)
    assert [prompt.prompt_id for prompt in few] == [f"eval:p/0/{i}" for i in range(3)]
    with pytest.raises(DataError, match="line 301"):
        eval_prompts((config,), tok, max_prompt_tokens=50)


def test_what_is_held_out_is_read_whole(nothing_held, tmp_path, tok):
    rows = [conversation(i) for i in range(60)]
    rows[33]["prompt"] = "apples " * 30
    config = jsonl(tmp_path / "p", rows)
    held_out = ConversationStream((config,), tok, max_prompt_tokens=20, shuffle=False, whole=True)
    assert held_out.rows_per_epoch == 59
    assert np.array_equal(held_out.row(33)[0], held_out.row(33 + 59)[0])
