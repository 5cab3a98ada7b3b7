"""Liger's Triton kernels in the place of norms and gated MLPs, on a CUDA device (`kernels: liger`).

As in `fused`, a module is replaced by what it *does*: only if its output on random input equals the formula
that the kernel computes. Everything else keeps transformers' code. The rotation stays there too (Liger takes
it from a module's globals, of every model of the process), and so do logits: log-probs are computed in
chunks (`rondo.training.torch_backend.head`), with any gradient behind them.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from rondo.core.errors import ConfigError
from rondo.models.fused import close, rms_norm_eps, tried
from rondo.platform import platform_of

KEY = "actor.backend.kernels"
_log = logging.getLogger(__name__)
_WIDTH = 8  # of the small linear modules that an MLP is tried with


def use_liger(model: PreTrainedModel, device: torch.device | str) -> dict[str, int]:
    """Replaces `forward` of norms and MLPs that compute what Liger's kernels do; returns how many of each.

    device: where the parameters are, or will be. Raises ConfigError where that is no CUDA device, where the
    package is missing, and for a model that has no such module.
    """
    if not platform_of(device).triton:
        raise ConfigError(
            f"{KEY}=liger: its kernels run on CUDA devices, and this model is on {device}; use auto", key=KEY
        )
    norm, swiglu = _kernels()
    counts = {"rms_norm": 0, "swiglu": 0}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in model.modules():
            eps = tried(_norm_eps, module)
            if eps is not None:
                module.forward = functools.partial(_norm, norm, module, eps)
                counts["rms_norm"] += 1
            elif tried(_is_swiglu, module):
                module.forward = functools.partial(_swiglu, swiglu, module)
                counts["swiglu"] += 1
    if not any(counts.values()):
        kind = model.config.model_type
        raise ConfigError(f"{KEY}=liger: no module of this {kind} model is one of its; use auto", key=KEY)
    _log.info("Liger's kernels compute %d norms and %d MLPs", counts["rms_norm"], counts["swiglu"])
    return counts


def _kernels() -> tuple[Any, Any]:
    try:
        from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction
    except ImportError as error:
        raise ConfigError(
            f'{KEY}=liger needs the package liger-kernel ({error}): pip install "rondo-rl[liger]"', key=KEY
        ) from error
    return LigerRMSNormFunction.apply, LigerSiLUMulFunction.apply


def _norm_eps(module: Any) -> float | None:
    """Returns the eps of an RMS norm; None for any other module. Tried on a CPU in float32."""
    if len(list(module.parameters(recurse=False))) != 1 or next(module.children(), None) is not None:
        return None
    twin = copy.copy(module)
    weight = module.weight
    twin._parameters = {"weight": torch.nn.Parameter(torch.randn(weight.shape))}
    return rms_norm_eps(twin)


def _is_swiglu(module: Any) -> bool:
    """Says whether a module computes down(silu(gate(x)) · up(x)). Tried with small linear modules in the
    place of its own.
    """
    names = ("gate_proj", "up_proj", "down_proj")
    if not all(isinstance(getattr(module, name, None), torch.nn.Linear) for name in names):
        return False
    twin = copy.copy(module)
    small = {name: torch.nn.Linear(_WIDTH, _WIDTH) for name in names}
    twin._modules = {**module._modules, **small}
    x = torch.randn(1, 3, _WIDTH)
    gate, up, down = small.values()
    return close(twin(x), down(torch.nn.functional.silu(gate(x)) * up(x)))


def _norm(kernel: Any, module: Any, eps: float, hidden_states: torch.Tensor) -> torch.Tensor:
    # "llama": squares are summed in float32, and the weight multiplies what is rounded to the input's dtype,
    # as transformers does. Not in place: Liger would write into the gradient that it is given.
    out: torch.Tensor = kernel(hidden_states, module.weight, eps, 0.0, "llama", False)
    return out


def _swiglu(kernel: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module.down_proj(kernel(module.gate_proj(x), module.up_proj(x)))
    return out
