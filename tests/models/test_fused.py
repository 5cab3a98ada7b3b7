"""Our norms and attention in the place of transformers': where asked for, and with the same log-probs."""

from __future__ import annotations

import pytest
import torch

from rondo.config.schema import TorchBackendConfig
from rondo.models.loading import build_model
from tests.training.helpers import make_batch, make_engine, one_rank_mesh, source


@pytest.mark.parametrize(("kernels", "replaced"), [("auto", 2), ("transformers", 0)])
def test_attention_is_replaced_where_asked_for(kernels: str, replaced: int) -> None:
    model = build_model(source(), torch.float32, kernels=kernels)
    assert sum("forward" in vars(layer.self_attn) for layer in model.model.layers) == replaced
    assert ("forward" in vars(model.model.norm)) == bool(replaced)


def test_the_choice_reaches_the_engine_and_changes_rounding_only() -> None:
    mesh, batch = one_rank_mesh(), make_batch()
    columns = []
    for kernels in ("auto", "transformers"):
        engine = make_engine(mesh, backend=TorchBackendConfig(kernels=kernels))
        columns.append(engine.forward(batch, {"log_probs": "x"}).ragged("x")[0])
    assert not torch.equal(*columns)
    torch.testing.assert_close(*columns, rtol=0, atol=1e-5)
