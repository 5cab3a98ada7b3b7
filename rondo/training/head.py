"""From hidden states to log-probs, entropies and values of the response positions, logits of one chunk at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from rondo.errors import TrainError
from rondo.models.value_head import ValueHead
from rondo.training.packed import PackedRows

OUTPUTS = {"lm": ("log_probs", "entropy"), "value": ("values",)}


class TokenModel(torch.nn.Module):
    """A causal LM and a head; one forward gives the per-token outputs [M] of a micro-batch's response
    positions.

    lm: the transformers model. value_head: makes it a critic (the LM's own head is gone then).
    """

    def __init__(
        self, lm: PreTrainedModel, value_head: ValueHead | None, *, temperature: float, logits_chunk: int
    ) -> None:
        super().__init__()
        self.lm, self.value_head = lm, value_head
        self.temperature, self.logits_chunk = temperature, logits_chunk

    def forward(self, packed: PackedRows, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """outputs: names out of OUTPUTS of this head; returns them as [M] in at least float32."""
        known = OUTPUTS["lm" if self.value_head is None else "value"]
        for name in outputs:
            if name not in known:
                raise TrainError(f"this model's head computes {', '.join(known)}, not {name!r}")
        extra: Mapping[str, Any] = {} if packed.documents is None else {"documents": packed.documents}
        hidden = self.lm.base_model(
            input_ids=packed.input_ids[None], position_ids=packed.position_ids[None], use_cache=False, **extra
        ).last_hidden_state[0]
        hidden = hidden.index_select(0, packed.positions)
        if self.value_head is not None:
            return {"values": self.value_head(hidden)}
        head = self.lm.get_output_embeddings()
        log_probs, entropy = token_log_probs(
            hidden,
            head.weight,
            head.bias,
            packed.targets,
            temperature=self.temperature,
            chunk=self.logits_chunk,
            entropy="entropy" in outputs,
        )
        return (
            {"log_probs": log_probs, "entropy": entropy} if "entropy" in outputs else {"log_probs": log_probs}
        )


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 4096,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(z / temperature)[target] and the entropy of softmax(z / temperature), z = hidden · weightᵀ
    + bias.

    hidden [M, H], weight [V, H], targets int64 [M]; both results [M], in float32 (float64 for float64
    inputs); the entropy is empty unless asked for. Logits of at most `chunk` positions exist at one time, in
    the backward pass too, where they are computed again; when all positions fit in one chunk they are kept
    instead.
    """
    wanted: tuple[torch.Tensor, torch.Tensor] = _TokenLogProbs.apply(
        hidden, weight, bias, targets, temperature, chunk, entropy
    )
    return wanted


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """[M, V] in at least float32; half-precision products are accumulated and kept in float32."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == wide:
        logits = hidden @ weight.mT
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.mT, out_dtype=wide)
    else:
        logits = hidden.to(wide) @ weight.to(wide).mT
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits /= temperature
    return torch.log_softmax(logits, -1)


class _TokenLogProbs(torch.autograd.Function):
    """∂logp_t/∂z = onehot - p;  ∂H/∂z = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        want_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        picked, entropies, kept = [], [], None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            log_softmax = _log_softmax(hidden[part], weight, bias, temperature)
            picked.append(log_softmax.gather(1, targets[part, None]).squeeze(1))
            if want_entropy:
                entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
            kept = log_softmax
        one_chunk = len(targets) <= chunk
        entropy = torch.cat(entropies) if entropies else picked[0].new_empty(0)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, kept if one_chunk else None)
        ctx.temperature, ctx.chunk, ctx.want_entropy = temperature, chunk, want_entropy
        return torch.cat(picked), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, kept = ctx.saved_tensors
        grad_picked, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        grad_weight: torch.Tensor | None = None
        grad_bias: torch.Tensor | None = None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_softmax = kept
            if log_softmax is None:
                log_softmax = _log_softmax(hidden[part], weight, bias, ctx.temperature)
            grad = log_softmax.exp()
            if ctx.want_entropy:
                factor = (log_softmax + entropy[part, None]).mul_(grad_entropy[part, None])
                grad.mul_(factor.add_(grad_picked[part, None]).neg_())
            else:
                grad.mul_(-grad_picked[part, None])
            grad.scatter_add_(1, targets[part, None], grad_picked[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            narrow = grad.to(weight.dtype)
            torch.mm(narrow, weight, out=grad_hidden[part])
            grad_weight = _add(grad_weight, narrow.mT @ hidden[part], grad.dtype)
            if bias is not None:
                grad_bias = _add(grad_bias, grad.sum(0), grad.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _add(total: torch.Tensor | None, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.to(dtype) if total is None else total.add_(part)
