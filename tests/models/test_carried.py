"""What a model folder says besides weights, config and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rondo.core.errors import DataError
from rondo.models.carried import carry, end_token_ids, sampling_defaults
from rondo.models.source import ModelSource
from tests.messages import full_text


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [106, 1]}, {"eos_token_id": 1}, (1, 106)),
        ({"eos_token_id": 7}, {"eos_token_id": [1, 2]}, (7,)),
        ({"temperature": 1.0}, {"eos_token_id": [2, 1, 2]}, (1, 2)),
        ({"eos_token_id": None}, {}, ()),
        (None, {"eos_token_id": 3}, (3,)),
        (None, None, ()),
    ],
)
def test_tokens_that_end_an_answer(
    generation: Any, config: Any, ids: tuple[int, ...], tmp_path: Path
) -> None:
    for name, said in (("generation_config.json", generation), ("config.json", config)):
        if said is not None:
            (tmp_path / name).write_text(json.dumps(said))
    assert end_token_ids(tmp_path) == ids


@pytest.mark.parametrize("said", ["</s>", [1, "a"], [True], -1, 1.0])
def test_what_is_no_token_is_named(said: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(DataError, match=full_text("generation_config.json: eos_token_id")):
        end_token_ids(tmp_path)


def test_sampling_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    said = {"eos_token_id": 1, "temperature": 0.6, "top_k": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "do_sample": True}


def test_what_goes_along_into_an_export(tmp_path: Path) -> None:
    base, export = tmp_path / "base", tmp_path / "export"
    texts = ("LICENSE", "README.md", "generation_config.json", "preprocessor_config.json", "notes.txt")
    own = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt")
    of_weights = ("model.safetensors.index.json", "adapter_config.json", "quantize_config.json")
    others = (".hidden", "modeling_x.py", "big.txt", "picture.png")
    base.mkdir()
    export.mkdir()
    for name in (*texts, *own, *of_weights, *others):
        (base / name).write_text(name)
    (base / "big.txt").write_text("x" * ((1 << 20) + 1))
    (base / "picture.png").write_bytes(b"\x89PNG\xff")
    (base / "folder").mkdir()
    expected = {name.replace("README.md", "README.base.md"): name for name in texts}
    assert carry(ModelSource(path=str(base)), export) == sorted(expected, key=lambda name: expected[name])
    assert {file.name: file.read_text() for file in export.iterdir()} == expected
    assert "modeling_x.py" in carry(ModelSource(path=str(base), trust_remote_code=True), export)


def test_no_card_of_a_base_is_lost(tmp_path: Path) -> None:
    """A base that was trained from another has that one's beside its own."""
    base, export = tmp_path / "base", tmp_path / "export"
    base.mkdir()
    export.mkdir()
    for name in ("README.md", "README.base.md", "README.base.base.md", "README.baseball.md"):
        (base / name).write_text(f"was {name}")
    carry(ModelSource(path=str(base)), export)
    assert {file.name: file.read_text() for file in export.iterdir()} == {
        "README.base.md": "was README.md",
        "README.base.base.md": "was README.base.md",
        "README.base.base.base.md": "was README.base.base.md",
        "README.baseball.md": "was README.baseball.md",
    }
