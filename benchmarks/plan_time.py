"""How far the planner's seconds are from what others published. No card.

    python benchmarks/plan_time.py prime-rl     seconds of prime-rl's micro-batches beside the planned ones
    python benchmarks/plan_time.py nemo-rl      tokens a second of NeMo-RL's steps
    python benchmarks/plan_time.py hybridflow   which placement HybridFlow found best, and its transitions

Sources: prime-rl benchmarks/results/BENCHMARKS.md at 559b44772; NVIDIA-NeMo/RL, its
docs/about/performance-summary.md (v0.6 at 7ea279abf, v0.5 rows at 108bffdab); HybridFlow, arXiv 2409.19256v2,
section 8. The first two are other code than rondo's: one efficiency for each card and kind of work is fitted
on every second row, and the error of the rows between is printed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.plan import PRIME_RL, prime_rl_run
from rondo.planning.devices import DeviceRow, find_device
from rondo.planning.engine_memory import EngineRun, token_bytes
from rondo.planning.model_run import ModelRun, Spread
from rondo.planning.shapes import ModelShape, find_shape
from rondo.planning.time import (
    Parts,
    StepRows,
    generation_parts,
    pass_parts,
    sync_parts,
)

# Of the rows of PRIME_RL: the card, and the seconds of one micro-batch (a row on each card).
PRIME_RL_SECONDS = (
    ("h100", 1.38),
    ("h100", 6.46),
    ("h100", 6.57),
    ("h100", 1.23),
    ("h100", 0.32),
    ("h100", 5.04),
    ("h100", 18.10),
    ("h100", 2.69),
    ("h100", 2.63),
    ("h100", 15.74),
    ("h100", 2.64),
    ("h100", 21.44),
    ("h200", 41.13),
    ("h100", 3.96),
    ("h100", 22.42),
    ("h200", 7.85),
    ("b200", 31.69),
)


class NemoRow(NamedTuple):
    """One row of NeMo-RL's table."""

    model: str
    """Its name in the planner's table."""
    behind: int
    """How many steps generation may be ahead; 0: colocated, one after the other."""
    cards: int
    """Of all roles."""
    card: str
    """Its name in the planner's table."""
    response: int
    """Mean tokens of a response."""
    samples: int
    """Rows of a step."""
    engine: int
    """Cards of a generation engine."""
    tensor: int
    """Axes of the trainer."""
    context: int
    """Likewise."""
    expert: int
    """Likewise."""
    pipeline: int
    """Likewise."""
    seconds: float
    """Of a step."""


PROMPT = 115  # tokens: 100 to 130, derived from their throughput
NEMO_RL = tuple(
    NemoRow(*row)
    for row in (
        ("Llama-3.1-8B", 0, 16, "h100", 1019, 2048, 1, 1, 1, 1, 2, 92.8),
        ("Llama-3.1-8B", 1, 16, "h100", 1123, 2048, 1, 1, 1, 1, 1, 64.8),
        ("Llama-3.1-8B", 0, 8, "gb200", 1066, 2048, 1, 1, 1, 1, 1, 91.0),
        ("Qwen3-32B", 0, 32, "h100", 3251, 2048, 4, 4, 1, 1, 4, 376),
        ("Qwen3-32B", 1, 64, "h100", 3252, 2048, 4, 4, 1, 1, 4, 200),
        ("Qwen3-30B-A3B", 0, 32, "h100", 3203, 2048, 2, 1, 1, 8, 1, 192),
        ("Qwen3-30B-A3B", 1, 32, "h100", 3201, 2048, 2, 1, 1, 8, 2, 152),
        ("Qwen3-30B-A3B", 8, 192, "h100", 3206, 2048, 2, 1, 1, 8, 1, 34.5),
        ("Qwen3-30B-A3B", 0, 16, "gb200", 3199, 2048, 1, 1, 1, 16, 1, 221),
        ("Qwen3-235B-A22B", 0, 128, "h100", 5698, 512, 16, 2, 2, 16, 8, 395),
        ("Qwen3-235B-A22B", 0, 256, "h100", 5713, 512, 16, 2, 2, 16, 8, 312),
        ("Qwen3-235B-A22B", 1, 256, "h100", 5721, 512, 8, 4, 1, 16, 8, 231),
        ("Qwen3-235B-A22B", 0, 64, "gb200", 5709, 512, 8, 2, 2, 16, 4, 286),
        ("DeepSeek-V3", 0, 256, "h100", 701, 512, 32, 1, 1, 16, 16, 134),
        ("DeepSeek-V3", 0, 512, "h100", 697, 512, 32, 1, 1, 16, 16, 111),
        ("DeepSeek-V3", 1, 512, "h100", 710, 512, 32, 1, 1, 16, 16, 64.1),
        ("DeepSeek-V3", 0, 128, "gb200", 711, 512, 32, 1, 1, 16, 8, 108),
    )
)


