"""Runs to look at: one that was trained here, and one that was made up, with answers of every kind."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import viewing
from rondo.config import load
from rondo.trainers.commands.train import train
from rondo_view.server import Server
from tests.trainers.conftest import RECIPE

STEPS, ROWS = 12, 24


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No index is left in the user's cache folder."""
    before, folder = os.environ.get("XDG_CACHE_HOME"), tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with what each token had, and evaluations before and after."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    more = ["trainer.total_steps=3", "tracking.token_columns=1"]
    train(load([str(folder / "recipe.yaml")], [f"trainer.run_dir={folder}/runs/a", *more]))
    return folder / "runs" / "a"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `benchmarks/viewing.py` makes it, small."""
    run = tmp_path_factory.mktemp("made") / "made"
    viewing.make_run(run, STEPS, ROWS)
    return run


def ask(server: Server, view: str, /, **query: Any) -> Any:
    """Returns what the server answers the page; the error's text where it refuses."""
    pairs = [
        (key, one) for key, value in query.items() for one in (value if isinstance(value, list) else [value])
    ]
    try:
        with urllib.request.urlopen(f"{server.address}{view}?{urllib.parse.urlencode(pairs)}") as found:
            return json.loads(found.read())
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return json.loads(error.read())["error"]
