"""The critic's head: one number per position, in float32."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rondo.core.errors import DataError
from rondo.system.hub import copy_of

PREFIX = "value_head."  # what the names of a critic's own parameters begin with
FILE = "value_head.safetensors"  # beside the trunk's weights in an exported critic


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
    file = copy_of(path) / FILE if path is not None else None
    if file is not None and file.is_file():
        saved = load_file(file)
        if saved["weight"].shape != head.weight.shape:
            shapes = f"{tuple(saved['weight'].shape)}, the model needs {tuple(head.weight.shape)}"
            raise DataError(f"{file}: the value head has shape {shapes}")
        head.load_state_dict(saved)
    return head


def _drop_lm_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if child is head:
                setattr(module, child_name, torch.nn.Identity())
                return
    raise DataError(f"{type(model).__name__} has no output head to replace by a value head")
