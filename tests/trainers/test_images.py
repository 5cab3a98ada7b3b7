"""Runs of models that see, on rows of text."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

import rondo
from rondo.models import ModelSource, build_model
from tests.models.families import config_of


def test_supervised_fine_tuning_of_text_exports_the_whole_model(tmp_path: Path) -> None:
    """The tower, which is frozen, is what it was; the vocabulary and the end of text are the tokenizer's."""
    config = config_of("qwen3_vl")
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        del config["text_config"][key]
    rows = [{"prompt": "what is red", "response": "a colour"}, {"prompt": "and two", "response": "a number"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model": {"config": config, "tokenizer": "tests.byte_tokenizers:tokenizer_of_200"},
        "data": {"train": [{"type": "jsonl", "path": str(tmp_path / "rows.jsonl")}], "batch_size": 2},
        "actor": {"freeze": ["tower"], "optimizer": {"lr": 1e-2}},
        "trainer": {"total_steps": 2},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    run = rondo.sft(tmp_path / "recipe.yaml", **{"trainer.run_dir": str(tmp_path / "run")})
    first_loss, last_loss = run.metrics["sft/loss"]
    assert last_loss < first_loss - 1
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "export")
    assert trained.config.text_config.vocab_size == 200
    assert (tmp_path / "run" / "export" / "preprocessor_config.json").is_file()
    config["text_config"] |= {"vocab_size": 200, "eos_token_id": trained.config.text_config.eos_token_id}
    first = dict(build_model(ModelSource(config=config, seed=0), torch.float32).named_parameters())
    moved = {name for name, one in trained.named_parameters() if not torch.equal(one, first[name])}
    assert moved >= {name for name in first if "language_model.layers" in name}
    assert not [name for name in moved if "visual" in name]
