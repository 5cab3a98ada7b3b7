"""How long what a step does takes on a device, from sizes, lengths and what the device reaches: the one place
of these formulas. Pure: nothing is measured, and nothing is run.

Work is counted (operations, bytes that its memory moves, bytes on links, launches), and each kind has a
speed. What a device does meanwhile is not waited for: gathered weights travel behind products, and launches
hide behind kernels on a card, but not where the host computes. All ranks have equal shares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from rondo.planning.devices import DECODED_ROWS, DeviceRow
from rondo.planning.engine_memory import EngineRun
from rondo.planning.memory import keeps_logits, residency, token_numbers
from rondo.planning.model_run import ModelRun, Spread
from rondo.planning.shapes import ModelShape

# Kernels that one block launches in a forward pass; a backward pass launches twice as many.
BLOCK_OPS = 40
# Attention computes its scores again in a backward pass: five products for the two of a forward pass.
ATTENTION_BACKWARD = 2.5
# How often memory moves each number that autograd keeps (`token_numbers`) in a forward pass; a backward pass
# moves twice as much. Operations that are not fused write and read what lies between, and cast it.
MOVED = 6
# Float32 logits are written, and read for their largest, their sum and their gradient.
LOGITS_MOVED = 4
# Of an engine's step beside its kernels: scheduling, sampling, handing tokens on.
ENGINE_STEP = {"native": 1.5e-3, "transformers": 3e-3, "vllm": 2e-3, "sglang": 1.5e-3}
DELAY = 12e-6  # seconds of a small collective operation between cards
DISK = 2e9  # bytes a second that a machine writes: an estimate, and of no device

Parts = Mapping[str, float]
"""Seconds by what they are spent on."""


def seconds_of(parts: Parts) -> float:
    """Adds up what seconds are spent on."""
    return sum(parts.values())


@dataclass(frozen=True)
class StepRows:
    """The rows that a step generates and learns from."""

    count: int
    """How many."""
    prompt: int
    """Tokens of each prompt."""
    responses: tuple[int, ...]
    """Tokens of responses: each stands for as many rows as any other."""
    n: int = 1
    """Rows with the same prompt."""
    shared: bool = False
    """Whether a pass computes a prompt once for its rows."""

    @cached_property
    def tokens(self) -> float:
        """Returns the tokens of all rows."""
        return self.count * (self.prompt + self.mean)

    @cached_property
    def mean(self) -> float:
        """Returns the tokens of a response."""
        return sum(self.responses) / len(self.responses)

    @cached_property
    def pairs(self) -> float:
        """Counts the pairs of tokens that attention looks at: each with those before it."""
        squares = sum((self.prompt + one) ** 2 for one in self.responses)
        return self.count * squares / len(self.responses) / 2

    @cached_property
    def passed(self) -> tuple[float, float]:
        """Returns the tokens and the pairs that passes compute."""
        if not self.shared:
            return self.tokens, self.pairs
        again = self.count * (1 - 1 / self.n)
        return self.tokens - again * self.prompt, self.pairs - again * self.prompt**2 / 2


# ---- operations ----


def block_flops(shape: ModelShape) -> float:
    """Returns the operations of one token in all blocks' products, of a forward pass."""
    routed = shape.routed * shape.active_experts / shape.experts if shape.experts else 0
    return 2 * (shape.matrices + routed)


def image_flops(run: ModelRun, *, learns: bool, again: int) -> float:
    """Returns the operations that a tower's products take for a token of a pass. What its attention takes is
    left out: patches see those of their own image alone.
    """
    tower = run.shape.tower
    if tower is None:
        return 0.0
    patch = tower.depth * tower.block + tower.patch * tower.hidden + tower.mergers / tower.merged
    backward = (1 if run.lora is not None else 2) + again if learns and "tower" in run.parts else 0
    return 2 * patch * run.patches * (1 + backward)


def attention_flops(shape: ModelShape) -> float:
    """Returns the operations of one pair of tokens in all layers' attention, of a forward pass."""
    return 2 * shape.layers * shape.heads * (shape.key_dim + shape.value_dim)


