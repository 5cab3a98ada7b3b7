"""The generic path: the Hugging Face module's own forward, with attention that reads and writes our
paged cache.

Works for every causal LM whose attention goes through transformers' attention interface, with windows (keys
before them are masked, and kept), soft-caps and sinks. What else a model asks of its attention is refused,
never ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from rondo.core.errors import ConfigError, RolloutError
from rondo.models import attention
from rondo.models.attention import Window
from rondo.models.context import to_device
from rondo.models.routers import RouteRecorder, routers_of
from rondo.planning.engine_memory import kv_bytes
from rondo.platform import on_host, platform_of
from rondo.rollout.images import ReadImages, Tower
from rondo.rollout.native.blocks import BLOCK, blocks_of
from rondo.rollout.native.cache import BlockCache, LayerShape, block_bytes, round_up
from rondo.rollout.native.sampling import sample, uniforms
from rondo.rollout.native.scheduler import Copy, Prefill, SlotTable

ATTENTION = "rondo_decode"
PREFILL_CHUNK = 512  # tokens of one prompt per forward
MIN_ROWS = 16  # below this, matrix products round rows differently (measured with MKL, one thread)
MIN_ROWS_THREADED = 128  # the same with several threads

# Keywords that carry nothing the cache or the positions do not say already.
_HARMLESS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits "
    "return_dict position_embeddings logits_to_keep is_causal num_items_in_batch layer_idx".split()
)


@dataclass
class DecodeStep:
    """What attention needs to know of R rows with C columns, each of which has one new position."""

    positions: torch.Tensor
    """int64 [R, C]; padding's come after all that the blocks hold."""
    max_context: int
    """The most positions that a sequence may have in this engine."""
    cache: BlockCache | None = None
    """None while shapes are probed."""
    blocks: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """int64 [R, n]: where positions BLOCK · i … of a row lie."""
    addresses: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """int64 [R · C]: where the new positions lie."""
    mask: torch.Tensor | None = None
    """[R, 1, C, n · BLOCK], 0 or -inf; None where a kernel reads the blocks where they lie."""
    parts: Sequence[tuple[int, int, int]] = ()
    """(first row, last row + 1, blocks that they need): what attention gathers at one time."""
    probe: dict[int, LayerShape] | None = None
    """Where layers record their shapes instead of attending (`GenericPath.probe`)."""
    turns: torch.Tensor | None = None
    """int64 [3, R, C]: what the rotary embedding turns by, of a model with images; None: its positions."""
    images: dict[str, Any] = field(default_factory=dict)
    """What the module takes in addition where tokens stand for images (`Tower.features`)."""
    windowed: dict[int, torch.Tensor] = field(default_factory=dict)
    """The masks of windows, made at the first layer that has one of so many positions."""


_STEP: ContextVar[DecodeStep] = ContextVar("rondo_decode_step")


