"""How far the planner's formulas of memory are from what others measured and from what torch makes. No card.

    python benchmarks/plan.py prime-rl       peaks of prime-rl's trainer beside the planned ones
    python benchmarks/plan.py verl           what ran and what ran out in verl's tables
    python benchmarks/plan.py fake           bytes of a rank's weights on torch's fake process group

The tables of docs/plan.md are what this prints. Sources: prime-rl benchmarks/results/BENCHMARKS.md at
559b44772; verl examples/tuning/ and docs/perf/device_tuning.rst at b178a3cd5.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from rondo.planning.memory import (
    GIB,
    EngineRun,
    ModelRun,
    Spread,
    engine_on_device,
    on_device,
    residency,
    total_of,
)
from rondo.planning.shapes import find_shape

# Model, tokens of a row, cards, rank of adapters, what, GiB. All with checkpointing, float32 at rest and
# bfloat16 in products; RL computes no whole logits, SFT does.
PRIME_RL = (
    ("Qwen3-0.6B", 16_384, 1, None, "RL", 12.5),
    ("Qwen3-0.6B", 65_536, 1, None, "RL", 19.6),
    ("Qwen3-0.6B", 65_536, 1, None, "RL, inputs of blocks offloaded", 16.1),
    ("Qwen3-0.6B", 16_384, 1, 16, "RL", 5.1),
    ("Qwen3-0.6B", 8_192, 1, None, "SFT", 31.7),
    ("Qwen3-4B", 16_384, 8, None, "RL", 17.1),
    ("Qwen3-4B", 65_536, 8, None, "RL", 36.1),
    ("Qwen3-4B", 16_384, 8, 16, "RL", 10.3),
    ("Qwen3-4B", 16_384, 1, 16, "RL", 23.3),
    ("Qwen3-4B", 65_536, 1, 16, "RL", 42.0),
    ("Qwen3-4B", 16_384, 8, None, "SFT", 54.6),
    ("Qwen3-30B-A3B", 16_384, 8, None, "RL", 74.6),
    ("Qwen3-30B-A3B", 65_536, 8, None, "RL", 105.4),
    ("Qwen3-30B-A3B", 16_384, 8, 16, "RL", 31.6),
    ("Qwen3-30B-A3B", 65_536, 8, 16, "RL", 63.7),
    ("INTELLECT-3", 16_384, 8, 16, "RL", 89.7),
    ("Qwen3-235B-A22B", 16_384, 8, 16, "RL", 161.5),
)
# Model, cards, tensor parallel of vLLM, its share of a card, prompts of a card that ran, that ran out. All:
# adapters of rank 32, 512 + 1,024 tokens at most, so many rows in a micro-batch, all offloaded.
VERL = (
    ("Qwen2.5-7B", 1, 1, 0.2, (64, 96, 100), (101, 102, 104, 112, 128)),
    ("Qwen2.5-14B", 2, 2, 0.25, (32, 48, 56, 58), (59, 60, 64)),
    ("Qwen2.5-32B", 4, 4, 0.3, (32, 40, 44), (45, 46, 48, 64)),
    ("Qwen2.5-72B", 8, 8, 0.4, (16, 20, 22), (23, 24, 32)),
)


def prime_rl() -> Iterator[tuple[str, int, int, int | None, str, float, float]]:
    """Yields each row with the planned GiB."""
    for name, tokens, cards, lora, what, peak in PRIME_RL:
        run = ModelRun(
            find_shape(name),
            Spread(cards),
            trains=True,
            lora=lora,
            recompute="offload" if "offloaded" in what else True,
            logits_bytes=1 << 50 if what == "SFT" else None,
        )
        planned = total_of(on_device(run, "update", tokens)).expected / GIB
        yield name, tokens, cards, lora, what, peak, planned


def verl() -> Iterator[tuple[str, int, bool, int, int]]:
    """Yields model, prompts, whether it ran, the least and the expected bytes of the fullest phase of a card.
    In an update vLLM sleeps; while it generates the trainer's weights rest in host memory.
    """
    for name, cards, tensor, share, ran, ran_out in VERL:
        for prompts in (*ran, *ran_out):
            run = ModelRun(
                find_shape(name),
                Spread(cards, context=min(2, cards)),
                itemsize=2,
                trains=True,
                lora=32,
                offload_params=True,
                offload_optimizer=True,
                logits_bytes=1 << 50,  # verl has those of all positions at one time
            )
            # A micro-batch is of the ranks that divide its tokens; how long its rows were, nobody says.
            update = on_device(run, "update", prompts * 1536)
            engine = EngineRun(run.shape, "vllm", tensor=tensor, share=share, tokens=1 << 30, longest=1536)
            awake = total_of(engine_on_device(engine, 80 * GIB, 0))
            asleep = total_of(engine_on_device(engine, 80 * GIB, 0, asleep=True))
            updating = total_of(update)
            least = max(updating.least + asleep.least, awake.least)
            yield (
                name,
                prompts,
                prompts in ran,
                least,
                max(updating.expected + asleep.expected, awake.expected),
            )


def fake(name: str, ranks: int, layers: int) -> Iterator[tuple[str, int, int]]:
    """Yields owner, bytes that FSDP2 gives a rank of torch's fake process group on `meta`, and those planned:
    of weights. No pass is run, so that gradients and moments are not measured here. layers: of the model.
    """
    import csv
    import json

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    from rondo.planning.shapes import TABLE, shape_of

    with TABLE.open(encoding="utf-8", newline="") as lines:
        table = (line for line in lines if not line.startswith("#"))
        rows = {row["name"]: row for row in csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)}
    fields = json.loads(rows[name]["config"]) | {"num_hidden_layers": layers}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        local = sum(one.to_local().nbytes for one in model.parameters())
    finally:
        dist.destroy_process_group()
    plan = residency(replace(ModelRun(shape_of(fields, name), Spread(ranks)), trains=True))
    yield "weights", local, plan.weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("against", choices=("prime-rl", "verl", "fake"))
    against = parser.parse_args().against
    if against == "prime-rl":
        print(
            "| model | tokens | cards | adapters | what | measured | planned | |", "|---" * 8 + "|", sep="\n"
        )
        for name, tokens, cards, lora, what, peak, planned in prime_rl():
            adapters = "" if lora is None else f"{lora}"
            error = f"{planned / peak - 1:+.0%}"
            print(
                f"| {name} | {tokens:,} | {cards} | {adapters} | {what} | {peak} | {planned:.1f} | {error} |"
            )
    elif against == "verl":
        print("| model | prompts of a card | | at least | expected |\n|---|---|---|---|---|")
        for name, prompts, ran, least, expected in verl():
            said = "ran" if ran else "ran out"
            print(f"| {name} | {prompts} | {said} | {least / GIB:.1f} | {expected / GIB:.1f} |")
    else:
        print("| model | ranks | layers | owner | torch | planned | |\n|---|---|---|---|---|---|---|")
        for name, ranks, layers in (("Qwen3-0.6B", 8, 28), ("Qwen3-4B", 8, 36), ("Qwen3-32B", 64, 64)):
            for owner, torchs, planned in fake(name, ranks, layers):
                row = f"{torchs:,} | {planned:,} | {planned / torchs - 1:+.2%}"
                print(f"| {name} | {ranks} | {layers} | {owner} | {row} |")


if __name__ == "__main__":
    main()
