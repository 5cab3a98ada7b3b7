"""What the PyTorch paths compute in one kernel each, in triton, on CUDA devices: attention that reads the
cache's blocks where they lie, and what stands between the matrix products of a Llama-like layer. A decode
step of one token per row is bound by the number of its kernels and by what attention moves.

Rounds where the module's own code rounds. No bit of a row depends on its batch mates: splits of the keys
begin at fixed positions, and are added in order. Imports triton, so it is imported only where it is used.
"""

# Parameters of kernels have no types that Python knows.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rondo.rollout.native.blocks import BLOCK

SPLIT = 4  # blocks of keys that one program reads: rows alone would not fill a device
_LOWEST = tl.constexpr(-1e30)  # a largest score before any is seen: finite, for inf - inf is no number


# ---- attention


# Not one kernel for each size of the block table: of these numbers no kernel makes anything.
@triton.jit(do_not_specialize=["num_blocks", "window"])
def _attend_kernel(
    query, keys, values, blocks, positions, parts, largest_of, total_of, row_stride, head_stride, num_blocks,
    scale, window, softcap,
    GROUP: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    KEY: tl.constexpr, KEY_WIDE: tl.constexpr, VALUE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A program has the query heads of a row that share a key head, and SPLIT blocks of the row's keys.

    Writes sums over these keys to parts [R, heads, splits, VALUE], and of the scores the largest and the sum
    of exponentials to [R, heads, splits]; where no key is seen, a sum of 0 and nothing in `parts`.
    """
    row, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    member = tl.arange(0, TILE)
    here = member < GROUP
    head = kv_head * GROUP + member
    position = tl.load(positions + row).to(tl.int32)
    # Padding comes behind all that the blocks hold, and sees nothing.
    last = tl.where(position < num_blocks * BLOCK, position // BLOCK + 1, 0)
    last = tl.minimum((split + 1) * SPLIT, last)
    first = split * SPLIT
    if WINDOW:
        first = tl.maximum(first, (position - window + 1) // BLOCK)
    key_dims, value_dims = tl.arange(0, KEY_WIDE), tl.arange(0, VALUE_WIDE)
    at = (query + row.to(tl.int64) * row_stride + head * head_stride)[:, None] + key_dims[None, :]
    asked = tl.load(at, mask=here[:, None] & (key_dims < KEY)[None, :], other=0.0)
    largest = tl.zeros((TILE,), tl.float32) + _LOWEST
    total = tl.zeros((TILE,), tl.float32)
    summed = tl.zeros((TILE, VALUE_WIDE), tl.float32)
    for number in range(first, last):
        block = tl.load(blocks + row * (num_blocks + 1) + number)
        lines = (block * BLOCK + tl.arange(0, BLOCK)) * kv_heads + kv_head
        at_keys, at_values = keys + lines[:, None] * KEY, values + lines[:, None] * VALUE
        key = tl.load(at_keys + key_dims[None, :], mask=(key_dims < KEY)[None, :], other=0.0)
        value = tl.load(at_values + value_dims[None, :], mask=(value_dims < VALUE)[None, :], other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            small = tl.exp(-2.0 * tl.abs(scores / softcap))
            scores = tl.where(scores < 0, -softcap, softcap) * ((1.0 - small) / (1.0 + small))
        age = position - number * BLOCK - tl.arange(0, BLOCK)
        seen = age >= 0
        if WINDOW:
            seen &= age < window
        scores = tl.where(seen[None, :], scores, _LOWEST)
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp(scores - larger[:, None]), 0.0)
        faded = tl.exp(largest - larger)
        total = total * faded + tl.sum(weights, 1)
        product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        summed = summed * faded[:, None] + product
        largest = larger
    place = (row.to(tl.int64) * (kv_heads * GROUP) + head) * splits + split
    tl.store(largest_of + place, largest, mask=here)
    tl.store(total_of + place, total, mask=here)
    mask = (here & (total > 0))[:, None] & (value_dims < VALUE)[None, :]
    tl.store(parts + place[:, None] * VALUE + value_dims[None, :], summed, mask=mask)


@triton.jit(do_not_specialize=["splits", "heads"])
def _join_kernel(
    parts, largest_of, total_of, sinks, out, splits, heads, VALUE: tl.constexpr, WIDE: tl.constexpr
):
    """Joins the splits of one query's keys, in their order."""
    line = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDE)
    largest, total = tl.full((), _LOWEST, tl.float32), tl.full((), 0.0, tl.float32)
    summed = tl.zeros((WIDE,), tl.float32)
    if sinks is not None:  # the first score that the sums have seen
        largest, total = tl.load(sinks + line % heads).to(tl.float32), total + 1.0
    for split in range(splits):
        place = line * splits + split
        more = tl.load(total_of + place)
        above = tl.load(largest_of + place)
        part = tl.load(parts + place * VALUE + dims, mask=dims < tl.where(more > 0, VALUE, 0), other=0.0)
        larger = tl.maximum(largest, above)
        faded, added = tl.exp(largest - larger), tl.exp(above - larger)
        total = total * faded + more * added
        summed = summed * faded + part * added
        largest = larger
    attended = summed / tl.where(total > 0, total, 1.0)
    tl.store(out + line * VALUE + dims, attended, mask=dims < VALUE)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends from query [R, heads, D], one per row at positions int64 [R], to what blocks int64 [R, n + 1]
    of keys and values [positions, kv_heads, D or Dv] hold: a query sees its own position and those before it.
    Returns [R, heads, Dv].

    The last column of `blocks` is padding's, whose positions are n · BLOCK or more: it sees nothing, and gets
    zeros. window: how many positions a query sees, its own included. softcap: scores s become
    softcap · tanh(s / softcap). sinks [heads]: one more score, which has no value.
    """
    (R, heads, D), (kv_heads, Dv), n = query.shape, values.shape[1:], blocks.shape[1] - 1
    if query.stride(2) != 1:
        query = query.contiguous()
    group, splits = heads // kv_heads, triton.cdiv(n, SPLIT)
    parts = query.new_empty((R, heads, splits, Dv), dtype=torch.float32)
    statistics = query.new_empty((2, R, heads, splits), dtype=torch.float32)
    widths = {"KEY": D, "KEY_WIDE": _wide(D), "VALUE": Dv, "VALUE_WIDE": _wide(Dv)}
    _attend_kernel[R, kv_heads, splits](
        query, keys, values, blocks, positions, parts, *statistics, query.stride(0), query.stride(1), n,
        scale, window or 0, softcap or 1.0,
        GROUP=group, TILE=_wide(group), BLOCK=BLOCK, SPLIT=SPLIT, **widths,
        WINDOW=window is not None, SOFTCAP=softcap is not None,
        num_warps=4, num_stages=2 if keys.dtype.itemsize == 2 else 1,
    )  # fmt: skip
    out = query.new_empty((R, heads, Dv))
    _join_kernel[(R * heads,)](
        parts, *statistics, sinks, out, splits, heads, VALUE=Dv, WIDE=triton.next_power_of_2(Dv), num_warps=1
    )
    return out


def _wide(size: int) -> int:
    """Returns the width of a tile for so many: tensor cores multiply 16 at least."""
    return max(16, triton.next_power_of_2(size))


# ---- between the matrix products of a layer


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Returns x as a tensor of `dtype` would hold it, in float32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _add_norm_kernel(x, delta, weight, out, width, eps, WIDE: tl.constexpr):
    """One row: adds `delta`, if there is one, to x in place, and writes the norm of the sum."""
    dtype: tl.constexpr = x.dtype.element_ty
    columns = tl.arange(0, WIDE)
    mask = columns < width
    places = tl.program_id(0).to(tl.int64) * width + columns
    row = _load(x + places, mask)
    if delta is not None:
        row = _rounded(row + _load(delta + places, mask), dtype)
        tl.store(x + places, row, mask=mask)
    normed = _rounded(row * tl.rsqrt(tl.sum(row * row) / width + eps), dtype)
    tl.store(out + places, normed * _load(weight + columns, mask), mask=mask)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds delta, if any, to x [..., H] in place. Returns the RMS norm of the sum, times weight [H]."""
    out, width = torch.empty_like(x), x.shape[-1]
    wide = triton.next_power_of_2(width)
    _add_norm_kernel[(x.numel() // width,)](
        x, delta, weight, out, width, eps, WIDE=wide, num_warps=max(1, min(8, wide // 512))
    )
    return out


@triton.jit
def _turned(x, scale, cos, sin, eps, D: tl.constexpr, WIDE: tl.constexpr):
    """Returns the two halves of one head x [D], each [WIDE]: normed if it has a `scale`, and turned."""
    dtype: tl.constexpr = x.dtype.element_ty
    low_dims = tl.arange(0, WIDE)
    high_dims, mask = low_dims + D // 2, low_dims < D // 2
    low, high = _load(x + low_dims, mask), _load(x + high_dims, mask)
    if scale is not None:
        by = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / D + eps)
        low = _rounded(_rounded(low * by, dtype) * _load(scale + low_dims, mask), dtype)
        high = _rounded(_rounded(high * by, dtype) * _load(scale + high_dims, mask), dtype)
    # Each product is rounded by itself, as in torch.
    low_cos = _rounded(low * _load(cos + low_dims, mask), dtype)
    high_sin = _rounded(high * _load(sin + low_dims, mask), dtype)
    high_cos = _rounded(high * _load(cos + high_dims, mask), dtype)
    low_sin = _rounded(low * _load(sin + high_dims, mask), dtype)
    return low_cos - high_sin, high_cos + low_sin


@triton.jit
def _turn_and_store_kernel(
    query, key, value, query_scale, key_scale, cos, sin, positions, addresses, keys, values, heads, kv_heads,
    eps, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one token: a query is turned in place, a key and a value go to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, WIDE)
    half: tl.constexpr = D // 2
    mask = dims < half
    table = tl.load(positions + token) * D
    if head < heads:
        x = query + (token * heads + head) * D
        low, high = _turned(x, query_scale, cos + table, sin + table, eps, D, WIDE)
        tl.store(x + dims, low, mask=mask)
        tl.store(x + half + dims, high, mask=mask)
    else:
        address = tl.load(addresses + token)
        if head < heads + kv_heads:
            x = key + (token * kv_heads + head - heads) * D
            low, high = _turned(x, key_scale, cos + table, sin + table, eps, D, WIDE)
            place = keys + (address * kv_heads + head - heads) * D
            tl.store(place + dims, low, mask=mask)
            tl.store(place + half + dims, high, mask=mask)
        else:
            x = value + (token * kv_heads + head - heads - kv_heads) * D
            place = values + (address * kv_heads + head - heads - kv_heads) * D
            tl.store(place + dims, tl.load(x + dims, mask=mask), mask=mask)
            tl.store(place + half + dims, tl.load(x + half + dims, mask=mask), mask=mask)


def turn_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    tables: tuple[torch.Tensor, torch.Tensor],
    at: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> None:
    """Norms and turns query [N, heads, D] in place, and key [N, kv_heads, D] on its way to the cache, where
    value [N, kv_heads, D] goes as it is. All three are contiguous.

    scales [D] of the norms of queries and keys: None where there are none. tables: cos and sin [length, D].
    at: positions and addresses in the cache, int64 [N]. cache: keys and values [addresses, kv_heads, D].
    """
    (N, heads, D), kv_heads = query.shape, key.shape[1]
    _turn_and_store_kernel[N, heads + 2 * kv_heads](
        query, key, value, *scales, *tables, *at, *cache, heads, kv_heads, eps,
        D=D, WIDE=triton.next_power_of_2(D // 2), num_warps=1,
    )  # fmt: skip


@triton.jit
def _gate_kernel(gate, up, count, WIDE: tl.constexpr):
    """gate = silu(gate) · up"""
    places = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    mask = places < count
    x = _load(gate + places, mask)
    opened = _rounded(x / (1.0 + tl.exp(-x)), gate.dtype.element_ty)
    tl.store(gate + places, opened * _load(up + places, mask), mask=mask)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) · up of two tensors of one shape, in the memory of `gate`."""
    _gate_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, gate.numel(), WIDE=1024, num_warps=4)
    return gate