@dataclass(frozen=True)
class Rule:
    """What a layer does with its scores, beside the causal mask."""

    scaling: float | None = None
    """None: one over the root of the head's width."""
    window: int | None = None
    """How many positions a query sees, its own included; None where no sequence is longer."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks: torch.Tensor | None = None
    """[heads]: one more score, which takes part in the softmax and has no value."""


def register(config: PreTrainedConfig) -> str:
    """Makes the attention function known to transformers (idempotent), and returns the name under which a
    model of this config asks for it.
    """
    attention.register(ATTENTION, decode_attention)
    return attention.implementation(ATTENTION, config)


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Window | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends from query [R, heads, C, D] to the cache, which gets key and value [R, kv_heads, C, D]; all are
    rotated. Returns [R, C, heads, D]. Its keywords are those of `models.attention.varlen_attention`.
    """
    step = _STEP.get()
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown:
        raise RolloutError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which the native engine does "
            "not do; set rollout.engine=transformers"
        )
    window = attention.window_of_call(module, attention_mask, sliding_window)
    if window is not None and window >= step.max_context:
        window = None
    layer = module.layer_idx
    if step.probe is not None and layer in step.probe:
        raise ConfigError(
            f"{type(module).__name__} calls attention more than once in a layer, and the native engine "
            "caches one set of keys and values for each; set rollout.engine=transformers"
        )
    if step.probe is not None:
        step.probe[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    return cached_attention(step, layer, query, key, value, Rule(scaling, window, softcap, s_aux)), None


PLAIN = Rule()


def cached_attention(
    step: DecodeStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Stores the new keys and values, and attends to all that the rows' blocks hold; shapes as in
    `decode_attention`.
    """
    assert step.cache is not None
    step.cache.keys[layer].index_copy_(0, step.addresses, key.transpose(1, 2).flatten(0, 1))
    step.cache.values[layer].index_copy_(0, step.addresses, value.transpose(1, 2).flatten(0, 1))
    return attention_from_cache(step, layer, query, rule)


def attention_from_cache(step: DecodeStep, layer: int, query: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Attends from query [R, heads, C, D] to what the rows' blocks hold. Returns [R, C, heads, Dv]."""
    assert step.cache is not None
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    if step.mask is None:
        scale = query.shape[3] ** -0.5 if rule.scaling is None else rule.scaling
        at, asks = (step.blocks, step.positions.flatten()), (scale, rule.window, rule.softcap, rule.sinks)
        out: torch.Tensor = fused().attention(query[:, :, 0], keys, values, *at, *asks)
        return out[:, None]
    mask = step.mask if rule.window is None else _windowed_mask(step, rule.window)
    outs = []
    for first, last, num_blocks in step.parts:
        blocks = step.blocks[first:last, :num_blocks]
        out = grouped_attention(
            query[first:last],
            gathered(keys, blocks),
            gathered(values, blocks),
            mask[first:last, ..., : num_blocks * BLOCK],
            rule,
        )
        outs.append(out.transpose(1, 2))
    return outs[0].contiguous() if len(outs) == 1 else torch.cat(outs)


def _windowed_mask(step: DecodeStep, window: int) -> torch.Tensor:
    """The step's mask, with -inf also before a query's window; made once per step."""
    assert step.mask is not None
    if window not in step.windowed:
        width = step.mask.shape[3]
        positions = step.positions[:, None, :, None]
        before = torch.arange(width, device=positions.device) <= positions - window
        before &= positions < width  # padding goes on seeing all: a row that sees nothing is not finite
        step.windowed[window] = step.mask.masked_fill(before, float("-inf"))
    return step.windowed[window]


def gathered(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Copies what `blocks` [R, n] of `cache` [positions, kv_heads, D] hold: [R, kv_heads, n · BLOCK, D]."""
    R, n = blocks.shape
    _, kv_heads, D = cache.shape
    found = cache.view(-1, BLOCK * kv_heads * D).index_select(0, blocks.flatten())
    return found.view(R, n * BLOCK, kv_heads, D).transpose(1, 2)


def grouped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Attends from query [R, heads, C, D] to keys, values [R, kv_heads, W, D] under mask [R, 1, C, W].
    Returns [R, heads, C, Dv].

    The query heads of one key/value head become further query positions: no key is repeated.
    """
    R, heads, C, D = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if group > 1:
        query = query.reshape(R, kv_heads, group * C, D)
        mask = mask.expand(R, group, C, -1).reshape(R, 1, group * C, -1) if C > 1 else mask
    if rule.softcap is None and rule.sinks is None:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=rule.scaling)
    else:
        out = _by_blocks(query, keys, values, mask, rule)
    return out.reshape(R, heads, C, values.shape[3])


def _by_blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """What scaled_dot_product_attention cannot do: soft-caps and sinks. Shapes and result are its own, with
    query [R, kv_heads, group * C, D].

    One block of keys after another, each of the same shape and layout, with a running maximum: blocks that a
    row does not see add 0, so that no bit depends on how many there are.
    """
    R, kv_heads, rows, D = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    query = query.to(wide) * (D**-0.5 if rule.scaling is None else rule.scaling)
    out = query.new_zeros(R, kv_heads, rows, values.shape[3])
    if rule.sinks is None:
        largest, total = query.new_full((R, kv_heads, rows, 1), -1e30), query.new_zeros(R, kv_heads, rows, 1)
    else:  # the first score that the sums have seen
        group = len(rule.sinks) // kv_heads
        largest = rule.sinks.to(wide).view(kv_heads, group, 1).expand(R, -1, -1, rows // group)
        largest = largest.reshape(R, kv_heads, rows, 1)
        total = torch.ones_like(largest)
    for at in range(0, keys.shape[2], BLOCK):
        scores = query @ keys[:, :, at : at + BLOCK].to(wide).contiguous().mT
        if rule.softcap is not None:
            scores = (scores / rule.softcap).tanh_().mul_(rule.softcap)
        scores = scores + mask[..., at : at + BLOCK]
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        faded, weights = torch.exp(largest - larger), torch.exp(scores - larger)
        total = total * faded + weights.sum(-1, keepdim=True)
        out = out * faded + weights @ values[:, :, at : at + BLOCK].to(wide).contiguous()
        largest = larger
    return (out / total).to(values.dtype)


def fused() -> Any:
    """Returns the module of the kernels, which imports triton."""
    from rondo.rollout.native import fused as module

    return module


def why_copies(shapes: Sequence[LayerShape], dtype: torch.dtype, device: torch.device) -> str:
    """Returns why a decode step attends to copies of the rows' blocks, and not to these where they lie, by a
    kernel in triton; "" if it does.
    """
    if why := platform_of(device).why_no_triton(dtype):
        return why
    widest = 512 // dtype.itemsize  # in bytes: wider tiles do not fit into a device's shared memory
    if max(max(shape.key_dim, shape.value_dim) for shape in shapes) > widest:
        return f"heads are wider than {widest}, the most that the kernel takes in {dtype}"
    return ""


class GenericPath:
    """Decodes rows of all lengths at once; prefills prompt by prompt, so that no prompt's bits depend on
    another's.

    The bits of a prompt's last chunk may depend on its length, and a decoded token's differ from a prefilled
    one's: a sequence that lost its blocks gets them filled in the way in which they were. Subclasses replace
    `forward`.
    """

    name = "generic"
    spare_blocks = 1  # padding is written there

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
        recorder: RouteRecorder | None = None,
        tower: Tower | None = None,
    ) -> None:
        self.module = module
        self._recorder = recorder
        self._tower = tower
        self._turns = tower is not None and tower.turns
        routes_nbytes = 0 if recorder is None else recorder.shape.padded(None, BLOCK).nbytes
        self.device = device
        self.dtype = dtype
        self._max_context = max_context
        self._min_rows = MIN_ROWS if threads == 1 or not on_host(device) else MIN_ROWS_THREADED
        self._arange = torch.arange(blocks_of(max_context) * BLOCK, device=device)
        self._shapes = self.probe()
        self.why_copies = why_copies(self._shapes, dtype, device)
        self.block_nbytes = block_bytes(self._shapes, dtype) + routes_nbytes
        largest = BLOCK * max(kv_bytes(one.kv_heads, one.key_dim, 0, dtype.itemsize) for one in self._shapes)
        self._gathered_blocks = platform_of(device).numbers.gathered_bytes // largest
        self._padding_block = 0  # the one behind all others, as soon as there is a cache
        self.cache: BlockCache | None = None

    def probe(self) -> list[LayerShape]:
        """Runs one token through the model and returns its attention layers. Raises ConfigError or
        RolloutError.
        """
        layers: dict[int, LayerShape] = {}
        zeros = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            with torch.no_grad():
                self._run_module(DecodeStep(zeros, self._max_context, probe=layers), zeros)
        except (AttributeError, TypeError) as error:  # MPT needs its own mask, Mamba takes no positions
            raise ConfigError(
                f"{type(self.module).__name__} does not run with attention that is not its own ({error}); "
                "set rollout.engine=transformers"
            ) from error
        expected = int(self.module.config.get_text_config().num_hidden_layers)
        if sorted(layers) != list(range(expected)):
            raise ConfigError(
                f"{type(self.module).__name__}: {len(layers)} of {expected} layers go through transformers' "
                "attention interface; the native engine cannot cache the others: set "
                "rollout.engine=transformers"
            )
        return [layers[i] for i in range(expected)]

    @property
    def chunk(self) -> int:
        return PREFILL_CHUNK

    def allocate(self, num_blocks: int) -> None:
        self._padding_block = num_blocks
        num_all = num_blocks + self.spare_blocks
        self.cache = BlockCache(self._shapes, num_all, self.dtype, self.device, self._recorder)

    def free(self) -> None:
        self.cache = None

    def routes(self, blocks: Sequence[int], length: int) -> np.ndarray | None:
        if self.cache is None or self.cache.routes is None:
            return None
        held = self.cache.routes.view(-1, BLOCK, self.cache.routes.shape[1])
        return held[list(blocks)].flatten(0, 1)[:length].cpu().numpy()

    @property
    def cache_nbytes(self) -> int:
        return 0 if self.cache is None else self.cache.nbytes

    def weights_changed(self) -> None:
        """Forgets what the weights made of images; nothing else is derived from them."""
        if self._tower is not None:
            self._tower.forget()

    def let_go(self) -> None:
        self.weights_changed()

    def copy(self, copies: Sequence[Copy]) -> None:
        assert self.cache is not None
        ends = self._on_device(np.array([(one.source, one.target) for one in copies]))
        self.cache.copy(*ends.unbind(1))

    def prefill(self, prefills: Sequence[Prefill], table: SlotTable) -> None:
        """Computes what was prefilled chunk by chunk, and what was decoded as rows of decode steps."""
        for one in prefills:
            blocks = table.blocks[one.slot]
            if one.start < one.together:  # chunks begin where they began the first time
                for start in range(one.start // PREFILL_CHUNK * PREFILL_CHUNK, one.together, PREFILL_CHUNK):
                    stop = min(start + PREFILL_CHUNK, one.together)
                    self._prefill_chunk(blocks, start, one.tokens[start:stop], one.shown)
            for start in range(max(one.start, one.together), len(one.tokens), PREFILL_CHUNK):
                # From the end, since a decode step wants its longest row first.
                tokens = one.tokens[start : start + PREFILL_CHUNK][::-1]
                at = np.arange(start, start + len(tokens))[::-1]
                rows = np.broadcast_to(blocks, (len(tokens), len(blocks)))
                deltas = None
                if one.shown is not None and self._turns:
                    deltas = np.full(len(tokens), one.shown.delta)
                step, ids = self._decode_step(tokens, at, rows, deltas)
                self.forward(step, ids, want_logits=False)

    def _prefill_chunk(
        self, blocks: np.ndarray, start: int, tokens: np.ndarray, shown: ReadImages | None
    ) -> None:
        needed = blocks_of(start + len(tokens))
        padded, n = self.prompt_bucket(len(tokens), needed)
        ids = np.zeros((1, padded), np.int64)
        ids[0, : len(tokens)] = tokens
        at = np.full((1, padded), n * BLOCK)  # padding's position: in the padding's block, column n
        at[0, : len(tokens)] = np.arange(start, start + len(tokens))
        with_padding = np.zeros((1, n + 1), np.int64)
        with_padding[0, :needed] = blocks[:needed]
        with_padding[0, n] = self._padding_block
        given = self._on_device(ids), self._on_device(at), self._on_device(with_padding)
        if shown is None:
            self.fill(*given)
            return
        assert self._tower is not None
        stop = start + len(tokens)
        step = self._step(*given[1:], [(0, 1, n)])
        step.images = self._tower.features(shown, start, stop)
        if self._turns:
            turns = np.pad(shown.turns(start, stop), ((0, 0), (0, padded - len(tokens))))
            step.turns = self._on_device(turns)[:, None]
        self.forward(step, given[0], want_logits=False)

    def prompt_bucket(self, num_tokens: int, num_blocks: int) -> tuple[int, int]:
        """Returns the columns and blocks of a part of a prompt."""
        return max(round_up(num_tokens, 16), self._min_rows), num_blocks

    def fill(self, ids: torch.Tensor, at: torch.Tensor, blocks: torch.Tensor) -> None:
        """Computes the keys and values of tokens [1, C] at positions [1, C]; blocks [1, n + 1]."""
        self.forward(self._step(at, blocks, [(0, 1, blocks.shape[1] - 1)]), ids, want_logits=False)

    def decode(self, rows: np.ndarray, table: SlotTable) -> tuple[np.ndarray, np.ndarray]:
        # The longest come first, so that rows of about one length are gathered together.
        order = np.argsort(-table.positions[rows], kind="stable")
        rows = rows[order]
        deltas = table.deltas[rows] if self._turns else None
        logits = self.decode_logits(table.tokens[rows], table.positions[rows], table.blocks[rows], deltas)
        noise = uniforms(table.seeds[rows], table.indices[rows])
        settings = (
            noise,
            table.temperature[rows],
            table.top_k[rows],
            table.top_p[rows],
            table.min_p[rows],
        )
        never = None if self._tower is None else self._tower.never
        drawn = sample(logits[: len(rows)], *map(torch.from_numpy, settings), never=never)
        ids, log_probs = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        ids[order], log_probs[order] = (one.cpu().numpy() for one in drawn)
        return ids, log_probs

    def decode_logits(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        blocks: np.ndarray,
        deltas: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Returns logits [≥ R, V] of tokens [R] at positions [R], the longest row first; blocks [R, …].
        deltas [R]: `SlotTable.deltas`, of a model with images.
        """
        step, ids = self._decode_step(tokens, positions, blocks, deltas)
        logits = self.forward(step, ids, want_logits=True)
        assert logits is not None
        return logits

    def _decode_step(
        self, tokens: np.ndarray, positions: np.ndarray, blocks: np.ndarray, deltas: np.ndarray | None
    ) -> tuple[DecodeStep, torch.Tensor]:
        """Returns the step, and its tokens on the device, of rows of which the longest comes first."""
        ids, at, with_padding = self.padded(tokens, positions, blocks)
        step = self._step(at, with_padding, self.parts(positions, *with_padding.shape))
        if deltas is not None:
            turns = np.zeros((3, len(ids), 1), np.int64)
            turns[:, : len(tokens), 0] = positions + deltas
            step.turns = self._on_device(turns)
        return step, ids

    def padded(
        self, tokens: np.ndarray, positions: np.ndarray, blocks: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens [R, 1], positions [R, 1] and blocks [R, n + 1] with rows and a column of padding."""
        R, n = self.bucket(len(tokens), blocks_of(int(positions.max()) + 1))
        ids, at = np.zeros((R, 1), np.int64), np.full((R, 1), n * BLOCK)
        ids[: len(tokens), 0] = tokens
        at[: len(tokens), 0] = positions
        with_padding = np.zeros((R, n + 1), np.int64)
        with_padding[: len(tokens), :n] = blocks[:, :n]
        with_padding[:, n] = self._padding_block
        return self._on_device(ids), self._on_device(at), self._on_device(with_padding)

    def bucket(self, active: int, num_blocks: int) -> tuple[int, int]:
        """Returns the rows and blocks of a step with `active` sequences, the longest of `num_blocks`."""
        return max(round_up(active, 8), self._min_rows), num_blocks

    def parts(self, positions: np.ndarray, num_rows: int, columns: int) -> list[tuple[int, int, int]]:
        """Cuts the rows of a decode step, of `positions` and padding, into parts for `DecodeStep`."""
        parts: list[tuple[int, int, int]] = []
        first, host = 0, on_host(self.device)
        while first < num_rows:
            n = columns - 1
            if host and first < len(positions):
                n = blocks_of(int(positions[first]) + 1)  # as many as the part's first row, its longest
            last = min(num_rows, first + max(1, self._gathered_blocks // n))
            parts.append((first, last, n))
            first = last
        return parts

    def _step(
        self, positions: torch.Tensor, blocks: torch.Tensor, parts: Sequence[tuple[int, int, int]]
    ) -> DecodeStep:
        """Returns the step. Of blocks [R, n + 1] the last takes what is written beyond the n others."""
        addresses = blocks.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
        copies = self.why_copies or positions.shape[1] > 1  # a prompt's own blocks are copied at little cost
        mask = self._mask(positions, (blocks.shape[1] - 1) * BLOCK) if copies else None
        return DecodeStep(positions, self._max_context, self.cache, blocks, addresses.flatten(), mask, parts)

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Returns [R, 1, C, width]: 0 where a cache position is at or before the query's, -inf after it."""
        hidden = self._arange[:width] > positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(
            hidden, float("-inf")
        )

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)

    def forward(self, step: DecodeStep, tokens: torch.Tensor, *, want_logits: bool) -> torch.Tensor | None:
        """Takes tokens [R, C] through the model. Returns logits [R, V] of the last column if wanted."""
        logits = self._run_module(step, tokens)
        return logits[:, -1] if want_logits else None

    def _run_module(self, step: DecodeStep, tokens: torch.Tensor) -> torch.Tensor:
        token = _STEP.set(step)
        positions = step.positions.clamp(max=self._max_context - 1)  # padding's is beyond any position table
        try:
            if step.turns is not None:  # as transformers' own generate gives it: the place comes first
                positions = torch.cat([positions[None], step.turns])
            logits: torch.Tensor = self.module(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, **step.images
            ).logits
            if self._recorder is not None and step.cache is not None and step.cache.routes is not None:
                # As bytes: torch cannot write 16 bits without a sign by index.
                routes, latest = step.cache.routes, self._recorder.latest()
                routes.view(torch.uint8)[step.addresses] = latest.view(torch.uint8)
            return logits
        finally:
            _STEP.reset(token)


# ---- experts that give a token the same bits whichever other tokens go to them ----


_NAMES = {MIN_ROWS: "rondo_decode", MIN_ROWS_THREADED: "rondo_decode_threaded"}


def use_even_experts(module: PreTrainedModel, device: torch.device, threads: int) -> None:
    """Has the experts of a mixture computed so, in place; on a CPU, whose rounding is known."""
    if not routers_of(module) or not on_host(device):
        return
    rows = MIN_ROWS if threads == 1 else MIN_ROWS_THREADED
    ALL_EXPERTS_FUNCTIONS.register(_NAMES[rows], functools.partial(_forward, rows=rows))
    module.set_experts_implementation(_NAMES[rows])


def _forward(
    experts: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, rows: int
) -> torch.Tensor:
    """hidden [N, H], chosen int64 [N, k], weights [N, k] -> [N, H]."""
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=experts.num_experts)
    filled = torch.where(counts > 0, ((counts + 7) // 8 * 8).clamp_min(rows), 0)
    padding = torch.repeat_interleave(filled - counts)
    # Each pair of a token and an expert is a row of its own; padding is of the first token.
    tokens = torch.arange(len(hidden), device=hidden.device).repeat_interleave(chosen.shape[1])
    tokens = torch.cat([tokens, torch.zeros_like(padding)])
    pairs = torch.cat([flat, padding])[:, None]
    out = grouped_mm_experts_forward(
        experts, hidden[tokens], pairs, torch.ones_like(pairs, dtype=hidden.dtype)
    )
    return (out[: len(flat)].view(*chosen.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)
