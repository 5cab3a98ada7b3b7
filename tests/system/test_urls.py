"""Files and folders at a URL, in fsspec's own memory: which they are, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from rondo.system.urls import Far, is_url, place_of, spelled


@pytest.fixture
def shelf() -> Iterator[Far]:
    yield Far("memory://urls/shelf")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("s3://bucket/run", Far("s3://bucket/run")),
        ("memory://run/", Far("memory://run")),
        ("s3:/bucket", Path("s3:/bucket")),
        ("://bucket", Path("://bucket")),
        ("runs/a", Path("runs/a")),
    ],
)
def test_a_path_is_at_a_url_or_here(path: str, place: Far | Path) -> None:
    assert (place_of(path), is_url(path)) == (place, isinstance(place, Far))
    assert place_of(spelled(place)) == place


def test_two_are_one_where_their_urls_are() -> None:
    one, same, other = Far("s3://a/b"), Far("s3://a/b/"), Far("s3://a/c")
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "s3://a/b"
    assert one != Path("s3://a/b")
    assert {one, same, other} == {one, other}
    assert (one / "c", (one / "c").name) == (Far("s3://a/b/c"), "c")


def test_a_file_is_written_found_read_and_removed(shelf: Far) -> None:
    file = shelf / "a/b.bin"
    assert not file.is_file()
    assert shelf.files() == {}
    with file.open("xb") as writing:
        writing.write(b"0123456789")
    assert file.is_file()
    assert not shelf.is_file()
    assert (file.stat().st_size, file.read_bytes(), list(shelf.files())) == (10, b"0123456789", ["a/b.bin"])
    with file.open("rb") as reading:
        reading.seek(4)
        assert reading.read(3) == b"456"
        reading.seek(-2, 2)
        assert reading.read() == b"89"
    file.remove()
    file.remove()  # nothing is there any more
    assert not file.is_file()


def test_a_folder_goes_there_with_its_last_file_last(shelf: Far, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "inner").mkdir(parents=True)
    for name, text in (("inner/x", "xx"), ("a", "aaa"), ("z", "")):
        (here / name).write_text(text)
    shelf.upload(here, last="a")
    sizes = {name: entry["size"] for name, entry in shelf.files().items()}
    assert sizes == {"inner/x": 2, "a": 3, "z": 0}
    created = fsspec.filesystem("memory").store
    order = sorted(created, key=lambda path: created[path].created)
    assert [path.removeprefix("/urls/shelf/") for path in order][-1] == "a"
    (shelf / "inner/x").download(tmp_path / "back")
    assert (tmp_path / "back").read_text() == "xx"


def test_whether_a_folder_can_be_written_leaves_nothing(shelf: Far) -> None:
    shelf.check_writable()
    assert shelf.files() == {}


def test_a_file_on_a_disk_appears_when_it_is_whole(tmp_path: Path) -> None:
    """As at an object store: a kill while it is written leaves none of its name."""
    place = Far(f"file://{tmp_path}/folder/file")
    writing = place.open("xb")
    writing.write(b"half")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [".writing-file"]
    writing.close()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
    assert place.read_bytes() == b"half"
    writing = place.open("xb")
    writing.write(b"other")
    writing.abandon()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
    assert place.read_bytes() == b"half"
