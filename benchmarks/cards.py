"""What each verb of training and of the native engine asks of a card: kernels, waits, bytes, memory.

    python benchmarks/cards.py            the table, counted on a card in host memory (tests/host_card)
    python benchmarks/cards.py write      the same into docs/cards.md
    python benchmarks/cards.py real       the waits alone, on the CUDA device that is here

Counts, not seconds: they are the same on every machine. tests/host_card/test_budget.py holds them against
LIMITS.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PAGE = ROOT / "docs" / "cards.md"
BEGIN, END = "<!-- benchmarks/cards.py writes what follows -->\n", "<!-- to here -->\n"
LAYERS = 4
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LENGTHS = tuple((5, 140 + i) for i in range(8))
STEPS = 20
SYNC_BUCKET = 1 << 17


@dataclass(frozen=True)
class Cost:
    """What a verb asks of a card; of a step of decoding, the mean of many."""

    kernels: float
    """Ops; of a captured graph the launch alone."""
    reads: Counter[str]
    """Waits for values, sizes and copies out, by line."""
    copies_in: Counter[str]
    """Copies to the card that wait, by line."""
    bytes: float
    """What all kernels read and write."""
    peak: float
    """Memory beyond what was there before."""


@dataclass(frozen=True)
class Limit:
    """The most that a verb may ask for."""

    kernels: int
    reads: int
    copies_in: int


# Lower a number when a change makes it smaller. What is above its limit is a stall or a kernel more.
LIMITS = {
    "forward": Limit(350, 1, 0),
    "forward_backward": Limit(1250, 1, 1),
    "forward_backward, 4 micro-batches": Limit(5100, 1, 4),
    "optimizer step": Limit(160, 1, 0),
    "checksums": Limit(475, 1, 0),
    "snapshot": Limit(1, 3, 1),
    "weights come and rest again": Limit(0, 1, 0),
    "optimizer step, moments that rest": Limit(160, 2, 0),
    "publish": Limit(50, 0, 0),
    "sync, the trainer's process": Limit(50, 3, 0),
    "sync, the engine's process": Limit(475, 4, 0),
    "decode step, lean": Limit(46, 2, 2),
    "decode step, generic": Limit(380, 2, 2),
    "prefill of 16 prompts, and 4 tokens": Limit(1540, 8, 8),
}


def costs() -> dict[str, Cost]:
    """Counts every verb, on the card of this process."""
    return {**dict(_training()), **dict(_syncing()), **dict(_decoding())}


def _counted(act: Callable[[], Any]) -> Cost:
    import torch

    from tests.host_card import card

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if card() is None:
        waits = _waits(act)
        return Cost(0, waits, Counter(), 0, torch.cuda.max_memory_allocated() - before)
    with card().counted() as counts:
        act()
    peak = torch.cuda.max_memory_allocated() - before
    kernels = counts.kernels.total() + counts.replays
    return Cost(kernels, counts.reads, counts.copies_in, counts.bytes, peak)


def _waits(act: Callable[[], Any]) -> Counter[str]:
    """Returns how often torch says that the host waits for a real card, reads and copies alike, by line."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"wait at {one.filename.rpartition('/src/')[2]}:{one.lineno}"
        for one in said
        if "synchroniz" in str(one.message)
    )


