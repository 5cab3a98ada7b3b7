"""The native engine's model, decode path and cache; `in_process.py` is its asyncio side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rondo import __version__
from rondo.models.lora import AdapterSet
from rondo.models.routers import RouteRecorder
from rondo.models.source import TokenizerSource
from rondo.rollout.in_process import InProcessEngine, as_torch, check_sizes
from rondo.rollout.native import generic
from rondo.rollout.native.cache import check_tables, count_blocks
from rondo.rollout.native.choose import Decode, choose_path, refuse_what_attention_hides
from rondo.rollout.native.decoder import PagedDecoder
from rondo.rollout.native.generic import use_even_experts
from rondo.rollout.native.scheduler import Sequence
from rondo.rollout.protocol import Capabilities
from rondo.rollout.weights import WeightStore, build_module


class NativeEngine(InProcessEngine[Sequence]):
    """Serves one Hugging Face causal LM with continuous batching; implements `RolloutEngine`. Raises
    ConfigError or WeightSyncError when it is made of what cannot work.
    """

    def __init__(
        self,
        # A transformers config.
        model_config: Any,
        *,
        # Checkpoint name → tensor, used in place (the trainer's storage; say `set_version` after every
        # change). None: the engine's own storage, filled by begin, receive, commit before the first request.
        parameters: Mapping[str, torch.Tensor] | None = None,
        # Whose text stop strings are found in; None: requests cannot have any.
        tokenizer: TokenizerSource | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        # Slots: requests that decode at one time.
        max_concurrent: int = 256,
        # Most prompt and response tokens of one request together.
        max_context: int = 2048,
        # "auto" takes the fastest path that can run the model here; `decode_path` and `decode_reason` say
        # which and why.
        decode: Decode = "auto",
        # Bytes of all keys and values. None: what all slots could need, at most a share of the free memory.
        cache_bytes: int | None = None,
        trust_remote_code: bool = False,
        # Threads that the decode thread computes with.
        threads: int = 1,
        # Those that come by themselves and are merged here; `parameters` are the weights without them then.
        adapters: AdapterSet | None = None,
        # Completions have a mixture's routes.
        routes: bool = False,
    ) -> None:
        check_sizes(max_concurrent, max_context, threads)
        dtype, device = as_torch(dtype, device)
        refuse_what_attention_hides(model_config, max_context)
        attention = generic.register(model_config)
        module = build_module(model_config, attention, dtype, device, trust_remote_code=trust_remote_code)
        use_even_experts(module, device, threads)
        weights = WeightStore(module, parameters, dtype, device, adapters)
        path, reason = choose_path(
            decode,
            module,
            max_context=max_context,
            dtype=dtype,
            device=device,
            threads=threads,
            recorder=RouteRecorder(module) if routes else None,
        )
        self.decode_path = path.name
        self.decode_reason = reason
        num_blocks = count_blocks(
            path.block_nbytes,
            spare=path.spare_blocks,
            max_concurrent=max_concurrent,
            max_context=max_context,
            limit=cache_bytes,
            device=device,
        )
        slots = min(max_concurrent, num_blocks)  # whatever runs has a block of its own
        check_tables(slots, max_context)
        super().__init__(
            weights,
            PagedDecoder(path, slots, num_blocks, max_context),
            tokenizer=tokenizer,
            max_context=max_context,
            vocab_size=int(module.get_input_embeddings().weight.shape[0]),
            device=device,
            threads=threads,
        )

    def describe(self) -> str:
        """Returns one line that says which decode path runs, and why."""
        return f"native rollout engine: {self.decode_path} path ({self.decode_reason})"

    def capabilities(self) -> Capabilities:
        return Capabilities("native", __version__, sleep=True, reads_back=True)
