"""Builds the site, as `make docs` does, in a folder of a test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site import pages

ROOT = Path(__file__).resolve().parents[2]


def built(folder: Path) -> Path:
    """Returns the folder of the built site. Skips where KaTeX was never fetched."""
    fetched = list((ROOT / "build").glob("katex-*/dist"))
    if not fetched:
        pytest.skip("KaTeX is not there: `make docs` fetches it from npm")
    pages.make(folder / "docs", fetched[0].parent)
    return build(folder)


def build(folder: Path, nav: str | None = None) -> Path:
    """Builds the site of folder/docs with the settings of mkdocs.yml, and returns its folder. nav: another
    navigation. Fails with what mkdocs says, such as links that lead nowhere.
    """
    settings = {"INHERIT": ROOT / "mkdocs.yml", "docs_dir": folder / "docs", "site_dir": folder / "site"}
    settings |= {} if nav is None else {"nav": nav}
    text = "".join(f"{key}: {value}\n" for key, value in settings.items())
    (folder / "mkdocs.yml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(folder / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
