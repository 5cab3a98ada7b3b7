"""vLLM's own engine, stepped by its caller: everything here runs on one thread.

    LLMEngine (scheduler, in this process) ─ Executor ─▶ worker 0 … tensor_parallel − 1, each with worker.py

The synchronous engine, because a step is then over when it returns: weights change between two steps, and the
version of every token is known without asking.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.inputs import MultiModalInput, mm_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from rondo.core.errors import ConfigError, did_you_mean
from rondo.core.images import ImageRef
from rondo.core.types import GenerateRequest
from rondo.models.family import why_blind
from rondo.models.loading import load_model_config
from rondo.models.names import Parts
from rondo.platform import on_host
from rondo.rollout.adapters import Served
from rondo.rollout.images import ReadImages, tokens_of_images
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.third_party import MERGE
from rondo.rollout.third_party_engine import model_folder, versions_of
from rondo.rollout.vllm.options import ENGINE, check_head_size, engine_arguments
from rondo.rollout.vllm.worker import FIRST, HOOKS, IMAGE, SEED
from rondo.weights.bucket import SharedBucket

_URGENT = -1  # vLLM takes small numbers first, and of equal ones those that came first


@dataclass(frozen=True)
class VllmStep:
    """New tokens of one request."""

    key: str
    """vLLM's id of the request."""
    token_ids: Sequence[int]
    """The tokens that are new in this step."""
    log_probs: Sequence[float]
    """The log-prob of each new token."""
    finished: str
    """"", "stop" or "length"."""
    prompt_ids: Sequence[int]
    """The prompt as vLLM read it."""
    cached: int
    """Prompt tokens (prefix included) whose keys and values were there already; on a request's first tokens
    only, else 0."""
    versions: Sequence[int] | None
    """With the last step of a request, of all its tokens, by vLLM's own count; None: it does not count."""


