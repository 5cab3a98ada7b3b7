"""The engine `transformers`: its model and how many sequences run at one time; `rollout/in_process.py` is its
asyncio side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import __version__ as version

from rondo.models.lora import AdapterSet
from rondo.models.routers import RouteRecorder
from rondo.models.source import TokenizerSource
from rondo.rollout.in_process import InProcessEngine, as_torch, check_sizes
from rondo.rollout.native.blocks import blocks_of
from rondo.rollout.native.cache import count_blocks
from rondo.rollout.protocol import Capabilities
from rondo.rollout.transformers.decoder import CachedForward, Sequence, TurnDecoder
from rondo.rollout.weights import WeightStore, build_module

# The one that computes all that models ask of attention (sinks, soft-caps, windows); others leave some out.
ATTENTION = "eager"


class TransformersEngine(InProcessEngine[Sequence]):
    """Serves any causal LM that transformers can generate with, as its `generate` does: slow, exact, and the
    same bits whatever else is under way. Raises ConfigError or WeightSyncError when it is made of what cannot
    work.
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
        # Requests that take turns; others wait.
        max_concurrent: int = 256,
        # Most prompt and response tokens of one request together.
        max_context: int = 2048,
        # Bytes of all caches. None: what all sequences could need, at most a share of the free memory.
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
        module = build_module(model_config, ATTENTION, dtype, device, trust_remote_code=trust_remote_code)
        weights = WeightStore(module, parameters, dtype, device, adapters)
        recorder = RouteRecorder(module) if routes else None
        forward = CachedForward(module, device)
        longest = blocks_of(max_context)
        num_blocks = count_blocks(
            -(-forward.cache_bytes(max_context) // longest),
            spare=longest,  # the latest prompt's
            max_concurrent=max_concurrent,
            max_context=max_context,
            limit=cache_bytes,
            device=device,
        )
        self._max_running = num_blocks // longest
        super().__init__(
            weights,
            TurnDecoder(forward, self._max_running, recorder),
            tokenizer=tokenizer,
            max_context=max_context,
            vocab_size=int(module.get_input_embeddings().weight.shape[0]),
            device=device,
            threads=threads,
        )

    def describe(self) -> str:
        """Returns one line that says how many sequences take turns."""
        return f"transformers rollout engine: one sequence per pass, {self._max_running} taking turns"

    def capabilities(self) -> Capabilities:
        return Capabilities("transformers", version, sleep=True, reads_back=True)
