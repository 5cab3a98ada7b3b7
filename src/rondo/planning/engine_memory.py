"""How many bytes a generation engine has: its weights, its cache of keys and values, what it keeps while
it is awake. With `planning.memory` the one place of these formulas. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rondo.planning.memory import CONTEXT_BYTES, GIB, Bytes, exactly, model_bytes, probably
from rondo.planning.shapes import ModelShape

# Of the memory that is free when an engine is built, in its cache: the rest is for its weights and
# activations, for the trainer's gradients, moments and activations, which come later, and for other engines.
CACHE_SHARE = 0.4
# What an engine of another package keeps beside weights and cache while it is awake: workspaces of attention
# and sampling, CUDA graphs. An estimate, too.
ENGINE_BYTES = 2 * GIB


def kv_bytes(kv_heads: int, key_dim: int, value_dim: int, itemsize: int, *, tensor: int = 1) -> int:
    """Returns the bytes of one token's keys and values in one layer of one worker, which has at least one
    head.
    """
    return max(1, kv_heads // tensor) * (key_dim + value_dim) * itemsize


def token_bytes(shape: ModelShape, itemsize: int, *, tensor: int = 1, latent: bool = False) -> int:
    """Returns the bytes of one token's keys and values in all layers of one worker. latent: the engine caches
    what keys and values of latent attention are made of, which no axis cuts.
    """
    if latent and shape.latent:
        return shape.layers * shape.latent * itemsize
    one = kv_bytes(shape.kv_heads, shape.key_dim, shape.value_dim, itemsize, tensor=tensor)
    return shape.layers * one


def shared_cache(free: int) -> int:
    """Returns what an engine's cache may have of the memory that is free when it is built."""
    return int(CACHE_SHARE * free)


@dataclass(frozen=True)
class EngineRun:
    """One generation engine on one of its devices."""

    shape: ModelShape
    """Its sizes."""
    name: Literal["native", "transformers", "vllm", "sglang"] = "native"
    """Which one."""
    itemsize: int = 2
    """Bytes of a number."""
    tensor: int = 1
    """Its devices."""
    tokens: int = 0
    """Of all requests at one time, at their longest."""
    cache_bytes: int | None = None
    """Of the cache, where somebody says so."""
    share: float | None = None
    """Of the card, all that it may have (vLLM's gpu_memory_utilization)."""
    longest: int = 0
    """Tokens of the longest request: the least that a cache must hold."""
    shares_weights: bool = False
    """Whether they are the trainer's own tensors."""
    copies: int = 1
    """Of its weights: one that merges adapters keeps the base, too."""
    own_process: bool = False
    """Whether it has a process of its own."""

    @property
    def foreign(self) -> bool:
        """Says whether it is another package's: it gives its weights up as it sleeps, and caches latents."""
        return self.name in ("vllm", "sglang")

    @property
    def cached_bytes(self) -> int:
        """Returns the bytes of one token's keys and values in all layers of one of its devices."""
        return token_bytes(self.shape, self.itemsize, tensor=self.tensor, latent=self.foreign)


def engine_on_device(
    run: EngineRun, card: int | None, held: int, *, asleep: bool = False
) -> dict[str, Bytes]:
    """Returns what an engine has on a device. card: its bytes; None: not known. held: what others have there
    when it is built.

    A cache that nobody sized is what all requests could need, and at most CACHE_SHARE of what is free. Asleep
    the cache is gone, and vLLM's and SGLang's weights, too.
    """
    found: dict[str, Bytes] = {}
    weights = run.copies * model_bytes(-(-run.shape.parameters() // run.tensor), run.itemsize)
    if run.shares_weights:
        weights = 0
    if not (asleep and run.foreign):
        found["weights"] = exactly(weights)
    if run.own_process or run.foreign:
        found["process"] = probably(CONTEXT_BYTES)
    if not asleep:
        one = run.cached_bytes
        wanted = run.tokens * one
        if run.cache_bytes is not None:
            cache = run.cache_bytes
        elif run.share is not None and card is not None:
            cache = max(0, int(run.share * card) - weights - ENGINE_BYTES)
        else:
            cache = wanted if card is None else min(wanted, shared_cache(max(0, card - held - weights)))
        # Other packages' engines keep less of layers with a window, and by options less of each number.
        least = 0 if run.foreign else run.longest * one
        found["cache"] = Bytes(min(least, cache), cache)
        if run.foreign:
            found["graphs and workspace"] = probably(ENGINE_BYTES)
    return {name: size for name, size in found.items() if size.expected}
