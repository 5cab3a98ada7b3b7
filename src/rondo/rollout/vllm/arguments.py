"""What vLLM's engine is built with, and how large its key/value cache is. Imports no vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from rondo.core.errors import ConfigError
from rondo.models.loading import load_model_config
from rondo.rollout.native.cache import layer_shapes
from rondo.rollout.protocol import EngineSpec

# vLLM refuses to start unless this share of the device is free, also where the cache has a size of its own; a
# trainer that lives on the same device leaves no more. Nothing else follows from it then.
STARTING_SHARE = 0.05
# Of what is free on the device when the engine starts; the rest is for its weights and activations, and for
# the trainer's gradients, moments and activations, which come later.
CACHE_SHARE = 0.4
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the sizes that vLLM makes room for, of adapters
_log = logging.getLogger(__name__)


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
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "gpu_memory_utilization": STARTING_SHARE,
        "enable_prefix_caching": True,
        "enforce_eager": not spec.device.startswith("cuda"),
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
        arguments["kv_cache_memory_bytes"] = cache_bytes(spec)
    return arguments | dict(spec.options)


def cache_bytes(spec: EngineSpec) -> int:
    """Returns the bytes of one worker's keys and values of max_concurrent requests of max_context tokens, in
    whole blocks; on CUDA at most CACHE_SHARE of what is free on the device now.

    vLLM pages its cache: with less of it fewer requests run at one time, and the others wait.
    """
    on_cuda = spec.device.startswith("cuda")
    block = int(spec.options.get("block_size") or (16 if on_cuda else 128))
    tokens = spec.max_concurrent * -(-spec.max_context // block) * block + block  # one block is vLLM's own
    itemsize = getattr(torch, spec.dtype).itemsize
    wanted = tokens * sum(
        max(1, shape.kv_heads // spec.tensor_parallel) * (shape.key_dim + shape.value_dim) * itemsize
        for shape in layer_shapes(load_model_config(spec.source))
    )
    if not on_cuda:
        return wanted
    free, total = torch.cuda.mem_get_info(spec.device)
    share = int(CACHE_SHARE * free)
    gib = 1 << 30
    _log.info(
        f"vLLM's key/value cache is the smaller of {wanted / gib:.1f} GiB for {spec.max_concurrent} requests "
        f"of {spec.max_context} tokens and {share / gib:.1f} GiB, {CACHE_SHARE:.0%} of what is free on "
        f"{spec.device} ({free / gib:.1f} of {total / gib:.1f} GiB)"
    )
    return min(wanted, share)


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