def model_flops(shape: ModelShape, tokens: float, pairs: float, *, head: bool = True) -> float:
    """Returns the operations that training on rows takes, for the utilisation of devices (MFU): three forward
    passes (a backward pass is two), of the parameters that a token meets, its embedding left out, and of
    attention over the tokens before it. What is computed again is not counted. pairs: see `StepRows.pairs`.
    """
    forward = (block_flops(shape) + (2 * shape.embeddings if head else 0)) * tokens
    return 3 * (forward + attention_flops(shape) * pairs)


# ---- training ----


def pass_parts(
    run: ModelRun, rows: StepRows, device: DeviceRow, passes: int, batches: int = 1, *, learns: bool
) -> Parts:
    """Returns the seconds of a forward pass over the rows, and with `learns` of the backward pass. passes: of
    each rank, with weights that are gathered anew. batches: between which a pipeline runs empty.
    """
    shape, layout, reached = run.shape, run.layout, device.reached
    again = int(learns and bool(run.recompute))
    backward = 0 if not learns else 1 if run.lora is not None else 2  # frozen weights have no gradients
    share = 1 / layout.ranks
    tokens, pairs = rows.passed
    own = tokens * layout.tensor * share
    products = block_flops(shape) * tokens * (1 + backward + again)
    products += image_flops(run, learns=learns, again=again) * tokens
    logits = moved_logits = 0.0
    if run.head == "lm":
        row = shape.vocabulary * max(4, run.compute)
        at_once = own * row / layout.tensor / max(1, passes)
        kept = run.logits_bytes is None or keeps_logits(int(at_once), run.logits_bytes)
        logits = 2 * shape.embeddings * tokens * (1 + backward + (learns and not kept))
        moved_logits = own * row / layout.tensor * LOGITS_MOVED * (1 + learns)
    scores = attention_flops(shape) * pairs * (1 + ATTENTION_BACKWARD * learns + again)
    moved = token_numbers(run) * shape.layers * own * MOVED * (1 + 2 * learns + again) + moved_logits
    parts = {
        "products": (products + logits) * share / (device.flops_of(run.compute) * reached.products),
        "attention": scores * share / (device.flops_of(run.compute) * reached.attention),
        "memory": moved / device.passing(own / max(1, passes) * shape.hidden * run.compute),
    }
    busy = sum(parts.values())
    launches = passes * shape.layers / layout.pipeline * BLOCK_OPS * (1 + 2 * learns + again) * device.launch
    parts["launches"] = launches if device.is_host else max(0.0, launches - busy)
    # A host's own processors send, and compute nothing meanwhile.
    hidden = 0.0 if device.is_host else busy
    gathering = 0.0 if run.megatron else _gathering(run, device, passes, learns=learns)
    parts["links"] = max(0.0, gathering - hidden)
    parts["links"] += _axes(run, device, own, 1 + learns * (1 + again))
    if layout.pipeline > 1:
        # A stage waits for a batch's first pass to reach it, and for its last to leave the others:
        # (p - 1) / m of what it computes, and with v chunks a stage (p - 1) / (m v), since it is one of them
        # that is waited for (Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2).
        waits = (layout.pipeline - 1) * batches / (max(1, passes) * layout.virtual)
        parts["bubble"] = sum(parts.values()) * waits
    return parts


