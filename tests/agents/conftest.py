"""What tests of agents share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rondo.config import load
from rondo.core.images import EpisodeImages
from rondo.data.images import episode_images
from rondo.models import ModelSource, load_model_config
from rondo.models.pixels import ImageReader
from rondo.trainers.commands.train import train
from tests.serving.conftest import engine as engine
from tests.trainers.conftest import recipe as recipe


@pytest.fixture
def reader() -> ImageReader:
    """Of a tiny model that sees: a token is 16 x 16 pixels."""
    from tests.trainers.test_images import MODEL

    source = ModelSource(config=MODEL["config"], seed=0, min_pixels=256, max_pixels=4096)
    return ImageReader(source, load_model_config(source))


@pytest.fixture
def shows(reader: ImageReader, tmp_path: Path) -> EpisodeImages:
    """How its episodes show images."""
    return episode_images(reader, tmp_path / "images", None)


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Iterator[Any]:
    """run(name, *overrides) -> the run folder, with room for the schemas of tools."""

    def start(name: str, *overrides: str) -> Path:
        settings = [f"trainer.run_dir={tmp_path / name}", "cluster.threads=1", "trainer.total_steps=2"]
        room = ["data.max_prompt_tokens=700", "rollout.max_tokens=48", "actor.token_budget=2048"]
        position = "model.config.max_position_embeddings=1024"
        train(load([str(recipe)], [*settings, *room, position, *overrides]))
        return tmp_path / name

    return start
