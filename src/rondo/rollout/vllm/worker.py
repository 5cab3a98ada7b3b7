"""In every process that holds a part of the model: weights in, the sampler's noise and its log-probs.

vLLM mixes `WorkerExtension` into its worker class; `core.py` calls its methods by name in all workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    InputProcessingContext,
)
from vllm.v1.sample.sampler import Sampler

from rondo.models.names import Parts, separate
from rondo.platform import on_host
from rondo.rollout.native.sampling import draw, seed_ahead, truncate, uniforms_on_device
from rondo.rollout.third_party import Hook
from rondo.rollout.vllm.options import TRANSFER
from rondo.weights.bucket import SharedBucket, close_opened
from rondo.weights.checksum import checksums, read, whole_sum

_EPSILON = 1e-5  # below it a temperature is greedy, as in vLLM
SEED, FIRST = "rondo_seed", "rondo_first"  # in SamplingParams.extra_args: the key, and the index of token 0


IMAGE = "image"  # vLLM's word for the kind of input


class _AnyImages(BaseProcessingInfo):
    """Any number of images in a prompt, each of which may fill it."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {IMAGE: seq_len}


class _NoDummies(BaseDummyInputsBuilder):
    """Nothing to measure with: the size of vLLM's cache is set."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError

    def get_dummy_mm_data(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


class _NoProcessor(BaseMultiModalProcessor):
    """Processes nothing: prompts with images come ready (core.py)."""

    requires_tokenizer = False

    def _get_mm_fields_config(self, *_: Any) -> Any:
        raise NotImplementedError

    def _get_prompt_updates(self, *_: Any) -> Any:
        raise NotImplementedError


def _create_processor(
    model_config: ModelConfig,
    *,
    tokenizer: Any = None,
    cache: Any = None,  # of vLLM 0.26
) -> BaseMultiModalProcessor:
    info = _AnyImages(InputProcessingContext(model_config, tokenizer))
    return _NoProcessor(info, _NoDummies(info))


# vLLM's own would want a tokenizer and torchvision. At import, because this module is all that vLLM's workers
# are told of rondo before they make the model.
MULTIMODAL_REGISTRY.create_processor = _create_processor  # type: ignore[method-assign]


# What rondo replaces or calls beside vLLM's public interface: checked before the engine is made (core.py).
HOOKS = (
    Hook(type(MULTIMODAL_REGISTRY), "create_processor", "model_config tokenizer"),
    Hook(Sampler, "forward", "logits sampling_metadata logprobs_mode_override"),
    Hook(Sampler, "sample", "logits sampling_metadata"),
    Hook(Sampler, "apply_temperature", "logits temp all_random"),
    Hook(Sampler, "compute_logprobs", "logits"),
    Hook(Sampler, "greedy_sample", "logits"),
    Hook(layerwise, "get_layerwise_info", "layer"),
    Hook(layerwise, "_place_kernel_tensors", "layer info"),
)


@dataclass
class _Nothing(WeightTransferInitInfo):
    """Is agreed on before the first update."""


@dataclass
class _Bucket(WeightTransferUpdateInfo):
    """A part of an update."""

    bucket: SharedBucket
    """Its tensors."""
    parts: Parts
    """How they become a checkpoint's."""


