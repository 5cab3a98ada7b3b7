"""CUDA answers all that a platform is asked, and one that a path names trains as it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rondo.platform import Platform, planned
from rondo.platform.cuda import Cuda
from tests.gpu.test_paths import F32, recipe_file
from tests.platform.conformance import EACH
from tests.trainers.conftest import inline, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Third(Cuda):
    """CUDA's devices by another name."""


@EACH
def test_it_answers(asks: Callable[[Platform], None]) -> None:
    asks(planned("cuda"))


def test_one_of_a_path_trains_as_it_does(tmp_path: Path) -> None:
    norms, recipe = [], recipe_file(tmp_path)
    for device in ("cuda", f"{__file__}:Third"):
        run = tmp_path / str(len(norms))
        inline("train", recipe, F32, f"cluster.device={device}", f"trainer.run_dir={run}")
        norms.append([line["actor/grad_norm"] for line in metrics(run) if "actor/grad_norm" in line])
    planned("cuda")
    assert len(norms[0]) == 3
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)  # a card's sums have no fixed order
