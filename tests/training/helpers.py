"""Tiny models, a ragged batch, simple losses and engines on a one-rank mesh, for every test of the training
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rondo.config.schema import EngineConfig, OptimizerConfig
from rondo.controller.distributed import init_distributed
from rondo.core.batch import Batch, ragged_rows
from rondo.models import ModelSource
from rondo.training import Engine, ModelSpec, make_engine

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, **SHAPE},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, **SHAPE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SHAPE},
    "mistral": {"model_type": "mistral", "sliding_window": None, **SHAPE},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **SHAPE,
    },
}
FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64"}
# How much nearer a token is to each expert that it gets than to any other, at the least. A product of other
# rows (a tile, a row by itself, a rank's part) is rounded differently, by some 1e-7: no choice turns on that.
GAP = 1e-5
LENGTHS = ((3, 7), (1, 1), (5, 12), (2, 4), (9, 1), (4, 20), (6, 3), (1, 9), (8, 8), (2, 0), (3, 5))


def source(name: str = "qwen3", **changes: Any) -> ModelSource:
    return ModelSource(config={**ARCHITECTURES[name], **changes}, seed=3)


def make_batch(lengths: tuple[tuple[int, int], ...] = LENGTHS, seed: int = 0) -> Batch:
    """Rows of (prompt, response) lengths with a mask that has holes, advantages per row and weights per
    token.
    """
    rng = np.random.default_rng(seed)
    masks = [(rng.random(r) < 0.8).astype(np.uint8) for _, r in lengths]
    return Batch.of(
        {
            "row_id": np.arange(len(lengths)) + 100,
            "prompt_ids": ragged_rows([rng.integers(0, VOCAB, p) for p, _ in lengths], np.int32),
            "response_ids": ragged_rows([rng.integers(0, VOCAB, r) for _, r in lengths], np.int32),
            "response_mask": ragged_rows(masks, np.uint8),
            "token_weight": ragged_rows([rng.random(r) for _, r in lengths], np.float64),
            "advantages": rng.standard_normal(len(lengths)),
        }
    )


def with_groups(batch: Batch, sizes: tuple[int, ...]) -> Batch:
    """The batch with its first rows' prompts made equal within groups of the given sizes."""
    prompts = batch.rows("prompt_ids")
    start = 0
    for size in sizes:
        prompts[start : start + size] = [prompts[start]] * size
        start += size
    return batch.with_columns({"prompt_ids": ragged_rows(prompts, np.int32)}, replace=True)


class PolicyLoss:
    """Policy gradient plus entropy: both outputs, a per-row and two per-token columns."""

    outputs = ("log_probs", "entropy")
    columns = ("advantages", "token_weight", "response_mask")

    def __call__(
        self,
        outputs: Mapping[str, torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        weight = columns["token_weight"] * columns["response_mask"]
        terms = -weight * (columns["advantages"] * outputs["log_probs"] + 0.1 * outputs["entropy"])
        loss = terms.sum()
        largest = outputs["log_probs"].abs().max().detach()
        return loss, {"loss": (loss.detach(), torch.ones(())), "largest": largest}


class ValueLoss:
    outputs = ("values",)
    columns = ("advantages", "response_mask")

    def __call__(
        self,
        outputs: Mapping[str, torch.Tensor],
        columns: Mapping[str, torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        loss = (columns["response_mask"] * (outputs["values"] - columns["advantages"]) ** 2).sum()
        return loss, {"loss": (loss.detach(), columns["response_mask"].sum())}


def one_rank_mesh() -> DeviceMesh:
    """A mesh over this process alone; torch.distributed is initialised until the file's tests end."""
    init_distributed(0, 1, "cpu", None, timedelta(minutes=10))
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def tiny_engine(
    mesh: DeviceMesh,
    model: ModelSource | None = None,
    optimizer: OptimizerConfig | None = OptimizerConfig(lr=1e-2),
    config: Mapping[str, Any] = {},
    device: str = "cpu",
    **arguments: Any,
) -> Engine:
    spec = ModelSpec(model or source(), EngineConfig(**config), optimizer, **arguments)
    return make_engine(spec, mesh=mesh, device=device)


def full_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Every parameter's whole gradient (collective)."""
    gradients = {name: parameter.grad for name, parameter in engine.backend.by_name.items()}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in gradients.items()}


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300))


def gaps_of_choices(engine: Engine) -> list[float]:
    """Gets, for each token that a router of `engine` sees from now on, how far the k-th largest softmax of
    its logits is from the next one.
    """
    gaps: list[float] = []

    def keep(router: Any, _: Any, out: Any) -> None:
        largest = out[0].detach().double().softmax(-1).topk(out[2].shape[1] + 1).values
        gaps.extend((largest[:, -2] - largest[:, -1]).tolist())

    assert engine.backend.routing is not None
    for router in engine.backend.routing.routers:
        router.module.register_forward_hook(keep)
    return gaps
