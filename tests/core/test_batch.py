"""Batch and BatchRef against a model in plain Python: a list of rows, each a dict of values and lists."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.core.arrays import aligned_arrays
from rondo.core.batch import ROW_ID, Batch, BatchRef, Block, ragged_array, ragged_rows, wide_array
from rondo.core.errors import DataError
from tests.messages import full_text

Row = dict[str, Any]
FAST = settings(max_examples=25, deadline=None)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=4)
NAMES = ("reward", "name", "tokens", "log_probs")


@st.composite
def rows_of(draw: st.DrawFn, max_rows: int = 8) -> list[Row]:
    n = draw(st.integers(0, max_rows))
    ids = draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n, unique=True))
    return [
        {
            ROW_ID: row_id,
            "reward": draw(st.floats(width=32, allow_nan=False)),
            "name": draw(st.text(max_size=3)),
            "tokens": draw(TOKENS),
            "log_probs": draw(FLOATS),
        }
        for row_id in ids
    ]


def batch_of(rows: list[Row]) -> Batch:
    return Batch.of(
        {
            ROW_ID: np.array([row[ROW_ID] for row in rows], np.int64),
            "reward": np.array([row["reward"] for row in rows], np.float32),
            "name": pa.array([row["name"] for row in rows], pa.string()),
            "tokens": ragged_rows([np.array(row["tokens"], np.int64) for row in rows], np.int32),
            "log_probs": ragged_rows([np.array(row["log_probs"]) for row in rows], np.float32),
        }
    )


def rows_in(batch: Batch) -> list[Row]:
    columns: dict[str, list[Any]] = {}
    for name in batch.columns:
        ragged = name in ("tokens", "log_probs")
        columns[name] = [r.tolist() for r in batch.rows(name)] if ragged else batch.scalars(name).tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def assert_packed(batch: Batch) -> None:
    """Every per-token column has offsets from 0, and values exactly as long as they say."""
    for name in ("tokens", "log_probs"):
        values, bounds = batch.ragged(name)
        assert bounds.dtype == torch.int32
        assert (int(bounds[0]), int(bounds[-1])) == (0, len(values))
        assert len(bounds) == len(batch) + 1


@pytest.mark.slow
@FAST
@given(rows_of())
def test_rows_come_back(rows: list[Row]) -> None:
    batch = batch_of(rows)
    assert len(batch) == len(rows)
    assert rows_in(batch) == rows
    assert batch.lengths("tokens").tolist() == [len(row["tokens"]) for row in rows]
    assert_packed(batch)


@FAST
@given(rows_of(), st.data())
def test_take_is_list_indexing(rows: list[Row], data: st.DataObject) -> None:
    where = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    taken = batch_of(rows).take(where)
    assert rows_in(taken) == [rows[i] for i in where]
    assert_packed(taken)


@FAST
@given(st.lists(rows_of(max_rows=4), min_size=1, max_size=4))
def test_concat_is_list_addition(parts: list[list[Row]]) -> None:
    joined = Batch.concat([batch_of(rows) for rows in parts])
    assert rows_in(joined) == [row for rows in parts for row in rows]
    assert_packed(joined)


@FAST
@given(rows_of(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_taking_parts_then_concat_gives_the_rows_in_the_order_of_the_parts(
    rows: list[Row], n: int, random: Any
) -> None:
    owner = [random.randrange(n) for _ in rows]
    parts = [np.array([i for i, at in enumerate(owner) if at == part], np.int64) for part in range(n)]
    pieces = [batch_of(rows).take(part) for part in parts]
    assert [rows_in(piece) for piece in pieces] == [[rows[i] for i in part] for part in parts]
    back = Batch.concat(pieces).take(np.argsort(np.concatenate(parts)))
    assert back == batch_of(rows)


@FAST
@given(rows_of(), st.lists(st.sampled_from(NAMES), unique=True))
def test_columns(rows: list[Row], names: list[str]) -> None:
    batch = batch_of(rows)
    chosen = batch.select([ROW_ID, *names])
    assert chosen.columns == [ROW_ID, *names]
    rest = batch.without(*names)
    assert rest.columns == [name for name in batch.columns if name not in names]
    assert rest.with_columns(chosen.without(ROW_ID)).select(batch.columns) == batch
    doubled = batch.with_columns({"reward": batch.scalars("reward") * 2}, replace=True)
    assert doubled.columns == batch.columns
    assert doubled.scalars("reward").tolist() == (batch.scalars("reward") * 2).tolist()


@FAST
@given(rows_of())
def test_padded_and_ragged_agree(rows: list[Row]) -> None:
    batch = batch_of(rows)
    padded = batch.padded("log_probs", fill=7)
    assert padded.shape == (len(rows), max((len(row["log_probs"]) for row in rows), default=0))
    for i, row in enumerate(rows):
        n = len(row["log_probs"])
        assert padded[i, :n].tolist() == row["log_probs"]
        assert (padded[i, n:] == 7).all()


@FAST
@given(rows_of())
def test_ragged_array_is_the_inverse_of_ragged(rows: list[Row]) -> None:
    batch = batch_of(rows)
    assert ragged_array(*batch.ragged("tokens")).equals(batch.array("tokens"))


@settings(max_examples=20, deadline=None)
@given(rows=rows_of())
def test_parquet(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    batch = batch_of(rows)
    batch.write_parquet(path)
    assert Batch.read_parquet(path) == batch
    pq.write_table(batch.table, path, row_group_size=3)  # as other writers do it
    assert Batch.read_parquet(path) == batch
    assert_packed(Batch.read_parquet(path))


@FAST
@given(rows_of())
def test_pickle(rows: list[Row]) -> None:
    assert pickle.loads(pickle.dumps(batch_of(rows), protocol=5)) == batch_of(rows)


def test_ragged_does_not_copy() -> None:
    values, offsets = np.arange(1000, dtype=np.int32), np.arange(0, 1001, 10, dtype=np.int32)
    batch = Batch.of({"tokens": ragged_array(values, offsets)})
    tensor, bounds = batch.ragged("tokens")
    assert tensor.data_ptr() == values.ctypes.data
    assert bounds.data_ptr() == offsets.ctypes.data
    assert batch.rows("tokens")[3].ctypes.data == values[30:].ctypes.data
    assert (
        batch.select(["tokens"]).with_columns({"x": offsets[1:]}).ragged("tokens")[0].data_ptr()
        == tensor.data_ptr()
    )


def test_reading_a_whole_block_in_its_order_does_not_copy() -> None:
    batch = two_rows()
    ref = BatchRef.of(batch, [])
    assert fetch(ref).ragged("tokens")[0].data_ptr() == batch.ragged("tokens")[0].data_ptr()
    assert fetch(ref.take([1, 0])).ragged("tokens")[0].data_ptr() != batch.ragged("tokens")[0].data_ptr()


def test_pickling_out_of_band_copies_nothing() -> None:
    buffers: list[pickle.PickleBuffer] = []
    values = np.arange(10**6, dtype=np.int32)
    batch = Batch.of({"tokens": ragged_array(values, np.array([0, 10**6], np.int32))})
    frame = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(frame) < 2000
    back = pickle.loads(frame, buffers=buffers)
    assert back.ragged("tokens")[0].data_ptr() == values.ctypes.data


@pytest.mark.parametrize("column", ["id", "text", "tokens", "mask"])
def test_a_part_does_not_drag_its_parent_along(column: str) -> None:
    n = 20_000
    whole = pa.table(
        {
            "id": np.arange(n),
            "text": [f"row {i}" for i in range(n)],
            "tokens": ragged_rows([np.arange(4)] * n, np.int32),
            "mask": ragged_rows([np.ones(4)] * n, np.uint8),
        }
    )
    part = Batch.of({column: whole.column(column).slice(500, 3)})
    assert part.table.to_pylist() == whole.select([column]).slice(500, 3).to_pylist()
    assert len(pickle.dumps(part)) < 1500
    assert len(pickle.dumps(Batch.of({column: whole.column(column)}).take([5, 6]))) < 1500


def test_masks_are_bytes() -> None:
    for column in (
        np.array([True, False]),
        torch.tensor([True, False]),
        pa.array([True, False]),
        [True, False],
    ):
        assert Batch.of({"mask": column}).scalars("mask").dtype == np.uint8
    ragged = Batch.of({"mask": pa.array([[True], [False, True]])})
    assert ragged.ragged("mask")[0].tolist() == [1, 0, 1]
    assert ragged_array(np.array([True, False]), np.array([0, 2])).type == pa.list_(pa.uint8())


def test_nan_stays_and_null_becomes_nan() -> None:
    batch = Batch.of({"score": pa.array([1.0, None, float("nan")])})
    assert np.isnan(batch.scalars("score")).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda b: b.array("absent"),
            full_text("no column 'absent'; the batch has row_id"),
        ),
        (lambda b: b.select(["absent"]), "no column 'absent'"),
        (lambda b: b.scalars("tokens"), "'tokens' is per token"),
        (lambda b: b.ragged("reward"), "'reward' has type float"),
        (lambda b: b.with_columns({"reward": [1.0, 2.0]}), "'reward' is there already"),
        (lambda b: b.with_columns({"new": [1.0]}), "'new' has 1 rows, the batch has 2"),
        (lambda b: b.take([0, 2]), "row 2 asked for, the batch has 2 rows"),
        (lambda b: b.take([-1]), "row -1 asked for"),
        (lambda b: b.aligned("tokens", "log_probs"), "'tokens' is not aligned with 'log_probs'"),
        (lambda b: Batch.concat([]), "at least one batch"),
        (lambda b: Batch.concat([b, b.without("name")]), "name are not in all of the batches"),
        (
            lambda b: Batch.concat([b, b.with_columns({"reward": np.arange(2)}, replace=True)]),
            full_text("column 'reward' has several types: float"),
        ),
        (lambda b: Batch.of({"a": [1], "b": [1, 2]}), "columns differ in length"),
        (lambda b: Batch.of({"a": np.ones((2, 2))}), "2 dimensions"),
        (lambda b: ragged_array(np.arange(3), np.array([0, 2])), "offsets must rise from 0 to 3"),
        (lambda b: ragged_array(np.arange(3), np.array([0, 2, 1, 3])), "offsets must rise from 0 to 3"),
        (lambda b: Batch.read_parquet("/no/such/file.parquet"), r"/no/such/file.parquet: cannot be read"),
    ],
)
def test_errors_name_the_column(broken: Any, message: str) -> None:
    rows = [
        {ROW_ID: 1, "reward": 0.5, "name": "a", "tokens": [1], "log_probs": []},
        {ROW_ID: 2, "reward": 1.5, "name": "b", "tokens": [], "log_probs": [0.5]},
    ]
    with pytest.raises(DataError, match=message):
        broken(batch_of(rows))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"x\.parquet: cannot be read as Parquet"):
        Batch.read_parquet(tmp_path / "x.parquet")


def test_a_file_whose_column_names_repeat(tmp_path: Path) -> None:
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: column names repeat: a, a"):
        Batch.read_parquet(tmp_path / "x.parquet")


# ---- BatchRef: the model is the same list of rows, whatever was cut, joined or written ----


def fetch(ref: BatchRef, columns: list[str] | None = None) -> Batch:
    return asyncio.run(ref.fetch(columns))


@st.composite
def refs(draw: st.DrawFn) -> tuple[BatchRef, list[Row]]:
    """A ref that was put together from several blocks, shuffled, cut and joined; and the rows it must stand
    for."""
    rows = draw(rows_of(max_rows=10))
    bounds = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    cuts = [rows[a:b] for a, b in zip([0, *bounds], [*bounds, len(rows)], strict=True)]
    ref = BatchRef.concat([BatchRef.of(batch_of(part), ["reward"]) for part in cuts])
    order = draw(st.permutations(range(len(rows))))
    where = list(order)[: draw(st.integers(0, len(rows)))]
    ref, rows = ref.take(where), [rows[i] for i in where]
    half = draw(st.integers(0, len(rows)))
    left, right = ref.take(np.arange(half)), ref.take(np.arange(half, len(rows)))
    return BatchRef.concat([right, left]), rows[half:] + rows[:half]


@FAST
@given(refs())
def test_fetch_returns_the_rows_in_the_order_of_the_index(drawn: tuple[BatchRef, list[Row]]) -> None:
    ref, rows = drawn
    assert rows_in(fetch(ref, list(NAMES)).select([ROW_ID, *NAMES])) == rows
    assert ref.index.scalars(ROW_ID).tolist() == [row[ROW_ID] for row in rows]
    assert set(fetch(ref).columns) == set(ref.columns) == {ROW_ID, *NAMES}
    assert_packed(fetch(ref))


@FAST
@given(refs(), st.data())
def test_shards_hold_exactly_their_rows_and_columns(
    drawn: tuple[BatchRef, list[Row]], data: st.DataObject
) -> None:
    ref, rows = drawn
    columns = data.draw(st.lists(st.sampled_from(NAMES), unique=True))
    order = list(data.draw(st.permutations(range(len(rows)))))
    ends = sorted(data.draw(st.lists(st.integers(0, len(rows)), min_size=1, max_size=4)))
    parts = [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]  # some are empty
    shards = ref.shards(columns, [np.array(part, np.int64) for part in parts])
    assert len(shards) == len(parts)
    for shard, where in zip(shards, parts, strict=True):
        batch = shard.assemble(shard.handles)
        assert set(batch.columns) == {ROW_ID, *columns}
        assert rows_in(batch.select([ROW_ID, *columns])) == [
            {name: rows[i][name] for name in (ROW_ID, *columns)} for i in where
        ]
        assert all(len(part.row) == len(part.block) == len(where) for part in shard.parts)
        assert len(pickle.dumps(shard.index)) < 1500


@FAST
@given(refs(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_split_write_and_collect_is_the_identity(
    drawn: tuple[BatchRef, list[Row]], random: Any, n: int
) -> None:
    """What a worker group does: cut rows, compute per part in any order, join the new columns by row id."""
    ref, rows = drawn
    owner = np.array([random.randrange(n) for _ in rows], np.int64)
    written = []
    for part in range(n):
        (shard,) = ref.shards(["tokens"], [np.flatnonzero(owner == part)])
        batch = shard.assemble(shard.handles)
        order = list(range(len(batch)))
        random.shuffle(order)
        batch = batch.take(order)
        doubled = ragged_rows([row.astype(np.int64) * 2 for row in batch.rows("tokens")], np.int64)
        if len(batch) or (n == 1):
            written.append(Block(Batch.of({"doubled": doubled}), ("doubled",), batch.scalars(ROW_ID)))
    grown = ref.with_blocks(written)
    if not rows and n > 1:
        return
    assert "doubled" in grown.columns
    assert [row.tolist() for row in fetch(grown).rows("doubled")] == [
        [2 * t for t in r["tokens"]] for r in rows
    ]
    reverse = grown.take(np.arange(len(rows))[::-1])
    assert [row.tolist() for row in fetch(reverse, ["doubled"]).rows("doubled")] == [
        [2 * t for t in r["tokens"]] for r in reversed(rows)
    ]


@FAST
@given(refs(), st.data())
def test_replaced_columns_stay_replaced_for_their_rows_only(
    drawn: tuple[BatchRef, list[Row]], data: st.DataObject
) -> None:
    """Replace a column in some rows, join them with the others: each row has its own value, once."""
    ref, rows = drawn
    picked = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    inside = np.flatnonzero(np.array(picked, bool)).tolist()
    outside = [i for i in range(len(rows)) if i not in inside]
    part, rest = ref.take(inside), ref.take(outside)
    new = Block(
        Batch.of({"tokens": ragged_rows([np.array([5])] * len(inside), np.int32)}),
        ("tokens",),
        part.index.scalars(ROW_ID),
    )
    joined = BatchRef.concat([part.with_blocks([new], replace=True), rest])
    expected = [{**rows[i], "tokens": [5]} for i in inside] + [rows[i] for i in outside]
    assert rows_in(fetch(joined, list(NAMES)).select([ROW_ID, *NAMES])) == expected
    again = BatchRef.concat([joined.take(np.arange(1, len(rows))), joined.take(np.arange(min(1, len(rows))))])
    assert rows_in(fetch(again, list(NAMES)).select([ROW_ID, *NAMES])) == expected[1:] + expected[:1]


def two_rows(first: int = 0) -> Batch:
    return Batch.of(
        {ROW_ID: np.array([first, first + 1]), "tokens": ragged_rows([np.arange(2)] * 2, np.int32)}
    )


def test_taking_and_joining_move_no_tokens() -> None:
    ref = BatchRef.of(two_rows(), [])
    again = BatchRef.concat([ref.take([1]), ref.take([0])])
    assert len(again.blocks) == 1
    assert again.blocks[0].handle is ref.blocks[0].handle


def test_blocks_of_rows_that_were_left_behind_are_let_go() -> None:
    both = BatchRef.concat([BatchRef.of(two_rows(), []), BatchRef.of(two_rows(10), [])])
    assert [block.row_ids.tolist() for block in both.take([2, 3]).blocks] == [[10, 11]]


def test_blocks_that_share_their_row_ids_are_both_kept() -> None:
    ids = np.array([0, 1])
    index = Batch.of({ROW_ID: ids})
    blocks = tuple(Block(Batch.of({name: np.ones(2)}), (name,), ids) for name in ("a", "b"))
    assert BatchRef.concat([BatchRef(index, blocks)]).columns == [ROW_ID, "a", "b"]


def test_empty_batches_keep_their_columns_and_types() -> None:
    empty = BatchRef.concat([BatchRef.of(two_rows(), []), BatchRef.of(two_rows(10), [])]).take([])
    batch = fetch(empty, ["tokens"])
    assert len(batch) == 0
    assert batch.array("tokens").type == pa.list_(pa.int32())
    assert fetch(BatchRef.concat([empty, BatchRef.of(two_rows(20), [])])).rows("tokens")[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda r: r.shard(["absent"]),
            full_text("column 'absent' is missing for 2 of 2"),
        ),
        (lambda r: r.with_index({"tokens": [1, 2]}), "columns tokens are there already"),
        (lambda r: r.with_blocks(BatchRef.of(two_rows(), []).blocks), "columns tokens are there already"),
        (lambda r: r.take([0, 0]), "row_id repeats"),
        (lambda r: BatchRef.concat([r, r]), "row_id repeats"),
        (lambda r: BatchRef.concat([]), "at least one BatchRef"),
    ],
)
def test_ref_errors(broken: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        broken(BatchRef.of(two_rows(), []))


def test_a_column_that_only_some_rows_have() -> None:
    left, right = BatchRef.of(two_rows(), []), BatchRef.of(two_rows(10), [])
    left = left.with_blocks([Block(Batch.of({"value": np.ones(2)}), ("value",), left.index.scalars(ROW_ID))])
    both = BatchRef.concat([left, right])
    assert "value" not in both.columns
    with pytest.raises(DataError, match=full_text("column 'value' is missing for 2 of 4")):
        both.shard(["value"])
    assert fetch(both.take([1, 0]), ["value"]).scalars("value").tolist() == [1, 1]


def test_blocks_of_different_types_are_an_error_that_names_the_column() -> None:
    ref = BatchRef.of(two_rows(), []).take([0, 1])
    ids = ref.index.scalars(ROW_ID)
    blocks = [
        Block(Batch.of({"value": np.ones(1, np.float32)}), ("value",), ids[:1]),
        Block(Batch.of({"value": np.ones(1, np.float64)}), ("value",), ids[1:]),
    ]
    with pytest.raises(DataError, match=full_text("column 'value' has several types: double")):
        fetch(ref.with_blocks(blocks))


def test_replacing_an_index_column_by_a_block_and_back() -> None:
    ref = BatchRef.of(two_rows(), []).with_index({"value": [1.0, 2.0]})
    block = Block(Batch.of({"value": np.array([3.0, 4.0])}), ("value",), ref.index.scalars(ROW_ID))
    moved = ref.with_blocks([block], replace=True)
    assert fetch(moved).scalars("value").tolist() == [3, 4]
    back = moved.with_index({"value": [5.0, 6.0]}, replace=True)
    assert back.columns == [ROW_ID, "value", "tokens"]
    assert fetch(back).scalars("value").tolist() == [5, 6]


# Wide columns: K numbers per token, as list<fixed_size_list<K>>.


def wide_batch(lengths: list[int], width: int) -> Batch:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = np.arange(bounds[-1] * width, dtype=np.int32).reshape(-1, width)
    return Batch.of(
        {
            ROW_ID: np.arange(len(lengths)) + 50,
            "tokens": ragged_array(np.arange(bounds[-1]), bounds),
            "ids": wide_array(values, bounds),
            "log_probs": wide_array(torch.from_numpy(values) / 7, bounds),
        }
    )


@FAST
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(1, 3), st.data())
def test_wide_columns_behave_like_per_token_ones(lengths: list[int], width: int, data: st.DataObject) -> None:
    batch = wide_batch(lengths, width)
    rows, whole = batch.rows("ids"), batch.ragged("ids")
    assert whole[0].shape == (sum(lengths), width)
    assert whole[0].dtype == torch.int32
    assert [row.shape for row in rows] == [(n, width) for n in lengths]
    assert np.concatenate([np.empty((0, width)), *rows]).ravel().tolist() == list(range(sum(lengths) * width))
    assert torch.equal(whole[1], batch.ragged("tokens")[1])
    assert batch.aligned("ids", "tokens") is batch
    assert batch.padded("ids", fill=-1).shape == (len(lengths), max(lengths, default=0), width)
    where = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6)) if lengths else []
    taken = batch.take(where)
    assert [row.tolist() for row in taken.rows("ids")] == [rows[i].tolist() for i in where]
    assert taken.array("log_probs").type == batch.array("log_probs").type == wide_type(pa.float32(), width)
    both = Batch.concat([taken, batch, batch.take([])])
    assert [row.tolist() for row in both.rows("ids")] == [rows[i].tolist() for i in where] + [
        row.tolist() for row in rows
    ]
    odd = np.arange(len(lengths)) % 2 == 1
    halves = [batch.take(np.flatnonzero(odd)), batch.take(np.flatnonzero(~odd))]
    assert Batch.concat(halves).take(np.argsort(np.concatenate([h.scalars(ROW_ID) for h in halves]))) == batch
    assert pickle.loads(pickle.dumps(taken)) == taken


def wide_type(item: pa.DataType, width: int) -> pa.DataType:
    return pa.list_(pa.list_(item, width))


@pytest.mark.parametrize("lengths", [[2, 0, 3], [0, 0], []])
def test_wide_columns_survive_parquet(lengths: list[int], tmp_path: Path) -> None:
    batch = wide_batch(lengths, 4)
    batch.write_parquet(tmp_path / "wide.parquet")
    assert Batch.read_parquet(tmp_path / "wide.parquet") == batch


def test_wide_columns_travel_by_reference() -> None:
    """Through an index, blocks of several writers, a take and a shard."""
    batch = wide_batch([2, 0, 3, 1], 3)
    ref = BatchRef.of(batch.select([ROW_ID, "tokens"]), [])
    for part in ([2, 0], [3, 1]):
        piece = batch.take(part)
        ref = ref.with_blocks(
            [Block(piece.select(["ids", "log_probs"]), ("ids", "log_probs"), piece.scalars(ROW_ID))]
        )
    assert asyncio.run(ref.fetch()).select(batch.columns) == batch
    picked = asyncio.run(ref.take([3, 2, 1]).fetch(["ids"]))
    assert picked == batch.take([3, 2, 1]).select([ROW_ID, "ids"])
    assert asyncio.run(ref.take([]).fetch(["ids"])).array("ids").type == wide_type(pa.int32(), 3)


def test_columns_of_the_same_lengths_are_those_that_are_made_alone() -> None:
    values = {"ids": np.arange(3, dtype=np.int32), "odds": np.array([0.5, 1.0, 2.0], np.float32)}
    offsets = np.array([0, 2, 2, 3], np.int32)
    made = aligned_arrays(values, offsets)
    assert made == {name: ragged_array(flat, offsets) for name, flat in values.items()}
    assert Batch.of(made).rows("odds")[2].tolist() == [2.0]
    with pytest.raises(DataError, match=r"to the columns' lengths .*end with 3"):
        aligned_arrays({**values, "odds": values["odds"][:2]}, offsets)


def test_wide_columns_need_two_dimensions_and_alignment() -> None:
    with pytest.raises(DataError, match=full_text("values [N, K] with K >= 1; got shape")):
        wide_array(np.zeros(4), np.array([0, 4]))
    with pytest.raises(DataError, match="offsets must rise from 0 to 4"):
        wide_array(np.zeros((4, 2)), np.array([0, 8]))
    batch = wide_batch([2, 1], 2).with_columns({"other": ragged_array(np.arange(3), np.array([0, 1, 3]))})
    with pytest.raises(DataError, match="'other' is not aligned with 'ids'"):
        batch.aligned("other", "ids")
    with pytest.raises(DataError, match="'ids' is per token"):
        batch.scalars("ids")


@pytest.mark.slow
def test_columns_are_made_read_and_taken_without_pandas() -> None:
    """Which pyarrow imports by itself, at half a second of every process's start."""
    program = """
import sys
import numpy as np
from rondo.core.batch import Batch, ragged_rows

batch = Batch.of({
    "row_id": np.arange(3),
    "reward": np.array([0.5, np.nan, 1.0], np.float32),
    "source": ["a", "", "π"],
    "response_ids": ragged_rows([[1], [], [2, 3]], np.int32),
})
taken = batch.take(np.array([2, 0]))
assert taken.scalars("source").tolist() == ["π", "a"]
assert taken.scalars("reward").tolist() == [1.0, 0.5]
assert [row.tolist() for row in taken.rows("response_ids")] == [[2, 3], [1]]
assert not {"pandas", "pyarrow.compute"} & sys.modules.keys(), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def summed() -> Batch:
    """One column of each kind."""
    ids, draw = [7, 3, 1 << 40, 5], np.random.default_rng(0)
    lengths = (2, 0, 3, 1)
    floats = [draw.normal(size=n).astype(np.float32) for n in lengths]
    return Batch.of(
        {
            ROW_ID: np.array(ids, np.int64),
            "reward": np.array([0.0, 1.5, -1.5, np.nan], np.float32),
            "loss_weight": np.array([0.1, 0.0, 0.2, 0.3]),
            "mini_batch": np.array([0, 1, 0, -1], np.int64),
            "source": ["a", "", "bcd", "é"],
            "response_ids": ragged_rows([np.arange(n) for n in lengths], np.int32),
            "response_mask": ragged_rows([np.ones(n) for n in lengths], np.uint8),
            "log_probs": ragged_rows(floats, np.float32),
            "topk": wide_array(np.arange(12, dtype=np.float32).reshape(6, 2), np.cumsum([0, *lengths])),
        }
    )


def test_sums_are_those_of_words_by_their_places() -> None:
    """(word + 1) · (2 · place + 1), in Python's integers; a row's places begin where its id says."""
    batch = summed()

    def start(row_id: int) -> int:
        mixed = (row_id + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        return mixed ^ (mixed >> 31)

    starts = [start(row_id) for row_id in batch.scalars(ROW_ID).tolist()]
    words = {
        "reward": [[0], [0x3FC00000], [0xBFC00000], [0x7FC00000]],
        "mini_batch": [[0], [1], [0], [2**64 - 1]],
        "source": [[*text.encode()] for text in ("a", "", "bcd", "é")],
        "response_ids": [[0, 1], [], [0, 1, 2], [0]],
    }
    by_hand = {
        name: sum(
            (word + 1) * (2 * ((begin + at) % 2**64) + 1)
            for begin, row in zip(starts, rows, strict=True)
            for at, word in enumerate(row)
        )
        % 2**64
        for name, rows in words.items()
    }
    assert batch.sums(words) == by_hand
    assert batch.take([]).sums(batch.columns) == dict.fromkeys(batch.columns, 0)


def test_sums_know_no_order_add_up_and_see_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = summed()
    whole = batch.sums(batch.columns)
    assert batch.take([2, 0, 3, 1]).sums(batch.columns) == whole
    parts = [batch.take(rows).sums(batch.columns) for rows in ([1, 3], [0, 2])]
    assert {name: sum(part[name] for part in parts) % 2**64 for name in whole} == whole
    monkeypatch.setattr("rondo.core.arrays._SLAB", 2)
    assert batch.sums(batch.columns) == whole
    for name in batch.columns:
        if name == ROW_ID:
            continue
        others = [batch.take([1, 0, 2, 3]).array(name)]  # two rows exchanged
        array = batch.array(name)
        if pa.types.is_list(array.type):
            values, offsets = (part.numpy() for part in batch.ragged(name))
            for bit in (0, 7):  # of the first byte of each word
                for at in range(len(values)):
                    raw = values.copy()
                    raw.reshape(-1).view(np.uint8)[at * raw[:1].nbytes] ^= 1 << bit
                    others.append(ragged_array(raw, offsets))
            if name == "response_mask":  # a token more, of 0
                others.append(ragged_array(np.append(values, np.uint8(0)), [*offsets[:-1], offsets[-1] + 1]))
                del others[0]  # but for lengths these rows are the same
                others.append(ragged_array(values, [0, 0, *offsets[2:]]))
        elif array.type == pa.string():
            others.append(pa.array(["a", "", "bcd", "e"]))
        else:
            raw = batch.scalars(name).copy()
            raw.view(np.uint8)[-1] ^= 128  # a sign
            others.append(pa.array(raw))
        for other in others:
            assert Batch.of({ROW_ID: batch.array(ROW_ID), name: other}).sums([name])[name] != whole[name], (
                name
            )
