"""Files of users are run as they are now, and with the modules beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.config.functions import resolve_function
from rondo.core.errors import ConfigError


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Those of these tests go."""
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_an_edited_file_is_run_again_and_another_one_is_not(tmp_path: Path) -> None:
    """Also where the module beside it was edited, or one of the package beside it; classes stay the same
    while nothing changes.
    """
    write(tmp_path / "inner", __init__="from inner.numbers import THREE\n", numbers="THREE = 3\n")
    write(
        tmp_path,
        mine="from beside import TWO\nfrom inner import THREE\n\ndef f():\n    return (1, TWO, THREE)\n",
        other="from beside import TWO, CALLS\n\ndef g():\n    return TWO, CALLS\n",
        beside="CALLS = []\nTWO = 2\n",
    )
    name, other = f"{tmp_path}/mine.py:f", f"{tmp_path}/other.py:g"
    first = resolve_function(name)
    assert (first(), resolve_function(name)) == ((1, 2, 3), first)
    shared = resolve_function(other)()[1]
    assert shared is sys.modules["beside"].CALLS  # two files of a folder have one module beside them
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("(1,", "(10,"))
    assert resolve_function(name)() == (10, 2, 3)
    assert resolve_function(other)()[1] is shared
    (tmp_path / "beside.py").write_text("CALLS = []\nTWO = 20\n")
    assert (resolve_function(name)(), resolve_function(other)()[0]) == ((10, 20, 3), 20)
    (tmp_path / "inner" / "numbers.py").write_text("THREE = 30\n")
    assert resolve_function(name)() == (10, 20, 30)
    assert first() == (1, 2, 3)


def test_files_beside_of_one_name_are_refused(tmp_path: Path) -> None:
    """The second would run with the first's, silently. Those that nothing imports may be called so."""
    text = "def f():\n    from helper_of_two import VALUE\n    return VALUE\n"
    one = write(tmp_path / "one", mine="import helper_of_two\n" + text, helper_of_two="VALUE = 1.0\n")
    two = write(tmp_path / "two", mine=text, alone="def f():\n    return 0\n", helper_of_two="VALUE = 0.5\n")
    assert resolve_function(f"{one}/mine.py:f")() == 1.0
    with pytest.raises(ConfigError, match=r"mine\.py imports helper_of_two") as raised:
        resolve_function(f"{two}/mine.py:f")
    assert str(one / "helper_of_two.py") in str(raised.value)
    assert str(two / "helper_of_two.py") in str(raised.value)
    assert resolve_function(f"{two}/alone.py:f")() == 0


@pytest.mark.parametrize("word", ["sys", "json", "pyarrow", "wheel"])
def test_a_file_that_would_hide_a_package_is_refused(tmp_path: Path, word: str) -> None:
    """Of Python itself, of one that is loaded, and of one that is not yet; also behind another file."""
    pytest.importorskip("wheel") if word == "wheel" else None
    sys.modules.pop("wheel", None)
    write(tmp_path, mine="import behind\n\ndef f():\n    return 1\n", behind=f"import {word}\n")
    assert resolve_function(f"{tmp_path}/mine.py:f")() == 1
    write(tmp_path, **{word: "VALUE = 1\n"}, __init__="")
    assert resolve_function(f"{tmp_path}/mine.py:f")() == 1  # of a package it would be another name
    (tmp_path / "__init__.py").unlink()
    with pytest.raises(ConfigError, match=f"mine.py imports {word}, and"):
        resolve_function(f"{tmp_path}/mine.py:f")
