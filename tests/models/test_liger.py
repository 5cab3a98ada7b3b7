"""Liger's kernels: which modules they replace, with what arguments. The kernels need a CUDA device; here
their formulas stand in for them.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from rondo.core.errors import ConfigError
from rondo.models import liger
from rondo.models.loading import build_model
from tests.models.families import source_of


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *options: Any) -> torch.Tensor:
    assert options == (0.0, "llama", False)  # nothing is added to weights; not in place
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "counts"),
    [
        ("llama", {"rms_norm": 5, "swiglu": 2}),
        ("qwen3", {"rms_norm": 9, "swiglu": 2}),  # norms of queries and keys
        ("qwen3_moe", {"rms_norm": 9, "swiglu": 1}),  # a dense layer, and one of experts, a tensor
    ],
)
def test_replaced_modules_compute_what_they_did(
    monkeypatch: pytest.MonkeyPatch, family: str, counts: dict[str, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(liger, "_kernels", lambda: (_norm, _swiglu))
    plain, ours = (build_model(source_of(family), dtype, kernels="transformers") for _ in range(2))
    assert liger.use_liger(ours, "cuda") == counts
    hidden = torch.randn(1, 7, plain.config.hidden_size, dtype=dtype)
    compared = 0
    for one, other in zip(plain.modules(), ours.modules(), strict=True):
        if "forward" in vars(other):
            weight = next(one.parameters())
            x = hidden if weight.ndim == 2 else hidden[..., : len(weight)]
            grads = []
            for module in (one, other):
                own = x.clone().requires_grad_()
                out = module(own)
                out.float().square().sum().backward()
                grads.append((out, own.grad, *(p.grad for p in module.parameters())))
            for got, expected in zip(*reversed(grads), strict=True):
                torch.testing.assert_close(got, expected)
            compared += 1
    assert compared == sum(counts.values())


def test_what_computes_something_else_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's norms add 1 to weights, and its MLPs have another activation; GPT-2 has neither."""
    monkeypatch.setattr(liger, "_kernels", lambda: (_norm, _swiglu))
    for family in ("gemma2", "gpt2"):
        model = build_model(source_of(family), torch.float32, kernels="transformers")
        with pytest.raises(ConfigError, match=f"no module of this {family} model") as caught:
            liger.use_liger(model, "cuda")
        assert caught.value.key == "actor.backend.kernels"
        assert not any("forward" in vars(module) for module in model.modules())


def test_a_cpu_and_a_missing_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="this model is on cpu"):
        build_model(source_of("llama"), torch.float32, kernels="liger")
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    model = build_model(source_of("llama"), torch.float32, kernels="transformers")
    with pytest.raises(ConfigError, match="rondo-rl") as caught:
        liger.use_liger(model, "cuda")
    assert caught.value.key == "actor.backend.kernels"


def test_the_kernels_take_these_arguments() -> None:
    """As the wheel's sources have them."""
    ops = pytest.importorskip("liger_kernel.ops")
    norm = list(inspect.signature(ops.LigerRMSNormFunction.forward).parameters)
    assert norm[1:7] == ["X", "W", "eps", "offset", "casting_mode", "in_place"]
    swiglu = inspect.signature(ops.LigerSiLUMulFunction.forward).parameters
    assert list(swiglu)[1:3] == ["a", "b"]
    assert all(one.default is not one.empty for one in list(swiglu.values())[3:])
