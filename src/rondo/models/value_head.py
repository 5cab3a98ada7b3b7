"""The critic's head: one number per position, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rondo.core.errors import DataError
from rondo.models.files import json_object, tensors_in
from rondo.models.shards import stored_tensors
from rondo.system.hub import copy_of

PREFIX = "value_head."  # what the names of a critic's own parameters begin with
FILE = "value_head.safetensors"  # beside the trunk's weights in an exported critic
# What the names of a head begin with in folders of others, in that file or among the model's own tensors:
# TRL's and LLaMA-Factory's; verl's, OpenRLHF's and transformers' classifiers of one label; older OpenRLHF's.
_OTHERS = ("v_head.summary.", "score.", "value_head.")


class ValueHead(torch.nn.Module):
    """V = w·h + b in at least float32, from hidden states [M, H] to values [M]. Starts at 0: V = 0
    everywhere.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return torch.mv(hidden.to(wide), self.weight[0].to(wide)) + self.bias.to(wide)


def replace_lm_head(model: PreTrainedModel, path: str | None, dtype: torch.dtype) -> ValueHead:
    """Drops the model's output head and returns a value head on the CPU, read from `path` if an exported
    critic lies there.
    """
    head = ValueHead(model.get_input_embeddings().embedding_dim, dtype)
    _drop_lm_head(model)
    stored = {} if path is None else stored_head(copy_of(path))
    with torch.no_grad():
        for name, tensor in stored.items():  # without a bias it is 0
            own = head.get_parameter(name)
            if tensor.shape != own.shape:
                shapes = f"{tuple(tensor.shape)}, the model needs {tuple(own.shape)}"
                raise DataError(f"{path}: the value head's {name!r} has shape {shapes}")
            own.copy_(tensor[...])
    return head


def stored_head(folder: Path) -> dict[str, Any]:
    """Returns the weight, and the bias if it has one, of the value head in a folder; {}: it has no such head.
    Raises DataError where FILE has none that is known by its name, or is lost.
    """
    file = folder / FILE
    there = tensors_in([file]) if file.is_file() else stored_tensors(folder)
    for prefix in ("", *_OTHERS):
        found = {name: there[prefix + name] for name in ("weight", "bias") if prefix + name in there}
        if "weight" in found:
            return found
    if file.is_file():
        raise DataError(f"{file}: there is no value head among {', '.join(sorted(there))}; {KNOWN_AS}")
    manifest = folder / "manifest.json"  # of an export of rondo's
    if manifest.is_file() and FILE in str(json_object(manifest)):
        raise DataError(f"{folder}: {FILE} is lost, which its manifest.json lists; copy it, too")
    return {}


def is_of_head(name: str) -> bool:
    """Says whether a tensor of a model's files is a value head's."""
    return any(name in (f"{prefix}weight", f"{prefix}bias") for prefix in _OTHERS)


KNOWN_AS = (
    "a value head is known by the names weight and bias, with nothing before them in "
    f"{FILE}, else behind {', '.join(_OTHERS)}: rename its tensors"
)


def _drop_lm_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if child is head:
                setattr(module, child_name, torch.nn.Identity())
                return
    raise DataError(f"{type(model).__name__} has no output head to replace by a value head")
