"""How far the planner's formulas of memory are from what others measured and from what torch makes. No card.

    python benchmarks/plan.py prime-rl       peaks of prime-rl's trainer beside the planned ones
    python benchmarks/plan.py verl           what ran and what ran out in verl's tables
    python benchmarks/plan.py verl-full      what ran there of full fine-tuning, by FSDP and Megatron
    python benchmarks/plan.py fake           bytes of a rank on torch's fake process group, by layout
    python benchmarks/plan.py large          the same of four plans for many cards, and whether they fit
    python benchmarks/plan.py megatron       bytes of a rank of Megatron, by layout

The tables of docs/plan.md are what this prints. Sources: prime-rl benchmarks/results/BENCHMARKS.md at
559b44772; verl examples/tuning/ and docs/perf/device_tuning.rst at b178a3cd5.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from rondo.planning.engine_memory import EngineRun, engine_on_device  # noqa: E402
from rondo.planning.memory import (  # noqa: E402
    CONTEXT_BYTES,
    GIB,
    Bytes,
    gathered,
    gathered_first,
    kept,
    megatron_passing,
    megatron_residency,
    on_device,
    passing,
    residency,
    total_of,
)
from rondo.planning.model_run import ModelRun, Spread  # noqa: E402
from rondo.planning.shapes import TABLE, find_shape, shape_of  # noqa: E402

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

# Full fine-tuning that ran there. Model, cards, GiB of one, axes (with a pipeline: Megatron), share of its
# optimizer in host memory, tensor parallel of vLLM, its share, tokens of a micro-batch.
VERL_FULL = (
    ("Qwen2-7B", 2, 80, {}, 0.0, 2, 0.6, 16 * 2048),
    ("Qwen2.5-Coder-14B", 4, 80, {}, 0.0, 4, 0.5, 16 * 2048),
    ("Qwen2-72B", 32, 80, {}, 0.0, 16, 0.6, 24_000),
    ("Qwen2-72B", 32, 96, {}, 0.0, 16, 0.6, 24_000),
    ("Qwen2.5-32B", 8, 96, {"tensor": 8, "pipeline": 1}, 0.0, 8, 0.6, 8_192),
    ("DeepSeek-V3", 96, 96, {"tensor": 8, "pipeline": 12, "expert": 8}, 1.0, 32, 0.6, 8_192),
    ("DeepSeek-V3", 128, 96, {"tensor": 8, "pipeline": 16, "expert": 8}, 0.5, 32, 0.6, 8_192),
    ("DeepSeek-V3", 256, 96, {"tensor": 8, "pipeline": 16, "expert": 8}, 0.0, 32, 0.6, 8_192),
    ("DeepSeek-V3", 512, 96, {"tensor": 1, "pipeline": 16, "expert": 32}, 0.0, 32, 0.6, 8_192),
    ("DeepSeek-V3", 256, 80, {"tensor": 1, "pipeline": 16, "expert": 16}, 0.0, 32, 0.8, 6_144),
    ("Qwen3-235B-A22B", 32, 96, {"tensor": 4, "pipeline": 8, "expert": 4}, 1.0, 8, 0.6, 8_192),
    ("Qwen3-235B-A22B", 64, 96, {"tensor": 4, "pipeline": 8, "expert": 4}, 0.5, 8, 0.6, 8_192),
    ("Qwen3-235B-A22B", 128, 96, {"tensor": 4, "pipeline": 8, "expert": 4}, 0.0, 8, 0.6, 8_192),
    ("Qwen3-235B-A22B", 256, 96, {"tensor": 4, "pipeline": 8, "expert": 4}, 0.0, 8, 0.6, 8_192),
)


def with_whole_logits(run: ModelRun, tokens: int) -> Bytes:
    """Returns what an update has where a loss takes all positions' logits at one time, as that of others
    does: in float32, their log-softmax, and the gradients of both.
    """
    held, own = replace(run, logits_bytes=None), -(-tokens // run.layout.context)
    update = total_of(on_device(held, "update", tokens))
    at_head = gathered(held, 1) + kept(held, tokens) + 4 * 4 * run.shape.vocabulary * own
    at_rest = residency(held).of("update")
    return Bytes(update.least, max(update.expected, sum(at_rest.values()) + at_head))


def prime_rl_run(name: str, cards: int, lora: int | None, what: str) -> ModelRun:
    """Returns the model of a row of PRIME_RL, without its logits."""
    recompute: Literal["offload"] | bool = "offload" if "offloaded" in what else True
    return ModelRun(
        find_shape(name), Spread(cards), trains=True, lora=lora, recompute=recompute, logits_bytes=None
    )


def prime_rl() -> Iterator[tuple[str, int, int, int | None, str, float, float]]:
    """Yields each row with the planned GiB."""
    for name, tokens, cards, lora, what, peak in PRIME_RL:
        run = prime_rl_run(name, cards, lora, what)
        planned = total_of(on_device(run, "update", tokens)).expected
        if what == "SFT":
            planned = with_whole_logits(run, tokens).expected
        yield name, tokens, cards, lora, what, peak, planned / GIB


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
            )
            # A micro-batch is of the ranks that divide its tokens; how long its rows were, nobody says.
            updating = with_whole_logits(run, prompts * 1536)
            engine = EngineRun(run.shape, "vllm", tensor=tensor, share=share, tokens=1 << 30, longest=1536)
            awake = total_of(engine_on_device(engine, 80 * GIB, 0))
            asleep = total_of(engine_on_device(engine, 80 * GIB, 0, asleep=True))
            least = max(updating.least + asleep.least, awake.least)
            yield (
                name,
                prompts,
                prompts in ran,
                least,
                max(updating.expected + asleep.expected, awake.expected),
            )


def verl_full() -> Iterator[tuple[str, int, int, str, int, int]]:
    """Yields model, cards, GiB of one, its layout, the least and the expected bytes of the fullest phase. In
    an update vLLM sleeps, and all moments are on the card but those that Megatron's optimizer has in host
    memory.
    """
    for name, cards, gib, axes, on_host, tensor, share, tokens in VERL_FULL:
        run = ModelRun(find_shape(name), Spread(cards, **axes), trains=True, logits_bytes=1 << 50)
        if "pipeline" in axes:
            held = megatron_residency(run, on_host)
            least = held.weights + held.gradients + held.moments
            expected = least + megatron_passing(run, tokens)
        else:
            least, expected = with_whole_logits(run, tokens)
        engine = EngineRun(run.shape, "vllm", tensor=tensor, share=share, tokens=1 << 30, longest=2048)
        asleep = total_of(engine_on_device(engine, gib * GIB, 0, asleep=True))
        awake = total_of(engine_on_device(engine, gib * GIB, 0))
        said = " ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "FSDP"
        yield (
            name,
            cards,
            gib,
            f"Megatron: {said}" if "pipeline" in axes else said,
            max(least + asleep.least, awake.least),
            max(expected + asleep.expected, awake.expected),
        )


class Ranked(NamedTuple):
    """A model on ranks of the torch backend."""

    model: str
    """Its name in the table of shapes."""
    ranks: int
    """All of them."""
    tokens: int
    """Of a pass."""
    sizes: Mapping[str, int] = MappingProxyType({})
    """Ranks along axes (`actor.parallel`)."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Of `ModelRun`, where they are others than its own."""
    layers: int | None = None
    """None: as many as the model has."""

    def run(self) -> ModelRun:
        """Returns it as the formulas take it."""
        shape = shape_of(self.fields(), self.model)
        return ModelRun(shape, Spread(self.ranks, **self.sizes), trains=True, **self.settings)

    def fields(self) -> dict[str, Any]:
        """Returns its config.json."""
        with TABLE.open(encoding="utf-8", newline="") as lines:
            table = (line for line in lines if not line.startswith("#"))
            rows = csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
            fields = next(json.loads(row["config"]) for row in rows if row["name"] == self.model)
        return fields | ({} if self.layers is None else {"num_hidden_layers": self.layers})

    def __str__(self) -> str:
        words = [f"{axis} {size}" for axis, size in self.sizes.items()]
        words += [f"{key} {value}" for key, value in self.settings.items() if not key.startswith("offload")]
        words += [] if self.layers is None else [f"{self.layers} layers"]
        return f"{self.model} | {self.ranks} | {', '.join(words)} | {self.tokens:,}"


