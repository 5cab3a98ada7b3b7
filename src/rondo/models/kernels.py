"""What packed attention computes with: causal attention within documents, from rows [N, heads, D].

`short` keeps the probabilities of a document for the backward pass; `sdpa` goes document by document through
scaled_dot_product_attention; what that one cannot do is computed by `blocked`, a block of queries at a time,
and once more in the backward pass; `flash` is a kernel of flash-attn or torch (CUDA, half precision).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rondo.models.documents import Documents, Kernel, Unpadding
from rondo.models.flash import ScoreRule, flash_kernel
from rondo.platform import platform_of

_LEAST_QUERIES = 64  # of a block, however long the document


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: Documents,
    rule: ScoreRule,
) -> torch.Tensor:
    """q [N, H, D], k [N, K, D], v [N, K, Dv] -> [N, H, Dv].

    sinks [H]: one more score per head, which takes part in the softmax and has no value.
    """
    return _KERNELS[documents.kernel](q, k, v, sinks, documents, rule)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: Documents,
    rule: ScoreRule,
) -> torch.Tensor:
    kernel = flash_kernel(q.device.type)
    assert kernel is not None
    if sinks is not None or (rule.softcap is not None and not kernel.takes_softcap):
        return _blocked(q, k, v, sinks, documents, rule)
    return kernel.call(q, k, v, documents.cu_seqlens, documents.max_length, rule)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    documents: Documents,
    rule: ScoreRule,
) -> torch.Tensor:
    masks: Sequence[torch.Tensor | None] = [None] * len(documents.lengths)
    if documents.together is not None:
        masks = [_mask_together(one, rule.window) for one in documents.together.split(documents.lengths)]
        assert sinks is None  # no family has them, or
        assert rule.softcap is None
    elif sinks is not None or not rule.plain:
        return _blocked(q, k, v, sinks, documents, rule)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    heads_first = (tensor.transpose(0, 1)[None].split(documents.lengths, dim=2) for tensor in (q, k, v))
    parts = zip(*heads_first, strict=True)
    outs = [
        F.scaled_dot_product_attention(*part, attn_mask=mask, is_causal=mask is None, scale=rule.scale)
        for part, mask in zip(parts, masks, strict=True)
    ]
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


def _mask_together(numbers: torch.Tensor, window: int | None) -> torch.Tensor:
    """[T, T]: whether a query sees a key: not behind it, or of the same number; and within the window."""
    at = torch.arange(len(numbers), device=numbers.device)
    back = at[:, None] - at
    seen = (back >= 0) | ((numbers[:, None] == numbers) & (numbers >= 0))
    return seen if window is None else seen & (back < window)


# ---- scores


class Probabilities(NamedTuple):
    """Matrices [matrices, rows, keys]: the rows are the queries of all heads that share a key head."""

    values: torch.Tensor
    """The probabilities themselves."""
    tanh: torch.Tensor | None
    """Of the scores over the soft-cap."""
    of_sinks: torch.Tensor | None
    """[matrices, rows, 1], in at least float32."""


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None, rule: ScoreRule
) -> Probabilities:
    """sinks [matrices, rows, 1]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tanh = None
    if rule.softcap is None:
        scores = torch.baddbmm(mask, q, k.mT, alpha=rule.scale)
    else:
        tanh = torch.bmm(q, k.mT).mul_(rule.scale / rule.softcap).tanh_()
        scores = torch.add(mask, tanh, alpha=rule.softcap)
    if sinks is None:
        return Probabilities(torch.softmax(scores, -1, dtype=wide).to(q.dtype), tanh, None)
    both = torch.softmax(torch.cat((scores, sinks), -1), -1, dtype=wide)
    return Probabilities(both[..., :-1].to(q.dtype).contiguous(), tanh, both[..., -1:].contiguous())


