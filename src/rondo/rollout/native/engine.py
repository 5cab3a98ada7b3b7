"""The native engine's model, decode path and cache; `in_process.py` is its asyncio side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rondo import __version__
from rondo.models.routers import RouteRecorder
from rondo.rollout.images import Tower
from rondo.rollout.in_process import InProcessEngine, as_torch, check_sizes
from rondo.rollout.native import generic
from rondo.rollout.native.cache import check_tables, count_blocks
from rondo.rollout.native.choose import Decode, choose_path, refuse_what_attention_hides, why_not_in_pieces
from rondo.rollout.native.decoder import PagedDecoder
from rondo.rollout.native.generic import use_even_experts
from rondo.rollout.native.scheduler import Sequence
from rondo.rollout.protocol import Capabilities, EngineSpec
from rondo.rollout.weights import WeightStore, build_module


class NativeEngine(InProcessEngine[Sequence]):
    """Serves one Hugging Face causal LM with continuous batching; implements `RolloutEngine`. Raises
    ConfigError or WeightSyncError when it is made of what cannot work.
    """

    def __init__(
        self,
        spec: EngineSpec,
        # The transformers config of `spec.source`.
        model_config: Any,
        # See `build_engine`.
        parameters: Mapping[str, torch.Tensor] | None = None,
        *,
        # "auto" takes the fastest path that can run the model here; `decode_path` and `decode_reason` say
        # which and why.
        decode: Decode = "auto",
        # Bytes of all keys and values. None: what all slots could need, at most a share of the free memory.
        cache_bytes: int | None = None,
    ) -> None:
        check_sizes(spec)
        dtype, device = as_torch(spec.dtype, spec.device)
        refuse_what_attention_hides(model_config, spec.max_context)
        attention = generic.register(model_config)
        module = build_module(
            model_config, attention, dtype, device, trust_remote_code=spec.source.trust_remote_code
        )
        use_even_experts(module, device, spec.threads)
        weights = WeightStore(module, parameters, dtype, device, spec.adapters)
        path, reason = choose_path(
            decode,
            module,
            max_context=spec.max_context,
            dtype=dtype,
            device=device,
            threads=spec.threads,
            recorder=RouteRecorder(module) if spec.routes else None,
            tower=Tower.of(module, device),
        )
        self.decode_path = path.name
        self.decode_reason = reason
        num_blocks = count_blocks(
            path.block_nbytes,
            spare=path.spare_blocks,
            max_concurrent=spec.max_concurrent,
            max_context=spec.max_context,
            limit=cache_bytes,
            device=device,
        )
        slots = min(spec.max_concurrent, num_blocks)  # whatever runs has a block of its own
        check_tables(slots, spec.max_context)
        super().__init__(
            spec,
            weights,
            PagedDecoder(path, slots, num_blocks, spec.max_context),
            vocab_size=int(module.get_input_embeddings().weight.shape[0]),
            device=device,
            model_config=model_config,
            blind=why_not_in_pieces(model_config),
        )

    def describe(self) -> str:
        """Returns one line that says which decode path runs, and why."""
        return f"native rollout engine: {self.decode_path} path ({self.decode_reason})"

    def capabilities(self) -> Capabilities:
        return Capabilities("native", __version__, sleep=True, reads_back=True)
