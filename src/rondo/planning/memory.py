"""How many bytes each owner of memory will have, from sizes and settings: the one place of these formulas.
Pure: no device is asked, and nothing is made.

Each owner has two values. `least` is certain: what cannot be smaller whatever the data is, so that no run is
refused that fits. `expected` adds what depends on data, kernels and allocators.

A number of a model takes `itemsize` bytes at rest and `compute` bytes in products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from rondo.config.schema import ModelPart
from rondo.planning.model_run import ModelRun
from rondo.planning.tower_memory import images, offloaded_images

Phase = Literal["rest", "forward", "update", "gather"]
Owner = Literal["weights", "gradients", "moments"]

GIB = 1 << 30
# Of the least that a process with torch, and a row on the controller, take.
PROCESS_BYTES = 32 << 20
ROW_BYTES = 128
# Of a response's token there: id, mask and version, log-probs of the engine and of the trainer, an advantage.
RESPONSE_TOKEN_BYTES = 4 + 1 + 4 + 4 + 4 + 4
# Of a buffer in which what is offloaded rests and passes (`training.offload`): torch makes pinned memory in
# powers of two, and what is on its way needs a part of the device.
BLOCK_BYTES = 1 << 30
# All chunks' log-probs wait for the backward pass where they take at most so many times what the logits of
# one chunk may.
KEPT_CHUNKS = 2

# What a process takes of a card before any tensor: its context, libraries and communicators. An estimate,
# never measured here; nothing is refused by it.
CONTEXT_BYTES = int(0.75 * GIB)
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64  # a code of 4 bits; a scale of 8 bits for 64, one of 32 for 256 of these
MOMENT_SCALES = 4 / 128  # of 8-bit moments: a float32 for 128 numbers


class Bytes(NamedTuple):
    """What an owner will have."""

    least: int
    """What it has whatever the data is."""
    expected: int
    """What it will probably have."""

    def plus(self, other: Bytes) -> Bytes:
        """Adds both values."""
        return Bytes(self.least + other.least, self.expected + other.expected)


NOTHING = Bytes(0, 0)


def exactly(nbytes: float) -> Bytes:
    """Returns what is known from shapes alone."""
    return Bytes(int(nbytes), int(nbytes))


def probably(nbytes: float) -> Bytes:
    """Returns what depends on the data: it could be nothing."""
    return Bytes(0, int(nbytes))


# ---- a model at rest ----


def model_bytes(parameters: int, itemsize: float, moments: str | None = None) -> int:
    """Returns what an engine holds of a model: the parameters, and of one that is trained as much for
    gradients, and the two moments of Adam (moments: full or 8bit).
    """
    if moments is None:
        return int(parameters * itemsize)
    return int(parameters * 2 * itemsize) + moment_bytes(parameters, itemsize, moments)


def moment_bytes(parameters: int, itemsize: float, moments: str) -> int:
    """Returns what the two moments of Adam take, without the scales of 8-bit ones."""
    return int(parameters * 2 * (1 if moments == "8bit" else itemsize))


@dataclass(frozen=True)
class ResidencyPlan:
    """What a model will have on its device, in bytes of this rank: known from shapes, before any of it is
    there. What it computes (activations, what is gathered) depends on the rows.
    """

    weights: int
    """Its parameters."""
    gradients: int = 0
    """Of those that learn."""
    moments: int = 0
    """Of the same."""
    weights_rest: bool = False
    """Parameters are on the device in phases only."""
    moments_pass: int | None = None
    """So much of moments that rest is on the device at one time in an update; None: all of them stay."""

    def of(self, phase: Phase) -> dict[Owner, int]:
        """Returns what is on the device in a phase, or between phases, by owner."""
        held: dict[Owner, int] = {
            "weights": 0 if phase == "rest" and self.weights_rest else self.weights,
            "moments": self.moments if self.moments_pass is None else 0,
        }
        if phase == "update":
            held["gradients"] = self.gradients
            if self.moments_pass is not None:
                held["moments"] = self.moments_pass
        return held

    @property
    def at_rest(self) -> int:
        """Returns what rests in host memory."""
        return (0 if self.moments_pass is None else self.moments) + (self.weights if self.weights_rest else 0)

    def describe(self) -> str:
        """Writes it in a line: `rest: nothing; update: weights 1.2, gradients 1.2 GiB; …`."""
        told = []
        for phase in get_args(Phase):
            held = {owner: size for owner, size in self.of(phase).items() if size}
            sizes = ", ".join(f"{owner} {size / GIB:.2f}" for owner, size in held.items())
            told.append(f"{phase}: {f'{sizes} GiB' if sizes else 'nothing'}")
        return "; ".join(told)


# ---- a model that computes ----


def share_of(run: ModelRun) -> int:
    """Counts the parameters that the fullest rank holds: FSDP cuts all of a copy. What the axis `tensor` does
    not cut (norms, routers) lies on each of its ranks, and FSDP cuts it over fewer. It cuts tensors by their
    first axis, which of experts' is the experts: no rank has a part of one, and some may have none.
    """
    shape, layout = run.shape, run.layout
    cut = shape.parameters(output_head=run.head == "lm") - shape.whole - shape.routed
    held = -(-cut // layout.copy) + -(-shape.whole * layout.tensor // layout.copy)
    if not shape.experts:
        return held
    here, shards = shape.experts // layout.expert, max(1, layout.copy // layout.expert)
    return held + shape.routed // shape.experts * -(-here // shards)


def adapter_share(run: ModelRun) -> int:
    """Counts the adapters' parameters of the fullest rank: of A there are `lora` rows, each on one rank."""
    shape, rank, ranks = run.shape, run.lora or 0, run.layout.copy
    seeing = 0 if shape.tower is None else shape.tower.adapted(run.parts)
    if "language" not in run.parts:
        return -(-rank * seeing // ranks)
    outputs = shape.adapted - shape.adapted_inputs + seeing
    return -(-rank // ranks) * shape.adapted_inputs + -(-rank * outputs // ranks)


def learning(run: ModelRun) -> tuple[int, int]:
    """Counts this rank's parameters that learn, and the bytes of one: adapters are in float32 at least."""
    if not run.trains:
        return 0, run.itemsize
    if run.lora is not None:
        return adapter_share(run), max(4, run.itemsize)
    tower, layout = run.shape.tower, run.layout
    if tower is None:
        return share_of(run), run.itemsize
    of_images: dict[ModelPart, int] = {"tower": tower.parameters - tower.mergers, "projector": tower.mergers}
    cut = {part: -(-size * layout.tensor // layout.copy) for part, size in of_images.items()}
    language = share_of(run) - sum(cut.values()) if "language" in run.parts else 0
    return language + sum(size for part, size in cut.items() if part in run.parts), run.itemsize


def residency(run: ModelRun) -> ResidencyPlan:
    """Returns what the model has on its device at rest and in its phases."""
    if run.megatron:
        return megatron_residency(run)
    weights = model_bytes(share_of(run), run.itemsize)
    if run.quantised:  # only matrices are: embeddings, norms and experts' fused weights are not
        weights += int(run.shape.matrices // run.layout.copy * (NF4_BYTES - run.itemsize))
    learns, itemsize = learning(run)
    weights += adapter_share(run) * itemsize if run.lora is not None else 0
    moments = moment_bytes(learns, itemsize, run.moments)
    if run.moments == "8bit":
        moments += int(2 * learns * MOMENT_SCALES)
    largest = moment_bytes(run.shape.embeddings // run.layout.copy, itemsize, run.moments)
    passing = _passing(run, moments, largest)
    return ResidencyPlan(weights, learns * itemsize, moments, run.offload_params, passing)


def _passing(run: ModelRun, moments: int, largest: int) -> int | None:
    """Returns the bytes of moments that are on the device at one time; None: all. largest: of one tensor."""
    # Of a buffer's size, or of the largest tensor's where that is larger; two of them where they stream.
    most = (2 if run.streamed else 1) * max(BLOCK_BYTES, largest)
    return min(moments, most) if run.offload_optimizer and run.trains else None


def leaves_holes(held: ResidencyPlan, sharded: bool, adapted: bool, tiled: bool) -> bool:
    """Says whether a model that learns on a host gives large blocks back as they are freed, which costs some
    per cent of an update (`system.usage`): where blocks that stay are made between large ones that go, by
    FSDP, adapters or tiles, up to a half of a process was holes. held: by one process; below 1 GiB it is
    mostly libraries.
    """
    return (sharded or adapted or tiled) and held.weights + held.gradients + held.moments >= GIB


def gathered(run: ModelRun, blocks: int = 2) -> int:
    """Returns what a pass has of other ranks' weights, or of this rank's in the dtype of products: FSDP keeps
    the root (embeddings, head) during a pass, and at most two blocks: one that computes, and what the next
    arrives in.
    """
    if not _wrapped(run):
        return 0
    shape, layout = run.shape, run.layout
    if layout.copy == layout.tensor and run.itemsize == run.compute:
        return 0  # each rank multiplies with what it holds
    blocks = blocks if run.reshard else shape.layers
    # What no other rank has a part of is cast, tensor by tensor, and not gathered ahead.
    dense = blocks if layout.copy > layout.tensor else min(1, blocks)
    experts = blocks if layout.copy > layout.expert else min(1, blocks)
    own, routed = _block(run)
    return (_root(run) + dense * own + experts * routed) * run.compute


def gathered_first(run: ModelRun) -> int:
    """Returns what the start of a pass has of them: the root and what it arrived in, which stays until the
    first block is there; experts in units of their own come later.
    """
    shape, layout = run.shape, run.layout
    if layout.copy == layout.tensor or not _wrapped(run):
        return gathered(run, 1)
    own, routed = _block(run)
    if shape.dense_layers:
        own, routed = (shape.attention + 3 * shape.hidden * shape.intermediate) // layout.tensor, 0
    return 2 * (_root(run) + own + (0 if _apart(run) else routed)) * run.compute


def _apart(run: ModelRun) -> bool:
    """Says whether experts are a unit of FSDP's of their own."""
    return run.layout.expert > 1 or run.layout.tensor > 1


def _wrapped(run: ModelRun) -> bool:
    """Says whether FSDP is around the model: not where one rank has all of it in the dtype of products."""
    return run.layout.copy > 1 or run.itemsize != run.compute


def passing(run: ModelRun, tokens: int) -> dict[str, int]:
    """Returns what a pass has beside weights, gradients and moments in its fullest moment, by owner. tokens:
    as `on_device` takes them.

    There are five such moments: the start; while a tower reads images; at the head, where logits are; in a
    block; and of the backward pass the end, where what the root's gradients were computed in is reduced over
    the ranks.
    """
    if run.megatron:
        return {"activations": megatron_passing(run, tokens)}
    at_start = {"gathered": gathered_first(run)}
    size, wide = run.compute, max(4, run.compute)
    learns = run.trains and run.lora is None and "language" in run.parts and _wrapped(run)
    left = kept(run, tokens) if run.trains else 2 * size * run.shape.hidden * _own(run, tokens)
    of_head = run.shape.embeddings // run.layout.tensor if learns and run.head == "lm" else 0
    every, chunk = _logits(run, tokens)
    seen, reading = images(run, tokens)
    # At the head: while a chunk's logits are made, and, where they wait for the backward pass or are made
    # again in it, while the gradient of the head's weight is: in float32, a chunk's beside the sum.
    at_head = {
        "gathered": gathered(run, 1),
        "activations": left,
        "images": seen,
        "logits": logits(run, tokens),
        "unreduced gradients": 0 if _keeps(run, every) else of_head * wide,
    }
    narrow = size / 4 if size < 4 else 0
    adding = at_head | {
        "logits": logits(run, tokens, 1 + narrow),
        "unreduced gradients": of_head * wide * (2 if every > chunk else 1),
    }
    in_block = {"gathered": gathered(run), "activations": left + one_block(run, tokens), "images": seen}
    if learns:
        # Those of the head wait for the embeddings'; a block's are reduced in the dtype at rest.
        block = (max if _apart(run) else sum)(_block(run))
        in_block["unreduced gradients"] = of_head * size + _reducing(run, block)
    in_tower = {"gathered": gathered(run), "images": seen + reading}
    at_end = {"gathered": gathered(run, 0)}
    if learns:
        added = of_head if run.shape.tied else 0  # both gradients of a tied weight, until they are one
        at_end["unreduced gradients"] = max(_reducing(run, _root(run)), (_root(run) + added) * size)
    moments = (at_start, in_tower, at_head, in_block, at_end, *((adding,) if run.trains else ()))
    return max(moments, key=lambda held: sum(held.values()))


def _reducing(run: ModelRun, parameters: int) -> int:
    """Returns what gradients take while they are added up over ranks: as they were computed, in the dtype at
    rest, and this rank's part of the sum.
    """
    copies = 2 if run.on_host and run.layout.copy > 1 else 1
    return parameters * (run.compute + copies * run.itemsize) + parameters * run.itemsize // run.layout.copy


def _root(run: ModelRun) -> int:
    heads, tower = 2 if run.head == "lm" and not run.shape.tied else 1, run.shape.tower
    outside = 0 if tower is None else tower.before + tower.mergers
    return heads * run.shape.embeddings // run.layout.tensor + outside


def _block(run: ModelRun) -> tuple[int, int]:
    """Counts the parameters of one block that are in one place, without experts, and those of experts: whole
    ones stay on their ranks.
    """
    shape, layout = run.shape, run.layout
    sparse = shape.layers - shape.dense_layers
    experts = shape.routed // sparse if sparse else 0
    return (shape.block - experts) // layout.tensor, experts // layout.expert


def token_numbers(run: ModelRun) -> float:
    """Returns the bytes that autograd keeps for one token in one block that is not computed again, summed
    over the ranks of the axis `tensor` that cut heads and the MLP's width, seen from one of them.

    Norms keep their input in float32 and their output (`LlamaRMSNorm`); attention keeps q, k, v and its
    output; a gated MLP keeps both products, the activation and the product of the two.
    """
    shape, size, cut = run.shape, run.compute, run.layout.tensor
    norm = _norm_bytes(run)
    hidden = (2 * norm + 2 * size) * shape.hidden  # two norms, and the inputs of the two halves
    attention = size * shape.attention_width + norm * shape.key_dim * (shape.heads + shape.kv_heads)
    return hidden + (attention + _mlp_bytes(run)) / cut


def _norm_bytes(run: ModelRun) -> int:
    """Fused norms keep their input only; others a float32 of it, and what comes of it."""
    return run.compute if run.fused else run.compute + max(4, run.compute)


def _mlp_bytes(run: ModelRun) -> float:
    shape, size = run.shape, run.compute
    inner = (2 if run.fused else 4) * size * shape.mlp_numbers  # lean MLPs keep two of four tensors
    # Tokens are copied to each of their experts, over ranks once more, and what comes back is weighted.
    copies = 3 if run.layout.expert > 1 else 2
    return inner + (copies * size * shape.active_experts * shape.hidden if shape.experts else 0)


def _own(run: ModelRun, tokens: int) -> int:
    return -(-tokens // run.layout.context)


def kept(run: ModelRun, tokens: int) -> int:
    """Returns what the forward pass of one that learns leaves for the backward pass, without logits: each
    block's input where it is computed again (in host memory: two of them are here), else all that autograd
    keeps; and behind the blocks what the last norm and the head keep.
    """
    shape, own = run.shape, _own(run, tokens)
    hidden = run.compute * shape.hidden
    behind = (_norm_bytes(run) + 3 * run.compute) * shape.hidden * own
    if run.recompute == "offload":
        return int(2 * hidden * own + behind)
    if run.recompute:
        return int(shape.layers * hidden * own + behind)
    mlp = hidden if run.mlp_chunk else _mlp_bytes(run) / run.layout.tensor
    outside = token_numbers(run) - _mlp_bytes(run) / run.layout.tensor
    return int(shape.layers * (outside + mlp) * own + behind)


def one_block(run: ModelRun, tokens: int) -> int:
    """Returns what the block that computes has by itself. Without gradients: its input and output, and the
    widest product. With them: all that autograd keeps of it, where it is computed again, and the gradients of
    its widest products. A tiled MLP has few tokens at one time.
    """
    shape, size, own = run.shape, run.compute, _own(run, tokens)
    tiled = min(own, run.mlp_chunk or own)
    mlp = _mlp_bytes(run) / run.layout.tensor
    hidden = size * shape.hidden
    if not run.trains:
        wide = shape.heads * (shape.key_dim + shape.value_dim) * size / run.layout.tensor
        return int(4 * hidden * own + max(wide * own, 0.75 * mlp * tiled))
    backward = size * shape.mlp_numbers / run.layout.tensor
    again = 0.0
    if run.recompute:
        again = (token_numbers(run) - mlp) * own + mlp * tiled
    elif run.mlp_chunk:
        again = mlp * tiled
    return int(again + backward * tiled + 2 * hidden * own)


def logits(run: ModelRun, tokens: int, in_use: float | None = None) -> int:
    """Returns what logits take, in float32 at least: all positions' where they are few enough to be kept for
    the backward pass, and what is in use of one chunk. in_use: so many times its logits; None: the most.
    """
    every, chunk = _logits(run, tokens)
    if in_use is None:  # the product and its softmax; ranks that share out the vocabulary take that apart
        in_use = 3 if run.layout.tensor > 1 else 2
    if _keeps(run, every):
        return int(every + (in_use - 1) * chunk)
    return int(in_use * chunk)


def _logits(run: ModelRun, tokens: int) -> tuple[int, int]:
    """Returns the bytes of all positions' logits, and of those of a chunk."""
    if run.head != "lm" or run.logits_bytes is None:
        return 0, 0
    row = -(-run.shape.vocabulary // run.layout.tensor) * max(4, run.compute)
    every = _own(run, tokens) * row
    return every, max(row, -(-every // max(1, -(-every // run.logits_bytes))))


def _keeps(run: ModelRun, every: int) -> bool:
    return run.trains and run.logits_bytes is not None and keeps_logits(every, run.logits_bytes)


def keeps_logits(every: int, chunk: int) -> bool:
    """Says whether the logits of all positions wait for the backward pass. chunk: what may exist."""
    return every <= KEPT_CHUNKS * chunk


def _certain(run: ModelRun) -> ResidencyPlan:
    """Returns what a model holds at least: adapters at modules that somebody named may be few."""
    return residency(replace(run, lora=0) if run.targeted else run)


def on_device(run: ModelRun, phase: Phase, tokens: int) -> dict[str, Bytes]:
    """Returns what a model has on its device in a phase, by owner. tokens: of a pass of one rank's group (the
    ranks that divide the tokens of a row have them together).
    """
    plan, certain = residency(run), _certain(run).of(phase)
    found: dict[str, Bytes] = {
        owner: Bytes(certain.get(owner, 0), size) for owner, size in plan.of(phase).items()
    }
    if plan.moments_pass is not None:  # how many pass at one time depends on the sizes of tensors
        found["moments"] = probably(found["moments"].expected)
    if phase in ("forward", "update"):
        passes = run if phase == "update" else replace(run, trains=False)
        found |= {owner: probably(size) for owner, size in passing(passes, tokens).items()}
    return {name: size for name, size in found.items() if size.expected}


def in_host(run: ModelRun, tokens: int) -> dict[str, Bytes]:
    """Returns what a model has in the memory of its machine, by owner."""
    found = {"at rest": Bytes(_certain(run).at_rest, residency(run).at_rest)}
    if run.trains and run.recompute == "offload":
        row = run.shape.layers * run.shape.hidden * run.compute
        found["block inputs"] = probably(_own(run, tokens) * row + offloaded_images(run, tokens))
    return {name: size for name, size in found.items() if size.expected}


def snapshot_bytes(run: ModelRun) -> int:
    """Returns what a copy takes of all that a checkpoint has of a rank, until it is written: what learns, and
    its moments; with Megatron the weights in float32, not those that compute.
    """
    moments = residency(run).moments
    if run.megatron:
        return moments * 3 // 2 if run.compute == 4 else moments
    learns, itemsize = learning(run)
    return learns * itemsize + moments


# ---- a model that Megatron trains ----


def stage_blocks(run: ModelRun) -> tuple[int, int, int]:
    """Counts the blocks of Megatron's first stage, of each one behind it, and of the last."""
    said = [blocks for blocks in run.ends if blocks is not None]
    rest, others = run.shape.layers - sum(said), run.layout.pipeline - len(said)
    each = -(-rest // max(1, others))
    first, last = (each if blocks is None else blocks for blocks in run.ends)
    return first, each, last


def stage_of(run: ModelRun) -> tuple[int, int]:
    """Counts the parameters of a rank of the fullest stage, without experts and of experts: tensor and expert
    ranks share out a stage's, and all that have the same data hold the same.
    """
    shape, layout = run.shape, run.layout
    first, each, last = stage_blocks(run)
    # The first has the embeddings, and the last as much: the head, or a copy of them.
    ends = shape.embeddings * (1 if layout.pipeline > 1 or shape.tied or run.head != "lm" else 2)
    at_last = ends if run.head == "lm" or layout.pipeline == 1 else 0
    # Of those between the one before the last: it has the most blocks with experts.
    at = shape.layers - last
    stages = [(0, first, ends), (max(0, at - each), each, 0), (at, last, at_last)]
    return max((_parts_of_stage(run, *one) for one in stages), key=sum)


def _parts_of_stage(run: ModelRun, offset: int, blocks: int, ends: int) -> tuple[int, int]:
    """offset: how many blocks are before it; the model's first ones have no experts."""
    dense = min(max(0, run.shape.dense_layers - offset), blocks)
    shape, layout, sparse = run.shape, run.layout, blocks - dense
    mixtures = max(1, shape.layers - shape.dense_layers)
    mlps = 3 * shape.hidden * (dense * shape.intermediate + sparse * shape.shared_width)
    routers = sparse * (shape.experts * shape.hidden + shape.router_extras)
    own = blocks * (shape.attention + shape.norms) + mlps + routers + ends
    return -(-own // layout.tensor), -(-sparse * (shape.routed // mixtures) // layout.expert)


def stage_adapters(run: ModelRun) -> int:
    """Counts the adapters' parameters of a rank of the stage with most blocks. Tensor ranks share out B of
    what is cut by its outputs, and A of what is cut by its inputs; the other of each they have whole.
    """
    shape, sparse = run.shape, run.shape.layers - run.shape.dense_layers
    mlps = shape.dense_layers + (sparse if shape.shared_width else 0)
    of_attention = shape.attention_inputs - shape.heads * shape.value_dim + shape.hidden + shape.latent
    whole = shape.layers * of_attention + 3 * mlps * shape.hidden
    each = whole + -(-(shape.adapted - whole) // run.layout.tensor)
    return -(-(run.lora or 0) * each * max(stage_blocks(run)) // shape.layers)


def megatron_residency(run: ModelRun, on_host: float = 0.0) -> ResidencyPlan:
    """Returns what a rank of Megatron's holds, with its distributed optimizer: weights as they compute, whole
    in each stage; gradients in buffers of float32; and of those that have the same parameters each has a part
    of the moments and of the weights in float32. on_host: the share of these that host memory has.
    """
    layout, (dense, experts) = run.layout, stage_of(run)
    if not run.trains:
        return ResidencyPlan((dense + experts) * run.compute, weights_rest=run.offload_params)
    same, own = layout.ranks // layout.pipeline, dense + experts
    each = 8 if run.compute == 4 else 12  # with weights in float32, beside those that compute
    if run.lora is not None:
        learns = stage_adapters(run)
        moments = int((1 - on_host) * each * -(-learns * layout.tensor // same))
        weights = (own + learns) * run.compute
        return ResidencyPlan(weights, learns * 4, moments, run.offload_params, _passing(run, moments, 0))
    mine = -(-dense * layout.tensor // same) + -(-experts * layout.expert // same)
    moments = int((1 - on_host) * each * mine)
    passing = _passing(run, moments, each * run.shape.embeddings // same)
    return ResidencyPlan(own * run.compute, own * 4, moments, run.offload_params, passing)


def megatron_passing(run: ModelRun, tokens: int) -> int:
    """Returns what passes have on a rank of the fuller one of the first two stages: the inputs of its blocks,
    of as many micro-batches as there are stages from it on, which tensor ranks share out by tokens; what one
    block computes, and logits. With v chunks stage r of p begins vp + p - 1 - 2r of them before the first
    backward pass (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3, of the first one).
    """
    shape, layout = run.shape, run.layout
    (first, each, _), chunks, stages = stage_blocks(run), layout.virtual, layout.pipeline
    begun = [stages, stages - 1]
    if chunks > 1:
        begun = [(chunks + 1) * stages - 1, (chunks + 1) * stages - 3]
    kept = max(number * layers // chunks for number, layers in zip(begun, (first, each), strict=True))
    inputs = kept * shape.hidden * run.compute * _own(run, tokens) // layout.tensor
    at_end = 0 if layout.pipeline > 1 else logits(run, tokens)
    return inputs + max(one_block(run, tokens), at_end)


def total_of(held: Mapping[str, Bytes]) -> Bytes:
    """Adds up what owners have."""
    found = NOTHING
    for size in held.values():
        found = found.plus(size)
    return found