def _score_gradients(
    grad: torch.Tensor, probs: Probabilities, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes from the gradients of the probabilities those of q · kᵀ and of the sinks of every row.

    ∂L/∂s_j = p_j (g_j - Σ p g), where a sink's g is 0; the soft-cap's derivative is 1 - tanh².
    """
    of_sinks = None
    if probs.of_sinks is not None:
        of_sinks = (grad * probs.values).sum(-1, keepdim=True, dtype=probs.of_sinks.dtype)
        of_sinks = of_sinks.mul_(probs.of_sinks).neg_()
    scores = torch._softmax_backward_data(grad, probs.values, -1, probs.values.dtype)
    if probs.tanh is not None:
        scores.mul_(probs.tanh.square().neg_().add_(1))
    return scores.mul_(rule.scale), of_sinks


def _per_row(sinks: torch.Tensor | None, docs: int, kv_heads: int, width: int) -> torch.Tensor | None:
    """[H] -> [docs * K, group * width, 1]: the sink of each row of scores."""
    if sinks is None:
        return None
    return sinks.view(1, kv_heads, -1, 1).expand(docs, -1, -1, width).reshape(docs * kv_heads, -1, 1)


def _per_head(rows: torch.Tensor, docs: int, kv_heads: int, width: int) -> torch.Tensor:
    """The way back, for gradients: [docs * K, group * width, 1] -> [H]."""
    return rows.view(docs, kv_heads, -1, width).sum((0, 3)).view(-1)


def causal_mask(
    width: int, prefix: int, window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[group * width, prefix + width]: 0 where a query may look, -inf elsewhere; once per query head of a
    group. Query i is at position prefix + i.
    """
    mask = torch.full((width, prefix + width), float("-inf"), dtype=dtype, device=device).triu_(1 + prefix)
    if window is not None:
        mask += torch.full_like(mask, float("-inf")).tril_(prefix - window)
    return mask.repeat(group, 1)


_kept_mask = functools.lru_cache(maxsize=256)(causal_mask)  # for `short`, whose masks are small


# ---- short documents


class _ShortAttention(torch.autograd.Function):
    """softmax(rule(q kᵀ) + causal) v per document, bucket by bucket, so that a bucket stays in the core's
    cache.

    Query heads that share a key head are rows of one matrix product. Scores stay for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        documents: Documents,
        rule: ScoreRule,
    ) -> torch.Tensor:
        (N, H, _), (K, D_out) = q.shape, v.shape[1:]
        buckets, unpadding = documents.plans.of((H, K))
        rows_q, rows_k, rows_v = (tensor.reshape(-1, tensor.shape[2]) for tensor in (q, k, v))
        out = q.new_empty(sum(len(bucket.query_rows) for bucket in buckets), D_out)
        base = 0
        saved: list[torch.Tensor | None] = []
        for bucket in buckets:
            matrices = bucket.docs * K
            qb = rows_q.index_select(0, bucket.query_rows).view(matrices, -1, q.shape[2])
            kb = rows_k.index_select(0, bucket.key_rows).view(matrices, -1, k.shape[2])
            vb = rows_v.index_select(0, bucket.key_rows).view(matrices, -1, D_out)
            window = _biting(rule.window, bucket.prefix + bucket.width)
            mask = _kept_mask(bucket.width, bucket.prefix, window, H // K, q.dtype, q.device)
            probs = _probabilities(qb, kb, mask, _per_row(sinks, bucket.docs, K, bucket.width), rule)
            stop = base + len(bucket.query_rows)
            torch.bmm(probs.values, vb, out=out[base:stop].view(matrices, -1, D_out))
            base = stop
            saved += [qb, kb, vb, *probs]
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.rule = (buckets, unpadding), rule
        ctx.sinks_dtype = None if sinks is None else sinks.dtype
        return out.index_select(0, unpadding.queries).view(N, H, D_out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, (buckets, unpadding) = ctx.saved_tensors, ctx.plan
        N, H, D_out = grads[0].shape
        K, D = saved[1].shape[0] // buckets[0].docs, saved[0].shape[2]
        rows_g = grads[0].reshape(N * H, D_out)
        num_queries = sum(len(bucket.query_rows) for bucket in buckets)
        num_keys = sum(len(bucket.key_rows) for bucket in buckets)
        grad_q, grad_k = rows_g.new_empty(num_queries, D), rows_g.new_empty(num_keys, D)
        grad_v = rows_g.new_empty(num_keys, D_out)
        onto_sinks: list[torch.Tensor] = []
        query_base = key_base = 0
        for i, bucket in enumerate(buckets):
            qb, kb, vb, *rest = saved[6 * i : 6 * i + 6]
            probs = Probabilities(*rest)
            query_stop, key_stop = query_base + len(bucket.query_rows), key_base + len(bucket.key_rows)
            gb = (
                rows_g.index_select(0, bucket.query_rows)
                .index_fill_(0, bucket.padding, 0)
                .view(*qb.shape[:2], -1)
            )
            torch.bmm(probs.values.mT, gb, out=grad_v[key_base:key_stop].view(vb.shape))
            grad_scores, of_sinks = _score_gradients(torch.bmm(gb, vb.mT), probs, ctx.rule)
            torch.bmm(grad_scores, kb, out=grad_q[query_base:query_stop].view(qb.shape))
            torch.bmm(grad_scores.mT, qb, out=grad_k[key_base:key_stop].view(kb.shape))
            if of_sinks is not None:
                onto_sinks.append(_per_head(of_sinks, bucket.docs, K, bucket.width))
            query_base, key_base = query_stop, key_stop
        back_k, back_v = (_collect_keys(grad, unpadding) for grad in (grad_k, grad_v))
        back_q = grad_q.index_select(0, unpadding.queries)
        back_sinks = torch.stack(onto_sinks).sum(0).to(ctx.sinks_dtype) if onto_sinks else None
        return back_q.view(N, H, D), back_k.view(N, K, D), back_v.view(N, K, D_out), back_sinks, None, None


def _biting(window: int | None, length: int) -> int | None:
    """Returns the window; None where it hides nothing within `length` positions: the bits are those of no
    window.
    """
    return None if window is None or length <= window else window


def _collect_keys(joined: torch.Tensor, unpadding: Unpadding) -> torch.Tensor:
    """Gradients of [N * K, D]: each key's own, plus those from the documents that share it."""
    own = joined.index_select(0, unpadding.keys)
    if len(unpadding.shared_from):
        own.index_add_(0, unpadding.shared_to, joined.index_select(0, unpadding.shared_from))
    return own


# ---- documents of any length


class _Blocked(torch.autograd.Function):
    """`_ShortAttention` for documents of any length, a block of queries and the keys that it sees at a time;
    the backward pass computes the probabilities again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        documents: Documents,
        rule: ScoreRule,
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for queries, keys in _blocks(documents, q, rule.window):
            probs, _, _, values = _block(q, k, v, sinks, queries, keys, rule)
            out[queries] = _queries_first(torch.bmm(probs.values, values), q.shape[1])
        ctx.save_for_backward(q, k, v, sinks)
        ctx.documents, ctx.rule = documents, rule
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        K, grad_q, onto_sinks = k.shape[1], torch.empty_like(q), None
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in _blocks(ctx.documents, q, ctx.rule.window):
            probs, qb, kb, vb = _block(q, k, v, sinks, queries, keys, ctx.rule)
            gb = _heads_first(grads[0][queries], K)
            grad_scores, of_sinks = _score_gradients(torch.bmm(gb, vb.mT), probs, ctx.rule)
            grad_q[queries] = _queries_first(torch.bmm(grad_scores, kb), q.shape[1])
            grad_k[keys] += torch.bmm(grad_scores.mT, qb).transpose(0, 1)
            grad_v[keys] += torch.bmm(probs.values.mT, gb).transpose(0, 1)
            if of_sinks is not None:
                per_head = _per_head(of_sinks, 1, K, queries.stop - queries.start)
                onto_sinks = per_head if onto_sinks is None else onto_sinks.add_(per_head)
        back_sinks = None if onto_sinks is None else onto_sinks.to(sinks.dtype)
        return grad_q, grad_k, grad_v, back_sinks, None, None


def _blocks(documents: Documents, q: torch.Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yields rows of queries, and the rows of keys that at least one of them sees."""
    most = platform_of(q.device).numbers.scores // q.shape[1]
    start = 0
    for length in documents.lengths:
        # Blocks longer than the window would see mostly what none of their queries needs.
        step = max(_LEAST_QUERIES, most // length if window is None else min(window, most // (2 * window)))
        for first in range(0, length, step):
            last = min(first + step, length)
            oldest = 0 if window is None else max(0, first - window + 1)
            yield slice(start + first, start + last), slice(start + oldest, start + last)
        start += length


def _block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    queries: slice,
    keys: slice,
    rule: ScoreRule,
) -> tuple[Probabilities, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The probabilities of a block, and its queries [K, group * width, D], keys and values [K, seen, D]."""
    (H, K), width = (q.shape[1], k.shape[1]), queries.stop - queries.start
    qb = _heads_first(q[queries], K)
    kb, vb = k[keys].transpose(0, 1), v[keys].transpose(0, 1)
    window = _biting(rule.window, keys.stop - keys.start)
    mask = causal_mask(width, queries.start - keys.start, window, H // K, q.dtype, q.device)
    return _probabilities(qb, kb, mask, _per_row(sinks, 1, K, width), rule), qb, kb, vb


def _heads_first(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[width, H, D] -> [K, group * width, D]."""
    return rows.transpose(0, 1).reshape(kv_heads, -1, rows.shape[2])


def _queries_first(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[K, group * width, D] -> [width, H, D]."""
    return rows.view(num_heads, -1, rows.shape[2]).transpose(0, 1)


_short: Callable[..., torch.Tensor] = _ShortAttention.apply
_blocked: Callable[..., torch.Tensor] = _Blocked.apply
_KERNELS: dict[Kernel, Callable[..., torch.Tensor]] = {"flash": _flash, "short": _short, "sdpa": _sdpa}