def _gathering(run: ModelRun, device: DeviceRow, passes: int, *, learns: bool) -> float:
    """Returns what FSDP's gathering of weights takes, and its reduction of gradients."""
    shape, layout = run.shape, run.layout
    head = 2 if run.head == "lm" and not shape.tied else 1
    dense = (shape.matrices + shape.whole + head * shape.embeddings) / layout.tensor
    moved = dense * _others(layout.copy // layout.tensor)
    moved += shape.routed / layout.expert * _others(layout.copy // layout.expert)
    times = 1 + (learns and run.reshard)  # blocks' weights come again for the backward pass
    size = run.compute * times + (4 if learns and run.lora is None else 0)  # gradients are added in float32
    seconds = passes * moved * size / device.link_over(layout.copy)
    if learns and run.lora is None and layout.replicate > 1:
        seconds += 2 * moved / layout.copy * 4 * _others(layout.replicate) / device.link_over(layout.ranks)
    return seconds


def _axes(run: ModelRun, device: DeviceRow, own: float, directions: int) -> float:
    """Returns what the axes of a layout send around for tokens, which nothing hides."""
    shape, layout = run.shape, run.layout
    tokens = own / layout.context
    hidden, heads = tokens * shape.hidden * run.compute, tokens * shape.attention_width * run.compute
    seconds = 0.0
    for ranks, span, moved in (
        # Sums after attention and after the MLP, each of which crosses twice.
        (layout.tensor, layout.tensor, 4 * shape.layers * hidden),
        # All that attention reads and writes: heads come together, tokens part.
        (layout.context, layout.tensor * layout.context, shape.layers * heads),
        # To the experts and back.
        (
            layout.expert,
            layout.expert,
            2 * (shape.layers - shape.dense_layers) * shape.active_experts * hidden,
        ),
    ):
        seconds += moved * _others(ranks) / device.link_over(span)
    return directions * seconds


def _others(ranks: float) -> float:
    """Returns the share of a whole that `ranks` equal parts lack: what comes from others."""
    return 1 - 1 / max(1.0, ranks)


def optimizer_parts(run: ModelRun, device: DeviceRow, steps: int) -> Parts:
    """Returns the seconds of so many optimizer steps: gradients are read for their norm and for the step,
    weights and moments are read and written.
    """
    held = residency(run)
    moved = 2 * held.gradients + (2 * held.weights if run.lora is None else 0) + 2 * held.moments
    parts = {"optimizer": steps * moved / (device.bandwidth * device.reached.memory)}
    if run.megatron:  # gradients are added up, and weights come back, once a step
        same = run.layout.ranks // (run.layout.pipeline * run.layout.tensor)
        back = held.weights if run.lora is None else held.gradients // 4 * run.compute
        parts["links"] = steps * (held.gradients + back) * _others(same) / device.link_over(same)
    if held.moments_pass is not None:  # there and back
        parts["offloading"] = steps * 2 * held.moments / (device.host * device.reached.links)
    return parts


def waking_parts(run: ModelRun, device: DeviceRow) -> Parts:
    """Returns the seconds in which weights that rest in host memory come to the device, once per phase."""
    held = residency(run)
    if not held.weights_rest:
        return {}
    return {"offloading": held.weights / (device.host * device.reached.links)}


# ---- generation ----


def decode_step(run: EngineRun, device: DeviceRow, batch: float, tokens: float) -> float:
    """Returns the seconds of one step of an engine that adds a token to each of `batch` sequences with so
    many tokens in all: weights and cache are read once, or products take longer.
    """
    shape, reached = run.shape, device.reached
    weights = float(shape.matrices + shape.embeddings)
    if shape.experts:  # those that somebody goes to
        weights += shape.routed * (1 - (1 - shape.active_experts / shape.experts) ** batch)
    cache = tokens * run.cached_bytes
    flops = (block_flops(shape) + 2 * shape.embeddings) * batch + attention_flops(shape) * tokens
    computing = flops / run.tensor / (_engine_flops(run, device) * reached.products)
    nbytes = weights * run.itemsize / run.tensor
    reading = nbytes / (_engine_reads(run, device, nbytes) * reached.memory)
    reading_cache = cache / (device.bandwidth * reached.memory)
    busy = max(reading + reading_cache, computing)
    if device.is_host:
        # A core does one after the other: products, what lies between them, attention over the cache.
        between = ModelRun(shape, Spread(1), run.itemsize, run.itemsize, fused=True)
        moved = token_numbers(between) * shape.layers * batch * MOVED
        busy = host_products(reading, computing, batch)
        busy += (moved + cache) / (device.bandwidth * reached.memory)
    # On a card a graph has them, and the engine's own kernels are one call.
    launches = 0.0
    if device.is_host and not _own_kernels(run, device):
        launches = shape.layers * BLOCK_OPS / 2 * device.launch
    around = 0.0
    if run.tensor > 1:
        sent = 2 * 2 * batch * shape.hidden * run.itemsize * _others(run.tensor)
        around = shape.layers * (2 * DELAY + sent / device.link_over(run.tensor))
    return busy + around + ENGINE_STEP[run.name] + launches


def host_products(reading: float, computing: float, rows: float) -> float:
    """Returns the seconds of a host's products of so many rows, which wait for weights and compute: from one
    row, which waits alone, to DECODED_ROWS, which compute alone, each further row takes as long. reading,
    computing: seconds in which they would do one of these only.
    """
    further = (rows - 1) / (DECODED_ROWS - 1) * (computing * DECODED_ROWS / rows - reading)
    return max(reading, computing, reading + further if rows < DECODED_ROWS else 0.0)


def _own_kernels(run: EngineRun, device: DeviceRow) -> bool:
    """Says whether the native engine computes with its own kernels: on a host, in float32."""
    return run.name == "native" and run.itemsize == 4 and device.decode is not None


def _engine_flops(run: EngineRun, device: DeviceRow) -> float:
    """Returns the operations a second of an engine's products."""
    own = device.decode if _own_kernels(run, device) else None
    return device.flops_of(run.itemsize) if own is None else own


def _engine_reads(run: EngineRun, device: DeviceRow, nbytes: float) -> float:
    """Returns the bytes a second of an engine's weights that are read. nbytes: of all of them."""
    own = device.reading(nbytes) if _own_kernels(run, device) else None
    return device.bandwidth if own is None else own


@lru_cache(4096)  # a search asks for the same with each layout of the trainer
def generation_parts(
    run: EngineRun, rows: StepRows, device: DeviceRow, engines: int, slots: int, *, ahead: int = 0
) -> Parts:
    """Returns the seconds in which `engines` engines generate all rows. slots: sequences at one time of one
    engine, which its settings and its cache allow.

    Every engine gets an equal share of rows; whoever ends makes room for the next. The last ones run in ever
    smaller batches.
    """
    share = math.ceil(rows.count * (1 + ahead) / engines)
    lengths = [rows.responses[index * len(rows.responses) // share] for index in range(share)]
    # Long and short ones come mixed: by a step that meets each of them once.
    step = next(one for one in range(int(share * 0.618) or 1, 2 * share + 1) if math.gcd(one, share) == 1)
    waiting = [lengths[index * step % share] for index in range(share)]
    begun = min(share, max(1, slots))
    ends = [(length, 0) for length in waiting[:begun]]
    heapq.heapify(ends)
    now, starts, seconds = 0, 0, 0.0
    while ends:
        steps = ends[0][0] - now
        if steps:
            tokens = len(ends) * (rows.prompt + now + steps / 2) - starts
            seconds += steps * decode_step(run, device, len(ends), tokens)
            now += steps
        starts -= ends[0][1]
        if begun < share:
            heapq.heapreplace(ends, (now + waiting[begun], now))
            begun, starts = begun + 1, starts + now
        else:
            heapq.heappop(ends)
    # Rows of one prompt share its keys and values.
    prompts = StepRows(-(-share // rows.n), rows.prompt, (0,))
    flops = (block_flops(run.shape) * prompts.tokens) / device.reached.products
    flops += attention_flops(run.shape) * prompts.pairs / device.reached.attention
    prompt_seconds = flops / run.tensor / _engine_flops(run, device)
    return {"decoding": seconds / (1 + ahead), "prompts": prompt_seconds / (1 + ahead)}


# ---- weights ----


def sync_parts(
    nbytes: float, run: ModelRun, device: DeviceRow, route: str, *, hop: bool, apart: int
) -> Parts:
    """Returns the seconds in which the engines get new weights. nbytes: of all of them. route: see
    `planning.weights`. hop: from there they go on through the host's memory to a process of its own. apart:
    devices of both pools, of which each engine is sent all.
    """
    if route == "shared":
        return {}
    links = device.link_over(apart if route == "collective" else run.layout.copy)
    parts = {"links": nbytes * (1.0 if route == "collective" else _others(run.layout.copy)) / links}
    # Packed, unpacked and checked: each reads and writes them once.
    parts["memory"] = 6 * nbytes / device.passing(nbytes)
    if hop:
        parts["offloading"] = 2 * nbytes / (device.host * device.reached.links)
    if route == "disk":
        parts["disk"] = 2 * nbytes / DISK
    return parts
