"""Leaner arithmetic on a CPU: RMS norm and rotary attention with hand-written backward passes.

On small models the time beside the matrix products goes into element-wise passes over memory, and autograd's
composition of a norm or a rotation makes two to three times as many as needed. A module is replaced by what
it *does*, not by its name: only if its output on random input equals ours. Everything else keeps
transformers' code, as does half precision. (In float64 this norm is also exact, where transformers' rounds to
float32.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from rondo.models.attention import register_varlen, varlen_attention
from rondo.models.documents import plan_documents
from rondo.models.stored import random_parameters
from rondo.platform import on_host

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float64)
_TOLERANCE = 1e-5  # relative, in float32: another order of sums stays below, another formula does not
Result = TypeVar("Result")
_PROBE = np.array([3, 2, 4])  # lengths of the documents that a replaced attention is tried on


def use_fused_modules(
    model: PreTrainedModel, device: torch.device | str = "cpu", *, attention: bool = True
) -> dict[str, int]:
    """Replaces `forward` of norms and, if asked, of attention modules that compute what ours do; returns how
    many of each kind.

    For float32 or float64 parameters on a CPU, in a model that was built for packed attention; otherwise
    nothing happens. device: where the parameters are, or will be; those without data are tried with random
    numbers.
    """
    counts = {"rms_norm": 0, "attention": 0}
    parameter = next(model.parameters())
    if not on_host(device) or parameter.dtype not in _DTYPES:
        return counts
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in model.modules():
            eps = tried(rms_norm_eps, module)
            if eps is not None:
                module.forward = functools.partial(_norm_forward, module, eps, module.forward)
                counts["rms_norm"] += 1
        for module in model.modules() if attention else ():
            forward = tried(_fused_attention, model, module) if _has_projections(module) else None
            if forward is not None:
                module.forward = forward
                counts["attention"] += 1
    return counts


def tried(probe: Callable[..., Result | None], *arguments: Any) -> Result | None:
    """Returns what the probe finds; None where it raises, whatever it raises: a module that takes other
    arguments or has other shapes than ours is not of our kind, and keeps its code.
    """
    try:
        return probe(*arguments)
    except Exception as error:
        _log.debug("%s finds a module that keeps its own code: %r", probe.__name__, error)
        return None


def rms_norm_eps(module: torch.nn.Module) -> float | None:
    """Returns the eps of a module that is an RMS norm, tried on random input; None for any other module."""
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or not isinstance(eps, float) or next(module.children(), None):
        return None
    if parameters["weight"].ndim != 1:
        return None
    with random_parameters(module):
        weight: Any = module.weight
        x = torch.randn(4, len(weight), dtype=weight.dtype)
        return eps if close(module(x), _RmsNorm.apply(x, weight, eps)) else None


def _norm_forward(
    module: Any, eps: float, plain: Callable[..., torch.Tensor], hidden_states: torch.Tensor
) -> torch.Tensor:
    if hidden_states.dtype not in _DTYPES:
        return plain(hidden_states)
    out: torch.Tensor = _RmsNorm.apply(hidden_states, module.weight, eps)
    return out


def _has_projections(module: torch.nn.Module) -> bool:
    needed = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
    return all(hasattr(module, name) for name in needed)


def _attention_forward(
    module: Any,
    plain: Callable[..., Any],
    asks: dict[str, Any],
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Projections, norms of queries and keys if there are any, rotation, packed attention, projection.

    asks: the keywords that the module gives to its attention: scaling, window, soft-cap.
    """
    if hidden_states.dtype not in _DTYPES or position_embeddings is None:
        return plain(
            hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
        )
    rows = hidden_states[0]
    q, k, v = (
        projection(rows).view(len(rows), -1, module.head_dim)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    cos, sin = (table[0].unsqueeze(1) for table in position_embeddings)
    first, second = sin.chunk(2, -1)
    signed_sin = torch.cat((-first, second), -1)
    q, k = _Rotary.apply(q, cos, signed_sin), _Rotary.apply(k, cos, signed_sin)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    # What comes with the call is said by it: Qwen2.5-VL hands its positions on, which have no part in this.
    out, _ = varlen_attention(module, q, k, v, attention_mask, **{**asks, **kwargs})
    return module.o_proj(out.flatten(2)), None


def _fused_attention(model: PreTrainedModel, module: Any) -> Callable[..., Any] | None:
    """Our forward of a module whose own computes the same on random input; None for any other module."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return None
    x = torch.randn(1, int(_PROBE.sum()), module.q_proj.in_features, dtype=module.q_proj.weight.dtype)
    positions = torch.arange(x.shape[1])[None] % 5
    documents = plan_documents(_PROBE, "short", device=x.device)
    arguments = {"position_embeddings": rotary(x, positions), "attention_mask": None, "documents": documents}
    with random_parameters(module):
        theirs, asks = _forward_and_asks(module, {"hidden_states": x, **arguments})
        ours = functools.partial(_attention_forward, module, module.forward, asks)
        if any(isinstance(value, torch.Tensor) for value in asks.values()):
            return None  # sinks: a parameter, which may be moved or gathered
        return ours if close(theirs, ours(hidden_states=x, **arguments)[0]) else None


def _forward_and_asks(module: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns a module's output, and the keywords of its own that it gives to its attention function. (Those
    that change nothing on short documents and small scores, as windows and soft-caps, count too.)
    """
    asks: dict[str, Any] = {}

    def recorded(*inputs: Any, **keywords: Any) -> Any:
        passed_on = {"dropout", *arguments}
        asks.update({name: value for name, value in keywords.items() if name not in passed_on})
        return varlen_attention(*inputs, **keywords)

    AttentionInterface.register(module.config._attn_implementation, recorded)
    try:
        return module(**arguments)[0], asks
    finally:
        register_varlen()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= _TOLERANCE * a.norm())


class _RmsNorm(torch.autograd.Function):
    """y = w · x̂ with x̂ = x / sqrt(mean(x²) + eps), over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = (
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            .square_()
            .div_(rows.shape[1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(rows, scale, weight)
        return (rows * scale).mul_(weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dw = Σ g·x̂;  dx = (g·w - x̂ · mean(g·w·x̂)) / rms."""
        rows, scale, weight = ctx.saved_tensors
        grad = grads[0].reshape(rows.shape)
        normed = rows * scale
        product = grad * normed
        grad_weight = product.sum(0)
        projection = torch.mv(product, weight).div_(-rows.shape[1])
        out = torch.mul(grad, weight, out=product)
        out.addcmul_(normed, projection[:, None]).mul_(scale)
        return out.view(grads[0].shape), grad_weight, None


class _Rotary(torch.autograd.Function):
    """x · cos + rotate_half(x) · sin, for x [N, heads, D] and tables [N, 1, D], which get no gradient.

    signed_sin: sin with its first half negated, so that the rotated x is x with its halves swapped: whole
    rows are faster than halves.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, signed_sin)
        first, second = x.chunk(2, -1)
        return torch.cat((second, first), -1).mul_(signed_sin).addcmul_(x, cos)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, signed_sin = ctx.saved_tensors
        first, second = (grads[0] * signed_sin).chunk(2, -1)
        return torch.cat((second, first), -1).addcmul_(grads[0], cos), None, None
