"""Seconds to plan a transfer of large models' weights, and for one rank to work out all of its moves: no
weights, no other process.

    python benchmarks/transfer_plans.py
"""

from __future__ import annotations

import itertools
import time

from rondo.weights.layout import Layout, Parameter
from rondo.weights.plan import plan_transfer

BUCKET_BYTES = 256 << 20
VOCABULARY, HEAD = 151_936, 128


def model(layers: int, hidden: int, queries: int, keys: int, width: int, experts: int) -> list[Parameter]:
    """The parameters of a Qwen3 or, with experts, of a Qwen3-MoE, as its module holds them."""
    block = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (HEAD,),
        "k_norm": (HEAD,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if experts:
        block |= {"gate": (experts, hidden), "gate_up_proj": (experts, 2 * width, hidden)}
        block |= {"down_proj": (experts, hidden, width)}
    else:
        block |= {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    shapes = {"embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "norm": (hidden,)}
    shapes |= {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}
    return [Parameter(name, shape, "bfloat16") for name, shape in shapes.items()]


CASES = {
    "Qwen3-32B, 32 to 8": (model(64, 5120, 8192, 1024, 25_600, 0), 32, 8),
    "Qwen3-235B-A22B, 512 to 64": (model(94, 4096, 8192, 512, 1536, 128), 512, 64),
}


def main() -> None:
    print("| model, from ranks to ranks | plan | a sender's moves | a receiver's moves |\n|---|---|---|---|")
    for name, (parameters, senders, receivers) in CASES.items():
        clock = [time.perf_counter()]
        source = Layout.sharded(parameters, range(senders))
        target = Layout.replicated(parameters, range(senders, senders + receivers))
        plan = plan_transfer(source, target, BUCKET_BYTES)
        assert plan.bytes_moved == receivers * source.num_bytes
        assert plan.peak_bytes > 0
        clock.append(time.perf_counter())
        sent = sum(map(len, plan.sends(0)))
        clock.append(time.perf_counter())
        received = sum(map(len, plan.receives(senders)))
        clock.append(time.perf_counter())
        took = [after - before for before, after in itertools.pairwise(clock)]
        print(f"| {name} | {took[0]:.2f} | {took[1]:.2f} ({sent:,}) | {took[2]:.2f} ({received:,}) |")


if __name__ == "__main__":
    main()
