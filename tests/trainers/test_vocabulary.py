"""A tokenizer with more tokens than a model has rows is found when it is opened, before anything trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rondo.config import Config, load
from rondo.core.errors import ConfigError
from rondo.models import ModelSource, build_model
from rondo.trainers.program import open_tokenizer
from tests.models.test_loading import TINY, make_tokenizer

TOKENS = len(make_tokenizer())


def with_pad_token() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return tokenizer


def configured(
    folder: Path, rows: int, *settings: str, tokenizer: str = "models.test_loading:make_tokenizer"
) -> Config:
    build_model(ModelSource(config={**TINY, "vocab_size": rows}), torch.float32).save_pretrained(folder)
    base = [f"model.path={folder}", f"model.tokenizer=tests.{tokenizer}", "trainer.total_steps=1"]
    return load([], [*base, *settings]).config


@pytest.mark.parametrize("rows", [TOKENS, TOKENS + 5])
def test_a_model_may_have_more_rows(tmp_path: Path, rows: int) -> None:
    assert len(open_tokenizer(configured(tmp_path, rows))) == TOKENS


def test_fewer_rows_are_refused_with_the_first_token_beyond_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"has 2 rows .* {TOKENS} tokens: 'b' is number 2") as caught:
        open_tokenizer(configured(tmp_path, 2))
    assert caught.value.key == "model.path"


@pytest.mark.parametrize("section", ["critic", "teacher", "reward.models.0"])
def test_of_every_model_that_reads_the_tokens(tmp_path: Path, section: str) -> None:
    small = tmp_path / "small"
    build_model(ModelSource(config={**TINY, "vocab_size": 2}), torch.float32).save_pretrained(small)
    setting = f"reward.models=[{{path: {small}}}]" if "." in section else f"{section}.path={small}"
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(configured(tmp_path / "model", TOKENS, setting))
    assert caught.value.key == f"{section}.path"


def test_a_pad_token_that_was_added_later_is_never_computed_with(tmp_path: Path) -> None:
    config = configured(tmp_path, TOKENS, tokenizer="trainers.test_vocabulary:with_pad_token")
    assert len(open_tokenizer(config)) == TOKENS + 1


def test_a_new_model_is_made_as_it_is_asked_for(tmp_path: Path) -> None:
    new = f"model={{path: null, config: {{model_type: qwen3, vocab_size: {TOKENS - 1}}}}}"
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(configured(tmp_path, TOKENS, new))
    assert caught.value.key == "model.config.vocab_size"
