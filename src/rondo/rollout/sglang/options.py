"""What may be asked of SGLang here: version, kernels, options, environment, models. Imports no SGLang."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from rondo.core.errors import ConfigError
from rondo.platform import on_host, platform_of
from rondo.rollout.protocol import EngineSpec
from rondo.rollout.third_party import ThirdParty
from rondo.rollout.third_party_engine import cache_bytes, token_bytes

ROOM = 8  # tokens: SGLang admits a few less than its context length
# Either of them says how large the cache is.
_CACHE_OPTIONS = frozenset({"mem_fraction_static", "max_total_tokens"})
_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_WEIGHTS = "nothing: weights arrive from the trainer"
_TOKENS = "nothing: tokens go in and come out, the engine needs no tokenizer"
_ORDER = "nothing: requests go in the order in which they come, urgent ones first"


class Sglang(ThirdParty):
    """SGLang."""

    name = "sglang"
    title = "SGLang"
    distributions = ("sglang",)
    # begin_weight_update … end_weight_update came with 0.5.23.
    oldest = (0, 5, 23)
    newer = (0, 6)
    arguments_in = "srt/arg_groups/fields/*.py"
    arguments_class = "*"
    sleep_option = "enable_memory_saver"
    models: ClassVar[frozenset[str]] = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe"})
    left_out: ClassVar[Mapping[str, str]] = {"mlp_bias": "the biases of the MLP"}
    adapter_models: ClassVar[frozenset[str]] = frozenset({"llama", "qwen2", "qwen3"})
    governed: ClassVar[Mapping[str, str]] = {
        "model_path": "model.path",
        "tokenizer_path": _TOKENS,
        "tokenizer_mode": _TOKENS,
        "skip_tokenizer_init": _TOKENS,
        "tokenizer_worker_num": _TOKENS,
        "detokenizer_worker_num": _TOKENS,
        "trust_remote_code": "model.trust_remote_code",
        "load_format": _WEIGHTS,
        "custom_weight_loader": _WEIGHTS,
        "dtype": "rollout.dtype",
        "random_seed": "trainer.seed",
        "context_length": "data.max_prompt_tokens and rollout.max_tokens",
        "max_running_requests": "rollout.max_concurrent",
        "tp_size": "rollout.engine.tensor_parallel",
        "device": "cluster.device",
        "enable_lora": "actor.lora.send",
        "enable_return_routed_experts": "actor.router.replay",
        "max_lora_rank": "actor.lora.rank",
        "lora_target_modules": "actor.lora.targets",
        "base_gpu_id": "cluster.placement",
        "sampling_backend": "nothing: the sampler is rondo's (rollout/sglang/worker.py)",
        "stream_interval": "nothing: every token is stamped as it comes",
        "incremental_streaming_output": "nothing: every token is stamped as it comes",
        "skip_server_warmup": "nothing: there are no weights to warm up with",
        "schedule_policy": _ORDER,
        "enable_priority_scheduling": _ORDER,
        "disable_priority_preemption": _ORDER,
        "default_priority_value": _ORDER,
        "schedule_low_priority_values_first": _ORDER,
        "custom_sigquit_handler": "nothing: it tells rondo of a dead worker",
        "json_model_override_args": "model.override, so that the trainer builds the same model",
        "preferred_sampling_params": "the keys of rollout: temperature, top_p and the rest",
        "sampling_defaults": "the keys of rollout: temperature, top_p and the rest",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "pp_size": "weights are sent to tensor-parallel workers only",
        "dp_size": "use rollout.replicas",
        "nnodes": "an engine lives on one machine",
        "quantization": "the trainer's log-probs would not be the sampler's; not tried",
        "lora_paths": "adapters arrive from the trainer",
        "max_loaded_loras": "it would drop adapters that requests in flight began with",
        "disaggregation_mode": "keys and values of old weights would come back from the other side",
        "enable_hierarchical_cache": "keys and values of old weights would come back from it",
        "enable_lmcache": "keys and values of old weights would come back from it",
        "enable_flexkv": "keys and values of old weights would come back from it",
        "weight_cache_mode": "the cache's weights are not the trainer's",
        "cpu_offload_gb": "an update would not reach weights that are elsewhere",
        "offload_group_size": "an update would not reach weights that are elsewhere",
        "enable_deterministic_inference": "it chooses another sampler; without it, too, tokens are a "
        "function of the request's seed",
        "rl_on_policy_target": "it chooses another sampler",
        "enable_watermark": "it changes what is sampled, not what is reported",
        "enable_custom_logit_processor": "it changes what is sampled",
        "allow_auto_truncate": "a request that was cut would not be the one that was asked for",
        "tokenizer_backend": _TOKENS,
        "use_ray": "rondo starts the processes",
        "speculative_*": "log-probs of drafted tokens were not checked",
        "dllm_*": "not tried",
    }

    def check_build(self, distribution: str, version: str, device: str) -> None:
        """See ThirdParty.check_build."""
        if on_host(device) and self.folders("sgl_kernel") is None:
            raise ConfigError(
                "rollout.engine=sglang on a CPU: its kernels (sgl_kernel) are built for GPUs only; `make "
                "test-engines` builds .venv-engines, which has stand-ins for those that it imports"
            )

    def environment(self, spec: EngineSpec) -> dict[str, str]:
        """See ThirdParty.environment."""
        variables = {
            "OMP_NUM_THREADS": str(spec.threads),
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs after temperature
            # A few tokens of room; launch.py checks the length.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            _MODELS: os.environ.get(_MODELS, "rondo.rollout.sglang.models"),  # see there
        }
        if not on_host(spec.device):
            return variables
        return variables | {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", **_cores(spec)}


ENGINE = Sglang()


def _cores(spec: EngineSpec) -> dict[str, str]:
    """Says which cores each of several workers is bound to; SGLang's own choice would be NUMA nodes."""
    if spec.tensor_parallel == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, min(spec.threads, len(cores) // spec.tensor_parallel))
    groups = [
        ",".join(str(cores[(rank * share + index) % len(cores)]) for index in range(share))
        for rank in range(spec.tensor_parallel)
    ]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(groups)}


def device_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Returns the arguments of SGLang's ServerArgs that depend on the device."""
    tokens = spec.max_concurrent * (spec.max_context + ROOM)
    if on_host(spec.device):
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.8,  # a bound only: the next line is what is allocated
            "max_total_tokens": tokens,
            "sleep_on_idle": True,
        }
    arguments: dict[str, Any] = {
        "device": platform_of(spec.device).kind,
        "base_gpu_id": int(spec.device.partition(":")[2] or 0),
    }
    if not spec.options.keys() & _CACHE_OPTIONS:  # by itself SGLang takes nearly all that is free
        arguments["max_total_tokens"] = cache_bytes(spec, tokens, ENGINE) // token_bytes(spec)
    return arguments


def model_module(architectures: Iterable[str]) -> str:
    """Returns the module of the installed SGLang that has the model ("sglang.srt.models.qwen3"), by reading
    its files: importing all of them takes ten seconds. Raises ConfigError when there is none.
    """
    wanted, models = list(architectures), ENGINE.folder() / "srt" / "models"
    pattern = re.compile(rf"^class ({'|'.join(map(re.escape, wanted))})\b", re.MULTILINE)
    for path in sorted(models.glob("*.py")):
        if pattern.search(path.read_text(encoding="utf-8")):
            return f"sglang.srt.models.{path.stem}"
    raise ConfigError(
        f"SGLang {ENGINE.installed()[1]} has no model {' or '.join(wanted)}; use rollout.engine=native or "
        "vllm"
    )
