"""Log-probs and entropies whose logits exist only as tiles in registers: kernels in triton, for CUDA
(`logits_bytes: null`). Equal to the chunks of `torch_backend.head`, whose docstrings have the formulas.

    kernel               a program has              and writes
    _read_kernel         rows, a part of the tokens a row's largest logit and sums of that part
    _onto_hidden_kernel  rows, goes over all tokens its rows of grad_hidden
    _onto_weight_kernel  tokens, goes over all rows its rows of grad_weight and grad_bias

No two programs write to one place, and each adds in one order, without atomics: the same inputs give the same
bits. Both backward kernels compute the tiles again, and add to matrices in memory: a row of the hidden size
is too long for registers. (cut-cross-entropy has the idea, adds across programs in any order, and has no
entropy.) The module imports triton, so it is imported only where it is used.
"""

# Parameters of kernels have no types that Python knows.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rondo.models.family import LogitTransform
from rondo.training.views import Vocabulary

FUSED_OUTPUTS = ("log_probs", "entropy", "sum_p_squared")
_PARTS = 16  # of the tokens, by programs of their own: a few rows alone would leave most of a device idle
_LOWEST = tl.constexpr(-1e30)  # a largest logit before any is seen: finite, for inf - inf is no number


class Shape(NamedTuple):
    """The shape of a tile of logits, and how the kernel runs it.

    By the size of a number: what is loaded ahead must fit into the shared memory of small devices (99 KiB).
    """

    ROWS: int
    """Rows of the vocabulary in a tile [ROWS, TOKENS]."""
    TOKENS: int
    """Tokens in a tile."""
    WIDTH: int
    """How much of the hidden size is summed at one time."""
    num_warps: int
    """Triton's num_warps."""
    num_stages: int
    """Triton's num_stages: how many loads are under way at one time."""


_SHAPES = {2: Shape(64, 128, 64, 8, 3), 4: Shape(32, 64, 32, 4, 2)}


# ---- tiles


