"""A model folder of somebody else's is data: whatever it names, no code of it runs, or a marker says so."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rondo.chat import encode_prompt
from rondo.core.errors import ConfigError, DataError, RondoError
from rondo.models import ModelSource, build_model, load_tokenizer
from rondo.models.source import TokenizerSource
from rondo.recipes.quickstart import tokenizer
from tests.models.families import source_of
from tests.raising import Calls

QUESTION = [{"role": "user", "content": "Tom has 3 pens"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer, and code beside it that leaves a marker when it is imported."""
    folder = tmp_path / "model"
    tokenizer().save_pretrained(folder)
    build_model(source_of("qwen3", vocab_size=600), torch.float32).save_pretrained(folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    return folder


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def pickled(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(
        {"model.embed_tokens.weight": Calls(os.system, f"touch {marker}")}, folder / "pytorch_model.bin"
    )


def bare_pickle(folder: Path, marker: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Calls(os.system, f"touch {marker}"), protocol=2))


def code_of_a_known_type(folder: Path, marker: Path) -> None:
    changed(folder / "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})


def code_of_an_unknown_type(folder: Path, marker: Path) -> None:
    code_of_a_known_type(folder, marker)
    changed(folder / "config.json", model_type="evil", architectures=["EvilForCausalLM"])


def code_of_a_tokenizer(folder: Path, marker: Path) -> None:
    auto_map = {"AutoTokenizer": ["evil.T", "evil.T"]}
    changed(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="EvilTokenizer")


def template(text: str) -> Callable[[Path, Path], None]:
    def write(folder: Path, marker: Path) -> None:
        shutil.rmtree(folder / "chat_template.jinja", ignore_errors=True)
        (folder / "chat_template.jinja").write_text(text.replace("MARKER", str(marker)))

    return write


REACH = "{{ messages.__class__.__mro__[-1].__subclasses__() }}"
OPENS = "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}"
FOLDERS: dict[str, tuple[Callable[[Path, Path], None], str | None]] = {
    "pickled weights": (pickled, "its weights are a pickle, which could run code"),
    "a bare pickle": (bare_pickle, "its weights are a pickle, which could run code"),
    "code of a known type": (code_of_a_known_type, None),
    "code of an unknown type": (code_of_an_unknown_type, "config.json cannot be a model's"),
    "code of a tokenizer": (code_of_a_tokenizer, None),
    "a template that reaches classes": (template(REACH), "unsafe|undefined|access"),
    "a template that opens modules": (template(OPENS), "unsafe|undefined|access"),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_nothing_of_a_folder_runs(what: str, folder: Path, tmp_path: Path) -> None:
    prepare, refused = FOLDERS[what]
    prepare(folder, tmp_path / "marker")
    told: list[str] = []
    for use in (
        lambda: build_model(ModelSource(path=str(folder)), torch.float32),
        lambda: encode_prompt(load_tokenizer(TokenizerSource(str(folder), model=str(folder))), QUESTION),
    ):
        try:
            use()
        except (ConfigError, DataError) as error:
            told.append(str(error))
    assert not (tmp_path / "marker").exists()
    if refused is None:
        assert told == [] or what == "code of a tokenizer"
    else:
        with pytest.raises(RondoError, match=refused):
            raise RondoError(" ".join(told))
