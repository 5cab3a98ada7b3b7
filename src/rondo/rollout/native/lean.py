"""The lean path: our own forward over the weights of a Llama, Qwen2 or Qwen3 module.

It does the arithmetic of the module without its per-call Python: one mask and one pair of rotary tables per
step. On a CUDA device the decode step can be captured once per (rows, blocks) and replayed as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rondo.models.family import FAMILIES
from rondo.platform import Platform, platform_of
from rondo.rollout.native.blocks import BLOCK, blocks_of
from rondo.rollout.native.cache import round_up
from rondo.rollout.native.generic import (
    PLAIN,
    DecodeStep,
    GenericPath,
    attention_from_cache,
    cached_attention,
    fused,
)


def why_not_lean(module: torch.nn.Module, max_context: int) -> str:
    """Returns the reason why the lean path cannot run this model; "" if it can."""
    config: Any = module.config
    classes = sorted(family.llama_class for family in FAMILIES.values() if family.llama_class)
    if type(module).__name__ not in classes:
        return f"{type(module).__name__} is not one of {', '.join(classes)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    window = config.sliding_window if getattr(config, "use_sliding_window", False) else None
    if window is not None and window < max_context:
        return f"its sliding window of {window} is shorter than max_context {max_context}"
    rope = module.model.rotary_emb.rope_type
    if rope in ("dynamic", "longrope"):
        return f"its rotary embedding ({rope}) depends on the sequence's length"
    return ""


@dataclass(frozen=True)
class LayerWeights:
    """One layer's tensors, as the module holds them."""

    input_norm: torch.Tensor
    """The scale of the norm before attention."""
    post_norm: torch.Tensor
    """The scale of the norm before the MLP."""
    q: torch.nn.Linear
    """Projects to queries."""
    k: torch.nn.Linear
    """Projects to keys."""
    v: torch.nn.Linear
    """Projects to values."""
    o: torch.nn.Linear
    """Projects attention's output back."""
    gate: torch.nn.Linear
    """The MLP's gate."""
    up: torch.nn.Linear
    """The MLP's projection up."""
    down: torch.nn.Linear
    """The MLP's projection down."""
    q_norm: torch.Tensor | None
    """The scale of the norm of each query head; None: the family has none."""
    k_norm: torch.Tensor | None
    """The scale of the norm of each key head; None: the family has none."""


def layer_weights(module: torch.nn.Module) -> list[LayerWeights]:
    """Returns the weights of every layer (views, no copies)."""

    def of(layer: Any) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        return LayerWeights(
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
        )

    return [of(layer) for layer in module.model.layers]