class BucketReceiver(WeightTransferEngine[_Nothing, _Bucket]):
    """A transfer engine of vLLM's (`weight_transfer_config`). It opens buckets, sums what arrives in them,
    and has the model load it.
    """

    init_info_cls = _Nothing
    update_info_cls = _Bucket

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sums: dict[str, torch.Tensor] = {}
        """Of what the update that is under way has brought, on the device that it was on."""
        self._open = False
        self._wrapped: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []

    def init_transfer_engine(self, init_info: _Nothing) -> None:
        """See `_Nothing`."""

    def start_weight_update(self) -> None:
        """Makes ready to receive every tensor. An update that was never finished is forgotten."""
        self.sums = {}
        with set_current_vllm_config(self.vllm_config):
            if self._open:
                _abandon(self.model)
            self._open = True
            self._wrapped = self._wrapped or _unwrap(self.model)
            if on_host(self.device):
                _forget_packed_experts(self.model)
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a bucket. vLLM's own waits for an accelerator afterwards, which a CPU is not; a bucket that
        is on a device waits for it.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Bucket) -> None:
        """Loads a bucket's tensors, by its parts under a checkpoint's names."""
        bucket, parts = update_info.bucket, update_info.parts
        with set_current_vllm_config(self.vllm_config), torch.no_grad(), bucket.tensors() as tensors:
            self.sums |= {name: whole_sum(view) for name, view in tensors}
            # Copies, because parts of a fused matrix wait here for the others, and the pages are reused.
            arriving = ((name, view.to(self.device, copy=True)) for name, view in tensors)
            self.model.load_weights(_as_it_reads(self.model, separate(arriving, parts)))

    def finish_weight_update(self) -> None:
        """Puts the weights, which are all there, into the form that the kernels want."""
        model = self.model
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
            infos = {head: layerwise.get_layerwise_info(head) for head in heads}
            tied = [head for head, info in infos.items() if info.can_load() and info.load_numel == 0]
            finalize_layerwise_reload(model, self.model_config)
            for head in tied:  # on a CPU it computes with a packed copy, made from what was there before
                head.quant_method.process_weights_after_loading(head)
        for owner, name, wrapper in self._wrapped:
            setattr(owner, name, wrapper)
        self._wrapped = []
        self._open = False

    def shutdown(self) -> None:
        """Has nothing to end."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Is a trainer's side, which vLLM 0.26 wants in the same class: `rondo.rollout.fanout` has it."""
        raise NotImplementedError


# At import, for the reason above.
WeightTransferEngineFactory.register_engine(TRANSFER, BucketReceiver)


class WorkerExtension:
    """Methods of a vLLM worker, beside those of vLLM's own for weights: `start_weight_update`,
    `update_weights` per bucket, `finish_weight_update`.
    """

    model_runner: Any
    weight_transfer_engine: BucketReceiver
    _weight_update_active: bool

    def rondo_prepare(self, never: list[int]) -> None:
        """Puts the sampler in its place; once, before the first request. never: tokens that it cuts off."""
        runner = self.model_runner
        runner.sampler = VllmCountedSampler(runner, never)

    def rondo_forget(self) -> None:
        """Has vLLM begin another update, where one is open whose sender went away."""
        self._weight_update_active = False

    def rondo_sums(self) -> dict[str, int]:
        """Returns the checksums of what has arrived here since the update began, computed from its bytes."""
        return read(self.weight_transfer_engine.sums)

    def rondo_look(self, bucket: SharedBucket) -> dict[str, int]:
        """Returns the checksums of what is in a bucket, and loads nothing."""
        with bucket.tensors() as tensors:
            return checksums(dict(tensors))

    def rondo_close(self) -> None:
        """Closes what is open of the memory that buckets are in."""
        close_opened()