class Compared(NamedTuple):
    """A published time beside the planned one."""

    row: str
    """Which one, as the table says it."""
    kind: str
    """What is fitted together: the card and the kind of work."""
    seconds: float
    """What was published."""
    planned: float
    """What the formulas say."""


def prime_rl() -> Iterator[Compared]:
    """Yields the micro-batches of prime-rl."""
    for (name, tokens, cards, lora, what, _), (card, seconds) in zip(PRIME_RL, PRIME_RL_SECONDS, strict=True):
        run = prime_rl_run(name, cards, lora, what)
        run = replace(run, logits_bytes=1 << 50) if what == "SFT" else run
        rows, device = StepRows(cards, 1, (tokens - 1,)), find_device(card)
        planned = _sum(pass_parts(run, rows, device, 1, learns=True))
        learnt = "all weights" if lora is None else f"adapters of rank {lora}"
        kind = f"{card}, {'all weights' if lora is None else 'adapters'}, {bool(run.shape.experts)}"
        yield Compared(f"{name} {what}, {learnt}, {tokens:,} tokens, {cards} {card}", kind, seconds, planned)


def _spread_lengths(mean: int) -> tuple[int, ...]:
    """Returns lengths with this mean, up to three times as much: how they were spread is not published."""
    return tuple(round(mean * 3 * (index + 0.5) ** 2 / 64**2) for index in range(64))


