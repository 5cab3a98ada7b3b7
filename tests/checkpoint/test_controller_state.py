"""The controller's state comes back exactly; incompatible settings are listed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.batch import Batch, ragged_rows
from rondo.checkpoint import (
    ControllerState,
    check_compatible,
    compatibility_record,
    load_controller_state,
    save_controller_state,
)
from rondo.config.schema import Config, DataConfig, FileSourceConfig, ModelConfig, RolloutConfig
from rondo.errors import CheckpointError


def group(seq: int) -> Batch:
    ids = ragged_rows([[1, 2, seq], []], np.int32)
    return Batch.of(
        {"row_id": np.array([2 * seq, 2 * seq + 1]), "response_ids": ids, "reward": np.array([0.1, np.nan])}
    )


def test_the_state_comes_back_exactly(tmp_path: Path) -> None:
    state = ControllerState(
        step=12,
        version=12,
        timers={"wall_seconds": 0.1 + 0.2},
        extra={"kl_coef": 1e-300, "next_seq": 2**62 + 1},
        ledger=[{"kind": "watermark", "next_seq": 40}, {"kind": "dropped", "seq": 3, "reason": "π"}],
        groups={7: group(7), 5: group(5)},
    )
    save_controller_state(tmp_path, state, {"data.batch_size": 16})
    loaded, compatibility = load_controller_state(tmp_path)
    assert compatibility == {"data.batch_size": 16}
    assert list(loaded.groups) == [5, 7]
    for seq in (5, 7):
        a, b = loaded.groups[seq], state.groups[seq]
        assert a.select(["row_id", "response_ids"]) == b.select(["row_id", "response_ids"])
        assert np.array_equal(a.scalars("reward"), b.scalars("reward"), equal_nan=True)
    without = {"groups": {}}
    assert dataclasses.replace(loaded, **without) == dataclasses.replace(state, **without)
    assert sorted(p.name for p in (tmp_path / "buffer").iterdir()) == [
        "group-00000005.parquet",
        "group-00000007.parquet",
        "ledger.jsonl",
    ]


@pytest.mark.parametrize("extra", [{"a": float("nan")}, {"a": {3: 1}}, {"a": object()}])
def test_what_json_would_change_is_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"controller\.json"):
        save_controller_state(tmp_path, ControllerState(1, 1, extra=extra), {})


def test_a_damaged_state_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"controller\.json"):
        load_controller_state(tmp_path)
    save_controller_state(tmp_path, ControllerState(1, 1), {})
    (tmp_path / "buffer" / "ledger.jsonl").write_text("{")
    with pytest.raises(CheckpointError, match=r"ledger\.jsonl"):
        load_controller_state(tmp_path)
    (tmp_path / "buffer" / "ledger.jsonl").write_text("")
    (tmp_path / "controller.json").write_text('{"step": 1, "version": 1, "later": 2}')
    with pytest.raises(CheckpointError, match="later"):
        load_controller_state(tmp_path)


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
        model=dataclasses.replace(CONFIG.model, attention="sdpa"),
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
