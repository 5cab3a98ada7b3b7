"""Published weights of a few bits, computed back to plain numbers one tensor at a time, as they are read.

fp8: a matrix of float8 and `…_scale_inv`, one factor per block. mxfp4: pairs of four-bit numbers in
`…_blocks` and one exponent per 32 of them in `…_scales` (GPT-OSS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rondo.core.errors import ConfigError
from rondo.models.files import FileTensor, tensors_in

METHODS = ("fp8", "mxfp4")
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"


def quantisation_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `quantization_config` of a model folder's config.json, perhaps of its language model; {}: the
    weights are plain. Raises ConfigError for a method whose weights cannot be computed back here.
    """
    text = config.get("text_config") or {}
    quantisation = config.get("quantization_config") or text.get("quantization_config") or {}
    method = quantisation.get("quant_method")
    if quantisation and method not in METHODS:
        raise ConfigError(
            f"model {folder}: its weights are quantised ({method!r} in quantization_config of config.json), "
            f"and of such methods rondo reads {' and '.join(METHODS)}; take the model's unquantised weights"
        )
    return dict(quantisation)


class Computed:
    """A tensor that is made when it is read (`computed[...]`), which is how transformers' loader reads."""

    def __init__(self, make: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> None:
        self._make = make
        self.shape = shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._make()[index]


def plain_tensors(files: Sequence[Path], quantisation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns name → what gives the tensor when it is read, of all safetensors files of a quantised model;
    the numbers that quantised ones stand for are float32 (mxfp4: bfloat16, which holds them exactly).
    """
    stored = tensors_in(files)
    tensors: dict[str, Any] = {name: one for name, one in stored.items() if name + _SCALE not in stored}
    if quantisation["quant_method"] == "fp8":
        block = quantisation.get("weight_block_size")
        for name in stored.keys() - tensors.keys():
            weight, scale = stored[name], tensors.pop(name + _SCALE)
            tensors[name] = Computed(partial(_scaled, weight, scale, block), weight.shape)
    else:
        for name in [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]:
            if name + _SCALES in stored:
                blocks, scales = tensors.pop(name + _BLOCKS), tensors.pop(name + _SCALES)
                *matrices, rows, groups, size = blocks.shape
                shape = (*matrices, groups * size * 2, rows)  # two numbers in a byte; rows and columns swap
                tensors[name] = Computed(partial(_unpacked, blocks, scales), shape)
    return tensors


def _scaled(weight: FileTensor, scale: FileTensor, block: Sequence[int] | None) -> torch.Tensor:
    values, factors = weight[...].float(), scale[...]
    if factors.dtype is torch.uint8:  # exponents of 2, stored as bytes
        factors = factors.view(torch.float8_e8m0fnu)
    factors = factors.float()
    if block is not None:  # the last blocks of rows or columns may be cut off
        rows, columns = values.shape[-2:]
        factors = factors.repeat_interleave(block[0], -2)[..., :rows, :]
        factors = factors.repeat_interleave(block[1], -1)[..., :columns]
    return values.mul_(factors)


def _unpacked(blocks: FileTensor, scales: FileTensor) -> torch.Tensor:
    plain: torch.Tensor = convert_moe_packed_tensors(blocks[...], scales[...], dtype=torch.bfloat16)
    return plain
