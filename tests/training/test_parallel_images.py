"""Models with an image tower along parallel axes: the text is spread, the tower is replicated or sharded, and
the gradients of one step are those of one process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rondo.config.schema import LoraConfig, OptimizerConfig
from rondo.models import ModelSource
from rondo.training.gathering import gather_buckets
from rondo.training.views import local_of
from tests.models.families import config_of, reader_of
from tests.models.test_families import Weighted
from tests.models.test_images import batch_of, limits_of, rows_with_images
from tests.ranks import run_ranks
from tests.training.helpers import FLOAT64, relative_difference, tiny_engine
from tests.training.layouts import layout

Tensors = dict[str, torch.Tensor]
Sizes = dict[str, int]
LORA = LoraConfig(rank=2, parts=("language", "tower", "projector"))
DENSE: list[Sizes] = [{}, {"replicate": 2}, {"tensor": 2}, {"context": 2}]
MIXTURE: list[Sizes] = [{"expert": 2}, {"tensor": 2}, {"context": 2}]
# Name: (family, settings, layouts).
CASES: dict[str, tuple[str, dict[str, Any], list[Sizes]]] = {
    "qwen2.5": ("qwen2_5_vl", {}, DENSE[2:]),
    "qwen3": ("qwen3_vl", {"gradient_checkpointing": True}, DENSE),
    "mixture": ("qwen3_vl_moe", {}, MIXTURE),
    "adapters": ("qwen3_vl", {"lora": LORA}, DENSE[1:]),
    "hybrid": ("qwen3_5", {}, DENSE[1:3]),
    "glm": ("glm46v", {}, DENSE[2:]),
    "glm mixture": ("glm4v_moe", {}, MIXTURE),
    "llava": ("llava_onevision", {"token_budget": 130}, DENSE[1:]),
    "internvl": ("internvl", {}, DENSE[2:]),
    "gemma": ("gemma3", {"token_budget": 130}, DENSE[1:]),
    "idefics": ("idefics3", {"token_budget": 220, "gradient_checkpointing": True}, DENSE),
    "smolvlm": ("smolvlm", {"token_budget": 150}, DENSE[1:]),
}


def _steps(rank: int, world: int, folder: str) -> dict[tuple[str, str], tuple[Tensors, Tensors]]:
    """(case, layout) -> whole gradients of a step (of adapters none), and the weights after it."""
    out = {}
    for case, (family, settings, layouts) in CASES.items():
        source = ModelSource(config=config_of(family), seed=3, **limits_of(family))
        own = Path(folder) / f"{case} {rank}"
        own.mkdir()
        rows = rows_with_images(reader_of(source), own)
        for sizes in layouts if world > 1 else [{}]:
            views, index, count = layout(world, **sizes)
            config = {**FLOAT64, "token_budget": 40, **settings}
            engine = tiny_engine(views, source, OptimizerConfig(lr=1e-3, eps=1e-3), config=config)
            engine.forward_backward(batch_of(rows[index::count]), Weighted())
            full = {}
            if "lora" not in settings:
                gradients = {
                    name: local_of(torch.zeros_like(one) if one.grad is None else one.grad)
                    for name, one in engine.backend.by_name.items()
                }
                whole = engine.parameters().layout()  # of buffers, too, which have no gradient
                learnt = tuple(one for one in whole.parameters if one.name in gradients)
                layout_of_learnt = replace(whole, parameters=learnt)
                gathered = gather_buckets(layout_of_learnt, gradients, dist.group.WORLD, 4000)
                full = {name: one.clone() for name, one in gathered}
            engine.optimizer_step()
            weights = {name: one.clone() for name, one in engine.parameters().gathered(3000)}
            out[case, str(sizes)] = full, weights
    return out


@pytest.mark.slow
def test_every_layout_computes_what_one_process_does(tmp_path: Path) -> None:
    """Among the passes are some in which a rank has none of the tokens of images that others have."""
    pytest.importorskip("peft")
    (alone,) = run_ranks(1, _steps, str(tmp_path))
    (tmp_path / "two").mkdir()
    for told in run_ranks(2, _steps, str(tmp_path / "two")):
        assert len(told) == sum(len(layouts) for *_, layouts in CASES.values())
        for (case, sizes), found in told.items():
            for ours, theirs in zip(found, alone[case, "{}"], strict=True):
                assert ours.keys() == theirs.keys()
                for name, one in theirs.items():
                    if name.endswith("k_proj.bias") and max(one.norm(), ours[name].norm()) < 1e-14:
                        continue  # rounding: what all keys have in common is nothing to softmax
                    assert relative_difference(ours[name], one) <= 1e-6, (case, sizes, name)