LAYOUTS = (
    Ranked("Qwen3-0.6B", 8, 4_096),
    Ranked("Qwen3-0.6B", 8, 32_768, {"replicate": 2}),
    Ranked("Qwen3-0.6B", 8, 4_096, {"tensor": 2}),
    Ranked("Qwen3-0.6B", 8, 4_096, {"tensor": 8}),
    Ranked("Qwen3-0.6B", 8, 16_384, {"context": 4}),
    Ranked("Qwen3-0.6B", 8, 32_768, settings={"lora": 16}),
    Ranked("Qwen3-0.6B", 8, 4_096, settings={"moments": "8bit"}),
    Ranked("Qwen3-0.6B", 8, 32_768, settings={"recompute": False}),
    Ranked("Qwen3-0.6B", 8, 32_768, settings={"mlp_chunk": 2048}),
    Ranked("gemma-3-1b", 8, 4_096),
    Ranked("Qwen2.5-7B", 8, 16_384, settings={"itemsize": 2}),
    Ranked("Llama-3.1-8B", 16, 16_384, {"replicate": 2, "tensor": 2, "context": 2}),
    Ranked("Qwen3-30B-A3B", 8, 16_384),
    Ranked("Qwen3-30B-A3B", 8, 16_384, settings={"recompute": False}),
    Ranked("Qwen3-30B-A3B", 16, 8_192, {"expert": 8}),
    Ranked("Qwen3-30B-A3B", 16, 8_192, {"tensor": 2, "expert": 8}),
    Ranked("Qwen3-30B-A3B", 8, 16_384, settings={"lora": 16, "itemsize": 2}),
    Ranked("Qwen3-32B", 64, 16_384),
    Ranked("Llama-3.1-70B", 64, 8_192, {"tensor": 8}),
    Ranked("DeepSeek-V3", 256, 8_192, {"expert": 32}),
)
# What is planned for cards of 80 GB, each with what makes it fit, or nearly.
LARGE = (
    Ranked("Llama-3.1-8B", 32, 1 << 20, {"context": 32}),
    Ranked("DeepSeek-V3", 96, 8_192, {"expert": 32}, {"itemsize": 2, "moments": "8bit"}),
    Ranked("DeepSeek-V3", 256, 8_192, {"expert": 64}, {"offload_optimizer": True}),
    Ranked("Qwen3-235B-A22B", 64, 8_192, {"expert": 32}, {"offload_optimizer": True}),
    Ranked("Kimi-K2", 64, 8_192, {"expert": 32}, {"lora": 16, "itemsize": 2}),
)


