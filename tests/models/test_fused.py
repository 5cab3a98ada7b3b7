"""Our norms and attention in the place of transformers': where asked for, and with the same log-probs."""

from __future__ import annotations

import pytest
import torch

from rondo.config.schema import TorchBackendConfig
from rondo.models.attention import SHORT
from rondo.models.fused import tried
from rondo.models.loading import build_model
from tests.models.families import source_of
from tests.training.helpers import make_batch, one_rank_mesh, source, tiny_engine


@pytest.mark.parametrize(("kernels", "replaced"), [("auto", 2), ("transformers", 0)])
def test_attention_is_replaced_where_asked_for(kernels: str, replaced: int) -> None:
    model = build_model(source(), torch.float32, kernels=kernels)
    assert sum("forward" in vars(layer.self_attn) for layer in model.model.layers) == replaced
    assert ("forward" in vars(model.model.norm)) == bool(replaced)


def test_the_choice_reaches_the_engine_and_changes_rounding_only() -> None:
    mesh, batch = one_rank_mesh(), make_batch()
    columns = []
    for kernels in ("auto", "transformers"):
        engine = tiny_engine(mesh, backend=TorchBackendConfig(kernels=kernels))
        columns.append(engine.forward(batch, {"log_probs": "x"}).ragged("x")[0])
    assert not torch.equal(*columns)
    torch.testing.assert_close(*columns, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "fused"), [("mistral", 2), ("gemma2", 2), ("gemma3_text", 0), ("olmo3", 0), ("gpt_oss", 0)]
)
def test_a_replaced_module_asks_its_attention_for_the_same(family: str, fused: int) -> None:
    """Windows and soft-caps that the short documents and small scores of the trial do not show. Gemma 3's
    rotary embedding wants to know its layer, sinks are parameters: such modules keep their code.
    """
    model = build_model(source_of(family), torch.float32)
    assert sum("forward" in vars(layer.self_attn) for layer in model.model.layers) == fused
    mesh, batch = one_rank_mesh(), make_batch(((9, 20), (SHORT, 9)))
    columns = [
        tiny_engine(mesh, source_of(family), None, backend=TorchBackendConfig(kernels=kernels))
        .forward(batch, {"log_probs": "x"})
        .ragged("x")[0]
        for kernels in ("auto", "transformers")
    ]
    torch.testing.assert_close(*columns, rtol=0, atol=1e-5)


@pytest.mark.parametrize("error", [TypeError, KeyError, IndexError, ZeroDivisionError])
def test_a_trial_that_fails_means_not_ours(error: type[Exception]) -> None:
    def probe(_: object) -> str:
        raise error("another kind of module")

    assert tried(probe, None) is None
