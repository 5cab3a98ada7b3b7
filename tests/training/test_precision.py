"""What must stay in float32 beside half-precision parameters: rotary frequencies, routers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from rondo.models import ModelSource
from rondo.rollout import NativeEngine
from tests.rollout.conftest import own_engine
from tests.training.helpers import SHAPE, PolicyLoss, make_batch, source, tiny_engine

LONG = 4096
OUTPUTS = {"log_probs": "x"}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 24,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": -1,
    **SHAPE,
}
ROUTER = "model.layers.0.mlp.gate.weight"


def test_half_precision_parameters_keep_their_positions(mesh: DeviceMesh) -> None:
    """With the same weights, log-probs far from the start are those of a float32 model to rounding."""
    model = source(max_position_embeddings=2 * LONG)
    half = tiny_engine(mesh, model, None, {"param_dtype": "bfloat16"})
    exact = tiny_engine(mesh, model, None)
    exact.copy_parameters_from(half)
    batch = make_batch(((1, LONG),))
    gap = np.abs(half.forward(batch, OUTPUTS).rows("x")[0] - exact.forward(batch, OUTPUTS).rows("x")[0])
    assert gap[:128].max() < 1e-4
    assert gap[2000:].max() < 1e-4


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_router_stays_in_float32(mesh: DeviceMesh, param_dtype: str, compute_dtype: str) -> None:
    """transformers declares Ernie's routers so; they are cast neither at rest nor in a pass."""
    config = {"param_dtype": param_dtype, "compute_dtype": compute_dtype}
    engine = tiny_engine(mesh, ModelSource(config=ERNIE, seed=3), config=config)
    computed: list[torch.dtype] = []
    router = engine.backend.model.lm.get_submodule(ROUTER.removesuffix(".weight"))
    router.register_forward_hook(lambda module, *_: computed.append(module.weight.dtype))
    engine.forward_backward(make_batch(), PolicyLoss())
    assert not engine.optimizer_step().skipped
    assert engine.backend.shards[ROUTER].dtype == torch.float32
    assert set(computed) == {torch.float32}
    assert engine.backend.shards["model.embed_tokens.weight"].dtype == getattr(torch, param_dtype)


def test_the_sampler_keeps_the_same_parameters_in_float32(mesh: DeviceMesh) -> None:
    trainer = tiny_engine(mesh, ModelSource(config=ERNIE, seed=3), None, {"param_dtype": "bfloat16"})
    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_concurrent": 2, "max_context": 16}
    own = own_engine(NativeEngine, trainer.hf_config, **arguments)
    shared = own_engine(NativeEngine, trainer.hf_config, trainer.parameters_in_place(), **arguments)
    for engine in (own, shared):
        dtypes = {name: tensor.dtype for name, tensor in engine.parameters().items()}
        assert dtypes[ROUTER] == torch.float32
        assert dtypes["model.embed_tokens.weight"] == torch.bfloat16
        engine.close()
