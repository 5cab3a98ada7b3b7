"""What may be asked of SGLang here: installation, version, options, capabilities. Imports no SGLang.

The options of `rollout.engine` are the fields of SGLang's own `ServerArgs`; their names are read from
its source files, because importing SGLang takes ten seconds and changes the process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rondo.errors import ConfigError
from rondo.rollout.protocol import Capabilities, EngineSpec
from rondo.rollout.third_party import (
    annotated_fields,
    check_options,
    check_version,
    package_folder,
)

OLDEST, NEWER = (0, 5, 23), (0, 6)  # begin_weight_update … end_weight_update came with 0.5.23
_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_INSTALL = (
    "rollout.engine=sglang needs SGLang, which is not installed in this environment. On a machine without a "
    "GPU: make test-engines builds one in .venv-engines; with a GPU: pip install sglang, then rondo. See "
    "docs/engines.md"
)

# Arguments that rondo sets, and the key of its own that governs each.
_WEIGHTS = "nothing: weights arrive from the trainer"
_TOKENS = "nothing: tokens go in and come out, the engine needs no tokenizer"
_ORDER = "nothing: requests go in the order in which they come, urgent ones first"
_GOVERNED = {
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
    "json_model_override_args": "model.config, so that the trainer builds the same model",
    "preferred_sampling_params": "the keys of rollout: temperature, top_p and the rest",
    "sampling_defaults": "the keys of rollout: temperature, top_p and the rest",
}
# Arguments whose effect on weights, versions or log-probs is not known to be right.
_REFUSED = {
    "pp_size": "weights are sent to tensor-parallel workers only",
    "dp_size": "use rollout.replicas",
    "nnodes": "an engine lives on one machine",
    "quantization": "the trainer's log-probs would not be the sampler's; not tried",
    "enable_lora": "adapters are merged into the weights before they are sent",
    "lora_paths": "adapters are merged into the weights before they are sent",
    "disaggregation_mode": "keys and values of old weights would come back from the other side",
    "enable_hierarchical_cache": "keys and values of old weights would come back from it",
    "enable_lmcache": "keys and values of old weights would come back from it",
    "enable_flexkv": "keys and values of old weights would come back from it",
    "weight_cache_mode": "the cache's weights are not the trainer's",
    "cpu_offload_gb": "an update would not reach weights that are elsewhere",
    "offload_group_size": "an update would not reach weights that are elsewhere",
    "enable_deterministic_inference": "it chooses another sampler; without it, too, tokens are a function "
    "of the request's seed",
    "rl_on_policy_target": "it chooses another sampler",
    "enable_watermark": "it changes what is sampled, not what is reported",
    "enable_custom_logit_processor": "it changes what is sampled",
    "allow_auto_truncate": "a request that was cut would not be the one that was asked for",
    "tokenizer_backend": _TOKENS,
    "use_ray": "rondo starts the processes",
}
_REFUSED_FAMILIES = {"speculative_": "log-probs of drafted tokens were not checked", "dllm_": "not tried"}


def installed_version() -> str:
    """SGLang's. Raises ConfigError that says what to install, or that it is too old or too new."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(_INSTALL) from error
    check_version("SGLang", version, OLDEST, NEWER)
    return version


def check(options: Mapping[str, Any], device: str = "cpu", *, sleep: bool = False) -> None:
    """Whether SGLang can be built like this: raises ConfigError (not installed, version, option, capability).

    sleep: rollout.sleep.
    """
    check_options(
        options,
        engine=f"SGLang {installed_version()}",
        known=argument_names(),
        governed=_GOVERNED,
        refused=_refused,
    )
    if not device.startswith("cuda") and importlib.util.find_spec("sgl_kernel") is None:
        raise ConfigError(
            "rollout.engine=sglang on a CPU: its kernels (sgl_kernel) are built for GPUs only; `make "
            "test-engines` builds .venv-engines, which has stand-ins for those that it imports"
        )
    why_not = (
        "add rollout.engine.enable_memory_saver=true"
        if device.startswith("cuda")
        else "SGLang's release_memory_occupation gives nothing back on a CPU"
    )
    if sleep and not capabilities(options, device).sleep:
        raise ConfigError(f"rollout.sleep: {why_not}")


def _refused(name: str) -> str | None:
    families = (reason for start, reason in _REFUSED_FAMILIES.items() if name.startswith(start))
    return _REFUSED.get(name) or next(families, None)


def capabilities(options: Mapping[str, Any], device: str = "cpu") -> Capabilities:
    """What SGLang can do with these options on this device."""
    return Capabilities(
        engine="sglang",
        engine_version=installed_version(),
        sleep=device.startswith("cuda") and bool(options.get("enable_memory_saver")),
        seeded=True,
        min_p=True,
        tensor_parallel=True,
        reads_back=False,  # matrices are fused
    )


def environment(spec: EngineSpec) -> dict[str, str]:
    """Variables of the process that the engine runs in, and of its children; to be set before it starts."""
    variables = {
        "OMP_NUM_THREADS": str(spec.threads),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs after temperature
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # a few tokens of room; launch.py checks the length
        _MODELS: os.environ.get(_MODELS, "rondo.rollout.sglang.models"),  # see there
    }
    if spec.device.startswith("cuda"):
        return variables
    return variables | {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", **_cores(spec)}


def _cores(spec: EngineSpec) -> dict[str, str]:
    """With several workers SGLang binds each to cores of its own; say which: else it takes NUMA nodes."""
    if spec.tensor_parallel == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, min(spec.threads, len(cores) // spec.tensor_parallel))
    groups = [
        ",".join(str(cores[(rank * share + index) % len(cores)]) for index in range(share))
        for rank in range(spec.tensor_parallel)
    ]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(groups)}


@cache
def argument_names() -> frozenset[str]:
    """The fields of SGLang's ServerArgs, read from its source."""
    names = set(annotated_fields(sorted((package() / "srt" / "arg_groups" / "fields").glob("*.py"))))
    if not names:
        raise ConfigError(f"the server arguments of the SGLang in {package()} cannot be read; reinstall it")
    return frozenset(name for name in names if not name.startswith("_"))


def model_module(architectures: Iterable[str]) -> str:
    """The module of the installed SGLang that has the model ("sglang.srt.models.qwen3"), by reading its
    files: importing all of them takes ten seconds. Raises ConfigError when there is none.
    """
    wanted, models = list(architectures), package() / "srt" / "models"
    pattern = re.compile(rf"^class ({'|'.join(map(re.escape, wanted))})\b", re.MULTILINE)
    for path in sorted(models.glob("*.py")):
        if pattern.search(path.read_text(encoding="utf-8")):
            return f"sglang.srt.models.{path.stem}"
    raise ConfigError(
        f"SGLang {installed_version()} has no model {' or '.join(wanted)}; use rollout.engine=native or vllm"
    )


def package() -> Path:
    """The folder of the installed sglang."""
    return package_folder("sglang", _INSTALL)
