"""The document lengths of one micro-batch, as the attention kernels want them: planned once, and good for
every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from rondo.models.context import Context, to_device
from rondo.platform import platform_of

Heads = tuple[int, int]  # query heads, key/value heads
Kernel = Literal["flash", "short", "sdpa"]


@dataclass(frozen=True)
class Bucket:
    """Documents of similar length side by side, for the `short` kernel; all index tensors are int64.

    Queries are padded on the right to `width`: causal, so that no real query looks at padding. Index tensors
    address rows of [N * heads, D], so that one gather also brings the heads to the front.
    """

    docs: int
    """How many documents."""
    width: int
    """Queries of each, padding included."""
    prefix: int
    """How many shared keys come before the documents' own."""
    query_rows: torch.Tensor
    """[docs * H * width]."""
    key_rows: torch.Tensor
    """[docs * K * (prefix + width)]."""
    padding: torch.Tensor
    """Which of the query rows are padding."""


@dataclass(frozen=True)
class Unpadding:
    """The way back from the joined buckets to the documents' own order."""

    queries: torch.Tensor
    """Where each row of [N * H, D] lies in the joined buckets."""
    keys: torch.Tensor
    """Where each row of [N * K, D] lies in them."""
    shared_from: torch.Tensor
    """A shared prefix's keys also lie in every bucket that reads them: these rows of the joined buckets hold
    further gradients of such keys."""
    shared_to: torch.Tensor
    """The rows of [N * K, D] that those are added to."""


class SideBySide(NamedTuple):
    """Where the rows of a layer's heads lie, for the `short` kernel."""

    buckets: tuple[Bucket, ...]
    """Where heads lie in each bucket."""
    unpadding: Unpadding
    """How the rows are put back into the order of the tokens."""


class Plans:
    """Where the rows of layers lie, by the numbers of heads that they have on this rank: planned when the
    first layer with as many asks, since layers may have others than their config names. (No dataclass: FSDP
    copies those at every block.)
    """

    def __init__(self, lengths: np.ndarray, prefixes: np.ndarray, device: torch.device) -> None:
        self._documents = lengths, prefixes
        self._device = device
        self._made: dict[Heads, SideBySide] = {}

    def of(self, heads: Heads) -> SideBySide:
        """Returns the plan of a layer with so many heads."""
        if heads not in self._made:
            self._made[heads] = _plan_buckets(*self._documents, heads, self._device)
        return self._made[heads]


@dataclass(frozen=True)
class Documents:
    """The document lengths of one micro-batch, as each kernel wants them. Made by `plan_documents`."""

    kernel: Kernel
    """The kernel that attends."""
    lengths: tuple[int, ...]
    """The documents' lengths, in tokens."""
    cu_seqlens: torch.Tensor
    """Where each document begins and the last one ends, int32 [B+1]."""
    max_length: int
    """The longest document, with its prefix."""
    plans: Plans
    """The plans of the `short` kernel."""
    context: Context | None = None
    """The ranks that the tokens are divided between."""
    together: torch.Tensor | None = None
    """int64 [N]: tokens of a document with the same number, but -1, see each other, those behind them, too;
    None: none do. With the kernel sdpa."""


def plan_documents(
    lengths: np.ndarray,
    kernel: Kernel,
    *,
    device: torch.device,
    prefixes: np.ndarray | None = None,
    context: Context | None = None,
    together: torch.Tensor | None = None,
) -> Documents:
    """Everything about a micro-batch that attention needs and that depends on lengths only.

    lengths: int [B], each at least 1; the documents lie one after another. prefixes: int [B], which document
    each one continues (its tokens come first, and are seen by all of this one's), -1 for none; only with the
    short kernel. together: see `Documents`.
    """
    lengths = np.asarray(lengths, np.int64)
    prefixes = np.full(len(lengths), -1) if prefixes is None else np.asarray(prefixes, np.int64)
    prefix_lengths = np.where(prefixes >= 0, lengths[prefixes], 0)
    cu_seqlens = to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)
    longest = int((lengths + prefix_lengths).max(initial=0))
    assert kernel == "short" or not np.any(prefixes >= 0), f"{kernel} takes no shared prefixes"
    plans = Plans(lengths, prefixes, device)
    return Documents(kernel, tuple(lengths.tolist()), cu_seqlens, longest, plans, context, together)


def _plan_buckets(
    lengths: np.ndarray, prefixes: np.ndarray, heads: Heads, device: torch.device
) -> SideBySide:
    H, K = heads
    prefix_lengths = np.where(prefixes >= 0, lengths[prefixes], 0)
    starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    unpad_queries, unpad_keys = np.empty((total, H), np.int64), np.empty((total, K), np.int64)
    shared_from, shared_to, buckets = [], [], []
    query_base = key_base = 0
    most = platform_of(device).numbers.cached_scores
    for docs in _similar_lengths(lengths, prefix_lengths, H, most):
        n, width, prefix = len(docs), int(lengths[docs[0]]), int(prefix_lengths[docs[0]])
        inside = np.arange(width)
        real = inside < lengths[docs][:, None]
        own = starts[docs][:, None] + np.minimum(inside, lengths[docs][:, None] - 1)
        before = starts[prefixes[docs]][:, None] + np.arange(prefix)
        keys = np.concatenate([before, own], 1)
        query_rows = own[:, None] * H + np.arange(H)[:, None]  # [n, H, width]
        key_rows = keys[:, None] * K + np.arange(K)[:, None]  # [n, K, prefix + width]
        joined_queries = query_base + np.arange(query_rows.size).reshape(query_rows.shape)
        joined_keys = key_base + np.arange(key_rows.size).reshape(key_rows.shape)
        unpad_queries[own[real]] = joined_queries.transpose(0, 2, 1)[real]
        unpad_keys[own[real]] = joined_keys[:, :, prefix:].transpose(0, 2, 1)[real]
        shared_from.append(joined_keys[:, :, :prefix].reshape(-1))
        shared_to.append(key_rows[:, :, :prefix].reshape(-1))
        padding = np.flatnonzero(np.broadcast_to(~real[:, None], query_rows.shape))
        index = [to_device(array.reshape(-1), device) for array in (query_rows, key_rows, padding)]
        buckets.append(Bucket(n, width, prefix, *index))
        query_base, key_base = query_base + query_rows.size, key_base + key_rows.size
    parts = (
        unpad_queries.reshape(-1),
        unpad_keys.reshape(-1),
        np.concatenate(shared_from),
        np.concatenate(shared_to),
    )
    return SideBySide(tuple(buckets), Unpadding(*(to_device(part, device) for part in parts)))


def _similar_lengths(
    lengths: np.ndarray, prefix_lengths: np.ndarray, num_heads: int, most_scores: int | None
) -> list[np.ndarray]:
    """Documents with equal prefix length, longest first, cut where a bucket has more scores than
    `most_scores` (None: as many as there are), or its padding is more than a quarter of it.
    """
    order = np.lexsort((-lengths, prefix_lengths))
    buckets, start = [], 0
    while start < len(order):
        width, prefix = int(lengths[order[start]]), prefix_lengths[order[start]]
        most = len(order)
        if most_scores is not None:
            most = max(1, most_scores // (num_heads * width * (width + int(prefix))))
        stop = start + 1
        while (
            stop < min(len(order), start + most)
            and prefix_lengths[order[stop]] == prefix
            and lengths[order[stop]] >= min(0.75 * width, width - 8)
        ):
            stop += 1
        buckets.append(order[start:stop])
        start = stop
    return buckets