def _as_it_reads(
    model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gives tensors the form that vLLM's model loads, where it is an older one than transformers 5 has: the
    name of SigLIP's tower has a word more, and Qwen3-VL's experts are transposed.
    """
    tower = "vision_tower."
    longer = f"{tower}vision_model."
    named = hasattr(getattr(model, "vision_tower", None), "vision_model")
    turned = type(model).__name__ == "Qwen3VLMoeForConditionalGeneration"
    for name, tensor in tensors:
        if named and name.startswith(tower) and not name.startswith(longer):
            name = longer + name.removeprefix(tower)
        yield name, tensor.transpose(1, 2) if turned and ".mlp.experts." in name else tensor


def _unwrap(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Puts layers in the place of what vLLM wraps them in for adapters, so that names are a checkpoint's.
    Returns (owner, name in it, wrapper) of each.
    """
    wrapped = []
    for path, module in list(model.named_modules()):
        if isinstance(module, BaseLayerWithLoRA):
            above, _, name = path.rpartition(".")
            owner = model.get_submodule(above)
            setattr(owner, name, module.base_layer)
            wrapped.append((owner, name, module))
    return wrapped


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Takes away vLLM's kernels of experts. vLLM packs experts for its CPU kernel when it makes the kernel,
    and not when weights are loaded anew: the kernel would read plain weights as packed ones. Without a kernel
    it makes one, and packs.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _abandon(model: torch.nn.Module) -> None:
    """Leaves a reload that did not end: every layer gets its old storage back, whatever it holds."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


@dataclass(frozen=True)
class _Rows:
    """What the sampler has to know of a batch's requests, in the order of their rows. It stays the same until
    another request is among them.
    """

    request_ids: list[str]
    """The request of each row."""
    seeds: torch.Tensor
    """int64 [R], for the tokens as vLLM counts them."""
    cuts: tuple[torch.Tensor, ...] | None
    """top-k, top-p and min-p, [R] each; None: none of them cuts anything."""


class VllmCountedSampler(Sampler):
    """vLLM's sampler, with three differences.

    Log-probs are those of log_softmax(logits / temperature), before top-k, top-p and min-p; greedy rows at
    temperature 1. vLLM has them before temperature or after truncation only.
    Truncation and noise are the native engine's: one uniform number per token, a function of the request's
    seed and the index of the token, never of the row, the batch or what was sampled before. So a request that
    goes on elsewhere gives the same tokens.
    Tokens that stand for images (never) are cut off, as top-p cuts others.
    """

    def __init__(self, runner: Any, never: list[int]) -> None:
        super().__init__("raw_logprobs", runner.sampler.use_fp64_gumbel)
        self._never = torch.tensor(never, dtype=torch.int64, device=runner.device) if never else None
        self._runner = [runner]  # in a list: the runner must not become a submodule of its own sampler
        self._last_rows: _Rows | None = None

    def forward(
        self,
        logits: torch.Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        """Samples as vLLM's own does, with the log-probs that `sample` returns. logits: [B, V]."""
        # core.py asks for log-probs with every request. Where none are asked for, vLLM 0.33 samples past
        # `sample` on ROCm (`mixed_sample_eligible`), by its own noise.
        assert sampling_metadata.max_num_logprobs is not None
        return super().forward(logits, sampling_metadata, predict_bonus_token, "processed_logprobs")

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (token ids [B], log-probs [B, V] float32)."""
        if sampling_metadata.all_greedy:
            return self.greedy_sample(_without(self._never, logits)), self.compute_logprobs(logits)
        temperature = sampling_metadata.temperature
        logits = self.apply_temperature(logits, temperature, sampling_metadata.all_random)
        log_probs = self.compute_logprobs(logits)
        rows, uniforms = self._noise(logits.shape[0], logits.device)
        weights = log_probs.exp()
        if self._never is not None:
            weights = weights.index_fill(1, self._never, 0)
        if rows.cuts is not None:
            weights = truncate(weights, *rows.cuts)
        tokens = draw(weights, uniforms)
        if not sampling_metadata.all_random:
            greedy = self.greedy_sample(_without(self._never, logits))
            tokens = torch.where(temperature < _EPSILON, greedy, tokens)
        return tokens, log_probs

    def _noise(self, num_rows: int, device: torch.device) -> tuple[_Rows, torch.Tensor]:
        """Returns the batch's rows, and float64 [num_rows] in [0, 1) of each row's next token."""
        runner = self._runner[0]
        request_ids = list(runner.input_batch.req_ids[:num_rows])
        requests = [runner.requests[request_id] for request_id in request_ids]
        rows = self._last_rows
        if rows is None or rows.request_ids != request_ids:
            rows = self._last_rows = _rows_of(request_ids, [one.sampling_params for one in requests], device)
        indices = torch.tensor([len(request.output_token_ids) for request in requests])
        return rows, uniforms_on_device(rows.seeds, indices.to(device, non_blocking=True))


def _without(never: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    return logits if never is None else logits.index_fill(1, never, float("-inf"))


def _rows_of(request_ids: list[str], parameters: list[Any], device: torch.device) -> _Rows:
    """Returns the batch's rows. vLLM counts only tokens that it made itself, so each seed skips those of the
    prefix.
    """
    seeds = [seed_ahead(one.extra_args[SEED], one.extra_args[FIRST]) for one in parameters]
    cuts = [(one.top_k, one.top_p, one.min_p) for one in parameters]
    cut = any(top_k > 0 or top_p < 1 or min_p > 0 for top_k, top_p, min_p in cuts)
    columns = torch.tensor(cuts, dtype=torch.float32).to(device).unbind(1) if cut else None
    return _Rows(request_ids, torch.tensor(seeds).to(device), columns)
