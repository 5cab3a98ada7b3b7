"""What actor.lora saves: memory of a training engine, bytes of a checkpoint, bytes that an engine would need.

    python benchmarks/lora.py [--layers 16] [--hidden 512] [--vocab 8000] [--rank 16]

Each case is a process of its own that builds the actor, takes two optimizer steps on two rows of 32 tokens
(activations are little then) and says what it holds: `weights`, `gradients` and `moments` are the bytes of
its tensors; `peak` is by how much the process grew at most since before the model was built. `checkpoint` is
what is written. `merged` is what is sent to an engine now: all weights, in bfloat16. `adapter` is what A and
B alone are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

MB = 10**6
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora": True},
    "LoRA, base in bfloat16": {"lora": True, "param_dtype": "bfloat16", "compute_dtype": "float32"},
}


def measure(arguments: argparse.Namespace, case: dict[str, Any]) -> dict[str, float]:
    """Returns megabytes by what they are for."""
    import peft  # noqa: F401 (before memory is measured)
    import torch

    from rondo.batch import Batch, ragged_rows
    from rondo.config.schema import EngineConfig, LoraConfig, OptimizerConfig
    from rondo.models import ModelSource
    from rondo.training import FsdpEngine
    from rondo.training.sharding import local_of
    from rondo.usage import process_usage
    from tests.training.helpers import PolicyLoss, one_rank_mesh

    torch.set_num_threads(1)
    mesh = one_rank_mesh()
    source = ModelSource(config=_model(arguments))
    settings = dict(case)
    lora = LoraConfig(rank=arguments.rank, alpha=2 * arguments.rank) if settings.pop("lora", False) else None
    before = process_usage().peak_memory_bytes
    engine = FsdpEngine(source, EngineConfig(lora=lora, **settings), OptimizerConfig(lr=1e-4), mesh=mesh)
    random = np.random.default_rng(0)
    rows, length = 2, 16
    tokens = [random.integers(0, arguments.vocab, length) for _ in range(2 * rows)]
    batch = Batch.of(
        {
            "row_id": np.arange(rows),
            "prompt_ids": ragged_rows(tokens[:rows], np.int32),
            "response_ids": ragged_rows(tokens[rows:], np.int32),
            "response_mask": ragged_rows([np.ones(length, np.uint8)] * rows, np.uint8),
            "token_weight": ragged_rows([np.ones(length) / length] * rows, np.float64),
            "advantages": random.standard_normal(rows),
        }
    )
    for _ in range(2):
        engine.forward_backward(batch, PolicyLoss())
        gradients = [local_of(one.grad) for one in engine._parameters.values() if one.grad is not None]
        of_gradients = sum(gradient.nbytes for gradient in gradients)
        engine.optimizer_step()
    peak = process_usage().peak_memory_bytes - before
    state = engine.state()
    with tempfile.TemporaryDirectory() as folder:
        engine.save(folder)
        written = sum(file.stat().st_size for file in Path(folder).iterdir())
    moments = [local_of(tensor) for name, tensor in state.items() if name.startswith("optimizer.exp_avg")]
    found = {
        "learned numbers": sum(gradient.numel() for gradient in gradients),
        "weights": sum(local_of(one).nbytes for one in engine._parameters.values()),
        "gradients": of_gradients,
        "moments": sum(moment.nbytes for moment in moments),
        "peak": peak,
        "checkpoint": written,
        "merged": engine.layout("bfloat16").num_bytes,
        "adapter": sum(factor.to_local().nbytes for factor in engine._factors.values()),
    }
    return {name: value / MB for name, value in found.items()}


def _model(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": max(1, arguments.hidden // 128),
        "head_dim": 64,
        "tie_word_embeddings": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("layers", 16), ("hidden", 512), ("vocab", 8000), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(arguments, CASES[arguments.case])))
        return
    print(f"{_model(arguments)}, rank {arguments.rank}; megabytes (10^6)")
    header: list[str] = []
    for case in CASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if not header:
            header = list(found)
            print(f"| | {' | '.join(header)} |\n|---|{'---|' * len(header)}")
        print(f"| {case} | {' | '.join(f'{found[name]:.2f}' for name in header)} |", flush=True)


if __name__ == "__main__":
    main()