def fake(row: Ranked) -> Iterator[tuple[str, int, int]]:
    """Yields owner, bytes of a rank of torch's fake process group, and those planned. `pass`: all that a pass
    has beside weights, gradients and moments.
    """
    from benchmarks.fake_rank import rank_of
    from rondo.config.schema import (
        EngineConfig,
        LoraConfig,
        OptimizerConfig,
        ParallelConfig,
        TorchBackendConfig,
    )

    run = row.run()
    engine = EngineConfig(
        param_dtype={2: "bfloat16", 4: "float32"}[run.itemsize],
        compute_dtype="bfloat16",
        gradient_checkpointing=run.recompute,
        lora=None if run.lora is None else LoraConfig(rank=run.lora),
    )
    backend = TorchBackendConfig(kernels="transformers", mlp_chunk=run.mlp_chunk)
    optimizer, sizes = OptimizerConfig(moments=run.moments), ParallelConfig(**row.sizes)
    made = rank_of(row.fields(), row.ranks, sizes, engine, optimizer, row.tokens, backend)
    plan = residency(run)
    yield "weights", made.weights, plan.weights
    yield "gradients", made.gradients, plan.gradients
    yield "moments", made.moments, plan.moments
    yield "gathered", made.gathered, max(gathered(run), gathered_first(run))
    yield "pass", made.passing, sum(passing(run, row.tokens).values())


# Of Megatron, each with its backend's settings.
STAGES = (
    (Ranked("Qwen3-0.6B", 8, 4_096, {"tensor": 2, "pipeline": 2}), {}),
    (Ranked("Qwen3-0.6B", 8, 4_096, {"context": 2}), {}),
    (Ranked("Qwen3-8B", 8, 4_096, {"tensor": 2, "pipeline": 2}), {}),
    (Ranked("Qwen3-8B", 8, 4_096, {"tensor": 4}), {}),
    (Ranked("Qwen3-8B", 16, 4_096, {"tensor": 2, "pipeline": 4}, {"head": "value"}), {}),
    (Ranked("Qwen3-8B", 16, 4_096, {"pipeline": 4}), {"first_stage_layers": 6, "last_stage_layers": 6}),
    (Ranked("Qwen2.5-7B", 8, 4_096, {"tensor": 2, "pipeline": 4}, {"compute": 4}), {}),
    (Ranked("Llama-3.1-70B", 64, 4_096, {"tensor": 8, "pipeline": 4}), {"last_stage_layers": 17}),
    (Ranked("Qwen3-30B-A3B", 16, 4_096, {"tensor": 2, "pipeline": 2, "expert": 4}), {}),
    (
        Ranked("Qwen3-235B-A22B", 64, 4_096, {"tensor": 4, "pipeline": 8, "expert": 8}),
        {"first_stage_layers": 11, "last_stage_layers": 11},
    ),
    (
        Ranked("DeepSeek-V3", 256, 4_096, {"pipeline": 16, "expert": 16}),
        {"first_stage_layers": 4, "last_stage_layers": 1},
    ),
)


