"""In every process that holds a part of the model: weights in, the sampler's noise and its log-probs.

vLLM mixes `WorkerExtension` into its worker class; `core.py` calls its methods by name in all workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.v1.sample.sampler import Sampler

from rondo.models.experts import separate
from rondo.weights.bucket import SharedBucket
from rondo.weights.checksum import checksum

_EPSILON = 1e-5  # below it a temperature is greedy, as in vLLM
SEED, FIRST = "rondo_seed", "rondo_first"  # in SamplingParams.extra_args: the key, and the index of token 0


class WorkerExtension:
    """Methods of a vLLM worker. Weights: `rondo_begin`, `rondo_receive` per bucket, `rondo_commit`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def rondo_prepare(self) -> None:
        """Once, before the first request."""
        runner = self.model_runner
        runner.sampler = CountedSampler(runner)
        self._rondo_open = False

    def rondo_begin(self) -> None:
        """Ready to receive every tensor. An update that was never committed is forgotten."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            if self._rondo_open:
                _abandon(model)
            self._rondo_open = True
            if self.model_runner.device.type == "cpu":
                _forget_packed_experts(model)
            initialize_layerwise_reload(model)

    def rondo_receive(self, bucket: SharedBucket) -> dict[str, int]:
        """Load a bucket's tensors; returns their checksums, computed from the bytes that arrived here."""
        sums: dict[str, int] = {}

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for name, view in tensors:
                sums[name] = checksum(view)
                # A copy, because parts of a fused matrix wait here for the others, and the pages are reused.
                yield name, view.to(self.model_runner.device, copy=True)

        with set_current_vllm_config(self.vllm_config), torch.no_grad(), bucket.tensors() as tensors:
            self.model_runner.get_model().load_weights(separate(arriving()))
        return sums

    def rondo_commit(self) -> None:
        """Everything is there: put it into the form that the kernels want."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
            infos = {head: layerwise.get_layerwise_info(head) for head in heads}
            tied = [head for head, info in infos.items() if info.can_load() and info.load_numel == 0]
            finalize_layerwise_reload(model, self.model_config)
            for head in tied:  # on a CPU it computes with a packed copy, made from what was there before
                head.quant_method.process_weights_after_loading(head)
        self._rondo_open = False


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """vLLM packs experts for its CPU kernel when it makes the kernel, and not when weights are loaded anew:
    the kernel would read plain weights as packed ones. Without a kernel it makes one, and packs.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _abandon(model: torch.nn.Module) -> None:
    """Leave a reload that did not end: every layer gets its old storage back, whatever it holds."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


class CountedSampler(Sampler):
    """vLLM's sampler, with two differences.

    Log-probs are those of log_softmax(logits / temperature), before top-k, top-p and min-p; greedy rows at
    temperature 1. vLLM has them before temperature or after truncation only.
    Noise is a function of the request's seed and the index of the token, never of the row, the batch or what
    was sampled before; so a request that goes on elsewhere gives the same tokens.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__("raw_logprobs", runner.sampler.use_fp64_gumbel)
        self._runner = [runner]  # in a list: the runner must not become a submodule of its own sampler
        self._generators: list[torch.Generator] = []

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        """logits: [B, V]. As vLLM's, with the log-probs that `sample` returns."""
        return super().forward(logits, sampling_metadata, predict_bonus_token, "processed_logprobs")

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(token ids [B], log-probs [B, V] float32; None where no request wants any)."""
        wanted = sampling_metadata.max_num_logprobs is not None
        if sampling_metadata.all_greedy:
            log_probs = self.compute_logprobs(logits) if wanted else None
            return self.greedy_sample(logits), log_probs
        temperature = sampling_metadata.temperature
        logits = self.apply_temperature(logits, temperature, sampling_metadata.all_random)
        log_probs = self.compute_logprobs(logits) if wanted else None
        divided = dataclasses.replace(
            sampling_metadata,
            temperature=torch.where(temperature < _EPSILON, temperature, torch.ones_like(temperature)),
            generators=self._seeded(logits.shape[0], logits.device),
        )
        tokens, _ = super().sample(logits, divided, "raw_logprobs")
        return tokens, log_probs

    def _seeded(self, num_rows: int, device: torch.device) -> dict[int, torch.Generator]:
        while len(self._generators) < num_rows:
            self._generators.append(torch.Generator(device))
        runner, seeded = self._runner[0], {}
        for row, request_id in enumerate(runner.input_batch.req_ids[:num_rows]):
            request = runner.requests[request_id]
            extra = request.sampling_params.extra_args or {}
            if SEED in extra:
                index = extra[FIRST] + len(request.output_token_ids)
                seeded[row] = self._generators[row].manual_seed(mixed(extra[SEED], index))
        return seeded


def mixed(seed: int, index: int) -> int:
    """A 63-bit hash of both (splitmix64's finaliser: Steele, Lea, Flood 2014)."""
    mask = (1 << 64) - 1
    word = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return (word ^ (word >> 31)) >> 1
