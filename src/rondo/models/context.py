"""Context parallel: the tokens of a pass divided between ranks, each of which has the next few of them.

Attention needs all tokens of a document, and each of its heads for itself: there every rank has all tokens
and a part of the heads (DeepSpeed-Ulysses, arXiv:2309.14509). Everything else goes token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rondo.core.errors import ConfigError
from rondo.platform import platform_of


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Sends an array. To an accelerator without waiting: a copy from memory that is not pinned would wait for
    all that the device was asked before, and a micro-batch be packed only when the last one is done.
    """
    tensor = torch.from_numpy(array)
    if not platform_of(device).pins:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Context:
    """The ranks that have the same rows, and divide their tokens."""

    group: dist.ProcessGroup
    """Their process group."""
    rank: int
    """This one's number among `size`."""
    size: int
    """How many they are."""

    def own(self, num_tokens: int) -> slice:
        """Returns which of a pass's tokens, a multiple of `size`, this rank has."""
        each = num_tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def all_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """[N / size, heads, D] of own tokens -> [N, heads / size, D] of own heads. Fewer heads than ranks are
        repeated first, so that several ranks have the same one. Raises ConfigError for heads that cannot be
        divided (those of a layer may be others than its config names).
        """
        heads = states.shape[1]
        if heads % self.size and self.size % heads:
            raise ConfigError(
                f"parallel.context={self.size}: it does not divide the {heads} heads (of queries, or of keys "
                "and values) of a layer of this model; lower it, or leave it out",
                key="parallel.context",
            )
        if heads < self.size:
            states = states.repeat_interleave(self.size // heads, 1)
        out: torch.Tensor = _Exchange.apply(states, self, True)
        return out

    def all_heads(self, states: torch.Tensor) -> torch.Tensor:
        """[N, heads / size, D] of own heads -> [N / size, heads, D] of own tokens."""
        out: torch.Tensor = _Exchange.apply(states, self, False)
        return out

    def own_heads(self, per_head: torch.Tensor | None) -> torch.Tensor | None:
        """[heads] -> [heads / size]."""
        return None if per_head is None else per_head.chunk(self.size)[self.rank]

    def places(self, positions: np.ndarray, num_tokens: int, device: torch.device) -> Places:
        """Says which ranks have the tokens at `positions` of a pass, int64 [M]. device: where outputs are."""
        owners = positions // (num_tokens // self.size)
        counts = np.bincount(owners, minlength=self.size).tolist()
        order = np.argsort(owners, kind="stable")
        start = sum(counts[: self.rank])
        own = order[start : start + counts[self.rank]]
        local = positions[own] - self.own(num_tokens).start
        indices = (to_device(one, device) for one in (order, own, local))
        return Places(self, tuple(counts), *indices)


@dataclass(frozen=True)
class Places:
    """Where the outputs of a pass are."""

    context: Context
    """The ranks that divide the tokens."""
    counts: tuple[int, ...]
    """Outputs of each rank."""
    order: torch.Tensor
    """[M] outputs, those of the first rank first."""
    own: torch.Tensor
    """Outputs of this rank."""
    local: torch.Tensor
    """Positions of `own` among this rank's tokens."""

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """[own, …] -> [M, …] on every rank. All ranks compute the same from it, so that each one's own
        gradient is that of its own values; nothing is to be added up.
        """
        out: torch.Tensor = _Gathered.apply(values, self)
        return out


def _exchanged(states: torch.Tensor, context: Context) -> torch.Tensor:
    """[size, …]: what goes to each rank -> what came from each."""
    out = torch.empty_like(states)
    dist.all_to_all_single(out, states, group=context.group)
    return out


def _to_all_tokens(states: torch.Tensor, context: Context) -> torch.Tensor:
    tokens, heads, width = states.shape
    by_rank = states.reshape(tokens, context.size, heads // context.size, width).transpose(0, 1).contiguous()
    return _exchanged(by_rank, context).reshape(tokens * context.size, heads // context.size, width)


def _to_all_heads(states: torch.Tensor, context: Context) -> torch.Tensor:
    tokens, heads, width = states.shape
    by_rank = states.reshape(context.size, tokens // context.size, heads, width).contiguous()
    back = _exchanged(by_rank, context).transpose(0, 1)
    return back.reshape(tokens // context.size, context.size * heads, width)


class _Exchange(torch.autograd.Function):
    """Own tokens with all heads to all tokens with own heads, or back; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, context: Context, to_tokens: bool) -> torch.Tensor:
        ctx.context = context
        ctx.to_tokens = to_tokens
        return _to_all_tokens(states, context) if to_tokens else _to_all_heads(states, context)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = _to_all_heads if ctx.to_tokens else _to_all_tokens
        return back(grads[0], ctx.context), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: Places) -> torch.Tensor:
        ctx.own = places.own
        most, rest = max(places.counts), values.shape[1:]
        mine = values.new_zeros((most, *rest))
        mine[: len(values)] = values
        every = values.new_empty((places.context.size, most, *rest))
        dist.all_gather_into_tensor(every.flatten(0, 1), mine, group=places.context.group)
        joined = torch.cat([part[:count] for part, count in zip(every, places.counts, strict=True)])
        out = torch.empty_like(joined)
        out[places.order] = joined
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0][ctx.own], None
