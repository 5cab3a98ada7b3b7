"""A model whose parameters are not there yet, and the files that they are read from: each rank reads its own
boxes of them, and no rank ever holds the whole model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rondo.models.files import tensor_files
from rondo.models.names import Parts, whole_part
from rondo.models.quantised import plain_tensors
from rondo.models.shards import stored_tensors
from rondo.weights.layout import Box

_FILLS = {"constant_", "fill_", "kaiming_uniform_", "normal_", "ones_", "uniform_", "zero_", "zeros_"}


class NoFilling(TorchFunctionMode):
    """Inside, tensors without data are not filled: torch goes through the whole arithmetic of random numbers,
    in Python, for each parameter that a model's constructor initialises.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Has modules that this thread makes inside have parameters without data. Their buffers are real: some
    are computed, and in no file (rotary frequencies). Tied parameters stay tied.
    """
    register, here = torch.nn.Module.register_parameter, threading.get_ident()

    def registered(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and threading.get_ident() == here:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        with NoFilling():
            yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise(model: torch.nn.Module, device: torch.device) -> None:
    """Gives parameters without data (of FSDP: this rank's shards) memory on the device, whatever is in it.
    Tied ones stay tied.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(id(parameter), []).append((module, name))
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for (first, first_name), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


@contextmanager
def random_parameters(module: torch.nn.Module) -> Iterator[None]:
    """Gives a module's parameters without data random numbers inside (the same each time), so that it can be
    tried.
    """
    generator = torch.Generator().manual_seed(0)
    held = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for owner, name, parameter in held:
        numbers = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        owner._parameters[name] = torch.nn.Parameter(numbers)
    try:
        yield
    finally:
        for owner, name, parameter in held:
            owner._parameters[name] = parameter


class StoredModel:
    """The tensors of a folder's safetensors files, by their names; a part is read when it is asked for."""

    def __init__(self, folder: Path, quantisation: Mapping[str, Any], prefix: str = "") -> None:
        """Reads the files' headers only. quantisation: the folder's (`quantised.quantisation_of`). prefix:
        taken from the names that begin so.
        """
        if quantisation:
            found = plain_tensors(tensor_files(folder), quantisation)
        else:
            found = stored_tensors(folder)
        self._tensors = {name.removeprefix(prefix): one for name, one in found.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor."""
        return {name: one.shape for name, one in self._tensors.items()}

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor, Box, tuple[int, ...]]], parts: Parts) -> None:
        """Reads into tensors, in their dtype: (module's name, tensor, its box, the shape of the whole) each.

        parts: of the model. At most one tensor of a file is in memory beside them.
        """
        with torch.no_grad():
            for name, tensor, box, shape in tensors:
                for part in parts.get(name, (whole_part(name, shape),)):
                    region = part.box.intersection(box)
                    if region is None:
                        continue
                    stored, inside = self._tensors[part.name], region.slices(part.box)
                    in_front = len(inside) - len(part.shape)
                    if in_front >= 0 and part.box.shape == (1,) * in_front + part.shape:
                        read = stored[inside[in_front:]].view(region.shape)
                    else:  # the file lacks other dimensions of size 1 than those in front
                        read = stored[()].view(part.box.shape)[inside]
                    tensor[region.slices(box)].copy_(read)
