"""AdamW whose two moments take 8 bits a number: codes, and a scale for each block of at most 128 of them.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861): a block is divided by its
largest absolute value, and each number replaced by the nearest of 256 between -1 and 1 that are denser
towards 0 (dynamic tree quantisation). The update itself is computed before the moments are rounded.

A block lies along the last dimension, and scales have the place of that dimension's blocks: they are cut as
the parameter is. What a moment is rounded to does not depend on the number of ranks, and a checkpoint of one
number loads exactly into another. (torchao's and bitsandbytes' blocks run across rows, of each rank's shard
for itself.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rondo.platform import platform_of

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 64  # below, scales (float32) would take more than a sixteenth of what they save
_FEWEST = 4096  # smaller tensors (norms, biases) keep their moments: they save nothing, and matter most
# Numbers that exist in float32, some eight times: as many as stay in a CPU's cache, or keep a GPU busy.
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def block_of(parameter: torch.Tensor) -> int | None:
    """Returns how many numbers of a parameter share a scale: the largest divisor of at most 128 of its last
    dimension, or of the pieces that ranks cut that into. None: its moments stay in its own dtype.
    """
    if parameter.ndim < 2 or parameter.numel() < _FEWEST:
        return None
    piece, pieces = parameter.shape[-1], 1
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if (
                isinstance(placement, Shard | _StridedShard)
                and placement.dim % parameter.ndim == parameter.ndim - 1
            ):
                pieces *= size
    if piece % pieces:
        return None
    piece //= pieces
    return next((n for n in range(_LARGEST_BLOCK, _SMALLEST_BLOCK - 1, -1) if piece % n == 0), None)


def moments_8bit(parameter: torch.Tensor, local: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns both moments, at 0, of what this rank has of a parameter."""
    block, state = block_of(parameter), {}
    for name in _SIGNED:
        if block is None:
            state[name] = torch.zeros_like(local)
        else:
            scales = *local.shape[:-1], local.shape[-1] // block
            state[f"{name}_codes"] = torch.zeros_like(local, dtype=torch.uint8)
            state[f"{name}_scales"] = torch.zeros(scales, dtype=torch.float32, device=local.device)
    return state


def shape_of(moment: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape that one of the parameter's moments has as a whole."""
    if not moment.endswith("_scales"):
        return tuple(parameter.shape)
    block = block_of(parameter)
    assert block is not None
    return (*parameter.shape[:-1], parameter.shape[-1] // block)


class AdamW8bit(torch.optim.Optimizer):
    """Updates as torch's AdamW. Its owner puts the moments (`moments_8bit`) and `step` into `state`."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)


def _update(
    parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: Mapping[str, Any]
) -> None:
    """Updates one parameter and its moments, a slice at a time."""
    state["step"] += 1
    (beta1, beta2), lr, step = group["betas"], group["lr"], state["step"].double()
    rate, root = lr / (1 - beta1**step), (1 - beta2**step).sqrt()
    scales = state.get("exp_avg_scales")
    block = parameter.numel() if scales is None else parameter.numel() // scales.numel()
    rows, gradients = parameter.view(-1, block), gradient.reshape(-1, block)
    at_one_time = max(1, platform_of(parameter.device).numbers.moments // block)
    for start in range(0, len(rows), at_one_time):
        part = slice(start, start + at_one_time)
        grad = gradients[part]
        mean, square = (_read(state, name, part, block, grad.dtype) for name in _SIGNED)
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad * grad, 1 - beta2)
        _write(state, "exp_avg", part, block, mean)
        _write(state, "exp_avg_sq", part, block, square)
        denominator = square.sqrt().div_(root).add_(group["eps"])
        rows[part].mul_(1 - lr * group["weight_decay"]).sub_((mean / denominator).mul_(rate))


def _read(
    state: Mapping[str, torch.Tensor], name: str, part: slice, block: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns blocks [n, block] of a moment; the moment itself where it is not quantised."""
    if name in state:
        return state[name].view(-1, block)[part]
    codes, scales = state[f"{name}_codes"].view(-1, block)[part], state[f"{name}_scales"].view(-1)[part]
    numbers = torch.tensor(dynamic_map(signed=_SIGNED[name]), dtype=dtype, device=codes.device)
    return numbers.index_select(0, codes.flatten().int()).view(codes.shape).mul_(scales[:, None])


def _write(
    state: Mapping[str, torch.Tensor], name: str, part: slice, block: int, values: torch.Tensor
) -> None:
    """Quantises blocks [n, block]; a number halfway between two becomes the larger one."""
    if name in state:
        return  # it was the moment itself
    first_codes, halfway = _rounding(_SIGNED[name], values.device)
    scales = values.abs().amax(1)
    # A block of zeros has scale 0, and 0 / 0 would be NaN.
    scaled = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).float().flatten()
    # torch.bucketize searches each number anew, which takes ten times as long on a CPU.
    codes = first_codes.index_select(0, scaled.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF))
    codes += scaled >= halfway.index_select(0, codes)
    state[f"{name}_codes"].view(-1, block)[part] = codes.view(values.shape)
    state[f"{name}_scales"].view(-1)[part] = scales


@functools.cache
def _rounding(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, for each value of a float32's upper 16 bits, the code of the least number that has them, int32
    [65536]; and for each code the number from which on the next one is nearer, float32 [256]. Among the
    numbers with the same upper bits there is at most one such.
    """
    numbers = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    halfway = ((numbers[1:] + numbers[:-1]) / 2).float()
    upper = torch.arange(1 << 16) << 16
    least = torch.where(upper < 1 << 31, upper, upper + 0xFFFF)  # of negative numbers the longest
    values = least.to(torch.int32).view(torch.float32)
    codes = torch.bucketize(values, halfway, out_int32=True, right=True)
    return codes.to(device), torch.cat([halfway, torch.tensor([torch.inf])]).to(device)


@functools.cache
def dynamic_map(*, signed: bool) -> tuple[float, ...]:
    """Returns the 256 numbers that codes stand for, ascending: 0, 1, and the middles of 2^(e + 1) equal parts
    (signed: 2^e, of either sign) of [0.1, 1] · 10^(e - 6), for e = 0 … 6.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10 ** (exponent - 6) for i in range(parts)]
        numbers += middles + ([-middle for middle in middles] if signed else [])
    return tuple(sorted(numbers))
