"""Linear modules whose weights rest in four bits (NF4), for a model of which only adapters learn (QLoRA),
through bitsandbytes: the one module that imports it.

Dettmers et al., QLoRA (arXiv:2305.14314), §3: of each 64 numbers the largest is kept, in float32, and of
every number which of 16 quantiles of a normal distribution it is nearest to, relative to that: 4.5 bits a
weight. (Not the paper's second quantisation, of the largest ones: it subtracts their mean, whose last bit
depends on the number of threads, and so would the model.) What a module computes is what it would with these
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from rondo.core.errors import ConfigError, DataError

_BLOCK = 64  # weights of one scale
_INSTALL = 'lora.base_dtype: nf4 needs the package bitsandbytes: pip install "rondo-rl[qlora]"'


def quantisation() -> Any:
    """Returns bitsandbytes' functions. Raises ConfigError where it is not installed."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of kernels that are not used here
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ConfigError(_INSTALL, key="lora.base_dtype") from error
    finally:
        log.setLevel(level)
    return bitsandbytes.functional


def check_nf4(param_dtype: str, compute_dtype: str, ranks: int) -> None:
    """Raises ConfigError where an engine cannot have weights in NF4. The dtypes are without `auto`."""
    key = "lora.base_dtype"
    if ranks > 1:
        raise ConfigError(
            f"{key}: weights in nf4 are on one rank, and this engine has {ranks}: give it one device, or "
            "remove the key and let the ranks share the weights out",
            key=key,
        )
    if param_dtype != compute_dtype:
        raise ConfigError(
            f"{key}: weights in nf4 multiply in the dtype of the others, and param_dtype={param_dtype} is "
            f"not compute_dtype={compute_dtype}: set param_dtype={compute_dtype} (adapters are in float32 "
            "all the same)",
            key="param_dtype",
        )
    if param_dtype == "float64":
        raise ConfigError(f"{key}: weights in nf4 multiply in float32 at most", key="param_dtype")
    quantisation()


class QuantisedLinear(torch.nn.Linear):
    """A linear module that keeps its weight in four bits and multiplies with what they stand for, in the
    weight's own dtype, made anew in each pass. The weight does not learn.

    Its parameter `weight` only says the shape and dtype: one NaN in memory, which shows
    where it is taken for the numbers.
    """

    def __init__(self, module: torch.nn.Linear, name: str, device: torch.device) -> None:
        """Takes the place of the module of this name. A weight that is on `meta` comes later (`quantise`)."""
        torch.nn.Module.__init__(self)
        self._name = name
        self.in_features, self.out_features = module.in_features, module.out_features
        weight, self.bias = module.weight, module.bias
        self._functions = quantisation()
        self._packed: torch.Tensor | None = None
        self._scales: Any = None
        nothing = torch.full((), torch.nan, dtype=weight.dtype, device=device)
        self.weight = torch.nn.Parameter(nothing.expand(weight.shape), requires_grad=False)
        if not weight.is_meta:
            self.quantise(weight.detach().to(device))

    def quantise(self, weight: torch.Tensor) -> None:
        """Takes over a weight [out, in]. Raises DataError for one that is not finite."""
        if not weight.isfinite().all():
            raise DataError(
                f"{self._name}.weight holds numbers that are not finite, for which nf4 has no place: mend "
                "the model's files, or leave out lora.base_dtype"
            )
        self._packed, self._scales = self._functions.quantize_4bit(
            weight.contiguous(), blocksize=_BLOCK, compress_statistics=False, quant_type="nf4"
        )

    def dequantised(self) -> torch.Tensor:
        """Returns the weight [out, in] that the module has, a new tensor."""
        assert self._packed is not None, "the weight was not read yet"
        weight: torch.Tensor = self._functions.dequantize_4bit(self._packed, self._scales)
        return weight

    def num_bytes(self) -> int:
        """Returns what the weight takes in memory."""
        assert self._packed is not None, "the weight was not read yet"
        return sum(tensor.nbytes for tensor in (self._packed, self._scales.absmax, self._scales.code))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x · Wᵀ + bias, [..., out], of x [..., in]."""
        product: torch.Tensor = _DequantisedProduct.apply(x, self)
        return product

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        weight, self._parameters["weight"] = self.weight, None
        super()._apply(fn, recurse)
        # The weight's one number, not as many as it stands for; the parameter stays itself.
        weight.data = fn(weight.data[0, 0]).expand(weight.shape)
        self._parameters["weight"] = weight
        if self._packed is not None:
            self._packed = fn(self._packed)
            self._scales.to(self._packed.device)
        return self


class _DequantisedProduct(torch.autograd.Function):
    """x · Wᵀ + bias; W, which is made for the product, is not kept until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: QuantisedLinear) -> torch.Tensor:
        ctx.module = module
        return linear(x, module.dequantised(), module.bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        product = grad.reshape(-1, grad.shape[-1]) @ ctx.module.dequantised()
        return product.view(*grad.shape[:-1], -1), None


def quantise_linears(
    model: torch.nn.Module, names: list[str], device: torch.device
) -> dict[str, QuantisedLinear]:
    """Puts quantised modules in the place of these; returns them by the names of their weights."""
    quantised = {}
    for name in names:
        module: Any = model.get_submodule(name)
        quantised[f"{name}.weight"] = own = QuantisedLinear(module, name, device)
        own.train(module.training)
        model.set_submodule(name, own)
    return quantised