@contextmanager
def _mesh() -> Iterator[Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def _training() -> Iterator[tuple[str, Cost]]:
    from rondo.config.schema import OptimizerConfig
    from rondo.models import ModelSource
    from tests.training.helpers import PolicyLoss, make_batch, tiny_engine

    batch, source = make_batch(LENGTHS), ModelSource(config=MODEL, seed=1)
    with _mesh() as mesh:

        def made(token_budget: int, **config: bool) -> Any:
            config = {"token_budget": token_budget, **config}
            engine = tiny_engine(mesh, source, OptimizerConfig(lr=1e-3), config, device="cuda:0")
            engine.forward_backward(batch, PolicyLoss())  # what is made at the first step is not counted
            engine.optimizer_step()
            return engine

        engine, micro = made(8192), made(400)
        yield "forward", _counted(lambda: engine.forward(batch, {"log_probs": "x"}))
        yield "forward_backward", _counted(lambda: engine.forward_backward(batch, PolicyLoss()))
        yield (
            "forward_backward, 4 micro-batches",
            _counted(lambda: micro.forward_backward(batch, PolicyLoss())),
        )
        yield "optimizer step", _counted(engine.optimizer_step)
        weights = engine.parameters()
        yield "checksums", _counted(lambda: weights.checksums("bfloat16"))
        yield "snapshot", _counted(engine.snapshot)
        resting = made(8192, offload_params=True, offload_optimizer=True)
        yield "weights come and rest again", _counted(lambda: _phase(resting))
        with resting.on_device():
            resting.forward_backward(batch, PolicyLoss())
            yield "optimizer step, moments that rest", _counted(resting.optimizer_step)
        yield "publish", _counted(lambda: [None for _ in weights.gathered(1 << 28, "bfloat16")])


def _phase(engine: Any) -> None:
    with engine.on_device():
        pass


def _syncing() -> Iterator[tuple[str, Cost]]:
    """An engine in a process of its own on this card; sums of what is sent are a verb of the trainer's."""
    if "RONDO_HOST_CARD" not in os.environ:  # both processes count, which only that card can
        return
    for who, side in zip(("trainer", "engine"), sync_of(SYNC_BUCKET)[:2], strict=True):
        yield (
            f"sync, the {who}'s process",
            Cost(side.kernels, side.reads, side.copies_in, side.bytes, side.peak),
        )


def sync_of(bucket_bytes: int, hop: Any = "ipc") -> tuple[Any, Any, int, int]:
    """Counts a sync of MODEL in bfloat16. Returns what trainer and engine asked for (`syncs.Side`), and how
    many tensors and bytes there were.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rondo.models import ModelSource
    from rondo.rollout import EngineSpec
    from rondo.weights.checksum import checksums
    from tests.host_card.syncs import counted_engine, counted_sync

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    tensors = {name: one.data.to("cuda", torch.bfloat16) for name, one in model.named_parameters()}
    source = ModelSource(config=MODEL)
    spec = EngineSpec("native", source, "bfloat16", "cuda:0", 256, 16, threads=1)
    with counted_engine(spec, bucket_bytes, hop) as engine:
        sent, received, _ = counted_sync(engine, tensors, checksums(tensors), bucket_bytes)
    return sent, received, len(tensors), sum(one.nbytes for one in tensors.values())


def _decoding() -> Iterator[tuple[str, Cost]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rondo.core.types import GenerateRequest, SamplingParams
    from rondo.rollout import NativeEngine
    from tests.rollout.conftest import own_engine

    config = AutoConfig.for_model(**MODEL)
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16).state_dict()
    for decode in ("lean", "generic"):
        options = {"dtype": "bfloat16", "device": "cuda", "max_concurrent": 16, "max_context": 256}
        engine = own_engine(NativeEngine, config, decode=decode, cache_bytes=16 << 20, **options)
        engine.begin(0)
        for name, tensor in state.items():
            if name in engine.parameters():
                engine.receive(name, tensor)
        engine.commit(0)

        async def generate(tokens: int, engine: Any = engine) -> None:
            sampling = SamplingParams(max_tokens=tokens, temperature=1.0)
            prompts = [np.arange(3, 12 + i, dtype=np.int32) for i in range(16)]
            requests = [GenerateRequest(f"{i}", ids, sampling, seed=i) for i, ids in enumerate(prompts)]
            await asyncio.gather(*(engine.generate(request) for request in requests))

        def short() -> None:
            asyncio.run(generate(4))

        def long() -> None:
            asyncio.run(generate(4 + STEPS))

        long()  # graphs are captured
        few, many = _counted(short), _counted(long)
        engine.close()
        yield f"decode step, {decode}", _per_step(few, many)
        if decode == "generic":
            yield "prefill of 16 prompts, and 4 tokens", few


def _per_step(few: Cost, many: Cost) -> Cost:
    def mean(counts: str) -> Counter[str]:
        a, b = getattr(few, counts), getattr(many, counts)
        return Counter({line: (b[line] - a[line]) / STEPS for line in b if b[line] != a[line]})

    kernels, size = ((getattr(many, k) - getattr(few, k)) / STEPS for k in ("kernels", "bytes"))
    return Cost(kernels, mean("reads"), mean("copies_in"), size, many.peak)


def table(all_costs: dict[str, Cost]) -> str:
    """Returns the costs in Markdown."""
    lines = [
        "| verb | kernels | per layer | reads | copies in that wait | kernels' bytes | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for verb, cost in all_costs.items():
        waits = f"{cost.reads.total():g} | {cost.copies_in.total():g}"
        memory = f"{cost.bytes / 1e6:.1f} MB | {cost.peak / 1e6:.1f} MB"
        lines.append(f"| {verb} | {cost.kernels:g} | {cost.kernels / LAYERS:.0f} | {waits} | {memory} |")
    lines += ["", "| verb | times | where the host waits |", "|---|---|---|"]
    for verb, cost in all_costs.items():
        files = Counter[str]()
        for line, times in (cost.reads + cost.copies_in).items():  # numbers of lines would be old tomorrow
            what, _, place = line.rpartition(" at ")
            files[f"{what}, `{place.rpartition(':')[0]}`"] += times
        lines += [f"| {verb} | {times:g} | {place} |" for place, times in files.most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Starts itself on a card in host memory, and prints or writes the table."""
    from tests.host_card.build import environment

    if "RONDO_HOST_CARD" not in os.environ and sys.argv[1:] != ["real"]:
        with environment() as variables:
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=variables).returncode)
    import torch

    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    text = table(costs())
    print(text)
    if sys.argv[1:] == ["write"]:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
