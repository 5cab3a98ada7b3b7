"""Operations after which the host has to wait for a device, because a number or a size is in the answer. They
are seen on a CPU, where nothing is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALWAYS = {
    getattr(_aten, name).default
    for name in ("_local_scalar_dense", "nonzero", "bincount", "_unique2", "equal", "masked_select")
}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class DeviceReads(TorchDispatchMode):
    """Inside, `seen` gets the names of such operations; what `tolist` reads, of tensors of any size, is not
    among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = function in _ALWAYS
        if function is _aten.repeat_interleave.Tensor:
            reads = kwargs.get("output_size") is None
        elif function in _INDEXED:  # by a mask: how many are chosen is not known before
            reads = any(one is not None and one.dtype == torch.bool for one in args[1])
        if reads:
            self.seen.append(str(function))
        return function(*args, **kwargs)
