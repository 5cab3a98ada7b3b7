"""From the name of a model to a folder, without a network and without waiting for one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest

from rondo.core.errors import ConfigError, DataError
from rondo.system import hub
from rondo.system.hub import local_folder
from tests.messages import full_text

NO_ID = "no hub id looks like that"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, list[str]]]:
    """What a hub with one repository was asked for; the repository has old weights only."""
    calls: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: Any) -> str:
        calls.append((name, allow_patterns))
        if name != "org/there":
            raise OSError("404")
        return str(tmp_path)

    modelscope = ModuleType("modelscope")
    modelscope.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", modelscope)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for cached in (hub._huggingface, hub._modelscope, hub._say):
        cached.cache_clear()
    return calls


def test_a_folder_is_itself_and_nobody_is_asked(asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "org" / "there").mkdir(parents=True)
    for where in ("huggingface", "modelscope", "local"):
        assert local_folder("org/there", where) == "org/there"  # type: ignore[arg-type]
        assert local_folder(str(tmp_path)) == str(tmp_path)
    assert asked == []


def test_a_hub_is_asked_once_and_for_a_tokenizer_without_weights(asked: list[Any], tmp_path: Path) -> None:
    assert [local_folder("org/there") for _ in range(3)] == [str(tmp_path)] * 3
    assert ["*.safetensors" in patterns for _, patterns in asked] == [True, False]
    assert "pytorch_model*.bin" in asked[1][1]
    (tmp_path / "model.safetensors").touch()
    del asked[:]
    assert local_folder("org/there", weights=False) == str(tmp_path)
    assert len(asked) == 1
    assert not any("safetensors" in pattern or ".bin" in pattern for pattern in asked[0][1])
    assert local_folder("org/there", "modelscope") == str(tmp_path)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, NO_ID) for name in ("./xqzw", "../xqzw", "/xqzw", "~/xqzw", "a/b/c", "a model", "model-")),
        *((name, NO_ID) for name in ("models/x/", "models//x", "models/../x")),
        ("here/model", "there is a folder here"),
    ],
)
def test_what_only_a_folder_can_be_called_is_not_looked_up(
    asked: list[Any], tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(DataError) as caught:
        local_folder(name)
    where = "" if name[0] in "/~" else f" in {tmp_path}"
    assert str(caught.value) == f"there is no folder {name}{where} ({why}, so it is not looked up on a hub)."
    assert asked == []


@pytest.mark.parametrize(("where", "title"), [("huggingface", "Hugging Face"), ("modelscope", "ModelScope")])
def test_that_a_name_is_looked_up_is_said_once(
    asked: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, where: Any, title: str
) -> None:
    """`org` is no folder here: `models/x` may be meant, and be somebody else's there."""
    for weights in (True, False, True):
        local_folder("org/there", where, weights=weights)
    assert caplog.messages == [f"there is no folder org/there in {tmp_path}: it is looked up on {title}"]


def test_local_looks_nothing_up(asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    said = rf"there is no folder modle in {tmp_path} \(model.hub=local.*did you mean 'model'\?"
    with pytest.raises(DataError, match=said):
        local_folder("modle", "local")
    assert asked == []


@pytest.mark.parametrize(("where", "title"), [("huggingface", "Hugging Face"), ("modelscope", "ModelScope")])
def test_what_no_hub_has_names_folder_hub_and_remedy(
    asked: list[Any], tmp_path: Path, where: Any, title: str
) -> None:
    (tmp_path / "nowhere2").mkdir()
    said = rf"no folder nowhere in {tmp_path}, .*{title}.*: 404; .*model.hub=local.*; did you mean 'nowhere2'"
    with pytest.raises(DataError, match=said):
        local_folder("nowhere", where)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(DataError, match="is a file, and a model is a folder"):
        local_folder(str(tmp_path / "model.safetensors"))


def test_modelscope_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match=full_text("model.hub=modelscope, but ModelScope")) as caught:
        local_folder("org/model", "modelscope")
    assert caught.value.key == "model.hub"