def nemo_rl() -> Iterator[Compared]:
    """Yields the steps of NeMo-RL: half of the cards generate where the two run at one time."""
    for one in NEMO_RL:
        shape, device = find_shape(one.model), find_device(one.card)
        rows = StepRows(one.samples, PROMPT, _spread_lengths(one.response), 32)
        training = generating = one.cards
        if one.behind:
            training = generating = one.cards // 2
        # Stages of a pipeline wait for each other; its formulas come with the Megatron backend.
        run = ModelRun(
            shape,
            Spread(training, 1, one.tensor, one.context, one.expert),
            itemsize=2,
            trains=True,
            recompute=one.model == "Llama-3.1-8B" or one.cards >= 64,
            logits_bytes=1 << 50,
        )
        passes = max(1, one.samples // (training // (one.tensor * one.context * one.pipeline)))
        engine = EngineRun(shape, "vllm", tensor=one.engine)
        engines = generating // one.engine
        generated = _sum(generation_parts(engine, rows, device, engines, 1 << 20, ahead=one.behind))
        trained = 0.0
        for learns in (False, True):
            parts = dict(pass_parts(run, rows, device, passes, learns=learns))
            parts.pop("links")  # of FSDP: Megatron's data ranks hold whole stages
            trained += _sum(parts)
        synced = _sum(sync_parts(2 * shape.parameters(), run, device, "gathered", hop=False, apart=1))
        planned = (max(generated, trained) if one.behind else generated + trained) + synced
        behind = f"{one.behind} behind" if one.behind else "in turn"
        kind = f"{one.card}, {'experts' if shape.experts else 'dense'}"
        yield Compared(f"{one.model}, {behind}, {one.cards} {one.card}", kind, one.seconds, planned)


def _sum(parts: Parts) -> float:
    return sum(parts.values())


def fitted(rows: Iterable[Compared]) -> Iterator[tuple[Compared, float, bool]]:
    """Yields each row with what is planned by its kind's efficiency, and whether that was fitted on it: the
    geometric mean of every second row of the kind, from the first.
    """
    kinds: dict[str, list[Compared]] = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    for of_kind in kinds.values():
        factor = statistics.geometric_mean(one.seconds / one.planned for one in of_kind[::2])
        for index, one in enumerate(of_kind):
            yield one, one.planned * factor, index % 2 == 0


# ---- HybridFlow ----

# PPO on Llama, 1,024 prompts of 1,024 tokens with as many of response, 8 updates (its section 8.1). The axis
# `tensor` cuts its models in a machine, here in 8 at most; beyond that there are copies.
ROLES = ("actor", "critic", "reference", "reward")
PLACEMENTS = {
    "colocated": lambda cards: {"all": (ROLES, cards)},
    "split": lambda cards: {
        "a": (("actor", "reference"), cards // 2),
        "b": (("critic", "reward"), cards // 2),
    },
    "standalone": lambda cards: {role: ((role,), cards // 4) for role in ROLES},
}
HYBRIDFLOW_BEST = (
    ("Llama-2-13B", 16, "colocated"),
    ("Llama-2-13B", 32, "colocated"),
    ("Llama-2-13B", 64, "colocated"),
    ("Llama-2-13B", 96, "split"),
    ("Llama-2-13B", 128, "standalone"),
    ("CodeLlama-34b", 32, "colocated"),
    ("CodeLlama-34b", 64, "colocated"),
    ("CodeLlama-34b", 96, "split"),
    ("CodeLlama-34b", 128, "split"),
)
UPDATES = 8
HANDED_ON = ("DeepSpeed-Chat", "HybridFlow-V", "HybridFlow")
# Layouts of its section 8.4: training on 16 cards, and the engine's cards that it found best.
TRANSITIONS = (("Llama-2-7B", 8, 1, 2, 2), ("Llama-2-13B", 8, 1, 2, 4))


def a100() -> DeviceRow:
    """Returns HybridFlow's cards: eight to a machine with 200 Gb/s."""
    return replace(find_device("a100"), network=25e9 / 8)


def d_cost(shape: ModelShape, placement: str, cards: int) -> float:
    """Returns the seconds of an iteration: in a phase the models of one pool add up, pools run at one time,
    and the longest is waited for (its algorithm 1).
    """
    device, rows = a100(), StepRows(1024, 1024, (1024,))
    phases: dict[str, list[float]] = defaultdict(list)
    for roles, here in PLACEMENTS[placement](cards).values():
        tensor = min(8, here)
        run = ModelRun(shape, Spread(here, tensor=tensor), itemsize=2, trains=True, logits_bytes=1 << 50)
        forward = _without_gathering(run, rows, device, learns=False)
        # Gradients are added up over copies at each update, across machines.
        copies = here // tensor
        moved = 2 * 2 * shape.parameters() / tensor * (1 - 1 / copies)
        sums = UPDATES * moved / device.link_over(here)
        update = _without_gathering(run, rows, device, learns=True) + sums
        phases["prepare"].append(forward * len([role for role in roles if role != "actor"]))
        phases["train"].append(update * len([role for role in roles if role in ("actor", "critic")]))
        if "actor" in roles:
            phases["generate"].append(
                min(_generates(shape, rows, device, here, size) for size in (2, 4, 8) if size <= here)
            )
    return sum(map(max, phases.values()))


def _generates(shape: ModelShape, rows: StepRows, device: DeviceRow, cards: int, tensor: int) -> float:
    engine = EngineRun(shape, "vllm", tensor=tensor)
    room = 0.6 * device.memory * tensor - 2 * shape.parameters()  # what learns is beside it
    one = token_bytes(shape, 2, tensor=1)
    slots = int(room // (one * 2048))
    return math.inf if slots < 1 else _sum(generation_parts(engine, rows, device, cards // tensor, slots))


def _without_gathering(run: ModelRun, rows: StepRows, device: DeviceRow, *, learns: bool) -> float:
    tensor = run.layout.tensor
    apart = replace(run, layout=replace(run.layout, ranks=tensor))  # one copy, with all rows
    parts = pass_parts(apart, rows, device, UPDATES, learns=learns)
    return _sum(parts) * tensor / run.layout.ranks


def hybridflow() -> Iterator[tuple[str, int, str, dict[str, float]]]:
    """Yields model, cards, the placement that was best there, and the planned seconds of each."""
    for name, cards, best in HYBRIDFLOW_BEST:
        yield name, cards, best, {one: d_cost(find_shape(name), one, cards) for one in PLACEMENTS}


def transitions(
    parameters: int, tensor: int, pipeline: int, data: int, engine: int
) -> dict[str, tuple[float, float]]:
    """Returns what a card receives and what it has at most, in bytes, as weights go from training (cut by
    `tensor` × `pipeline`, copied `data` times) to engines of `engine` cards (its table 2).
    """
    size, cut = 2 * parameters, tensor * pipeline
    everyone = cut * data
    return {
        HANDED_ON[0]: (size * (everyone - 1) / everyone, size),
        HANDED_ON[1]: (size * (cut - 1) / cut, size),
        HANDED_ON[2]: (size * (cut - engine) / (engine * cut), size / engine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("against", choices=("prime-rl", "nemo-rl", "hybridflow"))
    against = parser.parse_args().against
    if against == "hybridflow":
        print("| model | cards | best there | " + " | ".join(PLACEMENTS) + " |", "|---" * 6 + "|", sep="\n")
        for name, cards, best, planned in hybridflow():
            print(
                f"| {name} | {cards} | {best} | {' | '.join(f'{planned[one]:.0f} s' for one in PLACEMENTS)} |"
            )
        print(
            "\n| model, tensor × pipeline × data, engine |" + " | ".join(HANDED_ON) + " |",
            "|---" * 4 + "|",
            sep="\n",
        )
        for name, *layout in TRANSITIONS:
            found = transitions(find_shape(name).parameters(), *layout)
            cells = " | ".join(f"{got / 1e9:.1f}, {most / 1e9:.1f}" for got, most in found.values())
            print(f"| {name}, {' × '.join(map(str, layout[:3]))}, {layout[3]} | {cells} |")
        return
    print(
        "| run | published, s | planned | by the kind's efficiency | error | fitted on it |",
        "|---" * 6 + "|",
        sep="\n",
    )
    for row, planned, own in fitted(prime_rl() if against == "prime-rl" else nemo_rl()):
        error = f"{planned / row.seconds - 1:+.0%}"
        print(
            f"| {row.row} | {row.seconds} | {row.planned:.2f} | {planned:.2f} | {error} | "
            f"{'yes' if own else 'no'} |"
        )


if __name__ == "__main__":
    main()
