"""Estimates how long a weight sync of larger models takes on cards, by way of each last step.

    python benchmarks/sync_estimate.py

No second was measured: what a small model asks of a card in host memory (benchmarks/cards.py), by tensor and
by byte, times the constants below. Eight cards, the trainer sharded over them, on each an engine in a process
of its own; what could overlap is added up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import cards

HBM = 2.8e12  # bytes a second of an H100's memory, as large kernels reach it
OP = 6e-6  # seconds of the host's for one op of torch
PAGEABLE = 5e9  # bytes a second between the card and memory that is not pinned
CPU_SUM = 0.9e9  # bytes a second that one core sums
NVLINK = 300e9  # bytes a second that an all-gather brings to a card: two thirds of NVLink's 450 each way
CALL = 1e-3  # seconds of a call to another process and its answer, once per bucket
OPEN = 1e-3  # seconds of opening another process's memory
RANKS, BUCKET = 8, 256 << 20
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def sizes_of(config: dict[str, Any]) -> list[int]:
    """Returns the bytes of each tensor that travels, in bfloat16."""
    from rondo.models import ModelSource
    from rondo.models.loading import model_on_meta

    return [2 * one.numel() for one in model_on_meta(ModelSource(config=config)).parameters()]


def table() -> str:
    """Returns the estimates in Markdown."""
    mine = dict(cards._training())["checksums"]
    sent, received, few, small = cards.sync_of(cards.SYNC_BUCKET, "ipc")
    _, summed, _, _ = cards.sync_of(cards.SYNC_BUCKET, "host")  # the engine's sums, and no copy on the card
    lines = [
        "| model | GB | last step | gathering | checksums | copies | calls | all, in seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, config in MODELS.items():
        sizes = sizes_of(config)
        size, alone = sum(sizes), [one for one in sizes if one > BUCKET]
        buckets = -(-(size - sum(alone)) // BUCKET) + len(alone)

        def on_card(
            kernels: float, num_bytes: float, many: float = len(sizes) / few, larger: float = size / small
        ) -> float:
            return kernels * many * OP + num_bytes * larger / HBM

        gathering = size * (RANKS - 1) / RANKS / NVLINK
        sums = on_card(mine.kernels, mine.bytes / RANKS)
        engines_sums = on_card(summed.kernels, summed.bytes)
        kernels = sent.kernels + received.kernels - summed.kernels
        copies = on_card(kernels, sent.bytes + received.bytes - summed.bytes)
        opened = 2 + 2 * len(alone)  # larger tensors have memory of their own, and what was there makes room
        rows = {
            "ipc": (sums + engines_sums, copies, buckets * CALL + opened * OPEN),
            "host, native": (sums + engines_sums, 2 * size / PAGEABLE, buckets * CALL),
            "host, vLLM or SGLang": (sums + size / CPU_SUM, 2 * size / PAGEABLE, buckets * CALL),
        }
        for step, parts in rows.items():
            numbers = " | ".join(f"{one:.2f}" for one in (gathering, *parts, gathering + sum(parts)))
            lines.append(f"| {name} | {size / 1e9:.1f} | {step} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    """Starts itself on a card in host memory, and prints the table."""
    from tests.host_card.build import environment

    if "RONDO_HOST_CARD" in os.environ:
        print(table())
        return
    with environment() as variables:
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=variables).returncode)


if __name__ == "__main__":
    main()
