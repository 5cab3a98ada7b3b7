"""Tokens per CPU-second of the rollout engines, each in a process of its own as in training.

    OMP_NUM_THREADS=1 .venv-engines/bin/python benchmarks/engines.py [--engines native vllm sglang]
        [--batches 8 64] [--repeats 3] [--json FILE]

The quickstart's model with random weights (0.85 M parameters, float32), groups of 8 samples per prompt, 16
prompt and 112 new tokens, temperature 1, one thread. The time is the CPU time of all of the engine's
processes, so that ratios hold on a busy machine; the engines take turns, and the median of the turns
counts. A model this small shows what an engine costs besides arithmetic, and nothing about GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rondo.core.types import GenerateRequest, SamplingParams
from rondo.models.source import ModelSource
from rondo.rollout import start_engine
from rondo.rollout.protocol import EngineSpec

PROMPT, NEW, GROUP, VOCAB = 16, 112, 8, 442
TURN = 64  # requests of a turn, at least: the clock of CPU time ticks every 10 ms
CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}
_ids = itertools.count()


class Contestant:
    """An engine with weights, and the CPU time of its processes."""

    def __init__(self, name: str, max_concurrent: int) -> None:
        source = ModelSource(config={"model_type": "qwen3", **CONFIG})
        spec = EngineSpec(name, source, "float32", "cpu", PROMPT + NEW, max_concurrent, 1)
        before = set(psutil.Process().children(recursive=True))
        self.name, self.engine = name, start_engine(spec)
        self._processes = [p for p in psutil.Process().children(recursive=True) if p not in before]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG), dtype=torch.float32)
        self.engine.begin(0)
        for parameter, tensor in model.named_parameters():
            self.engine.receive(parameter, tensor.detach())
        self.engine.commit(0)

    def cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes if process.is_running()]
        return sum(one.user + one.system for one in times)

    async def rate(self, batch: int) -> float:
        """Tokens per CPU-second of `batch` requests sent at once, several times where they are few."""
        start, tokens = self.cpu_seconds(), 0
        for _ in range(-(-TURN // batch)):
            done = await asyncio.gather(*[self.engine.generate(request) for request in requests(batch)])
            tokens += sum(len(one.token_ids) for one in done)
        return tokens / (self.cpu_seconds() - start)


def requests(batch: int) -> list[GenerateRequest]:
    """In groups with one prompt each; the same prompts every time, and other seeds."""
    made = []
    for index in range(batch):
        group = index // GROUP
        tokens = np.random.default_rng(group).integers(0, VOCAB, PROMPT).astype(np.int32)
        number = next(_ids)
        sampling = SamplingParams(NEW, temperature=1.0)
        made.append(GenerateRequest(str(number), tokens, sampling, number, affinity=str(group)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    contestants = [Contestant(name, max(args.batches)) for name in args.engines]
    rates: dict[str, dict[int, float]] = {one.name: {} for one in contestants}
    try:
        for batch in args.batches:
            turns: dict[str, list[float]] = {one.name: [] for one in contestants}
            for one in contestants:
                asyncio.run(one.rate(batch))  # the first one warms up
            for _, one in itertools.product(range(args.repeats), contestants):
                turns[one.name].append(asyncio.run(one.rate(batch)))
            for name, found in turns.items():
                rates[name][batch] = statistics.median(found)
                spread = f"{min(found):.0f} to {max(found):.0f}"
                share = rates[name][batch] / rates[args.engines[0]][batch]
                print(
                    f"{name:8} {batch:4} requests: {rates[name][batch]:8.0f} tokens per CPU-second "
                    f"({spread}), {share:.2f} of {args.engines[0]}'s"
                )
    finally:
        for one in contestants:
            one.engine.close()
    if args.json:
        args.json.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
