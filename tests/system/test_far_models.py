"""Models at a URL: copied to this machine once, whole or not at all, and again when they change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rondo.core.errors import DataError, StorageError
from rondo.system import hub
from rondo.system.hub import copy_of, local_folder
from rondo.system.urls import Far
from tests.far import Fault, far, fault, shelf  # noqa: F401
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub._copy.cache_clear()
    return tmp_path / "cache" / "rondo" / "models"


def put(url: str, name: str, data: bytes) -> None:
    with (Far(url) / name).open("xb") as file:
        file.write(data)


def model_at(url: str, size: int = 100) -> str:
    for name in (
        "tokenizer.json",
        "model.safetensors",
        "notes.pdf",
        "original/model.safetensors",
        "config.json",
    ):
        put(url, name, b"x" * size)
    return url


def files_in(folder: str | Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in Path(folder).iterdir()}


def copies(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def test_what_a_model_needs_is_copied_once(far: str, cache: Path) -> None:  # noqa: F811
    url = model_at(f"{far}/some-model")
    folder = local_folder(url)
    assert files_in(folder) == {"config.json": 100, "model.safetensors": 100, "tokenizer.json": 100}
    assert Path(folder).parent == cache
    assert Path(folder).name.startswith("some-model-")
    assert files_in(local_folder(url, weights=False)).keys() == {"config.json", "tokenizer.json"}
    (Path(folder) / "mark").touch()  # a later process finds the copy
    hub._copy.cache_clear()
    assert local_folder(f"{url}/", "local") == folder
    assert copy_of(url) == Path(folder)
    assert (Path(folder) / "mark").exists()
    put(url, "config.json", b"other")
    hub._copy.cache_clear()
    other = local_folder(url)
    assert other != folder
    assert (Path(other) / "config.json").read_bytes() == b"other"


def _look_up(rank: int, world: int, url: str, cache: str) -> tuple[str, int]:
    os.environ["XDG_CACHE_HOME"] = cache  # of processes that were begun before this test
    return (folder := local_folder(url)), (Path(folder) / "config.json").stat().st_ino


def test_processes_that_want_it_at_once_share_one_copy(tmp_path: Path, cache: Path) -> None:
    url = model_at(f"file://{tmp_path / 'far'}", 1 << 20)
    found = run_ranks(4, _look_up, url, str(tmp_path / "cache"))
    assert len(set(found)) == 1  # one folder, and the same files in it: nobody has copied it again
    assert len(copies(cache)) == 1


@pytest.mark.parametrize("what", ["get model.safetensors", "shorten model.safetensors"])
def test_a_copy_that_breaks_off_is_none(shelf: str, fault: Fault, cache: Path, what: str) -> None:  # noqa: F811
    url = model_at(shelf)
    fault.set(what)
    said = "cannot be read: OSError: the shelf" if what.startswith("get") else "99 of its 100 bytes have come"
    with pytest.raises(StorageError, match=rf"{url}/model\.safetensors: {said}"):
        local_folder(url)
    assert copies(cache) == []
    fault.clear()
    assert len(files_in(local_folder(url))) == 3


def test_what_is_no_model(far: str) -> None:  # noqa: F811
    with pytest.raises(DataError, match=rf"{far}/x has no config\.json .* it holds nothing"):
        local_folder(f"{far}/x")
    put(far, "model.safetensors", b"x")  # an export whose end has not come
    with pytest.raises(DataError, match=rf"{far} has no config\.json .* it holds model\.safetensors"):
        local_folder(far)


def test_names_with_two_points_are_functions_and_urls_are_not() -> None:
    from rondo.models.loading import is_function

    assert is_function("module:make")
    assert not is_function("s3://bucket/model")