@triton.jit
def _block(matrix, rows, columns, num_rows, width):
    """Returns these rows and columns of a matrix [num_rows, width], 0 beyond it."""
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    return tl.load(matrix + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _add_products(onto, left, matrix, own, others, num_own, num_others, width, WIDTH: tl.constexpr):
    """Adds left [own, others] · matrix[others] to onto[own], which nobody else writes to."""
    for start in range(0, width, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        so_far = _block(onto, own, columns, num_own, width)
        right = _block(matrix, others, columns, num_others, width)
        total = tl.dot(left, right, so_far, input_precision="ieee")
        mask = (own < num_own)[:, None] & (columns < width)[None, :]
        tl.store(onto + own.to(tl.int64)[:, None] * width + columns[None, :], total, mask=mask)
    tl.debug_barrier()  # the next tile's loads, by whichever threads, see these stores


@triton.jit
def _logits(
    hidden, weight, bias, rows, tokens, num_rows, num_tokens, width, inner, outer,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Returns a tile of z, and of ∂z/∂product. Without a soft-cap z = outer · inner · product, with one
    z = outer · tanh(inner · product).
    """
    product = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, width, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        left = _block(hidden, rows, columns, num_rows, width)
        right = tl.trans(_block(weight, tokens, columns, num_tokens, width))
        product = tl.dot(left, right, product, input_precision="ieee")
    if bias is not None:
        product += tl.load(bias + tokens, mask=tokens < num_tokens, other=0.0).to(tl.float32)[None, :]
    z = product * inner
    slope = tl.zeros_like(product) + inner * outer
    if SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(z))
        z = tl.where(z < 0, -1.0, 1.0) * ((1.0 - small) / (1.0 + small))
        slope *= 4.0 * small / ((1.0 + small) * (1.0 + small))
    return z * outer, slope


@triton.jit
def _onto_products(
    z, slope, rows, tokens, targets, saved, grads, num_rows, num_tokens, ENTROPY: tl.constexpr
):  # fmt: skip
    """Returns a tile of the gradient of hidden · weightᵀ, 0 beyond its rows and tokens.

    saved [3, M]: largest z, log Σ exp(z - largest), entropy. grads [2, M]: of log-probs, of entropies.
    """
    here = rows < num_rows
    log_p = z - tl.load(saved + rows, mask=here, other=0.0)[:, None]
    log_p -= tl.load(saved + num_rows + rows, mask=here, other=0.0)[:, None]
    onto_target = tl.load(grads + rows, mask=here, other=0.0)[:, None]
    factor = onto_target
    if ENTROPY:
        entropy = tl.load(saved + 2 * num_rows + rows, mask=here, other=0.0)[:, None]
        factor += tl.load(grads + num_rows + rows, mask=here, other=0.0)[:, None] * (log_p + entropy)
    target = tl.load(targets + rows, mask=here, other=-1)
    onehot = target[:, None] == tokens[None, :]
    grad = tl.where(onehot, onto_target, 0.0) - tl.exp(log_p) * factor
    return tl.where(here[:, None] & (tokens < num_tokens)[None, :], grad * slope, 0.0)


# ---- kernels


@triton.jit(do_not_specialize=["num_rows"])
def _read_kernel(
    hidden, weight, bias, targets, stats, num_rows, num_tokens, width, inner, outer, part_tiles,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Fills stats [5, parts, M] with what `_combined` adds up: of each row and part of the tokens the largest
    z, m; Σ e, Σ e (z - m) and Σ e², e being exp(z - m); and z of the target, or 0.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    here = rows < num_rows
    target = tl.load(targets + rows, mask=here, other=-1)
    largest = tl.zeros((ROWS,), tl.float32) + _LOWEST
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    picked = tl.zeros((ROWS,), tl.float32)
    for tile in range(part * part_tiles, tl.minimum((part + 1) * part_tiles, tl.cdiv(num_tokens, TOKENS))):
        tokens = tile * TOKENS + tl.arange(0, TOKENS)
        z, _ = _logits(
            hidden, weight, bias, rows, tokens, num_rows, num_tokens, width, inner, outer,
            ROWS, TOKENS, WIDTH, SOFTCAP,
        )  # fmt: skip
        picked += tl.sum(tl.where(target[:, None] == tokens[None, :], z, 0.0), 1)
        inside = (tokens < num_tokens)[None, :]
        above = tl.maximum(largest, tl.max(tl.where(inside, z, _LOWEST), 1))
        lower = largest - above
        shrunk = tl.exp(lower)
        shifted = tl.where(inside, z - above[:, None], 0.0)
        e = tl.where(inside, tl.exp(shifted), 0.0)
        weighted = shrunk * (weighted + total * lower) + tl.sum(e * shifted, 1)
        total = shrunk * total + tl.sum(e, 1)
        squares = shrunk * shrunk * squares + tl.sum(e * e, 1)
        largest = above
    at = stats + part.to(tl.int64) * num_rows + rows
    next_one = tl.num_programs(1).to(tl.int64) * num_rows
    tl.store(at, largest, mask=here)
    tl.store(at + next_one, total, mask=here)
    tl.store(at + 2 * next_one, weighted, mask=here)
    tl.store(at + 3 * next_one, squares, mask=here)
    tl.store(at + 4 * next_one, picked, mask=here)


@triton.jit(do_not_specialize=["num_rows"])
def _onto_hidden_kernel(
    hidden, weight, bias, targets, saved, grads, grad_hidden, num_rows, num_tokens, width, inner, outer,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """Adds to grad_hidden [M, H], float32, which is 0."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for first in range(0, num_tokens, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        z, slope = _logits(
            hidden, weight, bias, rows, tokens, num_rows, num_tokens, width, inner, outer,
            ROWS, TOKENS, WIDTH, SOFTCAP,
        )  # fmt: skip
        grad = _onto_products(z, slope, rows, tokens, targets, saved, grads, num_rows, num_tokens, ENTROPY)
        narrow = grad.to(weight.dtype.element_ty)
        _add_products(grad_hidden, narrow, weight, rows, tokens, num_rows, num_tokens, width, WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _onto_weight_kernel(
    hidden, weight, bias, targets, saved, grads, grad_weight, grad_bias, num_rows, num_tokens, width,
    inner, outer,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """Adds to grad_weight [V, H], float32, which is 0. With a bias, writes grad_bias [V], float32."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    onto_bias = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        z, slope = _logits(
            hidden, weight, bias, rows, tokens, num_rows, num_tokens, width, inner, outer,
            ROWS, TOKENS, WIDTH, SOFTCAP,
        )  # fmt: skip
        grad = _onto_products(z, slope, rows, tokens, targets, saved, grads, num_rows, num_tokens, ENTROPY)
        onto_bias += tl.sum(grad, 0)
        narrow = tl.trans(grad.to(weight.dtype.element_ty))
        _add_products(grad_weight, narrow, hidden, tokens, rows, num_tokens, num_rows, width, WIDTH)
    if bias is not None:
        tl.store(grad_bias + tokens, onto_bias, mask=tokens < num_tokens)


# ---- autograd


def fused_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    transform: LogitTransform,
    temperature: float,
    vocabulary: Vocabulary | None = None,
) -> dict[str, torch.Tensor]:
    """Computes FUSED_OUTPUTS, each float32 [M], as `token_log_probs` does. hidden [M, H] and weight [V, H] of
    one dtype: float32, bfloat16 or float16.

    vocabulary: weight and bias, whole tensors, are of this rank's tokens.
    """
    if vocabulary is not None:
        targets = targets - vocabulary.own.start  # another rank's is no token, or a masked one, whose z is 0
    inner, outer = float(transform.scale), 1.0 / temperature
    if transform.softcap is not None:
        inner, outer = inner / transform.softcap, outer * transform.softcap
    constants = {"SOFTCAP": transform.softcap is not None, **_SHAPES[weight.dtype.itemsize]._asdict()}
    inputs = hidden.contiguous(), weight.contiguous(), bias, targets
    outputs = _Fused.apply(*inputs, (inner, outer), constants, vocabulary)
    return dict(zip(FUSED_OUTPUTS, outputs, strict=True))


class _Fused(torch.autograd.Function):
    """Computes FUSED_OUTPUTS, with gradients of the first two. factors: `inner` and `outer` of `_logits`;
    constants: of all kernels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        factors: tuple[float, float],
        constants: dict[str, Any],
        vocabulary: Vocabulary | None,
    ) -> tuple[torch.Tensor, ...]:
        (M, H), V = hidden.shape, len(weight)
        stats = hidden.new_empty((5, _PARTS, M), dtype=torch.float32)
        part_tiles = triton.cdiv(triton.cdiv(V, constants["TOKENS"]), _PARTS)
        _read_kernel[triton.cdiv(M, constants["ROWS"]), _PARTS](
            hidden, weight, bias, targets, stats, M, V, H, *factors, part_tiles, **constants
        )
        largest, total, weighted, squares, picked = _combined(stats, vocabulary)
        log_total = total.log()
        entropy = log_total - weighted / total
        # Not their sum, which would lose digits where logits are large.
        saved = torch.stack((largest, log_total, entropy))
        ctx.save_for_backward(hidden, weight, bias, targets, saved)
        ctx.factors, ctx.constants, ctx.vocabulary = factors, constants, vocabulary
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs nothing
        sum_p_squared = squares / total.square()
        ctx.mark_non_differentiable(sum_p_squared)
        return (picked - largest) - log_total, entropy, sum_p_squared

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, saved = ctx.saved_tensors
        (M, H), V = hidden.shape, len(weight)
        wide = {"dtype": torch.float32, "device": hidden.device}
        grads = torch.zeros((2, M), **wide)
        for place, grad in enumerate(given[:2]):
            if grad is not None:
                grads[place] = grad
        inputs = (hidden, weight, bias, targets, saved, grads)
        sizes = (M, V, H, *ctx.factors)
        constants = {"ENTROPY": given[1] is not None, **ctx.constants}
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.zeros((M, H), **wide)
            grid = (triton.cdiv(M, constants["ROWS"]),)
            _onto_hidden_kernel[grid](*inputs, grad_hidden, *sizes, **constants)
            grad_hidden = grad_hidden.to(hidden.dtype)
            if ctx.vocabulary is not None:
                ctx.vocabulary.sum(grad_hidden)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grad_weight = torch.zeros((V, H), **wide)
            grad_bias = None if bias is None else torch.empty(V, **wide)
            grid = (triton.cdiv(V, constants["TOKENS"]),)
            _onto_weight_kernel[grid](*inputs, grad_weight, grad_bias, *sizes, **constants)
            grad_weight = grad_weight.to(weight.dtype)
            grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _combined(stats: torch.Tensor, vocabulary: Vocabulary | None) -> tuple[torch.Tensor, ...]:
    """Returns the five of `_read_kernel` of all tokens, [M] each: of its parts, then of all ranks."""
    each, total, weighted, squares, picked = stats.unbind()
    largest = each.amax(0)
    if vocabulary is not None:
        vocabulary.largest(largest)
    lower = each - largest
    shrunk = lower.exp()
    sums = torch.stack(
        (shrunk * total, shrunk * (weighted + total * lower), shrunk.square() * squares, picked)
    ).sum(1)
    if vocabulary is not None:
        vocabulary.sum(sums)
    return largest, *sums.unbind()