@functools.cache
def staged(number: int) -> tuple[tuple[str, int, int], ...]:
    """Returns owner, bytes of a rank of Megatron's fullest stage as its parameters and buffers are made, and
    those planned, of a row of `STAGES`.
    """
    from torch import bfloat16, float32

    from benchmarks.fake_rank import stage_of
    from rondo.config.schema import MegatronBackendConfig, ParallelConfig

    row, backend = STAGES[number]
    ends = (backend.get("first_stage_layers"), backend.get("last_stage_layers"))
    run = replace(row.run(), megatron=True, ends=ends)
    sizes, settings = ParallelConfig(**row.sizes), MegatronBackendConfig("megatron", **backend)
    dtype, fields = {2: bfloat16, 4: float32}[run.compute], row.fields()
    stages = [
        stage_of(fields, stage, row.ranks, sizes, settings, dtype, run.head)
        for stage in range(sizes.pipeline)
    ]
    made, plan = max(stages, key=lambda stage: stage.weights), residency(run)
    return (
        ("weights", made.weights, plan.weights),
        ("gradients", made.gradients, plan.gradients),
        ("moments", made.moments, plan.moments),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = {"prime-rl": _prime_rl, "verl": _verl, "verl-full": _verl_full, "fake": _fake}
    tables |= {"large": _large, "megatron": _megatron}
    parser.add_argument("against", choices=tables)
    for line in tables[parser.parse_args().against]():
        print(line, flush=True)


def _head(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"


def _prime_rl() -> Iterator[str]:
    yield from _head("model", "tokens", "cards", "adapters", "what", "measured", "planned", "")
    for name, tokens, cards, lora, what, peak, planned in prime_rl():
        adapters = "" if lora is None else f"{lora}"
        error = f"{planned / peak - 1:+.0%}"
        yield f"| {name} | {tokens:,} | {cards} | {adapters} | {what} | {peak} | {planned:.1f} | {error} |"


def _verl() -> Iterator[str]:
    yield from _head("model", "prompts of a card", "", "at least", "expected")
    for name, prompts, ran, least, expected in verl():
        said = "ran" if ran else "ran out"
        yield f"| {name} | {prompts} | {said} | {least / GIB:.1f} | {expected / GIB:.1f} |"


def _verl_full() -> Iterator[str]:
    yield from _head("model", "cards", "of GiB", "layout", "at least", "expected")
    for name, cards, gib, layout, least, expected in verl_full():
        yield f"| {name} | {cards} | {gib} | {layout} | {least / GIB:.1f} | {expected / GIB:.1f} |"


def _fake() -> Iterator[str]:
    owners = ("weights", "gradients", "moments", "gathered")
    yield from _head("model", "ranks", "layout", "tokens", *owners, "pass, GiB", "planned", "")
    for row in LAYOUTS:
        found = {owner: (torchs, planned) for owner, torchs, planned in fake(row)}
        errors = [f"{planned / torchs - 1:+.1%}" for torchs, planned in map(found.get, owners)]
        torchs, planned = found["pass"]
        sizes = f"{torchs / GIB:.2f} | {planned / GIB:.2f} | {planned / torchs - 1:+.0%}"
        yield f"| {row} | {' | '.join(errors)} | {sizes} |"


def _large() -> Iterator[str]:
    yield from _head("model", "cards", "layout", "tokens", "made, GiB", "planned", "", "of 80 GiB")
    for row in LARGE:
        run = row.run()
        found = {owner: (torchs, planned) for owner, torchs, planned in fake(row)}
        del found["gathered"]  # it is in the pass
        # On the fake group nothing rests in host memory: what passes of the moments is as planned.
        passes = residency(run).moments_pass
        if passes is not None:
            found["moments"] = (passes, passes)
        torchs, planned = (sum(sizes) for sizes in zip(*found.values(), strict=True))
        assert planned == total_of(on_device(run, "update", row.tokens)).expected
        fits = "fits" if planned + CONTEXT_BYTES < 80 * GIB else "does not fit"
        rests = ", moments in host memory" if passes is not None else ""
        name, cards, layout, tokens = str(row).split(" | ")
        sizes = f"{torchs / GIB:.1f} | {planned / GIB:.1f} | {planned / torchs - 1:+.0%}"
        yield f"| {name} | {cards} | {layout}{rests} | {tokens} | {sizes} | {fits} |"


def _megatron() -> Iterator[str]:
    yield from _head("model", "ranks", "layout", "weights, GiB", "gradients", "moments", "planned")
    for number, (row, backend) in enumerate(STAGES):
        name, ranks, layout, _ = str(row).split(" | ")
        layout = ", ".join([layout, *(f"{key} {blocks}" for key, blocks in backend.items())])
        _, made, planned = zip(*staged(number), strict=True)
        sizes = " | ".join(f"{size / GIB:.2f}" for size in made)
        errors = ", ".join(f"{plan / size - 1:+.2%}" for plan, size in zip(planned, made, strict=True))
        yield f"| {name} | {ranks} | {layout} | {sizes} | {errors} |"


if __name__ == "__main__":
    main()
