"""Imported at the start of every process of .venv-engines: a .pth file there says so (`make test-engines`
writes it), which hides no sitecustomize of the machine, and is hidden by none: Debian's Python has one. Two
things that SGLang imports and that are not there on a machine without a GPU are filled in when they are asked
for:

- `sgl_kernel` (compiled for CUDA), where none is installed: a stand-in whose functions raise when called,
  but for one small copy;
- torchvision's operators, where its compiled library does not load (beside a CPU build of torch): their
  names, for which torchvision registers shape functions. SGLang needs torchvision for images only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_KERNELS = "sgl_kernel"
_PARTS = ("elementwise", "flash_attn", "mamba", "quantization", "utils")  # SGLang does without the others
_SHAPES = "torchvision._meta_registrations"
_OPERATORS = ("nms", "qnms")  # the shape functions that are registered without a look for the library


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: `sgl_kernel` and parts of it, when no other finder knows them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in (_KERNELS, *(f"{_KERNELS}.{part}" for part in _PARTS)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def missing(function: str) -> Callable[..., Any]:
            if function.startswith("__"):
                raise AttributeError(function)

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError(
                    f"SGLang called {name}.{function}, a kernel that is not installed on this machine"
                )

            return refuse

        module.__getattr__ = missing  # type: ignore[method-assign]
        if name == _KERNELS:
            module.copy_all_layer_kv_cache_cpu = _copy_cache  # type: ignore[attr-defined]


def _copy_cache(keys: Any, values: Any, to: Any, of: Any, *_: Any) -> None:
    """The one kernel that plain decoding calls: cache slots `of` to slots `to`, in every layer."""
    for layer in (*keys, *values):
        layer[to] = layer[of]


class _Operators(importlib.abc.MetaPathFinder):
    """The first finder: defines the operators just before their shape functions are registered."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != _SHAPES:
            return None
        sys.meta_path.remove(self)
        _define_operators()
        return importlib.util.find_spec(name)


def _define_operators() -> None:
    import torch
    from torchvision import extension

    if not extension._has_ops():
        for name in _OPERATORS:
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


sys.meta_path.insert(0, _Operators())
sys.meta_path.append(_StandIn())
