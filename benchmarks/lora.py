"""What actor.lora saves: memory of a training engine, bytes of a checkpoint, bytes on their way to an engine.

    python benchmarks/lora.py [--layers 16] [--hidden 512] [--vocab 8000] [--rank 16]

Each case is a process of its own that builds the actor, takes two optimizer steps on two rows of 32 tokens
(activations are little then) and says what it holds: `weights`, `gradients` and `moments` are the bytes of
its tensors; `peak` is by how much the process grew at most since before the model was built. `checkpoint` is
what is written. Then a native engine (bfloat16) is started in a process of its own, and weights are sent to
it, with checksums: `merged` is what moves with send=merged, `first` and `later` are two syncs with
send=adapters, as the syncs report it; `engine` is by how much its process is larger at the end.
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
import psutil

MB = 10**6
OF_ADAPTERS = ("first", "later", "engine, adapters")  # columns
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"lora": {}},
    "LoRA, base in bfloat16": {"lora": {}, "param_dtype": "bfloat16", "compute_dtype": "float32"},
    "LoRA, base in nf4": {"lora": {"base_dtype": "nf4"}},
    "LoRA, base in nf4, the rest in bfloat16": {
        "lora": {"base_dtype": "nf4"},
        "param_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
    },
}


def measure(arguments: argparse.Namespace, case: dict[str, Any]) -> dict[str, float]:
    """Returns megabytes by what they are for."""
    import peft  # noqa: F401 (before memory is measured)
    import torch

    from rondo.config.schema import EngineConfig, LoraConfig, OptimizerConfig
    from rondo.core.batch import Batch, ragged_rows
    from rondo.models import ModelSource
    from rondo.system.usage import process_usage
    from rondo.training import ModelSpec, make_engine
    from rondo.training.views import local_of
    from tests.training.helpers import PolicyLoss, one_rank_mesh

    settings = dict(case)
    own = settings.pop("lora", None)
    lora = None if own is None else LoraConfig(rank=arguments.rank, alpha=2 * arguments.rank, **own)
    if lora is not None and lora.base_dtype is not None:
        import bitsandbytes  # noqa: F401

    torch.set_num_threads(1)
    mesh = one_rank_mesh()
    source = ModelSource(config=_model(arguments))
    before = process_usage().peak_memory_bytes
    spec = ModelSpec(source, EngineConfig(lora=lora, **settings), OptimizerConfig(lr=1e-4))
    engine = make_engine(spec, mesh=mesh)
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
        gradients = [local_of(one.grad) for one in engine.backend.by_name.values() if one.grad is not None]
        of_gradients = sum(gradient.nbytes for gradient in gradients)
        engine.optimizer_step()
    peak = process_usage().peak_memory_bytes - before
    state = engine.backend.state()
    with tempfile.TemporaryDirectory() as folder:
        engine.save(folder)
        written = sum(file.stat().st_size for file in Path(folder).iterdir())
    quantised = {} if engine.backend.adapters is None else engine.backend.adapters.quantised
    weights = sum(local_of(one).untyped_storage().nbytes() for one in engine.backend.by_name.values())
    weights += sum(module.num_bytes() for module in quantised.values())
    moments = [local_of(tensor) for name, tensor in state.items() if name.startswith("optimizer.exp_avg")]
    found = {
        "learned numbers": sum(gradient.numel() for gradient in gradients),
        "weights": weights,
        "gradients": of_gradients,
        "moments": sum(moment.nbytes for moment in moments),
        "peak": peak,
        "checkpoint": written,
    }
    found |= _sent(engine, source, lora)
    return {name: value / MB for name, value in found.items()}


def _sent(engine: Any, source: Any, lora: Any) -> dict[str, float]:
    """Returns the bytes of syncs to an engine, merged and by themselves, and what that engine weighs."""
    from rondo.models.lora import adapter_set
    from rondo.rollout import EngineSpec, start_engine
    from rondo.weights import Sent
    from rondo.weights.sync import gather_into

    found: dict[str, float] = {}
    for adapters in (None, lora) if lora is not None else (None,):
        known = None if adapters is None else adapter_set(source, adapters)
        spec = EngineSpec("native", source, "bfloat16", "cpu", 64, 2, 1, adapters=known)
        sink = start_engine(spec)
        try:
            before = psutil.Process(sink.pid).memory_info().rss
            contents: tuple[Sent, ...] = ("merged",) if known is None else ("all", "adapters")
            for version, what in enumerate(contents):
                report = gather_into(engine.parameters(what), sink, version, dtype="bfloat16", processes=1)
                name = {"merged": "merged", "all": "first", "adapters": "later"}[what]
                found[name] = report.bytes_moved
            grown = psutil.Process(sink.pid).memory_info().rss - before
            found[f"engine, {'merged' if known is None else 'adapters'}"] = grown
        finally:
            sink.close()
    return found


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
            header = [*found, *(name for name in OF_ADAPTERS if name not in found)]
            print(f"| | {' | '.join(header)} |\n|---|{'---|' * len(header)}")
        cells = [f"{found[name]:.2f}" if name in found else "–" for name in header]
        print(f"| {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
