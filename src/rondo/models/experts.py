"""Experts of a mixture: one tensor per matrix in transformers' modules, one per expert in checkpoints.

Weights travel as the module has them; whoever wants a checkpoint's names (vLLM, SGLang, an exported folder)
takes them apart here, without copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rondo.models.family import FAMILIES, record_of

_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


def why_not_separate(config: Any, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Why the experts cannot be taken apart ("" if they can, or if there are none). shapes: of the module's
    parameters.
    """
    fused = [name for name, shape in shapes if len(shape) > 2 and ".experts." in name]
    known = record_of(config.model_type).separate_experts
    if not fused or (known and all(name.endswith((_GATE_UP, _DOWN)) for name in fused)):
        return ""
    others = sorted(family.model_type for family in FAMILIES.values() if family.separate_experts)
    return (
        f"how checkpoints of {config.model_type} name the matrices of {fused[0]!r} is not known to rondo "
        f"(it is for {', '.join(others)})"
    )


def separate(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts' tensors one by one, as views under a checkpoint's names; all others as they are.

    gate_up_proj [E, 2 I, H] holds gate_proj above up_proj, each [I, H]; down_proj is [E, H, I].
    """
    for name, tensor in tensors:
        if name.endswith(_GATE_UP):
            for index, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                start = f"{name.removesuffix('gate_up_proj')}{index}"
                yield f"{start}.gate_proj.weight", gate
                yield f"{start}.up_proj.weight", up
        elif name.endswith(_DOWN):
            for index, expert in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{index}.down_proj.weight", expert
        else:
            yield name, tensor
