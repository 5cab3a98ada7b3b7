"""Which models fit which cards, planned: the table of docs/hardware.md. No card, no torch.

    python benchmarks/what_fits.py           for each model and card the fewest devices that are enough
    python benchmarks/what_fits.py --short   the same of three cards, for the README

GRPO with vLLM and a reference, 128 prompts of 512 tokens with 8 answers of 2,048. Lengths are the most that
rows have: nobody's rows are all as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rondo.config import Config, load
from rondo.planning.devices import find_device
from rondo.planning.roles import ON_CARD, config_for, roles_of
from rondo.planning.runs import Lengths, shapes_of
from rondo.planning.search import Combination, Space, search, space_of

MODELS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Llama-3.1-70B")
CARDS = ("rtx4090", "l40s", "a100", "h100", "h200")
DEVICES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = Lengths(512, 2048, "")


def recipe(model: str, devices: int, *, adapters: bool) -> Config:
    """Returns the run that is planned."""
    settings = [
        f"model.path={model}",
        "trainer.total_steps=1",
        f"cluster={{backend: ray, devices: {devices}}}",
        "data={batch_size: 128, max_prompt_tokens: 512}",
        "rollout={engine: vllm, n: 8, max_tokens: 2048}",
        "algorithm.kl={name: k3, where: loss, coef: 0.001}",
        *(["actor.lora={rank: 32}"] if adapters else []),
    ]
    return config_for(load([], settings).config, ON_CARD)


def small(space: Space) -> Space:
    """Leaves out what these sizes do not need: rows over several ranks, copies, engines with devices of their
    own, and few sequences at one time.
    """
    plain = ("actor.parallel.context", "actor.parallel.replicate", "actor.parallel.tensor")
    return Space(
        tuple(one for one in space.placements if one["rollout.sleep"]),
        tuple(one for one in space.trainer if all(one[key] == 1 for key in plain)),
        tuple(one for one in space.engine if one["rollout.max_concurrent"] >= 256),
    )


def fewest(model: str, card: str, *, adapters: bool) -> tuple[int, Combination] | None:
    """Returns the fewest devices that are enough, and the best that was found for them."""
    device = find_device(card)
    for devices in DEVICES:
        config = recipe(model, devices, adapters=adapters)
        shape, roles = shapes_of(config)("actor"), roles_of(config)
        space = small(space_of(config, roles, shape, LENGTHS.row))
        found = search(config, roles, ("actor",), lambda role, one=shape: one, LENGTHS, device, space)
        if found.best:
            return devices, found.best[0]
    return None


def rows(cards: tuple[str, ...]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| model | what learns | " + " | ".join(cards) + " |"
    yield "|---" * (2 + len(cards)) + "|"
    for model in MODELS:
        for adapters in (False, True):
            cells = []
            for card in cards:
                found = fewest(model, card, adapters=adapters)
                if found is None:
                    cells.append(f"more than {DEVICES[-1]}")
                    continue
                devices, best = found
                rate = best.time.tokens / best.time.step / devices
                cells.append(f"{devices} ({best.peak / (1 << 30):.0f} GiB, {rate:,.0f}/s)")
            yield f"| {model} | {'adapters of rank 32' if adapters else 'all'} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="three cards")
    short = parser.parse_args().short
    print(*rows(("rtx4090", "a100", "h100") if short else CARDS), sep="\n")


if __name__ == "__main__":
    main()
