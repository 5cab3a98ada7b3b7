"""Launch scripts in the style of verl's examples, and what is looked up in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.core.errors import ConfigError
from rondo_verl import launch

SCRIPTS = Path(__file__).parent / "scripts"


def refused(path: str | Path, *extra: str, **options: object) -> str:
    """Returns what is said of a launch that cannot be."""
    with pytest.raises(ConfigError) as caught:
        launch.load(str(path), extra, **options)
    return str(caught.value)


def script(folder: Path, text: str, name: str = "run.sh") -> str:
    """Writes a script; returns its path."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)