class VllmCore:
    """Builds the engine, and blocks until it can take requests. Raises ConfigError; whatever vLLM raises."""

    def __init__(self, spec: EngineSpec) -> None:
        ENGINE.check_hooks(HOOKS)
        self._keeps_base = spec.adapters is not None
        self._folder = model_folder(spec)
        try:
            self._engine = self._build(spec)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._config = config = load_model_config(spec.source)
        vocab_size = int(config.get_text_config().vocab_size)
        engine_vocab = int(self._engine.model_config.get_vocab_size())
        if engine_vocab != vocab_size:
            self.close()
            raise ConfigError(
                f"vLLM's model has a vocabulary of {engine_vocab}, the trainer's of {vocab_size}"
            )
        self._rpc("rondo_prepare", [] if why_blind(config) else tokens_of_images(config))
        self._seen: set[str] = set()
        self._named = False  # vLLM knows which version the weights are
        groups = self._scheduler.kv_cache_config.kv_cache_tensors
        self.cache_bytes = sum(int(tensor.size) for tensor in groups) * spec.tensor_parallel
        self.num_blocks = int(self._scheduler.kv_cache_config.num_blocks)

    def _build(self, spec: EngineSpec) -> LLMEngine:
        _check_architecture(self._folder, spec)
        if on_host(spec.device):
            check_head_size(spec)
        try:
            return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(spec, self._folder)))
        except ValueError as error:
            if "does not support LoRA" not in str(error):
                raise
            raise ConfigError(f"{error} {MERGE}", key="actor.lora.send") from error

    # ---- requests ----

    def add(
        self,
        key: str,
        request: GenerateRequest,
        adapters: Served | None = None,
        shown: ReadImages | None = None,
    ) -> None:
        """Adds a request. key: unique among all that were ever added. Prompt and prefix are prefilled
        together. adapters: without them vLLM computes with the base, and says nothing. shown: its images.
        """
        prompt = [int(token) for token in request.token_ids]
        prefix = () if request.prefix is None else [int(token) for token in request.prefix.token_ids]
        sampling = request.sampling
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens - len(prefix),
            stop_token_ids=[int(token) for token in sampling.stop_token_ids],
            ignore_eos=True,  # what ends a response is stop_token_ids alone
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            flat_logprobs=True,
            extra_args={SEED: int(request.seed), FIRST: len(prefix)},
        )
        priority = _URGENT if request.urgent else 0
        ids = [*prompt, *prefix]
        self._engine.add_request(
            key,
            {"prompt_token_ids": ids} if shown is None else _ready(ids, shown, self._config),
            parameters,
            lora_request=None if adapters is None else _lora_request(adapters),
            priority=priority,
        )

    def abort(self, keys: Sequence[str]) -> None:
        """Takes requests out; unknown ones are ignored."""
        self._engine.abort_request(list(keys))
        self._seen.difference_update(keys)

    def step(self) -> list[VllmStep]:
        """Makes one token for every running request; may return nothing (a long prompt in pieces)."""
        return [self._taken(output) for output in self._engine.step()]

    def _taken(self, output: Any) -> VllmStep:
        part = output.outputs[0]
        log_probs = part.logprobs
        spans = part.weight_versions if self._named and output.finished else None
        first = output.request_id not in self._seen
        self._seen.add(output.request_id)
        if output.finished:
            self._seen.discard(output.request_id)
        return VllmStep(
            key=output.request_id,
            token_ids=part.token_ids,
            log_probs=[log_probs.logprobs[start] for start in log_probs.start_indices],
            finished=(part.finish_reason or "length") if output.finished else "",
            prompt_ids=output.prompt_token_ids,
            cached=int(output.num_cached_tokens or 0) if first else 0,
            versions=None if spans is None else versions_of((s.version, s.start, s.end) for s in spans),
        )

    def counts(self) -> tuple[int, int]:
        """Returns how many requests are (running, waiting)."""
        running, waiting = self._scheduler.get_request_counts()
        return int(running), int(waiting)

    # ---- weights ----

    def begin(self) -> None:
        self._rpc("rondo_forget")
        self._rpc("start_weight_update")

    def receive(self, bucket: SharedBucket, parts: Parts) -> None:
        """Loads a bucket."""
        self._rpc("update_weights", {"bucket": bucket, "parts": parts})

    def sums(self) -> list[dict[str, int]]:
        """Returns the checksums by name of what has arrived since `begin`, of each worker."""
        return self._rpc("rondo_sums")

    def look(self, bucket: SharedBucket) -> list[dict[str, int]]:
        """See ThirdPartyEngine.look."""
        return self._rpc("rondo_look", bucket)

    def close_buckets(self) -> None:
        """See ThirdPartyEngine.close_buckets."""
        self._rpc("rondo_close")

    def commit(self) -> None:
        """Has the next step compute with the received weights, keys and values included."""
        self._rpc("finish_weight_update")
        self.forget()

    def name_weights(self, version: int) -> None:
        """Has vLLM count which tokens the weights make from now on; vLLM 0.26 does not."""
        if hasattr(self._engine, "set_weight_version"):
            self._engine.set_weight_version(str(version))
            self._named = True

    def load_adapters(self, adapters: Served) -> None:
        """Has every worker read them, so that what is wrong with them is known now."""
        if not self._engine.add_lora(_lora_request(adapters)):
            raise RuntimeError(f"vLLM did not take {adapters.name}")

    def drop_adapters(self, adapters: Served) -> None:
        """Forgets them; no request uses them any more."""
        self._engine.remove_lora(adapters.number)

    def forget(self) -> None:
        """Empties every cache; running requests go back to the queue."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not clear its prefix cache")
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()

    # ---- life ----

    def sleep(self) -> None:
        """Gives up cache and weights (level 2), because the trainer sends weights before anything goes on;
        weights to which only adapters come wait in host memory (level 1). Requests stay in the queue.
        """
        self.forget()
        self._engine.sleep(level=1 if self._keeps_base else 2, mode="keep")

    def wake(self, *tags: str) -> None:
        """Makes again what `sleep` gave up. tags: "weights", "kv_cache"; none: both."""
        self._engine.wake_up(list(tags) or None)

    def worker_lost(self) -> bool:
        """Says whether one of several worker processes has died."""
        return bool(getattr(self._engine.model_executor, "is_failed", False))

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._engine.collective_rpc(method, args=args)


_Arguments = Mapping[str, tuple[torch.Tensor, str]]
"""What vLLM's model takes of one image: each argument's value, and how a model gets those of several:
"joined" along the first dimension, of "each", or the same for all ("shared").
"""


def _patches(image: ImageRef, pixels: torch.Tensor, config: Any) -> _Arguments:
    """Qwen's and GLM's."""
    return {"pixel_values": (pixels, "joined"), "image_grid_thw": (torch.tensor(image.grid), "each")}


def _tiles(image: ImageRef, pixels: torch.Tensor, config: Any) -> _Arguments:
    """InternVL's."""
    return {
        "pixel_values": (pixels, "joined"),
        "image_num_patches": (torch.tensor(len(pixels)), "each"),
        "image_token_id": (torch.tensor(config.image_token_id), "shared"),
    }


