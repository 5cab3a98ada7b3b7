"""What training takes of a host's memory: the shape of Qwen2.5-0.5B by default, random weights, on a CPU.

    python benchmarks/memory.py                      peak of two steps on one rank, beside what must be there
    python benchmarks/memory.py --load 4             peak of each of 4 ranks that load a folder and export it
    python benchmarks/memory.py --tokens 1024 --checkpointing --layers 24
    python benchmarks/memory.py --moments 8bit
    python benchmarks/memory.py --layers 4 --tokens 8192 --row 8192 --checkpointing --mlp-chunk 512

Each case runs in processes of its own. A peak is the process's (ru_maxrss); loading_gb and exporting_gb are
without what it had before the model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}


def peak() -> float:
    """The most memory that this process ever had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def rank_of(rank: int, world: int, store: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def write_model(folder: str, layers: int) -> None:
    import torch

    from rondo.models import ModelSource, build_model

    build_model(ModelSource(config={**SHAPE, "num_hidden_layers": layers}), torch.float32).save_pretrained(
        folder
    )


class Policy:
    """Advantage × log-prob, the simplest policy loss."""

    outputs = ("log_probs",)
    columns = ("advantages",)

    def __call__(
        self, outputs: Mapping[str, Any], columns: Mapping[str, Any], cu_seqlens: Any
    ) -> tuple[Any, Any]:
        return -(columns["advantages"] * outputs["log_probs"]).sum(), {}


def train(folder: str, options: argparse.Namespace, store: str, answers: Any) -> None:
    import numpy as np

    from rondo.config.schema import EngineConfig, OptimizerConfig, TorchBackendConfig
    from rondo.core.batch import Batch, ragged_rows
    from rondo.models import ModelSource
    from rondo.planning.memory import model_bytes
    from rondo.training import ModelSpec, make_engine

    mesh, before = rank_of(0, 1, store), peak()
    config = EngineConfig(gradient_checkpointing=options.checkpointing, logits_bytes=options.logits_bytes)
    optimizer, backend = (
        OptimizerConfig(moments=options.moments),
        TorchBackendConfig(mlp_chunk=options.mlp_chunk),
    )
    engine = make_engine(ModelSpec(ModelSource(path=folder), config, optimizer, backend), mesh=mesh)
    built, rng, rows = peak(), np.random.default_rng(0), options.tokens // options.row
    ids = [rng.integers(0, SHAPE["vocab_size"], options.row // 2) for _ in range(2 * rows)]
    batch = Batch.of(
        {
            "row_id": np.arange(rows),
            "prompt_ids": ragged_rows(ids[:rows], np.int32),
            "response_ids": ragged_rows(ids[rows:], np.int32),
            "advantages": rng.standard_normal(rows),
        }
    )
    started = time.process_time()
    for _ in range(2):
        engine.forward_backward(batch, Policy())
        updating = time.process_time()
        engine.optimizer_step()
    ended, number = time.process_time(), engine.num_parameters()
    answers.put(
        {
            "parameters": number,
            "must_be_there_gb": model_bytes(number, 4, options.moments) / 1e9,
            "before_gb": before,
            "built_gb": built,
            "peak_gb": peak(),
            "cpu_seconds": ended - started,
            "of_one_update": ended - updating,
        }
    )


def load(rank: int, folder: str, options: argparse.Namespace, store: str, answers: Any) -> None:
    from rondo.config.schema import FrozenEngineConfig
    from rondo.models import ModelSource
    from rondo.training import ModelSpec, make_engine

    mesh, before = rank_of(rank, options.load, store), peak()
    engine = make_engine(ModelSpec(ModelSource(path=folder), FrozenEngineConfig()), mesh=mesh)
    loaded = peak()
    with engine.parameters().local() as shards:
        own = sum(one.nbytes for one in shards.values()) / 1e9
    largest = max(parameter.num_bytes for parameter in engine.parameters().layout().parameters) / 1e9
    engine.export(f"{folder}-export")
    answers.put(
        {
            "rank": rank,
            "own_gb": own,
            "largest_tensor_gb": largest,
            "loading_gb": loaded - before,
            "exporting_gb": peak() - before,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of a step")
    parser.add_argument("--row", type=int, default=128, help="tokens of a row, half of them a response")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--mlp-chunk", type=int, help="tokens in an MLP at one time")
    parser.add_argument("--logits-bytes", type=int, default=512 << 20)
    parser.add_argument("--moments", choices=("full", "8bit"), default="full")
    parser.add_argument("--load", type=int, metavar="RANKS", help="load and export instead of training")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as work:
        folder, store, answers = f"{work}/model", f"{work}/store", start.Queue()
        writer = start.Process(target=write_model, args=(folder, options.layers))
        writer.start()
        writer.join()
        if options.load:
            workers = [
                start.Process(target=load, args=(rank, folder, options, store, answers))
                for rank in range(options.load)
            ]
        else:
            workers = [start.Process(target=train, args=(folder, options, store, answers))]
        for worker in workers:
            worker.start()
        results = [answers.get() for _ in workers]
        for worker in workers:
            worker.join()
    for result in sorted(results, key=lambda one: one.get("rank", 0)):
        print(
            "  ".join(
                f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value:,}"
                for name, value in result.items()
            )
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