def rotary_tables(
    module: torch.nn.Module, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cos and sin, float32 [length, head_dim], from the module's own rotary embedding."""
    positions = torch.arange(length, device=device)[None]
    with torch.no_grad():
        cos, sin = module.model.rotary_emb(torch.zeros(1, 1, 1, device=device), positions)
    return cos[0].float().contiguous(), sin[0].float().contiguous()


class LeanPath(GenericPath):
    """GenericPath with another forward; everything about blocks, masks and prefill is the same."""

    name = "lean"

    def __init__(self, module: torch.nn.Module, *, cuda_graphs: bool = True, **settings: Any) -> None:
        super().__init__(module, **settings)
        config: Any = module.config
        self._layers = layer_weights(module)
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = self._shapes[0].key_dim
        self._most_blocks = blocks_of(self._max_context)
        cos, sin = rotary_tables(module, self._most_blocks * BLOCK + 1, self.device)  # and padding's position
        tables = cos.to(self.dtype), sin.to(self.dtype)
        self._ops = (Ops if self.why_copies else FusedOps)(tables, config.rms_norm_eps)
        self._graphs: DecodeGraphs | None = None
        if cuda_graphs and platform_of(self.device).graphs:
            self._graphs = DecodeGraphs(platform_of(self.device))

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        if self._graphs is not None:
            self._graphs.forget()  # those of another cache

    def free(self) -> None:
        super().free()
        if self._graphs is not None:
            self._graphs.forget()  # they hold the cache's addresses

    def bucket(self, active: int, num_blocks: int) -> tuple[int, int]:
        """Returns powers of two where there are graphs, so that few graphs are captured."""
        R, n = super().bucket(active, num_blocks)
        if self._graphs is None:
            return R, n
        return 1 << (R - 1).bit_length(), self._rounded_up(n)

    def prompt_bucket(self, num_tokens: int, num_blocks: int) -> tuple[int, int]:
        columns, n = super().prompt_bucket(num_tokens, num_blocks)
        if self._graphs is None:
            return columns, n
        # To a power of two up to 64, then to a multiple: few graphs, and little padding of long prompts.
        return round_up(columns, min(64, 1 << (columns - 1).bit_length())), self._rounded_up(n)

    def _rounded_up(self, num_blocks: int) -> int:
        return min(1 << (num_blocks - 1).bit_length(), self._most_blocks)

    def fill(self, ids: torch.Tensor, at: torch.Tensor, blocks: torch.Tensor) -> None:
        if self._graphs is None:
            super().fill(ids, at, blocks)
        else:
            self._graphs.run(super().fill, ids, at, blocks)

    def decode_logits(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        blocks: np.ndarray,
        deltas: np.ndarray | None = None,
    ) -> torch.Tensor:
        assert deltas is None  # no model of this path is given images
        if self._graphs is None:
            return super().decode_logits(tokens, positions, blocks)

        def logits(ids: torch.Tensor, at: torch.Tensor, with_padding: torch.Tensor) -> torch.Tensor:
            parts = self.parts(positions, *with_padding.shape)  # on CUDA a function of the shape alone
            made = self.forward(self._step(at, with_padding, parts), ids, want_logits=True)
            assert made is not None
            return made

        out: torch.Tensor = self._graphs.run(logits, *self.padded(tokens, positions, blocks))
        return out

    def forward(self, step: DecodeStep, tokens: torch.Tensor, *, want_logits: bool) -> torch.Tensor | None:
        R, C = tokens.shape
        x = F.embedding(tokens, self.module.model.embed_tokens.weight)
        tables = self._ops.tables(step)
        delta = None
        for number, layer in enumerate(self._layers):
            x, h = self._ops.add_norm(x, delta, layer.input_norm)
            q = layer.q(h).view(R, C, self._heads, self._head_dim)
            k = layer.k(h).view(R, C, self._kv_heads, self._head_dim)
            v = layer.v(h).view(R, C, self._kv_heads, self._head_dim)
            scales = layer.q_norm, layer.k_norm
            attended = self._ops.attend(step, number, (q, k, v), scales, tables)
            x, h = self._ops.add_norm(x, layer.o(attended.flatten(2)), layer.post_norm)
            delta = layer.down(self._ops.gated(layer.gate(h), layer.up(h)))
        if not want_logits:
            return None
        _, h = self._ops.add_norm(x, delta, self.module.model.norm.weight)
        logits: torch.Tensor = self.module.lm_head(h[:, -1])
        return logits


Pair = tuple[torch.Tensor, torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Scales = tuple[torch.Tensor | None, torch.Tensor | None]


class Ops:
    """What a layer computes beside its matrix products, in PyTorch."""

    def __init__(self, tables: Pair, eps: float) -> None:
        """tables: cos and sin, [length, D]. eps: of all norms."""
        self._tables = tables
        self._eps = eps

    def tables(self, step: DecodeStep) -> Pair:
        """Returns cos and sin as `attend` takes them, [R, C, 1, D]."""
        cos, sin = self._tables
        return cos[step.positions][:, :, None], sin[step.positions][:, :, None]

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> Pair:
        """Returns x + delta [R, C, H], and its norm."""
        if delta is not None:
            x = x + delta
        return x, _rms_norm(x, weight, self._eps)

    def attend(
        self, step: DecodeStep, layer: int, heads: Heads, scales: Scales, tables: Pair
    ) -> torch.Tensor:
        """Norms queries and keys [R, C, heads, D] where there are scales [D] of their norms, turns them,
        stores keys and values, and attends. Returns [R, C, heads, D].

        heads: queries, keys and values. scales: of queries and keys. tables: see `tables`.
        """
        (q, k, v), (q_scale, k_scale) = heads, scales
        if q_scale is not None and k_scale is not None:
            q, k = _rms_norm(q, q_scale, self._eps), _rms_norm(k, k_scale, self._eps)
        q, k, v = (one.transpose(1, 2) for one in (_rotate(q, *tables), _rotate(k, *tables), v))
        return cached_attention(step, layer, q, k, v, PLAIN)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) · up."""
        return F.silu(gate).mul_(up)


class FusedOps(Ops):
    """The same by kernels in triton; `x`, queries and `gate` are changed in place."""

    def tables(self, step: DecodeStep) -> Pair:
        return self._tables

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> Pair:
        return x, fused().add_norm(x, delta, weight, self._eps)

    def attend(
        self, step: DecodeStep, layer: int, heads: Heads, scales: Scales, tables: Pair
    ) -> torch.Tensor:
        assert step.cache is not None
        new = [one.flatten(0, 1) for one in heads]
        at, cache = (step.positions, step.addresses), (step.cache.keys[layer], step.cache.values[layer])
        fused().turn_and_store(*new, scales, tables, at, cache, self._eps)
        return attention_from_cache(step, layer, heads[0].transpose(1, 2), PLAIN)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fused().gated(gate, up)
        return out


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # As the module does it: in float32, and rounded before the weight is multiplied.
    wide = x.float()
    normed: torch.Tensor = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return weight * normed


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [R, C, heads, D], turned by its rotary embedding cos, sin [R, C, 1, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class DecodeGraphs:
    """Holds CUDA graphs of steps and of parts of prompts, one per shape, which share one memory pool: a step
    is hundreds of kernels, and without a graph a device waits for the host between them.

    Only the `gpu` tests run it.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._captured: dict[tuple[torch.Size, ...], tuple[Any, list[torch.Tensor], Any]] = {}
        self._pool: Any = None

    def forget(self) -> None:
        self._captured.clear()
        self._pool = None

    def run(self, step: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """Returns step(*inputs), a tensor or None, from the graph for the inputs' shapes, which is captured
        at its first use; steps of the same shapes are the same. The result is valid until the next call.
        """
        key = tuple(one.shape for one in inputs)
        if key not in self._captured:
            self._captured[key] = self._capture(step, inputs)
        graph, static, out = self._captured[key]
        for held, given in zip(static, inputs, strict=True):
            held.copy_(given)
        graph.replay()
        return out

    def _capture(
        self, step: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor], Any]:
        static = [one.clone() for one in inputs]
        graph, out = self._platform.capture(lambda: step(*static), self._pool)
        self._pool = graph.pool()
        return graph, static, out
