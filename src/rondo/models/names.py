"""What checkpoints call the tensors of a model, and how they cut them.

The modules of transformers hold some tensors in another form than checkpoints do: the experts of a mixture
are one tensor in the module and one per matrix in the file. Weights travel as the module has them; for a
checkpoint's tensors (vLLM, SGLang, an exported folder) they are taken apart here, without copying. Names
and shapes come from transformers' own table of conversions, read backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    revert_weight_conversion,
)

from rondo.core.errors import ConfigError
from rondo.weights.layout import Box


@dataclass(frozen=True)
class TensorPart:
    """A checkpoint's tensor: a region of a module's tensor."""

    name: str
    """The checkpoint's."""
    box: Box
    """The region."""
    shape: tuple[int, ...]
    """The checkpoint's: the region's, perhaps without dimensions of size 1."""


# By the module's name; of a tensor that is not there, the checkpoint's name and form are the module's.
Parts = Mapping[str, tuple[TensorPart, ...]]


def whole_part(name: str, shape: Sequence[int]) -> TensorPart:
    """Returns the one part of a tensor that checkpoints hold as the module does."""
    return TensorPart(name, Box.whole(shape), tuple(shape))


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what a checkpoint holds: every parameter, and every buffer that is one of the weights (a
    router's bias, say); tied parameters under each of their names.
    """
    yield from model.named_parameters(remove_duplicate=False)
    yield from persistent_buffers(model)


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, owner in model.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def parts_of(model: PreTrainedModel) -> Parts:
    """Returns the parts of those of the model's tensors that checkpoints hold in another form.

    Raises ConfigError where transformers converts a tensor in a way that is not known here.
    """
    # Prefixes are those of larger models' checkpoints (images), from which this one may have been read.
    conversions = [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(conversion, PrefixChange)
    ]
    # A loaded model remembers how the names in its own folder were changed; this is how they are written.
    model._weight_conversions = conversions
    if not conversions:
        return {}
    backwards = [conversion.reverse_transform() for conversion in reversed(conversions)]
    converters = [one for one in backwards if isinstance(one, WeightConverter)]
    parts = {}
    for name, tensor in weights_of(model):
        shape = tuple(tensor.shape)
        made = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})
        shapes = {checkpoint_name: tuple(one.shape) for checkpoint_name, one in made.items()}
        if shapes == {name: shape}:
            continue
        used = next((one for one in converters if one.rename_source_key(name)[1] is not None), None)
        boxes = [Box.whole(shape)]
        if used is not None:
            boxes = _boxes(used.operations, len(used.target_patterns), shape)
        if [box.size for box in boxes] != [torch.Size(one).numel() for one in shapes.values()]:
            raise ConfigError(
                f"checkpoints of {model.config.model_type} hold {name!r} in a form that rondo does not know: "
                f"{', '.join(map(repr, used.operations if used else conversions))}"
            )
        parts[name] = tuple(TensorPart(one, box, shapes[one]) for one, box in zip(shapes, boxes, strict=True))
    return parts


def _boxes(operations: Iterable[ConversionOps], num_targets: int, shape: tuple[int, ...]) -> list[Box]:
    """Returns the regions into which the operations cut a tensor, in the order in which transformers names
    them; none for operations that do more than cut.
    """
    boxes = [Box.whole(shape)]
    for operation in operations:
        # Of what was cut into single matrices the first dimension is gone in the checkpoint, but not here.
        if isinstance(operation, Chunk) and operation.num_shards_attribute is None:
            count = num_targets
        elif isinstance(operation, SplitModulelist) and operation.dim == 0:
            count = shape[0]
        else:
            return []
        boxes = [piece for box in boxes for piece in _cut(box, operation.dim, count)]
    return boxes


def _cut(box: Box, dim: int, count: int) -> list[Box]:
    """Cuts a box into `count` equal ones along a dimension."""
    size, rest = divmod(box.shape[dim], count)
    assert rest == 0
    pieces = []
    for index in range(count):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += index * size
        shape[dim] = size
        pieces.append(Box(tuple(offset), tuple(shape)))
    return pieces


def separate(tensors: Iterable[tuple[str, torch.Tensor]], parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a checkpoint's tensors, as views of the module's."""
    for name, tensor in tensors:
        whole = Box.whole(tensor.shape)
        for part in parts.get(name, (whole_part(name, tensor.shape),)):
            yield part.name, tensor[part.box.slices(whole)].view(part.shape)
