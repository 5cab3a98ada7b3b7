"""What is said where a run of an older rondo goes on: what of its conversations is read otherwise now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from rondo.config import load
from rondo.recipes.quickstart import tokenizer
from rondo.trainers.commands.open_run import read_otherwise

BEGUN = "an older rondo began this run, and read conversations otherwise: "
NOTHING = "no source has message parts, calls, flags or nulls"
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "a", "depth": None}}}
PLAIN = {"role": "user", "content": "Tom has 2 apples"}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "Tom has 2 apples", "answer": None, "tags": [{"a": None}]}, ""),
        ({"prompt": [PLAIN]}, ""),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Tom"}]}]}, "message parts"),
        ({"chosen": [PLAIN, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}, "calls, nulls"),
        ({"messages": [{**PLAIN, "weight": 0}, {**PLAIN, "trainable": None}]}, "flags"),
        ({"prompt": [PLAIN], "tools": [{"name": "look", "strict": None}]}, "nulls"),
    ],
)
def test_what_is_read_otherwise_is_named_by_source(row: dict[str, Any], found: str, tmp_path: Path) -> None:
    for name, rows in (("one", [{"prompt": "Sum"}, row]), ("two", [{"prompt": "Sum"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    sources = [{"type": "jsonl", "path": str(tmp_path / f"{name}.jsonl")} for name in ("one", "two")]
    config = load(
        [],
        overrides=[
            f"data.train={json.dumps(sources[:1])}",
            f"data.eval={json.dumps(sources[1:])}",
            "trainer.total_steps=1",
            "model.config={model_type: qwen3}",
            "model.tokenizer=rondo.recipes.quickstart.tokenizer",
        ],
    ).config
    there = f"'one' ({tmp_path / 'one.jsonl'}) has {found}" if found else NOTHING
    assert read_otherwise(config) == f"{BEGUN}{there}; responses end at the same tokens"


def test_tokens_that_the_models_folder_names_end_responses_now(tmp_path: Path) -> None:
    words = tokenizer()
    words.save_pretrained(tmp_path)
    Qwen3Config(vocab_size=len(words)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [words.eos_token_id, 30, 31]})
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Sum"}\n')
    rows = {"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    config = load(
        [], overrides=["trainer.total_steps=1", f"model.path={tmp_path}", f"data.train=[{json.dumps(rows)}]"]
    ).config
    one, two = words.convert_ids_to_tokens([30, 31])
    assert read_otherwise(config) == f"{BEGUN}{NOTHING}; responses end at {one!r}, {two!r}, too"