def _padded(image: ImageRef, pixels: torch.Tensor, config: Any) -> _Arguments:
    """LLaVA-OneVision's: the size says what of the tiles is padding."""
    return {"pixel_values": (pixels, "each"), "image_sizes": (torch.tensor(image.grid[1:]), "each")}


def _named_tiles(image: ImageRef, pixels: torch.Tensor, config: Any) -> _Arguments:
    """Idefics3's and SmolVLM's: no tile has padding."""
    return {
        "pixel_values": (pixels, "joined"),
        "pixel_attention_mask": (torch.ones(len(pixels), *pixels.shape[-2:], dtype=torch.int64), "joined"),
        "num_patches": (torch.tensor(len(pixels)), "each"),
    }


_ARGUMENTS: Mapping[str, Callable[[ImageRef, torch.Tensor, Any], _Arguments]] = {
    "qwen2_5_vl": _patches,
    "qwen3_vl": _patches,
    "qwen3_vl_moe": _patches,
    "glm4v_moe": _patches,
    "llava_onevision": _padded,
    "internvl": _tiles,
    "idefics3": _named_tiles,
    "smolvlm": _named_tiles,
}
"""By the type of the model: of an image, what its tower takes of it, and the model's config."""


def _ready(ids: list[int], shown: ReadImages, config: Any) -> MultiModalInput:
    """Returns a prompt of expanded token ids with its images. vLLM would expand one placeholder per image
    (what is expanded already once more), and make pixels with another library than the trainer's.
    """
    of_one = _ARGUMENTS[config.model_type]
    images = zip(shown.images, shown.pixels, strict=True)
    items = [_item(of_one(image, torch.from_numpy(pixels), config)) for image, pixels in images]
    # What vLLM keeps of an image, and of keys and values behind it, it finds by this name.
    names = [f"{image.sha256}-{'x'.join(map(str, image.grid))}" for image in shown.images]
    ranges = [_range(places) for places in shown.places]
    return mm_input(ids, MultiModalKwargsItems({IMAGE: items}), {IMAGE: names}, {IMAGE: ranges})


def _range(places: np.ndarray) -> PlaceholderRange:
    """Returns where an image is, from its first token to its last; between them may be names of its tiles."""
    first, length = int(places[0]), int(places[-1] - places[0]) + 1
    if length == len(places):
        return PlaceholderRange(offset=first, length=length)
    shows = torch.zeros(length, dtype=torch.bool)
    shows[torch.from_numpy(places - first)] = True
    return PlaceholderRange(offset=first, length=length, is_embed=shows)


def _item(arguments: _Arguments) -> MultiModalKwargsItem:
    how = {
        "joined": lambda value: MultiModalFieldConfig.flat_from_sizes(IMAGE, torch.tensor([len(value)])),
        "each": lambda _: MultiModalFieldConfig.batched(IMAGE),
        "shared": lambda _: MultiModalFieldConfig.shared(IMAGE, 1),
    }
    values = {name: value[None] if kind == "each" else value for name, (value, kind) in arguments.items()}
    fields = {name: how[kind](value) for name, (value, kind) in arguments.items()}
    return MultiModalKwargsItems.from_hf_inputs(values, fields)[IMAGE][0]


def _lora_request(adapters: Served) -> LoRARequest:
    return LoRARequest(adapters.name, adapters.number, str(adapters.folder))


def _check_architecture(folder: Path, spec: EngineSpec) -> None:
    """Refuses a model that vLLM would run through transformers, on ways that were not tried."""
    architectures = json.loads((folder / "config.json").read_text())["architectures"]
    known = ModelRegistry.get_supported_archs()
    if "model_impl" in spec.options or any(name in known for name in architectures):
        return
    name = architectures[0]
    raise ConfigError(
        f"vLLM {ENGINE.installed()[1]} does not know the architecture {name}{did_you_mean(name, known)} Use "
        "rollout.engine=native, or try rollout.engine.model_impl=transformers"
    )
