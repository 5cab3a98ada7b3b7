"""Attention over packed documents: the one function that all models' attention goes through.

Queries, keys and values of all documents of a micro-batch lie one after another in a single row [1, heads, N,
D]. No document sees another one. Everything that depends on the documents' lengths only is computed once per
micro-batch (`plan_documents`) and travels with the forward call as the keyword `documents`.

Kernels: `flash` (flash-attn, or torch's own varlen_attn: CUDA, half precision); `short` (documents of similar
length side by side, two batched matrix products and a softmax: everywhere, for documents of at most SHORT
tokens; on a CPU 2–3 times faster than SDPA there); `sdpa` (scaled_dot_product_attention document by
document).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rondo.errors import ConfigError, TrainError
from rondo.models.family import head_widths
from rondo.models.flash import flash_kernel, why_not_flash
from rondo.models.source import Attention

IMPLEMENTATION = "rondo_varlen"
SHORT = 128  # up to this many tokens the scores of a document are kept for the backward pass
_CACHE_ELEMENTS = 1 << 17  # scores per bucket on a CPU: what stays in a core's own cache

Heads = tuple[int, int]  # query heads, key/value heads
Kernel = Literal["flash", "short", "sdpa"]
# Keywords that carry nothing this function needs (rotary embeddings are applied already; positions are in the
# plan).
_IRRELEVANT = {"position_ids", "position_embeddings", "cache_position", "use_cache", "num_items_in_batch"}


@dataclass(frozen=True)
class Bucket:
    """Documents of similar length side by side, for the `short` kernel; all index tensors are int64.

    Queries are padded on the right to `width`: causal, so that no real query looks at padding. Index tensors
    address rows of [N * heads, D], so that one gather also brings the heads to the front.
    """

    docs: int
    width: int
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


@dataclass(frozen=True)
class Documents:
    """The document lengths of one micro-batch, as each kernel wants them. Made by `plan_documents`."""

    kernel: Kernel
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor  # int32 [B+1]
    max_length: int  # of a document and its prefix
    buckets: tuple[Bucket, ...] = ()
    unpadding: Unpadding | None = None


def register_varlen() -> None:
    """Makes transformers know `rondo_varlen`; called when a model is built (importing has no effect)."""
    AttentionInterface.register(IMPLEMENTATION, varlen_attention)


def fitting(attention: Attention, config: Any) -> Attention:
    """`attention` for a model of this transformers config: sdpa in the place of auto where the flash kernels
    do not take its heads (latent attention). Raises ConfigError where flash is asked for.
    """
    why_not = why_not_flash(*head_widths(config))
    if why_not and attention == "flash":
        raise ConfigError(
            f"model.attention=flash: a {config.model_type} model has {why_not}, which no flash kernel takes; "
            "use model.attention=auto"
        )
    return "sdpa" if why_not else attention


def choose_kernel(attention: Attention, device: torch.device, dtype: torch.dtype, max_length: int) -> Kernel:
    """Returns the kernel for documents of at most `max_length` tokens. Raises ConfigError when `flash` is
    asked for and absent.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    flash = device.type == "cuda" and half and flash_kernel() is not None
    if attention == "flash" and not flash:
        raise ConfigError(
            "model.attention=flash needs a CUDA device, compute_dtype bfloat16 or float16, and a kernel "
            f"(flash-attn, or torch's varlen_attn); here: {device}, {dtype}, {_kernel_name()}. "
            "Use model.attention=auto"
        )
    if flash and attention != "sdpa":
        return "flash"
    return "short" if max_length <= SHORT else "sdpa"


def _kernel_name() -> str:
    kernel = flash_kernel()
    return "no kernel" if kernel is None else f"kernel of {kernel[0]}"


