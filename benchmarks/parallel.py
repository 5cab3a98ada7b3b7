"""Bytes that a rank receives per layer and micro-batch, along each parallel axis, beside docs/parallel.md's
formulas.

    python benchmarks/parallel.py [--tokens 512] [--width 128]

Counted, not timed: every collective of one forward and backward pass of two gloo processes, as a ring would
move it, of a model with four layers less one with two, halved. Float32, without checkpointing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from rondo.config.schema import EngineConfig, OptimizerConfig  # noqa: E402
from rondo.core.batch import Batch, ragged_rows  # noqa: E402
from rondo.models import ModelSource  # noqa: E402
from rondo.training import ModelSpec, make_engine  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.training.helpers import PolicyLoss  # noqa: E402
from tests.training.layouts import layout  # noqa: E402

RANKS, HEADS, EXPERTS, TOP_K = 2, 4, 4, 2
COLLECTIVES = ("allgather", "allreduce", "reducescatter", "alltoall", "recv")
AXES = ("shard", "replicate", "tensor", "context", "expert")


class Received(TorchDispatchMode):
    """Adds up the bytes that messages and collectives of two ranks bring to this one, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        kind = function._schema.name
        name = kind.partition("::")[2].replace("_", "").removesuffix("base")
        if kind.startswith(("c10d::", "_c10d_functional::")) and any(one in name for one in COLLECTIVES):
            largest = max(_tensors(arguments), key=torch.Tensor.numel)  # of an all-gather that is its output
            passes = 2 if "allreduce" in name else 1
            whole = passes * largest.nbytes
            self.bytes[name] += whole if "recv" in name else (RANKS - 1) * whole // RANKS
        return function(*arguments, **(keywords or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in _tensors(part)] if isinstance(value, list | tuple) else []


def model(layers: int, width: int, *, mixture: bool) -> dict[str, Any]:
    config = {
        "model_type": "qwen3_moe" if mixture else "llama",
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": width // HEADS,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": width}
    return config | (experts if mixture else {})


def one_pass(
    rank: int, world: int, axis: str, layers: int, tokens: int, width: int
) -> tuple[Counter[str], int]:
    """The bytes received in one forward and backward pass, and the model's parameters."""
    views, index, _ = layout(world, **({} if axis == "shard" else {axis: world}))
    source = ModelSource(config=model(layers, width, mixture=axis == "expert"))
    engine = make_engine(ModelSpec(source, EngineConfig(token_budget=1 << 20), OptimizerConfig()), mesh=views)
    rng = np.random.default_rng(index)
    batch = Batch.of(
        {
            "row_id": np.arange(1),
            "prompt_ids": ragged_rows([rng.integers(0, 64, 1)], np.int32),
            "response_ids": ragged_rows([rng.integers(0, 64, tokens)], np.int32),
            "response_mask": ragged_rows([np.ones(tokens, np.uint8)], np.uint8),
            "token_weight": ragged_rows([np.ones(tokens)], np.float64),
            "advantages": np.ones(1),
        }
    )
    with Received() as received:
        engine.forward_backward(batch, PolicyLoss())
    return received.bytes, engine.num_parameters()


def formula(axis: str, parameters: int, tokens: int, width: int) -> float:
    """As docs/parallel.md has it, in bytes, for two ranks and numbers of four bytes."""
    share, item = (RANKS - 1) / RANKS, 4
    sharded = share * parameters * 3 * item
    experts = EXPERTS * 3 * width * width
    return {
        "shard": sharded,
        "replicate": 2 * share * parameters * item,
        "tensor": 8 * share * tokens * width * item,
        "context": 2 * share * tokens / RANKS * 4 * width * item + sharded,
        "expert": 4 * share * TOP_K * tokens * width * item + share * (parameters - experts) * 3 * item,
    }[axis]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=128)
    given = parser.parse_args()
    print("| axis of 2 ranks | received, KB | formula, KB | by |\n|---|---|---|---|")
    for axis in AXES:
        (large, most), (small, fewer) = (
            run_ranks(RANKS, one_pass, axis, layers, given.tokens, given.width)[0] for layers in (4, 2)
        )
        difference = {kind: (large[kind] - small[kind]) / 2 for kind in large}
        expected = formula(axis, (most - fewer) // 2, given.tokens, given.width)
        kinds = ", ".join(f"{kind} {size / 1e3:.0f}" for kind, size in sorted(difference.items()) if size)
        print(
            f"| {axis} | {sum(difference.values()) / 1e3:.0f} | {expected / 1e3:.0f} | {kinds} |", flush=True
        )


if __name__ == "__main__":
    main()
