"""The controller's state comes back exactly; incompatible settings are listed."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.checkpoint import (
    READER,
    Checkpoint,
    CheckpointStore,
    ControllerState,
    check_compatible,
    compatibility_record,
    load_compatibility,
    load_controller_state,
    load_rows,
    save_controller_state,
    taking_over,
)
from rondo.config.schema import Config, DataConfig, FileSourceConfig, ModelConfig, RolloutConfig
from rondo.core.batch import Batch, ragged_rows
from rondo.core.errors import CheckpointError, DataError


def group(seq: int) -> Batch:
    ids = ragged_rows([[1, 2, seq], []], np.int32)
    return Batch.of(
        {"row_id": np.array([2 * seq, 2 * seq + 1]), "response_ids": ids, "reward": np.array([0.1, np.nan])}
    )


def saved(folder: Path, state: ControllerState, record: dict[str, Any] = {}) -> Checkpoint:
    """A checkpoint of step 1 that holds this state only."""
    store = CheckpointStore(folder)
    with store.writing(1) as draft:
        save_controller_state(draft, state, record)
    return store.open(1)


def test_the_state_comes_back_exactly(tmp_path: Path) -> None:
    state = ControllerState(
        step=12,
        version=12,
        timers={"wall_seconds": 0.1 + 0.2},
        extra={"kl_coef": 1e-300, "next_seq": 2**62 + 1},
        ledger=[{"kind": "watermark", "next_seq": 40}, {"kind": "dropped", "seq": 3, "reason": "π"}],
        groups={7: group(7), 5: group(5), 6: group(6).without("reward"), 9: group(9)},
    )
    checkpoint = saved(tmp_path, state, {"data.batch_size": 16})
    loaded = load_controller_state(checkpoint)
    assert load_compatibility(checkpoint) == ({"data.batch_size": 16}, READER)
    assert list(loaded.groups) == [5, 7, 9, 6]
    for seq in loaded.groups:
        a, b = loaded.groups[seq], state.groups[seq]
        assert sorted(a.columns) == sorted(b.columns)
        assert a.without("reward") == b.without("reward").select(a.without("reward").columns)
        if seq != 6:
            assert np.array_equal(a.scalars("reward"), b.scalars("reward"), equal_nan=True)
    without = {"groups": {}}
    assert dataclasses.replace(loaded, **without) == dataclasses.replace(state, **without)
    assert sorted(checkpoint.files) == [
        "buffer/groups-0.parquet",
        "buffer/groups-1.parquet",
        "buffer/groups.jsonl",
        "buffer/ledger.jsonl",
        "compatibility.json",
        "controller.json",
    ]


def test_a_file_for_each_group_is_read_as_an_older_rondo_wrote_it(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path).writing(1) as draft:
        draft.write("buffer/ledger.jsonl", b"")
        draft.write("controller.json", b'{"step": 1, "version": 1}')
        for seq in (12, 5):
            table = io.BytesIO()
            group(seq).without("reward").write_parquet(table)
            draft.write(f"buffer/group-{seq:08d}.parquet", table.getvalue())
    loaded = load_controller_state(CheckpointStore(tmp_path).open(1)).groups
    assert list(loaded) == [5, 12]
    assert all(loaded[seq] == group(seq).without("reward").select(loaded[seq].columns) for seq in loaded)


@pytest.mark.parametrize("extra", [{"a": float("nan")}, {"a": {3: 1}}, {"a": object()}])
def test_what_json_would_change_is_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"controller\.json"):
        saved(tmp_path, ControllerState(1, 1, extra=extra))


@pytest.mark.parametrize(
    "name",
    [
        "controller.json",
        "compatibility.json",
        "buffer/ledger.jsonl",
        "buffer/groups-0.parquet",
        "buffer/groups.jsonl",
    ],
)
def test_a_flipped_bit_of_any_file_is_named(tmp_path: Path, name: str) -> None:
    state = ControllerState(1, 1, ledger=[{"kind": "watermark", "next_seq": 4}], groups={5: group(5)})
    checkpoint = saved(tmp_path, state, {"data.batch_size": 16})
    data = bytearray((checkpoint.path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint.path / name).write_bytes(data)
    read = load_compatibility if name == "compatibility.json" else load_controller_state
    with pytest.raises(CheckpointError, match=f"{name}: damaged: bytes 0 to {len(data)}"):
        read(checkpoint)


def test_what_another_version_wrote_is_named(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path).writing(1) as draft:
        draft.write("buffer/ledger.jsonl", b"")
        draft.write("controller.json", b'{"step": 1, "version": 1, "later": 2}')
    with pytest.raises(CheckpointError, match=r"controller\.json: .*later"):
        load_controller_state(CheckpointStore(tmp_path).open(1))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("controller.json", b"[]"),
        ("compatibility.json", b"{"),
        ("rows.json", b"5"),
        ("buffer/ledger.jsonl", b"{"),
        ("buffer/groups-0.parquet", b"PAR1"),
        ("buffer/groups.jsonl", b'{"seq": 5}'),
        ("arrays.npz", b"PK"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_file(tmp_path: Path, name: str, content: bytes) -> None:
    """Its checksum is right: it was written so."""
    files = {"controller.json": b'{"step": 1, "version": 1}', "buffer/ledger.jsonl": b""}
    if name == "buffer/groups-0.parquet":
        files["buffer/groups.jsonl"] = b'{"seq": 5, "file": "buffer/groups-0.parquet", "rows": 1}'
    with CheckpointStore(tmp_path).writing(1) as draft:
        for one, data in {**files, name: content}.items():
            draft.write(one, data)
    readers = {"compatibility.json": load_compatibility, "rows.json": load_rows}
    with pytest.raises(CheckpointError, match=f"step-00000001/{name}: cannot be read as the part"):
        readers.get(name, load_controller_state)(CheckpointStore(tmp_path).open(1))


def test_what_the_users_code_says_of_its_state_is_left_as_it_is(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, ControllerState(1, 1))
    with pytest.raises(DataError, match="the sampler's load"), taking_over(checkpoint):
        raise DataError("the sampler's load failed")
    with pytest.raises(CheckpointError, match=r"controller\.json: "), taking_over(checkpoint):
        raise KeyError("groups")


CONFIG = Config(
    model=ModelConfig(config={"model_type": "qwen3", "hidden_size": 64}),
    data=DataConfig(train=(FileSourceConfig(type="jsonl", path="a.jsonl"),), batch_size=16),
    rollout=RolloutConfig(n=8),
)


def test_changed_settings_are_listed_with_both_values() -> None:
    old = json.loads(json.dumps(compatibility_record(CONFIG)))
    check_compatible(old, compatibility_record(CONFIG))
    free = dataclasses.replace(
        CONFIG,
        rollout=RolloutConfig(n=8, temperature=0.7),
        model=dataclasses.replace(CONFIG.model, attention="sdpa", hub="local"),
        trainer=dataclasses.replace(CONFIG.trainer, total_steps=99),
    )
    check_compatible(old, compatibility_record(free))
    changed = dataclasses.replace(
        CONFIG,
        data=DataConfig(
            train=(*CONFIG.data.train, FileSourceConfig(type="jsonl", path="b.jsonl")), batch_size=32
        ),
        trainer=dataclasses.replace(CONFIG.trainer, seed=1),
        model=ModelConfig(config={"model_type": "qwen3", "hidden_size": 128}),
    )
    with pytest.raises(CheckpointError) as caught:
        check_compatible(old, compatibility_record(changed))
    lines = str(caught.value).splitlines()
    for line in (
        "  data.batch_size: 16 in the checkpoint, 32 now",
        "  model.config.hidden_size: 64 in the checkpoint, 128 now",
        "  trainer.seed: 0 in the checkpoint, 1 now",
        '  data.train.1.path: not set in the checkpoint, "b.jsonl" now',
    ):
        assert line in lines
    assert "  rollout.n" not in str(caught.value)
    assert "trainer.run_dir" in lines[-1]


def test_keys_that_are_younger_than_a_checkpoint() -> None:
    """Where it lacks them they were as their defaults are, and with another value rows are others."""
    old = json.loads(json.dumps(compatibility_record(CONFIG)))
    assert not {"data.turns", "data.drop_last", "data.train.0.response_key"} & old.keys()
    source = FileSourceConfig(type="jsonl", path="a.jsonl", messages_key="turns")
    data = DataConfig(train=(source,), batch_size=16, turns="template", drop_last=True, max_tokens=99)
    with pytest.raises(CheckpointError) as caught:
        check_compatible(old, compatibility_record(dataclasses.replace(CONFIG, data=data)))
    assert str(caught.value).splitlines()[1:-1] == [
        '  data.train.0.messages_key: not set in the checkpoint, "turns" now',
        "  data.max_tokens: not set in the checkpoint, 99 now",
        '  data.turns: not set in the checkpoint, "template" now',
        "  data.drop_last: not set in the checkpoint, true now",
    ]