def plan_documents(
    lengths: np.ndarray,
    kernel: Kernel,
    *,
    heads: Heads,
    device: torch.device,
    prefixes: np.ndarray | None = None,
) -> Documents:
    """Everything about a micro-batch that attention needs and that depends on lengths only.

    lengths: int [B], each at least 1; the documents lie one after another. prefixes: int [B], which document
    each one continues (its tokens come first, and are seen by all of this one's), -1 for none; only with the
    short kernel.
    """
    lengths = np.asarray(lengths, np.int64)
    prefixes = np.full(len(lengths), -1) if prefixes is None else np.asarray(prefixes, np.int64)
    prefix_lengths = np.where(prefixes >= 0, lengths[prefixes], 0)
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    longest = int((lengths + prefix_lengths).max(initial=0))
    plan = Documents(kernel, tuple(lengths.tolist()), cu_seqlens, longest)
    if kernel != "short":
        if np.any(prefixes >= 0):
            raise TrainError(
                f"shared prefixes need the short kernel, but documents of {longest} tokens use {kernel}"
            )
        return plan
    buckets, unpadding = _plan_buckets(lengths, prefixes, prefix_lengths, heads, device)
    return dataclasses.replace(plan, buckets=buckets, unpadding=unpadding)


def _plan_buckets(
    lengths: np.ndarray, prefixes: np.ndarray, prefix_lengths: np.ndarray, heads: Heads, device: torch.device
) -> tuple[tuple[Bucket, ...], Unpadding]:
    H, K = heads
    starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    unpad_queries, unpad_keys = np.empty((total, H), np.int64), np.empty((total, K), np.int64)
    shared_from, shared_to, buckets = [], [], []
    query_base = key_base = 0
    most = _CACHE_ELEMENTS if device.type == "cpu" else None
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
        index = [torch.from_numpy(array.reshape(-1)).to(device) for array in (query_rows, key_rows, padding)]
        buckets.append(Bucket(n, width, prefix, *index))
        query_base, key_base = query_base + query_rows.size, key_base + key_rows.size
    parts = (
        unpad_queries.reshape(-1),
        unpad_keys.reshape(-1),
        np.concatenate(shared_from),
        np.concatenate(shared_to),
    )
    return tuple(buckets), Unpadding(*(torch.from_numpy(part).to(device) for part in parts))


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


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    documents: Documents | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention within each document. query [1, H, N, D], key and value [1, K, N, D]; returns
    [1, N, H, Dv].

    Follows transformers' AttentionInterface. Refuses (ConfigError) what it does not know: a keyword ignored
    here would be a silent error of the loss. A sliding window is accepted where no document is longer than
    it.
    """
    asked_for = [
        name for name, v in other.items() if v is not None and v is not False and name not in _IRRELEVANT
    ]
    if documents is None or attention_mask is not None or dropout or is_causal is False or asked_for:
        _refuse(module, documents, attention_mask, dropout, is_causal, asked_for)
    assert documents is not None
    if sliding_window is not None and documents.max_length > sliding_window:
        raise ConfigError(
            f"{type(module).__name__} has a sliding window of {sliding_window} tokens and a document has "
            f"{documents.max_length}: packed attention with a window that bites is not supported yet; lower "
            "data.max_prompt_tokens + rollout.max_tokens to the window, or choose another model"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    return _KERNELS[documents.kernel](q, k, v, documents, scale)[None], None


def _refuse(
    module: torch.nn.Module,
    documents: Documents | None,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    asked_for: list[str],
) -> None:
    what = ", ".join(asked_for)
    if documents is None:
        what = "no `documents` (the model was called past the training engine, or does not hand keywords on)"
    elif attention_mask is not None:
        what = "an attention mask"
    elif dropout:
        what = f"dropout={dropout}"
    elif is_causal is False:
        what = "attention that is not causal"
    raise ConfigError(
        f"{type(module).__name__} calls packed attention with {what}, which it does not support"
    )


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
) -> torch.Tensor:
    kernel = flash_kernel()
    assert kernel is not None
    return kernel[1](q, k, v, documents.cu_seqlens, documents.max_length, scale)


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    heads_first = (tensor.transpose(0, 1)[None].split(documents.lengths, dim=2) for tensor in (q, k, v))
    parts = zip(*heads_first, strict=True)
    outs = [F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale) for a, b, c in parts]
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


class _ShortAttention(torch.autograd.Function):
    """softmax(scale · q kᵀ + causal) v per document, bucket by bucket, so that a bucket stays in the core's
    cache.

    Query heads that share a key head are rows of one matrix product. Scores stay for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
    ) -> torch.Tensor:
        """q [N, H, D], k [N, K, D], v [N, K, Dv] -> [N, H, Dv]."""
        (N, H, _), (K, D_out), unpadding = q.shape, v.shape[1:], documents.unpadding
        assert unpadding is not None
        rows_q, rows_k, rows_v = (tensor.reshape(-1, tensor.shape[2]) for tensor in (q, k, v))
        out = q.new_empty(sum(len(bucket.query_rows) for bucket in documents.buckets), D_out)
        base, saved = 0, []
        for bucket in documents.buckets:
            matrices = bucket.docs * K
            qb = rows_q.index_select(0, bucket.query_rows).view(matrices, -1, q.shape[2])
            kb = rows_k.index_select(0, bucket.key_rows).view(matrices, -1, k.shape[2])
            vb = rows_v.index_select(0, bucket.key_rows).view(matrices, -1, D_out)
            mask = _causal(bucket.width, bucket.prefix, H // K, q.dtype, q.device)
            scores = torch.baddbmm(mask, qb, kb.mT, alpha=scale)
            probs = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
            stop = base + len(bucket.query_rows)
            torch.bmm(probs, vb, out=out[base:stop].view(matrices, -1, D_out))
            base = stop
            saved += [qb, kb, vb, probs]
        ctx.save_for_backward(*saved)
        ctx.documents = documents
        ctx.scale = scale
        return out.index_select(0, unpadding.queries).view(N, H, D_out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, documents, unpadding = ctx.saved_tensors, ctx.documents, ctx.documents.unpadding
        N, H, D_out = grads[0].shape
        K, D = saved[1].shape[0] // documents.buckets[0].docs, saved[0].shape[2]
        rows_g = grads[0].reshape(N * H, D_out)
        num_queries = sum(len(bucket.query_rows) for bucket in documents.buckets)
        num_keys = sum(len(bucket.key_rows) for bucket in documents.buckets)
        grad_q, grad_k = rows_g.new_empty(num_queries, D), rows_g.new_empty(num_keys, D)
        grad_v = rows_g.new_empty(num_keys, D_out)
        query_base = key_base = 0
        for i, bucket in enumerate(documents.buckets):
            qb, kb, vb, probs = saved[4 * i : 4 * i + 4]
            query_stop, key_stop = query_base + len(bucket.query_rows), key_base + len(bucket.key_rows)
            gb = (
                rows_g.index_select(0, bucket.query_rows)
                .index_fill_(0, bucket.padding, 0)
                .view(*qb.shape[:2], -1)
            )
            torch.bmm(probs.mT, gb, out=grad_v[key_base:key_stop].view(vb.shape))
            grad_scores = torch._softmax_backward_data(torch.bmm(gb, vb.mT), probs, -1, probs.dtype).mul_(
                ctx.scale
            )
            torch.bmm(grad_scores, kb, out=grad_q[query_base:query_stop].view(qb.shape))
            torch.bmm(grad_scores.mT, qb, out=grad_k[key_base:key_stop].view(kb.shape))
            query_base, key_base = query_stop, key_stop
        back_k, back_v = (_collect_keys(grad, unpadding) for grad in (grad_k, grad_v))
        back_q = grad_q.index_select(0, unpadding.queries)
        return back_q.view(N, H, D), back_k.view(N, K, D), back_v.view(N, K, D_out), None, None


def _collect_keys(joined: torch.Tensor, unpadding: Unpadding) -> torch.Tensor:
    """Gradients of [N * K, D]: each key's own, plus those from the documents that share it."""
    own = joined.index_select(0, unpadding.keys)
    if len(unpadding.shared_from):
        own.index_add_(0, unpadding.shared_to, joined.index_select(0, unpadding.shared_from))
    return own


@functools.lru_cache(maxsize=256)
def _causal(width: int, prefix: int, group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[group * width, prefix + width]: 0 where a query may look, -inf elsewhere; once per query head of a
    group.
    """
    mask = torch.full((width, prefix + width), float("-inf"), dtype=dtype, device=device).triu_(1 + prefix)
    return mask.repeat(group, 1)


# q [N, H, D], k [N, K, D], v [N, K, Dv], documents, scale -> [N, H, Dv]
_KERNELS: dict[Kernel, Callable[..., torch.Tensor]] = {
    "flash": _flash,
    "short": _ShortAttention.apply,
    "sdpa": _sdpa,
}
