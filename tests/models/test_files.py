"""A model folder with a damaged file: what is said names the file, and before any weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rondo.chat import check_template_options
from rondo.core.errors import ConfigError, DataError
from rondo.models import ModelSource, TokenizerSource, build_model, load_model_config, load_tokenizer
from rondo.models.files import check_model_folder
from tests.messages import full_text
from tests.models.test_loading import TINY, make_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 4295\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that a model has."""
    folder = tmp_path_factory.mktemp("files") / "model"
    build_model(ModelSource(config=TINY, seed=1), torch.float32).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "model")
    return tmp_path / "model"


def reads_model(folder: Path) -> None:
    """What the second pass does, and then a worker."""
    check_model_folder(str(folder))
    build_model(ModelSource(path=str(folder)), torch.float32)


def reads_tokenizer(folder: Path) -> None:
    check_template_options(load_tokenizer(TokenizerSource(str(folder))))


READERS: dict[str, Callable[[Path], None]] = {
    CONFIG: reads_model,
    "generation_config.json": reads_model,
    WEIGHTS: reads_model,
    INDEX: reads_model,
    "tokenizer.json": reads_tokenizer,
    "tokenizer_config.json": reads_tokenizer,
    "chat_template.jinja": reads_tokenizer,
}


def test_a_sound_folder_is_read(folder: Path) -> None:
    for read in set(READERS.values()):
        read(folder)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (POINTER, "is a pointer of git LFS, not the file: run `git lfs pull` in"),
        (PAGE, "is a web page, not the file"),
    ],
)
def test_what_downloads_leave(folder: Path, name: str, content: bytes, said: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} {said}"):
        READERS[name](folder)


@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": ', "is no JSON"),
        (b"[" * 20_000, "is no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is no JSON"),
        (bytes(range(256)), "is no text"),
        (b"[]", "must hold a JSON object"),
        (b"3", "must hold a JSON object"),
    ],
)
def test_json_that_is_none(folder: Path, name: str, content: bytes, said: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} {said}"):
        READERS[name](folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:4], r"\(4 bytes\) is cut off within its header"),
        (lambda content: content[:50], r"\(50 bytes\) is cut off within its header"),
        (lambda content: (10**15).to_bytes(8, "little") + content[8:], "is cut off within its header"),
        (lambda content: (20).to_bytes(8, "little") + content[8:], "its header cannot be read"),
        (
            lambda content: content[:-1],
            "is cut off: 1 of its bytes are missing, from tensor 'model.norm.w",
        ),
        (lambda content: content[:-65], "from tensor 'model.layers.1.self_attn.v_proj.weight' on"),
        (lambda content: content + b"x", "is damaged"),
    ],
)
def test_weights_that_are_cut_off(folder: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    (folder / WEIGHTS).write_bytes(damage((folder / WEIGHTS).read_bytes()))
    with pytest.raises(DataError, match=f"{WEIGHTS}:? .*{said}"):
        check_model_folder(str(folder))


def test_a_shard_that_is_not_there_is_named_with_its_tensor(folder: Path) -> None:
    shards = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(DataError, match=full_text("tensor 'model.norm.weight'")):
        check_model_folder(str(folder))
    (folder / INDEX).write_text("{}")
    with pytest.raises(DataError, match=f"{INDEX} has no weight_map"):
        check_model_folder(str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 3}, full_text("num_hidden_layers")),
        (
            {"num_attention_heads": 0},
            full_text("num_attention_heads=0"),
        ),
        ({"hidden_size": -4}, r"config.json cannot be .*hidden_size=-4"),
        ({"vocab_size": 10**12}, full_text("vocab_size=1000000000000")),
        ({"hidden_size": "x"}, full_text("'hidden_size' expected int")),
        ({"dtype": "floaty"}, r"config.json cannot be .*floaty"),
        (
            {"vocab_size": 2},
            full_text("'lm_head.weight' in model.safetensors"),
        ),
    ],
)
def test_a_config_that_cannot_be_this_models(folder: Path, change: dict[str, Any], said: str) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(DataError, match=said):
        build_model(ModelSource(path=str(folder)), torch.float32)


def test_sizes_that_no_model_has_name_who_said_them(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_config(ModelSource(config={**TINY, "num_hidden_layers": 10**9}))
    assert caught.value.key == "model.config.num_hidden_layers"
    with pytest.raises(ConfigError) as caught:
        load_model_config(ModelSource(path=str(folder), override={"vocab_size": 0}))
    assert caught.value.key == "model.override.vocab_size"


def test_a_template_that_cannot_be_parsed(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("a\n{% for message in messages %}")
    with pytest.raises(ConfigError, match=full_text("model.chat_template: line 2")):
        reads_tokenizer(folder)


@pytest.mark.parametrize("change", [{"model": {"type": "Nonsense"}}, {"added_tokens": 3}])
def test_a_tokenizer_of_another_kind(folder: Path, change: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **change}))
    with pytest.raises(DataError, match=f"tokenizer '{folder}' cannot be read"):
        reads_tokenizer(folder)
