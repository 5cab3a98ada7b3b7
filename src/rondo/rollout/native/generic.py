"""The generic path: the Hugging Face module's own forward, with attention that reads and writes our slot
cache.

Works for every causal LM whose attention goes through transformers' attention interface. What a model asks of
its attention and this function does not do (sinks, soft-caps, a window that would bite) is refused, never
ignored.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rondo.errors import ConfigError, RolloutError
from rondo.rollout.native.cache import WIDTH_STEP, LayerShape, SlotCache, round_up
from rondo.rollout.native.noise import uniforms
from rondo.rollout.native.sampling import sample
from rondo.rollout.native.scheduler import SlotTable

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
class Step:
    """What attention needs to know: rows first .. first + R of the cache, one query column per position.

    positions: int64 [R, C]. rows: int64 [R]. mask: float [R, 1, C, width], 0 or -inf. probe: record shapes
    only.
    """

    cache: SlotCache | None
    first: int
    rows: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    max_context: int
    probe: dict[int, LayerShape] | None = field(default=None)


_STEP: ContextVar[Step] = ContextVar("rondo_decode_step")


def register() -> None:
    """Make the attention function known to transformers (idempotent)."""
    AttentionInterface.register(ATTENTION, decode_attention)


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [R, heads, C, D], key and value [R, kv_heads, C, D], rotated. Returns [R, C, heads, D]."""
    step = _STEP.get()
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown or attention_mask is not None:
        what = ", ".join(unknown) or "attention_mask"
        raise RolloutError(
            f"{type(module).__name__} asks attention for {what}, which the native engine does not do; "
            "set rollout.engine=vllm"
        )
    if sliding_window is not None and sliding_window < step.max_context:
        raise RolloutError(f"{type(module).__name__} has a sliding window of {sliding_window} < max_context "
                           f"{step.max_context}, which the native engine does not do")  # fmt: skip
    layer = module.layer_idx
    if step.probe is not None:
        step.probe[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
    assert step.cache is not None
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    keys[step.rows[:, None], :, step.positions] = key.transpose(1, 2)
    values[step.rows[:, None], :, step.positions] = value.transpose(1, 2)
    width, last = step.mask.shape[-1], step.first + query.shape[0]
    out = grouped_attention(
        query, keys[step.first : last, :, :width], values[step.first : last, :, :width], step.mask, scaling
    )
    return out.transpose(1, 2).contiguous(), None


def grouped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """query [R, heads, C, D] against keys, values [R, kv_heads, W, D]; mask [R, 1, C, W]. Returns [R, heads,
    C, Dv].

    The query heads of one key/value head become further query positions: no key is repeated.
    """
    R, heads, C, D = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if group > 1:
        query = query.reshape(R, kv_heads, group * C, D)
        mask = mask.expand(R, group, C, -1).reshape(R, 1, group * C, -1) if C > 1 else mask
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(R, heads, C, values.shape[3])


class GenericPath:
    """Decodes the first R slots at once; prefills prompt by prompt, so that no prompt's bits depend on
    another's.

    Subclasses replace `forward`.
    """

    name = "generic"
    dense = True
    reads_prefixes = False
    in_slot_order = False

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        num_slots: int,
        capacity: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
    ) -> None:
        self.module, self.device, self.dtype = module, device, dtype
        self._num_slots, self._capacity, self._max_context = num_slots, capacity, max_context
        self._min_rows = MIN_ROWS if threads == 1 or device.type == "cuda" else MIN_ROWS_THREADED
        # Padding rows are slots too: the decoded range may reach beyond the last usable slot.
        self._padded_slots = round_up(max(num_slots, self._min_rows), 8)
        self._arange = torch.arange(max(capacity, self._padded_slots), device=device)
        self._shapes = self.probe()
        self.cache: SlotCache | None = None

    def probe(self) -> list[LayerShape]:
        """Run one token through the model to see its attention layers. Raises ConfigError or RolloutError."""
        layers: dict[int, LayerShape] = {}
        zeros = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        step = Step(None, 0, zeros[0], zeros, torch.zeros(1, 1, 1, 1), self._max_context, layers)
        with torch.no_grad():
            self._run_module(step, zeros)
        expected = int(self.module.config.get_text_config().num_hidden_layers)
        if sorted(layers) != list(range(expected)):
            raise ConfigError(
                f"{type(self.module).__name__}: {len(layers)} of {expected} layers go through transformers' "
                "attention interface; the native engine cannot cache the others: set rollout.engine=vllm"
            )
        return [layers[i] for i in range(expected)]

    def allocate(self) -> None:
        """Make the cache (zeroed)."""
        self.cache = SlotCache(self._shapes, self._padded_slots, self._capacity, self.dtype, self.device)

    def free(self) -> None:
        self.cache = None

    @property
    def cache_nbytes(self) -> int:
        return 0 if self.cache is None else self.cache.nbytes

    def weights_changed(self) -> None:
        """Nothing is derived from the weights here."""

    def copy(self, source: int, target: int, length: int) -> None:
        assert self.cache is not None
        self.cache.copy(source, target, length)

    def prefill(self, prompts: list[tuple[int, np.ndarray]]) -> None:
        """(slot, tokens) pairs: compute their keys and values, chunk by chunk."""
        for slot, tokens in prompts:
            for start in range(0, len(tokens), PREFILL_CHUNK):
                self._prefill_chunk(slot, start, tokens[start : start + PREFILL_CHUNK])

    def _prefill_chunk(self, slot: int, start: int, tokens: np.ndarray) -> None:
        padded = max(round_up(len(tokens), 16), self._min_rows)
        ids = np.zeros(padded, np.int64)
        ids[: len(tokens)] = tokens
        at = np.full(padded, self._capacity - 1, np.int64)  # padding writes where nobody reads
        at[: len(tokens)] = np.arange(start, start + len(tokens))
        positions = torch.from_numpy(at).to(self.device)[None]
        width = round_up(start + len(tokens), WIDTH_STEP)
        mask = self._mask(positions, width)
        step = Step(self.cache, slot, self._arange[slot : slot + 1], positions, mask, self._max_context)
        self.forward(step, torch.from_numpy(ids).to(self.device)[None], want_logits=False)

    def decode(self, rows: np.ndarray, table: SlotTable) -> tuple[np.ndarray, np.ndarray]:
        """One token for each slot of `rows`, 0 .. R - 1. Returns ids int64 and log-probs float32."""
        active = len(rows)
        R, width = self.bucket(active, int(table.positions[:active].max()) + 1)
        tokens, at = np.zeros(R, np.int64), np.full(R, self._capacity - 1, np.int64)
        tokens[:active], at[:active] = table.tokens[:active], table.positions[:active]
        logits = self.decode_logits(
            torch.from_numpy(tokens).to(self.device)[:, None],
            torch.from_numpy(at).to(self.device)[:, None],
            width,
        )[:active]
        noise = uniforms(table.seeds[:active], table.indices[:active])
        settings = (
            noise,
            table.temperature[:active],
            table.top_k[:active],
            table.top_p[:active],
            table.min_p[:active],
        )
        ids, log_probs = sample(logits, *(torch.from_numpy(s).to(self.device) for s in settings))
        return ids.cpu().numpy(), log_probs.cpu().numpy()

    def bucket(self, active: int, length: int) -> tuple[int, int]:
        """Rows and cache width of a step with `active` sequences, the longest of `length` positions."""
        return max(round_up(active, 8), self._min_rows), round_up(length, WIDTH_STEP)

    def decode_logits(self, tokens: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Logits [R, V] of tokens [R, 1] at positions [R, 1] over the first `width` cache positions."""
        R = len(tokens)
        step = Step(
            self.cache, 0, self._arange[:R], positions, self._mask(positions, width), self._max_context
        )
        logits = self.forward(step, tokens, want_logits=True)
        assert logits is not None
        return logits

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Float [R, 1, C, width]: 0 where a cache position is at or before the query's, -inf after it."""
        hidden = self._arange[:width] > positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(
            hidden, float("-inf")
        )

    def forward(self, step: Step, tokens: torch.Tensor, *, want_logits: bool) -> torch.Tensor | None:
        """Tokens [R, C] through the model. Returns logits [R, V] of the last column if wanted."""
        logits = self._run_module(step, tokens)
        return logits[:, -1] if want_logits else None

    def _run_module(self, step: Step, tokens: torch.Tensor) -> torch.Tensor:
        token = _STEP.set(step)
        positions = step.positions.clamp(max=self._max_context - 1)  # padding's is beyond any position table
        try:
            logits: torch.Tensor = self.module(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1
            ).logits
            return logits
        finally:
            _STEP.reset(token)
